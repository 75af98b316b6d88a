"""On a node: the host of one actor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from anyaccel.engines.remote.host import POLL_SECONDS, HostedCall, NodeAdapter, enter, host_of, pickled, prepare_log
from anyaccel.engines.remote.messages import Answer, Order, PoolSpec, Started, failure
from anyaccel.errors import BrokenWorkerError
from anyaccel.model import replace
from anyaccel.pool.actor import ActorState
from anyaccel.pool.payload import loads


class ActorHost:
    """Hosts one actor. A thread of the cluster's process waits for each call that runs.

    Args:
        spec: A pickled :class:`~anyaccel.engines.remote.messages.PoolSpec`, of its pool.
        make_node: Makes what the cluster knows of this node, for a pool that is new here.
        order: A pickled :class:`Order`.
    """

    def __init__(self, spec: bytes, make_node: Callable[[PoolSpec], NodeAdapter], order: bytes) -> None:
        self._order: Order = loads(order)
        self._gone = threading.Event()
        self._death: BaseException = BrokenWorkerError("it was killed before it had been made")
        self._state: ActorState | None = None
        try:
            self._host = host_of(spec, make_node)
            options = self._host.node.options(self._order)
            self._options = replace(options, concurrency=self._order.concurrency)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self._death = error
            self._gone.set()

    def started(self) -> Started | Answer:
        """Where it is, and on which devices; or why it is not."""
        if self._gone.is_set():
            return failure(self._death)
        return Started(self._host.node.name, self._host.node.expected(self._options))

    def call(self, method: str, log: str | None, data: bytes, *buffers: bytes) -> Answer:
        """Call a method of the object; make it, where the method has no name."""
        if not method:
            self._state = _State(self._host.core, self._order.name, self._options)
            self._state.on_buried = self._bury
        state, body = self._state, pickled(data, buffers)
        assert state is not None  # noqa: S101 - it was made before
        call = state.prepare(method) if method else state.construction
        waiting = HostedCall(call)
        if method:
            call.body = body
            prepare_log(call, log)
            try:
                state.enter(call)
            except RuntimeError as error:
                return failure(error)
        else:
            enter(self._host, call, body, log)
        return waiting.answer()._replace(started=self._host.notice(call))

    def close(self) -> None:
        """Let the object's process end by itself."""
        if self._state is not None:
            self._state.close()

    def stop(self, grace: float) -> None:
        """End the object's process."""
        state = self._state
        member = None if state is None else state.member
        if member is not None:
            member.stop(grace)
        else:
            if state is not None:
                state.stop(0)
            self._gone.set()

    def ended(self, unwanted: Callable[[], bool] = lambda: False) -> Answer:
        """Wait until the object's process and whatever it started have gone; why they have.

        Args:
            unwanted: Whether nobody wants it any more; asked every now and then, and then it is ended.
        """
        while not self._gone.wait(POLL_SECONDS):
            if unwanted():
                self.stop(0)
        while hasattr(self, "_host") and not self._left():
            time.sleep(POLL_SECONDS / 10)
        return failure(self._death)

    def _left(self) -> bool:
        """Whether its process is none of the host's any more."""
        member = None if self._state is None else self._state.member
        living: set[object] = set(self._host.core.members)
        return member is None or member not in living

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
