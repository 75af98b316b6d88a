"""Getting devices: look, choose, publish, and wait in line in between.

A request that waits is a ticket in the state directory. The next in the order of service watches the directory for
leases that end; each other request watches the ticket ahead of it. So a device that becomes free wakes one process, and
a ticket that goes wakes one. All look again now and then in any case: a user has few watches, and the process ahead may
be stopped.

Choosing is optimistic. The names are read and the caller chooses without any lock, so that a slow choice - it may ask
plug-ins - delays no other request. Then, with the directory locked, the names are read once more, and what was chosen
is published if it is still free and no ticket came in front; otherwise all starts anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from itertools import filterfalse

from anyaccel.errors import DevicesBusyError, LeaseCancelledError, LimitError
from anyaccel.ledger import listing as listings
from anyaccel.ledger import record, tickets
from anyaccel.ledger.device_locks import DeviceLocks, describe
from anyaccel.ledger.directory import BUSY_SECONDS, StateDirectory
from anyaccel.ledger.lease import Lease, Place, Want
from anyaccel.ledger.listing import Listing
from anyaccel.ledger.lockfile import Life, LockedFile, look
from anyaccel.ledger.names import (
    ENDLESS,
    LeaseName,
    Period,
    hashes,
    is_inner,
    lease_name,
    new_nonce,
    parse_lease,
    parse_ticket,
)
from anyaccel.ledger.record import LeaseRecord
from anyaccel.ledger.tickets import TicketFile
from anyaccel.ledger.turns import facts_of, holdings, own_user, rules
from anyaccel.linux import mark as marks
from anyaccel.linux import process
from anyaccel.linux.inotify import FileEvents
from anyaccel.model import replace
from anyaccel.model.device import MOST_SLOTS, UNITS_PER_DEVICE
from anyaccel.model.extent import ANY_SLOTS, Extent
from anyaccel.policy import Limits, OverLimit, Policy, Waiting

Choose = Callable[[Mapping[str, Extent]], Mapping[str, Extent] | None]
"""Chooses how much of which device to hold, by the device's name, given what is taken; None when what is left does not
do. Nothing is a choice."""

OnWait = Callable[[int, tuple[LeaseRecord, ...]], None]
"""Told the place in line, 1 for the next to be served, and who holds devices that would do, which is empty where enough
are free and a limit of the user's alone is in the way; at first and on change."""

IMPATIENT_SECONDS = 0.010
"""A request that waits for less has no place in line: making one costs more than what it is good for."""

_RUNNING = ("R", "S")
"""States of a process that gets on with what it does."""
_VANISHED = 50
_CONFLICTS = 3
_CONFLICTS_AT_LAST = 100
_LOCK_SECONDS = 0.2
_LOCK_SECONDS_AT_LAST = 1.0
_SWEPT = 4
_LAST = 1 << 62
_WITHOUT_WATCH = 0.02
_WITHOUT_WATCH_PER_PLACE = 0.012
_WATCHING = 64  # of the requests for the same devices; a user has 128 watches in all by default
_SECOND_LOOK = 0.001


class Acquisition:
    """One request for devices, from the first look to the lease. Not to be shared by threads.

    Args:
        state: The state directory.
        want: What is wanted.
        choose: Chooses among what is free; called without any lock, possibly often.
        wait: Seconds to wait; None to wait for as long as it takes.
        priority: The higher, the earlier.
        note: What it is for.
        on_wait: Told how the wait goes.
        kept: The place in line that the request had before, or None.
        policy: The rules to go by where nothing will be taken; those of the machine when None.

    Attributes:
        place: How many compete and are ahead, as far as is known.
        before: The nearest ticket ahead that must be waited for; None when there is none.
        on_wait: Told how the wait goes; None once that is not wanted any more.
        limits: What of the user's limits stood in the way when ``on_wait`` was told.

    Raises:
        LimitError: When the rules of the machine never give this user so much.
    """

    def __init__(
        self,
        state: StateDirectory,
        want: Want,
        choose: Choose,
        *,
        wait: float | None = 0.0,
        priority: int = 0,
        note: str = "",
        on_wait: OnWait | None = None,
        kept: Place | None = None,
        policy: Policy | None = None,
    ) -> None:
        self._state = state
        self._asked, self._priority, self._note, self._choose = want, priority, note, choose
        self._kept_place = kept
        self._since = process.boot_seconds() if kept is None or kept.since is None else kept.since
        self._go_by(policy or rules())
        if policy is None:
            self._check_limits()
        self.on_wait = on_wait
        self.limits: tuple[OverLimit, ...] = ()
        self._began = time.monotonic()
        self._deadline = None if wait is None else self._began + wait
        self._ticket: TicketFile | None = None
        self.place = 0
        self.before: str | None = None
        self._passed: Collection[str] = ()
        self._ended: Collection[str] = ()
        self._passes = False
        self._watch: FileEvents | None = None
        self._leaving: list[int] = []
        self._look_soon = self._refused = False
        self._busy_since: float | None = None
        self._busy_turn: tuple[int | None, int] = (None, 0)
        self._over: set[str] = set()
        self._carriers: dict[str, int] = {}
        self._vanished = 0
        self._contradicted: dict[str, str] = {}
        self._conflicts = 0
        self._told: tuple[int, bool] | None = None
        self._limited = False
        self._late = False
        self._again = False
        self._callers: OSError | None = None
        self._files: dict[str, LockedFile] = {}
        self._device_locks = DeviceLocks()
        self._lease: Lease | None = None

    def get(self) -> Lease:
        """Get the devices, or get in line and wait; see :meth:`anyaccel.ledger.Ledger.acquire`."""
        try:
            try:
                while (lease := self.attempt()) is None:
                    self.sleep()
            finally:
                self.leave_line()
        except BaseException:
            self.undo()
            raise
        return lease

    async def get_async(self) -> Lease:
        """The same on the running event loop, without a thread.

        Cancel the task to cancel the wait; it is never cancelled once it has its devices.
        """
        try:
            try:
                while (lease := self.attempt()) is None:
                    self.tell()
                    await self._sleep_async()
            finally:
                self.leave_line()
        except BaseException:
            self.undo()
            raise
        return lease

    def attempt(self) -> Lease | None:
        """Get the devices if they are free and it is our turn; otherwise get in line, or stay there.

        Raises:
            LedgerError: When the ledger cannot be used.
            DevicesBusyError: When time is up.
            LeaseCancelledError: When our ticket was cancelled.
        """
        again, self._again = self._again, True
        self._late = self._deadline is not None and time.monotonic() >= self._deadline
        if self._ticket is not None and self._ticket.cancelled:
            raise LeaseCancelledError(f"the wait for {self._want.request or 'devices'} was cancelled")
        lease = None
        directory = self._state.open(make=True)
        try:
            if again:
                self._forget_leaving()
                self._follow_rules()
            self._contradicted.clear()
            self._over.clear()  # a name comes back where leases were brought over from a directory that was deleted
            lease = self._try_repeatedly(directory)
            if lease is None and self._late:
                gone = self._state.replaced(directory)  # then what is held there says nothing
                self._vanished += gone
                if not gone or self._vanished > _VANISHED:
                    raise self._sorry(directory)
            elif lease is None and self._enter_line(directory):
                lease = self._try_repeatedly(directory)
        except OSError as error:
            if error is self._callers:
                raise
            self._vanished += error.errno == errno.ENOENT
            if error.errno != errno.ENOENT or self._vanished > _VANISHED:
                raise self._state.fault(error) from error
            self._look_soon = True  # the directory is being removed under us: the next look makes a new one
        finally:
            self._state.close(directory)
        return lease

    def sleep(self) -> None:
        """Wait until it may be worth another attempt, and tell how the wait goes."""
        self.tell()
        try:
            poll = select.poll()
            for descriptor in self.descriptors():
                poll.register(descriptor, select.POLLIN)
            now = time.monotonic()
            end = now + self.pause()
            while ready := poll.poll(max(0.0, end - now) * 1000):
                if any(self.noted(descriptor) for descriptor, _ in ready):
                    break
                now = time.monotonic()
        except OSError as error:
            raise self._state.fault(error) from error

    async def _sleep_async(self) -> None:
        """Wait until it may be worth another attempt, on the running event loop."""
        import asyncio  # which takes longer to load than most waits

        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def note(descriptor: int) -> None:
            if not woken.is_set() and self.noted(descriptor):
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

    def tell(self) -> None:
        """Tell whoever wants to know how the wait goes."""
        now = self.place, self._limited
        if self.on_wait and self._ticket and self._told != now:
            self._told = now
            with self._state.opened(make=True) as directory:
                self.limits = self.over_limits(directory, listings.read(directory), self._over)
                holders = () if self._limited else self._holders(directory)
            self.on_wait(self.place + 1, holders)

    def undo(self) -> None:
        """Give back what was got when it cannot be handed to anybody any more: an interrupt came in between.

        Does nothing the second time.
        """
        self.leave_line()
        if self._lease is not None:
            self._lease.release()
        else:
            self._withdraw()

    def _try_repeatedly(self, directory: int) -> Lease | None:
        """Try until there is a reason to wait. Every conflict means that somebody else got something."""
        for _ in range(_CONFLICTS if not self._late else _CONFLICTS_AT_LAST):
            contradicted = -1
            while contradicted < len(self._contradicted):  # a device that was refused now is no conflict
                contradicted = len(self._contradicted)
                lease, conflict = self._try(directory)
                if lease is not None or not conflict:
                    return lease
        self._conflicts += 1
        return None

    def _try(self, directory: int) -> tuple[Lease | None, bool]:
        """Look, choose and publish once; the second value says that it may be worth doing it again at once."""
        listing = listings.read(directory)
        self._limited = False
        self.stand(directory, listing)
        if listing.hidden and not self._ticket:
            listings.sweep(directory, listings.debris(directory, listing.hidden[:_SWEPT]))
        if self.before:
            return None, False
        choice = self._select(directory, listing)
        if choice is None:
            return None, False
        if self.over_limits(directory, listing, self._over):
            self._count_out(directory, listing.leases)
            if self.over_limits(directory, listing, self._over):
                self._limited = True
                return None, False
        if not choice:
            return Lease(self._state, new_nonce(), {}, {}, self._device_locks), False
        lease = self._publish(directory, choice, listing.summary.marks)
        return lease, self._busy_since is None

    def _select(self, directory: int, listing: Listing) -> dict[str, Extent] | None:
        """Let the caller choose by names, and if nothing fits, by locks.

        A command that carried its lease to its end has left the name behind. The choice should not avoid a device that
        is free, so what processes took that are gone counts as over until the choice needs it: to find out may take a
        look at all processes, which is milliseconds.
        """
        named = listing.summary
        missing = frozenset(filterfalse(process.exists, named.pids))
        left = {lease.name: lease.device for lease in named.leases if lease.pid in missing}
        choice = self._ask(listing, {*self._over, *left})
        if left and (choice is None or not choice.keys().isdisjoint(left.values())):
            self._count_out(directory, [lease for lease in named.leases if lease.name in left])
            choice = self._ask(listing, self._over)
        if choice is not None:
            return choice
        before = len(self._over)
        self._count_out(directory, [lease for lease in named.leases if lease.name not in left])
        listings.sweep(directory, listings.debris(directory, listing.hidden))
        return self._ask(listing, self._over) if len(self._over) > before else None

    def _taken(self, listing: Listing, over: Collection[str]) -> dict[str, Extent]:
        """What is taken, by the device's name: what names say that are not over, and devices that were refused now."""
        named = listing.summary
        taken = listings.taken(named.leases, over) if over else named.taken
        return {**taken, **dict.fromkeys(self._contradicted, Extent())}

    def _count_out(self, directory: int, leases: Iterable[LeaseName]) -> None:
        """Find out which leases are over, and follow the processes of those that are about to be."""
        asked = {}
        for lease in leases:
            carrier = self._carriers.get(lease.name)
            if carrier and marks.carries(carrier, lease.mark):  # as at the last look, which takes milliseconds
                self._follow(lease, carrier)
            elif lease.name not in self._over:
                asked[lease.name] = lease
        for name, state in listings.states(directory, asked.values()).items():
            if state.life is Life.OVER:
                self._over.add(name)
            elif state.life is Life.LEAVING:
                self._follow(asked[name], asked[name].pid)
            elif state.carriers:
                self._carriers[name] = state.carriers[0]
                self._follow(asked[name], state.carriers[0])

    def _follow(self, lease: LeaseName, pid: int) -> None:
        """Look again when a process has left the kernel that keeps a lease of a device that would do."""
        if lease.device in self._want.concerned:
            try:
                self._leaving.append(os.pidfd_open(pid))
            except OSError:
                self._look_soon = True

    def _ask(self, listing: Listing, over: Collection[str]) -> dict[str, Extent] | None:
        """Let the caller choose, as if some names were over."""
        try:
            chosen = self._choose(self._taken(listing, over))
        except OSError as error:
            self._callers = error
            raise
        if chosen is None:
            return None
        choice = dict(chosen)
        for device, extent in choice.items():
            if extent.divided and device in self._want.wholes:
                continue
            if device not in self._want.candidates:
                raise ValueError(f"what is chosen must be a candidate (got {device!r})")
            if type(extent.units) is not int or not 0 < extent.units <= UNITS_PER_DEVICE:
                raise ValueError(f"units of {device!r} must be a whole number from 1 to 10000 (got {extent.units!r})")
            if extent.slots != ANY_SLOTS and not 0 < extent.slots < 1 << MOST_SLOTS:
                raise ValueError(f"slots of {device!r} must be some of {MOST_SLOTS}, or any (got {extent.slots!r})")
        return choice

    def _publish(self, directory: int, choice: dict[str, Extent], marked: Collection[marks.Mark]) -> Lease | None:
        """Make the lease if what was chosen is still free and it is still our turn.

        Args:
            directory: Descriptor of the state directory.
            choice: What was chosen.
            marked: The marks of all leases then.
        """
        nonce = new_nonce()
        done = False
        try:
            want = self._want
            locks: tuple[str, ...] = ()
            if want.device_locks:
                self._device_locks.open(choice, want.device_locks)
                locks = tuple(each.path for device in choice for each in want.device_locks.get(device, ()))
            body = record.lease_body(want.request, self._note, confined=want.confined, locks=locks)
            mark = want.mark(marked) if want.mark else ()  # before the lock: it may look at all processes
            for device in choice:
                file = self._files[device] = LockedFile(self._state.path)
                file.make(directory, body)
            if not self._lock(directory):
                return None
            try:
                listing = listings.read(directory)
                if not self._still_free(directory, listing, choice):
                    return None
                if mark and mark in listing.summary.marks and mark not in marked:
                    return None  # another lease has drawn it meanwhile
                if contradiction := self._device_locks.lock():
                    self._contradicted[contradiction[0]] = describe(*contradiction)
                    return None
                period = ENDLESS if want.seconds is None else _period(want.seconds, passes=self._passes)
                for device, file in self._files.items():
                    file.rename(directory, lease_name(device, choice[device], nonce, mark=mark, period=period))
                done = True
            except FileNotFoundError:  # somebody who cannot see this process took what it was making for debris
                return None
            finally:
                self._state.unlock(directory)
        finally:
            if not done:
                self._withdraw()
        self._lease = Lease(self._state, nonce, choice, self._files, self._device_locks, mark=mark, period=period)
        return self._lease

    def _withdraw(self) -> None:
        """Remove what was made and is no lease."""
        self._device_locks.unlock()  # a child that was forked meanwhile has copies
        self._device_locks.close()
        while self._files:
            device = next(iter(self._files))
            self._files[device].discard()
            del self._files[device]

    def _still_free(self, directory: int, listing: Listing, choice: dict[str, Extent]) -> bool:
        if self._state.replaced(directory) or not self._in_front(directory, listing):
            return False
        if self.over_limits(directory, listing, self._over):
            return False
        if self._ended or self._over:
            dead = [lease.name for lease in listing.leases if lease.name in self._over and lease.understood]
            listings.sweep(directory, (*self._ended, *dead))
        return listings.fits(choice, self._taken(listing, self._over))

    def _lock(self, directory: int) -> bool:
        """Lock the directory, or say that this must be tried again later; too late is an error."""
        locked = self._state.lock(directory, _LOCK_SECONDS_AT_LAST if self._late else _LOCK_SECONDS)
        self._refused = not locked
        if locked:
            self._busy_since = None
            return True
        now, owner = time.monotonic(), self._state.owner(directory)
        # Many who take turns are no reason to give up, be they processes or the threads of one. Where the kernel's list
        # of locks is long, it may leave one out that changes hands while it is read.
        taken = owner is None or process.state(owner) in _RUNNING
        turn = (owner, os.fstat(directory).st_mtime_ns if taken else 0)  # by its names, how often it changed hands
        if self._busy_since is None or turn != self._busy_turn:
            self._busy_since, self._busy_turn = now, turn
        if self._late or now - self._busy_since >= BUSY_SECONDS:
            raise self._state.busy(owner, max(_LOCK_SECONDS_AT_LAST, now - self._busy_since))
        return False

    def _holders(self, directory: int) -> tuple[LeaseRecord, ...]:
        """Who holds devices that would have served."""
        found = record.records(directory, listings.read(directory))
        outside = (
            LeaseRecord(id="", device=device, units=UNITS_PER_DEVICE, state="outside", reason=reason)
            for device, reason in self._contradicted.items()
        )
        return (*(each for each in found if each.units and each.device in self._want.concerned), *outside)

    def _sorry(self, directory: int) -> DevicesBusyError:
        holders = self._holders(directory)
        ahead = self.place
        reasons = [str(each) for each in holders[:4]]
        if len(holders) > len(reasons):
            reasons.append(f"{len(holders) - len(reasons)} more")
        if ahead:
            reasons.append(f"{ahead} earlier request{'s' * (ahead > 1)} for the same devices")
        waited = time.monotonic() - self._began
        after = f" after {waited:.3g} s" if waited > 1 else ""
        return DevicesBusyError(
            f"{self._want.request or 'what was asked for'} is not free{after}: "
            f"{'; '.join(reasons) or 'what is left does not do'}",
            holders=tuple(dict.fromkeys(each.id for each in holders if each.id)),
            ahead=ahead,
            hint="\n".join(dict.fromkeys(each.hint for each in holders if each.hint)),
        )

    # The rules of the machine

    def _go_by(self, policy: Policy) -> None:
        self._policy = policy
        longest = policy.limits_of(own_user()).seconds if not policy.plain else None
        given = self._asked.seconds
        self._want = self._asked if longest is None or given is not None else replace(self._asked, seconds=longest)
        vars(self).pop("facts", None)

    def _follow_rules(self) -> None:
        """Go by the machine's rules as they are now.

        Raises:
            LimitError: When they do not give this user so much any more.
        """
        policy = rules()
        if policy is not self._policy:
            self._go_by(policy)
            self._check_limits()

    def _check_limits(self) -> None:
        """Refuse what the user may never have."""
        if self._policy.plain:
            return
        limits = [each for each in self._policy.over_limits(self.facts, ()) if each.lasting]
        if limits:
            reasons = tuple(each.message() for each in limits)
            raise LimitError(
                f"{self._want.request or 'what was asked for'} can never fit: {'; '.join(reasons)}.",
                reasons=reasons,
                hint="\n".join(each.remedy for each in limits),
            )

    @cached_property
    def facts(self) -> Waiting:
        """The request as the rules see it, before it has a place in line."""
        want = self._want
        return Waiting(
            key=None,
            number=_LAST,
            since=self._since,
            priority=self._priority,
            user=own_user(),
            seconds=want.seconds,
            needs=tuple(replace(need, among=hashes(frozenset(map(str, need.among)))) for need in want.needs),
            wants=hashes(want.candidates),
            inner=any(map(is_inner, want.candidates)),
        )

    def over_limits(self, directory: int, listing: Listing, over: Collection[str]) -> tuple[OverLimit, ...]:
        """Return the limits of the user that stand in the way of the request.

        Args:
            directory: Descriptor of the state directory.
            listing: What is in it.
            over: Names of leases that are over.
        """
        if self._policy.plain or self._policy.limits_of(self.facts.user) == Limits():
            return ()
        return self._policy.over_limits(self.facts, holdings(directory, listing, over))

    # The line

    def stand(self, directory: int, listing: Listing) -> None:
        """Find out the place among the requests that compete, and whether one ahead must be waited for.

        Looks at the locks and stamps of those at the head until one is found to be there, and at the nearest ones.
        """
        if self._ticket and self._ticket.name not in listing.tickets:  # the directory was emptied
            self._drop_ticket()
        rivals = self._rivals(directory, listing)
        now, passed, ended = process.monotonic_ns(), set[str](), list[str]()
        for position, name in enumerate(rivals):
            life, found = look(directory, name)
            if life is Life.OVER:
                ended.append(name)
            elif found is None or not tickets.is_silent(found, now, position):
                break
            passed.add(name)
        ahead = rivals[len(passed) :]
        self.place = len(ahead)
        self.before = next((name for name in reversed(ahead) if look(directory, name)[0] is not Life.OVER), None)
        self._passes = self.before is not None and self._may_pass(directory, listing, ahead)
        if self._passes:
            passed.update(ahead)
            self.before = None
        self._passed, self._ended = passed, ended
        if self._ticket:
            self._ticket.stamp()

    def _rivals(self, directory: int, listing: Listing) -> list[str]:
        """Names of the tickets ahead that compete for a device, in the order of service."""
        if not listing.tickets:
            return []
        policy = self._policy
        held = () if policy.plain else holdings(directory, listing)
        own = self._own
        turn = policy.turn(held, process.boot_seconds())
        end, found = turn(own), []
        for name in listing.tickets:
            each = facts_of(directory, name, brief=policy.plain) if name != own.key else None
            if each is None or not each.competes(own):
                continue
            at = turn(each)
            if at < end and (policy.plain or not policy.limited(each, held)):
                found.append((at, name))
        return [name for _, name in sorted(found)]

    @property
    def _own(self) -> Waiting:
        """The request under the name that it has in line."""
        ticket = parse_ticket(self._ticket.name) if self._ticket else None
        return replace(self.facts, key=ticket.name, number=ticket.number) if ticket else self.facts

    def _may_pass(self, directory: int, listing: Listing, ahead: Collection[str]) -> bool:
        """Whether it may be served before requests ahead that want one of the same devices."""
        if self._want.seconds is None:
            return False
        found = [facts_of(directory, name) for name in ahead]
        waiting = [each for each in found if each]
        if len(waiting) < len(found):  # another version's
            return False
        return self._policy.may_pass(self.facts, waiting, holdings(directory, listing), process.boot_seconds())

    def _in_front(self, directory: int, listing: Listing) -> bool:
        """Return False if a competing ticket was added ahead since :meth:`stand` that may not be passed."""
        rivals = self._rivals(directory, listing)
        if not all(rival in self._passed for rival in rivals):
            return False
        return not self._passes or self._may_pass(directory, listing, rivals)

    @property
    def _watches_all(self) -> bool:
        """Whether leases matter wherever the request stands: it may pass, or the order depends on them."""
        return not self._policy.plain or self._want.seconds is not None

    def _enter_line(self, directory: int) -> bool:
        """Get a place in line and watch what is waited for, once the wait is worth it.

        Returns:
            Whether to look again at once, since there was no watch before.
        """
        if self._ticket is None:
            soon = time.monotonic() - self._began < IMPATIENT_SECONDS
            if soon and self._kept_place is None and self._conflicts <= 1:
                return False
            self._make_ticket(directory)
        return self._ticket is not None and self._aim(directory)

    def _make_ticket(self, directory: int) -> None:
        if not self._lock(directory):
            return
        ticket = self._ticket = TicketFile(self._state)
        kept = self._kept_place
        try:
            if not self._state.replaced(directory):
                number = None if kept is None else kept.number
                number = ticket.publish(directory, self._want, self._priority, self._since, self._note, number)
                if kept is not None:
                    kept.number, kept.since = number, self._since
        except FileNotFoundError:  # a process that cannot see this one took it for debris
            self._look_soon = True
        finally:
            self._state.unlock(directory)
            if not ticket.name:
                self._drop_ticket()

    def _drop_ticket(self) -> None:
        if self._ticket:
            self._ticket.drop()  # before it is forgotten: an interrupt may come in between
            self._ticket = None

    def leave_line(self) -> None:
        """Give the place in line up, and what wakes us."""
        self._drop_ticket()
        self._forget_leaving()
        if self._watch:
            self._watch.close()
            self._watch = None

    # What wakes it

    def _aim(self, directory: int) -> bool:
        """Watch the ticket ahead, or the directory; whether something may have happened before."""
        before = None if self._watches_all else self.before
        if self.place >= _WATCHING:
            return False
        path = f"{self._state.path}/{before}" if before else self._state.path
        try:
            self._watch = self._watch or FileEvents()
            if self._watch.path == path:
                return False
            self._watch.follow(path)
            self._look_soon = False  # what was watched before is over
        except FileNotFoundError:  # it has just gone away
            return True
        except (OSError, ImportError):  # there is no watch to be had: then we poll
            return False
        return before is None or look(directory, before)[0] is Life.OVER

    def _forget_leaving(self) -> None:
        """Be no longer woken by processes that leave the kernel."""
        while self._leaving:
            with contextlib.suppress(OSError):
                os.close(self._leaving.pop())

    def descriptors(self) -> list[int]:
        """What becomes readable when something happens; then ask :meth:`noted`."""
        return [*self._leaving, *([self._watch.fileno()] if self._watch else [])]

    def noted(self, ready: int) -> bool:
        """Whether what happened is worth another look.

        Args:
            ready: The descriptor that is readable.
        """
        if self._watch is None or ready != self._watch.fileno():
            return True
        worth = False
        for name, removed in self._watch.events():
            if name and name.startswith("t1.") and removed and self._watches_all:
                worth = True
                continue
            lease = parse_lease(name) if name else None
            if name and (lease is None or lease.device not in self._want.candidates):
                continue
            worth = True
            if not removed:
                self._look_soon = True
        return worth

    def pause(self) -> float:
        """Seconds after which to look again whatever happens."""
        if self._ticket is None:  # nothing wakes us: at random, so that rivals do not march in step
            import random

            pause = random.uniform(0.0002, 0.001) if self.before is None else IMPATIENT_SECONDS  # noqa: S311
        elif self._refused or self._look_soon:
            pause, self._look_soon = _SECOND_LOOK, False
        elif self._watch is None or not self._watch.path:
            pause = max(_WITHOUT_WATCH, _WITHOUT_WATCH_PER_PLACE * self.place)
        else:
            pause = tickets.interval(self.place)
        return pause if self._deadline is None else max(0.0, min(pause, self._deadline - time.monotonic()))


def _period(seconds: float, *, passes: bool) -> Period:
    """When a lease ends that begins now."""
    now = int(process.boot_seconds() * 1000)
    return Period(now + max(1, int(seconds * 1000)), now if passes else None)
