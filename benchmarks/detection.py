"""What it costs to detect recorded machines: all but the vendor library's own time, of which a replay takes none."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from anyaccel import detect
from measure import Row

BUDGET_SECONDS = 0.1
PLUGINS = Path(__file__).parent.parent / "plugins"
MACHINES = ("nvidia/recordings/h100-8gpu-nvswitch", "amd/recordings/mi300x-8gpu")
ROUNDS = 9


def rows() -> list[Row]:
    """Measure detection of machines with eight devices, in a process that has detected before."""
    found = []
    for name in MACHINES:
        path = PLUGINS / name
        if not path.is_dir():
            print(f"no recording {path}: not measured", file=sys.stderr)
            continue
        times = sorted(_once(str(path)) for _ in range(ROUNDS))
        seconds = times[len(times) // 2]
        found.append(
            Row(
                what=f"detect {name}",
                seconds=seconds,
                budget=f"at most {BUDGET_SECONDS * 1000:g} ms",
                kept=seconds <= BUDGET_SECONDS,
            )
        )
    return found


def _once(path: str) -> float:
    start = time.perf_counter()
    inventory = detect(path)
    if not inventory.devices:
        raise SystemExit(f"{path}: nothing was detected")
    return time.perf_counter() - start
