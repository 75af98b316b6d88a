"""The monitor: a process beside whoever uses devices, which ends that in time, writes down the use and tidies up.

It is forked by the process that took the devices before that puts the mark on itself, so it carries no mark, and it
closes every descriptor, those of the lease and the standard streams among them: whatever becomes of it, the lease does
not depend on it. When it is killed, the command is not ended at its time, and its line of the journal is lost.

Where the devices are a part of an outer lease's, it carries the mark of that one, as all do that were started with it.
So the outer lease lasts until it has ended, too: a moment longer than the inner one, whose processes carry both marks.
It ignores SIGTERM: when the outer lease is ended, it ends by itself with the inner one, once that is written down.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable

from anyaccel.errors import AnyaccelError
from anyaccel.launcher.hold import Hold
from anyaccel.launcher.sampling import Sampler, sampler
from anyaccel.launcher.signals import GRACE_SECONDS
from anyaccel.launcher.usage import wanted
from anyaccel.ledger import Ledger, process

NAME = "anyaccel-mon"
"""What lists of processes call it."""

_STATUS = 3
"""Descriptor of the pipe on which a process that stays says how it has ended."""
_LONGEST_PAUSE = 60.0
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.2, 5.0
"""Pauses between two looks at a lease of which no process is seen, such as one that is quarantined."""


def monitor(hold: Hold, program: str = "", *, stays: bool = False) -> None:
    """Start the monitor of a hold whose devices this process is going to use itself, or the command that it becomes.

    Call it before the mark is on this process, with no other threads. Does nothing where nothing is held, where there
    is nothing to do, or where a process cannot be made.

    Args:
        hold: The hold.
        program: Name of the program that will run; that of this process when empty.
        stays: Whether this process stays, ends what runs in time, and says how that ended: see :meth:`Hold.note_end`.
    """
    if hold.lease is None:
        return
    until = None if stays else hold.lease.until
    use, own = hold.usage(program), process.me()
    asking = sampler(hold.launch.inventory, hold.allocation.shares, use.fared) if wanted() else None
    grouped = hold.launch.environment.group is not None
    if (asking is None and stays) or (until is None and not wanted() and not grouped):
        if stays:
            hold.noted(use)
        return

    def watch(status: int) -> None:
        _watch(use.lease, until, own, asking)
        use.ended(_told(status))
        hold.unlimit()

    ending = _start(watch)
    if ending is None:
        return
    if stays:
        hold.noted(_Told(ending))
    else:
        os.close(ending)


def end_in_time(lease: str, until: float) -> None:
    """Start a monitor that ends what keeps a lease, once its time is over. Call it with no other threads.

    Args:
        lease: Identity of the lease, which was left to what carries its mark.
        until: The time, in seconds since the boot.
    """
    ending = _start(lambda _: _watch(lease, until, (0, 0), None))
    if ending is not None:
        os.close(ending)


def _start(watch: Callable[[int], None]) -> int | None:
    """Start a process that belongs to no parent, and calls a function with one end of a pipe.

    Returns:
        The other end; None where no process can be made.
    """
    status, ending = os.pipe()
    try:
        child = os.fork()
    except OSError:
        child = -1
    if child:
        os.close(status)
        if child > 0:
            os.waitpid(child, 0)
            return ending
        os.close(ending)
        return None
    try:
        status = _leave(status)
        if not os.fork():
            watch(status)
    except BaseException:  # noqa: BLE001, S110 - there is nobody to tell
        pass
    finally:
        os._exit(0)


class _Told:
    """The use of a process that stays, of which its monitor writes the line."""

    def __init__(self, ending: int) -> None:
        self._ending = ending

    def ended(self, status: int | None = None) -> None:
        """Tell the monitor how it has ended."""
        with contextlib.suppress(OSError):
            os.write(self._ending, b"" if status is None else str(status).encode())
        with contextlib.suppress(OSError):
            os.close(self._ending)


def _told(status: int) -> int | None:
    """What somebody has said of the exit status by now; None where nobody has."""
    os.set_blocking(status, False)
    try:
        return int(os.read(status, 64))
    except (OSError, ValueError):
        return None


def _leave(status: int) -> int:
    """Belong to no terminal and hold nothing open but one descriptor; returns its new number."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # programs that it starts hear it, other than what is ignored
    if status != _STATUS:
        os.dup2(status, _STATUS, inheritable=False)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(_STATUS + 1, _most_descriptors())
    os.chdir("/")
    process.set_name(NAME)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it lasts as long as the process
    return _STATUS


def _most_descriptors() -> int:
    try:
        return max(process.descriptors()) + 1
    except OSError:
        return 65536


def _watch(lease: str, until: float | None, holder: tuple[int, int], asking: Sampler | None) -> None:
    """Wait until a lease is over, and end it when its time is."""
    ledger = Ledger.open()
    pid, start = holder
    if process.start_time(pid) != start:
        pid = 0
    pause = again = _LOOK_SECONDS
    try:
        while True:
            _wait(pid, _LONGEST_PAUSE if pid else pause, until, asking)
            pause = _LOOK_SECONDS if pid else min(2 * pause, _LONGEST_LOOK_SECONDS)
            if until is not None and process.boot_seconds() >= until:
                if asking is not None:
                    asking.stop()
                with contextlib.suppress(AnyaccelError):
                    ledger.release_of(lease, grace=GRACE_SECONDS, force=True)
                until = process.boot_seconds() + again  # should something be left, such as another user's process
                again = min(2 * again, _LONGEST_PAUSE)
            with contextlib.suppress(AnyaccelError):
                carriers = ledger.carriers(lease)
                if carriers is None:
                    return
                if not pid or process.start_time(pid) != start:
                    pid = next(iter(carriers), 0)
                    start = process.start_time(pid) or 0
    finally:
        if asking is not None:
            asking.stop()


def _wait(pid: int, pause: float, until: float | None, asking: Sampler | None) -> None:
    """Wait until a process has ended, at most for a while, or until a time since the boot, and ask vendors meanwhile.

    Args:
        pid: The process; 0 for none.
        pause: Seconds to wait.
        until: The time since the boot; None for none.
        asking: What asks the vendors; None for nothing.
    """
    ended = -1
    if pid:
        try:
            ended = os.pidfd_open(pid)
        except OSError:
            pause = _LOOK_SECONDS
    over = time.monotonic() + pause
    try:
        while (left := _left(over, until)) > 0:
            poll = select.poll()
            if ended >= 0:
                poll.register(ended, select.POLLIN)
            if asking is not None:
                left = min(left, asking.seconds)
                if asking.answer >= 0:
                    poll.register(asking.answer, select.POLLIN)
            ready = poll.poll(left * 1000 + 1)
            if any(descriptor == ended for descriptor, _ in ready):
                return
            if asking is not None:
                asking.step()
    finally:
        if ended >= 0:
            os.close(ended)


def _left(over: float, until: float | None) -> float:
    """Seconds that are left until the monotonic clock, or that since the boot, says so much."""
    left = over - time.monotonic()
    return left if until is None else min(left, until - process.boot_seconds())
