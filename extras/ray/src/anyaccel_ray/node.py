"""On a node: what Ray runs there, which is our task, our actor, and a look at the devices."""

from __future__ import annotations

import contextlib
import pickle
import signal
import threading
import time
from collections.abc import Iterator

from anyaccel.engines.remote import ActorHost, Order, PoolSpec, Started, make_pickled, run_call
from anyaccel.model import Allocation, Inventory
from anyaccel.pool import CPU, LocalEngine, Options, loads

from anyaccel_ray.connection import import_ray
from anyaccel_ray.given import Given, check_known, given, given_broker, held_slots, plain
from anyaccel_ray.notices import leave, remove, spared
from anyaccel_ray.snapshot import node_inventory, restore_environ

MARGIN_SECONDS = 5.0
_SETTLE_SECONDS = 0.005
MOST_OPTIONS = 256


class RayNodeAdapter:
    """What Ray knows of this node, for one pool; see :class:`~anyaccel.engines.remote.host.NodeAdapter`."""

    def __init__(self, spec: PoolSpec) -> None:
        ray = import_ray()
        restore_environ()
        context = ray.get_runtime_context()
        self.name = f"{ray.util.get_node_ip_address()} ({context.get_node_id()[:8]})"
        self._inventory = node_inventory()
        self._shared = spec.settings.shared
        self.broker = given_broker(self._inventory, shared=spec.settings.shared, note=f"Ray job {context.get_job_id()}")
        self._grace = spec.settings.grace
        self._options: dict[object, Options] = {}

    def refresh(self) -> None:
        """Undo what Ray has written into the environment."""
        restore_environ()

    def options(self, order: Order) -> Options:
        """How workers are to run it: on the devices that Ray has given to us."""
        if order.request is None:
            return Options.make(max_calls=order.max_calls, timeout=order.timeout)
        slots = held_slots()
        key = (order, tuple((name, tuple(held)) for name, held in slots.items()))
        if key not in self._options:
            if len(self._options) > MOST_OPTIONS:
                self._options.clear()
            needs = given(order.request, order.resources, slots, self._inventory)
            if not self._shared:
                check_known(needs)
            # Nobody could be told to give devices back that are kept where leases are not shared.
            max_calls = order.max_calls if self._shared else 1
            self._options[key] = Options.make(needs=needs, max_calls=max_calls, timeout=order.timeout)
        return self._options[key]

    def expected(self, options: Options) -> Allocation | None:
        """What Ray has given."""
        needs = options.needs
        if not isinstance(needs, Given):
            return CPU
        return Allocation(id="ray", request=plain(needs), grants=needs.grants)

    def settle(self, core: LocalEngine) -> None:
        """Where nobody else would wait for devices that are on their way back, wait for them."""
        end = time.monotonic() + self._grace + MARGIN_SECONDS
        while not self._shared and any(member.lease for member in tuple(core.members)) and time.monotonic() < end:
            time.sleep(_SETTLE_SECONDS)


def run(spec: bytes, call: bytes, data: bytes, *buffers: bytes) -> bytes:
    """Run one call. Ray takes bytes as they are, which saves time.

    Args:
        spec: A pickled :class:`~anyaccel.engines.remote.messages.PoolSpec`.
        call: Pickled: a pickled :class:`~anyaccel.engines.remote.messages.Order`; the key of the notice that the call
            leaves when it takes a while; and where its output goes, or None.
        data: What to call, pickled, with
        buffers: what it refers to.

    Returns:
        A pickled :class:`~anyaccel.engines.remote.messages.Answer`.
    """
    order, key, log = loads(call)
    noticed = False

    def begun(started: Started) -> None:
        nonlocal noticed
        leave(key, started)
        noticed = True

    def ended() -> bool:
        if not interrupted.is_set():
            return False
        interrupted.clear()
        return not spared(key)

    with _uninterrupted() as interrupted:
        answer = run_call(spec, RayNodeAdapter, order, log, make_pickled(data, buffers), ended=ended, begun=begun)
        if noticed:
            remove(key)
    return pickle.dumps(answer)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[threading.Event]:
    """Take note when Ray cancels the task of this thread, instead of being interrupted at any line."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class RayActorHost(ActorHost):
    """The class of our actors of Ray."""

    def __init__(self, spec: bytes, order: bytes) -> None:
        super().__init__(spec, RayNodeAdapter, order)


def survey() -> Inventory:
    """What is on this node."""
    return node_inventory()
