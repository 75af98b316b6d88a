"""What it costs to detect recorded machines: all but the vendor library's own time, of which a replay takes none."""

from __future__ import annotations

import sys
from pathlib import Path

from anyaccel import detect
from measure import Row, at_most, median

BUDGET_SECONDS = 0.1
PLUGINS = Path(__file__).parent.parent / "plugins"
MACHINES = ("nvidia/recordings/h100-8gpu-nvswitch", "amd/recordings/mi300x-8gpu")
ROUNDS = 9


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure detection of machines with eight devices, in a process that has detected before."""
    found = []
    for name in MACHINES:
        path = PLUGINS / name
        if not path.is_dir():
            print(f"no recording {path}: not measured", file=sys.stderr)
            continue
        found.append(at_most(f"detect {name}", median(lambda path=str(path): _detect(path), rounds), BUDGET_SECONDS))
    return found


def _detect(path: str) -> None:
    inventory = detect(path)
    if not inventory.devices:
        raise SystemExit(f"{path}: nothing was detected; is the plug-in installed?")
