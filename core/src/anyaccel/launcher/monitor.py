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
import math
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from anyaccel import configuration
from anyaccel.errors import AnyaccelError, ConfigurationError
from anyaccel.launcher.environment import print_error
from anyaccel.launcher.hold import DeviceLease
from anyaccel.launcher.open_lease import UsageMeter, is_journal_kept, is_journal_wanted
from anyaccel.launcher.start import fork_child, start_helper
from anyaccel.launcher.time_limit import Countdown, TimeLimit, describe_timeout, print_line
from anyaccel.ledger import Ledger
from anyaccel.linux import GRACE_SECONDS, Mark, list_descriptors, process, signal
from anyaccel.model import Inventory, Share, Stats, decode, encode, replace
from anyaccel.probe import HOST, SIMULATION

NAME = "anyaccel-mon"
"""Process name of the monitor."""

_STATUS, _ERROR = 3, 4
"""Descriptors of the pipe with the exit status, and of the command's standard error."""
_LONGEST_PAUSE = 60.0
_LOOK_SECONDS = 2.0
"""Pause between two looks at a lease without a visible process, such as one in quarantine."""
_AGAIN_SECONDS = 10.0
"""Pause until processes that outlived the time limit, such as another user's, are ended once more."""
FIRST_SECONDS = 10.0
"""Time from the beginning of a lease to the first sample: a shorter lease costs nothing."""
LIMIT_SECONDS = 40
"""Time for one sample, with the start of the processes on a machine under load."""
_MOST_FAILURES = 3
"""Failures in a row after which sampling stops."""


def start_monitor(
    lease: DeviceLease, program: str = "", *, stays: bool = False, limit: TimeLimit | None = None
) -> None:
    """Start the monitor of a lease for this process, or for the command in place of this process.

    The monitor samples the devices, sends the early signal, ends the processes when the lease's time is up, and after
    the end of the lease writes the journal entry, undoes the handover of the devices, and removes the cgroup. Call this
    function before this process gets the mark, and while it has one thread.

    No monitor is started if nothing is leased, or if no process can be made; then there is no journal entry, no monitor
    takes the other steps, and a line on standard error says so if the time limit is not enforced. A monitor that cannot
    open the ledger takes no step either. A lease without an end has a monitor only for the journal, the handover or the
    cgroup.

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
    until, grouped = lease.lease.until, lease.launch.environment.group is not None
    if until is None and lease.handover is None and not grouped and not is_journal_kept(lease.lease.path):
        return
    meter, own = UsageMeter(lease, program), process.me()
    shares = lease.allocation.shares if is_journal_wanted() else ()
    sampler = make_sampler(lease.launch.inventory, shares, meter.add_sample)
    # Not by the monitor: a process without a terminal could tell no user why it does not enforce the limit.
    ledger, mark = Ledger.open(), lease.lease.mark
    end = limit or TimeLimit.for_lease(lease.lease, None, GRACE_SECONDS)

    def watch(error: int) -> int:
        ended = _LeaseWatch(ledger, lease.id, end, mark, sampler, error=error, stays=stays).run(own)
        exit_status, reported = _read_status(_STATUS)
        meter.finish(exit_status, timed_out=reported or (ended and limit is not None))
        lease.take_back()
        lease.remove_group()
        return 0

    unlimited = lease.id if until is not None and not stays else ""
    pipe = _start(watch, unlimited, keep_error=limit is not None and not stays)
    if pipe is None:
        return
    if stays:
        lease.attach_writer(partial(_send_status, pipe))
    else:
        os.close(pipe)


def end_in_time(lease: str, until: float) -> None:
    """Start a monitor to end the processes of a lease at a time, without a message and without a journal entry.

    The processes get SIGTERM, and SIGKILL after ``GRACE_SECONDS``; again every 10 s while the lease lasts.
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
    sampler = Sampler(Inventory(machine=HOST, devices=()), 0.0, print)
    watch = _LeaseWatch(Ledger.open(), lease, TimeLimit(seconds=0.0, until=until), (), sampler)
    pipe = _start(lambda _: watch.run((0, 0)), lease)
    if pipe is not None:
        os.close(pipe)


def _start(watch: Callable[[int], int], unlimited: str, *, keep_error: bool = False) -> int | None:
    """Start a process outside this one's children, and call a function there; return before the function ends.

    The process has a session of its own, the name ``NAME``, and no descriptor of the caller but the pipe and, possibly,
    a copy of standard error. SIGTERM and the signals of a terminal have no effect.

    Args:
        watch: Called with the descriptor of standard error, -1 for none; returns the exit status.
        unlimited: Identity of the lease whose time limit nothing enforces without the process, for a line on standard
            error; empty for none.
        keep_error: Whether the process keeps standard error.

    Returns:
        The write end of a pipe whose read end is ``_STATUS`` of the process; None if no process can be made.

    Raises:
        OSError: If no descriptor is free for the pipe.
    """
    reader, writer = os.pipe()

    def run() -> int:
        try:
            error = _close_inherited(reader, keep_error=keep_error)
        except OSError:
            _warn(unlimited)
            return 1
        return watch(error)

    # Two forks: the first leaves the session and exits, so that the second is a child of init, and no zombie of ours.
    # What takes long is left to the second, since a command waits for the first.
    def leave() -> int:
        _leave_session()
        try:
            fork_child(run)
        except OSError:
            return 1
        return 0

    try:
        failed = bool(process.reap(fork_child(leave)))
    except OSError:
        failed = True
    os.close(reader)
    if failed:
        os.close(writer)
        _warn(unlimited)
    return None if failed else writer


def _warn(unlimited: str) -> None:
    """Print on standard error that no monitor ends the processes of a lease at the time limit; nothing if empty."""
    if unlimited:
        way_out = f"'anyaccel release {unlimited}' ends it"
        print_error(f"no process can be made to end lease {unlimited} at its time limit; {way_out}")


def _send_status(pipe: int, status: int | None = None, *, timed_out: bool = False) -> None:
    """Send the exit status to the monitor, which writes the journal entry, and close the pipe; errors are ignored."""
    with contextlib.suppress(OSError), open(pipe, "wb", buffering=0) as file:
        file.write(f"{'' if status is None else status} {int(timed_out)}".encode())


def _read_status(pipe: int) -> tuple[int | None, bool]:
    """Read the report of :func:`_send_status`; does not wait. An error, or an invalid report, counts as no report.

    Returns:
        The exit status, None if unknown; and whether the time limit was reached, False without a report.
    """
    os.set_blocking(pipe, False)
    try:
        status, timed_out = os.read(pipe, 64).split(b" ")
        return int(status) if status else None, timed_out == b"1"
    except (OSError, ValueError):
        return None, False


def _leave_session() -> None:
    """Move this process into a session of its own, named ``NAME``, unaffected by SIGTERM and a terminal's signals."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A handler, unlike SIG_IGN, is not inherited by the tools that a vendor's plug-in starts.
    signal.signal(signal.SIGTERM, lambda *_: None)
    process.set_name(NAME)


def _close_inherited(status: int, *, keep_error: bool) -> int:
    """Close all descriptors but the pipe and, possibly, a copy of standard error.

    The standard streams lead to ``/dev/null``, and the working directory is ``/``.

    Args:
        status: Read end of the pipe, which becomes ``_STATUS``.
        keep_error: Whether to keep a copy of standard error, as ``_ERROR``.

    Returns:
        The descriptor of the copy; -1 for none, or if standard error was closed.

    Raises:
        OSError: If a descriptor cannot be opened, copied or listed.
    """
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
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it lasts as long as the process
    return error


class _LeaseWatch:
    """Waits for the end of a lease, samples the devices meanwhile, and ends the processes at the time limit.

    Args:
        ledger: The ledger.
        lease: Identity of the lease.
        limit: The time limit of the lease; None for none.
        mark: The mark of the lease, whose carriers get the early signal.
        sampler: Samples the devices.
        error: Descriptor of the command's standard error; -1 for none. The watch closes it after the exit of the
            command, so that a reader of it waits for the command alone.
        stays: Whether the holder enforces the time limit itself while it lives.
    """

    def __init__(
        self,
        ledger: Ledger,
        lease: str,
        limit: TimeLimit | None,
        mark: Mark,
        sampler: Sampler,
        *,
        error: int = -1,
        stays: bool = False,
    ) -> None:
        self._ledger = ledger
        self._lease = lease
        self._limit = limit
        self._countdown = Countdown(limit, mark, self._print)
        self._sampler = sampler
        self._error = error
        self._stays = stays

    def run(self, holder: tuple[int, int]) -> bool:
        """Wait for the end of the lease; stop the sampler then, or at the time limit.

        Unless a living holder enforces the time limit (``stays``), send the early signal, and end the processes at the
        limit; again every ``_AGAIN_SECONDS`` while the lease lasts. While the ledger cannot be read, the wait goes on.
        A lease whose state directory was deleted counts as ended. Standard error of the command is closed once the
        holder has exited.

        Args:
            holder: Process id and start time of the process that became the command.

        Returns:
            Whether this watch ended the processes at the time limit. False if the holder did so, which reports it
            through the status pipe.
        """
        watched, timed_out, again = holder, False, 0.0
        try:
            while (carriers := self._find_carriers()) is not None:
                # Watch another carrier of the mark: its exit is the next moment at which the lease can end.
                if not watched[0] or process.gone(*watched):
                    self._close_error()
                    pid = next(iter(carriers), 0)
                    watched = pid, process.start_time(pid) or 0
                left = math.inf
                # In doubt the holder lives.
                self._stays = self._stays and not process.gone(*holder)
                if self._limit is not None and not self._stays:
                    left = self._countdown.step() or again - process.boot_seconds()
                    if left <= 0:
                        self._sampler.stop()
                        self._end(self._limit, printed=timed_out)
                        timed_out, again = True, process.boot_seconds() + _AGAIN_SECONDS
                        continue
                _wait(watched[0], left, self._sampler)
            return timed_out
        finally:
            self._sampler.stop()

    def _find_carriers(self) -> tuple[int, ...] | None:
        """Return the processes that keep the lease, empty while the holder lives; None once the lease has ended.

        Also None if the state directory was deleted, and empty if the ledger cannot be read for now.
        """
        try:
            return self._ledger.find_carriers(self._lease)
        except AnyaccelError:
            # Deleted with its parent, a directory is an error, not an empty ledger: no later look would find the lease.
            return () if os.path.isdir(self._ledger.path) else None

    def _end(self, limit: TimeLimit, *, printed: bool) -> None:
        """Print the time limit, unless printed before, and end the processes of the lease: SIGTERM, grace, SIGKILL.

        Returns once the lease has ended, or the processes that are left cannot be ended; errors of the ledger are
        ignored.
        """
        if not printed:
            # Before the end: a shell shows its prompt once the command has exited.
            self._print(describe_timeout(limit.seconds))
        with contextlib.suppress(AnyaccelError):
            self._ledger.end_lease(self._lease, grace=limit.grace, force=True)

    def _print(self, text: str) -> None:
        """Print a line on the command's standard error, if open; see :func:`print_line`."""
        if self._error >= 0:
            print_line(text, self._error)

    def _close_error(self) -> None:
        """Close the command's standard error, unless closed already."""
        if self._error >= 0:
            os.close(self._error)
            self._error = -1


def _wait(pid: int, seconds: float, sampler: Sampler) -> None:
    """Wait for the exit of a process or the end of a time, and sample the devices meanwhile.

    The wait takes ``_LONGEST_PAUSE`` at most, and ``_LOOK_SECONDS`` if the process cannot be watched. Exceptions of the
    sampler's ``tell`` pass through.

    Args:
        pid: The process; 0 for none.
        seconds: The time, which goes on while the machine sleeps.
        sampler: Samples the devices.
    """
    exited = -1
    with contextlib.suppress(OSError):  # it has exited, or no descriptor is free
        exited = os.pidfd_open(pid) if pid else -1
    end = process.boot_seconds() + min(seconds, _LONGEST_PAUSE if exited >= 0 else _LOOK_SECONDS)
    try:
        while (left := end - process.boot_seconds()) > 0:
            poll = select.poll()
            for descriptor in (exited, sampler.answer):
                if descriptor >= 0:
                    poll.register(descriptor, select.POLLIN)
            # Rounded up: a poll that ends too early would spin.
            ready = poll.poll(min(left, sampler.seconds) * 1000 + 1)
            if any(descriptor == exited for descriptor, _ in ready):
                return
            sampler.step()
    finally:
        if exited >= 0:
            os.close(exited)


class Sampler:
    """Samples devices without blocking: the caller calls :meth:`step` when a sample is due or has arrived.

    Args:
        inventory: The machine, with the leased devices alone; without devices, no sample is taken.
        every: Seconds between two samples; the first pauses are shorter. No sample is taken if 0.
        tell: Called with each sample, by device id.

    Attributes:
        answer: Descriptor that becomes readable when the sample has arrived; -1 if no sample is being taken.
    """

    def __init__(self, inventory: Inventory, every: float, tell: Callable[[Mapping[str, Stats]], object]) -> None:
        self._inventory = inventory
        self._every = every
        self._tell = tell
        self._gap = min(FIRST_SECONDS, every)
        self._at = time.monotonic() + self._gap if inventory.devices and every else math.inf
        self._failures = 0
        self._child = 0
        self.answer = -1

    @property
    def seconds(self) -> float:
        """Seconds until the next sample; infinite while a sample is being taken, and after the last."""
        return math.inf if self.answer >= 0 else max(0.0, self._at - time.monotonic())

    def step(self) -> None:
        """Begin a sample that is due, or pass an arrived sample to ``tell``; does nothing otherwise.

        Exceptions of ``tell`` pass through. Sampling stops for good after three failures in a row, and if the devices
        report neither load nor memory. A sample for which no process is free is left out.
        """
        if self.answer < 0 and not self.seconds:
            self._at = time.monotonic() + self._gap
            self._gap = min(2 * self._gap, self._every)  # a short lease gets a sample, a long one few
            with contextlib.suppress(OSError):
                # Not in this process: a plug-in may hang, and what it loads would stay in memory.
                self._child, self.answer = start_helper(self._answer)
        elif self.answer >= 0 and process.is_readable(self.answer):
            with open(self.answer, "rb", closefd=False) as file:
                found = _decoded(file.read())  # to the end: the process writes all at once, and exits
            self._end()
            self._failures = 0 if found else self._failures + 1
            if found and any(each != Stats() for each in found.values()):
                self._tell(found)
            elif found is not None or self._failures >= _MOST_FAILURES:
                self.stop()

    def stop(self) -> None:
        """Stop sampling for good; kill and reap the process of a sample in progress. A second call has no effect."""
        self._at = math.inf
        self._end()

    def _answer(self, write: int) -> int:
        """Ask the vendors, write load and used memory of the observed devices to a descriptor as JSON, and close it.

        Runs in the sampling process, which is killed after ``LIMIT_SECONDS``.

        Returns:
            The exit status: 1, without an answer, if the vendors report problems alone; else 0, also if no device was
            observed.
        """
        from anyaccel.inventory.observe import stats

        signal.alarm(LIMIT_SECONDS)
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

    def _end(self) -> None:
        """Kill and reap the sampling process, with which its children die, and close the answer.

        No effect if no sample is being taken.
        """
        if self.answer < 0:
            return
        with contextlib.suppress(OSError):
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
        os.close(self.answer)
        self.answer = -1


def make_sampler(
    inventory: Inventory, shares: Sequence[Share], tell: Callable[[Mapping[str, Stats]], object]
) -> Sampler:
    """Make the sampler of leased devices, which is independent of later changes of the working directory.

    It takes no sample of a simulated machine, or if the user wants none, or if the user's configuration cannot be read.

    Args:
        inventory: The machine.
        shares: The leased shares; declared devices are left out.
        tell: As for :class:`Sampler`.
    """
    devices = tuple({share.device.id: share.device for share in shares if not share.device.declared}.values())
    machine, every = inventory.machine, 0.0
    if not machine.startswith(SIMULATION):
        with contextlib.suppress(ConfigurationError):
            every = float(configuration.user().get("journal.sample_every"))
        if machine != HOST:
            machine = os.path.abspath(machine)  # the monitor changes its working directory
    return Sampler(replace(inventory, machine=machine, devices=devices), every, tell)


def _decoded(data: bytes) -> dict[str, Stats] | None:
    """Parse an answer; None if the process was killed before it wrote all."""
    try:
        return {name: decode(Stats, words) for name, words in json.loads(data).items()}
    except ValueError:
        return None
