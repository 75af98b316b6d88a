"""Write what docs/reference/vendors.md says of vendors' own software, from tests/software/results.json.

That is the column "vendor's own software", and the table of what each software was asked.
The short table of the README, which lists vendors by state, is written from that page.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "software" / "results.json"
PAGE = ROOT / "docs" / "reference" / "vendors.md"
README = ROOT / "README.md"
COLUMN = "vendor's own software"
FAKES = "fakes"
BEGIN, END = "<!-- begin: software -->", "<!-- end: software -->"
STATES = {
    True: "compared with the vendor's own software",
    False: "recordings replayed, the vendor's software replaced by fakes",
}
ROW = re.compile(r"\| \[(?P<name>.*)\]\(\.\./\.\./plugins/(?P<vendor>\w+)/README\.md\) \|")


def write_column(page: str, results: list[dict[str, object]]) -> str:
    """Return the page with the column made anew; a vendor without a result has fakes in its tests."""
    lines = page.splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if line.startswith("| vendor |"))
    column = [cell.strip() for cell in lines[at].split("|")].index(COLUMN)
    for number, line in enumerate(lines):
        if (match := ROW.match(line)) is not None:
            cells = line.split("|")
            cells[column] = f" {describe(match['vendor'], results)} "
            lines[number] = "|".join(cells)
    return "".join(lines)


def describe(vendor: str, results: list[dict[str, object]]) -> str:
    """Name the software of a vendor with versions and, in brackets, how many of the compared cases agree.

    Programs of others that read the vendor's files and tools follow; they do not replace the vendor's own software.
    """
    rows = [row for row in results if row["vendor"] == vendor]
    own, others = ([row for row in rows if row.get("own", True) is said] for said in (True, False))
    text = ", ".join(map(_describe_row, own)) or FAKES
    return f"{text}; of others: {', '.join(map(_describe_row, others))}" if others else text


def _describe_row(row: dict[str, object]) -> str:
    return f"{row['software']} {row['version']} ({row['agree']} of {row['compared']})"


def write_questions(page: str, results: list[dict[str, object]]) -> str:
    """Return the page with the table of all software made anew: what each was asked, and how many cases agree."""
    names = {match["vendor"]: match["name"] for line in page.splitlines() if (match := ROW.match(line)) is not None}
    rows = sorted(results, key=lambda row: (not row.get("own", True), names[str(row["vendor"])].lower()))
    table = "".join(
        f"| {names[str(row['vendor'])]} | {row['software']} {row['version']}"
        f"{'' if row.get('own', True) else ' (of others)'} | {row['asked']}"
        f" | {row['compared']} {row['cases']} | {row['agree']} |\n"
        for row in rows
    )
    begin, end = BEGIN + "\n", "\n" + END
    before, _, rest = page.partition(begin)
    head = "\n| vendor | software | asked | compared | agree |\n| --- | --- | --- | --- | --- |\n"
    return before + begin + head + table + end + rest.partition(end)[2]


def write_states(readme: str, page: str) -> str:
    """Return the README with the vendors of a page listed by state."""
    by_state: dict[bool, list[str]] = {True: [], False: []}
    for line in page.splitlines():
        if (match := ROW.match(line)) is not None:
            by_state[f"| {FAKES}" not in line].append(match["name"])
    for state, text in STATES.items():
        row = f"| {text} | {', '.join(by_state[state])} |"
        readme = re.sub(rf"^\| {re.escape(text)} \|.*$", row, readme, flags=re.MULTILINE)
    return readme


def main() -> None:
    """Write both pages, or with ``--check`` fail if one is not as it would be written."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = write_questions(write_column(PAGE.read_text(encoding="utf-8"), results), results)
    readme = write_states(README.read_text(encoding="utf-8"), page)
    for path, text in ((PAGE, page), (README, readme)):
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not as {Path(__file__).name} would write it: run it")


if __name__ == "__main__":
    main()
