"""A sweep of commands that do nothing, beside GNU parallel and ``xargs -P``: time per command, memory of the process.

All three run as many at once, on two declared devices. GNU parallel is left out where it is not installed. ``xargs``
keeps no log, no exit status of each and no devices: it is the least that starting commands takes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import Row, against, interleaved, state

ROUNDS = 3
COMMANDS = 1000
AT_ONCE = 2
OURS = "anyaccel sweep, one of {count:,} commands"
PARALLEL = "GNU parallel, one of {count:,} commands"
XARGS = "xargs -P, one of {count:,} commands"


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure a command of a long sweep; a short one where it is only tried."""
    count = COMMANDS if rounds > 1 else 20
    names = [each.format(count=count) for each in (OURS, PARALLEL, XARGS)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ANYACCEL_")}
    with state() as leases, tempfile.TemporaryDirectory() as folder:
        environ |= {"ANYACCEL_STATE_DIR": leases, "HOME": folder}
        Path(folder, ".parallel").mkdir()
        Path(folder, ".parallel", "will-cite").touch()
        lines = "".join(f"{number}\n" for number in range(count))
        anyaccel = os.path.join(os.path.dirname(sys.executable), "anyaccel")
        declared = ["--declare", f"GPU={AT_ONCE}", "GPU:1", "--jobs", str(AT_ONCE)]
        turns = iter(range(1000))

        def run(*argv: str) -> None:
            subprocess.run(
                argv, input=lines, text=True, env=environ, cwd=folder, check=True, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip

        def sweep(*, numbers: str = "-") -> None:
            run(anyaccel, "sweep", *declared, "--out", f"out{next(turns)}", "--from", numbers, "--", "true", "{}")

        calls = {names[0]: sweep}
        if parallel := shutil.which("parallel"):
            calls[names[1]] = lambda: run(parallel, "-j", str(AT_ONCE), "--joblog", f"log{next(turns)}", "true", "{}")
        calls[names[2]] = lambda: run("xargs", f"-P{AT_ONCE}", "-n1", "true")
        times = {name: seconds / count for name, seconds in interleaved(calls, rounds).items()}
        for some in (20, count):
            print(f"memory of a sweep of {some:,} commands: {peak(anyaccel, declared, some, environ, folder):.1f} MiB")
    if not parallel:
        print("GNU parallel is not installed: not measured (try: apt-get install parallel)")
        return against(names[2], times, {names[0]: None})
    return against(names[1], times, {names[0]: 1.0, names[2]: None})


def peak(anyaccel: str, declared: list[str], count: int, environ: dict[str, str], folder: str) -> float:
    """Largest resident memory of the one process of a sweep, in MiB."""
    out = f"memory{count}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        [anyaccel, "sweep", *declared, "--out", out, "--each", f"n=1..{count}", "--", "true", "{n}"],
        env=environ, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return usage.ru_maxrss / 1024
