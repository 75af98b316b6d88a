"""Write the column "vendor's own software" of docs/reference/vendors.md from tests/software/results.json."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "software" / "results.json"
PAGE = ROOT / "docs" / "reference" / "vendors.md"
COLUMN = "vendor's own software"
ROW = re.compile(r"\| \[.*\]\(\.\./\.\./plugins/(\w+)/README\.md\) \|")


def write_column(page: str, results: list[dict[str, object]]) -> str:
    """Return the page with the column made anew; a vendor without a result has fakes in its tests."""
    lines = page.splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if line.startswith("| vendor |"))
    column = [cell.strip() for cell in lines[at].split("|")].index(COLUMN)
    for number, line in enumerate(lines):
        if (match := ROW.match(line)) is not None:
            cells = line.split("|")
            cells[column] = f" {describe(match[1], results)} "
            lines[number] = "|".join(cells)
    return "".join(lines)


def describe(vendor: str, results: list[dict[str, object]]) -> str:
    """Name the software of a vendor with versions and, in brackets, how many of the compared cases agree."""
    rows = [row for row in results if row["vendor"] == vendor]
    return (
        ", ".join(f"{row['software']} {row['version']} ({row['agree']} of {row['compared']})" for row in rows)
        or "fakes"
    )


def main() -> None:
    """Write the page, or with ``--check`` fail if it is not as it would be written."""
    page = PAGE.read_text(encoding="utf-8")
    written = write_column(page, json.loads(RESULTS.read_text(encoding="utf-8")))
    if "--check" in sys.argv:
        sys.exit(0 if page == written else f"{PAGE} is not as {Path(__file__).name} would write it: run it")
    PAGE.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
