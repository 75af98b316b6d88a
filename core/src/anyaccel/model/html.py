"""Tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anyaccel.text import printable


def html_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table; cells are escaped and printable."""
    from html import escape

    def row(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(printable(cell))}</{tag}>' for cell in cells)}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f"<table><caption>{escape(printable(caption))}</caption>{row('th', columns)}{body}</table>"
