"""The use of devices, from when they were taken to when they were given back, for the journal."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from functools import cache

from anyaccel import configuration
from anyaccel.errors import ConfigurationError
from anyaccel.ledger.journal import IDLE_BELOW, JournalEntry, Used, write
from anyaccel.linux import mark as marks
from anyaccel.linux.fork import renew_in_child, tidy_in_child
from anyaccel.model import Allocation, Share, Stats, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol, Self

    from anyaccel.ledger import Lease

    class Ends(Protocol):
        """What is told of the end of a use."""

        def ended(self, status: int | None = None, *, timed_out: bool = False) -> None:
            """Write down that it has ended."""


SHORT_SECONDS = 1.0
"""What was held for less by a pool is added up, and written once in a while."""
FLUSH_SECONDS = 60.0


class UsageMeter:
    """One lease that is being used.

    Args:
        lease: Identity of the lease.
        shares: What it holds.
        request: What was asked for.
        note: What for.
        waited: Seconds for which the request waited.
        program: Name of the program; that of this process when empty.
        added_up: Whether it may be written later, with others like it, when it was short.

    Attributes:
        lease: Identity of the lease.
    """

    def __init__(
        self,
        lease: str,
        shares: Iterable[Share],
        request: str,
        note: str,
        *,
        waited: float,
        program: str = "",
        added_up: bool = False,
    ) -> None:
        self.lease = lease
        self._devices: dict[str, Used] = {}
        for share in shares:
            device = share.device
            known = self._devices.get(device.id)
            units = share.units + (known.units if known else 0)
            self._devices[device.id] = Used(device=device.name, type=device.type, units=units)
        self._last: dict[str, float] = {}
        self._request = request
        self._note = note
        self._waited = waited
        self._added_up = added_up
        self._program = program or (sys.argv[0] if getattr(sys, "argv", None) else "")
        self._began = time.time()
        self._clock = time.monotonic()
        self._open = True

    def fared(self, told: Mapping[str, Stats]) -> None:
        """Take notice of how the devices fare: for each, it stands for the time since the last word of it.

        Args:
            told: What the vendors say, by device id.
        """
        now = time.monotonic()
        for name in told.keys() & self._devices.keys():
            self._devices[name] = _with(self._devices[name], told[name], now - self._last.get(name, self._clock))
            if told[name].utilization is not None:
                self._last[name] = now

    def ended(self, status: int | None = None, *, timed_out: bool = False) -> None:
        """Write down that it has ended.

        Args:
            status: Exit status of the command; None where nobody can tell.
            timed_out: Whether its time limit has ended it.
        """
        if not self._open or not wanted():
            return
        self._open = False
        held = time.monotonic() - self._clock
        entry = JournalEntry(
            lease=self.lease,
            user="",
            began=self._began,
            ended=self._began + held,
            held=held,
            waited=self._waited,
            devices=tuple(self._devices.values()),
            request=self._request,
            note=self._note,
            program=os.path.basename(self._program),
            exit=status,
            timeouts=int(timed_out),
        )
        if self._added_up and held < SHORT_SECONDS:
            _SHORT.add(entry)
        else:
            write(entry)


class OpenLease:
    """A lease that is open, with its line in the journal.

    Attributes:
        lease: The lease; None when nothing is held, since the request fell back to the CPU.
        allocation: What is held.
        note: What it is for.
        waited: Seconds for which the request waited.
        timed_out: Whether a time limit has ended what used the devices.
    """

    def __init__(self, lease: Lease | None, allocation: Allocation, *, note: str = "", waited: float = 0.0) -> None:
        self.lease = lease
        self.allocation = allocation
        self.note = note
        self.waited = waited
        self.timed_out = False
        self._carried = False
        self._line: Ends | None = None

    def usage(self, program: str = "") -> UsageMeter:
        """Begin a line of the journal.

        Args:
            program: Name of the program that uses the devices; that of this process when empty.
        """
        held = self.allocation
        return UsageMeter(held.id, held.shares, str(held.request), self.note, waited=self.waited, program=program)

    def begin_entry(self, program: str = "") -> Self:
        """Have a line in the journal, as of :meth:`usage`, when the devices are given back; return the same."""
        if self.lease:
            self.attach_writer(self.usage(program))
        return self

    def mark_process(self) -> Self:
        """Put the mark of the lease on this process, which holds the devices for itself; return the same."""
        if self.lease:
            marks.put(self.lease.mark)
            self._carried = True
        return self

    def attach_writer(self, line: Ends, *, at_exit: bool = True) -> None:
        """Have the line written when the devices are given back.

        Args:
            line: What writes it, once it is told of the end.
            at_exit: Whether it is told so as well when this process ends before.
        """
        self._line = line
        if at_exit:
            _open.add(line)
        _register()

    def finish_entry(self, status: int | None = None, *, timed_out: bool = False) -> None:
        """Write the line now, if that was not done before.

        Args:
            status: Exit status of the command that used the devices; None where there was none.
            timed_out: Whether its time limit has ended it.
        """
        line, self._line = self._line, None
        if line is not None:
            _open.discard(line)
            line.ended(status, timed_out=timed_out or self.timed_out)

    def end_lease(self, mark: marks.Mark | None = None) -> None:
        """Write the line, and give the devices back; does nothing the second time.

        Args:
            mark: The mark of what was started with the devices, to which they are left; None where nothing was.
        """
        try:
            self.finish_entry()  # first: it says until when they were held
        finally:
            if self.lease is not None and mark is not None:
                self.lease.leave_to(mark)
            elif self.lease is not None:
                self.lease.release()


_open: set[Ends] = set()
"""What writes a line when this process ends, for devices that were not given back by then."""
tidy_in_child(_open.clear)  # the parent holds the devices, and writes the lines


@cache
def _register() -> None:
    import atexit

    atexit.register(_end_all)


def _end_all() -> None:
    while _open:
        _open.pop().ended()
    _SHORT.pause = 0.0  # pools may end their workers after this
    _SHORT.flush()


def _with(used: Used, seen: Stats, seconds: float) -> Used:
    """A device with how it fared for some more seconds."""
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


class _Short:
    """Short uses that are written as one.

    Attributes:
        pause: Seconds between two writes.
    """

    def __init__(self) -> None:
        self.pause = FLUSH_SECONDS
        self._lock = renew_in_child(threading.Lock())
        self._entries: dict[tuple[object, ...], JournalEntry] = {}
        self._flushed = time.monotonic()

    def add(self, entry: JournalEntry) -> None:
        """Add one to those like it."""
        key = (entry.devices, entry.request, entry.note)
        with self._lock:
            known = self._entries.get(key)
            self._entries[key] = entry if known is None else _sum(known, entry)
            due = time.monotonic() - self._flushed >= self.pause
        if due:
            self.flush()

    def clear(self) -> None:
        """Forget all of them: the parent writes them."""
        self._entries = {}

    def flush(self) -> None:
        """Write all of them."""
        with self._lock:
            entries, self._entries = list(self._entries.values()), {}
            self._flushed = time.monotonic()
        for entry in entries:
            write(entry)


def _sum(first: JournalEntry, more: JournalEntry) -> JournalEntry:
    return replace(
        first,
        ended=max(first.ended, more.ended),
        held=first.held + more.held,
        waited=first.waited + more.waited,
        leases=first.leases + more.leases,
        timeouts=first.timeouts + more.timeouts,
    )


def wanted() -> bool:
    """Whether the user wants a journal; also where the configuration cannot be read."""
    try:
        return bool(configuration.user().get("journal.keep"))
    except ConfigurationError:
        return True


_SHORT = _Short()
tidy_in_child(_SHORT.clear)
