"""Getting devices: look, choose, publish, and wait in line in between.

Choosing is optimistic. The names are read and the caller chooses without any lock, so that a slow choice - it may ask
plug-ins - delays nobody but itself. Then, with the directory locked, the names are read once more, and what was chosen
is published if it is still free and nobody came in front; otherwise all starts anew.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import filterfalse

from anyaccel.errors import DevicesBusyError, LeaseCancelledError
from anyaccel.ledger import listing as listings
from anyaccel.ledger import record
from anyaccel.ledger.device_locks import DeviceLocks, describe
from anyaccel.ledger.directory import BUSY_SECONDS, StateDirectory
from anyaccel.ledger.lease import Lease, Place, Want
from anyaccel.ledger.listing import Listing
from anyaccel.ledger.lockfile import Life, LockedFile
from anyaccel.ledger.names import ENDLESS, LeaseName, Period, lease_name, new_nonce
from anyaccel.ledger.record import LeaseRecord
from anyaccel.ledger.tickets import Standing
from anyaccel.ledger.turns import Turns, permitted, rules
from anyaccel.ledger.waiting import Waiter
from anyaccel.linux import mark as marks
from anyaccel.linux import process
from anyaccel.model.device import MOST_SLOTS, UNITS_PER_DEVICE
from anyaccel.model.extent import ANY_SLOTS, Extent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from anyaccel.policy import OverLimit

Choose = Callable[[Mapping[str, Extent]], Mapping[str, Extent] | None]
"""Chooses how much of which device to hold, by the device's name, given what is taken; None when what is left does not
do. Nothing is a choice."""

OnWait = Callable[[int, tuple[LeaseRecord, ...]], None]
"""Told the place in line, 1 for the next to be served, and who holds devices that would do, which is empty where enough
are free and a limit of the user's alone is in the way; at first and on change."""

_RUNNING = ("R", "S")
"""States of a process that gets on with what it does."""
_VANISHED = 50
_CONFLICTS = 3
_CONFLICTS_AT_LAST = 100
_LOCK_SECONDS = 0.2
_LOCK_SECONDS_AT_LAST = 1.0
_SWEPT = 4


class Acquisition:
    """One attempt to get devices, from the first look to the lease. Not to be shared by threads.

    Args:
        state: The state directory.
        want: What is wanted.
        choose: Chooses among what is free; called without any lock, possibly often.
        wait: Seconds to wait; None to wait for as long as it takes.
        priority: The higher, the earlier.
        note: What it is for.
        on_wait: Told how the wait goes.
        place: The place in line that the request had before, or None.

    Attributes:
        waiter: Our place in line.
        on_wait: Told how the wait goes; None once that is not wanted any more.
        limits: What of the user's limits stood in the way when ``on_wait`` was told.
    """

    def __init__(
        self,
        state: StateDirectory,
        want: Want,
        choose: Choose,
        *,
        wait: float | None,
        priority: int,
        note: str,
        on_wait: OnWait | None,
        place: Place | None = None,
    ) -> None:
        policy = rules()
        self._state = state
        self._asked, self._priority = want, priority
        self._want = want = permitted(want, priority, policy)
        self._turns = Turns(want, priority, policy, None if place is None else place.since)
        self._choose = choose
        self._note = note
        self.on_wait = on_wait
        self.limits: tuple[OverLimit, ...] = ()
        self._began = time.monotonic()
        self._deadline = None if wait is None else self._began + wait
        self.waiter = Waiter(state, self._turns, note=note, deadline=self._deadline, kept=place)
        self._busy_since: float | None = None
        self._busy_turn: tuple[int | None, int] = (None, 0)
        self._over: set[str] = set()
        self._doubtful: dict[str, LeaseName] = {}
        self._kept: set[str] = set()
        self._carrier: dict[str, int] = {}
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

    def get(self, cancel: Any = None) -> Lease:
        """Get the devices, or get in line and wait; see :meth:`anyaccel.ledger.Ledger.acquire`.

        Args:
            cancel: Something with a descriptor that becomes readable when somebody cancels the wait.
        """
        try:
            try:
                while (lease := self.attempt()) is None:
                    self.sleep(cancel)
            finally:
                self.waiter.close()
        except BaseException:
            self.undo()
            raise
        return lease

    async def get_async(self) -> Lease:
        """The same on the running event loop."""
        from anyaccel.ledger.events import pause

        try:
            try:
                while (lease := self.attempt()) is None:
                    self.tell()
                    await pause(self.waiter)
            finally:
                self.waiter.close()
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
        if again and self._still_follows():
            return None
        lease = None
        directory = self._state.open(make=True)
        try:
            if again:
                if not self._late and self.waiter.still_behind(directory):
                    return None
                self.waiter.forget()
                self._follow_rules()
            self._contradicted.clear()
            self._doubtful.clear()
            self._kept.clear()
            self._over.clear()  # a name comes back where leases were brought over from a directory that was deleted
            lease = self._try_repeatedly(directory)
            if lease is None and self._late:
                gone = self._state.replaced(directory)  # then what is held there says nothing
                self._vanished += gone
                if not gone or self._vanished > _VANISHED:
                    raise self._sorry(directory)
            elif lease is None and self.waiter.enter(directory, self._lock, at_once=self._conflicts > 1):
                self.waiter.look_soon()
                lease = self._try_repeatedly(directory)
        except OSError as error:
            if error is self._callers:
                raise
            self._vanished += error.errno == errno.ENOENT
            if error.errno != errno.ENOENT or self._vanished > _VANISHED:
                raise self._state.fault(error) from error
            self.waiter.look_soon()  # somebody is removing the directory under us: the next look makes a new one
        finally:
            self._state.close(directory)
        return lease

    def _follow_rules(self) -> None:
        """Go by the machine's rules as they are now.

        Raises:
            LimitError: When they do not give this user so much any more.
        """
        policy = rules()
        if policy is not self._turns.policy:
            self._want = permitted(self._asked, self._priority, policy)
            self._turns.renew(self._want, policy)

    def _still_follows(self) -> bool:
        """Whether a thread of this process is still ahead of us, and nobody has to be told how the wait goes."""
        ticket = self.waiter.ticket
        if ticket and ticket.cancelled:
            raise self._cancelled()
        return not self._late and not self.on_wait and self.waiter.follows()

    def sleep(self, cancel: Any) -> None:
        """Wait until it may be worth another attempt, and tell whoever wants to know how the wait goes.

        Args:
            cancel: Something with a descriptor that becomes readable when somebody cancels the wait.

        Raises:
            LeaseCancelledError: When somebody does.
        """
        self.tell()
        try:
            cancelled = not self.waiter.sleep(cancel)
        except OSError as error:
            raise self._state.fault(error) from error
        if cancelled:
            raise self._cancelled()

    def tell(self) -> None:
        """Tell whoever wants to know how the wait goes."""
        now = self.waiter.place, self._limited
        if self.on_wait and self.waiter.ticket and self._told != now:
            self._told = now
            directory = self._state.open(make=True)
            try:
                self.limits = self._turns.over_limits(directory, listings.read(directory), self._over)
                holders = () if self._limited else self._holders(directory)
            except OSError as error:
                raise self._state.fault(error) from error
            finally:
                self._state.close(directory)
            self.on_wait(self.waiter.place + 1, holders)

    def _cancelled(self) -> LeaseCancelledError:
        return LeaseCancelledError(f"the wait for {self._want.request or 'devices'} was cancelled")

    def undo(self) -> None:
        """Give back what was got when it cannot be handed to anybody any more: an interrupt came in between.

        Does nothing the second time.
        """
        self.waiter.close()
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
        standing = self.waiter.stand(directory, listing)
        if listing.hidden and not self.waiter.ticket:
            listings.sweep(directory, listings.debris(directory, listing.hidden[:_SWEPT]))
        if standing.before:
            return None, False
        choice = self._select(directory, listing)
        if choice is None:
            return None, False
        if self._turns.over_limits(directory, listing, self._over):
            self._count_out(directory, listing.leases)
            self._look_at_carriers(directory)
            if self._turns.over_limits(directory, listing, self._over):
                self._limited = True
                return None, False
        if not choice:
            return Lease(self._state, new_nonce(), {}, {}, self._device_locks), False
        lease = self._publish(directory, choice, standing, listing.summary.marks)
        return lease, self._busy_since is None

    def _select(self, directory: int, listing: Listing) -> dict[str, Extent] | None:
        """Let the caller choose by names, and if nothing fits, by locks.

        A command that carried its lease to its end has left the name behind, so names of processes that are gone are
        looked at in any case: the choice should not avoid a device that is free.
        """
        named = listing.summary
        missing = frozenset(filterfalse(process.exists, named.pids))
        if missing:
            self._count_out(directory, [lease for lease in named.leases if lease.pid in missing])
        choice = self._choose_certainly(directory, listing)
        if choice is not None:
            return choice
        before = len(self._over)
        self._count_out(directory, listing.leases)
        listings.sweep(directory, listings.debris(directory, listing.hidden))
        return self._choose_certainly(directory, listing) if self._doubtful or len(self._over) > before else None

    def _choose_certainly(self, directory: int, listing: Listing) -> dict[str, Extent] | None:
        """Let the caller choose as if all leases that may be kept by their mark were over; then look whether they are.

        A look at all processes takes milliseconds, so it is made only for a device that the choice needs.
        """
        while True:
            choice = self._ask(self._taken(listing, self._over | self._doubtful.keys()))
            if choice is None or not self._doubtful:
                return choice
            needed = {lease.device for lease in self._doubtful.values()}
            if needed.isdisjoint(choice) or not self._look_at_carriers(directory):
                return choice

    def _taken(self, listing: Listing, over: Collection[str]) -> dict[str, Extent]:
        """What is taken, by the device's name: what names say that are not over, and devices that were refused now."""
        named = listing.summary
        taken = listings.taken(named.leases, over) if over else named.taken
        return {**taken, **dict.fromkeys(self._contradicted, Extent())}

    def _look_at_carriers(self, directory: int) -> bool:
        """Look which of the doubtful leases are kept, and follow the processes that keep them.

        Returns:
            Whether any is, so that the choice must be made again.
        """
        states = listings.by_marks(directory, self._doubtful.values())
        for name, state in states.items():
            lease = self._doubtful.pop(name)
            if state.life is Life.OVER:
                self._over.add(name)
                continue
            self._kept.add(name)
            if state.carriers:
                self._carrier[name] = state.carriers[0]
                self._follow(lease, state.carriers[0])
        return any(state.life is not Life.OVER for state in states.values())

    def _count_out(self, directory: int, leases: Iterable[LeaseName]) -> None:
        """Find out which leases are over, or may be, and follow the processes of those that are about to be."""
        for lease in leases:
            name = lease.name
            if name in self._over or name in self._kept or name in self._doubtful:
                continue
            carrier = self._carrier.get(name)
            if carrier and marks.carries(carrier, lease.mark):  # as at the last look
                self._kept.add(name)
                self._follow(lease, carrier)
                continue
            life = listings.without_marks(directory, lease)
            if life is Life.OVER:
                self._over.add(name)
            elif life is Life.KEPT:
                self._doubtful[name] = lease
            elif life is Life.LEAVING:
                self._follow(lease, lease.pid)

    def _follow(self, lease: LeaseName, pid: int) -> None:
        """Look again when a process has left the kernel that keeps a lease of a device that would do."""
        if lease.device in self._want.concerned:
            self.waiter.follow(pid)

    def _ask(self, taken: dict[str, Extent]) -> dict[str, Extent] | None:
        try:
            chosen = self._choose(taken)
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

    def _publish(
        self, directory: int, choice: dict[str, Extent], standing: Standing, marked: Collection[marks.Mark]
    ) -> Lease | None:
        """Make the lease if what was chosen is still free and it is still our turn.

        Args:
            directory: Descriptor of the state directory.
            choice: What was chosen.
            standing: Our place in line when it was chosen.
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
                if not self._still_free(directory, listing, choice, standing):
                    return None
                if mark and mark in listing.summary.marks and mark not in marked:
                    return None  # another lease has drawn it meanwhile
                if contradiction := self._device_locks.lock():
                    self._contradicted[contradiction[0]] = describe(*contradiction)
                    return None
                period = ENDLESS if want.seconds is None else _period(want.seconds, passes=standing.passes)
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

    def _still_free(self, directory: int, listing: Listing, choice: dict[str, Extent], standing: Standing) -> bool:
        if self._state.replaced(directory):
            return False
        if not self.waiter.in_front(directory, listing, standing):
            return False
        if self._turns.over_limits(directory, listing, self._over):
            return False
        if standing.over or self._over:
            dead = [lease.name for lease in listing.leases if lease.name in self._over and lease.understood]
            listings.sweep(directory, (*standing.over, *dead))
        return listings.fits(choice, self._taken(listing, self._over))

    def _lock(self, directory: int) -> bool:
        """Lock the directory, or say that this must be tried again later; too late is an error."""
        locked = self._state.lock(directory, _LOCK_SECONDS_AT_LAST if self._late else _LOCK_SECONDS)
        self.waiter.refused = not locked
        if locked:
            self._busy_since = None
            return True
        now, owner = time.monotonic(), self._state.owner(directory)
        # Many who take turns are no reason to give up, be they processes or the threads of one. Where the kernel's list
        # of locks is long, it may leave one out that changes hands while it is read.
        taken = owner is None or process.state(owner) in _RUNNING
        turn = (owner, self._state.changed(directory) if taken else 0)
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
        ahead = self.waiter.place
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
            holders=holders,
            ahead=ahead,
            hint="\n".join(dict.fromkeys(each.hint for each in holders if each.hint)),
        )


def _period(seconds: float, *, passes: bool) -> Period:
    """When a lease ends that begins now."""
    now = int(process.boot_seconds() * 1000)
    return Period(now + max(1, int(seconds * 1000)), now if passes else None)
