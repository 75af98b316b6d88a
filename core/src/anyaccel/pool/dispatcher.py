"""The dispatcher: queues of calls, their devices, and the worker processes that run them, for all pools of a process.

All state here changes in the thread of the reactor alone, which gets no signals. So there are no locks, and Ctrl-C
leaves nothing half done. Methods for other threads say so; they leave a note for the reactor, or read single values.

Calls that are alike wait in one :class:`CallQueue`, in order. Among queues that compete for a device or for room in
their pool, the one whose first call is the oldest is served first. Of these, only the first call stands in the
machine's queue: a thousand calls are one ticket. A worker process has the calls that it runs and no others, except
for methods of an actor, which are pipelined.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from anyaccel.errors import (
    AnyaccelError,
    BrokenWorkerError,
    LedgerError,
    TaskTimeoutError,
    UsageError,
    WorkerError,
    WorkerStartError,
)
from anyaccel.forkserver.client import Gone
from anyaccel.inventory import LEASE_VARIABLE
from anyaccel.inventory.detect import detect
from anyaccel.launcher import (
    Scope,
    check_start,
    describe_wait,
    get_process_lease,
    list_own_leases,
    plan_handover,
    remove_group,
    why,
)
from anyaccel.ledger import IMPATIENT_SECONDS, Acquisition, Ledger
from anyaccel.linux import describe_end, renew_in_child, tidy_in_child
from anyaccel.linux import mark as marks
from anyaccel.model import Allocation, Inventory, Request, replace
from anyaccel.pool import spawning
from anyaccel.pool.call import Call, GangFuture, Options, UnreadableError, read_exception, run_alone, set_outcome
from anyaccel.pool.devices import (
    CPU,
    ChoiceFactory,
    LocalRequest,
    Quarantine,
    WorkerLease,
    check_request,
    find_private_directory,
    run_aside,
)
from anyaccel.pool.engine import Engine, PoolSettings
from anyaccel.pool.messages import Message, MessageKind, Pickled, dumps
from anyaccel.pool.reactor import NO_TIMER, allow_forks, find_reactor, run_guarded
from anyaccel.probe import Machine, parse_machine
from anyaccel.text import printable

if TYPE_CHECKING:
    from anyaccel.launcher import EarlySignal
    from anyaccel.ledger import LeaseRecord
    from anyaccel.linux import WorkerGroup
    from anyaccel.pool.actor import ActorState
    from anyaccel.scheduler import Verdict

LOOK_SECONDS = 0.05
"""Interval in seconds between two checks whether other processes wait for devices of our idle processes."""
TELL_SECONDS = 5.0
"""Time after which a wait for devices that others hold is reported."""
PROCESSORS = len(os.sched_getaffinity(0))
"""Number of processors that this process may use: the limit of simultaneous calls without devices."""
MOST_AHEAD, MOST_AHEAD_BYTES = 32, 1 << 12
"""Limits of the method calls that are pipelined to an actor: their number, and the bytes of each.

Together they fit into the buffer of its channel, so that sending never blocks. Measured with methods that do nothing:
3,000 calls take 130 us of processor time each, of caller and worker; one at a time, 320 us.
"""
QUICK_SECONDS = 0.002
"""Duration of a method call up to which the next ones are pipelined to its actor."""
MOST_DEVICES = 64
"""Assumed maximum of simultaneous workers with devices, for pools without ``max_workers``."""

_ANSWERS = MessageKind.RESULT, MessageKind.ERROR


class CallQueue:
    """A queue of waiting calls of the same pool and kind, in order.

    Attributes:
        key: Key of the queue in its broker.
        engine: The engine of the pool.
        options: Options of the calls.
        resolved: Their request, resolved against this machine; None if they need no device.
        ids: Ids of the devices that could serve the calls, and of their parts; empty for calls on the CPU.
        calls: The calls; some may have been cancelled.
        refused_at: Value of the broker's change counter when devices were refused last.
        acquisition: The place of the first call in the machine's queue; None if it has none.
        asked_at: Time at which that place was taken.
        told: Whether the wait was reported.
        watched: Descriptors that report changes of the ledger.
        timer: Timer of the next attempt to get devices.
    """

    def __init__(self, key: object, engine: LocalEngine, call: Call, resolved: LocalRequest | None) -> None:
        self.key = key
        self.engine = engine
        self.options = call.options
        self.resolved = resolved
        self.calls: deque[Call] = deque()
        self.refused_at = -1
        self.ids: frozenset[str] = frozenset() if resolved is None else resolved.ids
        self.acquisition: Acquisition | None = None
        self.asked_at = 0.0
        self.told = False
        self.watched: list[int] = []
        self.timer = NO_TIMER

    def first(self) -> Call | None:
        """Return the first pending call, or None; drop the cancelled and failed calls before."""
        calls = self.calls
        while calls and not calls[0].is_pending():
            calls.popleft()
        return calls[0] if calls else None

    def stop_watching(self) -> None:
        """Cancel the timer, and stop watching the ledger."""
        self.timer.cancel()
        while self.watched:
            find_reactor().unwatch(self.watched.pop())

    def leave_machine_queue(self) -> None:
        """Cancel the timer and the watches, and undo the acquisition, also after a grant."""
        self.stop_watching()
        if self.acquisition is not None:
            self.acquisition.undo()
            self.acquisition = None


class Broker:
    """The devices of a machine, and the calls that wait for devices, of all pools of this process.

    Args:
        inventory: The machine.
        shared: Whether every process on the machine sees the leases. Else they are in a private directory.
        choice: Makes the choice of devices for a request; None for any devices that serve it.
        note: Text that follows the call's name in the note of a lease.

    Attributes:
        inventory: The machine.
        private: Whether no other process sees the leases.
        ledger: The ledger of the leases.
        scope: The names of the devices in the ledger.

    Raises:
        StateDirectoryError, LedgerError: When there is no state directory that can be trusted, or a system call fails.
        UsageError: When the environment names a lease, and ``ANYACCEL_ALLOCATION`` is invalid.
    """

    def __init__(
        self, inventory: Inventory, *, shared: bool = True, choice: ChoiceFactory | None = None, note: str = ""
    ) -> None:
        self.inventory = inventory
        self.private = not shared
        self._environ = dict(os.environ)
        if self.private:
            self._environ["ANYACCEL_STATE_DIR"] = find_private_directory()
        self.ledger = Ledger.open(self._environ)
        self.scope = Scope.make(inventory, self._environ)
        used = get_process_lease()
        self._used = None if used is None else used.lease
        self._choice = choice
        self._note = note
        self._queues: dict[object, CallQueue] = {}
        self._idle: list[WorkerProcess] = []  # an evicted one stays here until it has gone
        self._resolved: dict[object, LocalRequest] = {}
        self._changes = 0
        self._checking = False
        self._checked = float("-inf")
        self._wanted: frozenset[str] = frozenset()

    # Queues

    def add_call(self, engine: LocalEngine, call: Call) -> None:
        """Queue a call; if it is the first pending one of its queue, serve the queues at once.

        Raises:
            UnknownNameError, NeverFitsError: When its request can never be served.
        """
        queue = self._find_queue(engine, call)
        crowded = queue.first() is not None  # then nothing can be started for this call either
        queue.calls.append(call)
        if not crowded:
            self._serve_all()

    def requeue(self, engine: LocalEngine, calls: list[Call]) -> None:
        """Put calls of one kind back in front of their queue, made if missing, in the given order; start none.

        No effect without calls.
        """
        for call in reversed(calls):
            self._find_queue(engine, call).calls.appendleft(call)

    def serve(self) -> None:
        """Leave a note for the reactor to start calls, request devices and evict idle workers; return before that."""
        # By a note: a start that fails at once calls serve(), and thousands of those must not nest.
        find_reactor().call_soon(self._serve_all)

    def _serve_all(self) -> None:
        """Serve the queues step by step, at once, until nothing can be done now.

        A step sends a call to an idle worker, launches a worker, requests devices, or evicts an idle worker.
        """
        while self._queues and self._serve_one():
            pass

    def _serve_one(self) -> bool:
        """Do a single step for the oldest queue that permits a step; a queue that would overtake is passed over.

        The step is to send a call to an idle worker, to launch a worker, to request devices, or to evict an idle worker
        from a full pool, or for its devices. A queue that was refused devices requests them here again only after a
        worker of this process has released some; until then, its timer and watches do.

        Returns:
            Whether a step was done.
        """
        for queue in self._list_queues():
            engine, resolved = queue.engine, queue.resolved
            if self._overtakes(queue):
                continue
            if (idle := self._take_idle(engine, queue.options.alike)) is not None:
                idle.send_call(self._pop(queue))
                return True
            roomy = self._has_room(queue)
            if roomy and (resolved is None or resolved.nothing):
                nothing = CPU if resolved is None else Allocation(id="", request=resolved.request, grants=())
                self._launch(queue, WorkerLease(nothing))
                return True
            if roomy and resolved is not None and queue.refused_at != self._changes:
                self._request_devices(queue, resolved)
                return True
            if (useless := self._find_evictable(queue, roomy=roomy)) is not None:
                useless.shut_down()
                return True
        return False

    def _launch(self, queue: CallQueue, lease: WorkerLease) -> None:
        """Remove the first call of a queue, and launch a worker for the call on the devices of a lease.

        If vendors must change the devices before, a thread has this done, and the launch follows later. If no thread
        can be started, the reactor waits for the vendors.
        """
        call = self._pop(queue)
        worker = WorkerProcess(queue.engine, lease, call)
        if lease.handover is None:
            worker.launch(call)
        else:
            run_aside(partial(worker.hand_over, call), daemon=True)  # a vendor may take long

    def _has_room(self, queue: CallQueue) -> bool:
        """Return whether the pool of a queue has room for a further process.

        The queue must have a pending call. With ``max_workers``, places of other queues that wait for their devices
        count as used. Without, only calls without devices are limited, to :data:`PROCESSORS` processes, also those that
        fall back to the CPU; constructions of actors are not.
        """
        engine = queue.engine
        if engine.settings.max_workers is not None:
            others = (other for other in self._queues.values() if other.engine is engine and other is not queue)
            admitted = sum(other.acquisition is not None for other in others)
            return len(engine.members) + admitted < engine.settings.max_workers
        if queue.ids or queue.calls[0].actor is not None:
            return True
        # Actors do not count, because they are mostly idle.
        return sum(not worker.ids and worker.actor is None for worker in engine.members) < PROCESSORS

    def _overtakes(self, queue: CallQueue) -> bool:
        """Return whether an older call of another queue competes with the first call of a queue, which must exist.

        Calls of one pool compete for room if the pool has none for the older call, and has ``max_workers`` or neither
        call can get a device. Calls of any pools compete for a common device if the older call has room in its pool.
        """
        number, limited = queue.calls[0].number, queue.engine.settings.max_workers is not None
        for other in self._queues.values():
            first = other.first()
            if first is None or first.number >= number:
                continue
            if self._has_room(other):
                competes = not other.ids.isdisjoint(queue.ids)
            else:
                competes = other.engine is queue.engine and (limited or not (queue.ids or other.ids))
            if competes:
                return True
        return False

    def _list_queues(self) -> list[CallQueue]:
        """Drop the queues without pending calls, with their places in the machine's queue; return the others, sorted.

        The queue with the oldest first call comes first. Cancelled and failed calls at the front of each are removed.
        """
        for queue in tuple(self._queues.values()):
            if queue.first() is None:
                self._drop(queue)
        return sorted(self._queues.values(), key=lambda queue: queue.calls[0].number)

    def _find_queue(self, engine: LocalEngine, call: Call) -> CallQueue:
        """Return the queue for a call; register a new queue with the broker if there is none. The call is not queued.

        Each request is resolved once: the result is kept for later queues of every pool.

        Raises:
            UnknownNameError, NeverFitsError: When a new request can never be served.
        """
        needs, resolved = call.options.needs, None
        if needs is not None and (resolved := self._resolved.get((needs, engine.confined))) is None:
            choice = None if self._choice is None else self._choice(needs)
            resolved = self._resolved[needs, engine.confined] = LocalRequest(
                self.inventory, needs, self._environ, choice, private=self.private, confined=engine.confined
            )
        key = id(engine), id(resolved), call.options.max_calls, call.actor is not None
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = CallQueue(key, engine, call, resolved)
        return queue

    def _pop(self, queue: CallQueue) -> Call:
        """Remove and return the first call of a queue that is not empty.

        A queue without a further pending call is dropped. Else the next call inherits the place in the machine's queue,
        which is given up if that call would overtake an older call of another queue.
        """
        call = queue.calls.popleft()
        if queue.first() is None:
            self._drop(queue)
        elif queue.acquisition is not None and self._overtakes(queue):  # the place was that of the removed call
            queue.leave_machine_queue()
        return call

    def _drop(self, queue: CallQueue) -> None:
        """Remove a queue from the broker, and give up its place in the machine's queue."""
        self._queues.pop(queue.key, None)
        queue.leave_machine_queue()

    def why(self, request: Request) -> Verdict:
        """Judge whether a new request would get devices now, and why not, by the leases and requests of this ledger.

        Any thread may ask.

        Raises:
            ConfigurationError: When the machine's configuration is invalid or untrusted.
            LedgerError: When the ledger cannot be read.
        """
        return why(request, inventory=self.inventory, environ=self._environ)

    # Devices

    def _request_devices(self, queue: CallQueue, resolved: LocalRequest) -> None:
        """Try to get devices for the first call of a queue, and launch the call; then have all queues served.

        If the devices are not granted now, :meth:`_watch_ledger` retries. An error fails the call. Granted devices are
        released if no call of the queue is pending any more, or an older call of another queue competes by now; after a
        cancellation, they go to the next call of the queue.

        Args:
            queue: The queue. Its timer and watches are cancelled first; without a pending call, nothing else is done.
            resolved: Its request.
        """
        queue.stop_watching()
        call = queue.first()
        if call is None:
            return
        try:
            lease = self._try_lease(queue, resolved, call)
        except Exception as error:  # noqa: BLE001 - the future reports it
            queue.leave_machine_queue()
            self._pop(queue)
            call.fail(error)
            queue.engine.remove_call(call)
        else:
            if lease is None:
                queue.refused_at = self._changes
            elif queue.first() is None or self._overtakes(queue):  # cancelled meanwhile, or an older call was requeued
                lease.release()
            else:
                self._launch(queue, lease)
        self.serve()

    def _try_lease(self, queue: CallQueue, resolved: LocalRequest, call: Call) -> WorkerLease | None:
        """Attempt to get a lease from the ledger for the first call of a queue, starting an acquisition if needed.

        Returns:
            The lease, with a usage meter unless leases are private, and with the handover planned and not begun; None
            if the devices are in use, or an earlier request is ahead. Then the acquisition keeps its place in the
            machine's queue, and the ledger is watched.

        Raises:
            AnyaccelError: When the request cannot be granted, or the lease in which the broker was made has been
                released. The caller undoes the acquisition, which may have been granted.
        """
        if self._used is not None and self._used.released:
            raise LedgerError(
                "this process has given back what it used when this pool was made, and others may have it by now; use"
                " a pool inside of the 'with' statement of anyaccel.use(), or make a new one"
            )
        note = f"{call.name}{self._note}"
        if queue.acquisition is None:
            queue.acquisition = Acquisition(self.ledger.state, resolved.want, resolved.choose, note=note)
            queue.asked_at = time.monotonic()
        lease = queue.acquisition.attempt()
        if lease is None:
            if not (queue.told or self.private) and time.monotonic() - queue.asked_at > TELL_SECONDS:
                self._report_wait(queue, queue.acquisition, call.name)
            self._watch_ledger(queue, resolved, queue.acquisition)
            return None
        queue.acquisition.leave_line()
        allocation = Allocation(id=lease.id, request=resolved.request, grants=resolved.grants)
        waited = time.monotonic() - queue.asked_at
        opened = WorkerLease(allocation, lease, self._on_release, private=self.private, note=note, waited=waited)
        opened.handover = plan_handover(allocation.id, allocation.devices, self.inventory, self._environ)
        queue.acquisition = None  # last: after an error, the caller undoes the acquisition
        return opened

    def _report_wait(self, queue: CallQueue, acquisition: Acquisition, name: str) -> None:
        """Report to the logger ``anyaccel.wait`` what the first call of a queue waits for, once for a queue.

        Nothing is said if workers of this process hold wanted devices, or the ledger cannot be read.
        """

        def tell(place: int, records: tuple[LeaseRecord, ...]) -> None:
            holders, acquired = self.scope.select_records(records), list_own_leases()
            if not any(each.pid == os.getpid() and each.id not in acquired for each in holders):
                queue.told = True
                sentence = printable(f"{name} is {describe_wait(place, holders, acquisition.limits)}")
                with allow_forks():
                    run_guarded(partial(logging.getLogger("anyaccel.wait").warning, "anyaccel: %s", sentence))

        acquisition.on_wait = tell
        with contextlib.suppress(AnyaccelError):
            acquisition.report()
        acquisition.on_wait = None

    def _watch_ledger(self, queue: CallQueue, resolved: LocalRequest, acquisition: Acquisition) -> None:
        """Have the devices requested again after a relevant change of the ledger, or after a pause.

        Sets the queue's timer and watches. The pause is the acquisition's, or :data:`IMPATIENT_SECONDS` without a
        watch.
        """
        loop = find_reactor()
        queue.watched = acquisition.descriptors()
        # Without a ticket, the acquisition would look again within a millisecond. Releases of this process serve the
        # queue anyway, and calls of a few milliseconds would pay for the looks with half of their processor time.
        pause = acquisition.pause() if queue.watched else IMPATIENT_SECONDS
        queue.timer = loop.call_later(pause, partial(self._request_devices, queue, resolved))

        def on_change(descriptor: int) -> None:
            """Read the event of a descriptor, and attempt again if that is worthwhile."""
            if acquisition.read_event(descriptor):
                self._request_devices(queue, resolved)

        for descriptor in queue.watched:
            loop.watch(descriptor, partial(on_change, descriptor))

    def _on_release(self) -> None:
        """Count a change, and serve the queues, because a worker has released its devices."""
        self._changes += 1
        self.serve()

    # Idle processes

    def keep_idle(self, worker: WorkerProcess) -> None:
        """Keep a worker without work for later calls, and serve the queues.

        They are served at once, so that the worker has its next call before the outcome of the last one is set. The
        worker is shut down instead if another process waits for its devices. The first idle worker with devices starts
        :meth:`_check_idle`. A worker for calls without a request for devices stays idle until another call needs its
        place, or the pool ends.
        """
        worker.idle_since = time.monotonic()
        self._idle.append(worker)
        if self._is_wanted_elsewhere(worker):
            worker.shut_down()
            return
        if worker.options.needs is not None and not self._checking:
            self._checking = True
            find_reactor().call_later(LOOK_SECONDS, self._check_idle)
        self._serve_all()

    def forget_worker(self, worker: WorkerProcess) -> None:
        """Remove a worker from the idle workers; no effect on any other worker."""
        if worker in self._idle:
            self._idle.remove(worker)

    def _take_idle(self, engine: LocalEngine, alike: object) -> WorkerProcess | None:
        """Remove and return the most recently used idle worker of a pool for calls of a kind; None if there is none.

        So the others reach their idle time. Workers that are ending, such as evicted ones, are passed over.
        """
        # A linear search: the list is no longer than the number of processes.
        for worker in reversed(self._idle):
            if worker.engine is engine and worker.options.alike == alike and not worker.ending:
                self._idle.remove(worker)
                return worker
        return None

    def _find_evictable(self, queue: CallQueue, *, roomy: bool) -> WorkerProcess | None:
        """Return the least recently used idle worker whose end helps a queue that waits.

        Args:
            queue: The queue.
            roomy: Whether its pool has room, so that the end helps by devices that the queue competes for; else the end
                helps by room in the pool. Without ``max_workers``, only workers without devices take room.

        Returns:
            The worker; None if there is none, or an evicted worker that helps is still ending: that may suffice, and
            the queue is served again then.
        """
        if roomy:
            near = self.scope.excluded_by(queue.ids) if self._idle else frozenset()
            helpful = [worker for worker in self._idle if not worker.ids.isdisjoint(near)]
        else:
            limited = queue.engine.settings.max_workers is not None
            own = (worker for worker in self._idle if worker.engine is queue.engine)
            helpful = [worker for worker in own if limited or not worker.ids]
        return None if not helpful or any(worker.ending for worker in helpful) else helpful[0]

    def _check_idle(self) -> None:
        """Evict idle workers with devices: each past its idle time, and the first for which another process waits.

        The first is the longest idle. Workers of calls that fell back to the CPU also end after their idle time.

        The next check follows after :data:`LOOK_SECONDS` if idle workers with devices are left.
        """
        now = time.monotonic()
        holders = [worker for worker in self._idle if worker.options.needs is not None and not worker.ending]
        evicted = [worker for worker in holders if worker.idle_since + worker.engine.settings.idle <= now]
        # One at a time: how many of them the other process needs is not known.
        wanted = [worker for worker in holders if worker not in evicted and self._is_wanted_elsewhere(worker)]
        for worker in (*evicted, *wanted[:1]):
            worker.shut_down()
        self._checking = any(not worker.ending for worker in holders)
        if self._checking:
            find_reactor().call_later(LOOK_SECONDS, self._check_idle)

    def _is_wanted_elsewhere(self, worker: WorkerProcess) -> bool:
        """Return whether another process waits for devices of a worker, for parts of them, or for their parents.

        The ledger is read at most every :data:`LOOK_SECONDS`, else the last reading counts; a ledger that cannot be
        read counts as without requests. May be True by mistake, as :meth:`~anyaccel.ledger.Ledger.find_wanted` says.
        Always False for a worker without devices, and for private leases.
        """
        if worker.ids and not self.private and (now := time.monotonic()) - self._checked > LOOK_SECONDS:
            self._checked = now
            ids = self.scope.ids
            keys: frozenset[str] = frozenset()
            with contextlib.suppress(AnyaccelError):  # the next call that requests devices reports it
                keys = self.ledger.find_wanted(frozenset(ids))
            self._wanted = self.scope.excluded_by(ids[key] for key in keys) if keys else frozenset()
        return not worker.ids.isdisjoint(self._wanted)


class WorkerProcess:
    """A worker process of a pool, from the decision to fork it until its devices are released.

    A new one is a member of its engine, and of the actor that its first call constructs; :meth:`launch` starts it.

    Args:
        engine: The engine of the pool.
        lease: The lease of its devices; of none for the CPU alone.
        call: Its first call.

    Attributes:
        engine: The engine of the pool.
        options: Options of the calls that it runs.
        actor: The actor that lives in it, or None.
        lease: The lease of its devices; of none for the CPU alone.
        allocation: Its devices, and how they are enforced once that is known.
        ids: Ids of its devices.
        mark: The mark of the process and of everything that it starts; empty before it was sent.
        running: Calls that it was given and has not answered, by number, in order.
        idle_since: Start of its idle time, if it is idle.
        calls: Number of calls that it was given.
        last: Number of the call that it has answered last.
        ending: Whether it gets no more calls.
        stopped: Whether :meth:`stop` was called.
        proven: Whether it has answered a call.
        fault: Why its messages are not trusted any more, or an empty string.
        notices: Number of messages READY that it must still send before its first answer.
        timer: Timer of a scheduled stop.
    """

    begun = True
    """Whether it runs, or is about to, as far as known."""

    def __init__(self, engine: LocalEngine, lease: WorkerLease, call: Call) -> None:
        self.engine = engine
        self.actor: ActorState | None = call.actor
        self.options: Options = call.options if call.actor is None else replace(call.actor.group.options, max_calls=0)
        self.lease = lease
        self.allocation = lease.allocation
        self.ids = frozenset(device.id for device in self.allocation.devices)
        self.mark: marks.Mark = ()
        self.running: dict[int, Call] = {call.number: call}
        self.idle_since = 0.0
        self.calls = self.last = 0
        self.ending = self.stopped = self.proven = False
        self.fault = ""
        self.notices = 0
        self.timer = NO_TIMER
        self._process: spawning.Process
        self._launched = False
        self._ahead = True
        self._group: WorkerGroup | None = None
        self._began = 0.0
        self._quick = False
        engine.members.add(self)
        if self.actor is not None:
            self.actor.member = self

    # Reports of the fork server

    def ended(self, gone: Gone) -> None:
        """Handle the last messages of the process, then its end.

        The scheduled stop is cancelled, the control group is removed, which tells of a kill for memory, and the engine
        requeues or fails the calls and releases the devices. Then the channel is closed.
        """
        self.ending = True
        self._process.shut(socket.SHUT_RDWR)  # from now on, sends fail instead of filling a channel without a reader
        self.read(last=True)
        self.timer.cancel()
        if self._group is not None:
            gone.reason = "; ".join(filter(None, (gone.reason, remove_group(self._group))))
        self.engine.on_gone(self, gone)
        self._process.close()

    def on_stuck(self, reason: str) -> None:
        """Quarantine the devices of a stuck process, fail its calls and its actor, and serve the queues.

        The worker gets no more calls. It stays a member until the process ends, so a shutdown with ``wait`` lasts until
        then.
        """
        self.ending = True
        broker, gone = self.engine.broker, Gone(reason=reason)
        broker.forget_worker(self)  # an idle one, whose fork server has died
        self.engine.quarantine.keep(self.lease, reason)
        for call in self.outstanding:
            call.fail(self.make_death_error(gone, call.name))
        if self.actor is not None:
            self.actor.on_gone(self.make_death_error(gone, f"the actor {self.actor.group.name}"))
        broker.serve()

    # Calls

    @property
    def outstanding(self) -> list[Call]:
        """Calls that the worker was given and has not answered, in order; any thread may ask."""
        return list(self.running.values())

    def accepts(self, call: Call) -> bool:
        """Return whether a method call may be sent: to run at once, or pipelined behind the calls of this actor.

        Nothing is sent to an actor that is ending or being constructed. Up to ``concurrency`` calls run at once; before
        a further one of them, the actor must have read the earlier ones, else :meth:`pull` follows later. A call is
        pipelined to an actor that runs one call at a time, is in no group, and has answered the last call within
        :data:`QUICK_SECONDS`. Its pickle has at most :data:`MOST_AHEAD_BYTES` bytes, without large buffers and without
        a log file, and at most :data:`MOST_AHEAD` calls are outstanding with it.
        """
        actor, count = self.actor, len(self.running)
        if actor is None or self.ending or actor.construction.number in self.running:
            return False
        if count < self.options.concurrency:  # beside other calls, a send might block on a stopped process
            return not count or self._process.has_room(self.pull)
        if not (self._quick and actor.group.pipelined and self.options.concurrency == 1 and count < MOST_AHEAD):
            return False
        body, logged = call.body, call.log is not None or self.engine.settings.logs is not None
        return body is not None and not logged and body.stored is None and body.size <= MOST_AHEAD_BYTES

    def pull(self) -> None:
        """Send queued method calls, as many as the actor accepts."""
        while self.actor is not None and (call := self.actor.group.next_for(self)) is not None:
            self.send_call(call)

    def hand_over(self, call: Call) -> None:
        """Have the vendors hand over the devices, then the dispatcher launch the worker; or fail the call.

        For a thread of its own. See :meth:`launch`.
        """
        follow = partial(self.launch, call)
        try:
            self.lease.hand_over()
        except Exception as error:  # noqa: BLE001 - the call reports it
            follow = partial(self._give_up, call, error)
        find_reactor().call_soon(follow)

    def launch(self, call: Call, *, ahead: bool = True) -> None:
        """Fork the process, or take the spare; send the setup and the first call.

        An exception fails the call and ends the worker; nothing is raised. For workers that are used once, the fork
        server forks a spare for the next call.

        Args:
            call: The call.
            ahead: Whether a process that was forked ahead may be taken.
        """
        settings, leases = self.engine.settings, self.lease.descriptors
        self._ahead = ahead
        try:
            if self.stopped:  # while its devices were handed over
                raise BrokenWorkerError("it was stopped before it was started")  # noqa: TRY301
            self._process = spawning.spawn(self, settings.preload, grace=settings.grace, leases=leases, ahead=ahead)
            self._launched = True
            server = self._process.server
            self.mark = self.lease.mark or marks.draw()
            timed = call.options.timeout is not None
            made, setup = settings.make_setup(self.lease, self.engine.inventory, server, mark=self.mark, ready=timed)
            self.allocation, self._group = made.allocation, made.group
            self.notices = timed + settings.staged
            with spawning.open_outputs() as pair:
                self._process.send(MessageKind.SETUP, setup, (*pair, *leases))
            self.send_call(call, fresh=True)
            if self.options.max_calls == 1:  # the next call needs a fresh process as well
                server.fork_ahead()
        except Exception as error:  # noqa: BLE001 - the future reports it
            self._give_up(call, error)

    def _give_up(self, call: Call, error: Exception) -> None:
        """Fail a call, and end the worker, which could not be launched or get the call."""
        call.fail(error)
        if self._launched:
            self.stop(0)
        else:
            self.engine.on_gone(self, Gone(forked=False))

    def send_call(self, call: Call, *, fresh: bool = False) -> None:
        """Send a call to the process; unless the call is pipelined, start its time limit.

        A call that is not pending any more is not sent; the worker gets its next call instead, unless ``fresh``. After
        the last of ``max_calls``, the channel is shut down, so that the worker exits after its answer. If no memory or
        descriptor is left, or the log file cannot be made, the call fails and the worker is stopped. If the channel is
        shut, as of a process that has exited, the call stays unsent in ``running``; the end of the process requeues it.
        The call's future gets the allocation.

        Args:
            call: The call. Its arguments are dropped if they are in shared memory, which the worker may free early.
            fresh: Whether the process may not exist yet; then its time limit starts with the message READY.
        """
        self.running[call.number] = call
        if not call.is_pending():  # cancelled just now; launch() of a fresh process stops it in a moment
            if not fresh:
                self._on_free(call)
            return
        body = call.body or Pickled(b"", [])
        call.future.allocation = self.allocation
        call.sent = True
        self.calls += 1
        self.ending = self.ending or self.calls == self.options.max_calls
        if len(self.running) <= self.options.concurrency:
            self._began = time.monotonic()
            if not fresh:
                self._start_timer(call)
        if body.stored is not None:
            call.body = None
        try:
            if not self._send_body(call, body):
                call.sent, call.body = False, body
            elif self.ending:  # an end of file behind the last call: the worker exits after its answer
                self._process.shut(socket.SHUT_WR)
        except OSError as error:  # no memory or descriptor is left for the message
            self._give_up(call, error)

    def _send_body(self, call: Call, body: Pickled) -> bool:
        """Send the message of a call, with the log file if any; return False if the process has exited.

        In a pool with logs, a call without ``log`` gets a new file here, also when the call is run again. The call's
        future gets the path of the file that was used last.

        Raises:
            OSError: When no memory or descriptor is left for the message, or the log file cannot be made.
        """
        logs = self.engine.settings.logs
        log = call.log if logs is None else call.log or logs.path_for(call.name)
        if log is None:
            return self._process.send(call.kind, body, number=call.number)
        call.future.log = log
        with spawning.open_outputs(log) as pair:
            return self._process.send(call.kind, body, pair, number=call.number)

    def find_unstarted(self, gone: Gone) -> list[Call]:
        """Return the pending calls that this exited process never started.

        These are the calls that could not be sent, or a single call in a channel that was not read to its end. There
        are none if the process was stopped, or was forked for its first call and has answered none: it may have died of
        its setup, and so would the next one.
        """
        if self.stopped or not gone.forked or not (self._ahead or self.proven):
            return []
        unread = self._process.unread and len(self.running) == 1
        unstarted = (call for call in self.outstanding if not call.sent or (unread and call.body is not None))
        return [call for call in unstarted if call.is_pending()]

    def _start_timer(self, call: Call) -> None:
        """Start the time limit of a call; no effect on a call without a limit, or whose time runs.

        The pool's early signal, if any, comes first, unless the limit is not longer than its lead.
        """
        seconds, early = call.options.timeout, self.engine.settings.early
        if seconds is None or call.timer is not NO_TIMER:
            return
        if early is not None and early.seconds >= seconds:
            early = None
        lead = 0.0 if early is None else early.seconds
        call.timer = find_reactor().call_later(seconds - lead, partial(self._on_time, call, early))

    def _on_time(self, call: Call, early: EarlySignal | None) -> None:
        """Send the early signal, and start the timer for the end of the call's time; without a signal, end the call.

        Processes of the worker that do not handle the signal do not get it. At the end, the lease is marked as timed
        out, and the worker stopped; answers that arrive meanwhile are ignored, and other calls of the worker are left
        to :meth:`LocalEngine.on_gone`. No effect if the call was answered.
        """
        if call.number not in self.running:
            return
        if early is not None:
            call.timer = find_reactor().call_later(early.seconds, partial(self._on_time, call, None))
            early.send(self.mark)
        else:
            self.lease.timed_out = True
            self.stop(self.engine.settings.grace, answer=False)
            call.fail(TaskTimeoutError(f"{call.name} took longer than its timeout of {call.options.timeout:g} s"))

    # End

    def stop(self, grace: float, *, answer: bool = True) -> None:
        """Have the process and its descendants ended, and return at once. The worker gets no more calls.

        Sent calls without an answer fail at the end of the process, also with retries left. Without a process yet, a
        later :meth:`launch` fails the call and ends the worker.

        Args:
            grace: Seconds between SIGTERM and SIGKILL; 0 for SIGKILL at once.
            answer: Whether answers that arrive meanwhile count.
        """
        self.ending = self.stopped = True
        if self._launched:
            self._process.stop(grace)
            if not answer:
                self._process.shut(socket.SHUT_RD)

    def shut_down(self) -> None:
        """Give a launched worker no more calls, ask the process to exit, and schedule :meth:`stop`.

        The process exits when our sending side is closed; it is stopped after the grace period.
        """
        self.ending = True
        self._process.shut(socket.SHUT_WR)
        self.schedule_stop()

    def schedule_stop(self) -> None:
        """Schedule :meth:`stop` in case the process does not exit within the grace period, of at least a second.

        The stop then gives the grace period of the pool once more. Replaces the stop that was scheduled before.
        """
        grace = self.engine.settings.grace
        self.timer.cancel()
        self.timer = find_reactor().call_later(max(grace, 1.0), partial(self.stop, grace))

    def distrust(self, fault: str) -> None:
        """Ignore further messages of the process because of a fault, give no more calls, and kill the process.

        The first fault counts. The worker does not count as stopped, so calls with retries left are run again.
        """
        self.fault, self.ending = self.fault or fault, True
        self._process.stop(0)
        self._process.shut(socket.SHUT_RD)

    def make_death_error(self, gone: Gone, name: str) -> WorkerError:
        """Make the error of a call of this name that the process did not answer.

        Returns:
            A WorkerStartError if there was no process; else a BrokenWorkerError with the exit status and the fault, or
            else with the known reasons.
        """
        if not gone.forked:
            return WorkerStartError(f"no worker can be started for {name}: {gone.reason}")
        who = f"the worker (process {gone.pid}) that ran {name}" if gone.pid else f"the worker that ran {name}"
        if self.fault:
            return BrokenWorkerError(f"{who} was ended: {self.fault}", exit_status=gone.status)
        text = f"{who} {describe_end(gone.status)} before it answered" + (f": {gone.reason}" if gone.reason else "")
        return BrokenWorkerError(text, exit_status=gone.status)

    # Messages

    def read(self, *, last: bool = False) -> None:
        """Handle the arrived messages, at most as many as are due, but at least one.

        An unreadable message, such as one that passes descriptors, makes the process distrusted.

        Args:
            last: Whether the process has exited, so that an empty channel is at its end.
        """
        for _ in range(max(1, len(self.running) + self.notices)):
            try:
                message = self._process.receive(last=last)
            except (OSError, ValueError) as error:  # not one of our messages, or no descriptor or memory is left for it
                self.distrust(f"its answer could not be read: {error}")
                return
            if message is None:
                return
            self.on_message(message)

    def on_message(self, message: Message) -> None:
        """Handle an answer, a failed setup or a due notice; distrust the process for anything else.

        Notices are due before the first answer. The first starts the time limit of the first call. A failed setup is
        believed only while a notice is due or, if the settings are not staged, before the first answer. After a
        fault, messages are ignored.
        """
        kind = message.kind
        if self.fault:
            return
        if kind in _ANSWERS and not self.notices:
            self._on_answer(message)
        elif kind == MessageKind.BROKEN and (self.notices if self.engine.settings.staged else not self.proven):
            self._on_broken(message)
        elif kind == MessageKind.READY and self.notices:
            self.notices -= 1
            for call in self.outstanding[:1]:
                self._start_timer(call)
        else:
            self.distrust(f"it sent what is no answer (a message of the kind {kind})")

    def _on_answer(self, message: Message) -> None:
        """Get the next call, then set the outcome of the answered call. A failed construction ends the actor.

        An answer to no call here makes the process distrusted, except for a second answer to the last call.
        """
        self.proven = True
        call = self.running.get(message.number)
        if call is None:
            # A second answer to the last call is ignored: to kill the worker would fail the call that it runs by now.
            if message.number != self.last:
                self.distrust("it answered a call that it was not given")
            return
        self.last = call.number
        call.body = None
        unmade = self.actor if call.kind == MessageKind.CONSTRUCT and message.kind == MessageKind.ERROR else None
        self.ending = self.ending or unmade is not None  # a worker without its object exits by itself
        self._on_free(call)
        self.engine.set_outcome(call, message)
        if unmade is not None:
            unmade.on_gone(BrokenWorkerError("it could not be made"))  # no effect if its future has the reason
        self.engine.remove_call(call)

    def _on_free(self, call: Call) -> None:
        """Remove a call that has ended, and get the next call.

        The time limit of the pipelined call behind it starts. Without a next call, the broker keeps the worker
        idle. The worker of an actor is not kept there: shut down if the actor is closing, else left alone. For a worker
        that is ending, a stop is scheduled after its last call.
        """
        self.running.pop(call.number, None)
        if self.ending:
            if not self.running:
                self.schedule_stop()
        elif self.actor is None:
            self.engine.broker.keep_idle(self)
        else:
            now = time.monotonic()
            # The construction says nothing about methods: those behind the first method can be cancelled.
            self._quick = call.kind == MessageKind.METHOD and now - self._began < QUICK_SECONDS
            self._began = now
            for following in self.outstanding[:1]:
                self._start_timer(following)
            self.pull()
            if self.actor.group.closing and not (self.running or self.ending):
                self.shut_down()

    def _on_broken(self, message: Message) -> None:
        """Break the pool, or fail the calls of the worker, because the worker could not be set up.

        The pool breaks if user code, a sandbox or enforcement may have failed, also with an exception that cannot be
        unpickled here. Else the calls fail, and the worker is stopped. If the message itself is damaged, the worker is
        distrusted instead. Later messages of the worker are ignored.
        """
        error = read_exception(message, plain=self.engine.settings.plain)
        if isinstance(error, UnreadableError):
            self.distrust(f"it sent what is no answer ({error})")
            return
        self.fault = "it could not be set up"
        if self.engine.settings.staged:
            self.engine.mark_broken(error)
        else:  # its environment or directory could not be set, which may differ for the next worker
            for call in self.outstanding:
                call.fail(error)
            self.stop(0)


class LocalEngine(Engine):
    """The engine of one pool on this machine; see :class:`~anyaccel.pool.engine.Engine`.

    Args:
        broker: Returns the broker of the machine, the same one each time; called when it is needed first.
        settings: The settings of the pool. Without ``max_workers``, the devices limit the number of processes, and the
            processors do for calls without devices.

    Attributes:
        members: Worker processes that live, or are being launched.
        confined: Whether workers are confined to their devices.
        quarantine: The devices that are kept although their holder was ended.
        set_outcome: Sets the outcome of a call from the answer of its worker.

    Raises:
        EnforcementError: When workers must be confined or held to memory, and the kernel cannot.
    """

    def __init__(self, broker: Callable[[], Broker], settings: PoolSettings) -> None:
        super().__init__(settings)
        self.confined = check_start(settings.start, forked=True)
        self.members: set[WorkerProcess] = set()
        self._open_broker = broker
        self._calls: dict[int, Call] = {}
        self.quarantine = Quarantine()
        self.set_outcome: Callable[[Call, Message], None] = partial(set_outcome, plain=settings.plain)

    @cached_property
    def broker(self) -> Broker:
        """The broker of the machine, opened on first use; any thread may ask. After an error, the next use tries again.

        Raises:
            MachineError, UsageError: When the machine cannot be detected, or a variable of the environment is invalid.
            LedgerError: When there is no directory for leases that can be trusted, or a system call fails.
        """
        return self._open_broker()

    @property
    def inventory(self) -> Inventory:
        """The machine, detected on first use; the errors are those of :attr:`broker`."""
        return self.broker.inventory

    def check(self, request: Request) -> None:
        """Raise the error of a request that can never be served.

        Raises:
            UnknownNameError: When no device has one of its names.
            NeverFitsError: When the machine has too few such devices, and the request does not permit the CPU.
            MachineError, UsageError, LedgerError: As for :attr:`broker`.
        """
        check_request(self.inventory, request)

    def get_prefetch_limit(self, options: Options) -> int:
        """Return how many batches a ``map`` submits before it knows their durations: four for each possible worker.

        Without ``max_workers``, these are :data:`PROCESSORS`, or :data:`MOST_DEVICES` for calls with devices.
        """
        return 4 * (self.settings.max_workers or (PROCESSORS if options.needs is None else MOST_DEVICES))

    def gang(self, options: Options, hosts: int, name: str, work: bytes) -> GangFuture[Any]:
        """Run a pickled call as a gang of one, on this machine; return the future of a list with the result.

        Raises:
            UsageError: When ``hosts`` is more than 1.
            AnyaccelError: When no port is free for the meeting address.
            MachineError, LedgerError: As for :meth:`enter`.
            RuntimeError: When the pool was shut down, or belongs to the parent of this process.
            BrokenPoolError: When the pool is broken.
        """
        return run_alone(Call(name, options, self.on_cancel), hosts, work, self.enter)

    def enter(self, call: Call, work: Pickled | tuple[Any, ...], *, late: bool = False) -> None:
        """Pickle a call, copy its buffers, and queue it by a note to the reactor; any thread may.

        An exception of pickling or copying fails the call.

        Args:
            call: The call.
            work: Function, arguments and keyword arguments, pickled or not.
            late: Whether the call is taken also by a closed or broken pool; a broken one fails it.

        Raises:
            RuntimeError: When the pool was shut down, or belongs to the parent of this process.
            BrokenPoolError: When the pool is broken, unless ``late``.
            MachineError, UsageError, LedgerError: As for :attr:`broker`.
        """
        if self.foreign or not late:
            self.check_open()
        broker = self.broker  # first: a machine that cannot be detected is an error of the caller
        try:
            call.body = work if isinstance(work, Pickled) else dumps(work)
            self.copy_arguments(call)
        except Exception as error:  # noqa: BLE001 - the future reports it, as in other executors
            call.fail(error)
            return
        if call.options.needs is not None:
            call.waits = partial(broker.why, call.options.needs)
        note = partial(self._enter, broker, call)
        try:
            self._calls[call.number] = call
            find_reactor().call_soon(note)
        except BaseException:  # an interrupt: _enter() records the call again if the note was left
            self._calls.pop(call.number, None)
            raise

    def copy_arguments(self, call: Call) -> None:
        """Copy the buffers of a call, so that later changes by the caller have no effect.

        The copy, with data too large for a packet, goes to shared memory at once, in the thread of the caller: a
        gigabyte copied by the reactor would delay every pool. Not if the call may be retried, because a worker may
        write to the arguments that it gets.
        """
        if call.body is not None:
            call.body = call.body.copy(shared=not call.options.retries)

    def _enter(self, broker: Broker, call: Call) -> None:
        """Record a call and give it to the broker; runs in the reactor's thread.

        A broken pool, or an exception of the broker, fails the call.
        """
        self._calls[call.number] = call
        try:
            self.check_not_broken()
            broker.add_call(self, call)
        except Exception as error:  # noqa: BLE001 - such as a device that has vanished since check()
            call.fail(error)
            self.remove_call(call)

    def remove_call(self, call: Call) -> None:
        """Remove a finished call from the records, which may finish the shutdown of a closed pool."""
        self._calls.pop(call.number, None)
        self.finish_shutdown()

    def on_gone(self, worker: WorkerProcess, gone: Gone) -> None:
        """Requeue or fail the calls of an exited worker, release the devices, and serve the queues.

        Calls that the worker never started are requeued. So are calls with retries left, if a process was forked and
        not stopped; the others fail. A worker that died unused is replaced at once, on the same devices. Unless the
        exit status is 0, the devices may stay in quarantine for a while. An actor dies with its worker, unless its
        construction is run again.
        """
        self.members.discard(worker)
        self.broker.forget_worker(worker)
        state, calls, unstarted = worker.actor, worker.outstanding, worker.find_unstarted(gone)
        if unstarted and not worker.proven:  # it died unused: another process takes its place and devices
            call = unstarted[0]
            call.reset()
            WorkerProcess(self, worker.lease, call).launch(call, ahead=False)
            return
        usable = gone.forked and not worker.stopped
        again = [call for call in calls if call in unstarted or (usable and call.may_be_retried)]
        worker.running.clear()
        for call in again:
            if call in unstarted:
                call.reset()
            else:
                call.retry()
        # Before the devices are released, or younger calls would get them.
        if state is None:
            self.broker.requeue(self, again)
        else:
            state.group.put_back(again)
            if state.construction not in again:  # before a caller hears of the end and calls again
                death = worker.make_death_error(gone, calls[0].name if calls else f"the actor {state.group.name}")
                if state.group.closing and gone.status == 0:
                    death = BrokenWorkerError("it was closed", exit_status=0)
                state.on_gone(death)
        for call in calls:
            if call not in again:
                call.fail(worker.make_death_error(gone, call.name))
                self._calls.pop(call.number, None)
        self.quarantine.release(self.inventory, worker.lease, gone)
        self.broker.serve()
        self.finish_shutdown()

    def on_cancel(self, call: Call) -> None:
        """Drop the arguments and the record of a cancelled call, and stop the worker that has the call.

        The worker gets the pool's grace, and later answers are ignored. An actor is not stopped for a method, which may
        have been sent just now. Without a worker, the queues are served, since others may wait behind.
        """
        worker = next((worker for worker in self.members if call.number in worker.running), None)
        call.body = None
        if worker is not None and call.kind != MessageKind.METHOD:  # an actor has other callers
            worker.stop(self.settings.grace, answer=False)
        elif call.number in self._calls:
            self.broker.serve()
        self.remove_call(call)

    def quarantined(self) -> tuple[tuple[Allocation, str], ...]:
        """Return the devices that are kept although their holder was ended, with reasons; any thread may ask."""
        return self.quarantine.list()

    # Shutdown

    def finish_shutdown(self) -> None:
        """Shut down the workers without work once no call of a closed pool waits; no effect in an open pool.

        Methods that wait for an actor do not count, and actors are left to exit by themselves. After the last worker,
        ``drained`` is set.
        """
        if not self.closed or any(call.is_pending() and not call.sent for call in self._calls.values()):
            return
        for worker in list(self.members):
            if not (worker.running or worker.ending or worker.actor):
                worker.shut_down()
        if not self.members:
            find_reactor().call_soon(self.set_drained)  # by a note, behind the reports of progress of the last calls

    def unfinished(self) -> list[Call]:
        """Return the recorded calls, and those of workers and actors; a call may be in the list twice.

        Any thread may ask. A method that has not reached its actor yet is missing.
        """
        sent = (call for worker in list(self.members) for call in worker.outstanding)
        return [
            *list(self._calls.values()),
            *sent,
            *(call for group in list(self.groups) for call in list(group.queue)),
        ]


def open_engine(settings: PoolSettings) -> LocalEngine:
    """Make the local engine of a pool; the machine is detected when it is needed first.

    Raises:
        UsageError: When the settings have the address of a cluster.
        EnforcementError: When workers must be confined or held to memory, and the kernel cannot.
    """
    if settings.address is not None:
        raise UsageError(
            f"address is for the engines of a cluster, such as engine='ray' (got {settings.address!r:.60})"
        )
    return LocalEngine(lambda: broker_of(settings.machine, settings.declare, shared=settings.shared), settings)


_brokers: weakref.WeakValueDictionary[object, Broker] = weakref.WeakValueDictionary()
_opening = renew_in_child(threading.RLock())


def broker_of(machine: str | Machine | None, declare: Mapping[str, int] | None, *, shared: bool) -> Broker:
    """Return the broker of a machine; pools that live at the same time share a broker.

    That is so for equal arguments, and the same state directory and lease in the environment. A new broker detects the
    machine.

    Args:
        machine: The machine; see :func:`anyaccel.detect`.
        declare: Devices to count by resource name.
        shared: Whether leases are seen by every process on the machine, or by this one alone.

    Raises:
        MachineError: When ``machine`` names no machine, or a product that no plug-in knows.
        UsageError: When ``ANYACCEL_PLUGINS`` or ``ANYACCEL_ALLOCATION`` is invalid.
        LedgerError: When there is no directory for leases that can be trusted, or a system call fails.
    """
    where = parse_machine(machine)
    around = os.environ.get("ANYACCEL_STATE_DIR"), os.environ.get(LEASE_VARIABLE)
    key = (where.text, tuple(sorted((declare or {}).items())), shared, *around)
    with _opening:
        found = _brokers.get(key)
        if found is None:
            # The handler of a signal that interrupts this may have opened one.
            found = _brokers.setdefault(key, Broker(detect(where, declare=declare), shared=shared))
        return found


@tidy_in_child
def _clear_brokers() -> None:
    """Drop the brokers in a forked child: their queues and leases are the parent's."""
    _brokers.clear()
