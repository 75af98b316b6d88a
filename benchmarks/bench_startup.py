"""What it costs to start: the command line, the import, and a command that carries the mark of a lease.

The first are multiples of an interpreter that does nothing. A command with its mark is compared with the same one where
there can be no mark: where a hard limit ``RLIMIT_LOCKS`` has been set that is none.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from anyaccel.vendors.discovery import installed
from measure import Row, against, command, interleaved, state

ROUNDS = 15
BARE = "python -c pass"
RUN = "anyaccel run GPU:1 -- true"
PLUGINS = Path(__file__).parent.parent / "plugins"
MACHINES = {"recorded": str(PLUGINS / "nvidia/recordings/h100-8gpu-nvswitch"), "simulated": "sim:H100:8"}
"""Machines of eight devices."""
WITH_DEVICES = 6
"""How many times as long as an interpreter that does nothing a command may take on them."""
MANY = 20
"""Plug-ins that a user may have installed: those of all vendors, and more."""
UNSET = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
"""The first would have Python compile the command line's modules at each start."""
BARE_CALL = "subprocess.run(true)"
CALLS = {"lease.popen(true)": "popen", "anyaccel.run(true)": "run"}
"""Of ``anyaccel.run``, most is detection, which takes a process of its own also where there is no plug-in."""
WITHOUT = ", without a mark"
LOCKS, NO_MARK = 10, 5

PLUGIN = """
from anyaccel.plugin import EnvEdits, Fractional, PluginInfo, hookimpl

@hookimpl
def anyaccel_info():
    return PluginInfo(vendor="{vendor}", resource="{vendor}", kind="gpu", env_vars=())

@hookimpl
def anyaccel_detect(ctx):
    return None

@hookimpl
def anyaccel_fractional(device):
    return Fractional.NO

@hookimpl
def anyaccel_tags(device):
    return ()

@hookimpl
def anyaccel_env(devices, ctx):
    return EnvEdits()
"""
"""A plug-in of a vendor that is not on the machine."""

CALLER = """
import subprocess, sys, time, anyaccel
lease = anyaccel.acquire("GPU:1", declare={"GPU": 3})
calls = {
    "bare": lambda: subprocess.run(["true"]),
    "popen": lambda: lease.popen(["true"]).wait(),
    "run": lambda: anyaccel.run("GPU:1", ["true"], declare={"GPU": 3}),
}
for line in sys.stdin:
    call = calls[line.strip()]
    start = time.perf_counter()
    call()
    print(time.perf_counter() - start, flush=True)
"""


def no_mark() -> None:
    """Set a limit that is no mark, between fork and exec: what this process starts carries none then."""
    resource.prlimit(0, LOCKS, (NO_MARK, NO_MARK))


def same_limit() -> None:
    """Set the limit that there is: for what is compared with a process that calls the above."""
    resource.prlimit(0, LOCKS, resource.prlimit(0, LOCKS))


class Caller:
    """A process that starts commands by calls of Python when it is asked to."""

    def __init__(self, environ: dict[str, str], before: Callable[[], None]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CALLER],
            env=environ,
            preexec_fn=before,  # noqa: PLW1509 -- there is one thread
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, what: str) -> float:
        """Seconds of one call, as it took them itself."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def install_more(directory: Path) -> None:
    """Install plug-ins into a directory, as pip does, so that there are :data:`MANY` of them."""
    for number in range(MANY - len(installed()[0])):
        vendor = f"more{number}"
        (directory / f"anyaccel_{vendor}.py").write_text(PLUGIN.format(vendor=vendor))
        (directory / f"anyaccel_{vendor}.presence.json").write_text('{"paths": ["/dev/no_such_device*"]}')
        info = directory / f"anyaccel_{vendor}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: anyaccel-{vendor}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[anyaccel]\n{vendor} = anyaccel_{vendor}\n")


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure start-up on a machine without devices, with every plug-in that is installed."""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("ANYACCEL_") and name not in UNSET
    }
    script = os.path.join(os.path.dirname(sys.executable), "anyaccel")
    with state() as directory, tempfile.TemporaryDirectory() as more:
        install_more(Path(more))
        run = [script, "run", "--declare", "GPU=1", "GPU:1", "--", "true"]
        ours = {**environ, "ANYACCEL_STATE_DIR": directory}
        times = interleaved(
            {
                BARE: command([sys.executable, "-c", "pass"], environ),
                "anyaccel --version": command([script, "--version"], environ),
                "import anyaccel": command([sys.executable, "-c", "import anyaccel"], environ),
                "anyaccel": command([script], environ),
                f"anyaccel, {MANY} plug-ins": command([script], {**environ, "PYTHONPATH": more}),
                RUN + WITHOUT: command(run, ours, before=no_mark),
                RUN: command(run, ours, before=same_limit),
                **_with_devices(script, ours),
            },
            rounds,
        )
        calls = call_times({**ours, "ANYACCEL_PLUGINS": ","}, 10 * rounds)
    return [
        *against(
            BARE,
            times,
            {
                "anyaccel --version": 2,
                "import anyaccel": 1.5,
                "anyaccel": 4,
                f"anyaccel, {MANY} plug-ins": 4,
                RUN: 8,
                **dict.fromkeys(_with_devices(script, ours), WITH_DEVICES),
            },
        ),
        *against(RUN, times, {RUN + WITHOUT: None})[1:],
        *against(BARE_CALL, calls, dict.fromkeys(name for name in calls if name != BARE_CALL)),
    ]


def _with_devices(script: str, environ: dict[str, str]) -> dict[str, Callable[[], object]]:
    """What a person with devices waits for, with one plug-in and with all that are installed."""
    found: dict[str, Callable[[], object]] = {}
    for kind, machine in MACHINES.items():
        if kind == "recorded" and not Path(machine).is_dir():
            continue
        for plugins in ({"ANYACCEL_PLUGINS": "nvidia"}, {}):
            count = len(plugins) or len(installed()[0])
            suffix = f", {kind} H100:8, {count} plug-in{'s' * (count > 1)}"
            look = [script, "--machine", machine]
            run = [script, "run", "--machine", machine, "GPU:1", "--", "true"]
            found[f"anyaccel{suffix}"] = command(look, {**environ, **plugins})
            found[f"{RUN}{suffix}"] = command(run, {**environ, **plugins})
    return found


def call_times(environ: dict[str, str], rounds: int) -> dict[str, float]:
    """Median seconds of the calls of Python, in turns."""
    with contextlib.ExitStack() as stack:
        marked, plain = (Caller(environ, before) for before in (same_limit, no_mark))
        for caller in (marked, plain):
            stack.callback(caller.close)
        calls = {BARE_CALL: (plain, "bare")}
        for name, what in CALLS.items():
            calls |= {name + WITHOUT: (plain, what), name: (marked, what)}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds + 1):
            for name, (caller, what) in calls.items():
                taken = caller.measure(what)
                if number:
                    times[name].append(taken)
    return {name: statistics.median(taken) for name, taken in times.items()}
