"""The monitor: a process to watch a lease, enforce the time limit, and write the journal entry.

The process that acquired the devices forks the monitor before that puts the mark on itself. So the monitor carries no
mark, and closes all descriptors, also those of the lease: the lease does not depend on the monitor. With a time limit,
the monitor keeps standard error until the command has exited, to print there that the limit ends it. If the monitor is
killed, the time limit is not enforced, and the journal entry is lost.

A process of its own takes each sample of load and memory for the journal: it asks the vendors' processes as ``anyaccel
status`` does, writes the answer and exits. So no vendor's code stays in memory between two samples, and the holder of
the lease never waits. A vendor that hangs is killed at the end of the sample's time, or of the lease.

If the devices are a part of an outer lease, the monitor carries the mark of the outer lease, as all its processes do.
The outer lease then lasts until the monitor has exited, a moment longer than the inner lease. The monitor ignores
SIGTERM: when the outer lease is ended, it exits after the inner one, whose entry it has to write.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Mapping

from anyaccel import configuration
from anyaccel.errors import AnyaccelError, ConfigurationError
from anyaccel.launcher.environment import print_error
from anyaccel.launcher.hold import DeviceLease
from anyaccel.launcher.open_lease import is_journal_kept, is_journal_wanted
from anyaccel.launcher.start import fork_child, start_detached, start_helper
from anyaccel.launcher.time_limit import Countdown, TimeLimit, print_line
from anyaccel.ledger import Ledger
from anyaccel.linux import process
from anyaccel.linux.descriptors import list_descriptors
from anyaccel.linux.mark import Mark
from anyaccel.linux.system import signal
from anyaccel.linux.teardown import GRACE_SECONDS
from anyaccel.model import Inventory, Share, Stats, replace
from anyaccel.model.wire import decode, encode
from anyaccel.probe import HOST
from anyaccel.probe.machine import SIMULATION

NAME = "anyaccel-mon"
"""Process name of the monitor."""

_STATUS, _ERROR = 3, 4
"""Descriptors of the pipe with the exit status, and of the command's standard error."""
_PRINT_SECONDS = 1.0
"""Time for a line on standard error: a terminal that is stopped takes none."""
_LONGEST_PAUSE = 60.0
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.2, 5.0
"""Pauses between two looks at a lease without a visible process, such as one in quarantine."""
FIRST_SECONDS = 10.0
"""Time from the beginning of a lease to the first sample: a shorter lease costs nothing."""
LIMIT_SECONDS = 40.0
"""Time for one sample, with the start of the processes on a machine under load."""
_MOST_FAILURES = 3
"""Failures in a row after which sampling stops."""
_CHUNK = 1 << 16


def start_monitor(
    lease: DeviceLease, program: str = "", *, stays: bool = False, limit: TimeLimit | None = None
) -> None:
    """Start the monitor of a lease for this process, or for the command in place of this process.

    The monitor samples the devices, sends the early signal, ends the processes when the lease's time is up, and after
    the end of the lease writes the journal entry, undoes the handover of the devices, and removes the cgroup. Call this
    function before this process gets the mark, and while it has one thread.

    No monitor is started if nothing is leased, or if no process can be made; then there is no journal entry, no monitor
    takes the other steps, and a line on standard error says so if the time limit is not enforced. A monitor that cannot
    open the ledger takes no step either. If the lease has no end, a process that ``stays`` gets a monitor only for
    samples or the handover, and otherwise writes the entry itself; another process gets a monitor only for the journal,
    the handover or the cgroup.

    Args:
        lease: The lease.
        program: Name of the program that will run; the name of this process if empty.
        stays: Whether this process stays, enforces the time limit, and reports the end by
            :meth:`DeviceLease.finish_entry`. The monitor ends the processes that are left after this one has exited.
        limit: The time limit, which the monitor records in the journal and prints on standard error (unless ``stays``).
            If None, the monitor ends the processes silently at the end of the lease.

    Raises:
        LedgerError: If the ledger cannot be opened.
        OSError: If no descriptor is free.
    """
    if lease.lease is None:
        return
    until = lease.lease.until
    meter, own = lease.start_meter(lease.lease, program), process.me()
    sampler = None
    if is_journal_wanted():
        sampler = make_sampler(lease.launch.inventory, lease.allocation.shares, meter.add_sample)
    grouped = lease.launch.environment.group is not None
    needless = sampler is None if stays else not is_journal_kept(lease.lease.path) and not grouped
    if until is None and needless and lease.handover is None:
        if stays:
            lease.attach_writer(meter)
        return

    # Not by the monitor: a process without a terminal could tell no user why it does not enforce the limit.
    ledger, mark = Ledger.open(), lease.lease.mark

    def watch(error: int) -> int:
        timed_out = _LeaseWatch(ledger, meter.lease, mark, limit, error, stays=stays).run(until, own, sampler)
        exit_status, reported = _read_status(_STATUS)
        meter.finish(exit_status, timed_out=timed_out or reported)
        lease.take_back()
        lease.remove_group()
        return 0

    pipe = _start(watch, keep_error=limit is not None and not stays)
    if pipe is None:
        if until is not None and not stays:
            _warn_unlimited(meter.lease)
        return
    if stays:
        lease.attach_writer(_StatusPipe(pipe))
    else:
        os.close(pipe)


def end_in_time(lease: str, until: float) -> None:
    """Start a monitor to end the processes of a lease at a time, without a message and without a journal entry.

    The processes get SIGTERM, and SIGKILL after ``GRACE_SECONDS``; again, after growing pauses, while the lease lasts.
    The call returns once the monitor runs.

    Call this function in a process with a single thread. If no process can be made, the lease is not ended, and a line
    on standard error says so.

    Args:
        lease: Identity of the lease, which was left to the carriers of its mark.
        until: The time, in seconds since the boot.

    Raises:
        LedgerError: If the ledger cannot be opened.
        OSError: If no descriptor is free.
    """
    ledger = Ledger.open()
    pipe = _start(lambda error: _LeaseWatch(ledger, lease, (), None, error).run(until, (0, 0), None), keep_error=False)
    if pipe is None:
        _warn_unlimited(lease)
    else:
        os.close(pipe)


def _warn_unlimited(lease: str) -> None:
    """Print on standard error that no monitor ends the processes of a lease at the time limit."""
    print_error(f"no process can be made to end lease {lease} at its time limit; 'anyaccel release {lease}' ends it")


def _start(watch: Callable[[int], int], *, keep_error: bool) -> int | None:
    """Start a process outside this one's children, detach the process by :func:`_detach`, and call a function there.

    Returns before the function ends.

    Args:
        watch: Called with the descriptor of standard error, -1 for none; returns the exit status.
        keep_error: Whether the process keeps standard error.

    Returns:
        The write end of a pipe whose read end is ``_STATUS`` of the process; None if no process can be made or
        detached.

    Raises:
        OSError: If no descriptor is free for the pipe.
    """
    reader, writer = os.pipe()

    # Two forks: the first leaves the session and exits, so that the second is a child of init, and no zombie of ours.
    def leave(_: int) -> int:
        error = _detach(reader, keep_error=keep_error)
        fork_child(lambda: watch(error))
        return 0

    try:
        failed = bool(start_detached(leave)[1])
    except OSError:
        failed = True
    os.close(reader)
    if failed:
        os.close(writer)
    return None if failed else writer


class _StatusPipe:
    """Passes the exit status to the monitor, which writes the journal entry."""

    def __init__(self, writer: int) -> None:
        self._writer = writer

    def finish(self, status: int | None = None, *, timed_out: bool = False) -> None:
        """Send the status, and close the pipe; errors are ignored. Call it once."""
        with contextlib.suppress(OSError):
            os.write(self._writer, f"{'' if status is None else status} {int(timed_out)}".encode())
        with contextlib.suppress(OSError):
            os.close(self._writer)


def _read_status(pipe: int) -> tuple[int | None, bool]:
    """Read the report of :class:`_StatusPipe`; does not wait. An error, or an invalid report, counts as no report.

    Returns:
        The exit status, None if unknown; and whether the time limit was reached, False without a report.
    """
    os.set_blocking(pipe, False)
    try:
        status, timed_out = os.read(pipe, 64).split(b" ")
        return int(status) if status else None, timed_out == b"1"
    except (OSError, ValueError):
        return None, False


def _detach(status: int, *, keep_error: bool) -> int:
    """Turn this process into a monitor named ``NAME``, unaffected by SIGTERM and the signals of a terminal.

    All descriptors are closed but the pipe and, possibly, a copy of standard error. The standard streams lead to
    ``/dev/null``, and the working directory is ``/``.

    Args:
        status: Read end of the pipe, which becomes ``_STATUS``.
        keep_error: Whether to keep a copy of standard error, as ``_ERROR``.

    Returns:
        The descriptor of the copy; -1 for none, or if standard error was closed.

    Raises:
        OSError: If a descriptor cannot be opened, copied or listed.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A handler, unlike SIG_IGN, is not inherited by the tools that a vendor's plug-in starts.
    signal.signal(signal.SIGTERM, lambda *_: None)
    if status != _STATUS:
        os.dup2(status, _STATUS, inheritable=False)
    error = -1
    if keep_error:
        with contextlib.suppress(OSError):  # it was closed
            error = os.dup2(2, _ERROR, inheritable=False)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(max(_STATUS, error) + 1, max(list_descriptors()) + 1)
    os.chdir("/")  # so that a mounted directory can be unmounted
    process.set_name(NAME)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it lasts as long as the process
    return error


class _LeaseWatch:
    """Waits for the end of a lease, and ends the processes of the lease at the time limit.

    Args:
        ledger: The ledger of the lease.
        lease: Identity of the lease.
        mark: The mark of the lease, for the early signal.
        limit: The time limit to print; None for none.
        error: Descriptor of the command's standard error; -1 for none. The watch closes it after the exit of the
            command, so that a reader of it waits for the command alone.
        stays: Whether the holder enforces the time limit itself while it lives.
    """

    def __init__(
        self, ledger: Ledger, lease: str, mark: Mark, limit: TimeLimit | None, error: int, *, stays: bool = False
    ) -> None:
        self._ledger = ledger
        self._lease = lease
        self._limit = limit
        self._countdown = Countdown(limit, mark, self._print)
        self._error = error
        self._stays = stays

    def run(self, until: float | None, holder: tuple[int, int], sampler: Sampler | None) -> bool:
        """Wait for the end of the lease, and sample the devices meanwhile; stop the sampler at the end or the limit.

        Unless the holder enforces the time limit, send the early signal, and end the processes at ``until``; again
        after growing pauses while the lease lasts. While the ledger cannot be read, the wait goes on. Standard error of
        the command is closed once the holder has exited.

        Args:
            until: The end of the lease's time, in seconds since the boot; None for none.
            holder: Process id and start time of the process that became the command.
            sampler: Samples the devices meanwhile; None for none.

        Returns:
            Whether the time limit ended the processes; False without a ``limit`` to print.
        """
        pid, start = holder
        if process.start_time(pid) != start:  # the id belongs to another process by now
            pid = 0
        pause = again = _LOOK_SECONDS
        timed_out = False
        try:
            while True:
                due = None if self._holder_enforces(holder) else self._next_moment(until)
                if _wait(pid, _LONGEST_PAUSE if pid else pause, due, sampler):
                    self._close_error()
                pause = _LOOK_SECONDS if pid else min(2 * pause, _LONGEST_LOOK_SECONDS)
                if due is not None:
                    self._countdown.step()
                if due is not None and _is_past(until) and self._is_active():
                    if sampler is not None:
                        sampler.stop()
                    timed_out = self._end(printed=timed_out)
                    until = process.boot_seconds() + again  # some may be left, such as another user's process
                    again = min(2 * again, _LONGEST_PAUSE)
                with contextlib.suppress(AnyaccelError):
                    carriers = self._ledger.find_carriers(self._lease)
                    if carriers is None:
                        return timed_out
                    # Watch another carrier of the mark: its exit is the next moment at which the lease can end.
                    if not pid or process.start_time(pid) != start:
                        self._close_error()
                        pid = next(iter(carriers), 0)
                        start = process.start_time(pid) or 0
        finally:
            if sampler is not None:
                sampler.stop()

    def _holder_enforces(self, holder: tuple[int, int]) -> bool:
        """Return whether the holder lives and enforces the time limit; False for good once the holder is gone.

        In doubt the holder lives. At the moment when it is gone, an early signal that was due already is dropped: the
        holder has sent the signal.
        """
        if self._stays and process.gone(*holder):
            self._stays = False
            if _is_past(self._countdown.early_at):  # the holder has sent it
                self._countdown.early_at = None
        return self._stays

    def _next_moment(self, until: float | None) -> float | None:
        """Return the time of the early signal or of the end, in seconds since the boot; None for never."""
        return min((each for each in (until, self._countdown.early_at) if each is not None), default=None)

    def _is_active(self) -> bool:
        """Return whether the lease is active; True if the ledger cannot be read, so that :meth:`_end` is tried."""
        try:
            return self._ledger.find_carriers(self._lease) is not None
        except AnyaccelError:
            return True

    def _end(self, *, printed: bool) -> bool:
        """Print the time limit, and end the processes of the lease: SIGTERM, grace, SIGKILL.

        Returns once the lease has ended, or the processes that are left cannot be ended; errors of the ledger are
        ignored. Without a limit, nothing is printed.

        Args:
            printed: Whether the time limit is on standard error already.

        Returns:
            Whether there is a time limit to record.
        """
        limit = self._limit
        if limit is not None and not printed:
            self._print(limit.message)  # before the end: a shell shows its prompt once the command has exited
        with contextlib.suppress(AnyaccelError):
            self._ledger.end_lease(self._lease, grace=GRACE_SECONDS if limit is None else limit.grace, force=True)
        return limit is not None

    def _print(self, text: str) -> None:
        """Print a line on the command's standard error, if open, or give up after ``_PRINT_SECONDS``, by SIGALRM."""

        def give_up(*_: object) -> None:
            raise TimeoutError

        if self._error < 0:
            return
        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, _PRINT_SECONDS)
        try:
            print_line(text, self._error)
        except TimeoutError:
            return
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _close_error(self) -> None:
        """Close the command's standard error, unless closed already."""
        if self._error >= 0:
            os.close(self._error)
            self._error = -1


def _is_past(moment: float | None) -> bool:
    """Return whether a moment, in seconds since the boot, has come; False for None."""
    return moment is not None and process.boot_seconds() >= moment


def _wait(pid: int, pause: float, until: float | None, sampler: Sampler | None) -> bool:
    """Wait for the exit of a process, and sample the devices meanwhile.

    If the process cannot be watched, as after the exit, the wait takes ``_LOOK_SECONDS`` at most, whatever ``pause``
    is. Exceptions of the sampler's ``tell`` pass through.

    Args:
        pid: The process; 0 for none.
        pause: Longest time to wait, in seconds.
        until: End of the wait, in seconds since the boot; None for none.
        sampler: Samples the devices; None for none.

    Returns:
        True if the process was seen to exit; False at the end of the wait.
    """
    exited = -1
    if pid:
        try:
            exited = os.pidfd_open(pid)
        except OSError:  # it has exited, or no descriptor is free
            pause = _LOOK_SECONDS
    over = time.monotonic() + pause
    try:
        while (left := _seconds_left(over, until)) > 0:
            poll = select.poll()
            if exited >= 0:
                poll.register(exited, select.POLLIN)
            if sampler is not None:
                left = min(left, sampler.seconds)
                if sampler.answer >= 0:
                    poll.register(sampler.answer, select.POLLIN)
            ready = poll.poll(left * 1000 + 1)  # rounded up: a poll that ends too early would spin
            if any(descriptor == exited for descriptor, _ in ready):
                return True
            if sampler is not None:
                sampler.step()
        return False
    finally:
        if exited >= 0:
            os.close(exited)


def _seconds_left(over: float, until: float | None) -> float:
    """Return the seconds until the earlier of two deadlines, by the monotonic clock and the clock since the boot.

    Negative once a deadline is past. Only the clock since the boot goes on while the machine sleeps.
    """
    left = over - time.monotonic()
    return left if until is None else min(left, until - process.boot_seconds())


class Sampler:
    """Samples devices without blocking: the caller calls :meth:`step` once :attr:`seconds` are over.

    Args:
        inventory: The machine, with the leased devices alone.
        every: Seconds between two samples; the first pauses are shorter.
        tell: Called with each sample, by device id.

    Attributes:
        answer: Descriptor that becomes readable with an answer; -1 if no sample is being taken.
    """

    def __init__(self, inventory: Inventory, every: float, tell: Callable[[Mapping[str, Stats]], object]) -> None:
        self._inventory = inventory
        self._every = every
        self._tell = tell
        self._gap = min(FIRST_SECONDS, every)
        self._at = time.monotonic() + self._gap
        self._asking = 0
        self._failures = 0
        self._data = b""
        self.answer = -1

    @property
    def seconds(self) -> float:
        """Seconds until the next call of :meth:`step`, unless :attr:`answer` is readable before; 0 once it is due.

        Infinite when sampling has stopped.
        """
        return max(0.0, self._at - time.monotonic())

    def step(self) -> None:
        """Begin a sample, read an arrived part of an answer, or give up a sample after its time; return at once.

        A complete sample goes to ``tell``, whose exceptions pass through. Without an answer, nothing happens before
        :attr:`seconds` are over. Sampling stops for good after three failures in a row, and if the devices report
        neither load nor memory.
        """
        over = not self.seconds
        if self._asking and (self._read() or over):
            self._done()
        elif over:
            try:
                self._ask()
            except OSError:  # no process or descriptor is free
                self._failed()

    def stop(self) -> None:
        """Stop sampling for good; kill and reap the process of a sample in progress. A second call has no effect."""
        self._at = float("inf")
        self._end()

    def _ask(self) -> None:
        """Start a process to take a sample, which has ``LIMIT_SECONDS``.

        Raises:
            OSError: If no process or descriptor is free.
        """
        # Not in this process: a plug-in may hang, and what it loads would stay in memory.
        self._asking, self.answer = start_helper(self._answer)
        os.set_blocking(self.answer, False)
        self._data = b""
        self._at = time.monotonic() + LIMIT_SECONDS

    def _answer(self, write: int) -> int:
        """Ask the vendors, write load and used memory of the observed devices to a descriptor as JSON, and close it.

        Runs in the sampling process.

        Returns:
            The exit status: 1, without an answer, if the vendors report problems alone; else 0, also if no device was
            observed.
        """
        from anyaccel.inventory.observe import stats

        observed, problems = stats(self._inventory)
        if problems and not observed:
            return 1
        counted = {
            name: Stats(utilization=seen.utilization, memory_used_bytes=seen.memory_used_bytes)
            for name, seen in observed.items()
        }
        with open(write, "wb") as file:
            file.write(json.dumps(encode(counted)).encode())
        return 0

    def _read(self) -> bool:
        """Append the arrived part of the answer; return True at its end and after an error, False if more may come."""
        try:
            while chunk := os.read(self.answer, _CHUNK):
                self._data += chunk
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def _done(self) -> None:
        """End the sampling process, pass the sample to ``tell``, and schedule the next.

        An invalid answer is a failure; a valid answer resets the count of failures. Without load and memory of any
        device, ``tell`` is not called, and no further sample is taken.
        """
        self._end()
        found = _decoded(self._data)
        if found is None:
            self._failed()
            return
        self._failures = 0
        if any(each != Stats() for each in found.values()):
            self._tell(found)
            self._next()
        else:  # the vendor reports neither, and will not in an hour
            self._at = float("inf")

    def _failed(self) -> None:
        """Count a failure and schedule the next sample; stop sampling after three failures in a row."""
        self._failures += 1
        self._next()
        if self._failures >= _MOST_FAILURES:
            self._at = float("inf")

    def _next(self) -> None:
        """Schedule the next sample, and double the pause after that, up to ``every``."""
        self._at = time.monotonic() + self._gap
        self._gap = min(2 * self._gap, self._every)  # a short lease gets a sample, a long one few

    def _end(self) -> None:
        """Kill and reap the sampling process, with which its children die, and close the answer.

        No effect if no sample is being taken.
        """
        child, self._asking = self._asking, 0
        if not child:
            return
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(self.answer)
        self.answer = -1


def make_sampler(
    inventory: Inventory, shares: tuple[Share, ...], tell: Callable[[Mapping[str, Stats]], object]
) -> Sampler | None:
    """Make the sampler of leased devices.

    Args:
        inventory: The machine.
        shares: The leased shares; declared devices are left out.
        tell: As for :class:`Sampler`.

    Returns:
        The sampler, which is independent of later changes of the working directory; None if the machine is simulated,
        if no device is left, if the user wants no samples, or if the user's configuration cannot be read.
    """
    devices = tuple({share.device.id: share.device for share in shares if not share.device.declared}.values())
    machine = inventory.machine
    if not devices or machine.startswith(SIMULATION):
        return None
    try:
        every = float(configuration.user().get("journal.sample_every"))
    except ConfigurationError:
        return None
    if not every:
        return None
    if machine != HOST:
        machine = os.path.abspath(machine)  # the monitor changes its working directory
    return Sampler(replace(inventory, machine=machine, devices=devices), every, tell)


def _decoded(data: bytes) -> dict[str, Stats] | None:
    """Parse an answer, a JSON object; None if it is anything else, or has invalid values."""
    try:
        return {name: decode(Stats, words) for name, words in json.loads(data).items()}
    except (ValueError, AttributeError, TypeError):  # no JSON; no object; no values
        return None
