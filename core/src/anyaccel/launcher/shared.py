"""A scheduler with machine-wide leases for allocations."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic

from anyaccel.errors import AnyaccelError, DevicesBusyError, LimitError, UsageError
from anyaccel.launcher.hold import LeaseRequest
from anyaccel.launcher.open_lease import OpenLease
from anyaccel.launcher.scope import Scope
from anyaccel.launcher.verdicts import ActiveLeases
from anyaccel.ledger import LeaseRecord, Ledger, Place
from anyaccel.linux import mark as marks
from anyaccel.linux import renew_in_child
from anyaccel.model import NOTHING, Allocation, Extent, Inventory, replace
from anyaccel.policy import Waiting
from anyaccel.scheduler import Books, RequestPlan, Scheduler, Ticket, Verdict, apply_limits, notify
from anyaccel.vendors import KnownNames, validate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from concurrent.futures import Future
    from typing import NoReturn

    from anyaccel.launcher.launch import AcquireOptions
    from anyaccel.ledger import Lease
    from anyaccel.model import Request
    from anyaccel.scheduler import HeldAllocation


class SharedScheduler(Scheduler):
    """A scheduler with leases for allocations and the machine's queue; see :func:`open_scheduler`.

    Each request that waits has a ticket in the machine's queue. One thread waits for all schedulers of this process.
    The books of the base class have only what :meth:`occupy` counts; each question makes books from the leases.
    """

    def __init__(self, inventory: Inventory, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(inventory, validate, KnownNames())
        self._environ = dict(os.environ) if environ is None else environ
        self._ledger = Ledger.open(self._environ)
        self._leases: dict[str, OpenLease] = {}
        self._waits: dict[int, _QueuedRequest] = {}

    def release(self, allocation: Allocation) -> None:
        """Release an allocation; end its lease, if any, with a journal entry, and have the vendors undo their changes.

        The lease ends even if child processes still use the devices, but not by a call in a forked child. The entry is
        written only if a journal is kept. A failure of a vendor is logged. Waiting requests are served by the machine's
        queue, not by this call. After an interrupt, call it again.

        Raises:
            ValueError: If the allocation is not held by this scheduler.
        """
        opened = self._leases.get(allocation.id)
        if opened is None:
            super().release(allocation)
        else:
            opened.end_lease()
            self._leases.pop(allocation.id, None)  # last: after an interrupt, a second call does all of it again

    def restore(self, allocation: Allocation, **_: object) -> NoReturn:
        """Not possible: the leases of a former program are counted as long as its processes run.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"{allocation.id} cannot be restored in a shared scheduler: allocations of a former program are leases, "
            f"which count until its processes have ended"
        )

    def cancel(self, ticket: Ticket) -> bool:
        """Cancel a waiting request; return whether the ticket waited. See :meth:`Ticket.cancel`.

        The machine's queue is left soon after the return, by another thread. A lease that arrives meanwhile is ended.
        """
        waited = super().cancel(ticket)
        if waited:
            self._stop_wait(ticket.number)
        return waited

    def free(self, device_id: str) -> int:
        """Return the free units of a device in 1/10000, given the active leases, read anew, and withheld devices.

        Leases of this process count, too. A hidden or unhealthy device has 0.

        Raises:
            KeyError: If no device has this id.
            LedgerError: If the ledger cannot be read.
        """
        return self._read_leases()[1].free(device_id)

    def holders(self, device_id: str) -> tuple[Allocation, ...]:
        """Return the allocations of a device by the leases, read anew; that of another process has the lease's id.

        A drain counts as an allocation, and so does each reservation for another user that has not ended, also one that
        begins later. Reservations for this user do not count.

        Raises:
            KeyError: If no device has this id.
            LedgerError: If the ledger cannot be read.
        """
        own = self._held | {key: opened.allocation for key, opened in tuple(self._leases.items())}
        return tuple(own.get(each.id, each) for each in self._read_leases()[1].holders(device_id))

    def _read_leases(self, time: float | None = None) -> tuple[ActiveLeases, Books]:
        """Read the active leases, and make books with all leases and the parts that :meth:`occupy` counts.

        Devices that are withheld from a request with a time limit in seconds, None for no limit, are entered as well.

        Raises:
            LedgerError: If the ledger cannot be read.
        """
        held = ActiveLeases.read(self.inventory, self._ledger, self._environ, time=time)
        books = Books(self.inventory, validate, self._names, machine="", lock=self._lock)
        books.list_holders = held.list_holders
        scope = Scope.make(self.inventory, self._environ)
        for key, entry in tuple(self._own.held.items()):
            # By the ledger's names, which a device keeps that is lost or was divided.
            books.occupy(scope.to_devices(scope.to_ledger(entry.allocation.grants)), key, entry.note)
        for lease, devices in held.devices.items():
            books.occupy(devices, lease, "")
        return held, books

    # Leases, with the lock held

    def _update(self, machine: str, inventory: Inventory | None) -> list[Ticket]:
        """Take over a changed machine. Each request in the queue keeps the place, and waits for the new devices.

        The machine keeps its former name, since leases have the name. Waits of requests that fit no more are stopped,
        but those requests keep their place in case they fit again.

        Args:
            machine: Key of the machine's books, which is empty.
            inventory: The changed machine; None if the machine is gone, so that no request fits.

        Returns:
            The settled tickets, for the caller to notify: requests that now run on the CPU, and requests that failed
            because the new wait could not begin.

        Raises:
            ValueError: If two devices have one id; then the machine stays as it was.
            RuntimeError: If a request waits, and the process is exiting.
        """
        if inventory is not None:  # leases of another machine are named by it, and the name may list its devices
            inventory = replace(inventory, machine=self.inventory.machine)
        settled = super()._update(machine, inventory)
        for ticket in settled:  # they run on the CPU
            self._stop_wait(ticket.number)
        for ticket in tuple(self._queue):
            if not ticket.plan.ever_fits:
                if ticket.number in self._waits:
                    self._waits[ticket.number].stop()
                continue
            try:
                self._wait_in_line(ticket)
            except AnyaccelError as error:  # such as a state directory that is no longer trusted
                ticket.error = error
                self._queue.remove(ticket)
                self._stop_wait(ticket.number)
                settled.append(ticket)
        return settled

    def _waiting(self, plan: RequestPlan, number: int, priority: int, time: float | None, user: int | None) -> Waiting:
        """Return the queue policy's view of a request, with the time limit.

        Raises:
            ValueError: If a user is given: the kernel tells the user of a lease.
        """
        if user is not None:
            raise ValueError(f"user must be None where leases are shared: the kernel tells whose they are (got {user})")
        return replace(super()._waiting(plan, number, priority, time, user), seconds=time)

    def _try(self, waiting: Waiting, plan: RequestPlan, note: str) -> Allocation | None:
        """Lease the devices of a new request if they are free and no earlier request is ahead; else return None.

        A request that can never fit runs on the CPU if permitted, else the result is None, too. The vendors change the
        devices for the holder. The calling line is kept for messages about deadlocks; see also :meth:`_take`. Any
        exception, also an interrupt, ends the lease.

        Raises:
            NeverFitsError: If a limit of the user refuses the request for good.
            LedgerError: If leases cannot be kept.
            ConfigurationError: If the machine's configuration is invalid or untrusted.
            UsageError: If the priority or the time limit is out of range.
            PluginError: If a vendor fails to change the devices.
            OSError, ValueError: If the kernel refuses the mark of this process.
        """
        if not plan.ever_fits:
            return super()._try(waiting, plan, note)
        # Earlier requests of this program have tickets in the machine's queue, but maybe not yet.
        if self._rivals(waiting, self._queue.firsts()):
            return None
        pending = self._make_request(plan, waiting, note=note)
        try:
            # Not in _wait(): its thread has no line of the program to name.
            return pending.get(pending.open_lease, lambda opened: self._take(opened.note_line()))
        except DevicesBusyError:
            return None
        except BaseException:
            if pending.made is not None:  # it has ended
                self._leases.pop(pending.made.allocation.id, None)
            raise

    def _make_request(
        self, plan: RequestPlan, waiting: Waiting, *, note: str = "", wait: _QueuedRequest | None = None
    ) -> _SharedRequest:
        """Make the request to the ledger for a plan that can fit, on the present machine.

        The lease gets the mark of this process, and stays active as long as a process carries that mark, unless it is
        released. The errors are those of :class:`LeaseRequest`.

        Args:
            plan: The plan.
            waiting: The request as the queue policy sees it.
            note: Owner of the allocation.
            wait: The wait in the machine's queue; None for a request that does not wait.
        """
        options: AcquireOptions = {
            "environ": self._environ,
            "inventory": self.inventory,
            "time": waiting.seconds,
            "priority": waiting.priority,
            "note": note,
            "wait": 0 if wait is None else None,
        }
        return _SharedRequest(plan.request, options, self._own.held, wait)

    def _take(self, opened: OpenLease) -> Allocation:
        """Keep a new lease, mark this process for good, and begin the journal entry. Returns the allocation.

        Raises:
            OSError, ValueError: If the kernel refuses the mark; the caller ends the lease.
        """
        self._leases[opened.allocation.id] = opened.mark_process().begin_entry()
        return opened.allocation

    # The machine's queue

    def _serve(self) -> list[Ticket]:
        return []  # the tickets wait in the machine's queue

    def _place_in_line(self, ticket: Ticket) -> int:
        """Return the later of the ticket's positions in this program and in the machine's queue; 0 when not waiting.

        The position in the machine's queue is the one last reported. Takes the lock.
        """
        own = super()._place_in_line(ticket)
        wait = self._waits.get(ticket.number)
        return max(own, wait.position) if own and wait else own

    def _judge(self, plan: RequestPlan, waiting: Waiting) -> Verdict:
        """Judge a request by leases, withheld devices and earlier requests, then by limits of the user.

        The leases are read anew. Limits do not count for a request that never fits.

        Raises:
            ConfigurationError: If the machine's configuration is invalid or untrusted.
            LedgerError: If the ledger cannot be read.
        """
        held, books = self._read_leases(waiting.seconds)
        verdict = held.add_hints(super()._judge(RequestPlan([books], plan.request, plan.hosts), waiting))
        if not plan.ever_fits:
            return verdict
        return apply_limits(verdict, self._ledger.over_limits(self._make_request(plan, waiting).want, waiting.priority))

    def _ahead(self, plan: RequestPlan, waiting: Waiting) -> dict[str, str]:
        """Return descriptions of earlier tickets of this program by id.

        If requests of other programs are ahead, their number is described under ``line``: the number of requests ahead
        in the machine's queue, less the described tickets. The former is as last reported to a ticket with a wait, and
        read from the ledger for any other request that can fit.

        Raises:
            AnyaccelError: If the request to the ledger cannot be made, or the ledger cannot be read.
        """
        found = super()._ahead(plan, waiting)
        wait = self._waits.get(waiting.number)
        if wait:
            ahead = wait.position - 1
        elif plan.ever_fits:
            pending = self._make_request(plan, waiting)
            ahead = self._ledger.count_ahead(pending.want, waiting.priority, pending.choose)
        else:
            ahead = 0
        others = ahead - len(found)
        return found if others <= 0 else {**found, "line": f"{others} of other programs"}

    def _stop_wait(self, number: int) -> None:
        """Have the wait of a ticket stopped, and forget its place; a request that never could be served has none."""
        wait = self._waits.pop(number, None)
        if wait is not None:
            wait.stop()

    def _wait_in_line(self, ticket: Ticket) -> None:
        """Let a ticket wait for devices of the current machine, at the former place; the caller holds the lock.

        Returns at once: the wait runs in the thread of the waits. A wait that runs already is cancelled and replaced.
        Errors of the wait itself go to the ticket.

        Raises:
            AnyaccelError: If the request to the ledger cannot be made.
            RuntimeError: If the process is exiting, or no thread can be started.
        """
        wait = self._waits.get(ticket.number) or _QueuedRequest()
        pending = self._make_request(ticket.plan, ticket.waiting, note=ticket.note, wait=wait)
        self._waits[ticket.number] = wait
        wait.start(lambda: self._wait(ticket, pending))

    async def _wait(self, ticket: Ticket, pending: _SharedRequest) -> None:
        """Wait for the lease of a ticket, and settle and notify the ticket with the allocation, or with the error.

        The devices are handed over before; see also :meth:`_take`. After an error, the lease is ended first. If the
        ticket was cancelled, or the machine changed, in the meantime, the lease is released, and the ticket stays as it
        is. So it does if the task of the wait is cancelled. A limit of the user becomes a NeverFitsError.
        """

        def give(opened: OpenLease) -> None:
            with self._lock:
                if pending.inventory is not self.inventory or ticket not in self._queue:
                    raise asyncio.CancelledError  # of a changed machine, another wait runs
                ticket.allocation = self._take(opened)
                self._queue.remove(ticket)
                self._waits.pop(ticket.number, None)

        try:
            await pending.get_async(pending.open_lease, give)
        except Exception as error:  # noqa: BLE001 -- raised in the code that awaits the ticket
            with self._lock:
                self._waits.pop(ticket.number, None)
                if not self._queue.remove(ticket):
                    return
                ticket.error = error
        notify([ticket])


class _SharedRequest(LeaseRequest):
    """A request of a shared scheduler to the ledger.

    Args:
        request: The request.
        options: As for :class:`LeaseRequest`.
        occupied: The allocations that :meth:`SharedScheduler.occupy` counts, by id.
        wait: The wait in the machine's queue; None for a request that does not wait.
    """

    def __init__(
        self,
        request: Request,
        options: AcquireOptions,
        occupied: Mapping[str, HeldAllocation],
        wait: _QueuedRequest | None,
    ) -> None:
        if wait is not None:
            options["on_wait"] = wait.report
        super().__init__(request, marks.draw_for_process, options)
        if wait is not None:
            self._terms["place"], self.began = wait.place, wait.began
        self._occupied = occupied

    def find_taken(self, taken: Mapping[str, Extent]) -> dict[str, Extent]:
        """Return the taken part of each device like the base class, with the parts that the scheduler counts."""
        both = dict(taken)
        for entry in tuple(self._occupied.values()):
            for name, extent in self.scope.to_ledger(entry.allocation.grants).items():
                both[name] = both.get(name, NOTHING).joined(extent)
        return super().find_taken(both)

    def open_lease(self, lease: Lease | None) -> OpenLease:
        """Make the open lease, without a start plan: no process is started here."""
        waited = monotonic() - self.began
        return OpenLease(lease, self.make_allocation(lease), note=self.note, waited=waited)

    def _explain(self, error: DevicesBusyError | LimitError) -> AnyaccelError:
        """Make the error of a refused request; :meth:`SharedScheduler._judge` has the reasons of busy devices."""
        return super()._explain(error) if isinstance(error, LimitError) else error


class _QueuedRequest:
    """A request in the machine's queue.

    Attributes:
        place: The place in the queue, which a change of the machine does not affect.
        position: The position among requests for the same devices, 1 for the next; 0 if unknown.
        began: Start of the wait, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.place = Place()
        self.position = 0
        self.began = monotonic()
        self._turn = asyncio.Lock()
        self._wait: Future[None] | None = None

    def report(self, place: int, records: tuple[LeaseRecord, ...]) -> None:  # noqa: ARG002 -- read again by each question
        """Store the queue position; the records are not kept."""
        self.position = place

    def start(self, run: Callable[[], Awaitable[None]]) -> None:
        """Have the previous wait cancelled, and the next begin after that; return before. Any thread may call this.

        Raises:
            RuntimeError: If the process is exiting, or no thread can be started.
        """
        loop = _start_loop()
        self.stop()
        self._wait = asyncio.run_coroutine_threadsafe(self._run_in_turn(run), loop)

    def stop(self) -> None:
        """Have the wait cancelled, and return before its end. Any thread may call this."""
        if self._wait is not None:
            self._wait.cancel()

    async def _run_in_turn(self, run: Callable[[], Awaitable[None]]) -> None:
        """Await the result of a function after the end of all earlier waits: one may still release devices."""
        async with self._turn:
            await run()


_starting = renew_in_child(threading.Lock())
_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""The loop of each process: a forked child keeps that of its parent, which the end of the object would close."""


def _start_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop for the waiting requests of this process; the first call starts the loop's thread.

    The thread ends with the process, and the requests leave the machine's queue then.

    Raises:
        RuntimeError: If no thread can be started; a later call tries again.
    """
    with _starting:
        if os.getpid() not in _loops:
            loop = asyncio.new_event_loop()
            try:
                threading.Thread(target=loop.run_forever, name="anyaccel line", daemon=True).start()
            except BaseException:
                loop.close()
                raise
            _loops[os.getpid()] = loop
        return _loops[os.getpid()]
