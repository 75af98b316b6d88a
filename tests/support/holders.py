"""Processes that hold devices, and say which: for tests of what one holder leaves to another."""

import os
import subprocess
import sys
import time

from anyaccel.ledger import Ledger

PATIENCE = 60.0


def hold_and_show(variable: str, request: str, **changes: str) -> tuple[subprocess.Popen[str], str]:
    """Hold devices in a process of ``anyaccel run`` that lasts until its input is closed.

    Args:
        variable: The mask that the process shows.
        request: What it holds.
        changes: Changes to its environment.

    Returns:
        The process, and the value of the variable in it.
    """
    code = f"import os, sys; print(os.environ[{variable!r}], flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-m", "anyaccel", "run", request, "--", sys.executable, "-c", code],
        env={**os.environ, **changes},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    return holder, holder.stdout.readline().strip()


def in_line(count: int) -> None:
    """Wait until so many processes wait for devices."""
    deadline = time.monotonic() + PATIENCE
    while len(Ledger.open().tickets()) != count:
        assert time.monotonic() < deadline, f"{count} never waited"
        time.sleep(0.01)


def end(*holders: subprocess.Popen[str]) -> None:
    """Let holders end."""
    for holder in holders:
        holder.communicate(timeout=PATIENCE)
        assert holder.returncode == 0
