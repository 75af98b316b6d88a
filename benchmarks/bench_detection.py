"""What it costs to detect recorded machines, and to ask a vendor's process once it is there.

All but the vendor library's own time is measured, of which a replay takes none. A fresh process starts the vendor's,
one that has detected before finds it running. The time of a fresh process is a multiple of an interpreter that does
nothing, with one plug-in, with those of both machines, and with all. The memory of the resident processes is printed
beside: their proportional share.
"""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path

from anyaccel import detect
from anyaccel.model import EnvContext
from anyaccel.vendors import close
from anyaccel.vendors.discovery import installed
from anyaccel.vendors.process import vendor_process
from measure import Row, against, at_most, command, interleaved, median

BARE = "python -c pass"
FRESH_RATIO = 7.3
"""How many times as long as an interpreter that does nothing, its start included: 60 ms after a start of 9.5 ms."""
WARM_SECONDS, CALL_SECONDS = 0.03, 0.0002
PLUGINS = Path(__file__).parent.parent / "plugins"
MACHINES = ("nvidia/recordings/h100-8gpu-nvswitch", "amd/recordings/mi300x-8gpu")
ROUNDS, CALLS = 9, 200
FRESH = "import sys; from anyaccel import detect; sys.exit(not detect(sys.argv[1]).devices)"


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure detection of machines with eight devices in a fresh process and in one that has asked before."""
    found = []
    machines = {name: str(PLUGINS / name) for name in MACHINES if (PLUGINS / name).is_dir()}
    for name in MACHINES:
        if name not in machines:
            print(f"no recording {PLUGINS / name}: not measured", file=sys.stderr)
    calls = {BARE: command([sys.executable, "-c", "pass"], os.environ)}
    for name, path in machines.items():
        for what, environ in _choices(name.partition("/")[0]).items():
            calls[f"detect {name}, fresh process, {what}"] = command([sys.executable, "-c", FRESH, path], environ)
    found += against(BARE, interleaved(calls, rounds), {name: FRESH_RATIO for name in calls if name != BARE})
    for name, path in machines.items():
        warm = median(lambda path=path: _detect(path), rounds)
        found.append(at_most(f"detect {name}, asked before", warm, WARM_SECONDS))
    found += _calls(rounds)
    close()
    return found


def _choices(vendor: str) -> dict[str, dict[str, str]]:
    """The environments in which one plug-in, those of both machines, and all installed ones are asked."""
    both = ",".join(name.partition("/")[0] for name in MACHINES)
    chosen = {"1 plug-in": vendor, f"{len(MACHINES)} plug-ins": both}
    every = {name: value for name, value in os.environ.items() if name != "ANYACCEL_PLUGINS"}
    found = {what: {**every, "ANYACCEL_PLUGINS": names} for what, names in chosen.items()}
    return {**found, f"{len(installed(every)[0])} plug-ins": every}


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


def _detect(path: str) -> None:
    if not detect(path).devices:
        raise SystemExit(f"{path}: nothing was detected; is the plug-in installed?")
