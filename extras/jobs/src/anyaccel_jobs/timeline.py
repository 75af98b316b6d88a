"""A chart of leases over time, as SVG."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from anyaccel.ledger import journal
from anyaccel.model import UNITS_PER_DEVICE
from anyaccel.text import printable

WIDTH, LEFT, ROW, TOP = 960, 140, 26, 40
_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
"""Colours that most people with colour blindness can tell apart."""
_MARKS = 6
_BUSY, _IDLE = 0.85, 0.3
"""Opacity of busy and of idle leases."""


def picture(entries: Sequence[journal.JournalEntry], since: float, until: float) -> str:
    """Draw a row for each device and a bar for each lease, in a colour for each user.

    Args:
        entries: Entries of the journal.
        since: Left end of the chart, in seconds since 1970.
        until: Right end.
    """
    devices = sorted({used.device for entry in entries for used in entry.devices}, key=_natural)
    users = sorted({entry.user for entry in entries})
    colors = {user: _COLORS[number % len(_COLORS)] for number, user in enumerate(users)}
    rows = {device: TOP + number * ROW for number, device in enumerate(devices)}
    bottom = TOP + max(1, len(devices)) * ROW
    height = bottom + 30 + ROW
    scale = (WIDTH - LEFT - 20) / max(1.0, until - since)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
            f' viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">'
        ),
        f"<title>{_text(f'Devices held from {_moment(since)} to {_moment(until)}')}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number in range(_MARKS + 1):
        at = LEFT + (WIDTH - LEFT - 20) * number / _MARKS
        moment = _moment(since + (until - since) * number / _MARKS)
        parts += [
            f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom}" stroke="#dddddd"/>',
            f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#555555">{_text(moment)}</text>',
        ]
    parts += [
        f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end">{_text(device)}</text>' for device, y in rows.items()
    ]
    if not devices:
        parts.append(f'<text x="{LEFT}" y="{TOP + 17}">Nothing was held.</text>')
    for entry in entries:
        for used in entry.devices:
            # At least a pixel: a lease of a second would be invisible in a week.
            x, width = LEFT + (entry.began - since) * scale, max(1.0, (entry.ended - entry.began) * scale)
            high = max(3.0, (ROW - 6) * used.units / UNITS_PER_DEVICE)
            opacity = _IDLE if used.was_idle else _BUSY
            fared = "" if used.utilization is None else f", device {used.utilization:.0%} busy"
            what = f"{entry.user}: {entry.note or entry.program or entry.request}, {entry.held:.0f} s{fared}"
            parts.append(
                f'<rect x="{x:.1f}" y="{rows[used.device] + ROW - 3 - high:.1f}" width="{width:.1f}"'
                f' height="{high:.1f}" rx="2" fill="{colors[entry.user]}" fill-opacity="{opacity}">'
                f"<title>{_text(what)}</title></rect>"
            )
    for number, (user, color) in enumerate(colors.items()):
        x = LEFT + number * 120
        parts += [
            f'<rect x="{x}" y="12" width="12" height="12" fill="{color}"/>',
            f'<text x="{x + 18}" y="22">{_text(user)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _text(text: str) -> str:
    return escape(printable(text))


def _moment(seconds: float) -> str:
    return time.strftime("%m-%d %H:%M", time.localtime(seconds))


def _natural(name: str) -> tuple[str, int, str]:
    """Return a sort key by which ``acme/9`` precedes ``acme/10``."""
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or 0), name
