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
from collections.abc import Callable

from measure import Row, against, command, interleaved, state

ROUNDS = 15
BARE = "python -c pass"
RUN = "anyaccel run GPU:1 -- true"
BARE_CALL = "subprocess.run(true)"
CALLS = {"lease.popen(true)": "popen", "anyaccel.run(true)": "run"}
"""Of ``anyaccel.run``, most is detection, which takes a process of its own also where there is no plug-in."""
WITHOUT = ", without a mark"
LOCKS, NO_MARK = 10, 5

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


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure start-up on a machine without devices, with every plug-in that is installed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ANYACCEL_")}
    script = os.path.join(os.path.dirname(sys.executable), "anyaccel")
    with state() as directory:
        run = [script, "run", "--declare", "GPU=1", "GPU:1", "--", "true"]
        ours = {**environ, "ANYACCEL_STATE_DIR": directory}
        times = interleaved(
            {
                BARE: command([sys.executable, "-c", "pass"], environ),
                "anyaccel --version": command([script, "--version"], environ),
                "import anyaccel": command([sys.executable, "-c", "import anyaccel"], environ),
                "anyaccel": command([script], environ),
                RUN + WITHOUT: command(run, ours, before=no_mark),
                RUN: command(run, ours, before=same_limit),
            },
            rounds,
        )
        calls = call_times({**ours, "ANYACCEL_PLUGINS": ","}, 10 * rounds)
    return [
        *against(BARE, times, {"anyaccel --version": 4, "import anyaccel": 5, "anyaccel": 15}),
        *against(RUN + WITHOUT, times, {RUN: None}),
        *against(BARE_CALL, calls, dict.fromkeys(name for name in calls if name != BARE_CALL)),
    ]


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
