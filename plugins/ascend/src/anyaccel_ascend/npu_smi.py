"""npu-smi: asking it, and reading its lists; :mod:`anyaccel_ascend.npu_table` reads its table.

The formats follow its open source (CANN driver, npucli/src/npu_info_print.c). Columns differ between generations and
widths between releases, so the meaning of a column is always taken from the header above it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from anyaccel.plugin import CommandResult, CommandTimeoutError, ProbeContext

from anyaccel_ascend.npu_table import row_error

TOOLS = ("npu-smi", "/usr/local/bin/npu-smi", "/usr/local/sbin/npu-smi")
"""Where it is installed, for users whose PATH lacks the directory."""
NO_CARD = "There is no NPU card on this server"

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
                raise row_error("info -m", line, f"have a number in each of {', '.join(labels[:-1])}")
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
        raise row_error("info -m", line, "have a number in each column before the name")
    return int(value)


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
