"""npu-smi: asking it, and reading what it prints.

The formats follow its open source (CANN driver, npucli/src/npu_info_print.c). Columns differ between generations and
widths between releases, so the meaning of a column is always taken from the header above it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anyaccel.plugin import CommandResult, CommandTimeoutError, DeviceProcess, ProbeContext

TOOLS = ("npu-smi", "/usr/local/bin/npu-smi", "/usr/local/sbin/npu-smi")
"""Where it is installed, for users whose PATH lacks the directory."""
NO_CARD = "There is no NPU card on this server"
INCOMPLETE = "The driver package may not be completely installed"
MIB = 1 << 20
INVALID_CELSIUS = 0x7FFD
"""From here up a temperature is an error code of the sensor."""

CAUSES = {
    -8002: "this user may not ask the driver; add the user to the group HwHiAiUser",
    -8005: "the driver did not initialize; see dmesg, and reload or reinstall the Ascend driver",
    -8012: "the NPUs are not ready, as during a reset; try again in a minute",
    -8017: "the firmware is being upgraded; try again when that has ended",
    -8020: "the NPUs are occupied by another container or another process that asks the driver; stop it, or mount other"
    " NPUs into this container",
    -9005: "the driver does not answer; see dmesg, and reload or reinstall the Ascend driver",
    -9013: "the driver does not allow this inside a container; ask on the host",
}
"""Return codes of the driver's management interface (DCMI) and of npu-smi; the exit status is the code modulo 256."""
FAULTS = {
    "Alarm": "npu-smi reports a major fault (Alarm)",
    "Critical": "npu-smi reports a critical fault",
    "UNKNOWN": "npu-smi cannot read its health",
}


class ToolFailureError(Exception):
    """Raised when npu-smi is there and says that it cannot tell; the text is the reason, with the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedChip:
    """One row of ``npu-smi info -m``.

    Attributes:
        card: Number of the card in npu-smi, which may have holes and differs between host and container.
        chip: Number of the chip on its card.
        logic_id: Number that the runtime gives to the chip, or None where the release does not print it.
        phy_id: Number in ``/dev/davinci<N>``, or None likewise.
        name: Name of the chip.
    """

    card: int
    chip: int
    logic_id: int | None
    phy_id: int | None
    name: str


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


def ask(ctx: ProbeContext, marker: str, *arguments: str) -> CommandResult | None:
    """Run npu-smi, with at most half of the time that is left, so that a tool that hangs can still be reported.

    Args:
        ctx: The machine.
        marker: Text that an answer holds.
        arguments: Arguments of npu-smi.

    Returns:
        An answer that can be read; None when there is no such tool.

    Raises:
        ToolFailureError: When it hangs, cannot be run, or says that it cannot tell.
        ValueError: When what it prints is no answer at all.
    """
    command = " ".join(("npu-smi", *arguments))
    for tool in TOOLS:
        try:
            result = ctx.run([tool, *arguments], timeout=ctx.remaining() / 2)
        except CommandTimeoutError:
            raise ToolFailureError(
                f"'{command}' does not answer; a card may be resetting or lost: see dmesg, and restart the driver"
            ) from None
        except OSError as error:
            raise ToolFailureError(f"'{command}' cannot be run ({error.strerror}); see the rights of {tool}") from None
        if result is not None:
            return _checked(result, marker, command)
    return None


def _checked(result: CommandResult, marker: str, command: str) -> CommandResult:
    text = f"{result.stdout}\n{result.stderr}"
    if marker in result.stdout or NO_CARD in result.stdout:
        return result
    codes = [int(code) for code in re.findall(r"ret(?:urn code)? is (-\d+)", text)]
    codes += [code for code in CAUSES if result.returncode == code % 256]
    said = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")[:160]
    if codes:
        cause = next((CAUSES[code] for code in codes if code in CAUSES), f"it said {said!r}; see dmesg")
        raise ToolFailureError(f"'{command}' failed with {codes[0]}: {cause}")
    if result.returncode:
        raise ToolFailureError(
            f"'{command}' ended with status {result.returncode} and said {said!r}; run it by hand, and see dmesg"
        )
    raise ValueError(
        f"'{command}' must print {marker!r} (got {said!r}); check which program that is, or reinstall the Ascend driver"
    )


def parse_mapping(text: str) -> tuple[list[MappedChip], int]:
    """Read ``npu-smi info -m``. Rows of the board's controllers are left out.

    Returns:
        The chips, and how many cards are there and not available, for which the 950 prints the number -1.

    Raises:
        ValueError: When a row does not fit its header.
    """
    labels: list[str] = []
    found = []
    unavailable = 0
    for line in text.splitlines():
        words = line.split()
        if line.strip().startswith("NPU ID"):
            labels = re.split(r"\s{2,}", line.strip())
        elif labels and words and re.fullmatch(r"-?\d+", words[0]):
            values = dict(zip(labels, line.split(None, len(labels) - 1), strict=False))
            if values.get("Chip Logic ID") == "-" or values.get("Chip Name") in ("Mcu", "3559"):
                continue
            number = {label: _number(values.get(label), line) for label in labels if label != "Chip Name"}
            if number["NPU ID"] is None or number.get("Chip ID") is None:
                raise _row_error("info -m", line, f"have a number in each of {', '.join(labels[:-1])}")
            if number["NPU ID"] < 0:
                unavailable += 1
            else:
                found.append(
                    MappedChip(
                        card=number["NPU ID"],
                        chip=number["Chip ID"] or 0,
                        logic_id=number.get("Chip Logic ID"),
                        phy_id=number.get("Chip Phy-ID"),
                        name=values.get("Chip Name", "").strip(),
                    )
                )
    return _distinct(found), unavailable


def _distinct(chips: Sequence[MappedChip]) -> list[MappedChip]:
    """Drop the second die of an A3 package of which a container has but one: npu-smi shows that one twice."""
    kept: dict[int | tuple[int, int], MappedChip] = {}
    for chip in chips:
        key = chip.logic_id if chip.logic_id is not None else (chip.card, chip.chip)
        other = kept.setdefault(key, chip)
        if other is not chip and (chip.phy_id is None or (other.card, other.phy_id) != (chip.card, chip.phy_id)):
            raise ValueError(
                f"'npu-smi info -m' must give each chip a number of its own (got {key} for chip {other.chip} of card"
                f" {other.card} and chip {chip.chip} of card {chip.card}); restart the driver"
            )
    return list(kept.values())


def _number(value: str | None, line: str) -> int | None:
    if value is None or not re.fullmatch(r"-?\d+", value.strip()):
        raise _row_error("info -m", line, "have a number in each column before the name")
    return int(value)


def _row_error(command: str, row: str, rule: str) -> ValueError:
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
            raise _row_error("info", " | ".join(cells), "name an NPU and the id of a process")
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
            raise _row_error("info", " | ".join(cells), f"have one value for each of {', '.join(labels)}")
        values.update(zip(labels, words, strict=True))
    if len(cells) != len(header):
        raise _row_error("info", " | ".join(cells), f"have {len(header)} columns")
    return values


def _chip(upper: Mapping[str, str], lower: Mapping[str, str], row: str) -> ShownChip:
    card = upper.get("NPU", upper.get("NPU ID", ""))
    chip, phy_id = lower.get("Chip", "0"), lower.get("Phy-ID")
    if not card.isdigit() or not chip.isdigit() or not (phy_id is None or phy_id.isdigit()):
        raise _row_error("info", row, "name its NPU and its chip with numbers")
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


def parse_topology(text: str) -> dict[str, dict[str, str]]:
    """Read the matrix of ``npu-smi info -t topo``: ``NPU0`` or ``Phy-ID0`` to the connection with each other one."""
    rows = [line.split() for line in text.splitlines()]
    header = next((words for words in rows if len(words) > 1 and all(map(_is_chip, words[:2]))), None)
    header = header or next((words for words in rows if words and _is_chip(words[0])), [])
    columns = [word for word in header if _is_chip(word)]
    matrix = {}
    for words in rows:
        if words and words is not header and _is_chip(words[0]):
            matrix[words[0]] = dict(zip(columns, words[1:], strict=False))
    return matrix


def _is_chip(word: str) -> bool:
    return re.fullmatch(r"(NPU|Phy-ID)\d+", word) is not None


def parse_vnpus(text: str) -> dict[int, str]:
    """Read ``npu-smi info -t info-vnpu``: the template of each vNPU, by its number."""
    cells = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines())
    return {int(row[0]): row[-1] for row in cells if len(row) == 5 and row[0].isdigit()}  # noqa: PLR2004 - its columns
