"""Tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anyaccel.model.allocation import Share
from anyaccel.model.device import UNITS_PER_DEVICE, Device
from anyaccel.text import memory, printable


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
        (device.name, device.type, memory(device.memory_bytes), device.health.value, device.id) for device in devices
    ]
    return html_table(caption, ("device", "type", "memory", "health", "id"), rows)


def share_table(caption: str, shares: Iterable[Share]) -> str:
    """Write a table of what is held of devices in HTML."""
    rows = [
        (
            share.device.name,
            share.device.type,
            f"{share.units / UNITS_PER_DEVICE:g}",
            memory(share.device.memory_bytes if share.whole else share.memory_bytes),
            share.enforced_by,
            share.device.id,
        )
        for share in shares
    ]
    return html_table(caption, ("device", "type", "share", "memory", "enforced", "id"), rows)
