"""Results as a picture and as a table."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure import duration

WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 760, 170, 90, 16, 30, 66
COLORS = {"anyaccel": "ours", "floor": "floor"}
STYLE = """
 text { font: 12px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600 } .small { fill: #59636e }
 .ours { fill: #0969da } .peer { fill: #afb8c1 } .floor { fill: #d4a72c } .grid { stroke: #d1d9e0 }
 @media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .small { fill: #9198a1 } .ours { fill: #4493f8 } .peer { fill: #656c76 }
  .floor { fill: #bf8700 } .grid { stroke: #3d444d }
 }"""


def draw(results: Mapping[str, Any]) -> str:
    """Bars on a logarithmic scale, one for each who did the same; empty when nothing was compared."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in results["rows"]:
        if row["group"]:
            groups.setdefault(row["group"], []).append(row)
    if not groups:
        return ""
    times = [row["seconds"] for rows in groups.values() for row in rows]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    scale = (WIDTH - LEFT - RIGHT) / (high - low)
    height = TOP + sum(GAP + BAR * len(rows) for rows in groups.values()) + 12
    machine = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f"<style>{STYLE}\n</style>",
        '<text class="title" x="12" y="20">Time per call, logarithmic scale: shorter is better</text>',
        f'<text class="small" x="12" y="38">{_escaped(machine)}</text>',
    ]
    for power in range(low, high + 1):
        x = LEFT + (power - low) * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{height - 8}"/>')
        parts.append(
            f'<text class="small" x="{x:.1f}" y="{TOP - 6}" text-anchor="middle">{duration(10.0**power)}</text>'
        )
    y = TOP
    for group, rows in groups.items():
        y += GAP
        parts.append(f'<text class="title" x="12" y="{y - 8}">{_escaped(group)}</text>')
        for row in sorted(rows, key=lambda row: row["seconds"]):
            length = max(2.0, (math.log10(row["seconds"]) - low) * scale)
            kind = COLORS.get(row["who"], "peer")
            parts.append(f'<text x="{LEFT - 8}" y="{y + 10}" text-anchor="end">{_escaped(row["who"])}</text>')
            parts.append(f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 4}"/>')
            parts.append(f'<text x="{LEFT + length + 6:.1f}" y="{y + 10}">{duration(row["seconds"])}</text>')
            y += BAR
    return "\n".join([*parts, "</svg>", ""])


def table(results: Mapping[str, Any]) -> str:
    """All rows in Markdown."""
    lines = ["| what | median | ratio | to | budget | |", "| --- | ---: | ---: | --- | --- | --- |"]
    for row in results["rows"]:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        verdict = {None: "", True: "kept", False: "**missed**"}[row["kept"]]
        reference = "" if row["reference"] == row["what"] else row["reference"]
        cells = (row["what"], duration(row["seconds"]), ratio, reference, row["budget"], verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def main() -> None:
    """Draw the picture of a file of results, and print its table."""
    parser = argparse.ArgumentParser(description="Draw results again, and print them as a table in Markdown.")
    parser.add_argument("results", type=Path, metavar="results/NAME.json")
    path = parser.parse_args().results
    results = json.loads(path.read_text())
    path.with_suffix(".svg").write_text(draw(results))
    print(table(results))


if __name__ == "__main__":
    main()
