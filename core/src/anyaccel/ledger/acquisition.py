"""Acquire devices: read the directory, choose, publish a lease, and wait in line in between.

A request that waits is a ticket in the state directory. The first request in the order of service watches the directory
for leases that end; each other request watches the ticket ahead. So a device that becomes free wakes one process, and
so does a ticket that is removed. Every request also looks again at intervals: the number of watches per user is
limited, the process ahead may be stopped, and no event tells the end of some leases.

Choosing is optimistic. The names are read and the caller chooses without a lock, so that a slow choice, which may ask
plug-ins, delays no other request. Then the directory is locked and the names are read again. The choice is published
if the devices are still free and no ticket came in front; otherwise the attempt starts again.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from itertools import chain
from operator import index

from anyaccel._interrupts import finish_step
from anyaccel._typing import TypedDict
from anyaccel.backfill import latest_end, may_pass
from anyaccel.errors import DevicesBusyError, LeaseCancelledError, LimitError, UsageError
from anyaccel.ledger import entries, record, tickets
from anyaccel.ledger.directory import BUSY_SECONDS, StateDirectory, draw_pause
from anyaccel.ledger.entries import ENDLESS, MAX_PRIORITY, LeaseName, Life, Listing, Period
from anyaccel.ledger.lease import DeviceLocks, Lease, LockedFile, Place, Want, describe_lock
from anyaccel.ledger.machine_policy import current_policy, read_blocks, with_blocks, with_past
from anyaccel.ledger.record import LeaseRecord
from anyaccel.ledger.tickets import TicketFile, find_ended, hashed, list_holdings, read_ticket
from anyaccel.linux import FileEvents, process
from anyaccel.linux import mark as marks
from anyaccel.model import UNITS_PER_DEVICE, Extent, replace
from anyaccel.policy import PLAIN, OverLimit, Policy, Waiting, sum_usage
from anyaccel.text import clean, shown

Choose = Callable[[Mapping[str, Extent]], Mapping[str, Extent] | None]
"""Function that chooses an extent of each device to hold, by device name, given the taken extents; None if the free
devices do not suffice. A choice is of candidates, and of wholes as divided; an empty choice is valid."""

OnWait = Callable[[int, tuple[LeaseRecord, ...]], None]
"""Function called with the queue position, 1 for the next to be served, and the leases of suitable devices: once in
line, and after each change. There are no leases if only a limit of the user is in the way."""


class Terms(TypedDict, total=False):
    """Terms of an acquisition.

    Attributes:
        wait: Seconds to wait; 0 to take only what is free now, None, the default, to wait without end.
        priority: The higher, the earlier; by agreement among users.
        note: Purpose of the lease, for display.
        on_wait: Called with the queue position, 1 for the next, and with the leases, drains and reservations of
            suitable devices (empty if only a limit of the user is in the way): once the request is in line, and
            again if the position changes, or whether limits are in the way. An exception ends the wait.
        place: Queue position of an abandoned request to continue, which also records the position of a new ticket.
    """

    wait: float | None
    priority: int
    note: str
    on_wait: OnWait | None
    place: Place | None


IMPATIENT_SECONDS = 0.010
"""Seconds to wait before a ticket is made: for shorter waits the ticket costs more than the wait."""

_VANISHED = 50  # times that the directory may be deleted during one acquisition
_CONFLICTS = 3  # lost races in a row, after which the request enters the line instead of racing on
_CONFLICTS_AT_LAST = 100  # at the deadline there is no later attempt, so the race is worth more
_LOCK_SECONDS_AT_LAST = 1.0
_SWEPT = 4  # leftover files that one look removes: no request pays for all of them
_LAST = 1 << 62  # number of a request without ticket: behind every ticket
# A user has 128 inotify instances by default. Requests further back only poll: they cannot be served before the
# requests ahead of them, so a late look costs nothing until 64 of those leave at once.
_WATCHING = 64
_SECOND_LOOK = 0.001  # inotify reports a close before the kernel has released the lock


class Acquisition:
    """One request for devices, from the first look to the lease. Use an acquisition from one thread only.

    Nothing is taken and no line entered before the first attempt, but ``wait`` counts from now.

    Args:
        state: The state directory.
        want: The request. Without a time limit, the request gets the longest that the policy allows this user.
        choose: Chooses among the free devices; called without a lock, possibly often.
        wait, priority, note, on_wait, place: See :class:`Terms`.

    Attributes:
        place: Number of competing requests ahead, at the last look.
        before: The nearest ticket ahead that may not be passed; None when there is none.
        on_wait: Called with the progress of the wait; None to disable.
        limits: The limits of the user in the way at the last look, if nothing else was.

    Raises:
        UsageError: When ``wait`` or ``priority`` is out of range.
    """

    def __init__(
        self,
        state: StateDirectory,
        want: Want,
        choose: Choose,
        *,
        wait: float | None = None,
        priority: int = 0,
        note: str = "",
        on_wait: OnWait | None = None,
        place: Place | None = None,
    ) -> None:
        if wait is not None and not 0 <= wait <= math.inf:
            raise UsageError(f"wait must be seconds, 0 or more, or None (got {wait!r})")
        try:
            priority = index(priority)  # callers without a type checker may pass any value
        except TypeError:
            raise UsageError(f"priority must be a whole number (got {shown(priority)})") from None
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise UsageError(f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY} (got {priority!r})")
        self._state = state
        self._asked, self._priority, self._note, self._choose = want, priority, clean(note), choose
        self._want, self._policy, self._plain = want, PLAIN, True  # until adopt_policy()
        self._kept_place = place
        self._since = process.boot_seconds()
        self.on_wait = on_wait
        self.limits: tuple[OverLimit, ...] = ()
        self._began = time.monotonic()
        self._deadline = None if wait is None else self._began + wait
        self._ticket: TicketFile | None = None
        self.place = 0
        self.before: str | None = None
        self._ahead: list[str] = []
        self._only: frozenset[str] | None = None
        self._ended: Collection[str] = ()
        self._passes = False
        self._watch: FileEvents | None = None
        self._leaving: list[int] = []
        self._look_soon = False
        self._soon = _SECOND_LOOK
        self._over: set[str] = set()
        self._vanished = 0
        self._contradicted: dict[str, str] = {}
        self._conflicts = 0
        self._told: tuple[int, bool] | None = None
        self._late = False
        self._callers: OSError | None = None
        self._files: dict[str, LockedFile] = {}
        self._device_locks = DeviceLocks()
        self._lease: Lease | None = None

    def get(self) -> Lease:
        """Acquire the devices, waiting in line if necessary; see :meth:`anyaccel.ledger.Ledger.acquire`.

        The line is left in any case. Any exception, also an interrupt, undoes the acquisition before it goes on.
        """
        try:
            while (lease := self.attempt()) is None:
                self.sleep()
            self.leave_line()
        except BaseException:
            finish_step(self.undo)
            raise
        return lease

    async def get_async(self) -> Lease:
        """Acquire the devices on the running event loop, without a thread.

        An attempt blocks the loop while ``choose`` runs, and while another process has the directory locked; so does
        ``on_wait``. The exceptions are those of :meth:`get`, and CancelledError.

        Cancel the task to cancel the wait. A task that has received the devices is not cancelled. The line is left in
        any case, and any exception undoes the acquisition before it goes on.
        """
        try:
            while (lease := self.attempt()) is None:
                self.report()
                await self._sleep_async()
            self.leave_line()
        except BaseException:
            finish_step(self.undo)
            raise
        return lease

    def attempt(self) -> Lease | None:
        """Acquire the devices if no holder, earlier request or limit is in the way; else enter the line if worthwhile.

        A missing state directory is made. Each call adopts a changed policy of the machine. A ticket
        is made after ``IMPATIENT_SECONDS`` or repeated lost races, and at once with a kept position; none in the last
        try at the deadline. The ticket outlasts the lease and each error: call :meth:`leave_line` or :meth:`undo`.

        Returns:
            The lease; None if the caller has to sleep and call again, also after the deadline if the directory was
            deleted or replaced during the last try.

        Raises:
            LedgerError: When the ledger cannot be used.
            LedgerBusyError: When one process keeps the directory locked until the deadline, or for ``BUSY_SECONDS``.
            DevicesBusyError: When time is up, after a last try.
            LeaseCancelledError: When our ticket was cancelled.
            LimitError: When the request is over a limit of this user, whatever leases the user releases.
            ConfigurationError: When the machine's configuration cannot be trusted or understood.
            Exception: As ``choose`` raises.
        """
        self._late = self._deadline is not None and time.monotonic() >= self._deadline
        if self._ticket is not None and self._ticket.cancelled:
            raise LeaseCancelledError(f"the wait for {self._want.request or 'devices'} was cancelled")
        lease = None
        directory = self._state.open(make=True)
        try:
            self._forget_leaving()
            if (policy := current_policy(self._state)) is not self._policy:
                self.adopt_policy(policy)
                self._check_limits()
            self._contradicted.clear()
            self._over.clear()  # a name may return: leases of a deleted directory are made again under their old names
            lease = self._try(directory)
            if lease is None and self._late:
                gone = self._state.replaced(directory)  # then leases in this directory prove nothing
                self._vanished += gone
                if not gone or self._vanished > _VANISHED:
                    raise self._sorry(directory)
            elif lease is None and self._enter_line(directory):
                lease = self._try(directory)
        except OSError as error:
            if error is self._callers:
                raise
            self._vanished += error.errno == errno.ENOENT
            if error.errno != errno.ENOENT or self._vanished > _VANISHED:
                raise self._state.fault(error) from error
            self._look_soon = True  # the directory is being removed: the next attempt makes a new one
        finally:
            self._state.close(directory)
        return lease

    def sleep(self) -> None:
        """Call :meth:`report`, and sleep until another attempt may succeed: at most for :meth:`pause`.

        Raises:
            LedgerError: When the report cannot read the ledger, or the wait for events fails. Exceptions of ``on_wait``
                pass unchanged.
        """
        self.report()
        try:
            poll = select.poll()
            for descriptor in self.descriptors():
                poll.register(descriptor, select.POLLIN)
            now = time.monotonic()
            end = now + self.pause()
            while ready := poll.poll(max(0.0, end - now) * 1000):
                if any(self.read_event(descriptor) for descriptor, _ in ready):
                    break
                now = time.monotonic()
        except OSError as error:
            raise self._state.fault(error) from error

    async def _sleep_async(self) -> None:
        """Sleep on the running event loop as in :meth:`sleep`, but without a report.

        An error while events are read goes to the loop's exception handler, and the sleep goes on.
        """
        import asyncio  # loading asyncio takes longer than most waits

        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def note(descriptor: int) -> None:
            if not woken.is_set() and self.read_event(descriptor):
                woken.set()

        descriptors = self.descriptors()
        timer = loop.call_later(self.pause(), woken.set)
        for descriptor in descriptors:
            loop.add_reader(descriptor, note, descriptor)
        try:
            await woken.wait()
        finally:
            timer.cancel()
            for descriptor in descriptors:
                loop.remove_reader(descriptor)

    def report(self) -> None:
        """Call ``on_wait`` if the queue position, or whether limits stop the request, is new.

        Without a ticket or without ``on_wait``, do nothing. A missing state directory is made. After a failed report,
        only the next change is reported.

        Raises:
            LedgerError: When the ledger cannot be read. Exceptions of ``on_wait`` pass unchanged.
        """
        now = self.place, bool(self.limits)
        if self.on_wait and self._ticket and self._told != now:
            self._told = now
            with self._state.opened(make=True) as directory:
                holders = () if self.limits else self._holders(directory)
            self.on_wait(self.place + 1, holders)

    def undo(self) -> None:
        """Leave the line, and release the lease or withdraw its unpublished files.

        For an interrupt that kept the result from the caller. A second call has no effect.
        """
        self.leave_line()
        if self._lease is not None:
            self._lease.release()
        else:
            self._withdraw()

    def _try(self, directory: int) -> Lease | None:
        """Choose and publish until there is a reason to wait, or several publications fail, mostly because of rivals.

        Several are three, or a hundred in the last try at the deadline. A chosen device whose own lock is held counts
        as taken for the rest of the attempt, and that publication is not counted.

        Returns:
            The lease; None if the request has to wait. If several publications failed, ``_conflicts`` goes up by 1.
        """
        conflicts = 0
        while conflicts < (_CONFLICTS_AT_LAST if self._late else _CONFLICTS):
            contradicted = len(self._contradicted)
            listing = entries.list_names(directory)
            if (choice := self._find_choice(directory, listing)) is None:
                return None
            if (lease := self._publish(directory, choice, listing.marks)) is not None:
                return lease
            conflicts += len(self._contradicted) == contradicted  # a device whose own lock is held is not a conflict
        self._conflicts += 1
        return None

    def _find_choice(self, directory: int, listing: Listing) -> Mapping[str, Extent] | None:
        """Choose what to hold if no request ahead and no limit is in the way; update the position and ``limits``.

        Devices that are reserved for this user are tried first, as a request for them alone; then all, of which as few
        others as possible. Without a ticket, four hidden files at most are looked at, and removed if they are debris.

        Returns:
            The choice, empty if the request runs on the CPU; None if the request has to wait. Then ``limits`` has the
            limits of the user, or of the group, if only these are in the way.
        """
        if listing.hidden and not self._ticket:  # requests in line leave this work to the next newcomer
            entries.sweep(directory, entries.find_debris(directory, listing.hidden[:_SWEPT]))
        rounds = self._rounds()
        for only in rounds:
            self._only, self.limits = only, ()
            self.update_position(directory, listing)
            choice = None if self.before else self._select(directory, listing)
            if choice is None:
                continue
            if only is None and rounds[0]:
                choice = self._spare_others(listing, choice, rounds[0])
            if self.over_limits(directory, listing, self._over):
                self._count_out(directory, listing.leases)
                self.limits = self.over_limits(directory, listing, self._over)
            if not self.limits:
                return choice
        return None

    def _rounds(self) -> tuple[frozenset[str] | None, ...]:
        """Return the devices for each round of an attempt: devices reserved for this user, if any; then None for all.

        A reservation must be running. A device is left out if it is drained, too, or if the request would last into
        another user's reservation.
        """
        now = process.boot_seconds()
        own = (block.names for block in self._policy.blocks if block.reserves(self.facts, now))
        reserved = self._want.candidates.intersection(chain.from_iterable(own)) - self._find_barred()
        return (reserved, None) if reserved else (None,)

    def _select(self, directory: int, listing: Listing) -> Mapping[str, Extent] | None:
        """Let the caller choose by the names of leases, and check only the locks on which the choice depends.

        A command that kept its lease until its end has left the lease's file behind. Leases of ended processes
        therefore first count as ended: the check may have to look at every process, which takes milliseconds. If the
        choice has one of their devices, or no choice fits, these leases are checked and ``choose`` is called again. If
        still no choice fits, all other leases are checked; ``choose`` is called again only if another lease has ended.
        The checks record ended leases in ``_over``, until the next attempt.

        Returns:
            The choice; None if the free devices do not suffice.
        """
        missing = frozenset(filter(process.exited, listing.pids))
        left = {lease.name: lease.device for lease in listing.leases if lease.pid in missing}
        choice = self._ask(listing, {*self._over, *left})
        if left and (choice is None or not choice.keys().isdisjoint(left.values())):
            self._count_out(directory, [lease for lease in listing.leases if lease.name in left])
            choice = self._ask(listing, self._over)
        if choice is not None:
            return choice
        before = len(self._over)
        self._count_out(directory, [lease for lease in listing.leases if lease.name not in left])
        return self._ask(listing, self._over) if len(self._over) > before else None

    def _spare_others(
        self, listing: Listing, choice: Mapping[str, Extent], prefer: frozenset[str]
    ) -> Mapping[str, Extent]:
        """Return a choice with fewer devices outside of ``prefer``: each is left out without which the request fits."""
        # Else the reserved devices would stay idle, and others would wait for devices that this request does not need.
        others = choice.keys() & (self._want.candidates - prefer)
        for device in sorted(others):
            self._only = prefer | (others - {device})
            if (fewer := self._ask(listing, self._over)) is not None:
                choice, others = fewer, others - {device}
        self._only = None
        return choice

    def _taken(self, listing: Listing, over: Collection[str]) -> dict[str, Extent]:
        """Return the taken extents by device name: those of the listed leases, except the leases named in ``over``.

        These devices count as wholly taken: drained devices; devices with another user's reservation that is running,
        or that begins before the request would end; devices that are not of this round; devices whose own lock was
        found held in this attempt.
        """
        taken = entries.sum_taken(listing.leases, over) if over else listing.taken
        others = () if self._only is None else self._want.candidates - self._only
        return {**taken, **dict.fromkeys((*self._contradicted, *self._find_barred(), *others), Extent())}

    def _find_barred(self) -> frozenset[str]:
        """Return the candidates and wholes that are drained, or reserved for another user before the request ends."""
        if not self._policy.blocks:
            return frozenset()
        now = process.boot_seconds()
        # By name, not by the policy's hashes: another device may share the hash of a drained one.
        barred = (block.names for block in self._policy.blocks if block.meets(self.facts, now))
        return self._want.concerned.intersection(chain.from_iterable(barred))

    def _count_out(self, directory: int, leases: Iterable[LeaseName]) -> None:
        """Test leases, add the ended ones to ``_over``, and watch processes that keep suitable devices without a lock.

        Running leases may be given, too; a lease in ``_over`` is not tested again. The watched process is a carrier of
        the mark, else the holder itself until the exit is complete. If it cannot be watched, the next pause is short.

        Raises:
            OSError: When the lock of a lease cannot be tested, as for want of descriptors.
        """
        asked = {lease.name: lease for lease in leases if lease.name not in self._over}
        active = entries.find_active(directory, asked.values())
        self._over |= asked.keys() - active.keys()
        for name, state in active.items():
            lease = asked[name]
            if state.life is not Life.HELD and lease.device in self._want.concerned:
                try:
                    self._leaving.append(os.pidfd_open((*state.carriers, lease.pid)[0]))
                except OSError:
                    self._look_soon = True

    def _ask(self, listing: Listing, over: Collection[str]) -> Mapping[str, Extent] | None:
        """Call ``choose`` as if the leases in ``over`` had ended; None if the free devices do not suffice.

        Raises:
            OSError: As ``choose`` raises; also recorded, so that the error is not taken for a fault of the directory.
        """
        try:
            return self._choose(self._taken(listing, over))
        except OSError as error:
            self._callers = error
            raise

    def _publish(self, directory: int, choice: Mapping[str, Extent], marked: Collection[marks.Mark]) -> Lease | None:
        """Publish the lease if the chosen extents are still free and the request is still next.

        Args:
            directory: Descriptor of the state directory.
            choice: The chosen extents.
            marked: The marks of the leases that were listed before the choice.

        Returns:
            The lease, also kept for :meth:`undo` unless it is empty. None, with the files withdrawn, if it cannot be
            published any more, or if an unfinished file is lost: see :meth:`_still_free`.

        Raises:
            LedgerBusyError: When one owner keeps the directory locked; see :meth:`_lock`.
            OSError: When a file cannot be made or renamed, or no descriptor is left for a device's own lock.
            Exception: As the caller's ``mark`` or ``tenure`` of the request raises.
        """
        nonce = entries.new_nonce()
        if not choice:  # a request that runs on the CPU
            return Lease(self._state, nonce, {}, {}, self._device_locks)
        done = False
        try:
            want = self._want
            locks: tuple[str, ...] = ()
            if want.device_locks:
                self._device_locks.open(choice, want.device_locks)
                locks = tuple(each.path for device in choice for each in want.device_locks.get(device, ()))
            body = record.lease_body(want.request, self._note, confined=want.confined, locks=locks)
            if want.tenure is not None:
                body = entries.with_entry(body, entries.ENTRY, want.tenure().encode())
            mark = want.mark(marked) if want.mark else ()  # before the lock, since drawing a mark may scan processes
            for device in choice:
                file = self._files[device] = LockedFile(self._state.path)
                file.make(directory, body)
            self._lock(directory)
            try:
                if not self._still_free(directory, choice, None if mark in marked else mark):
                    return None
                period = ENDLESS if want.seconds is None else _period(want.seconds, passes=self._passes)
                for device, file in self._files.items():
                    file.rename(directory, entries.lease_name(device, choice[device], nonce, mark=mark, period=period))
                done = True
            except FileNotFoundError:  # a process in another container took our hidden file for debris
                return None
            finally:
                self._state.unlock(directory)
        finally:
            if not done:
                self._withdraw()
        self._lease = Lease(self._state, nonce, choice, self._files, self._device_locks, mark=mark, period=period)
        return self._lease

    def _withdraw(self) -> None:
        """Remove and unlock the files of an unpublished lease; unlock and close the devices' own locks.

        Failures are ignored, and a second call has no effect.
        """
        self._device_locks.unlock()  # explicitly: a child that was forked meanwhile has copies of the descriptors
        self._device_locks.close()
        while self._files:
            device = next(iter(self._files))
            self._files[device].discard()
            del self._files[device]

    def _still_free(self, directory: int, choice: Mapping[str, Extent], drawn: marks.Mark | None) -> bool:
        """Return whether a choice can be published; then the devices' own locks are held.

        It can if the directory is the same, no limit or ticket is in the way, the extents are free, no other lease has
        drawn the same mark, and no process has locked a device itself: see ``_contradicted``.

        The caller has locked the directory. Drains and reservations are read again. Unless directory, ticket or limit
        is in the way, the files of tickets and of leases of this version that were found to have ended are removed.

        Args:
            directory: Descriptor of the state directory.
            choice: The chosen extents.
            drawn: The mark that no lease had when it was drawn; None if a lease had it then, as for marks inside of it.
        """
        listing = entries.list_names(directory)
        # Again, with the directory locked, so that no drain or reservation comes in between.
        self._policy = with_blocks(self._policy, self._state)
        if self._state.replaced(directory):
            return False
        self.update_position(directory, listing)
        if self.before or self.over_limits(directory, listing, self._over):
            return False
        if self._ended or self._over:
            dead = [lease.name for lease in listing.leases if lease.name in self._over and lease.understood]
            entries.sweep(directory, (*self._ended, *dead))
        if (drawn and drawn in listing.marks) or not entries.fits(choice, self._taken(listing, self._over)):
            return False
        if contradiction := self._device_locks.lock():
            self._contradicted[contradiction[0]] = describe_lock(*contradiction)
            return False
        return True

    def _lock(self, directory: int) -> None:
        """Lock the directory; wait until the deadline, at least 1 s, and at most ``BUSY_SECONDS`` for one owner.

        Raises:
            LedgerBusyError: When one owner keeps the directory locked for that long.
        """
        left = BUSY_SECONDS if self._deadline is None else self._deadline - time.monotonic()
        self._state.lock(directory, min(BUSY_SECONDS, max(_LOCK_SECONDS_AT_LAST, left)))

    def _holders(self, directory: int) -> tuple[LeaseRecord, ...]:
        """Return a record for each reason why suitable devices are not free; a device may have several records.

        First come the active leases of suitable devices, also of this process, one record for each device of a lease; a
        lease that only marks a whole as divided is left out. Then come suitable devices whose own lock was found held
        by a process outside of this ledger, and the drains and reservations that withhold a suitable device from this
        request, also a reservation that begins later. A drained or reserved device may be leased, too.

        Raises:
            OSError: When the lock of a lease cannot be tested, as for want of descriptors.
        """
        found = record.list_leases(directory, entries.list_names(directory))
        outside = (
            LeaseRecord(id="", device=device, units=UNITS_PER_DEVICE, state="outside", reason=reason)
            for device, reason in self._contradicted.items()
        )
        barred = self._find_barred()
        blocks = (each for block in read_blocks(self._state) for each in block.records() if each.device in barred)
        return (*(each for each in found if each.units and each.device in self._want.concerned), *outside, *blocks)

    def _sorry(self, directory: int) -> DevicesBusyError:
        """Make the error for a wait that is over: describe the first four holders, and count the others.

        The error also has the ids of all leases in the way, the number of earlier requests, and all holders' hints.
        Limits of the user are not named.

        Raises:
            OSError: When the lock of a lease cannot be tested.
        """
        holders = self._holders(directory)
        ahead = self.place
        reasons = [str(each) for each in holders[:4]]
        if len(holders) > len(reasons):
            reasons.append(f"{len(holders) - len(reasons)} more")
        if ahead:
            reasons.append(record.describe_ahead(ahead))
        waited = time.monotonic() - self._began
        after = f" after {waited:.3g} s" if waited > 1 else ""
        return DevicesBusyError(
            f"{self._want.request or 'what was asked for'} is not free{after}: "
            f"{'; '.join(reasons) or 'what is left does not do'}",
            holders=tuple(dict.fromkeys(each.id for each in holders if each.id)),
            ahead=ahead,
            hint="\n".join(dict.fromkeys(each.hint for each in holders if each.hint)),
        )

    # The machine's queue policy

    def adopt_policy(self, policy: Policy) -> None:
        """Adopt a queue policy: a request without a time limit gets the longest that the policy allows this user."""
        self._policy, self._plain = policy, policy.plain
        longest = policy.limits_of(process.find_outer_user(os.geteuid())).seconds if not self._plain else None
        given = self._asked.seconds
        self._want = self._asked if longest is None or given is not None else replace(self._asked, seconds=longest)
        vars(self).pop("facts", None)

    def _check_limits(self) -> None:
        """Check the request against the limits that hold whatever leases are released, also by members of a group.

        Raises:
            LimitError: When the request is over such a limit.
        """
        limits = self._policy.over_limits(self.facts, {})
        if lasting := [each for each in limits if each.lasting]:
            reasons = tuple(each.message() for each in lasting)
            raise LimitError(
                f"{self._want.request or 'what was asked for'} can never fit: {'; '.join(reasons)}.",
                reasons=reasons,
                hint="\n".join(each.remedy for each in lasting),
            )

    @cached_property
    def facts(self) -> Waiting:
        """The request in the form that the queue policy reads, before the request has a queue position."""
        want = self._want
        return Waiting(
            key=None,
            number=_LAST,
            since=self._since,
            priority=self._priority,
            user=process.find_outer_user(os.geteuid()),
            seconds=want.seconds,
            needs=tuple(map(hashed, want.needs)),
            wants=entries.hashes(want.candidates),
            inner=any(map(entries.is_inner, want.candidates)),
        )

    def over_limits(self, directory: int, listing: Listing, over: Collection[str]) -> tuple[OverLimit, ...]:
        """Return the limits of the user, or of the user's group, in the way of the request; empty if none is.

        Each listed lease counts, without a test of its lock, except those in ``over``.

        Args:
            directory: Descriptor of the state directory.
            listing: The names in the directory.
            over: Names of leases that have ended, and so do not count.
        """
        if self._plain:
            return ()
        return self._policy.over_limits(self.facts, sum_usage(list_holdings(directory, listing, over)))

    # The line

    def update_position(self, directory: int, listing: Listing) -> None:
        """Compute the queue position, and whether a request ahead must be waited for: set ``place`` and ``before``.

        Locks and stamps are read from the front of the line until a live request is found, and from the back for the
        nearest live request; ``before`` stays None if backfill allows passing all of them, but ``place`` counts them.
        The own ticket is stamped, or dropped if ``listing`` lacks the file, as after the directory was replaced; a
        cancelled ticket is still listed. Ended tickets are recorded for the next sweep.
        """
        if self._ticket and self._ticket.name not in listing.tickets:  # the directory was emptied or replaced
            self._drop_ticket()
        rivals = self._rivals(directory, listing)
        now, ended, passed = process.monotonic_ns(), list[str](), 0
        for position, name in enumerate(rivals):
            locked, found = entries.probe_lock(directory, name)
            if not locked:
                ended.append(name)
            elif found is None or not tickets.is_silent(found, now, position):
                break
            passed += 1
        self._ahead = ahead = rivals[passed:]
        self.place = len(ahead)
        self.before = next((name for name in reversed(ahead) if entries.probe_lock(directory, name)[0]), None)
        self._passes = self.before is not None and self._may_pass(directory, listing)
        if self._passes:
            self.before = None
        self._ended = ended
        if self._ticket:
            self._ticket.stamp()

    def _rivals(self, directory: int, listing: Listing) -> list[str]:
        """Return the names of the tickets ahead that block this request, in the order of service.

        See :meth:`anyaccel.policy.Policy.keeps_waiting`. Locks are not checked, and a ticket in the list may be gone. A
        ticket of another version, or gone before the first reading, is left out. A ticket whose body cannot be read
        counts by name and owner alone, as wanting every device if the name lists none.
        """
        if not listing.tickets:
            return []
        policy = with_past(self._policy)  # only here, since few requests meet others that wait
        held = () if self._plain else list_holdings(directory, listing)
        own, now = self._own, process.boot_seconds()
        brief = self._plain and not policy.blocks
        others = (read_ticket(directory, name, brief=brief) for name in listing.tickets if name != own.key)
        order = policy.order([own, *filter(None, others)], held, now)
        ahead = [(each, policy.competes(each, own, now)) for each in order[: order.index(own)]]
        if self._plain:
            return [str(each.key) for each, competes in ahead if competes]
        used = sum_usage(held)
        if any(policy.keeps_waiting(each, own, used, competes=competes) != competes for each, competes in ahead):
            # Limits decide: leases whose files are left, but which have ended, must not count. The test of all locks
            # takes longer than all the rest.
            used = sum_usage(list_holdings(directory, listing, find_ended(directory, listing)))
        return [str(each.key) for each, competes in ahead if policy.keeps_waiting(each, own, used, competes=competes)]

    def count_ahead(self, directory: int, listing: Listing) -> int:
        """Count the requests ahead that keep this one waiting; 0 if each may be passed. Backfill passes all or none.

        With a running reservation for this user, the reserved devices are tried first, as a request for these alone: 0
        if they are free and suffice, as ``choose`` says, and no earlier request that may have these devices keeps this
        one waiting. Ended and silent requests are left out at the front of the line only. ``place`` and ``before``
        change as in :meth:`update_position`, for the devices that were tried last.
        """
        for only in self._rounds():
            self._only = only
            self.update_position(directory, listing)
            if not self.before and (
                self._only is None or self._ask(listing, find_ended(directory, listing)) is not None
            ):
                return 0
        return self.place

    @property
    def _own(self) -> Waiting:
        """The request with the key and queue position of its ticket; without a ticket, behind every ticket.

        It wants the devices of this round only.
        """
        facts = self.facts if self._only is None else replace(self.facts, wants=entries.hashes(self._only))
        ticket = entries.parse_ticket(self._ticket.name) if self._ticket else None
        return replace(facts, key=ticket.name, number=ticket.number, since=ticket.since) if ticket else facts

    def _may_pass(self, directory: int, listing: Listing) -> bool:
        """Return whether backfill allows the request to pass the tickets ahead, at the last look.

        False without a time limit. Leases count without a test of locks. See :meth:`_read_ahead`.
        """
        if self._want.seconds is None or (ahead := self._read_ahead(directory)) is None:
            return False
        return may_pass(self._policy, self._own, ahead, list_holdings(directory, listing), process.boot_seconds())

    def _read_ahead(self, directory: int) -> list[Waiting] | None:
        """Return the tickets ahead at the last look; None if one is of another version, or gone before it was read.

        A ticket whose body cannot be read counts as able to start now, so that the request may pass only with a time
        limit within the policy's ``backfill``.
        """
        found = [each for name in self._ahead if (each := read_ticket(directory, name))]
        return found if len(found) == len(self._ahead) else None  # the needs of a ticket of another version are unknown

    def find_time_to_pass(self, directory: int, listing: Listing) -> float:
        """Return the longest time limit, in seconds, with which backfill would allow the request to pass all others.

        Infinity if no request is ahead, 0 or less if no time limit is short enough. The position is updated. Leases
        count without a test of locks.
        """
        self.update_position(directory, listing)
        if (ahead := self._read_ahead(directory)) is None:
            return 0.0
        now = process.boot_seconds()
        return latest_end(self._policy, self._own, ahead, list_holdings(directory, listing), now) - now

    @property
    def _watches_all(self) -> bool:
        """Whether every lease matters, for a time limit, a reservation for the user, or a policy that is not plain."""
        own = any(self.facts.user in block.users for block in self._policy.blocks)
        return own or not self._plain or self._want.seconds is not None

    def _enter_line(self, directory: int) -> bool:
        """Make a ticket once the wait is worth one, and watch the next event.

        The wait is worth a ticket after ``IMPATIENT_SECONDS``, repeated lost races, or at once with a kept position.

        Returns:
            Whether to look again at once, since an event may have come before the watch; False without a ticket.
        """
        if self._ticket is None:
            soon = time.monotonic() - self._began < IMPATIENT_SECONDS
            if soon and self._kept_place is None and self._conflicts <= 1:
                return False
            self._make_ticket(directory)
        return self._ticket is not None and self._aim(directory)

    def _make_ticket(self, directory: int) -> None:
        """Publish a ticket with the number of the kept position, else at the end of the line.

        A kept position records the number. No ticket is made if the directory was replaced, or if the unfinished file
        is lost; the next look comes soon then.

        Raises:
            LedgerBusyError: When one owner keeps the directory locked; see :meth:`_lock`.
            OSError: When the ticket cannot be made; the next look drops it.
        """
        self._lock(directory)
        kept = self._kept_place
        try:
            if not self._state.replaced(directory):
                self._ticket = TicketFile(self._state.path)
                number = None if kept is None else kept.number
                number = self._ticket.publish(directory, self._want, self.facts, self._note, number)
                if kept is not None:
                    kept.number = number
        except FileNotFoundError:  # a process in another container took the hidden file for debris
            self._drop_ticket()
            self._look_soon = True
        finally:
            self._state.unlock(directory)

    def _drop_ticket(self) -> None:
        """Remove the own ticket from the directory, if there is a ticket; in a forked child, only forget the ticket."""
        if self._ticket:
            self._ticket.drop()  # first, so that an interrupt in between leaves no ticket behind
            self._ticket = None

    def leave_line(self) -> None:
        """Drop the ticket, and close the watch and the pidfds. A second call has no effect.

        In a forked child, the ticket stays in the line: the position is the parent's.
        """
        self._drop_ticket()
        self._forget_leaving()
        if self._watch:
            self._watch.close()
            self._watch = None

    # Wake-ups

    def _aim(self, directory: int) -> bool:
        """Watch the ticket ahead, or the directory; return whether an event may have come before the watch.

        The directory is watched if no ticket ahead must be waited for, or if every lease matters; the answer for a new
        watch of the directory is True, for a ticket only if the ticket has gone or ended. Return False if the watch
        stays as it was, or if the request polls: far back in the line, or without inotify.
        """
        before = None if self._watches_all else self.before
        if self.place >= _WATCHING:
            return False
        path = f"{self._state.path}/{before}" if before else self._state.path
        try:
            self._watch = self._watch or FileEvents()
            if self._watch.path == path:
                return False
            self._watch.follow(path)
            self._look_soon = False
        except FileNotFoundError:  # the ticket ahead has just been removed
            return True
        except (OSError, ImportError):  # no inotify instance is left, or none is supported: poll instead
            return False
        return before is None or not entries.probe_lock(directory, before)[0]

    def _forget_leaving(self) -> None:
        """Close the pidfds of processes that were watched until their end."""
        while self._leaving:
            with contextlib.suppress(OSError):
                os.close(self._leaving.pop())

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll until the next attempt: each becomes readable on an event.

        They are pidfds of processes that keep a suitable device although the holder of the lease has been ended. If
        there is a watch, its descriptor is the last: of the ticket ahead, or of the state directory. Pass a readable
        descriptor to :meth:`read_event`; the acquisition closes them.
        """
        return [*self._leaving, *([self._watch.fileno()] if self._watch else [])]

    def read_event(self, ready: int) -> bool:
        """Read the pending events, and return whether another attempt is worthwhile.

        Events of leases that may block the request and of the watched path itself count. If every lease matters, as
        with limits and backfill, events of all leases and removed tickets count. After a file was closed, the next
        pause is short, since the lock may be dropped a moment later.

        Args:
            ready: The descriptor that is readable; for any but the watch's, nothing is read and the answer is True.
        """
        if self._watch is None or ready != self._watch.fileno():
            return True
        worth = False
        for name, removed in self._watch.events():
            if name and name.startswith("t1.") and removed and self._watches_all:
                worth = True
                continue
            lease = entries.parse_lease(name) if name else None
            if name and (lease is None or not (self._watches_all or lease.device in self._want.concerned)):
                continue
            worth = True
            if not removed:
                self._look_soon, self._soon = True, _SECOND_LOOK
        return worth

    def pause(self) -> float:
        """Return the seconds after which to look again without an event.

        Without a ticket: at random 0.2 to 1 ms, or ``IMPATIENT_SECONDS`` behind an earlier request. With a ticket: 0.05
        s for each request ahead, at least 0.25 s. If the last look found that a lease may end without an event: 1 ms,
        then twice as long each time, up to that interval. The pause ends at the deadline.
        """
        if self._ticket is None:  # no watch yet
            pause = draw_pause(0.0002, 0.001) if self.before is None else IMPATIENT_SECONDS
        elif self._look_soon:
            pause = min(self._soon, tickets.recheck_interval(self.place))
            self._look_soon, self._soon = False, 2 * self._soon
        else:
            pause, self._soon = tickets.recheck_interval(self.place), _SECOND_LOOK
        return pause if self._deadline is None else max(0.0, min(pause, self._deadline - time.monotonic()))


def _period(seconds: float, *, passes: bool) -> Period:
    """Return the period of a lease that begins now, in milliseconds since the boot.

    The start is included only if the request passes earlier requests.

    Args:
        seconds: Time limit, cut to whole milliseconds, at least one.
        passes: Whether the request passes earlier requests.
    """
    now = int(process.boot_seconds() * 1000)
    return Period(now + max(1, int(seconds * 1000)), now if passes else None)
