"""On a node: the host of one actor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from anyaccel.engines.remote.host import (
    POLL_SECONDS,
    NodeAdapter,
    enter_call,
    find_host,
    make_pickled,
    relay_answer,
    set_log,
    wait_for_answer,
)
from anyaccel.engines.remote.messages import Answer, Order, PoolSpec, Started, make_failure
from anyaccel.errors import BrokenWorkerError, WorkerError
from anyaccel.model import replace
from anyaccel.pool.actor import ActorState
from anyaccel.pool.messages import loads


class ActorHost:
    """Hosts an actor. Each running call occupies a thread of the cluster's process.

    Args:
        spec: A pickled :class:`~anyaccel.engines.remote.messages.PoolSpec`.
        make_node: Makes the adapter of this node, if the pool has no host here yet.
        order: A pickled :class:`Order`.
    """

    def __init__(self, spec: bytes, make_node: Callable[[PoolSpec], NodeAdapter], order: bytes) -> None:
        self._order: Order = loads(order)
        self._gone = threading.Event()
        self._death: BaseException = BrokenWorkerError("it was killed before it had been made")
        self._state: ActorState | None = None
        try:
            self._host = find_host(spec, make_node)
            options = self._host.node.options(self._order)
            self._options = replace(options, concurrency=self._order.concurrency)
        except Exception as error:  # noqa: BLE001 - the caller's pool reports it
            self._death = error
            self._gone.set()

    def started(self) -> Started | Answer:
        """Return the node and the expected devices of the actor, or the failure of the host's construction.

        After the end of the actor, the reason for that is returned as a failure.
        """
        if self._gone.is_set():
            return make_failure(self._death)
        return Started(self._host.node.name, self._host.node.expected(self._options))

    def call(self, method: str, log: str | None, data: bytes, *buffers: bytes) -> Answer:
        """Call a method of the object, or construct the object if the method's name is empty; wait for the answer.

        Returns:
            The worker's answer, unread; a failure if the call could not be run to its end, such as for a closed actor.

        Args:
            method: Name of the method, for messages.
            log: File for the call's output, or None.
            data: The pickled call.
            buffers: Memory that the pickle refers to.
        """
        if not method:
            self._state = _HostedActor(self._host.core, self._order.name, self._options)
            self._state.on_end = self._set_death
        state, body = self._state, make_pickled(data, buffers)
        assert state is not None  # noqa: S101 - the construction comes first
        call = state.prepare(method) if method else state.construction
        if method:
            call.body = body
            relay_answer(call)
            set_log(call, log)
            try:
                state.enter(call)
            except RuntimeError as error:
                return make_failure(error)
        else:
            enter_call(self._host, call, body, log)
        return wait_for_answer(call)._replace(started=self._host.started(call))

    def close(self) -> None:
        """Let the object's process exit after the queued calls; returns at once. No effect before the construction."""
        if self._state is not None:
            self._state.close()

    def stop(self, grace: float) -> None:
        """End the object's process, and return at once; without a process, the actor is over at once.

        Args:
            grace: Seconds between SIGTERM and SIGKILL.
        """
        if self._state is not None:
            self._state.stop(grace)
        else:
            self._gone.set()

    def ended(self, unwanted: Callable[[], bool] = lambda: False) -> Answer:
        """Wait until the object's process and its descendants have exited; return the reason as a failure.

        Args:
            unwanted: Polled meanwhile; once it returns True, the process is killed.
        """
        while not self._gone.wait(POLL_SECONDS):
            if unwanted():
                self.stop(0)
        # The devices are released only when the process has exited, and the cluster counts them by this task.
        while hasattr(self, "_host") and self._has_process():
            time.sleep(POLL_SECONDS / 10)
        return make_failure(self._death)

    def _has_process(self) -> bool:
        """Return whether the local engine still has the actor's worker: until its devices are to be released."""
        member = None if self._state is None else self._state.member
        living: set[object] = set(self._host.core.members)
        return member is not None and member in living

    def _set_death(self, death: BaseException) -> None:
        """Record why the actor is over, and let :meth:`ended` return."""
        self._death = death
        self._gone.set()


class _HostedActor(ActorState):
    """An actor with a report to the host at the end."""

    on_end: Any = None

    def on_gone(self, death: WorkerError) -> None:
        """Fail the construction and the queued calls, and report the death to the host."""
        super().on_gone(death)
        self.on_end(self.death)
