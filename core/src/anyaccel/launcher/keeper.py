"""The keeper: a process beside a command that has replaced ours, which ends it in time and writes down its use.

It is forked by the process that took the devices before that puts the mark on itself, so it carries no mark, and it
closes every descriptor, those of the lease and the standard streams among them: whatever becomes of it, the lease does
not depend on it. When it is killed, the command is not ended at its time, and its line of the journal is lost.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

from anyaccel.errors import AnyaccelError
from anyaccel.launcher.command import GRACE_SECONDS
from anyaccel.launcher.hold import Hold
from anyaccel.launcher.usage import Usage
from anyaccel.ledger import Ledger, process

NAME = "anyaccel-keeper"
"""What lists of processes call it."""

_LONGEST_PAUSE = 60.0
_LOOK_SECONDS = 0.2


def keep(hold: Hold, program: str = "") -> None:
    """Start the keeper of a hold whose devices this process is going to use itself, or the command that it becomes.

    Call it before the mark is on this process, with no other threads. Does nothing where nothing is held, or where a
    process cannot be made.

    Args:
        hold: The hold.
        program: Name of the program that will run; that of this process when empty.
    """
    if hold.lease is None:
        return
    use, own = hold.usage(program), process.me()
    try:
        child = os.fork()
    except OSError:
        return
    if child:
        os.waitpid(child, 0)
        return
    try:
        _leave()
        if not os.fork():
            _watch(use, hold.lease.until, own)
    except BaseException:  # noqa: BLE001, S110 - there is nobody to tell
        pass
    finally:
        os._exit(0)


def _leave() -> None:
    """Belong to no terminal and hold nothing open."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(3, _most_descriptors())
    os.chdir("/")
    process.set_name(NAME)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it lasts as long as the process


def _most_descriptors() -> int:
    try:
        return max(process.descriptors()) + 1
    except OSError:
        return 65536


def _watch(use: Usage, until: float | None, holder: tuple[int, int]) -> None:
    """Wait until a lease is over, end it when its time is, and write its line."""
    ledger = Ledger.open()
    pid, start = holder
    if process.start_time(pid) != start:
        pid = 0
    pause = _LOOK_SECONDS
    while True:
        if pid:
            _wait(pid, until)
        else:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if until is not None and process.boot_seconds() >= until:
            with contextlib.suppress(AnyaccelError):
                ledger.release_of(use.lease, grace=GRACE_SECONDS, force=True)
            pause = _LOOK_SECONDS
        with contextlib.suppress(AnyaccelError):
            carriers = ledger.carriers(use.lease)
            if carriers is None:
                break
            if not pid or process.start_time(pid) != start:
                pid = next(iter(carriers), 0)
                start = process.start_time(pid) or 0
    use.ended()


def _wait(pid: int, until: float | None) -> None:
    """Wait until a process has ended, at most until a time since the boot, or for a while."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        time.sleep(_LOOK_SECONDS)
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        left = _LONGEST_PAUSE if until is None else min(_LONGEST_PAUSE, until - process.boot_seconds())
        poll.poll(max(0.0, left) * 1000 + 1)
    finally:
        os.close(descriptor)
