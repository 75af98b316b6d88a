"""A pool on a cluster: hands calls over to the cluster, which places them, and hears what became of them."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any

from anyaccel.engines.remote.cluster import Cluster, RemoteHost
from anyaccel.engines.remote.messages import FAILED, Answer, Order, Spec, Started
from anyaccel.errors import BrokenWorkerError, UsageError, WorkerError, WorkerStartError
from anyaccel.model import Allocation, Request
from anyaccel.pool.actor import ActorState
from anyaccel.pool.call import BrokenPoolError, Call, Options, exception_in, settle_call
from anyaccel.pool.channel import Kind
from anyaccel.pool.engine import Engine, Setting
from anyaccel.pool.payload import Pickled, dumps, dumps_whole, loads
from anyaccel.pool.reactor import Timer, reactor
from anyaccel.scheduler import Reason, ReasonCode, Verdict

if TYPE_CHECKING:
    from anyaccel.pool.gang import GangFuture

MOST_PREPARED = 256


class Driver(Engine):
    """The calls of one pool on a cluster; see :class:`~anyaccel.pool.engine.Engine`.

    Args:
        cluster: The cluster.
        setting: What the pool is to do.

    Attributes:
        lock: Held over every look at what calls wait and run.
        members: Calls and actors that the cluster knows of.
        broken: Why no call can be run, or None.
        foreign: Whether we are a fork of the process that the pool belongs to.
    """

    def __init__(self, cluster: Cluster, setting: Setting) -> None:
        self.cluster = cluster
        self.grace = setting.grace
        self.max_workers = setting.max_workers
        self.logs = setting.logs
        self.preparation = setting.preparation
        self.lock = threading.Lock()
        self.members: set[RemoteCall | RemoteActor] = set()
        self.broken: BrokenPoolError | None = None
        self.foreign = False
        self.name = secrets.token_hex(8)
        self._numbers = count()
        self._waiting: deque[Call] = deque()
        self.closed = False
        self._drained = threading.Event()
        # With the plan and the options, of which the key has the ids: they take long to hash.
        self._places: dict[object, tuple[Any, Any, Options]] = {}
        spec = Spec(
            pool=self.name,
            path=tuple(os.path.abspath(entry) for entry in sys.path),
            preparation=setting.preparation,
            preload=setting.preload,
            grace=setting.grace,
            idle=setting.idle,
            shared=setting.shared,
        )
        cluster.open(self, dumps_whole(spec))

    def check(self, request: Request) -> None:
        """Raise the error of a request that no node can ever serve."""
        self.cluster.check(request)

    def gang(self, options: Options, hosts: int, name: str, work: bytes) -> GangFuture:
        """Let a pickled call be run on each of several nodes at once."""
        if self.max_workers is not None:
            raise UsageError("a gang starts all its workers at once; max_workers must be None for it")
        return self.cluster.gang(self, options, hosts, name, work)

    def enter(self, call: Call, work: object) -> None:
        """Let the cluster place a call, once there may be one more."""
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
        while True:
            with self.lock:
                while self._waiting and self._waiting[0].future.done():
                    self._waiting.popleft()
                if not self._waiting or (self.max_workers is not None and len(self.members) >= self.max_workers):
                    return
                call = self._waiting.popleft()
                member = (RemoteCall if call.actor is None else RemoteActor)(self, call)
                self.members.add(member)
            member.launch(call)

    def add(self, members: Sequence[RemoteCall]) -> None:
        """Count calls that somebody else launches."""
        with self.lock:
            self.check_open()
            self.members.update(members)

    def place(self, call: Call) -> Any:
        """What to ask the cluster for; the same for all calls that are alike.

        Raises:
            NeverFitsError: When no node can ever serve its request any more.
        """
        needs, options = call.options.needs, options_of(call)
        plan = None if needs is None else self.cluster.plan(needs)
        key = (call.name, call.kind, id(options), id(plan))
        found = self._places.get(key)
        if found is None:
            place = self.cluster.place(call.name, options, plan, actor=call.actor is not None)
            if len(self._places) > MOST_PREPARED:
                self._places.clear()
            found = self._places[key] = (place, plan, options)
        return found[0]

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
            self._drained.wait()
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
        if not members and not waiting and not self._drained.is_set():
            self._drained.set()
            threading.Thread(target=self.cluster.close, name="anyaccel close", daemon=True).start()

    def break_off(self, cause: BaseException) -> None:
        """A worker could not be set up: no other will be."""
        error = BrokenPoolError(f"the pool is broken: setting up a worker failed with {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        with self.lock:
            self.broken = self.broken or error
            unfinished = [*self._waiting, *(call for member in self.members for call in member.outstanding)]
        for call in unfinished:
            call.fail(error)
        self.stop(self.grace)

    def discard(self, member: RemoteCall | RemoteActor) -> None:
        """A call is over, or an actor."""
        with self.lock:
            self.members.discard(member)
        self.pump()
        self.settle()

    def retry(self, call: Call) -> None:
        """Let a call be placed again, whose worker or node has died."""
        with self.lock:
            call.tries += 1
            call.worker = None
            self._waiting.appendleft(call)

    def on_cancel(self, call: Call) -> None:
        """A call was cancelled: if the cluster knows of it, tell the cluster."""
        with self.lock:
            member = next((member for member in self.members if member.call is call), None)
            call.body = None
        if member is not None:
            member.stop(self.grace)
        self.pump()
        self.settle()

    def quarantined(self) -> tuple[tuple[Allocation, str], ...]:
        """The nodes keep devices aside, and say so in their ledgers."""
        return ()


def options_of(call: Call) -> Options:
    """How a call is to be run, or the calls of an actor."""
    return call.options if call.actor is None else call.actor.options


def order_of(name: str, options: Options, request: Request | None, resources: tuple[str, ...] = ()) -> Order:
    """What to tell the host of a call."""
    return Order(
        name=name, request=request, resources=resources, max_calls=options.max_calls, timeout=options.timeout,
        concurrency=options.concurrency,
    )  # fmt: skip


class Awaited:
    """Something of which the cluster has the answer, sooner or later.

    Attributes:
        driver: The pool's side of the cluster.
        call: The call that it answers, or None.
    """

    __slots__ = ("_ref", "call", "driver")

    def __init__(self, driver: Driver, call: Call) -> None:
        self.driver = driver
        self.call: Call | None = call
        self._ref: Any = None

    def attend(self, pending: Callable[[], bool], seconds: float | None = None) -> None:
        """Take its answer in this thread, where that saves the way through others."""
        if pending() and (ref := self._ref) is not None:
            found = self.driver.cluster.attend(ref, lambda: pending() and self._ref is ref, seconds)
            if found is not None:
                self._hear(ref, *found)

    def expect_answer(self, ref: Any) -> None:
        """Have the answer to a call handed over, to whoever takes it first."""
        self._ref = ref
        self.driver.cluster.follow(ref, partial(self._hear, ref), lambda: self._ref is ref)

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
        if self.driver.logs is not None:
            call.future.log = self.driver.logs.path_for(call.name)
        return call.future.log


class Member(Awaited):
    """What calls and actors have in common.

    Attributes:
        key: Its name on the cluster.
        started: Where it runs, once that is known.
        ending: Whether it gets no more calls.
        stopped: Whether we have ended it, whatever it was doing.
    """

    __slots__ = ("ending", "key", "started", "stopped")

    def __init__(self, driver: Driver, call: Call) -> None:
        super().__init__(driver, call)
        self.key = driver.new_key()
        self.started: Started | None = None
        self.ending = self.stopped = False
        if call.options.needs is not None:
            call.waits = partial(_unplaced, call.options.needs, driver.cluster.title)

    @property
    def begun(self) -> bool:
        """Whether it runs its call by now, as far as is known."""
        return self.started is not None

    @property
    def outstanding(self) -> list[Call]:
        """Calls that it was given and has not answered."""
        return [] if self.call is None else [self.call]

    def on_started(self, started: Started) -> None:
        """It runs."""
        self.started = started
        call = self.call
        if call is not None:
            call.waits = None
            call.worker = self
            call.future.allocation = started.allocation

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


class RemoteCall(Member):
    """A call of a function."""

    __slots__ = ("_spared",)

    def __init__(self, driver: Driver, call: Call) -> None:
        super().__init__(driver, call)
        self._spared = False

    def place(self, call: Call) -> Any:
        """What to ask the cluster for."""
        return self.driver.place(call)

    def launch(self, call: Call) -> None:
        """Ask the cluster to place it."""
        try:
            place = self.place(call)
            body = call.body or Pickled(b"", [])
            if not call.may_be_retried:
                call.body = None
            call.worker = self
            ref = self.driver.cluster.run(place, self.key, self.log_of(call), body)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            call.fail(error)
            self.end(left=False)
            return
        self.expect_answer(ref)
        if self.stopped:
            self.stop(0)

    def stop(self, grace: float) -> None:  # noqa: ARG002
        """Let the cluster tell its host, which gives it the pool's time of grace."""
        self.ending = self.stopped = True
        if (ref := self._ref) is not None:
            self.driver.cluster.cancel(self.key, ref)

    def recall(self) -> None:
        """Cancel it unless it runs: its host knows best."""
        if (ref := self._ref) is not None and not self.begun:
            self._spared = True
            self.driver.cluster.recall(self.key, ref)

    def leave(self) -> None:
        """It ends with its answer."""

    def on_value(self, value: bytes) -> None:
        """Its host has an answer."""
        news: Answer = loads(value)
        if news.started is not None:
            self.on_started(_notice(news.started))
        call, plain = self._take(), self.driver.preparation.plain
        if call is not None and news.kind == FAILED:
            self._fail(call, loads(news.data))
        elif call is not None and news.kind == Kind.BROKEN:
            self.driver.break_off(exception_in(news.message(), plain=plain))
            call.fail(BrokenPoolError(str(self.driver.broken)))
        elif call is not None:
            settle_call(call, news.message(), plain=plain)
        self.end(left=False)

    def on_lost(self, error: BaseException) -> None:
        """The cluster has no answer."""
        death = self.death(error)
        call = self._take()
        if call is not None and self._spared and self.driver.cluster.recalled(error):
            call.future.cancel()
        elif call is not None:
            self._fail(call, death)
        self.end(left=self.started is not None)

    def end(self, *, left: bool) -> None:
        """It is over."""
        self.driver.cluster.forget(self.key, left=left)
        self.driver.discard(self)

    def _take(self) -> Call | None:
        with self.driver.lock:
            call, self.call = self.call, None
        return call

    def _fail(self, call: Call, error: BaseException) -> None:
        if isinstance(error, BrokenWorkerError) and not self.stopped and call.may_be_retried:
            self.driver.retry(call)
        else:
            call.fail(error)


class RemoteActor(Member):
    """An actor: our object, in a process of which a process of the cluster is the host."""

    __slots__ = ("_buried", "_host", "_methods", "_state", "_timer")

    def __init__(self, driver: Driver, call: Call) -> None:
        super().__init__(driver, call)
        assert call.actor is not None  # noqa: S101 - it makes the object
        self._state: ActorState = call.actor
        self._state.member = self
        self._methods: dict[int, RemoteMethod] = {}
        self._host: RemoteHost | None = None
        self._buried = False
        self._timer: Timer | None = None

    def launch(self, call: Call) -> None:
        """Ask the cluster to place it."""
        try:
            self._host = self.driver.cluster.host(self.driver.place(call), self.key)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            call.fail(error)
            self._bury(BrokenWorkerError(f"it could not be placed: {error}"))
            return
        self._follow(self._host.started(), self._on_placed)
        if self.stopped:
            self.stop(0)

    @property
    def idle(self) -> bool:
        """Whether it runs nothing."""
        return self.call is None and not self._methods

    @property
    def free(self) -> bool:
        """Whether it takes one more call of a method; called with the lock held."""
        return self.call is None and not self.ending and len(self._methods) < self._state.options.concurrency

    @property
    def outstanding(self) -> list[Call]:
        """Calls that it was given and has not answered, in order."""
        return [*super().outstanding, *(method.call for method in self._methods.values() if method.call is not None)]

    def takes_ahead(self, call: Call) -> bool:  # noqa: ARG002
        """No: to take a call back from there takes longer than to wait."""
        return False

    def withdraw(self) -> Call | None:
        """None: no call waits with it."""
        return None

    def on_cancel(self, call: Call) -> None:
        """No call waits with it."""

    def add(self, call: Call) -> None:
        """Say that it has a call of a method; called with the lock held."""
        self._methods[call.number] = RemoteMethod(self, call)

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
            return
        call.future.allocation = self.started.allocation if self.started else None
        log, buffers = self.log_of(call), map(bytes, body.buffers)
        if call.kind == Kind.CONSTRUCT:
            call.worker = self
            self.expect_answer(host.construct(log, body.data, *buffers))
        elif (method := self._methods.get(call.number)) is not None:
            call.worker = method
            method.expect_answer(host.call(call.name.rpartition(".")[2], log, body.data, *buffers))

    def stop(self, grace: float) -> None:
        """End its process."""
        self.ending = self.stopped = True
        if self._host is not None and self.started is not None:
            self._host.stop(grace)
        elif self._host is not None:
            self._host.kill()

    def recall(self) -> None:
        """Cancel its making, if nobody is at that."""
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
        grace = self.driver.grace
        self._timer = reactor().call_later(max(grace, 1.0), partial(self.stop, grace))

    def _follow(self, ref: Any, hand_over: Callable[[Any], None]) -> None:
        def hear(value: Any, error: BaseException | None) -> None:
            if error is None:
                hand_over(value)
            else:
                self.on_lost(error)

        self.driver.cluster.follow(ref, hear, lambda: True)

    def _on_placed(self, news: Started | Answer) -> None:
        if isinstance(news, Answer):
            self._bury(loads(news.data))
            return
        assert self._host is not None  # noqa: S101 - it says that it has started
        self.on_started(news)
        self._follow(self._host.ended(), lambda answer: self._bury(loads(answer.data)))
        call = self.call
        if self.stopped:
            self.stop(0)
        elif call is not None:
            self.run(call)

    def on_value(self, value: Answer) -> None:
        """Its host has made the object, or not."""
        with self.driver.lock:
            call, self.call = self.call, None
        self.on_answer(call, value)

    def on_answer(self, call: Call | None, value: Answer) -> None:
        """Its host has an answer to a call that it does not run any more: give it the next one, then hand it over."""
        plain = self.driver.preparation.plain
        if value.kind == FAILED:  # and it is about to end
            error = loads(value.data)
            if isinstance(error, BrokenWorkerError):
                self._bury(error, call)
            elif call is not None:
                call.fail(error)
            return
        if value.kind == Kind.BROKEN:
            self.driver.break_off(exception_in(value.message(), plain=plain))
            if call is not None:
                call.fail(BrokenPoolError(str(self.driver.broken)))
            return
        if call is not None and value.started is not None:
            call.future.allocation = _notice(value.started).allocation
        made = call is None or call.kind != Kind.CONSTRUCT or value.kind == Kind.RESULT
        with self.driver.lock:
            following = self._state.following() if made else []
        for each in following:
            self.run(each)
        if call is not None:
            call.body = None
            settle_call(call, value.message(call.number), plain=plain)
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
            again = [] if buried or self.stopped else self._state.regain(outstanding)
            self.call = None
            for method in self._methods.values():
                method.forget()
            self._methods.clear()
        if not buried:
            self._state.die(death)  # before anybody hears of it and calls again
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


_notice: Callable[[bytes], Started] = lru_cache(maxsize=64)(loads)
"""Of calls that share a process, all notices are the same."""
