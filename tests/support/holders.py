"""Processes that hold devices, and say which: for tests of what one holder leaves to another."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import preloaded
from anyaccel.ledger import Ledger
from anyaccel.ledger.entries import parse_lease
from anyaccel.linux.mark import Mark, carries, limit
from anyaccel.linux.teardown import Find
from waiting import PATIENCE, until

COPIER = 61_012
"""A user without any privilege."""


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
    holder = preloaded.start(
        ["run", request, "--", sys.executable, "-c", code],
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


@contextlib.contextmanager
def copied(mark: Mark) -> Iterator[int]:
    """Let a process of another user carry a mark, as a user does who has read it; needs root.

    Yields:
        Its id; it is no child of this process.
    """
    value = f"--locks={limit(mark)}:{limit(mark)}"
    other = ["setpriv", f"--reuid={COPIER}", f"--regid={COPIER}", "--clear-groups", "prlimit", value, "sleep", "600"]
    start = ["sh", "-c", '"$@" >/dev/null 2>&1 & echo $!', "sh"]
    pid = int(subprocess.run([*start, *other], stdout=subprocess.PIPE, text=True, check=True).stdout)
    try:
        until(lambda: carries(pid, mark), "a copy of a mark")
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def mark_of(state: str) -> Mark:
    """The mark of the only lease in a state directory."""
    (mark,) = {lease.mark for name in os.listdir(state) if (lease := parse_lease(name))}
    return mark


def found_by(find: Find) -> set[int]:
    """The processes that a ``Find`` tells of."""
    found: set[int] = set()
    assert find(lambda pid, _: found.add(pid))
    return found
