"""A pool on a cluster: hands calls and actors over to the cluster, which places them, and hears what became of them."""

from __future__ import annotations

import os
import pickle
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any

from anyaccel.engines.remote.cluster import Cluster, Plan, RemoteHost, outcome
from anyaccel.engines.remote.messages import FAILED, Answer, Order, PoolSpec, Started
from anyaccel.errors import BrokenWorkerError, UsageError, WorkerError, WorkerStartError
from anyaccel.model import Allocation, Request, replace
from anyaccel.pool.actor import ActorState
from anyaccel.pool.call import Call, Options, Runner, exception_in, settle_call
from anyaccel.pool.channel import MessageKind
from anyaccel.pool.engine import Engine, PoolSettings
from anyaccel.pool.payload import Pickled, dumps, dumps_whole, loads
from anyaccel.pool.reactor import Timer, reactor
from anyaccel.scheduler import Reason, ReasonCode, Verdict

if TYPE_CHECKING:
    from anyaccel.pool.gang import GangFuture

MOST_PREPARED = 256
ATTENDED_SECONDS = 0.01
"""How long it is left to whoever waits for an answer to do so, where somebody did for the last one. To have the cluster
hand it over costs more."""
_CPU_PLAN = Plan()


class Driver(Engine):
    """The calls of one pool on a cluster; see :class:`~anyaccel.pool.engine.Engine`.

    Args:
        cluster: The cluster.
        settings: What the pool is to do.

    Attributes:
        members: Calls and actors that the cluster knows of.
        attended: Whether the last answer came through the thread of somebody who waited for it.
    """

    def __init__(self, cluster: Cluster[Any], settings: PoolSettings) -> None:
        super().__init__(settings)
        self.cluster = cluster
        self.members: set[RemoteWork] = set()
        self.name = secrets.token_hex(8)
        self._numbers = count()
        self._waiting: deque[Call] = deque()
        self.attended = False
        self._postponed: deque[Awaited] = deque()
        self._looks = False
        # With the plan and the options, of which the key has the ids: they take long to hash.
        self._places: dict[object, tuple[tuple[Any, bytes], Plan, Options]] = {}
        spec = PoolSpec(
            pool=self.name,
            path=tuple(os.path.abspath(entry) for entry in sys.path),
            settings=replace(settings, max_workers=None, logs=None, address=None),
        )
        cluster.open(self, dumps_whole(spec))

    def check(self, request: Request) -> None:
        """Raise the error of a request that no node can ever serve."""
        self.cluster.plan(request)

    def gang(self, options: Options, hosts: int, name: str, work: bytes) -> GangFuture:
        """Let a pickled call be run on each of several nodes at once."""
        if self.settings.max_workers is not None:
            raise UsageError("a gang starts all its workers at once; max_workers must be None for it")
        return self.cluster.gang(self, options, hosts, name, work)

    def enter(self, call: Call, work: Pickled | tuple[Any, ...], *, late: bool = False) -> None:  # noqa: ARG002
        """Let the cluster place a call, once there may be one more."""
        if self.foreign:  # a thread of our parent may have held the lock
            self.check_open()
        try:
            body = work if isinstance(work, Pickled) else dumps(work)
        except Exception as error:  # noqa: BLE001 - it belongs to the future, as other executors do it
            self.check_open()
            call.fail(error)
            return
        call.body = body
        with self.lock:
            self.check_open()
            self._waiting.append(call)
        self.pump()
        self.keep(call)

    def pump(self) -> None:
        """Hand over to the cluster whatever may be."""
        most = self.settings.max_workers
        while True:
            with self.lock:
                while self._waiting and self._waiting[0].future.done():
                    self._waiting.popleft()
                if not self._waiting or (most is not None and len(self.members) >= most):
                    return
                call = self._waiting.popleft()
                member = RemoteCall(self, call) if call.actor is None else RemoteActor(self, call)
                self.members.add(member)
            member.launch(call)

    def add(self, members: Sequence[RemoteCall]) -> None:
        """Count calls that somebody else launches."""
        with self.lock:
            self.check_open()
            self.members.update(members)

    def place(self, call: Call) -> tuple[Any, bytes]:
        """What to ask the cluster for, and the pickled order for its host; the same for all calls that are alike.

        Raises:
            NeverFitsError: When no node can ever serve its request any more.
        """
        options = call.options if call.actor is None else call.actor.options
        plan = _CPU_PLAN if options.needs is None else self.cluster.plan(options.needs)
        key = (call.name, call.kind, id(options), id(plan))
        found = self._places.get(key)
        if found is None:
            order = order_of(call.name, options, plan)
            place = self.cluster.place(order, plan, actor=call.actor is not None)
            if len(self._places) > MOST_PREPARED:
                self._places.clear()
            found = self._places[key] = ((place, pickle.dumps(order)), plan, options)
        return found[0]

    def postpone(self, awaited: Awaited) -> None:
        """Leave an answer to whoever waits for it; where nobody does, the cluster is to hand it over after a while."""
        self._postponed.append(awaited)
        if not self._looks:
            self._looks = True
            reactor().call_later(ATTENDED_SECONDS, self._look)

    def _look(self) -> None:
        self._looks = False  # before the look: who postpones one looks the other way round
        while self._postponed:
            self._postponed.popleft().follow_answer(unless_attended=True)

    def new_key(self) -> str:
        """A key for a call, which no other has."""
        return f"{self.name}/{next(self._numbers)}"

    def on_started(self, key: str, started: Started) -> None:
        """A call runs."""
        with self.lock:
            member = next((member for member in self.members if member.key == key), None)
        if member is not None:
            member.on_started(started)

    def shutdown(self, *, wait: bool, cancel_futures: bool = False) -> None:
        """Take no more calls; end when those that there are have been run, or nobody is left who would."""
        if self.foreign:
            return
        with self.lock:
            self.closed = True
            members = list(self.members)
            waiting = list(self._waiting) if cancel_futures else []
        if not self.cluster.connected:
            for member in members:
                member.on_lost(ConnectionError("this process has left the cluster"))
        elif cancel_futures:
            for member in members:
                member.recall()
        for call in waiting:
            call.future.cancel()
        self.settle()
        if wait and not reactor().inside:
            self.drained.wait()
            self.cluster.close()

    def settle(self) -> None:
        """Once closed and out of work, let the actors go."""
        if not self.closed:
            return
        with self.lock:
            while self._waiting and self._waiting[0].future.done():
                self._waiting.popleft()
            waiting, members = list(self._waiting), list(self.members)
        for call in waiting:
            if call.actor is not None:
                call.actor.close()
        for member in members:
            member.leave()
        if not members and not waiting and not self.drained.is_set():
            self.drained.set()
            threading.Thread(target=self.cluster.close, name="anyaccel close", daemon=True).start()

    def unfinished(self) -> list[Call]:
        """Calls that wait, or run."""
        with self.lock:
            return [*self._waiting, *(call for member in self.members for call in member.outstanding)]

    def break_with(self, answer: Answer, call: Call | None) -> None:
        """A worker could not be set up, says an answer to a call: no other will be."""
        cause = exception_in(answer.message(), plain=False)  # its host says so, which has read the worker's answer
        self.break_off(cause, *([] if call is None else [call]))

    def discard(self, member: RemoteWork) -> None:
        """A call is over, or an actor."""
        with self.lock:
            self.members.discard(member)
        self.pump()
        self.settle()

    def retry(self, call: Call) -> None:
        """Let a call be placed again, whose worker or node has died."""
        with self.lock:
            call.retry()
            self._waiting.appendleft(call)

    def on_cancel(self, call: Call) -> None:
        """A call was cancelled: if the cluster knows of it, tell the cluster."""
        with self.lock:
            member = next((member for member in self.members if member.call is call), None)
            call.body = None
        if member is not None:
            member.stop(self.settings.grace)
        self.pump()
        self.settle()

    def quarantined(self) -> tuple[tuple[Allocation, str], ...]:
        """The nodes keep devices aside, and say so in their ledgers."""
        return ()


def order_of(name: str, options: Options, plan: Plan) -> Order:
    """What to tell the host of a call."""
    return Order(
        name=name, request=plan.request, resources=plan.terms, max_calls=options.max_calls, timeout=options.timeout,
        concurrency=options.concurrency,
    )  # fmt: skip


class Awaited(Runner):
    """Something of which the cluster has the answer, sooner or later.

    Attributes:
        driver: The pool's side of the cluster.
        call: The call that it answers, or None.
    """

    __slots__ = ("_attended", "_followed", "_ref", "call", "driver")

    def __init__(self, driver: Driver, call: Call) -> None:
        self.driver = driver
        self.call: Call | None = call
        self._ref: Any = None
        self._attended = self._followed = False

    def expect_answer(self, ref: Any) -> None:
        """Have the answer to a call handed over: in the thread of who waits for it, else in that of the reactor."""
        self._ref = ref
        if self.driver.attended:
            self.driver.postpone(self)
        else:
            self.follow_answer()

    def attend(self, pending: Callable[[], bool], seconds: float | None) -> None:
        """Take its answer in this thread, where that saves the way through others."""
        if not pending() or (ref := self._ref) is None:
            return
        self._attended = True
        found = None
        try:
            found = self.driver.cluster.attend(ref, lambda: pending() and self._ref is ref, seconds)
        finally:
            if found is None:
                self.follow_answer()
        if found is not None:
            self.driver.attended = True
            self._hear(ref, *found)

    def follow_answer(self, *, unless_attended: bool = False) -> None:
        """Let the cluster hand the answer over, which whoever attends sees to when leaving without it."""
        ref = self._ref
        if ref is None or self._followed or (unless_attended and self._attended):
            return
        self._followed = True
        try:
            self.follow(ref, partial(self._hear_unattended, ref), lambda: self._ref is ref)
        except Exception as error:  # noqa: BLE001 - this process has left the cluster
            self._hear(ref, None, error)

    def _hear_unattended(self, ref: Any, value: Any, error: BaseException | None) -> None:
        if self._ref is ref:
            self.driver.attended = False
        self._hear(ref, value, error)

    def follow(
        self, ref: Any, hear: Callable[[Any, BaseException | None], None], wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Have a value, or why there is none, handed over in the thread of the reactor, if it is wanted by then."""

        def tell(done: Future[Any]) -> None:
            if wanted():
                reactor().call_soon(partial(hear, *outcome(done)))

        self.driver.cluster.future(ref).add_done_callback(tell)

    def _hear(self, ref: Any, value: Any, error: BaseException | None) -> None:
        """Hand over an answer, or that there is none, unless somebody else has."""
        with self.driver.lock:
            first = self._ref is ref
            if first:
                self._ref = None
        if first and error is not None:
            self.on_lost(error)
        elif first:
            self.on_value(value)

    def on_value(self, value: Any) -> None:
        """It has answered."""
        raise NotImplementedError

    def on_lost(self, error: BaseException) -> None:
        """The cluster has no answer, and never will."""
        raise NotImplementedError

    def log_of(self, call: Call) -> str | None:
        """The file for the output of a call."""
        if self.driver.settings.logs is not None:
            call.future.log = self.driver.settings.logs.path_for(call.name)
        return call.future.log


class RemoteWork(Awaited):
    """What calls and actors have in common.

    Attributes:
        key: Its name on the cluster.
        started: Where it runs, once that is known.
        stopped: Whether we have ended it, whatever it was doing.
    """

    __slots__ = ("key", "started", "stopped")

    def __init__(self, driver: Driver, call: Call) -> None:
        super().__init__(driver, call)
        self.key = driver.new_key()
        self.started: Started | None = None
        self.stopped = False
        if call.options.needs is not None:
            call.waits = partial(_unplaced, call.options.needs, driver.cluster.title)

    @property
    def begun(self) -> bool:
        """Whether it runs its call by now, as far as is known."""
        return self.started is not None

    @property
    def allocation(self) -> Allocation | None:
        """What it holds; None before it runs."""
        return None if self.started is None else self.started.allocation

    @property
    def outstanding(self) -> list[Call]:
        """Calls that it was given and has not answered."""
        return [] if self.call is None else [self.call]

    def launch(self, call: Call) -> None:
        """Ask the cluster to place it."""

    def stop(self, grace: float) -> None:
        """End it, whatever it is doing, with so many seconds between asking its process to end and killing it."""

    def recall(self) -> None:
        """Cancel it unless it runs."""

    def leave(self) -> None:
        """The pool takes no more calls."""

    def on_started(self, started: Started) -> None:
        """It runs."""
        self.started = started
        call = self.call
        if call is not None:
            call.waits = None
            call.worker = self
            call.future.allocation = started.allocation

    def take(self) -> Call | None:
        """Take the call that it answers: nothing more comes of it."""
        with self.driver.lock:
            call, self.call = self.call, None
        return call

    def death(self, error: BaseException) -> WorkerError:
        """Why there is no answer when the cluster has given up."""
        outstanding, title = self.outstanding, self.driver.cluster.title
        name = outstanding[0].name if outstanding else "it"
        if own := self.driver.cluster.lost(error):
            return WorkerStartError(f"no worker can be started for {name} on a node: {own}")
        where = f"on the node {self.started.node}" if self.started else "on a node of the cluster"
        return BrokenWorkerError(
            f"the worker that ran {name} {where} ended before it answered, since the node or {title}'s process there"
            f" has died ({type(error).__name__})"
        )


class RemoteCall(RemoteWork):
    """A call of a function."""

    __slots__ = ("_spared",)

    def __init__(self, driver: Driver, call: Call) -> None:
        super().__init__(driver, call)
        self._spared = False

    def place(self, call: Call) -> tuple[Any, bytes]:
        """What to ask the cluster for, and the pickled order for its host."""
        return self.driver.place(call)

    def launch(self, call: Call) -> None:
        """Ask the cluster to place it."""
        try:
            place, order = self.place(call)
            body = call.body or Pickled(b"", [])
            if not call.may_be_retried:
                call.body = None
            call.worker = self
            ref = self.driver.cluster.run(place, order, self.key, self.log_of(call), body)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            call.fail(error)
            reactor().call_soon(partial(self.end, left=False))  # not from here: a thousand may follow
            return
        self.expect_answer(ref)
        if self.stopped:
            self.stop(0)

    def stop(self, grace: float) -> None:  # noqa: ARG002
        """Let the cluster tell its host, which gives it the pool's time of grace."""
        self.stopped = True
        if (ref := self._ref) is not None:
            self.driver.cluster.cancel(self.key, ref)

    def recall(self) -> None:
        """Cancel it unless it runs: its host knows best."""
        if (ref := self._ref) is not None and not self.begun:
            self._spared = True
            self.driver.cluster.recall(self.key, ref)

    def on_value(self, value: bytes) -> None:
        """Its host has an answer."""
        news: Answer = loads(value)
        if news.started is not None:
            self.on_started(notice(news.started))
        call = self.take()
        if call is not None and news.kind == FAILED:
            self._fail(call, loads(news.data))
        elif call is not None and news.kind == MessageKind.BROKEN:
            self.driver.break_with(news, call)
        elif call is not None:
            settle_call(call, news.message(), plain=self.driver.settings.preparation.plain)
        self.end(left=False)

    def on_lost(self, error: BaseException) -> None:
        """The cluster has no answer."""
        death = self.death(error)
        call = self.take()
        if call is not None and self._spared and self.driver.cluster.recalled(error):
            call.future.cancel()
        elif call is not None:
            self._fail(call, death)
        self.end(left=self.started is not None)

    def end(self, *, left: bool) -> None:
        """It is over."""
        self.driver.cluster.forget(self.key, left=left)
        self.driver.discard(self)

    def _fail(self, call: Call, error: BaseException) -> None:
        if isinstance(error, BrokenWorkerError) and not self.stopped and call.may_be_retried:
            self.driver.retry(call)
        else:
            call.fail(error)


class RemoteActor(RemoteWork):
    """An actor: our object, in a process of which a process of the cluster is the host.

    Attributes:
        ending: Whether it gets no more calls.
    """

    __slots__ = ("_buried", "_constructing", "_end", "_host", "_methods", "_state", "_timer", "ending")

    def __init__(self, driver: Driver, call: Call) -> None:
        super().__init__(driver, call)
        assert call.actor is not None  # noqa: S101 - it makes the object
        self._state: ActorState = call.actor
        self._state.member = self
        self._methods: dict[int, RemoteMethod] = {}
        self._host: RemoteHost | None = None
        self._buried = self._constructing = self.ending = False
        self._end: WorkerError | None = None
        self._timer: Timer | None = None

    def launch(self, call: Call) -> None:
        """Ask the cluster to place it."""
        try:
            place, order = self.driver.place(call)
            self._host = self.driver.cluster.host(place, order, self.key)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            call.fail(error)
            # Not from here: a thousand may follow.
            reactor().call_soon(partial(self._bury, BrokenWorkerError(f"it could not be placed: {error}")))
            return
        self._hear_of(self._host.started(), self._on_placed)
        if self.stopped:
            self.stop(0)

    @property
    def free(self) -> bool:
        """Whether it takes one more call of a method; called with the lock held."""
        return self.call is None and not self.ending and len(self._methods) < self._state.options.concurrency

    @property
    def outstanding(self) -> list[Call]:
        """Calls that it was given and has not answered, in order."""
        return [*super().outstanding, *(method.call for method in self._methods.values() if method.call is not None)]

    def takes(self, call: Call) -> bool:
        """Take note of a call that is about to be sent, if it runs at once; called with the lock held."""
        if self.free:
            self._methods[call.number] = RemoteMethod(self, call)
            return True
        return False

    def pull(self) -> None:
        """Give it the calls that wait, as many as it takes."""
        while (call := self._state.next_for(self)) is not None:
            self.run(call)

    def drop(self, call: Call) -> None:
        """Forget a call that it was given; called with the lock held."""
        self._methods.pop(call.number, None)

    def run(self, call: Call) -> None:
        """Send it a call."""
        body = call.body
        if call.tries >= call.options.retries:
            call.body = None
        host = self._host
        if body is None or host is None:  # cancelled just now
            with self.driver.lock:
                self.drop(call)
            return
        call.future.allocation = self.started.allocation if self.started else None
        making = call.kind == MessageKind.CONSTRUCT
        awaited = self if making else self._methods.get(call.number)
        if awaited is None:
            return
        self._constructing |= making
        call.worker = awaited
        method = "" if making else call.name.rpartition(".")[2]
        awaited.expect_answer(host.call(method, self.log_of(call), body.data, *map(bytes, body.buffers)))

    def stop(self, grace: float) -> None:
        """End its process."""
        self.ending = self.stopped = True
        if self._host is not None and self.started is not None:
            self._host.stop(grace)
        elif self._host is not None:
            self._host.kill()

    def recall(self) -> None:
        """Cancel its making, unless a thread is at that."""
        if self.started is None and self.call is not None:
            self.call.future.cancel()

    def leave(self) -> None:
        """The pool takes no more calls."""
        self._state.close()

    def finish(self) -> None:
        """Let its process end by itself; if that takes too long, end it."""
        self.ending = True
        if self._buried or self._host is None:
            return
        self._host.close()
        grace = self.driver.settings.grace
        self._timer = reactor().call_later(max(grace, 1.0), partial(self.stop, grace))

    def _hear_of(self, ref: Any, hand_over: Callable[[Any], None]) -> None:
        self.follow(ref, lambda value, error: hand_over(value) if error is None else self.on_lost(error))

    def _on_placed(self, news: Started | Answer) -> None:
        if isinstance(news, Answer):
            self._bury(loads(news.data))
            return
        assert self._host is not None  # noqa: S101 - it says that it has started
        self.on_started(news)
        self._hear_of(self._host.ended(), self._on_ended)
        call = self.call
        if self.stopped:
            self.stop(0)
        elif call is not None:
            self.run(call)

    def _on_ended(self, answer: Answer) -> None:
        """Its process has gone. That the object could not be made may be on its way still, with the reason."""
        death = loads(answer.data)
        with self.driver.lock:
            self._end = death
            if self._constructing:
                return
        self._bury(death)

    def on_value(self, value: Answer) -> None:
        """Its host has made the object, or not."""
        self.on_answer(self.take(), value)
        with self.driver.lock:
            self._constructing = False
            end = self._end
        if end is not None:
            self._bury(end)

    def on_answer(self, call: Call | None, value: Answer) -> None:
        """Its host has an answer to a call that it does not run any more: give it the next one, then hand it over."""
        if value.kind == FAILED:  # and it is about to end
            error = loads(value.data)
            if isinstance(error, BrokenWorkerError):
                self._bury(error, call)
            elif call is not None:
                call.fail(error)
            return
        if value.kind == MessageKind.BROKEN:
            self.driver.break_with(value, call)
            return
        if call is not None and value.started is not None:
            call.future.allocation = notice(value.started).allocation
        made = call is None or call.kind != MessageKind.CONSTRUCT or value.kind == MessageKind.RESULT
        if made:
            self.pull()
        if call is not None:
            call.body = None
            settle_call(call, value.message(call.number), plain=self.driver.settings.preparation.plain)
        if made and self._state.closing:
            self._state.close()

    def on_lost(self, error: BaseException) -> None:
        """The cluster has no answer, and never will."""
        early = self.stopped and self.started is None
        self._bury(BrokenWorkerError("it was killed before it had been made") if early else self.death(error))

    def _bury(self, death: WorkerError, answered: Call | None = None) -> None:
        """It has gone.

        Args:
            death: Why.
            answered: The call of which the answer says so.
        """
        with self.driver.lock:
            buried, self._buried = self._buried, True
            outstanding = [*self.outstanding, *([] if answered is None else [answered])]
            again = [] if buried or self.stopped else [call for call in outstanding if call.may_be_retried]
            self.call = None
            for method in self._methods.values():
                method.forget()
            self._methods.clear()
        if not buried:
            self._state.die(death)  # before a caller hears of it and calls again
        for call in again:
            call.retry()
        self._state.put_back(again)
        for call in outstanding:
            if call not in again:
                call.fail(death)
        if buried:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._state.bury(death)
        if self._host is not None:
            self._host.kill()
        self.driver.cluster.forget(self.key, left=False)
        self.driver.discard(self)


class RemoteMethod(Awaited):
    """A call of a method of an actor."""

    __slots__ = ("_actor",)

    def __init__(self, actor: RemoteActor, call: Call) -> None:
        super().__init__(actor.driver, call)
        self._actor = actor

    @property
    def begun(self) -> bool:
        """Whether it runs: an actor is sent what it begins with at once."""
        return True

    def forget(self) -> None:
        """Its actor has gone: whatever is still heard of it counts for nothing; called with the lock held."""
        self.call = self._ref = None

    def on_value(self, value: Answer) -> None:
        """Its host has an answer."""
        with self.driver.lock:
            call = self.call
            if call is not None:
                self._actor.drop(call)
        self._actor.on_answer(call, value)

    def on_lost(self, error: BaseException) -> None:
        """The cluster has no answer."""
        self._actor.on_lost(error)


def _unplaced(request: Request, title: str) -> Verdict:
    """What a call waits for that a cluster knows of and has not placed, as far as anybody can say."""
    reason = Reason(code=ReasonCode.TAKEN, message=f"{title} has not placed it yet")
    return Verdict(request=request, fits_now=False, ever_fits=True, reasons=(reason,))


notice: Callable[[bytes], Started] = lru_cache(maxsize=64)(loads)
"""Of calls that share a process, all notices are the same."""
