"""The table of ``npu-smi info``: one chip in two lines, under two lines of headers that differ between generations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anyaccel.plugin import DeviceProcess

INCOMPLETE = "The driver package may not be completely installed"
MIB = 1 << 20
INVALID_CELSIUS = 0x7FFD
"""From here up a temperature is an error code of the sensor."""
FAULTS = {
    "Alarm": "npu-smi reports a major fault (Alarm)",
    "Critical": "npu-smi reports a critical fault",
    "UNKNOWN": "npu-smi cannot read its health",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownChip:
    """One chip in the table of ``npu-smi info``; None is what npu-smi cannot tell."""

    card: int
    chip: int
    name: str
    health: str
    bus_id: str | None
    phy_id: int | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilization: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None

    @property
    def fault(self) -> str:
        """Why the chip cannot be used; empty when it can, as with a minor fault (Warning)."""
        if self.health in ("OK", "Warning"):
            return ""
        what = FAULTS.get(self.health, f"npu-smi reports the health {self.health!r}")
        return f"{what}; see 'npu-smi info -t health -i {self.card}' and reset the card"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What ``npu-smi info`` shows.

    Attributes:
        chips: The chips that could be read.
        version: Version of the driver.
        processes: Processes by card and chip; None when the table has no such part.
        partial: Whether some chips could not be read.
        warning: What the tool warns of, or empty.
    """

    chips: tuple[ShownChip, ...]
    version: str = ""
    processes: Mapping[tuple[int, int], tuple[DeviceProcess, ...]] | None = None
    partial: bool = False
    warning: str = ""


def row_error(command: str, row: str, rule: str) -> ValueError:
    """The error that says which row of which command breaks which rule."""
    return ValueError(
        f"a row of 'npu-smi {command}' must {rule} (got {row.strip()!r}); report this output to anyaccel-ascend"
    )


_LABEL = re.compile(r"NPU ID|NPU Util\(%\)|Process id in container|Process \S+|\S+")
_VALUE = re.compile(r"(?:\d+|NA)\s*/\s*(?:\d+|NA)|\S+")
_BUS_ID = re.compile(r"([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])|NA")


@dataclass(slots=True)
class _Reader:
    """State while a table is read, line by line."""

    headers: list[list[list[str]]] = field(default_factory=list)
    first: dict[str, str] | None = None
    chips: list[ShownChip] = field(default_factory=list)
    processes: dict[tuple[int, int], list[DeviceProcess]] | None = None
    partial: bool = False

    def line(self, cells: Sequence[str]) -> None:
        labels = [_LABEL.findall(cell) for cell in cells]
        if labels[0][:1] in (["NPU"], ["NPU ID"]) and "Health" in cells:
            self.headers = [labels]
        elif len(self.headers) == 1 and "Bus-Id" in cells:
            self.headers.append(labels)
        elif "Process id" in cells:
            self.headers, self.processes = [labels], {}
        elif self.processes is not None:
            self.process(cells)
        elif len(self.headers) == 2 and len(cells) >= 2:  # noqa: PLR2004 - both halves of a chip's row
            self.half(cells)

    def half(self, cells: Sequence[str]) -> None:
        """Read the upper or the lower half of a chip's row; one that lacks its other half is left out."""
        where = self.headers[1].index(["Bus-Id"])
        if where >= len(cells) or not _BUS_ID.fullmatch(cells[where]):
            self.partial |= self.first is not None
            self.first = _values(self.headers[0], cells)
        elif self.first is None:
            self.partial = True
        else:
            self.chips.append(_chip(self.first, _values(self.headers[1], cells), " | ".join(cells)))
            self.first = None

    def process(self, cells: Sequence[str]) -> None:
        if len(cells) < 3 or self.processes is None:  # noqa: PLR2004 - "No running processes found in NPU 0"
            return
        where = [int(word) for word in cells[0].split() if word.isdigit()]
        memory = cells[3].strip()
        if not where or not cells[1].isdigit():
            raise row_error("info", " | ".join(cells), "name an NPU and the id of a process")
        held = self.processes.setdefault((where[0], where[1] if len(where) > 1 else 0), [])
        held.append(DeviceProcess(pid=int(cells[1]), memory_bytes=int(memory) * MIB if memory.isdigit() else None))


def parse_table(text: str) -> Table:
    """Read the table of ``npu-smi info``.

    Raises:
        ValueError: When a row does not fit its header.
    """
    reader = _Reader()
    for line in text.splitlines():
        if line.lstrip().startswith("|"):
            reader.line([cell.strip() for cell in line.strip().strip("|").split("|")])
    version = re.search(r"Version:\s*(\S+)", text)
    return Table(
        chips=tuple(reader.chips),
        version=version[1] if version else "",
        processes=None if reader.processes is None else {key: tuple(held) for key, held in reader.processes.items()},
        partial=reader.partial or reader.first is not None,
        warning=INCOMPLETE if INCOMPLETE in text else "",
    )


def _values(header: Sequence[Sequence[str]], cells: Sequence[str]) -> dict[str, str]:
    """The values of a row, by the labels of the header."""
    values: dict[str, str] = {}
    for labels, cell in zip(header, cells, strict=False):
        words = _VALUE.findall(cell)
        if labels[-1:] == ["Name"]:
            words = [*words[: len(labels) - 1], " ".join(words[len(labels) - 1 :])]
        if labels == ["Health"] and not words:
            words = ["UNKNOWN"]
        usages = [word for label, word in zip(labels, words, strict=False) if "Usage(" in label]
        if len(words) != len(labels) or any("/" not in word and word not in ("NA", "-") for word in usages):
            raise row_error("info", " | ".join(cells), f"have one value for each of {', '.join(labels)}")
        values.update(zip(labels, words, strict=True))
    if len(cells) != len(header):
        raise row_error("info", " | ".join(cells), f"have {len(header)} columns")
    return values


def _chip(upper: Mapping[str, str], lower: Mapping[str, str], row: str) -> ShownChip:
    card = upper.get("NPU", upper.get("NPU ID", ""))
    chip, phy_id = lower.get("Chip", "0"), lower.get("Phy-ID")
    if not card.isdigit() or not chip.isdigit() or not (phy_id is None or phy_id.isdigit()):
        raise row_error("info", row, "name its NPU and its chip with numbers")
    bus_id = lower["Bus-Id"]
    used, total = _pair(lower.get("HBM-Usage(MB)"))
    if not total:  # parts with DDR have no HBM, and parts with HBM show 0 / 0 for DDR
        used, total = _pair(lower.get("Memory-Usage(MB)"))
    busy = _float(lower.get("AICore(%)", lower.get("NPU Util(%)")))
    celsius = _float(upper.get("Temp(C)"))
    return ShownChip(
        card=int(card),
        chip=int(chip),
        name=upper["Name"],
        health=upper["Health"],
        bus_id=None if bus_id == "NA" else bus_id.lower(),
        phy_id=int(phy_id) if phy_id is not None else None,
        memory_bytes=total * MIB if total else None,
        memory_used_bytes=used * MIB if used is not None and total else None,
        utilization=busy / 100 if busy is not None and 0 <= busy <= 100 else None,  # noqa: PLR2004 - percent
        temperature_celsius=celsius if celsius is not None and celsius < INVALID_CELSIUS else None,
        power_watts=_float(upper.get("Power(W)")),
    )


def _pair(text: str | None) -> tuple[int | None, int | None]:
    used, _, total = (text or "").partition("/")
    return (
        int(used) if used.strip().isdigit() else None,
        int(total) if total.strip().isdigit() else None,
    )


def _float(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:  # "NA" and "-" stand for what the part does not measure
        return None
