"""Print the command of README.md behind a marker: <!-- command: NAME -->."""

import re
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def readme_command(name: str) -> str:
    """Find the command behind a marker.

    Raises:
        SystemExit: When the README has no such command, or two.
    """
    pattern = rf"<!-- command: {re.escape(name)} -->\n```sh\n(.*?)\n```"
    found: list[str] = re.findall(pattern, README.read_text(encoding="utf-8"), re.DOTALL)
    if len(found) != 1:
        raise SystemExit(f"README.md must have one command marked {name!r} (it has {len(found)})")
    return found[0]


if __name__ == "__main__":
    print(readme_command(sys.argv[1]))
