"""A scheduler that sees and takes the machine's leases."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from time import monotonic

from anyaccel.errors import AnyaccelError, DevicesBusyError, LimitError
from anyaccel.launcher.choosing import KnownNames, remembered, validate
from anyaccel.launcher.hold import LeaseRequest
from anyaccel.launcher.usage import OpenLease
from anyaccel.launcher.verdicts import ActiveLeases, beyond_limits, within_limits
from anyaccel.launcher.waits import note_own
from anyaccel.ledger import Choose, Lease, LeaseRecord, Ledger, Place
from anyaccel.linux import mark as marks
from anyaccel.linux.fork import renew_in_child, tidy_in_child
from anyaccel.model import Allocation, Extent, Inventory, replace
from anyaccel.policy import Waiting
from anyaccel.scheduler import Choice, Scheduler, Ticket, Verdict
from anyaccel.scheduler.plan import RequestPlan
from anyaccel.scheduler.ticket import notify

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.launcher.options import AcquireOptions

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
        self._leases: dict[str, OpenLease] = {}
        self._others: set[str] = set()
        self._waits: dict[int, _Wait] = {}

    def release(self, allocation: Allocation) -> None:
        """End the lease of an allocation; see :meth:`Scheduler.release`."""
        super().release(allocation)
        opened = self._leases.pop(allocation.id, None)
        if opened is not None:
            opened.end_lease()

    def cancel(self, ticket: Ticket) -> bool:
        """Leave the line; see :meth:`Ticket.cancel`."""
        waited = super().cancel(ticket)
        wait = self._waits.pop(ticket.number, None) if waited else None
        if wait is not None:
            wait.stop()
        return waited

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

    def _update(self, machine: str, inventory: Inventory | None) -> list[Ticket]:
        """Go on with a machine that has changed. Who waits does so anew, for its devices, and keeps the place."""
        self._forget_others()
        if inventory is not None:  # leases of a machine that is not this host go by its name, which may say what it has
            inventory = replace(inventory, machine=self.inventory.machine)
        settled = super()._update(machine, inventory)
        waiting = {ticket.number: ticket for ticket in self._queue}
        for number in self._waits.keys() - waiting.keys():
            self._waits[number].stop()
            if number not in self._infeasible:  # it runs on the CPU
                del self._waits[number]
        for number, ticket in waiting.items():
            try:
                self._wait_in_line(ticket)
            except AnyaccelError as error:  # as of a state directory that cannot be trusted any more
                ticket.error = error
                self._leave(ticket)
                self._waits.pop(number).stop()
                settled.append(ticket)
        return settled

    def _look(self, time: float | None = None) -> ActiveLeases:
        """Count what everybody holds now."""
        held = ActiveLeases.read(self.inventory, self._ledger, self._environ, time=time)
        self._forget_others()
        self._own.recount()
        self._arrangement.note(0)
        for lease, devices in held.devices.items():
            if lease not in self._own.held:
                self._own.occupy(devices, lease, held.holders[lease])
                self._others.add(lease)
        return held

    def _forget_others(self) -> None:
        for key in self._others:
            self._own.release(key)
        self._others.clear()

    def _waiting(self, plan: RequestPlan, number: int, priority: int, time: float | None, user: int | None) -> Waiting:
        if user is not None:
            raise ValueError(f"user must be None where leases are shared: the kernel tells whose they are (got {user})")
        return replace(super()._waiting(plan, number, priority, time, user), seconds=time)

    def _try(self, waiting: Waiting, plan: RequestPlan, note: str) -> Allocation | None:
        if not plan.ever_fits:
            return super()._try(waiting, plan, note)
        if self._rivals(waiting, plan.mask, (), self._queue.firsts()):
            return None
        pending = self._wish(plan, waiting)
        try:
            lease = self._ledger.acquire(
                pending.want, self._choosing(pending), wait=0, priority=waiting.priority, note=note
            )
        except DevicesBusyError:
            return None
        except LimitError as error:
            raise beyond_limits(plan.request, error) from error
        note_own(lease)
        return self._take(pending, lease, note, waited=0.0)

    def _wish(self, plan: RequestPlan, waiting: Waiting) -> LeaseRequest:
        inventory, names = self.inventory, self._own.layout.names  # it knows those of devices that were lost, too
        choice = remembered(inventory, plan.request, lambda: Choice(inventory, plan.request, validate, names))
        time = waiting.seconds
        options: AcquireOptions = {"environ": self._environ, "inventory": inventory, "time": time}
        return LeaseRequest(plan.request, marks.draw_for_process, options, choice=choice)

    def _choosing(self, pending: LeaseRequest) -> Choose:
        """What chooses for a request: what this program counts as held beside leases is taken, too."""

        def choose(taken: Mapping[str, Extent]) -> dict[str, Extent] | None:
            both = dict(taken)
            for key, allocation in list(self._held.items()):
                if key not in self._leases:
                    for name, extent in pending.scope.to_ledger(allocation.grants).items():
                        both[name] = both[name].joined(extent) if name in both else extent
            return pending.choose(both)

        return choose

    def _take(self, pending: LeaseRequest, lease: Lease, note: str, *, waited: float) -> Allocation:
        """Write down what a lease holds."""
        self._forget_others()  # who looked meanwhile has found this lease, and took it for somebody else's
        allocation = pending.allocation(lease)
        self._leases[allocation.id] = (
            OpenLease(lease, allocation, note=note, waited=waited).mark_process().begin_entry()
        )
        self._held[allocation.id] = allocation
        self._own.enter(allocation, note)
        self._own.recount()
        return allocation

    # The machine's line

    def _serve(self) -> list[Ticket]:
        return []  # the tickets wait in the machine's line

    def _place_in_line(self, ticket: Ticket) -> int:
        own = super()._place_in_line(ticket)
        wait = self._waits.get(ticket.number)
        return max(own, wait.told) if own and wait else own

    def _judge(self, plan: RequestPlan, waiting: Waiting) -> Verdict:
        held = self._look(waiting.seconds)
        verdict = held.with_ways_out(super()._judge(plan, waiting))
        if not plan.ever_fits:
            return verdict
        return within_limits(verdict, self._ledger.over_limits(self._wish(plan, waiting).want, waiting.priority))

    def _ahead(self, plan: RequestPlan, waiting: Waiting) -> dict[str, str]:
        found = super()._ahead(plan, waiting)
        wait = self._waits.get(waiting.number)
        if wait:
            ahead = wait.told - 1
        elif plan.ever_fits and waiting.number == _LAST:  # a newcomer
            ahead = self._ledger.count_ahead(self._wish(plan, waiting).want, waiting.priority)
        else:
            ahead = 0
        others = ahead - len(found)
        return found if others <= 0 else {**found, "line": f"{others} of other programs"}

    def _wait_in_line(self, ticket: Ticket) -> None:
        """Have a ticket wait for devices of the machine as it is now; where it stood, if it did; with the lock held."""
        pending = self._wish(ticket.plan, ticket.waiting)
        wait = self._waits.setdefault(ticket.number, _Wait())
        wait.start(lambda: self._wait(ticket, pending, wait))

    async def _wait(self, ticket: Ticket, pending: LeaseRequest, wait: _Wait) -> None:
        choosing = self._choosing(pending)

        def choose(taken: Mapping[str, Extent]) -> Mapping[str, Extent] | None:
            waits = pending.inventory is self.inventory and self._waits.get(ticket.number) is wait
            return choosing(taken) if waits else None  # it is about to be told that it waits no more, or anew

        try:
            lease = await self._ledger.begin(
                pending.want,
                choose,
                priority=ticket.priority,
                note=ticket.note,
                on_wait=wait.tell,
                place=wait.place,
            ).get_async()
        except Exception as error:  # noqa: BLE001 -- raised where the ticket is awaited
            if isinstance(error, LimitError):  # the configuration was changed
                error = beyond_limits(ticket.plan.request, error)
            self._fail(ticket, error)
            return
        with self._lock:
            given = pending.inventory is self.inventory and self._leave(ticket)
            if given:
                self._waits.pop(ticket.number, None)
                ticket.allocation = self._take(pending, lease, ticket.note, waited=monotonic() - wait.began)
        if given:
            notify([ticket])
        else:  # it was cancelled meanwhile, or the machine is another now: then it waits anew
            lease.release()

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        with self._lock:
            self._waits.pop(ticket.number, None)
            if not self._leave(ticket):
                return
            ticket.error = error
        notify([ticket])


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
        with suppress(RuntimeError):  # the process is at its end, where it has left the line
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
        self._lock = renew_in_child(threading.Lock())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inherited: list[asyncio.AbstractEventLoop] = []
        tidy_in_child(self._forget)

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
        if self._loop is not None:
            self._inherited.append(self._loop)
            self._loop = None


_waiters = _Waiters()
