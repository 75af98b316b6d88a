"""Tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anyaccel.model.device import Device
from anyaccel.text import printable

_GIB = 1 << 30


def html_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table of texts in HTML; whatever they hold, they are shown as text."""
    from html import escape

    def row(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(printable(cell))}</{tag}>' for cell in cells)}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f"<table><caption>{escape(printable(caption))}</caption>{row('th', columns)}{body}</table>"


def device_table(caption: str, devices: Iterable[Device]) -> str:
    """Write a table of devices in HTML."""
    rows = [
        (
            device.name,
            device.type,
            "-" if device.memory_bytes is None else f"{device.memory_bytes / _GIB:.1f} GiB",
            device.health.value,
            device.id,
        )
        for device in devices
    ]
    return html_table(caption, ("device", "type", "memory", "health", "id"), rows)
