"""The vendor's command-line tool, asked for comma-separated values and believed only where it keeps to the form."""

from __future__ import annotations

import re
from collections.abc import Sequence

from anyaccel.plugin import CommandTimeoutError, ProbeContext

ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""A PCI address as sysfs and hl-smi write it."""

IDENTITY = ("bus_id", "index", "module_id", "name", "serial", "uuid", "memory.total")
STATE = ("bus_id", "memory.used", "utilization.aip", "temperature.aip", "power.draw")

_SECONDS = 4.0  # it takes 0.3 to 1 s on a healthy machine
_UNKNOWN = {"", "n/a", "[n/a]", "na", "not supported", "unknown"}
_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)\s*(?:[A-Za-z%]+)?")

Row = dict[str, str | None]


def query(ctx: ProbeContext, fields: Sequence[str]) -> dict[str, Row] | None:
    """Ask ``hl-smi -Q`` for fields of every device.

    The tool opens control nodes only, so it disturbs no running job.

    Args:
        ctx: The machine.
        fields: Names of fields, ``bus_id`` first.

    Returns:
        Rows by PCI address, None in a row for what the tool does not know; None when there is no tool.

    Raises:
        RuntimeError: When the tool hangs or fails, with one sentence.
        ValueError: When its answer has another form, with one sentence.
    """
    argv = ["hl-smi", "-Q", ",".join(fields), "-f", "csv,noheader,nounits"]
    try:
        # Half of what is left: a tool that hangs must not take the time in which we report what sysfs said.
        result = ctx.run(argv, timeout=min(_SECONDS, ctx.remaining() / 2))
    except CommandTimeoutError as error:
        raise RuntimeError(f"{error}; run 'hl-smi' by hand and look for habanalabs in 'dmesg'") from error
    except OSError as error:
        raise RuntimeError(f"hl-smi cannot be run ({error}); reinstall the habanalabs tools") from error
    if result is None:
        return None
    if result.returncode != 0:
        said = (result.stderr.strip() or result.stdout.strip()).partition("\n")[0][:200] or "without a message"
        raise RuntimeError(
            f"hl-smi failed with exit status {result.returncode} ({said}); check that the habanalabs driver is loaded"
        )
    return parse(result.stdout, fields)


def parse(text: str, fields: Sequence[str]) -> dict[str, Row]:
    """Read what ``hl-smi -Q`` printed, with or without its header; rows come in no guaranteed order.

    Raises:
        ValueError: When a line is no row of these fields, or two rows are of one device.
    """
    rows: dict[str, Row] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if [cell.lower().partition(" ")[0] for cell in cells] == list(fields):
            continue
        address = cells[0].lower()
        if len(cells) != len(fields) or not ADDRESS.fullmatch(address):
            raise ValueError(
                f"hl-smi must answer one line of {len(fields)} values ({', '.join(fields)}) per device"
                f" (got {line[:80]!r}); run 'hl-smi -Q {','.join(fields)} -f csv,noheader,nounits' by hand"
            )
        if address in rows:
            raise ValueError(f"hl-smi must name each device once (got {address} twice); run it again by hand")
        rows[address] = {
            field: None if cell.lower() in _UNKNOWN else cell for field, cell in zip(fields, cells, strict=True)
        }
    return rows


def number(row: Row, field: str) -> float | None:
    """Read a number from a row, with or without its unit; None when the tool does not know it.

    Raises:
        ValueError: When the value is no number.
    """
    text = row[field]
    if text is None:
        return None
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"hl-smi must answer a number for {field} of {row['bus_id']} (got {text!r}); run it by hand")
    return float(match[1])


def whole(row: Row, field: str) -> int | None:
    """Read a whole, non-negative number from a row; None when the tool does not know it.

    Raises:
        ValueError: When the value is another one.
    """
    value = number(row, field)
    if value is None:
        return None
    if value < 0 or value != int(value):
        raise ValueError(f"hl-smi must answer a count for {field} of {row['bus_id']} (got {value:g}); run it by hand")
    return int(value)
