"""On a node: the host of one actor."""

from __future__ import annotations

import threading
import time
from typing import Any

from anyaccel.engines.ray.host import POLL_SECONDS, Host, Waiting, enter
from anyaccel.engines.ray.messages import Answer, Order, failure
from anyaccel.engines.ray.notices import Started
from anyaccel.errors import BrokenWorkerError
from anyaccel.workers.actors import ActorState
from anyaccel.workers.pickling import Pickled, loads
from anyaccel.workers.tasks import Task


class ActorHost:
    """Hosts one actor: the class of our actors of Ray. Its methods run in threads, one call of the object at a time."""

    def __init__(self, spec: bytes, order: bytes) -> None:
        self._order: Order = loads(order)
        self._gone = threading.Event()
        self._death: BaseException = BrokenWorkerError("it was killed before it had been made")
        self._state: ActorState | None = None
        try:
            self._host = Host(loads(spec))
            self._options = self._host.options(self._order)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self._death = error
            self._gone.set()

    def started(self) -> Started | Answer:
        """Where it is, and on which devices; or why it is not."""
        if self._gone.is_set():
            return failure(self._death)
        return self._host.started(Task(self._order.name, self._options, self._host.core.on_cancel))

    def construct(self, log: str | None, data: bytes, *buffers: bytes) -> Answer:
        """Make the object."""
        self._host.log_to(log)
        self._state = state = _State(self._host.core, self._order.name, self._options)
        state.on_buried = self._bury
        waiting = Waiting(state.construction)
        enter(self._host, state.construction, Pickled(data, [memoryview(each) for each in buffers]))
        return waiting.answer()._replace(started=self._host.notice(waiting.task))

    def call(self, method: str, log: str | None, data: bytes, *buffers: bytes) -> Answer:
        """Call a method of the object."""
        assert self._state is not None  # noqa: S101 - it was made before
        self._host.log_to(log)
        task = self._state.task(method)
        task.body = Pickled(data, [memoryview(each) for each in buffers])
        waiting = Waiting(task)
        try:
            self._state.enter(task)
        except RuntimeError as error:
            return failure(error)
        return waiting.answer()._replace(started=self._host.notice(waiting.task))

    def close(self) -> None:
        """Let the object's process end by itself."""
        if self._state is not None:
            self._state.close()

    def stop(self, grace: float) -> None:
        """End the object's process."""
        member = None if self._state is None else self._state.member
        if member is not None:
            member.stop(grace)
        else:
            self._gone.set()

    def ended(self) -> Answer:
        """Wait until the object's process and whatever it started have gone; why they have."""
        self._gone.wait()
        while hasattr(self, "_host") and self._host.core.members:
            time.sleep(POLL_SECONDS / 10)
        return failure(self._death)

    def _bury(self, death: BaseException) -> None:
        self._death = death
        self._gone.set()


class _State(ActorState):
    """An actor that says when it has gone."""

    on_buried: Any = None

    def bury(self, death: Any) -> None:
        """It has gone."""
        super().bury(death)
        self.on_buried(self.death)
