"""The engine of a pool on a cluster: submits calls and actors, and delivers the answers to the futures."""

from __future__ import annotations

import os
import pickle
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

from anyaccel.errors import (
    AnyaccelError,
    BrokenWorkerError,
    NeverFitsError,
    UnknownNameError,
    UsageError,
    WorkerError,
    WorkerStartError,
)
from anyaccel.model import Allocation, Request, replace
from anyaccel.pool import (
    ActorState,
    Call,
    Engine,
    GangFuture,
    MessageKind,
    Options,
    Pickled,
    PoolSettings,
    dumps,
    dumps_whole,
    find_reactor,
    loads,
    set_outcome,
)
from anyaccel.scheduler import Reason, ReasonCode, Verdict

from anyaccel_cluster.cluster import (
    FAILED,
    Answer,
    Cluster,
    Order,
    Plan,
    PoolSpec,
    RemoteHost,
    Started,
    get_outcome,
)

_CPU_PLAN = Plan()


class _UnreadableError(WorkerError):
    """Raised when a node has answered, and the answer is none of ours."""

    def __init__(self, fault: Exception) -> None:
        super().__init__(f"what a node has answered cannot be read ({type(fault).__name__}: {fault})")
        self.__cause__ = fault


class Driver(Engine):
    """The engine of one pool on a cluster; see :class:`~anyaccel.pool.engine.Engine`.

    Args:
        cluster: The cluster.
        settings: The settings of the pool.

    Attributes:
        lock: Protects the members and the calls that wait.
        cluster: The cluster.
        members: Calls and actors that were submitted to the cluster and are not over.
        name: Name of the pool, unique on the cluster.
        numbers: Numbers for the keys of the calls on the cluster.
    """

    def __init__(self, cluster: Cluster[Any], settings: PoolSettings) -> None:
        super().__init__(settings)
        self.lock = threading.Lock()
        self.cluster = cluster
        self.members: set[RemoteCall | RemoteActor] = set()
        self.name = secrets.token_hex(8)
        self.numbers = count()
        self._waiting: deque[Call] = deque()
        self._closing = threading.Lock()
        self._cluster_closed = False
        spec = PoolSpec(
            pool=self.name,
            path=tuple(os.path.abspath(entry) for entry in sys.path),
            settings=replace(settings, max_workers=None, logs=None, address=None),
        )
        cluster.open(self, dumps_whole(spec))

    def check(self, request: Request) -> None:
        """Raise the error of a request that no node can ever serve.

        Raises:
            UnknownNameError: When no node knows one of its names.
            NeverFitsError: When no node has the devices.
        """
        self.cluster.plan(request)

    def gang(self, options: Options, hosts: int, name: str, work: bytes) -> GangFuture[Any]:
        """Run a pickled call on each of several nodes at the same time.

        Raises:
            UsageError: When the pool has ``max_workers``, or the cluster cannot reserve several nodes at once.
        """
        if self.settings.max_workers is not None:
            raise UsageError("a gang starts all its workers at once; max_workers must be None for it")
        return self.cluster.gang(self, options, hosts, name, work)

    def enter(self, call: Call, work: Pickled | tuple[Any, ...], *, late: bool = False) -> None:  # noqa: ARG002
        """Copy a call's buffers, queue it, and submit calls to the cluster as far as ``max_workers`` permits.

        An exception of pickling fails the call.

        Args:
            call: The call.
            work: Function, arguments and keyword arguments, pickled or not.
            late: Without effect here.

        Raises:
            RuntimeError: When the pool was shut down, or belongs to the parent of this process.
            BrokenPoolError: When the pool is broken.
        """
        if self.foreign:  # first: a thread of the parent process may have held the lock during the fork
            self.check_open()
        try:
            body = work if isinstance(work, Pickled) else dumps(work)
        except Exception as error:  # noqa: BLE001 - the future reports it, as in other executors
            self.check_open()
            call.fail(error)
            return
        call.body = body.copy()
        with self.lock:
            self.check_open()
            self._waiting.append(call)
        self.submit_waiting()

    def submit_waiting(self) -> None:
        """Submit queued calls to the cluster until ``max_workers`` is reached; drop cancelled calls at the front.

        The caller does not hold the lock. An exception of a submission fails the call.
        """
        limit = self.settings.max_workers
        while True:
            with self.lock:
                while self._waiting and self._waiting[0].future.done():
                    self._waiting.popleft()
                if not self._waiting or (limit is not None and len(self.members) >= limit):
                    return
                call = self._waiting.popleft()
                member = RemoteCall(self, call) if call.actor is None else RemoteActor(self, call)
                self.members.add(member)
            member.launch(call)  # without the lock: it may wait for the cluster

    def add(self, members: Sequence[RemoteCall]) -> None:
        """Add the calls of a gang to the members; the gang submits them.

        Raises:
            RuntimeError: When the pool was shut down, or belongs to the parent of this process.
            BrokenPoolError: When the pool is broken.
        """
        with self.lock:
            self.check_open()
            self.members.update(members)

    def place(self, call: Call) -> tuple[Any, bytes]:
        """Return the cluster's arguments for a call, and the pickled order for its host.

        Raises:
            NeverFitsError: When no node can serve its request any more.
        """
        options = call.options if call.actor is None else call.actor.group.options
        plan = _CPU_PLAN if options.needs is None else self.cluster.plan(options.needs)
        order = make_order(call.name, options, plan)
        return self.cluster.place(order, plan, actor=call.actor is not None), pickle.dumps(order)

    def follow(self, ref: Any, handler: Callable[[Any, BaseException | None], None]) -> None:
        """Call a handler, in the reactor's thread, with the value of a ref and None, or None and the error.

        A value that the handler cannot read is an error, too: without an answer, its call would never end.
        """

        def deliver(value: Any, error: BaseException | None) -> None:
            try:
                handler(value, error)
            except Exception as fault:
                if error is not None:
                    raise
                handler(None, _UnreadableError(fault))

        future = self.cluster.future(ref)
        future.add_done_callback(lambda done: find_reactor().call_soon(partial(deliver, *get_outcome(done))))

    def on_started(self, key: str, started: Started) -> None:
        """Record where the call of a key runs; no effect if the call is over."""
        with self.lock:
            member = next((member for member in self.members if member.key == key), None)
        if member is not None:
            member.on_started(started)

    def on_disconnected(self) -> None:
        """Fail all submitted calls, because this process has left the cluster."""
        with self.lock:
            lost = list(self.members)
        for member in lost:
            find_reactor().call_soon(partial(member.on_lost, ConnectionError("this process has left the cluster")))

    def shutdown(self, *, wait: bool, cancel_futures: bool = False) -> None:
        """Take no more calls; close the cluster's side when all calls have run. No effect in a forked child.

        If this process has lost the cluster, all submitted calls fail.

        Args:
            wait: Whether to return only after that, with the cluster's side closed; ignored in the reactor's thread.
            cancel_futures: Whether to cancel the queued calls, and the submitted calls that no node is known to run.
        """
        if self.foreign:
            return
        if not self.cluster.connected:
            self.on_disconnected()
        super().shutdown(wait=wait, cancel_futures=cancel_futures)
        if wait and not find_reactor().inside:
            self._close_cluster()

    def finish_shutdown(self) -> None:
        """Close the cluster's side in a thread, and set ``drained``, once a closed pool has no work left."""
        if not self.closed:
            return
        with self.lock:
            waiting = [call for call in self._waiting if not call.future.done()]
            members = list(self.members)
        if not members and not waiting and not self.drained.done():
            self.set_drained()
            # In a thread of its own: it waits for the nodes, and the reactor serves other pools, too.
            threading.Thread(target=self._close_cluster, name="anyaccel close", daemon=True).start()

    def _close_cluster(self) -> None:
        """Close the cluster's side, once; another caller waits for that."""
        with self._closing:
            if not self._cluster_closed:
                self._cluster_closed = True
                self.cluster.close()

    def unfinished(self) -> list[Call]:
        """Return the queued calls and the submitted calls without an answer."""
        with self.lock:
            return [*self._waiting, *(call for member in self.members for call in member.outstanding)]

    def on_broken(self, answer: Answer, call: Call) -> None:
        """Break the pool and fail its calls, also this one, because the worker of a call could not be set up."""
        self.mark_broken(answer.error(), call)

    def remove(self, member: RemoteCall | RemoteActor) -> None:
        """Remove a finished call or actor, submit queued calls instead, and finish the shutdown of a closed pool."""
        with self.lock:
            self.members.discard(member)
        self.submit_waiting()
        self.finish_shutdown()

    def retry(self, call: Call) -> None:
        """Count a lost run, and queue the call again at the front; :meth:`submit_waiting` submits the call."""
        with self.lock:
            call.retry()
            self._waiting.appendleft(call)

    def on_cancel(self, call: Call) -> None:
        """Drop the arguments of a cancelled call, and stop the worker if the call was submitted and is no method.

        Then submit queued calls, and finish the shutdown of a closed pool.
        """
        with self.lock:
            member = next((member for member in self.members if call.number in member.running), None)
            call.body = None
        if member is not None and call.kind != MessageKind.METHOD:  # an actor has other callers
            member.stop(self.settings.grace)
        self.submit_waiting()
        self.finish_shutdown()


def make_order(name: str, options: Options, plan: Plan) -> Order:
    """Make the order for the host of a call."""
    return Order(
        name=name, request=plan.request, resources=plan.terms, max_calls=options.max_calls, timeout=options.timeout,
        concurrency=options.concurrency,
    )  # fmt: skip


class RemoteWork:
    """A call or an actor that was submitted to the cluster.

    Attributes:
        driver: The engine.
        key: Its key on the cluster.
        running: Calls that it was given and has not answered, by number, in order.
        started: Where it runs, once that is known.
        stopped: Whether :meth:`stop` was called.
    """

    def __init__(self, driver: Driver, call: Call) -> None:
        self.driver = driver
        self.key = f"{driver.name}/{next(driver.numbers)}"
        self.running: dict[int, Call] = {call.number: call}
        self.started: Started | None = None
        self.stopped = False
        if call.options.needs is not None:
            call.waits = partial(_verdict_unplaced, call.options.needs, driver.cluster)

    @property
    def begun(self) -> bool:
        """Whether a node is known to run it."""
        return self.started is not None

    @property
    def allocation(self) -> Allocation | None:
        """The held devices; None before the start."""
        return None if self.started is None else self.started.allocation

    @property
    def outstanding(self) -> list[Call]:
        """Sent calls without an answer, in order; any thread may ask."""
        return list(self.running.values())

    def on_started(self, started: Started) -> None:
        """Record the node and the devices, here and for each outstanding call, which counts as sent."""
        self.started = started
        for call in self.outstanding:
            call.sent = True
            call.future.allocation = started.allocation

    def launch(self, call: Call) -> None:
        """Submit it to the cluster for its first call; an exception fails the call, and counts as a loss."""
        try:
            self.submit(call)
        except Exception as error:  # noqa: BLE001 - the future reports it
            call.fail(error)
            # By the reactor: the end submits the next call, which may fail as well, and so thousands of times.
            find_reactor().call_soon(partial(self.on_lost, error))
            return
        if self.stopped:  # by another thread, before there was a ref or a host
            self.stop(0)

    def submit(self, call: Call) -> None:
        """Submit it to the cluster, and follow the answer; exceptions of the cluster pass."""

    def stop(self, grace: float) -> None:
        """End it, and return at once; before the submission, :meth:`launch` does this."""

    def on_lost(self, error: BaseException) -> None:
        """End it, because the cluster has no answer."""

    def make_death_error(self, error: BaseException) -> WorkerError:
        """Make the error of a call whose answer the cluster has lost.

        Returns:
            A WorkerStartError if the cluster's own code failed, or the answer cannot be read; else a BrokenWorkerError
            that names the node if it is known.
        """
        outstanding, title = self.outstanding, self.driver.cluster.title
        name = outstanding[0].name if outstanding else "it"
        if isinstance(error, _UnreadableError):
            hint = "install the same version of anyaccel on every node"
            return WorkerStartError(f"{name} has no result: {error}", hint=hint)
        if own := self.driver.cluster.explain_loss(error):
            return WorkerStartError(f"no worker can be started for {name} on a node: {own}")
        where = f"on the node {self.started.node}" if self.started else "on a node of the cluster"
        return BrokenWorkerError(
            f"the worker that ran {name} {where} ended before it answered, since the node or {title}'s process there"
            f" has died ({type(error).__name__})"
        )

    def _make_log(self, call: Call) -> str | None:
        """Make the file for the output of a call, if the pool has logs; set and return ``call.future.log``, or None.

        Raises:
            OSError: When the file cannot be made.
        """
        if self.driver.settings.logs is not None:
            call.future.log = self.driver.settings.logs.path_for(call.name)
        return call.future.log


class RemoteCall(RemoteWork):
    """A call of a function on the cluster."""

    def __init__(self, driver: Driver, call: Call) -> None:
        super().__init__(driver, call)
        self.call = call
        self._ref: Any = None

    def place(self, call: Call) -> tuple[Any, bytes]:
        """Return the cluster's arguments for the call and the pickled order for its host."""
        return self.driver.place(call)

    def submit(self, call: Call) -> None:
        """Submit the call to the cluster; drop the arguments if the call cannot be retried."""
        place, order = self.place(call)
        body = call.body or Pickled(b"", [])
        if not call.may_be_retried:
            call.body = None
        self._ref = self.driver.cluster.run(place, order, self.key, self._make_log(call), body)
        self.driver.follow(self._ref, self._on_answer)

    def stop(self, grace: float) -> None:  # noqa: ARG002
        """Have the cluster cancel the call; the host stops the worker with the pool's time of grace, not ``grace``.

        Before the submission, :meth:`launch` does this.
        """
        self.stopped = True
        if (ref := self._ref) is not None:
            self.driver.cluster.cancel(self.key, ref)

    def _on_answer(self, value: bytes, error: BaseException | None) -> None:
        """Set the outcome of the call from the host's answer, and remove the call from the pool.

        A broken worker breaks the pool; a lost worker may have the call retried; an error of the cluster counts as a
        lost answer.
        """
        if error is not None:
            self.on_lost(error)
            return
        answer: Answer = loads(value)  # of our host; the worker's data inside is still unread
        if answer.started is not None:
            self.on_started(answer.started)
        call = self.call
        if self.running.pop(call.number, None) is None:
            return
        if answer.kind == FAILED:
            self._fail(answer.error())
        elif answer.kind == MessageKind.BROKEN:
            self.driver.on_broken(answer, call)
        else:
            set_outcome(call, answer.message(), plain=self.driver.settings.plain)
        self.end(left=False)

    def on_lost(self, error: BaseException) -> None:
        """Retry or fail the call, because the cluster has no answer; remove the call from the pool.

        No effect on an answered call.
        """
        death = self.make_death_error(error)
        if self.running.pop(self.call.number, None) is None:
            return
        self._fail(death)
        self.end(left=self.started is not None)

    def end(self, *, left: bool) -> None:
        """Remove the call from the cluster's records and the pool; ``left`` if the host could not clean up."""
        self.driver.cluster.remove_call(self.key, left=left)
        self.driver.remove(self)

    def _fail(self, error: BaseException) -> None:
        """Queue the call again if its worker has died and a retry is left; else fail the call."""
        if isinstance(error, BrokenWorkerError) and not self.stopped and self.call.may_be_retried:
            self.driver.retry(self.call)
        else:
            self.call.fail(error)


class RemoteActor(RemoteWork):
    """An actor on the cluster: a process of the cluster is the host of the process that has the object.

    Attributes:
        ending: Whether it gets no more calls.
    """

    def __init__(self, driver: Driver, call: Call) -> None:
        super().__init__(driver, call)
        assert call.actor is not None  # noqa: S101 - it makes the object
        self._state: ActorState = call.actor
        self._group = self._state.group
        self._state.member = self
        self._host: RemoteHost | None = None
        self._gone = self.ending = False
        self._death: WorkerError | None = None
        self._unanswered: set[int] = set()

    def submit(self, call: Call) -> None:
        """Submit the host to the cluster."""
        place, order = self.driver.place(call)
        self._host = self.driver.cluster.host(place, order, self.key)
        self.driver.follow(self._host.started(), self._on_placed)

    def accepts(self, call: Call) -> bool:
        """Reserve a place for a call, which follows in :meth:`run`; return False if the actor cannot run another."""
        constructs = self._state.construction.number in self.running
        free = not (constructs or self.ending) and len(self.running) < self._group.options.concurrency
        if free:
            self.running[call.number] = call
        return free

    def pull(self) -> None:
        """Take and send queued calls up to the limit of concurrency."""
        while (call := self._group.next_for(self)) is not None:
            self.run(call)

    def run(self, call: Call) -> None:
        """Send a call to the host; a call without a body was cancelled, and is only removed.

        The arguments are dropped if the call cannot be retried.
        """
        body = call.body
        if call.tries >= call.options.retries:
            call.body = None
        if body is None or self._host is None:  # cancelled just now
            self.running.pop(call.number, None)
            return
        call.future.allocation = self.allocation
        call.sent = True
        method = "" if call.kind == MessageKind.CONSTRUCT else call.name.rpartition(".")[2]
        self._unanswered.add(call.number)
        ref = self._host.call(method, self._make_log(call), body.data, *map(bytes, body.buffers))
        self.driver.follow(ref, partial(self._on_answer, call))

    def stop(self, grace: float) -> None:
        """Have the process ended, or the host where there is no process yet; return at once.

        Before the submission, :meth:`launch` does this.

        Args:
            grace: Seconds between SIGTERM and SIGKILL of the process.
        """
        self.ending = self.stopped = True
        if self._host is not None and self.started is not None:
            self._host.stop(grace)
        elif self._host is not None:
            self._host.kill()

    def shut_down(self) -> None:
        """Ask the process to exit; the node stops the process after the grace period, of at least a second."""
        self.ending = True
        if self._host is not None and not self._gone:
            self._host.close()

    def _on_placed(self, value: Started | Answer, error: BaseException | None) -> None:
        """Record the node, follow the end of the process, and have the object constructed; or end the actor."""
        if error is not None:
            self.on_lost(error)
        elif isinstance(value, Answer):
            self._end(value.error())
        else:
            assert self._host is not None  # noqa: S101 - it says that it has started
            self.on_started(value)
            self.driver.follow(self._host.ended(), self._on_ended)
            if self.stopped:
                self.stop(0)
            else:
                self.run(self._state.construction)

    def _on_ended(self, answer: Answer, error: BaseException | None) -> None:
        """End the actor with the reported reason, once each sent call is answered; no further call is sent."""
        if error is not None:
            self.on_lost(error)
            return
        self.ending = True
        self._death = self._death or answer.error()
        self._end_if_answered()

    def _on_answer(self, call: Call, answer: Answer, error: BaseException | None) -> None:
        """Set the outcome of a call from the host's answer.

        A lost host ends the actor, and so does a lost worker, once each sent call is answered. A broken worker breaks
        the pool.
        """
        if error is not None:
            self.on_lost(error)
            return
        self._unanswered.discard(call.number)
        failure = answer.error() if answer.kind == FAILED else None
        if isinstance(failure, BrokenWorkerError):  # the call stays outstanding: the end fails or retries it
            self.ending = True
            self._death = self._death or failure
        elif self.running.pop(call.number, None) is not None:
            if failure is not None:
                call.fail(failure)
            elif answer.kind == MessageKind.BROKEN:
                self.driver.on_broken(answer, call)
            else:
                self._on_result(call, answer)
        self._end_if_answered()

    def _end_if_answered(self) -> None:
        """End the actor if the worker's end is known and no answer is missing.

        The cluster brings the reports of one end in any order, and the answer to a call says more than the end of the
        worker: that the time limit was over, or why the object could not be made. The host answers each call that it
        got; if the host is lost, so are the answers.
        """
        if self._death is not None and not self._unanswered:
            self._end(self._death)

    def _on_result(self, call: Call, answer: Answer) -> None:
        """Send queued calls, then set the outcome of the answered call; close an actor that is closing.

        After a failed construction, no calls are sent.
        """
        if answer.started is not None:
            call.future.allocation = answer.started.allocation
        lives = call.kind != MessageKind.CONSTRUCT or answer.kind == MessageKind.RESULT
        if lives:
            self.pull()
        call.body = None
        set_outcome(call, answer.message(call.number), plain=self.driver.settings.plain)
        if lives and self._group.closing:
            self._group.close()

    def on_lost(self, error: BaseException) -> None:
        """End the actor and fail or retry its calls, because the cluster has lost its host."""
        early = self.stopped and self.started is None
        self._end(BrokenWorkerError("it was killed before it had been made") if early else self.make_death_error(error))

    def _end(self, death: WorkerError) -> None:
        """Fail or retry the outstanding calls, fail the queued calls, kill the host, and remove the actor.

        Retried calls fail as well, unless other actors of a group may run them. No effect the second time.
        """
        if self._gone:
            return
        self._gone = True
        outstanding = self.outstanding
        self.running.clear()
        again = [] if self.stopped else [call for call in outstanding if call.may_be_retried]
        for call in again:
            call.retry()
        self._group.put_back(again)
        self._state.on_gone(death)  # before a caller hears of it and calls again
        for call in outstanding:
            if call not in again:
                call.fail(death)
        if self._host is not None:
            self._host.kill()
        self.driver.cluster.remove_call(self.key, left=False)
        self.driver.remove(self)


def _verdict_unplaced(request: Request, cluster: Cluster[Any]) -> Verdict:
    """Make the verdict on a call that the cluster has not placed yet: it does not fit now, but may later."""
    reason = Reason(code=ReasonCode.TAKEN, message=f"{cluster.title} has not placed it yet")
    try:
        if cluster.connected:
            cluster.check_nodes(request)
    except (NeverFitsError, UnknownNameError):
        message = f"no node of {cluster.title} can serve it now, so it waits until one joins"
        reason = Reason(code=ReasonCode.HOSTS, message=message)
    except AnyaccelError:
        pass  # the nodes could not be asked
    return Verdict(request=request, fits_now=False, ever_fits=True, reasons=(reason,))
