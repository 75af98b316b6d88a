"""Bodies of files in the state directory: JSON from other processes, which may have any content."""

from __future__ import annotations

import json

from anyaccel.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_TEXT_LIMIT = 250  # so that all of it stays below the limit of a body


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object from another process; empty for anything else."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_number(value: object) -> float | None:
    """Convert a number of seconds, or the like, from another process; None unless a number from 0 to below 2**40."""
    return float(value) if type(value) in (int, float) and 0 <= value < 1 << 40 else None  # type: ignore[operator, arg-type] # pyright: ignore[reportOperatorIssue, reportArgumentType]


def clean(value: object) -> str:
    """Cut a foreign text to 250 characters, and make the text one printable line; empty for anything but a text."""
    return printable(value[:_TEXT_LIMIT]) if isinstance(value, str) else ""


def with_entry(body: bytes, name: str, value: Any) -> bytes:
    """Return the body of a lease with an entry added or replaced, as JSON of any length.

    Args:
        body: The current content: any carrier of the lease may have written it, so anything but a JSON object is
            dropped.
        name: Name of the entry.
        value: The value, which JSON must be able to encode.
    """
    return json.dumps(read_object(body) | {name: value}, ensure_ascii=False).encode(errors="replace")
