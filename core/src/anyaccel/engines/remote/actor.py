"""An actor on a cluster: our object, in a process of which a process of the cluster is the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from anyaccel.engines.remote.cluster import RemoteHost
from anyaccel.engines.remote.driver import Awaited, Driver, Member, notice
from anyaccel.engines.remote.messages import FAILED, Answer, Started
from anyaccel.errors import BrokenWorkerError, WorkerError
from anyaccel.pool.actor import ActorState
from anyaccel.pool.call import Call, settle_call
from anyaccel.pool.channel import Kind
from anyaccel.pool.payload import loads
from anyaccel.pool.reactor import Timer, reactor


class RemoteActor(Member):
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
        making = call.kind == Kind.CONSTRUCT
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
        grace = self.driver.setting.grace
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
        with self.driver.lock:
            call, self.call = self.call, None
        self.on_answer(call, value)
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
        if value.kind == Kind.BROKEN:
            self.driver.break_with(value, call)
            return
        if call is not None and value.started is not None:
            call.future.allocation = notice(value.started).allocation
        made = call is None or call.kind != Kind.CONSTRUCT or value.kind == Kind.RESULT
        if made:
            self.pull()
        if call is not None:
            call.body = None
            settle_call(call, value.message(call.number), plain=self.driver.setting.preparation.plain)
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
            self._state.die(death)  # before anybody hears of it and calls again
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
