"""What commands print: data on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from anyaccel.errors import AnyaccelError, PlacementError

GIB = 1 << 30


def print_json(schema: str, content: Mapping[str, Any]) -> None:
    """Print one JSON document, with its schema's name and version, and the time."""
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    print(json.dumps({"schema": f"anyaccel.{schema}", "time": now, **content}, indent=2))


def say(message: str) -> None:
    """Tell people something, on standard error."""
    print(f"anyaccel: {message}", file=sys.stderr)


def report_error(error: AnyaccelError, *, as_json: bool) -> None:
    """Report an error: one message for people, or one JSON document."""
    if as_json:
        content: dict[str, Any] = {"code": error.code, "message": str(error), "hint": error.hint or None}
        if isinstance(error, PlacementError):
            content |= error.verdict.to_json()
        print(json.dumps({"error": content}, indent=2))
        return
    say(str(error))
    for line in error.hint.splitlines():
        say(line)


def memory(size: int | None) -> str:
    """Write an amount of memory for people; unknown is ``-``."""
    return "-" if size is None else f"{size / GIB:.1f} GiB"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, one line per row, nothing cut off."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 500, soft_wrap=False, highlight=False)
    table = Table(box=None if not console.is_terminal else SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
