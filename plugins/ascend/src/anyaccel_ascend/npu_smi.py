"""Run npu-smi and parse its output.

The formats follow its open source (CANN driver, npucli/src/npu_info_print.c). Columns differ between generations and
widths between releases, so the meaning of a column always comes from the header above.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from anyaccel.kit import Fault, FaultError, Measures, Tool
from anyaccel.plugin import CommandResult, DeviceProcess, ProbeContext

from anyaccel_ascend.chips import CATALOG

PATH = "/usr/local/bin/npu-smi"
TOOL = Tool(
    "npu-smi",
    PATH,  # for users whose PATH lacks the directory
    "/usr/local/sbin/npu-smi",
    package="the Ascend driver",
    hung="look in 'dmesg' for a card that is resetting or lost, then restart the driver",
)
NO_CARD = "There is no NPU card on this server"
INCOMPLETE = "The driver package may not be completely installed"
INVALID_CELSIUS = 0x7FFD
"""Temperatures from here up are error codes of the sensor."""
_LABEL = re.compile(r"NPU ID|NPU Util\(%\)|Process id in container|Process \S+|\S+")
_VALUE = re.compile(r"(?:\d+|NA)\s*/\s*(?:\d+|NA)|\S+")
_BUS_ID = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]|NA")
_CHIP = re.compile(r"(NPU|Phy-ID)\d+")


class Mapped(NamedTuple):
    """A chip in ``npu-smi info -m``."""

    card: int  # its number in npu-smi, which may have holes and differs between host and container
    chip: int  # its number on the card
    logic_id: int  # the runtime's number
    phy_id: int | None  # number in /dev/davinci<N>; None where the release does not print it
    name: str


class Shown(NamedTuple):
    """A chip in the table of ``npu-smi info``; unknown values are None."""

    name: str
    health: str
    bus_id: str | None
    memory_bytes: int | None
    measures: Measures
    fault: Fault | None


Place = tuple[object, object]
"""Number of a card, and of a chip on it."""


class Table(NamedTuple):
    """The contents of ``npu-smi info``."""

    chips: Mapping[Place, Shown]  # those that could be read
    version: str  # of the driver
    processes: Mapping[Place, Sequence[DeviceProcess]] | None  # None when the table has no such part
    partial: bool  # some chips could not be read
    incomplete: bool  # the tool warns of an incomplete driver package


def ask(ctx: ProbeContext, marker: str, *arguments: str) -> CommandResult | None:
    """Run npu-smi.

    Args:
        ctx: The machine.
        marker: Text in every valid answer.
        arguments: Arguments of npu-smi.

    Returns:
        The answer; None if npu-smi is not installed.

    Raises:
        FaultError: npu-smi hangs, cannot be run, or reports an error.
        ValueError: The output is not an answer of npu-smi.
    """
    result = TOOL.run(ctx, *arguments)
    if result is None or marker in result.stdout or NO_CARD in result.stdout:
        return result
    command, text = " ".join((TOOL.name, *arguments)), f"{result.stdout}\n{result.stderr}"
    causes = CATALOG.faults("causes")
    codes = re.findall(r"ret(?:urn code)? is (-\d+)", text)
    # An exit status has 8 bits: -8005 arrives as 187.
    codes += [code for code in causes if result.returncode == int(code) % 256]
    said = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")[:160]
    if codes:
        cause = next((causes[code] for code in codes if code in causes), Fault(f"it said {said!r}", "see dmesg"))
        raise FaultError(f"'{command}' failed with {codes[0]}: {cause.reason}", cause.remedy)
    if result.returncode:
        reason = f"'{command}' ended with status {result.returncode} and said {said!r}"
        raise FaultError(reason, "run it by hand, and see dmesg")
    raise ValueError(
        f"'{command}' must print {marker!r} (got {said!r}); check which program that is, or reinstall the Ascend driver"
    )


def parse_mapping(text: str) -> tuple[list[Mapped], int]:
    """Parse ``npu-smi info -m``. Rows of the board's controllers are left out.

    The 950 prints no logic ids: there it is the rank of the physical id, which is the driver's own rule
    (``uda_init_ns_node_dev`` in the CANN driver's source).

    Returns:
        The chips by logic id, and the number of unavailable cards, for which the 950 prints -1.

    Raises:
        ValueError: A row does not fit its header, or two chips have the same number.
    """
    labels: list[str] = []
    rows: list[Mapped] = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith("NPU ID"):
            labels = re.split(r"\s{2,}", line)
        elif labels and re.match(r"-?\d+(\s|$)", line):
            words = dict(zip(labels, line.split(None, len(labels) - 1), strict=False))
            name = words.get("Chip Name", "").strip()
            # The management controller of a board is listed like a chip.
            if words.get("Chip Logic ID") == "-" or name in ("Mcu", "3559"):
                continue
            try:
                ids = {label: int(words[label]) for label in {"Chip ID", *labels} - {"Chip Name"}}
            except (KeyError, ValueError):
                raise _row_error("info -m", line, "have a number in each column before the name") from None
            rows.append(
                Mapped(ids["NPU ID"], ids["Chip ID"], ids.get("Chip Logic ID", -1), ids.get("Chip Phy-ID"), name)
            )
    cards = sorted((row for row in rows if row.card >= 0), key=lambda row: (row.logic_id, row.phy_id or 0, row[:2]))
    found: dict[int, Mapped] = {}
    for row in cards:
        chip = row if row.logic_id >= 0 else row._replace(logic_id=len(found))
        other = found.setdefault(chip.logic_id, chip)
        # If a container has one die of an A3 package, npu-smi shows the die twice.
        if other is not chip and (chip.phy_id is None or (other.card, other.phy_id) != (chip.card, chip.phy_id)):
            raise ValueError(
                f"'npu-smi info -m' must give each chip a number of its own (got {chip.logic_id} for chip {other.chip}"
                f" of card {other.card} and chip {chip.chip} of card {chip.card}); restart the driver"
            )
    return list(found.values()), len(rows) - len(cards)


def _row_error(command: str, row: str, rule: str) -> ValueError:
    return ValueError(f"a row of 'npu-smi {command}' must {rule} (got {row!r}); report this output to anyaccel-ascend")


def parse_topology(text: str) -> dict[str, dict[str, int]]:
    """Parse the matrix of ``npu-smi info -t topo``: strengths between ``NPU0`` or ``Phy-ID0`` and each other NPU."""
    rows = [words for line in text.splitlines() if (words := line.split()) and _CHIP.fullmatch(words[0])]
    if not rows:
        return {}
    columns, links = [word for word in rows[0] if _CHIP.fullmatch(word)], CATALOG.data["links"]
    return {
        words[0]: {other: links[kind] for other, kind in zip(columns, words[1:], strict=False) if kind in links}
        for words in rows[1:]
    }


def parse_vnpus(text: str) -> dict[int, str]:
    """Parse ``npu-smi info -t info-vnpu``: the template of each vNPU, by its number."""
    return {int(row[0]): row[-1] for row in _rows(text) if len(row) == 5 and row[0].isdecimal()}  # noqa: PLR2004


def _rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of a table's rows."""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def parse_table(text: str) -> Table:
    """Parse the table of ``npu-smi info``: two lines per chip, under two lines of headers.

    Raises:
        ValueError: A row does not fit its header.
    """
    upper: list[list[str]] = []
    lower: list[list[str]] = []
    first: Mapping[str, str] | None = None
    chips: dict[Place, Shown] = {}
    processes: dict[Place, list[DeviceProcess]] | None = None
    partial = False
    for cells in _rows(text):
        labels = [_LABEL.findall(cell) for cell in cells]
        # A table may have several blocks, each with its own headers.
        if "Health" in cells:
            upper, lower = labels, []
        elif "Bus-Id" in cells:
            lower = labels
        elif "Process id" in cells:
            processes = {}
        elif processes is not None:
            _process(cells, processes)
        elif lower and len(cells) > 1:
            where = lower.index(["Bus-Id"])
            if where >= len(cells) or not _BUS_ID.fullmatch(cells[where]):
                partial |= first is not None  # a chip that lacks its other half is left out
                first = _values(upper, cells)
            elif first is None:
                partial = True
            else:
                key, chip = _chip(first, _values(lower, cells), " | ".join(cells))
                chips[key] = chip
                first = None
    version = re.search(r"Version:\s*(\S+)", text)
    partial |= first is not None
    return Table(chips, version[1] if version else "", processes, partial, INCOMPLETE in text)


def _process(cells: Sequence[str], found: dict[Place, list[DeviceProcess]]) -> None:
    if len(cells) < 4:  # noqa: PLR2004 - "No running processes found in NPU 0"
        return
    where = [int(word) for word in cells[0].split() if word.isdecimal()]
    if not where or not cells[1].isdecimal():
        raise _row_error("info", " | ".join(cells), "name an NPU and the id of a process")
    memory = int(cells[3]) << 20 if cells[3].isdecimal() else None
    held = found.setdefault((where[0], where[1] if len(where) > 1 else 0), [])
    held.append(DeviceProcess(pid=int(cells[1]), memory_bytes=memory))


def _values(header: Sequence[Sequence[str]], cells: Sequence[str]) -> dict[str, str]:
    """Return the values of a row, by the labels of the header."""
    if len(cells) != len(header):
        raise _row_error("info", " | ".join(cells), f"have {len(header)} columns")
    values: dict[str, str] = {}
    for labels, cell in zip(header, cells, strict=True):
        words = _VALUE.findall(cell)
        # A name may contain blanks, so it takes the rest of the cell.
        if labels[-1:] == ["Name"]:
            words = [*words[: len(labels) - 1], " ".join(words[len(labels) - 1 :])]
        # An empty cell: the driver could not ask the chip.
        if labels == ["Health"] and not words:
            words = ["UNKNOWN"]
        usages = [word for label, word in zip(labels, words, strict=False) if "Usage(" in label]
        if len(words) != len(labels) or any("/" not in word and word not in ("NA", "-") for word in usages):
            raise _row_error("info", " | ".join(cells), f"have one value for each of {', '.join(labels)}")
        values.update(zip(labels, words, strict=True))
    return values


def _chip(upper: Mapping[str, str], lower: Mapping[str, str], row: str) -> tuple[tuple[int, int], Shown]:
    card, chip = upper.get("NPU", upper.get("NPU ID", "")), lower.get("Chip", "0")
    health, bus_id = upper["Health"], lower["Bus-Id"]
    if not (card.isdecimal() and chip.isdecimal()):
        raise _row_error("info", row, "name its NPU and its chip with numbers")
    used, _, total = map(_number, lower.get("HBM-Usage(MB)", "").partition("/"))
    if not total:  # parts with DDR have no HBM, and parts with HBM show 0 / 0 for DDR
        used, _, total = map(_number, lower.get("Memory-Usage(MB)", "").partition("/"))
    busy, celsius = _number(lower.get("AICore(%)", lower.get("NPU Util(%)"))), _number(upper.get("Temp(C)"))
    reason = CATALOG.data["health"].get(health, f"npu-smi reports the health {health!r}")
    return (int(card), int(chip)), Shown(
        name=upper["Name"],
        health=health,
        bus_id=None if bus_id == "NA" else bus_id.lower(),
        memory_bytes=int(total) << 20 if total else None,
        measures={
            "memory_used_bytes": int(used) << 20 if used is not None and total else None,
            "utilization": busy / 100 if busy is not None and 0 <= busy <= 100 else None,  # noqa: PLR2004 - percent
            "temperature_celsius": celsius if celsius is not None and celsius < INVALID_CELSIUS else None,
            "power_watts": _number(upper.get("Power(W)")),
        },
        fault=Fault(reason, f"see 'npu-smi info -t health -i {card}' and reset the card") if reason else None,
    )


def _number(text: str | None) -> float | None:
    """Convert a number; None for "NA" or "-", a value that the part does not measure."""
    return float(text) if text and re.fullmatch(r"\s*-?\d+(\.\d+)?\s*", text) else None
