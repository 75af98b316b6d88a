"""The monitor: a process beside whoever uses devices, which ends that in time, writes down the use and tidies up.

It is forked by the process that took the devices before that puts the mark on itself, so it carries no mark, and it
closes every descriptor, those of the lease and the standard streams among them: whatever becomes of it, the lease does
not depend on it. Where there is a time limit, it keeps standard error until the command has ended, to say there that
the limit ends it. When it is killed, the command is not ended at its time, and its line of the journal is lost.

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
from anyaccel.launcher.detached import fork_child, start_detached
from anyaccel.launcher.hold import DeviceLease
from anyaccel.launcher.sampling import Sampler, sampler
from anyaccel.launcher.time_limit import Countdown, TimeLimit, say
from anyaccel.launcher.usage import wanted
from anyaccel.ledger import Ledger
from anyaccel.linux import process
from anyaccel.linux.descriptors import list_descriptors
from anyaccel.linux.mark import Mark
from anyaccel.linux.teardown import GRACE_SECONDS

NAME = "anyaccel-mon"
"""What lists of processes call it."""

_STATUS, _VOICE = 3, 4
"""Descriptors of the pipe on which a process that stays says how it has ended, and of the command's standard error."""
_TO_SAY = 1.0
"""Seconds after which the monitor gives up on a line that cannot be written, as on a terminal that is stopped."""
_LONGEST_PAUSE = 60.0
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.2, 5.0
"""Pauses between two looks at a lease of which no process is seen, such as one that is quarantined."""


def start_monitor(hold: DeviceLease, program: str = "", *, stays: bool = False, limit: TimeLimit | None = None) -> None:
    """Start the monitor of a hold whose devices this process is going to use itself, or the command that it becomes.

    Call it before the mark is on this process, with no other threads. Does nothing where nothing is held, where there
    is nothing to do, or where a process cannot be made.

    Args:
        hold: The hold.
        program: Name of the program that will run; that of this process when empty.
        stays: Whether this process stays, ends what runs in time, and says how that ended: see
                :meth:`DeviceLease.finish_entry`.
            What is left once it has ended is ended by the monitor.
        limit: The time limit, of which the monitor tells in the journal, and on standard error unless this process
            stays; None to end what runs without a word once the lease says so.
    """
    if hold.lease is None:
        return
    until = hold.lease.until
    use, own = hold.usage(program), process.me()
    asking = sampler(hold.launch.inventory, hold.allocation.shares, use.fared) if wanted() else None
    grouped = hold.launch.environment.group is not None
    if until is None and (asking is None if stays else not wanted() and not grouped):
        if stays:
            hold.attach_writer(use)
        return

    mark = hold.lease.mark

    def watch(voice: int) -> int:
        timed_out = _Watch(use.lease, mark, limit, voice, stays=stays).run(until, own, asking)
        exit_status, told = _told(_STATUS)
        use.ended(exit_status, timed_out=timed_out or told)
        hold.remove_group()
        return 0

    ending = _start(watch, keep_error=limit is not None and not stays)
    if ending is None:
        return
    if stays:
        hold.attach_writer(_Told(ending))
    else:
        os.close(ending)


def end_in_time(lease: str, until: float) -> None:
    """Start a monitor that ends what keeps a lease, once its time is over. Call it with no other threads.

    Args:
        lease: Identity of the lease, which was left to what carries its mark.
        until: The time, in seconds since the boot.
    """
    ending = _start(lambda voice: _Watch(lease, (), None, voice).run(until, (0, 0), None), keep_error=False)
    if ending is not None:
        os.close(ending)


def _start(watch: Callable[[int], int], *, keep_error: bool) -> int | None:
    """Start a process that belongs to no parent, and calls a function; one end of a pipe is its ``_STATUS``.

    Args:
        watch: Called there with the descriptor that is standard error's; -1 for none.
        keep_error: Whether it keeps standard error.

    Returns:
        The other end of the pipe; None where no process can be made.
    """
    status, ending = os.pipe()

    def leave(_: int) -> int:
        voice = _leave(status, keep_error=keep_error)
        fork_child(lambda: watch(voice))
        return 0

    try:
        failed = bool(start_detached(leave)[1])
    except OSError:
        failed = True
    os.close(status)
    if failed:
        os.close(ending)
    return None if failed else ending


class _Told:
    """The use of a process that stays, of which its monitor writes the line."""

    def __init__(self, ending: int) -> None:
        self._ending = ending

    def ended(self, status: int | None = None, *, timed_out: bool = False) -> None:
        """Tell the monitor how it has ended."""
        with contextlib.suppress(OSError):
            os.write(self._ending, f"{'' if status is None else status} {int(timed_out)}".encode())
        with contextlib.suppress(OSError):
            os.close(self._ending)


def _told(pipe: int) -> tuple[int | None, bool]:
    """What a process that stays has said by now: the exit status, None for unknown, and whether its time was over."""
    os.set_blocking(pipe, False)
    try:
        status, timed_out = os.read(pipe, 64).split(b" ")
        return int(status) if status else None, timed_out == b"1"
    except (OSError, ValueError):
        return None, False


def _leave(status: int, *, keep_error: bool) -> int:
    """Belong to no terminal and hold nothing open but a pipe, as ``_STATUS``, and standard error where that is kept.

    Returns:
        The descriptor that is standard error's; -1 for none.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # programs that it starts hear it, other than what is ignored
    if status != _STATUS:
        os.dup2(status, _STATUS, inheritable=False)
    voice = -1
    if keep_error:
        with contextlib.suppress(OSError):  # it was closed
            voice = os.dup2(2, _VOICE, inheritable=False)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(max(_STATUS, voice) + 1, _most_descriptors())
    os.chdir("/")
    process.set_name(NAME)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it lasts as long as the process
    return voice


def _most_descriptors() -> int:
    try:
        return max(list_descriptors()) + 1
    except OSError:
        return 65536


class _Watch:
    """Waits until a lease is over, and ends it when its time is.

    Args:
        lease: Identity of the lease.
        mark: Its mark, by which the limit's early signal finds processes.
        limit: The time limit that it tells of; None for none.
        voice: Descriptor of the command's standard error; -1 for none. It is closed once the command has ended: a
            reader of it waits for the command alone.
        stays: Whether the holder ends what runs in time, as long as it lives.
    """

    def __init__(self, lease: str, mark: Mark, limit: TimeLimit | None, voice: int, *, stays: bool = False) -> None:
        self._lease = lease
        self._limit = limit
        self._countdown = Countdown(limit, mark, self._say)
        self._voice = voice
        self._stays = stays
        self._ledger = Ledger.open()

    def run(self, until: float | None, holder: tuple[int, int], asking: Sampler | None) -> bool:
        """Wait.

        Args:
            until: When the lease is ended, in seconds since the boot; None for never.
            holder: Process id and start time of the process that became the command.
            asking: What asks the vendors; None for nothing.

        Returns:
            Whether the time limit has ended what ran.
        """
        pid, start = holder
        if process.start_time(pid) != start:
            pid = 0
        pause = again = _LOOK_SECONDS
        timed_out = False
        try:
            while True:
                due = None if self._left_to(holder) else self._next(until)
                if _wait(pid, _LONGEST_PAUSE if pid else pause, due, asking):
                    self._close_voice()
                pause = _LOOK_SECONDS if pid else min(2 * pause, _LONGEST_LOOK_SECONDS)
                if due is not None:
                    self._countdown.step()
                if due is not None and _due(until) and self._lasts():
                    if asking is not None:
                        asking.stop()
                    timed_out = self._end(told=timed_out)
                    until = process.boot_seconds() + again  # should something be left, such as another user's process
                    again = min(2 * again, _LONGEST_PAUSE)
                with contextlib.suppress(AnyaccelError):
                    carriers = self._ledger.find_carriers(self._lease)
                    if carriers is None:
                        return timed_out
                    if not pid or process.start_time(pid) != start:
                        self._close_voice()
                        pid = next(iter(carriers), 0)
                        start = process.start_time(pid) or 0
        finally:
            if asking is not None:
                asking.stop()

    def _left_to(self, holder: tuple[int, int]) -> bool:
        """Whether the holder ends what runs in time, and has sent the early signal if that was due."""
        if self._stays and process.gone(*holder):
            self._stays = False
            if _due(self._countdown.early_at):
                self._countdown.early_at = None
        return self._stays

    def _next(self, until: float | None) -> float | None:
        """When there is something to do next, in seconds since the boot; None for never."""
        return min((each for each in (until, self._countdown.early_at) if each is not None), default=None)

    def _lasts(self) -> bool:
        """Whether the lease may still be in force."""
        try:
            return self._ledger.find_carriers(self._lease) is not None
        except AnyaccelError:
            return True

    def _end(self, *, told: bool) -> bool:
        """End what runs; returns whether that was a time limit that people are told of.

        Args:
            told: Whether they have been.
        """
        limit = self._limit
        if limit is not None and not told:
            self._say(limit.message)  # first: a shell shows its prompt once the command has ended
        with contextlib.suppress(AnyaccelError):
            self._ledger.end_lease(self._lease, grace=GRACE_SECONDS if limit is None else limit.grace, force=True)
        return limit is not None

    def _say(self, text: str) -> None:
        """Say something on the standard error of the command, if it can be written soon."""

        def give_up(*_: object) -> None:
            raise TimeoutError

        if self._voice < 0:
            return
        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, _TO_SAY)
        try:
            say(text, self._voice)
        except TimeoutError:
            return
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _close_voice(self) -> None:
        if self._voice >= 0:
            os.close(self._voice)
            self._voice = -1


def _due(moment: float | None) -> bool:
    return moment is not None and process.boot_seconds() >= moment


def _wait(pid: int, pause: float, until: float | None, asking: Sampler | None) -> bool:
    """Wait until a process has ended, at most for a while, or until a time since the boot, and ask vendors meanwhile.

    Args:
        pid: The process; 0 for none.
        pause: Seconds to wait.
        until: The time since the boot; None for none.
        asking: What asks the vendors; None for nothing.

    Returns:
        Whether the process is known to have ended.
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
                return True
            if asking is not None:
                asking.step()
        return False
    finally:
        if ended >= 0:
            os.close(ended)


def _left(over: float, until: float | None) -> float:
    """Seconds that are left until the monotonic clock, or that since the boot, says so much."""
    left = over - time.monotonic()
    return left if until is None else min(left, until - process.boot_seconds())
