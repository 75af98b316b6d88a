"""What it costs to detect recorded machines, and to ask a vendor's process once it is there.

All but the vendor library's own time is measured, of which a replay takes none. A fresh process starts the vendor's,
one that has detected before finds it running. The memory of the resident processes is printed beside: their
proportional share.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import count
from pathlib import Path

from anyaccel import detect
from anyaccel.model import EnvContext
from anyaccel.vendors.process import close, vendor_process
from measure import Row, at_most, median

FRESH_SECONDS, WARM_SECONDS, CALL_SECONDS = 0.06, 0.03, 0.0002
PLUGINS = Path(__file__).parent.parent / "plugins"
MACHINES = ("nvidia/recordings/h100-8gpu-nvswitch", "amd/recordings/mi300x-8gpu")
ROUNDS, CALLS = 9, 200
FRESH = """
import sys, time
start = time.perf_counter()
from anyaccel import detect
found = detect(sys.argv[1])
print(time.perf_counter() - start if found.devices else "nan")
"""


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure detection of machines with eight devices in a fresh process and in one that has asked before."""
    found = []
    for name in MACHINES:
        path = PLUGINS / name
        if not path.is_dir():
            print(f"no recording {path}: not measured", file=sys.stderr)
            continue
        fresh = sorted(_fresh(str(path)) for _ in range(max(1, rounds)))[max(1, rounds) // 2]
        found.append(at_most(f"detect {name}, fresh process", fresh, FRESH_SECONDS))
        warm = median(lambda path=str(path): _detect(path), rounds)
        found.append(at_most(f"detect {name}, asked before", warm, WARM_SECONDS))
    found += _calls(rounds)
    close()
    return found


def _calls(rounds: int) -> list[Row]:
    """One call of a hook in a vendor's process; and what the resident processes of all vendors weigh."""
    path = PLUGINS / MACHINES[0]
    if not path.is_dir():
        return []
    inventory = detect(str(path), everybody=True)
    devices = inventory.devices[:2]
    vendor = vendor_process(devices[0].vendor)
    numbers = count()

    def ask() -> None:
        # Answers are remembered, so that each question is a new one.
        environ = {"PATH": "/usr/bin", "NUMBER": str(next(numbers))}
        vendor.env(devices, EnvContext(devices=inventory.of_vendor(devices[0].vendor), environ=environ))

    took = median(ask, CALLS if rounds > 1 else 1)
    weight = _weight()
    print(f"{len(weight)} resident processes, {sum(weight) / 1024:.1f} MiB together", file=sys.stderr)
    return [at_most("anyaccel_env in its vendor's process", took, CALL_SECONDS)]


def _weight() -> list[int]:
    """Proportional set size of the processes that this one has started, in KiB."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        found.append(next(int(line.split()[1]) for line in lines if line.startswith("Pss:")))
    return found


def _fresh(path: str) -> float:
    """Seconds that a fresh process takes from its first line to the inventory; the interpreter's start is not ours."""
    command = [sys.executable, "-c", FRESH, path]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _detect(path: str) -> None:
    if not detect(path).devices:
        raise SystemExit(f"{path}: nothing was detected; is the plug-in installed?")
