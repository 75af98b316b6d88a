"""A scheduler that sees and takes the machine's leases."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic

from anyaccel.errors import DevicesBusyError
from anyaccel.launcher.hold import Held, Wish
from anyaccel.launcher.launch import KnownNames, validate
from anyaccel.launcher.usage import Usage
from anyaccel.ledger import Choose, Lease, LeaseRecord, Ledger, Place
from anyaccel.ledger import mark as marks
from anyaccel.model import Allocation, Extent, Inventory, replace
from anyaccel.policy import Waiting
from anyaccel.scheduler import RequestLike, Scheduler, Ticket, Verdict
from anyaccel.scheduler.ticket import Plan, notify

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

_LAST = 1 << 62


class SharedScheduler(Scheduler):
    """A scheduler whose allocations are leases, and whose queue is the machine's line; see :func:`open_scheduler`.

    Each request that waits has a ticket of its own there. The waiting is done by a thread that all schedulers of this
    process share. The books of the base class are made anew from the leases whenever somebody asks.
    """

    def __init__(self, inventory: Inventory, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(inventory, validate=validate, known=KnownNames())
        self._environ = dict(os.environ) if environ is None else environ
        self._ledger = Ledger.open(self._environ)
        self._leases: dict[str, tuple[Lease, Usage]] = {}
        self._others: set[str] = set()
        self._waits: dict[int, _Wait] = {}

    def submit(
        self,
        request: RequestLike,
        *,
        priority: int = 0,
        note: str = "",
        time: float | None = None,
        user: int | None = None,
        infeasible: Literal["raise", "pend"] = "raise",
        on_placed: Callable[[Ticket], None] | None = None,
    ) -> Ticket:
        """Give devices to a request as soon as it is its turn in the machine's line; see :meth:`Scheduler.submit`.

        Raises:
            LimitError: When the configuration of the machine does not give this user so much.
            LedgerError: When leases cannot be kept on this machine.
        """
        ticket = super().submit(
            request, priority=priority, note=note, time=time, user=user, infeasible=infeasible, on_placed=on_placed
        )
        with self._lock:
            if ticket in self._queue:
                self._wait_for(ticket)
        return ticket

    def release(self, allocation: Allocation) -> None:
        """End the lease of an allocation; see :meth:`Scheduler.release`."""
        super().release(allocation)
        lease, use = self._leases.pop(allocation.id, (None, None))
        if lease is not None and use is not None:
            use.ended()
            atexit.unregister(use.ended)
            lease.release()

    def cancel(self, ticket: Ticket) -> bool:
        """Leave the line; see :meth:`Ticket.cancel`."""
        waited = super().cancel(ticket)
        wait = self._waits.pop(ticket.number, None) if waited else None
        if wait is not None:
            wait.stop()
        return waited

    def update(self, inventory: Inventory) -> None:
        """Go on with a machine that has changed; see :meth:`Scheduler.update`. Places in line are kept."""
        with self._lock:
            self._forget_others()
        # Leases of a machine that is not this host go by its name, which may say what it has.
        super().update(replace(inventory, machine=self._inventory.machine))
        with self._lock:
            waiting = {ticket.number: ticket for ticket in self._queue}
            for number, wait in self._waits.items():
                if number not in waiting:
                    wait.stop()
            for ticket in waiting.values():
                self._wait_for(ticket)

    def free(self, device_id: str) -> int:
        """Free units of a device in 1/10000, given what all processes hold; see :meth:`Scheduler.free`."""
        with self._lock:
            self._look()
        return super().free(device_id)

    def holders(self, device_id: str) -> tuple[Allocation, ...]:
        """The allocations that hold a device; those of other processes have the ids of their leases."""
        with self._lock:
            self._look()
        return super().holders(device_id)

    # Leases, with the lock held

    def _look(self) -> Held:
        """Count what everybody holds now."""
        held = Held.of(self._inventory, self._ledger, self._environ)
        self._forget_others()
        self._recount()
        for lease, devices in held.devices.items():
            if lease not in self._leases:
                self._count(devices, lease, held.holders[lease])
                self._others.add(lease)
        return held

    def _forget_others(self) -> None:
        for key in self._others:
            del self._held[key]
            self._notes.pop(key, None)
            for spot in self._spots.pop(key):
                self._holders[spot.position].pop(key, None)
        self._others.clear()

    def _waiting(self, plan: Plan, number: int, priority: int, time: float | None, user: int | None) -> Waiting:
        if user is not None:
            raise ValueError(f"user must be None where leases are shared: the kernel tells whose they are (got {user})")
        return replace(super()._waiting(plan, number, priority, time, user), seconds=time)

    def _try(self, waiting: Waiting, plan: Plan, note: str) -> Allocation | None:
        if not plan.ever_fits:
            return super()._try(waiting, plan, note)
        if self._queue.blocked(priority=waiting.priority, mask=plan.mask):
            return None
        wish = self._wish(plan, waiting)
        try:
            lease = self._ledger.acquire(wish.want, self._choosing(wish), wait=0, priority=waiting.priority, note=note)
        except DevicesBusyError:
            return None
        return self._take(wish, lease, note, waited=0.0)

    def _wish(self, plan: Plan, waiting: Waiting) -> Wish:
        time = waiting.seconds
        return Wish(plan.request, self._environ, mark=marks.of_process, inventory=self._inventory, time=time)

    def _choosing(self, wish: Wish) -> Choose:
        """What chooses for a request: what this program counts as held beside leases is taken, too."""

        def choose(taken: Mapping[str, Extent]) -> dict[str, Extent] | None:
            both = dict(taken)
            for key, allocation in list(self._held.items()):
                if key not in self._leases and key not in self._others:
                    for name, extent in wish.scope.to_ledger(allocation.grants).items():
                        both[name] = both[name].joined(extent) if name in both else extent
            return wish.choose(both)

        return choose

    def _take(self, wish: Wish, lease: Lease, note: str, *, waited: float) -> Allocation:
        """Write down what a lease holds."""
        self._forget_others()  # who looked meanwhile has found this lease, and took it for somebody else's
        allocation = wish.allocation(lease)
        marks.put(lease.mark)
        use = Usage(lease.id, allocation.shares, str(allocation.request), note, waited=waited)
        atexit.register(use.ended)
        self._leases[allocation.id] = lease, use
        self._held[allocation.id] = allocation
        if note:
            self._notes[allocation.id] = note
        for each in allocation.shares:
            self._holders[self._layout.positions[each.device.id]][allocation.id] = allocation
        self._recount()
        return allocation

    # The machine's line

    def _serve(self, changed: int) -> list[Ticket]:  # noqa: ARG002 -- those who wait look at the leases themselves
        return []

    def _place_in_line(self, ticket: Ticket) -> int:
        own = super()._place_in_line(ticket)
        wait = self._waits.get(ticket.number)
        return max(own, wait.told) if own and wait else own

    def _judge(self, plan: Plan, priority: int, number: int = _LAST) -> Verdict:
        held = self._look()
        return held.with_ways_out(super()._judge(plan, priority, number))

    def _ahead(self, plan: Plan, priority: int, number: int) -> dict[str, str]:
        found = super()._ahead(plan, priority, number)
        wait = self._waits.get(number)
        others = wait.told - 1 - len(found) if wait else 0
        return found if others <= 0 else {**found, "line": f"{others} of other programs"}

    def _wait_for(self, ticket: Ticket) -> None:
        """Have a ticket wait for devices of the machine as it is now; where it stood, if it did; with the lock held."""
        wait = self._waits.setdefault(ticket.number, _Wait())
        wish = self._wish(ticket.plan, ticket.waiting)
        wait.start(lambda: self._wait(ticket, wish, wait))

    async def _wait(self, ticket: Ticket, wish: Wish, wait: _Wait) -> None:
        try:
            lease = await self._ledger.acquire_async(
                wish.want,
                self._choosing(wish),
                priority=ticket.priority,
                note=ticket.note,
                on_wait=wait.tell,
                place=wait.place,
            )
        except Exception as error:  # noqa: BLE001 -- raised where the ticket is awaited
            self._fail(ticket, error)
            return
        with self._lock:
            mask = ticket.plan.mask
            given = wish.inventory is self._inventory and self._queue.remove(
                priority=ticket.priority, number=ticket.number, mask=mask
            )
            if given:
                self._waits.pop(ticket.number, None)
                ticket.allocation = self._take(wish, lease, ticket.note, waited=monotonic() - wait.began)
        if given:
            notify([ticket])
        else:  # it was cancelled meanwhile, or the machine is another now: then it waits anew
            lease.release()

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        with self._lock:
            self._waits.pop(ticket.number, None)
            if not self._queue.remove(priority=ticket.priority, number=ticket.number, mask=ticket.plan.mask):
                return
            ticket.error = error
        if ticket.on_placed is not None:
            logging.getLogger("anyaccel").error("%r waits no more: %s", ticket, error)
        ticket.wake()


class _Wait:
    """A request that waits in the machine's line.

    Attributes:
        place: Its place, which it keeps when the machine changes.
        told: The place among those who want the same devices, 1 for the next; 0 before anybody said.
        began: When it began to wait, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.place = Place()
        self.told = 0
        self.began = monotonic()
        self._task: asyncio.Task[None] | None = None

    def tell(self, place: int, records: tuple[LeaseRecord, ...]) -> None:  # noqa: ARG002 -- asked for when somebody asks
        """Take down the place."""
        self.told = place

    def start(self, run: Callable[[], Awaitable[None]]) -> None:
        """Wait, once what waited before has ended. Any thread may call it, like the next."""
        _waiters.call(self._start, run)

    def stop(self) -> None:
        """Wait no more."""
        _waiters.call(self._stop)

    def _start(self, run: Callable[[], Awaitable[None]]) -> None:
        previous = self._task
        self._stop()
        self._task = asyncio.get_running_loop().create_task(_after(previous, run))

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


async def _after(previous: asyncio.Task[None] | None, run: Callable[[], Awaitable[None]]) -> None:
    if previous is not None:
        await asyncio.wait([previous])
    await run()


class _Waiters:
    """The thread in which requests of this process wait, and its event loop; made when there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inherited: list[asyncio.AbstractEventLoop] = []
        os.register_at_fork(after_in_child=self._forget)

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        """Have the thread call a function."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(target=self._loop.run_forever, name="anyaccel line", daemon=True)
                thread.start()
                atexit.register(self._end, self._loop, thread)
            self._loop.call_soon_threadsafe(function, *arguments)

    @staticmethod
    def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        """Leave the line, at the end of the process."""
        if not thread.is_alive():  # we are a fork
            return

        async def leave() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        try:
            asyncio.run_coroutine_threadsafe(leave(), loop).result(timeout=5)
        except TimeoutError:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _forget(self) -> None:
        """We are a fork: the line is the parent's, and its loop is kept, since it cannot be closed here."""
        self._lock = threading.Lock()
        if self._loop is not None:
            self._inherited.append(self._loop)
            self._loop = None


_waiters = _Waiters()
