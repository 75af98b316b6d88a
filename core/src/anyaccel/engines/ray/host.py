"""On a node, in a process of Ray: has calls run by workers of our own, and sends their answers back as they are.

Ray's process is a host only. The user's code runs in a process that was forked for it, whose environment was complete
before any of that code was unpickled. So it takes milliseconds to give each call a fresh process, and whatever the
call does to its process does not matter to the next one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from functools import lru_cache, partial

from anyaccel.engines.ray.connection import import_ray
from anyaccel.engines.ray.given import GivenLeases, UnsharedLeases, plain
from anyaccel.engines.ray.messages import Answer, Order, Spec, failure
from anyaccel.engines.ray.node import Given, given, held_slots, node_inventory, restore_environ
from anyaccel.engines.ray.notices import LOOK_SECONDS, Started, leave, remove, spared
from anyaccel.errors import BrokenWorkerError
from anyaccel.model import Allocation, Inventory
from anyaccel.workers.core import Core
from anyaccel.workers.failures import BrokenPoolError
from anyaccel.workers.launching import CPU
from anyaccel.workers.logs import Logs
from anyaccel.workers.loop import loop
from anyaccel.workers.pickling import Pickled, dumps_error, loads
from anyaccel.workers.tasks import Options, Task
from anyaccel.workers.wire import Kind, Message

POLL_SECONDS = 0.2
"""How often to look whether Ray wants us to stop: it interrupts no wait."""
MARGIN_SECONDS = 5.0
MOST_OPTIONS = 256


class OneLog(Logs):
    """The file that the pool chose for the next call."""

    def __init__(self, path: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.path = path

    def path_for(self, name: str) -> str:  # noqa: ARG002
        """That file."""
        return self.path


class Host:
    """What this process of Ray has for one pool."""

    def __init__(self, spec: Spec) -> None:
        ray = import_ray()
        restore_environ()
        # The caller's modules, as far as this node has them in the same place.
        sys.path += [entry for entry in spec.path if entry not in sys.path and os.path.exists(entry)]
        context = ray.get_runtime_context()
        self.node = f"{ray.util.get_node_ip_address()} ({context.get_node_id()[:8]})"
        self.inventory = node_inventory()
        self.leases: GivenLeases | UnsharedLeases
        if spec.shared:
            self.leases = GivenLeases(self.inventory, f"Ray job {context.get_job_id()}")
        else:
            self.leases = UnsharedLeases(self.inventory)
        self.grace, self.idle = spec.grace, spec.idle
        self.core = Core(
            lambda: self.leases,
            spec.preparation,
            preload=spec.preload,
            max_workers=None,
            grace=spec.grace,
            idle=spec.idle,
            logs=None,
        )
        self.used = time.monotonic()
        self._options: dict[object, Options] = {}
        self._notice: tuple[Allocation | None, bytes] = (None, b"")

    def options(self, order: Order) -> Options:
        """How our workers are to run it: on the devices that Ray has given to us."""
        if order.request is None:
            return Options.of(max_calls=order.max_calls, timeout=order.timeout)
        slots = held_slots()
        key = (order, tuple((name, tuple(held)) for name, held in slots.items()))
        if key not in self._options:
            if len(self._options) > MOST_OPTIONS:
                self._options.clear()
            self._options[key] = self._options_with(order, given(order.request, order.resources, slots, self.inventory))
        return self._options[key]

    def _options_with(self, order: Order, needs: Given) -> Options:
        # Nobody could be told to give devices back that are kept where leases are not shared.
        max_calls = order.max_calls if isinstance(self.leases, GivenLeases) else 1
        return Options.of(needs=needs, max_calls=max_calls, timeout=order.timeout)

    def log_to(self, path: str | None) -> None:
        """Say where the output of the next call goes."""
        self.core.logs = None if path is None else OneLog(path)

    def started(self, task: Task) -> Started:
        """What to tell the caller of a call that runs, or has run."""
        needs = task.options.needs
        allocation = task.future.allocation
        if allocation is None and isinstance(needs, Given):
            allocation = Allocation(id="ray", request=plain(needs), grants=needs.grants)
        return Started(self.node, allocation or CPU)

    def notice(self, task: Task) -> bytes:
        """The same, pickled: once for all calls that share a process."""
        allocation, notice = self._notice
        if allocation is None or task.future.allocation is not allocation:
            notice = pickle.dumps(self.started(task))
            self._notice = task.future.allocation, notice
        return notice

    def settle(self) -> None:
        """Where nobody else would wait for devices that are on their way back, wait for them."""
        if isinstance(self.leases, UnsharedLeases):
            self.leases.free.wait(self.grace + MARGIN_SECONDS)


class Waiting:
    """A call on its way, and somebody who waits for it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        task.relay = self._relay

    def wait(self, seconds: float) -> bool:
        """Wait until it is over, or for so long; whether it is."""
        with contextlib.suppress(TimeoutError, CancelledError):
            self.task.future.exception(seconds)
        return self.task.future.done()

    def answer(self) -> Answer:
        """What became of it."""
        while not self.wait(POLL_SECONDS):
            pass
        try:
            answer: Answer = self.task.future.result()
        except BrokenPoolError as error:
            cause = error.__cause__ or error
            text = "".join(getattr(cause.__cause__, "args", ())[:1])
            return Answer(Kind.BROKEN, dumps_error(cause, text).data)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            return failure(error)
        return answer

    def _relay(self, message: Message) -> None:
        self.task.succeed(Answer(message.kind, bytes(message.data), tuple(map(bytearray, message.buffers))))


_loaded = lru_cache(maxsize=64)(loads)
"""What comes again with each call of a pool."""
_hosts: dict[str, Host] = {}
_lock = threading.Lock()


def host_of(spec: bytes) -> Host:
    """The host of this process for a pool; kept while calls keep coming."""
    loaded: Spec = _loaded(spec)
    with _lock:
        host = _hosts.get(loaded.pool)
        if host is None or host.core.broken is not None:
            host = _hosts[loaded.pool] = Host(loaded)
            loop().call_later(max(loaded.idle, 1.0), partial(_look, loaded.pool, host))
        host.used = float("inf")
    return host


def _look(pool: str, host: Host) -> None:
    """Let a host go that has had no calls for a while: its pool may have ended."""
    with _lock:
        left = host.used + max(host.idle, 1.0) - time.monotonic()
        if left <= 0 and _hosts.get(pool) is host:
            del _hosts[pool]
    if left > 0:
        loop().call_later(min(left, max(host.idle, 1.0)), partial(_look, pool, host))
    else:
        host.core.shutdown(wait=False)


def run(spec: bytes, call: bytes, data: bytes, *buffers: bytes) -> bytes:
    """Run one call: the body of our task of Ray. Ray takes bytes as they are, which saves time.

    Args:
        spec: A pickled :class:`Spec`.
        call: Pickled: a pickled :class:`Order`; the key of the notice that the call leaves when it takes a while; and
            where its output goes, or None.
        data: What to call, pickled, with
        buffers: what it refers to.

    Returns:
        A pickled :class:`Answer`.
    """
    order, key, log = loads(call)
    return pickle.dumps(_run(spec, _loaded(order), key, log, Pickled(data, [memoryview(each) for each in buffers])))


def _run(spec: bytes, order: Order, key: str, log: str | None, body: Pickled) -> Answer:
    with uninterrupted() as interrupted:
        try:
            host = host_of(spec)
            restore_environ()
            host.log_to(log)
            options = host.options(order)
            waiting = Waiting(Task(order.name, options, host.core.on_cancel))
            enter(host, waiting.task, body)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            return failure(error)
        noticed = False
        while not waiting.wait(POLL_SECONDS if noticed else LOOK_SECONDS):
            if interrupted.is_set():
                interrupted.clear()
                if not spared(key):
                    waiting.task.future.cancel()
            elif not noticed:
                leave(key, host.started(waiting.task))
                noticed = True
        host.settle()
        host.used = time.monotonic()
        if noticed:
            remove(key)
        if waiting.task.future.cancelled():
            return failure(BrokenWorkerError("it was cancelled"))
        return waiting.answer()._replace(started=host.notice(waiting.task))


@contextlib.contextmanager
def uninterrupted() -> Iterator[threading.Event]:
    """Take note when Ray cancels the task of this thread, instead of being interrupted at any line."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def enter(host: Host, task: Task, body: Pickled) -> None:
    """Let our workers run a call."""
    try:
        host.core.enter(task, body)
    except Exception as error:  # noqa: BLE001 - it is the caller's
        task.fail(error)


def survey() -> Inventory:
    """What is on this node."""
    return node_inventory()
