"""Open leases of this process: entries in the journal, and the handover of devices by the vendors.

Vendors change devices when these are given to a holder, and undo the change when they are given back. Only plug-ins
with ``anyaccel_handover`` are called, and only for detected devices of this host. A holder can be killed at any time,
and then undoes nothing. So each handover first puts the devices into their idle state, whatever happened before. The
holders of shares of a device have one handover in common: the first gives, the last takes back.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import allocate_lock
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from anyaccel import configuration
from anyaccel._interrupts import finish_step
from anyaccel.errors import AnyaccelError, ConfigurationError, PluginError
from anyaccel.launcher.scope import Scope
from anyaccel.ledger import BLOCKED, IDLE_BELOW, JournalEntry, Ledger, Used, count_half_life, is_named, journal
from anyaccel.linux import mark as marks
from anyaccel.linux import renew_in_child, tidy_in_child
from anyaccel.model import Allocation, Device, Inventory, Stats, replace
from anyaccel.probe import HOST
from anyaccel.text import printable
from anyaccel.vendors import hand_over, vendor_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

    from anyaccel.ledger import Lease

EntryWriter = Callable[..., None]
"""Writes the journal entry at the end of a lease; see :meth:`UsageMeter.finish` for the arguments."""

SHORT_SECONDS = 1.0
"""Leases of a pool that were shorter share an entry."""
FLUSH_SECONDS = 60.0


class UsageMeter:
    """Measures the use of a lease from now on, and writes the journal entry.

    Args:
        opened: The lease, of which something is held.
        program: Name of the program that uses the devices; the name of this process if empty.
        added_up: Whether a short lease may share an entry with others of the same kind.
    """

    def __init__(self, opened: OpenLease, program: str = "", *, added_up: bool = False) -> None:
        self._directory = opened.lease.path if opened.lease else ""
        self._devices: dict[str, Used] = {}
        for share in opened.allocation.shares:
            device = share.device
            known = self._devices.get(device.id)
            units = share.units + (known.units if known else 0)
            self._devices[device.id] = Used(device=device.name, type=device.type, units=units)
        self._added_up = added_up
        self._entry = JournalEntry(
            lease=opened.allocation.id,
            user="",  # the owner of the file is the user: a written name would prove nothing
            began=time.time(),
            ended=0.0,
            held=0.0,
            waited=opened.waited,
            devices=(),
            request=str(opened.allocation.request),
            note=opened.note,
            program=os.path.basename(program or (sys.argv[0] if getattr(sys, "argv", None) else "")),
        )
        self._clock = self._sampled = time.monotonic()  # durations must not follow a clock that is set
        self._open = True

    def add_sample(self, stats: Mapping[str, Stats]) -> None:
        """Add a sample of the devices' load and memory; devices outside the lease are ignored.

        A load stands for the time since the last sample with a load, or since the start. Memory counts for the peak
        only.

        Args:
            stats: The sample, by device id.
        """
        now = time.monotonic()
        for name in stats.keys() & self._devices.keys():
            self._devices[name] = _add_sample(self._devices[name], stats[name], now - self._sampled)
        if any(seen.utilization is not None for seen in stats.values()):  # memory alone says nothing about the time
            self._sampled = now

    def finish(self, status: int | None = None, *, timed_out: bool = False) -> None:
        """Write the entry, once; with ``added_up``, add a lease under ``SHORT_SECONDS`` to a sum that is written later.

        Does nothing if neither the user nor the machine keeps a journal of the lease. For the machine alone, request,
        note, program and measurements are left out. An entry that cannot be written is lost.

        Args:
            status: Exit status of the command; None if it is unknown.
            timed_out: Whether the time limit ended the command.
        """
        if not self._open or not is_journal_kept(self._directory):  # the setting may have changed since the start
            return
        self._open = False
        held, devices = time.monotonic() - self._clock, tuple(self._devices.values())
        entry = replace(self._entry, ended=self._entry.began + held, held=held, exit=status, timeouts=int(timed_out))
        if is_journal_wanted():
            entry = replace(entry, devices=devices)
        else:
            plain = tuple(Used(device=each.device, type=each.type, units=each.units) for each in devices)
            entry = replace(entry, devices=plain, request="", note="", program="")
        if self._added_up and held < SHORT_SECONDS:
            _short_leases.add(entry, shared=not is_named(self._directory))
        else:
            journal.write(entry, shared=not is_named(self._directory))


class Handover:
    """The handover of the devices of a lease.

    Args:
        ledger: The ledger of the lease.
        lease: Identity of the lease.
        devices: The devices whose vendors have the hook, by their name in the ledger.
        environ: The environment of the vendors' calls.
    """

    def __init__(self, ledger: Ledger, lease: str, devices: Mapping[str, Device], environ: Mapping[str, str]) -> None:
        self._ledger = ledger
        self._lease = lease
        self._devices = devices
        self._environ = environ

    def give(self) -> None:
        """Put the devices into their idle state, then change them for the holder; call it before the holder starts.

        A device whose handover is complete stays unchanged if it was given to this lease, or is in another active
        lease. So a second call completes a handover that was interrupted. The call waits for other handovers of the
        devices. After an error or an interrupt, :meth:`take_back` undoes the change.

        Raises:
            PluginError: When a vendor fails.
            LedgerBusyError: When another handover of a device takes too long.
            LedgerError: When the ledger cannot be read, or the file of a device cannot be written.
        """
        with self._ledger.lock_handovers(self._devices) as files:
            shared = self._find_held(without=self._lease)
            changed = [
                name
                for name, file in files.items()
                if not file.given_to or (name not in shared and file.given_to != self._lease)
            ]
            for name in changed:
                files[name].write(self._lease, "changing")
            for given in (False, True):
                self._call(changed, given=given)
            for name in changed:
                files[name].write(self._lease, "given")

    def take_back(self) -> None:
        """Put the devices that no holder has into their idle state; call it after the end of the lease.

        Devices in their idle state are left out. The call waits for other handovers of the devices, for a limited time.
        A timeout, or a failure of a vendor or the ledger, is logged as a warning; ``anyaccel doctor`` names the device,
        and the next :meth:`give` tries again.
        """
        try:
            with self._ledger.lock_handovers(self._devices) as files:
                held = self._find_held()
                changed = [name for name, file in files.items() if name not in held and file.changed]
                for name in changed:
                    files[name].write(self._lease, "changing")
                self._call(changed, given=False)
                for name in changed:
                    files[name].clear()
        except AnyaccelError as error:
            import logging  # 8 ms, which a command that hands nothing over does without

            logging.getLogger("anyaccel").warning(
                "devices of lease %s were not put back into their idle state: %s", self._lease, error
            )

    def _find_held(self, without: str = "") -> set[str]:
        """Return the ledger's names of the devices that active leases of all users hold.

        Drains and reservations do not count, nor does a device that is only marked as divided, for the lease of a part.

        Args:
            without: Identity of a lease that is left out.

        Raises:
            LedgerError: If the ledger cannot be read.
        """
        return {
            record.device
            for record in self._ledger.leases()
            if record.units and record.state not in BLOCKED and record.id != without
        }

    def _call(self, names: Sequence[str], *, given: bool) -> None:
        """Call the hooks of the vendors of devices, all at once; then raise the first problem as PluginError.

        Does nothing without devices.

        Args:
            names: The devices, by their names in the ledger.
            given: Whether to change the devices for a holder, or to put them into their idle state.

        Raises:
            PluginError: When a vendor fails, or a plug-in is not installed any more.
        """
        devices = [self._devices[name] for name in names]
        if devices and (problems := hand_over(devices, self._environ, given=given)):
            raise PluginError(problems[0])


def plan_handover(
    lease: str,
    devices: Sequence[Device],
    inventory: Inventory,
    environ: Mapping[str, str],
) -> Handover | None:
    """Return the handover of the lease's detected devices whose vendors have the hook; no device is changed yet.

    Vendors' processes may be started; a vendor whose process fails counts as a vendor without the hook. None without
    such a device, without a lease, and on a machine that is not this host. Also None inside an outer lease: its devices
    were handed over to the holder of that.

    Args:
        lease: Identity of the lease; empty if the request fell back to the CPU.
        devices: Its devices.
        inventory: The machine.
        environ: The environment of the request, which names the ledger.

    Raises:
        UsageError: If the environment names a lease, and ``ANYACCEL_ALLOCATION`` is invalid.
        LedgerError: If the ledger cannot be opened.
    """
    if not lease or inventory.machine != HOST:
        return None
    detected = [device for device in devices if not device.declared]
    vendors = [vendor for vendor in {device.vendor for device in detected} if has_hook(vendor, "anyaccel_handover")]
    if not vendors or (scope := Scope.make(inventory, environ)).prefix:
        return None
    named = {scope.names[device.id][0]: device for device in detected if device.vendor in vendors}
    return Handover(Ledger.open(environ), lease, named, environ)


def has_hook(vendor: str, hook: str) -> bool:
    """Return whether a vendor's plug-in has a hook, given with ``anyaccel_``.

    False if the plug-in is not installed here, or fails. The vendor's process is started if needed.
    """
    try:
        return vendor_process(vendor).implements(hook)
    except AnyaccelError:
        return False


class OpenLease:
    """A lease before the release, with the journal entry.

    Attributes:
        lease: The lease; None if the request fell back to the CPU, so that nothing is held.
        allocation: The devices of the lease.
        note: The note of the request.
        waited: Seconds for which the request waited.
        timed_out: Whether a time limit ended the work on the devices.
        handover: What the vendors have to do for the holder, and to undo at the end; None for nothing.
    """

    def __init__(self, lease: Lease | None, allocation: Allocation, *, note: str = "", waited: float = 0.0) -> None:
        self.lease = lease
        self.allocation = allocation
        self.note = note
        self.waited = waited
        self.timed_out = False
        self.handover: Handover | None = None
        self._carried = False
        self._writer: EntryWriter | None = None
        self._writing = 0  # the process that writes the entry

    @property
    def mark(self) -> marks.Mark:
        """The mark in the lease; empty if nothing is held."""
        return self.lease.mark if self.lease else ()

    def begin_entry(self, program: str = "") -> Self:
        """Begin the journal entry, finished when the lease ends or this process exits; return the same object.

        A former entry must have been finished. Does nothing if nothing is held. The entry is written only if a journal
        is kept at the end.

        Args:
            program: As for :class:`UsageMeter`.
        """
        if self.lease:
            self.attach_writer(UsageMeter(self, program).finish)
        return self

    def mark_process(self) -> Self:
        """Put the mark of the lease on this process for good; later child processes inherit it. Return the same object.

        Unless released, the lease lasts until this process and these children have ended. Does nothing if nothing is
        held or the lease has no mark.

        Raises:
            OSError, ValueError: If the kernel refuses.
        """
        if self.lease:
            marks.put(self.lease.mark)
            self._carried = True
        return self

    def note_line(self) -> Self:
        """Remember the lease and the line of the program that acquired it, until the release; return the same object.

        If only the release of such leases could serve a later request that waits without limit, and this process has no
        other thread, that request raises DeadlockError; messages about waits name the lines. So call this only for a
        lease that the program itself releases: the wait for another one would end. Does nothing if nothing is held.
        """
        for key in [key for key, (other, _) in tuple(_own.items()) if other.released]:
            _own.pop(key, None)
        if self.lease is not None:
            _own[self.lease.id] = self.lease, _find_calling_line()
        return self

    def attach_writer(self, writer: EntryWriter, *, at_exit: bool = True) -> None:
        """Set the writer of the journal entry; a former writer must have finished.

        Args:
            writer: The writer, called once when the lease ends.
            at_exit: Whether the writer is also called when this process exits before. In a forked child it is not.
        """
        self._writer, self._writing = writer, os.getpid()
        if at_exit:
            _open_writers.add(writer)
        _register_exit()

    def finish_entry(self, status: int | None = None, *, timed_out: bool = False) -> None:
        """Have the attached writer finish the journal entry, and detach the writer.

        Does nothing without a writer, and in a process that was forked since: the parent writes the entry.

        The writer may write the entry later, as a part of a sum, or not at all: see :meth:`UsageMeter.finish`.

        Args:
            status: Exit status of the command on the devices; None if there was none.
            timed_out: Whether the time limit ended the command; :attr:`timed_out` counts as well.
        """
        writer, self._writer = self._writer, None
        if writer is not None and self._writing == os.getpid():
            _open_writers.discard(writer)
            writer(status, timed_out=timed_out or self.timed_out)

    def end_lease(self, mark: marks.Mark | None = None) -> None:
        """Finish the journal entry, release the devices or leave them to a mark, and call :meth:`take_back`.

        A second call has no effect. Each step is taken even if the step before fails; the last error is raised. In a
        forked child, no entry is written, and the parent keeps the devices.

        Args:
            mark: The mark of the processes that keep the devices until they exit; None to release them at once.

        Raises:
            LedgerError: If the ledger cannot be read while the devices are left to a mark.
        """
        finish_step(lambda: self._end(mark))

    def _end(self, mark: marks.Mark | None) -> None:
        """Take each step of the end; a second call takes those that an interrupt has left."""
        try:
            self.finish_entry()  # before the release: the entry says until when the devices were held
        finally:
            try:
                if self.lease is not None and mark is not None:
                    self.lease.leave_to(mark)
                elif self.lease is not None:
                    self.lease.release()
            finally:
                self.take_back()

    def release(self) -> None:
        """Call :meth:`end_lease`; a subclass has more to end."""
        self.end_lease()

    def hand_over(self) -> None:
        """Have the vendors change the devices for the holder, which must not have started; see :class:`Handover`.

        Does nothing if no vendor has a change to make.

        Raises:
            PluginError, LedgerError: When this fails. The end of the lease undoes it.
        """
        if self.handover is not None:
            self.handover.give()

    def take_back(self) -> None:
        """Have the vendors undo the handover of the devices, unless a holder is left; see :meth:`Handover.take_back`.

        A failure is logged. A second call does nothing.
        """
        if (handover := self.handover) is not None:
            handover.take_back()
            self.handover = None  # last: after an interrupt, a second call does all of it again


_own: dict[str, tuple[Lease, str]] = {}
"""Leases by id with the calling line. There is no lock: a loop copies the items, since other threads note leases."""
tidy_in_child(_own.clear)


def list_own_leases() -> dict[str, tuple[Lease, str]]:
    """Return the leases that this process holds for itself, by id, each with the line of the program that acquired it.

    Only the program releases them; see :meth:`OpenLease.note_line`.
    """
    return {key: (lease, printable(line)) for key, (lease, line) in tuple(_own.items())}


def _find_calling_line() -> str:
    """Return ``file:line`` of the innermost frame outside this package, or else of the outermost frame."""
    frame = sys._getframe(1)  # noqa: SLF001 - inspect.stack() reads source files, and takes milliseconds
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_open_writers: set[EntryWriter] = set()
"""Writers of leases that are not released yet, called when this process exits."""
tidy_in_child(_open_writers.clear)  # the parent holds the devices, and writes the entries


@cache
def _register_exit() -> None:
    """Have :func:`_finish_all` called when this process exits; only the first call has an effect."""
    import atexit

    atexit.register(_finish_all)


def _finish_all() -> None:
    """Finish the entries of open leases, without exit status, if their writers were attached with ``at_exit``.

    The sums of short leases are written, too.

    From now on, each short lease is written at once.
    """
    while _open_writers:
        _open_writers.pop()()
    _short_leases.pause = 0.0  # the exit handlers of pools run after this one
    _short_leases.flush()


def _add_sample(used: Used, seen: Stats, seconds: float) -> Used:
    """Return the usage of a device with another sample, which stands for ``seconds``.

    The sample raises the peak of memory, and counts towards the mean load, which is weighted by time, and towards the
    idle time if the load is below :data:`IDLE_BELOW`. Without a load or a time, only memory counts.

    Args:
        used: The usage so far.
        seen: The sample; a load outside of 0 to 1 counts as the nearer of these.
        seconds: The time.
    """
    if seen.memory_used_bytes is not None:
        used = replace(used, memory_peak_bytes=max(used.memory_peak_bytes or 0, seen.memory_used_bytes))
    if seen.utilization is None or seconds <= 0:
        return used
    busy, observed = min(1.0, max(0.0, seen.utilization)), used.observed + seconds
    return replace(
        used,
        observed=observed,
        utilization=((used.utilization or 0.0) * used.observed + busy * seconds) / observed,
        idle=used.idle + (seconds if busy < IDLE_BELOW else 0.0),
    )


class _ShortLeases:
    """Journal entries of short leases, added up: a thousand short calls are not a thousand lines.

    Attributes:
        pause: Seconds between two writes.
    """

    def __init__(self) -> None:
        self.pause = FLUSH_SECONDS
        self._lock = renew_in_child(allocate_lock())
        self._entries: dict[tuple[bool, object, str, str], JournalEntry] = {}
        self._flushed = time.monotonic()

    def add(self, entry: JournalEntry, *, shared: bool) -> None:
        """Add an entry to the sum of entries for the same journal, with the same devices, measurements, request, note.

        If the last write is ``pause`` seconds ago, all sums are written; without a further entry, only :meth:`flush`
        writes the sums, as at the exit of this process.
        """
        key = (shared, entry.devices, entry.request, entry.note)
        with self._lock:
            known = self._entries.get(key)
            self._entries[key] = entry if known is None else _sum(known, entry)
            due = time.monotonic() - self._flushed >= self.pause
        if due:
            self.flush()

    def clear(self) -> None:
        """Drop the sums of short leases, in a forked child: the parent writes them."""
        self._entries = {}

    def flush(self) -> None:
        """Write the sums, and begin new ones; a sum that cannot be written is lost."""
        with self._lock:
            entries, self._entries = self._entries, {}
            self._flushed = time.monotonic()
        for (shared, *_), entry in entries.items():
            journal.write(entry, shared=shared)


def _sum(first: JournalEntry, more: JournalEntry) -> JournalEntry:
    """Return an entry for two of a kind: durations, leases and timeouts are added, and the later end counts.

    The rest, exit status included, is the first entry's.
    """
    return replace(
        first,
        ended=max(first.ended, more.ended),
        held=first.held + more.held,
        waited=first.waited + more.waited,
        leases=first.leases + more.leases,
        timeouts=first.timeouts + more.timeouts,
    )


def is_journal_kept(directory: str) -> bool:
    """Return whether leases of a state directory are written.

    They are if the user keeps a journal, or if fair shares of the machine count their past use. A faulty configuration
    of the machine counts as none.
    """
    return is_journal_wanted() or (not is_named(directory) and count_half_life() is not None)


def is_journal_wanted() -> bool:
    """Return whether the user keeps a journal; True by default, and if the configuration cannot be read."""
    try:
        return bool(configuration.user().get("journal.keep"))
    except ConfigurationError:
        return True


_short_leases = _ShortLeases()
tidy_in_child(_short_leases.clear)
