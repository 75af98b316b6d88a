"""Processes that hold devices, and say which: for tests of what one holder leaves to another."""

import os
import subprocess
import sys

from anyaccel.ledger import Ledger
from waiting import PATIENCE, until


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
    until(lambda: len(Ledger.open().tickets()) == count, f"{count} to wait")


def end(*holders: subprocess.Popen[str]) -> None:
    """Let holders end."""
    for holder in holders:
        holder.communicate(timeout=PATIENCE)
        assert holder.returncode == 0
