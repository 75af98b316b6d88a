"""On a node: the tasks and the actor of ours that Ray runs there."""

from __future__ import annotations

import contextlib
import pickle
import signal
import threading
import time
from collections.abc import Iterator

from anyaccel.model import Allocation, Inventory
from anyaccel.pool import CPU, LocalEngine, Options, Pickled, loads
from anyaccel_cluster import ActorHost, Order, PoolSpec, Started, run_call

from anyaccel_ray.connection import import_ray
from anyaccel_ray.given import Given, check_known, given_broker, held_slots, identify_devices, plain
from anyaccel_ray.notices import leave, remove
from anyaccel_ray.snapshot import node_inventory, restore_environ

MARGIN_SECONDS = 5.0
"""Seconds beyond the grace period that a call waits for the release of its devices."""
_SETTLE_SECONDS = 0.005
MOST_OPTIONS = 256
"""Maximum number of options that are kept for calls with the same order and devices."""


class RayNodeAdapter:
    """This node of Ray, seen by a pool; see :class:`~anyaccel_cluster.host.NodeAdapter`."""

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
        """Restore the environment that this process was started with."""
        restore_environ()

    def options(self, order: Order) -> Options:
        """Return the options of a call: with the devices that Ray has assigned."""
        if order.request is None:
            return Options(max_calls=order.max_calls, timeout=order.timeout)
        slots = held_slots()
        key = (order, tuple((name, tuple(held)) for name, held in slots.items()))
        if key not in self._options:
            if len(self._options) > MOST_OPTIONS:
                self._options.clear()
            needs = identify_devices(order.request, order.resources, slots, self._inventory)
            if not self._shared:
                check_known(needs)
            # Without shared leases, no other process could ask an idle worker for its devices.
            max_calls = order.max_calls if self._shared else 1
            self._options[key] = Options(needs=needs, max_calls=max_calls, timeout=order.timeout)
        return self._options[key]

    def expected(self, options: Options) -> Allocation | None:
        """Return the devices assigned by Ray."""
        needs = options.needs
        if not isinstance(needs, Given):
            return CPU
        return Allocation(id="ray", request=plain(needs), grants=needs.grants)

    def settle(self, core: LocalEngine) -> None:
        """Wait for the release of devices if leases are not shared: the next call finds no lease to wait for."""
        end = time.monotonic() + self._grace + MARGIN_SECONDS
        while not self._shared and any(member.ids for member in tuple(core.members)) and time.monotonic() < end:
            time.sleep(_SETTLE_SECONDS)


def run(spec: bytes, call: bytes, data: bytes, *buffers: bytes) -> bytes:
    """Run a call: the function of our task. The arguments are bytes, which Ray does not pickle again.

    Args:
        spec: A pickled :class:`~anyaccel_cluster.cluster.PoolSpec`.
        call: A pickled tuple: a pickled :class:`~anyaccel_cluster.cluster.Order`, the key of the call, and the
            path of its log or None.
        data: The pickled function and arguments.
        buffers: Buffers that the pickle refers to.

    Returns:
        A pickled :class:`~anyaccel_cluster.cluster.Answer`.
    """
    order, key, log = loads(call)
    noticed = False

    def begun(started: Started) -> None:
        nonlocal noticed
        leave(key, started)
        noticed = True

    with _uninterrupted() as interrupted:
        body = Pickled(data, buffers)
        answer = run_call(spec, RayNodeAdapter, order, log, body, ended=interrupted.is_set, begun=begun)
        if noticed:
            remove(key)
    return pickle.dumps(answer)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[threading.Event]:
    """Context in which a cancellation by Ray, which sends SIGINT, sets an event instead of raising in our code."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class RayActorHost(ActorHost):
    """The class of our actors on Ray."""

    def __init__(self, spec: bytes, order: bytes) -> None:
        super().__init__(spec, RayNodeAdapter, order)


def survey() -> Inventory:
    """Return the inventory of this node."""
    return node_inventory()
