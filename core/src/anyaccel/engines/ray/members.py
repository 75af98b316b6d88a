"""Calls and actors that Ray has been asked to place, as their pool sees them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from anyaccel.engines.ray.messages import FAILED, Answer
from anyaccel.engines.ray.notices import Started, remove, spare, spare_no_more
from anyaccel.engines.ray.remote import Remote
from anyaccel.errors import BrokenWorkerError, WorkerError
from anyaccel.workers.actors import ActorMember
from anyaccel.workers.failures import BrokenPoolError
from anyaccel.workers.loop import loop
from anyaccel.workers.member import Member
from anyaccel.workers.pickling import Pickled, loads
from anyaccel.workers.tasks import Options, Task, exception_in, settle_task
from anyaccel.workers.wire import Kind, Message

if TYPE_CHECKING:
    from anyaccel.engines.ray.engine import RayEngine


class RemoteCall(Remote, Member):
    """A call of a function."""

    __slots__ = ("_ref", "_spared", "key", "started")

    def __init__(self, engine: RayEngine, options: Options, task: Task) -> None:
        super().__init__(engine, options, None, task)  # type: ignore[arg-type]
        self.started: Started | None = None
        self._ref: Any = None
        self._spared = False
        self.key = engine.new_key()

    def launch(self, task: Task) -> None:
        """Ask Ray to place it."""
        engine = self.engine
        try:
            remote, order = self.ask(task)
            body = task.body or Pickled(b"", [])
            if not task.may_be_retried:
                task.body = None
            if engine.logs is not None:
                task.future.log = engine.logs.path_for(task.name)
            call = pickle.dumps((order, self.key, task.future.log))
            ref = remote.remote(engine.spec, call, body.data, *map(bytes, body.buffers))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            task.fail(error)
            self.end()
            return
        task.worker = self
        self.expect_answer(ref)
        if self.stopped:
            self.stop(0)

    def stop(self, grace: float, *, answer: bool = True) -> None:  # noqa: ARG002
        """Let Ray tell its host, which gives it the pool's time of grace."""
        self.ending = self.stopped = True
        if (ref := self._ref) is not None:
            if self._spared:
                spare_no_more(self.key)
            self.engine.cancel(ref)

    def recall(self) -> None:
        """Cancel it unless it runs: its host knows best."""
        if (ref := self._ref) is not None and not self.begun:
            self._spared = True
            spare(self.key)
            self.engine.cancel(ref)

    def leave(self) -> None:
        """It ends with its answer."""

    def on_value(self, value: bytes) -> None:
        """Its host has an answer."""
        news: Answer = loads(value)
        if news.started is not None:
            self.on_started(_notice(news.started))
        task = self._take()
        if task is not None and news.kind == FAILED:
            self._fail(task, loads(news.data))
        elif task is not None and news.kind == Kind.BROKEN:
            self.engine.break_off(exception_in(message_in(news), plain=self.engine.preparation.plain))
            task.fail(BrokenPoolError(str(self.engine.broken)))
        elif task is not None:
            settle_task(task, message_in(news), plain=self.engine.preparation.plain)
        self.end()

    def on_lost(self, error: BaseException) -> None:
        """Ray has no answer."""
        death = self.lost(error)
        if self.started is not None:
            remove(self.key)
        task = self._take()
        if task is not None and self._spared and isinstance(error, self.engine.ray.exceptions.TaskCancelledError):
            task.future.cancel()
        elif task is not None:
            self._fail(task, death)
        self.end()

    def end(self) -> None:
        """It is over."""
        if self._spared:
            spare_no_more(self.key)
        self.engine.discard(self)

    def _take(self) -> Task | None:
        with self.core.lock:
            task, self.task = self.task, None
        return task

    def _fail(self, task: Task, error: BaseException) -> None:
        if isinstance(error, BrokenWorkerError) and not self.stopped and task.may_be_retried:
            self.engine.retry(task)
        else:
            task.fail(error)


class RemoteActor(Remote, ActorMember):
    """An actor: our object, in a process of which an actor of Ray is the host."""

    __slots__ = ("_actor", "_buried", "_ref", "started")

    def __init__(self, engine: RayEngine, options: Options, task: Task) -> None:
        super().__init__(engine, options, None, task)  # type: ignore[arg-type]
        self.started: Started | None = None
        self._actor: Any = None
        self._ref: Any = None
        self._buried = False

    def launch(self, task: Task) -> None:
        """Ask Ray to place it."""
        engine = self.engine
        try:
            remote, order = self.ask(task)
            self._actor = remote.remote(engine.spec, order)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            task.fail(error)
            self._bury(BrokenWorkerError(f"it could not be placed: {error}"))
            return
        engine.follow(self._actor.started.remote(), self._on_placed, self.on_lost)
        if self.stopped:
            self.stop(0)

    def run(self, task: Task) -> None:
        """Send it a call."""
        body, task.body = task.body, None
        if body is None:  # cancelled just now
            return
        task.worker = self
        task.future.allocation = self.started.allocation if self.started else None
        if self.engine.logs is not None:
            task.future.log = self.engine.logs.path_for(task.name)
        arguments = (task.future.log, body.data, *map(bytes, body.buffers))
        if task.kind == Kind.CONSTRUCT:
            ref = self._actor.construct.remote(*arguments)
        else:
            ref = self._actor.call.remote(task.name.rpartition(".")[2], *arguments)
        self.expect_answer(ref)

    def stop(self, grace: float, *, answer: bool = True) -> None:  # noqa: ARG002
        """End its process."""
        self.ending = self.stopped = True
        if self.started is not None:
            self.engine.tell(self._actor.stop, grace)
        elif self._actor is not None:
            self.engine.kill(self._actor)

    def recall(self) -> None:
        """Cancel its making, if nobody is at that."""
        if self.started is None and self.task is not None:
            self.task.future.cancel()

    def finish(self) -> None:
        """Let its process end by itself; if that takes too long, end it."""
        self.ending = True
        if self._buried:
            return
        self.engine.tell(self._actor.close)
        grace = self.core.grace
        self.timer = loop().call_later(max(grace, 1.0), partial(self.stop, grace))

    def _on_placed(self, news: Started | Answer) -> None:
        if isinstance(news, Answer):
            self._bury(loads(news.data))
            return
        self.on_started(news)
        self.engine.follow(self._actor.ended.remote(), self._on_ended, self.on_lost)
        task = self.task
        if self.stopped:
            self.stop(0)
        elif task is not None:
            self.run(task)

    def on_value(self, value: Answer) -> None:
        """Its host has an answer."""
        news, task = value, self.task
        if news.kind == FAILED:  # and it is about to end
            error = loads(news.data)
            if isinstance(error, BrokenWorkerError):
                self._bury(error)
                return
            with self.core.lock:
                self.task = None
            if task is not None:
                task.fail(error)
        elif news.kind == Kind.BROKEN:
            self.engine.break_off(exception_in(message_in(news), plain=self.engine.preparation.plain))
        else:
            if task is not None and news.started is not None:
                task.future.allocation = _notice(news.started).allocation
            number = 0 if task is None else task.number  # its host knows it by another one
            self.on_message(None, message_in(news, number))  # type: ignore[arg-type]

    def _on_ended(self, news: Answer) -> None:
        self._bury(loads(news.data))

    def on_lost(self, error: BaseException) -> None:
        """Ray has no answer, and never will."""
        early = self.stopped and self.started is None
        self._bury(BrokenWorkerError("it was killed before it had been made") if early else self.lost(error))

    def _bury(self, death: WorkerError) -> None:
        with self.core.lock:
            buried, self._buried = self._buried, True
            task, self.task = self.task, None
        if buried:
            return
        self._state.die(death)  # before anybody hears of it and calls again
        if self.timer is not None:
            self.timer.cancel()
        if task is not None:
            task.fail(death)
        self._state.bury(death)
        if self._actor is not None:
            self.engine.kill(self._actor)
        self.engine.discard(self)


_notice: Callable[[bytes], Started] = lru_cache(maxsize=64)(loads)
"""Of calls that share a process, all notices are the same."""


def message_in(answer: Answer, number: int = 0) -> Message:
    """An answer as a worker gave it to its host."""
    return Message(answer.kind, answer.data, [memoryview(each) for each in answer.buffers], [], number)
