"""On a node, in a process of the cluster: run calls and actors in workers of our own, and return the answers unread.

The cluster's process is only the host. User code runs in a process that was forked for it, whose environment was
complete before any user code was unpickled. So a fresh process for each call takes milliseconds, and no call finds
traces of an earlier one.
"""

# Methods without a default have a docstring and no body: each cluster implements them.
# pyright: reportReturnType=false

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, wait
from functools import lru_cache, partial
from typing import Protocol

from anyaccel.errors import BrokenWorkerError
from anyaccel.model import Allocation, replace
from anyaccel.pool import (
    ActorGroup,
    BrokenPoolError,
    Broker,
    Call,
    LocalEngine,
    Message,
    MessageKind,
    Options,
    Pickled,
    dumps_error,
    find_reactor,
    loads,
)

from anyaccel_cluster.cluster import Answer, Order, PoolSpec, Started, make_failure

NOTICE_SECONDS = 0.1
"""Seconds that a call runs before its pool is told."""
POLL_SECONDS = 0.2
"""Interval in seconds between two checks whether a call was cancelled."""
END_POLL_SECONDS = 0.05
"""Interval in seconds between two checks whether an actor is over."""


class NodeAdapter(Protocol):
    """A node of the cluster, seen by a pool.

    Attributes:
        name: Name of the node in messages.
    """

    name: str

    @property
    def broker(self) -> Broker:
        """The broker of the node's devices."""

    def refresh(self) -> None:
        """Undo what the cluster writes into the environment for each call."""

    def options(self, order: Order) -> Options:
        """Return the options of a call: with the assigned devices, or with any suitable devices."""

    def expected(self, options: Options) -> Allocation | None:
        """Return the future allocation of a call, or None if unknown before the start."""

    def settle(self, core: LocalEngine) -> None:
        """Wait for the release of devices, if no lease makes the next call wait."""


class Host:
    """The local engine of this process for one pool.

    Attributes:
        users: Number of calls and actors that use it now.
        used: Monotonic time at which it was used last.
    """

    def __init__(self, spec: PoolSpec, node: NodeAdapter) -> None:
        # The module path of the caller, as far as this node has the same folders.
        sys.path += [entry for entry in spec.path if entry not in sys.path and os.path.exists(entry)]
        self.node = node
        self.idle = max(spec.settings.idle, 1.0)
        self.core = LocalEngine(lambda: node.broker, spec.settings)
        self.core.set_outcome = relay_answer
        self.users = 0
        self.used = time.monotonic()

    def leave(self) -> None:
        """Count a call or an actor as ended."""
        with _lock:
            self.users -= 1
            self.used = time.monotonic()

    def started(self, call: Call) -> Started | None:
        """Return the node and the devices of a call, expected or held; None if they are not known yet."""
        allocation = call.future.allocation or self.node.expected(call.options)
        return None if allocation is None else Started(self.node.name, allocation)


def relay_answer(call: Call, message: Message) -> None:
    """Make a copy of the worker's answer, unread, the result of its call."""
    call.succeed(Answer(message.kind, bytes(message.data), tuple(map(bytearray, message.buffers))))


def wait_for_answer(call: Call) -> Answer:
    """Wait for the end of a call of :func:`enter_call`, and return the worker's answer, unread.

    A call without such an answer gets one here: a cancelled or failed call a failure, and a call of a broken pool the
    exception of the worker's setup, of the kind BROKEN.
    """
    try:
        answer: Answer = call.future.result()
    except CancelledError:
        return make_failure(BrokenWorkerError("it was cancelled"))
    except BrokenPoolError as error:
        cause = error.__cause__ or error
        text = "".join(getattr(cause.__cause__, "args", ())[:1])
        return Answer(MessageKind.BROKEN, dumps_error(cause, text).data)
    except Exception as error:  # noqa: BLE001 - the caller's pool reports it
        return make_failure(error)
    return answer


load_cached = lru_cache(maxsize=64)(loads)
"""Unpickle what comes again with each call of a pool."""
_hosts: dict[str, Host] = {}
_lock = threading.Lock()


def find_host(spec: bytes, make_node: Callable[[PoolSpec], NodeAdapter]) -> Host:
    """Return the host of a pool in this process; make a host if there is none, or the present one is broken.

    A new host is closed once it has been idle. The caller counts as a user until :meth:`Host.leave`. The node's
    environment is refreshed.
    """
    known: PoolSpec = load_cached(spec)
    with _lock:
        host = _hosts.get(known.pool)
        if host is None or host.core.broken is not None:
            host = _hosts[known.pool] = Host(known, make_node(known))
            find_reactor().call_later(host.idle, partial(_close_if_idle, known.pool, host))
        host.users += 1
    host.node.refresh()
    return host


def close_host(pool: str) -> None:
    """Shut down the host of a pool, and return when its workers have exited; no effect without a host."""
    with _lock:
        host = _hosts.pop(pool, None)
    if host is not None:
        host.core.shutdown(wait=True)


def _close_if_idle(pool: str, host: Host) -> None:
    """Shut down a host without users for its idle time: its pool may have died without a word.

    Else look again when the host may be idle long enough.
    """
    with _lock:
        left = host.idle if host.users else host.used + host.idle - time.monotonic()
        if left <= 0 and _hosts.get(pool) is host:
            del _hosts[pool]
    if left > 0:
        find_reactor().call_later(left, partial(_close_if_idle, pool, host))
    else:
        host.core.shutdown(wait=False)


def run_call(
    spec: bytes,
    make_node: Callable[[PoolSpec], NodeAdapter],
    order: bytes,
    log: str | None,
    body: Pickled,
    *,
    ended: Callable[[], bool],
    begun: Callable[[Started], None],
) -> Answer:
    """Run a call, wait for its end, and return the worker's answer, unread; exceptions become failures.

    Args:
        spec: A pickled :class:`PoolSpec`.
        make_node: Makes the adapter of this node, if the pool has no host here yet.
        order: A pickled :class:`Order`.
        log: File for the call's output, or None.
        body: The pickled call.
        ended: Polled while the call runs; the call is cancelled once it returns True.
        begun: Called once when the call has run for :data:`NOTICE_SECONDS`.
    """
    try:
        host = find_host(spec, make_node)
    except Exception as error:  # noqa: BLE001 - the caller's pool reports it
        return make_failure(error)
    try:
        try:
            known = load_cached(order)
            call = Call(known.name, host.node.options(known), host.core.on_cancel)
            enter_call(call, log, partial(host.core.enter, call, body))
        except Exception as error:  # noqa: BLE001 - the caller's pool reports it
            return make_failure(error)
        started = None
        while not wait([call.future], POLL_SECONDS if started else NOTICE_SECONDS).done:
            if ended():
                call.future.cancel()
            elif started is None and (started := host.started(call)) is not None:
                begun(started)
        host.node.settle(host.core)
        return wait_for_answer(call)._replace(started=host.started(call))
    finally:
        host.leave()


def enter_call(call: Call, log: str | None, enter: Callable[[], object]) -> None:
    """Queue a call; an exception fails the call.

    Args:
        call: The call.
        log: File for the output, or None. Its directory is made, which may exist only where the pool is.
        enter: Queues the call.
    """
    try:
        if log is not None:
            os.makedirs(os.path.dirname(log), exist_ok=True)
            call.log = log
        enter()
    except Exception as error:  # noqa: BLE001 - the future reports it
        call.fail(error)


class ActorHost:
    """Hosts an actor. Each running call occupies a thread of the cluster's process.

    Args:
        spec: A pickled :class:`~anyaccel_cluster.cluster.PoolSpec`.
        make_node: Makes the adapter of this node, if the pool has no host here yet.
        order: A pickled :class:`Order`.
    """

    def __init__(self, spec: bytes, make_node: Callable[[PoolSpec], NodeAdapter], order: bytes) -> None:
        self._order: Order = loads(order)
        self._unmade: BaseException | None = None  # why there is no object and will be none
        self._group: ActorGroup | None = None
        try:
            self._host = find_host(spec, make_node)
            options = self._host.node.options(self._order)
            self._options = replace(options, concurrency=self._order.concurrency)
        except Exception as error:  # noqa: BLE001 - the caller's pool reports it
            self._unmade = error

    def started(self) -> Started | Answer:
        """Return the node and the expected devices of the actor, or the failure of the host's construction.

        An actor that was stopped before the construction of its object is a failure, too.
        """
        if self._unmade is not None:
            return make_failure(self._unmade)
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
        body = Pickled(data, buffers)
        if not method:
            self._group = ActorGroup(self._host.core, self._order.name, self._options)
            call = self._group.begun[0].construction
            enter_call(call, log, partial(self._host.core.enter, call, body))
        else:
            assert self._group is not None  # noqa: S101 - the construction comes first
            call = self._group.prepare(method)
            call.body = body
            enter_call(call, log, partial(self._group.enter, call))
        return wait_for_answer(call)._replace(started=self._host.started(call))

    def close(self) -> None:
        """Let the object's process exit after the queued calls; returns at once. No effect before the construction."""
        if self._group is not None:
            self._group.close()

    def stop(self, grace: float) -> None:
        """End the object's process, and return at once; without a process, the actor is over at once.

        Args:
            grace: Seconds between SIGTERM and SIGKILL.
        """
        if self._group is not None:
            self._group.stop(grace)
        else:
            self._unmade = BrokenWorkerError("it was killed before it had been made")

    def ended(self, unwanted: Callable[[], bool] = lambda: False) -> Answer:
        """Wait until the object's process and its descendants have exited; return the reason as a failure.

        The host of the pool may be closed then, if nothing else uses it. To be called once.

        Args:
            unwanted: Polled meanwhile; once it returns True, the process is killed.
        """
        while (death := self._find_death()) is None:
            if unwanted():
                self.stop(0)
            time.sleep(END_POLL_SECONDS)
        if hasattr(self, "_host"):
            self._host.leave()
        return make_failure(death)

    def _find_death(self) -> BaseException | None:
        """Return why the actor is over; None as long as its process lives, or may still be made.

        The process counts until its devices are to be released, because the cluster counts these by this task.
        """
        if self._group is None:
            return self._unmade
        member = self._group.begun[0].member
        return None if member in self._host.core.members else self._group.death
