"""On a node, in a process of the cluster: has calls run by workers of our own and sends their answers back as they are.

The cluster's process is a host only. The user's code runs in a process that was forked for it, whose environment was
complete before any of that code was unpickled. So it takes milliseconds to give each call a fresh process, and whatever
the call does to its process does not matter to the next one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import lru_cache, partial
from typing import Protocol

from anyaccel.engines.remote.messages import Answer, Order, PoolSpec, Started, failure
from anyaccel.errors import BrokenWorkerError
from anyaccel.model import Allocation
from anyaccel.pool.call import BrokenPoolError, Call, Options
from anyaccel.pool.channel import Message, MessageKind
from anyaccel.pool.dispatcher import Broker, LocalEngine
from anyaccel.pool.payload import Pickled, dumps_error, loads
from anyaccel.pool.reactor import reactor

NOTICE_SECONDS = 0.1
"""How long a call runs before its pool is told."""
POLL_SECONDS = 0.2
"""How often to look whether a call is to be ended."""


class NodeAdapter(Protocol):
    """What a cluster knows of a node, for one pool.

    Attributes:
        name: What to call it in messages.
    """

    name: str

    @property
    def broker(self) -> Broker:
        """Where workers get their devices from."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Undo what the cluster does to the environment for each call."""

    def options(self, order: Order) -> Options:
        """How workers are to run a call: on the devices that the cluster has given, or on any that serve it."""
        raise NotImplementedError

    def expected(self, options: Options) -> Allocation | None:
        """What a call holds or is about to, where that is known before it does."""

    def settle(self, core: LocalEngine) -> None:
        """Where nobody else would wait for devices that are on their way back, wait for them."""


class Host:
    """What this process has for one pool."""

    def __init__(self, spec: PoolSpec, node: NodeAdapter) -> None:
        # The caller's modules, as far as this node has them in the same place.
        sys.path += [entry for entry in spec.path if entry not in sys.path and os.path.exists(entry)]
        self.node = node
        self.idle = max(spec.settings.idle, 1.0)
        self.core = LocalEngine(lambda: node.broker, spec.settings)
        self.used = time.monotonic()
        self._notice: tuple[Allocation | None, bytes] = (None, b"")

    def started(self, call: Call) -> Started | None:
        """What to tell the caller of a call that runs, or has run; None when it does not run yet."""
        allocation = call.future.allocation or self.node.expected(call.options)
        return None if allocation is None else Started(self.node.name, allocation)

    def notice(self, call: Call) -> bytes | None:
        """The same, pickled: once for all calls that share a process."""
        allocation, notice = self._notice
        if allocation is None or call.future.allocation is not allocation:
            started = self.started(call)
            if started is None:
                return None
            notice = pickle.dumps(started)
            self._notice = call.future.allocation, notice
        return notice


class HostedCall:
    """A call on its way, and somebody who waits for it."""

    def __init__(self, call: Call) -> None:
        self.call = call
        call.relay = self._relay

    def wait(self, seconds: float) -> bool:
        """Wait until it is over, or for so long; whether it is."""
        with contextlib.suppress(TimeoutError, CancelledError):
            self.call.future.exception(seconds)
        return self.call.future.done()

    def answer(self) -> Answer:
        """What became of it."""
        while not self.wait(POLL_SECONDS):
            pass
        if self.call.future.cancelled():
            return failure(BrokenWorkerError("it was cancelled"))
        try:
            answer: Answer = self.call.future.result()
        except BrokenPoolError as error:
            cause = error.__cause__ or error
            text = "".join(getattr(cause.__cause__, "args", ())[:1])
            return Answer(MessageKind.BROKEN, dumps_error(cause, text).data)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            return failure(error)
        return answer

    def _relay(self, message: Message) -> None:
        self.call.succeed(Answer(message.kind, bytes(message.data), tuple(map(bytearray, message.buffers))))


loaded = lru_cache(maxsize=64)(loads)
"""What comes again with each call of a pool."""
_hosts: dict[str, Host] = {}
_lock = threading.Lock()


def host_of(spec: bytes, make_node: Callable[[PoolSpec], NodeAdapter]) -> Host:
    """The host of this process for a pool; kept while calls keep coming."""
    known: PoolSpec = loaded(spec)
    with _lock:
        host = _hosts.get(known.pool)
        if host is None or host.core.broken is not None:
            host = _hosts[known.pool] = Host(known, make_node(known))
            reactor().call_later(host.idle, partial(_look, known.pool, host))
        host.used = float("inf")
    host.node.refresh()
    return host


def end_host(pool: str) -> None:
    """Let the host of a pool go, and return when its workers have gone."""
    with _lock:
        host = _hosts.pop(pool, None)
    if host is not None:
        host.core.shutdown(wait=True)


def _look(pool: str, host: Host) -> None:
    """Let a host go that has had no calls for a while: its pool may have ended."""
    with _lock:
        left = host.used + host.idle - time.monotonic()
        if left <= 0 and _hosts.get(pool) is host:
            del _hosts[pool]
    if left > 0:
        reactor().call_later(min(left, host.idle), partial(_look, pool, host))
    else:
        host.core.shutdown(wait=False)


def run(
    spec: bytes,
    make_node: Callable[[PoolSpec], NodeAdapter],
    order: bytes,
    log: str | None,
    body: Pickled,
    *,
    ended: Callable[[], bool],
    begun: Callable[[Started], None],
) -> Answer:
    """Run one call, and return what became of it.

    Args:
        spec: What the calls of its pool have in common: a pickled :class:`PoolSpec`.
        make_node: Makes what the cluster knows of this node, for a pool that is new here.
        order: How: a pickled :class:`Order`.
        log: File for its output, or None.
        body: The pickled call.
        ended: Whether nobody wants it any more; asked every now and then.
        begun: Called once when it has run for a while.
    """
    try:
        host, known = host_of(spec, make_node), loaded(order)
        call = Call(known.name, host.node.options(known), host.core.on_cancel)
        waiting = HostedCall(call)
        enter(host, call, body, log)
    except Exception as error:  # noqa: BLE001 - it is the caller's
        return failure(error)
    started = None
    while not waiting.wait(POLL_SECONDS if started else NOTICE_SECONDS):
        if ended():
            call.future.cancel()
        elif started is None and (started := host.started(call)) is not None:
            begun(started)
    host.node.settle(host.core)
    host.used = time.monotonic()
    return waiting.answer()._replace(started=host.notice(call))


def enter(host: Host, call: Call, body: Pickled, log: str | None) -> None:
    """Let our workers run a call, whose output goes to a file."""
    prepare_log(call, log)
    try:
        host.core.enter(call, body)
    except Exception as error:  # noqa: BLE001 - it is the caller's
        call.fail(error)


def prepare_log(call: Call, log: str | None) -> None:
    """Say where the output of a call goes, whose directory the pool knows and this node may not have yet."""
    if log is not None:
        os.makedirs(os.path.dirname(log), exist_ok=True)
        call.log = log


def pickled(data: bytes, buffers: tuple[bytes, ...]) -> Pickled:
    """A call as it was sent."""
    return Pickled(data, [memoryview(each) for each in buffers])
