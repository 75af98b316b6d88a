"""On a node: what is on it, and which devices Ray has given to the call that runs in this process."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from anyaccel.engines.ray.connection import import_ray
from anyaccel.engines.ray.labels import PREDEFINED, UNIT_VARIABLE, by_resource, own_unit_instances
from anyaccel.engines.ray.snapshot import VARIABLE as SNAPSHOT_VARIABLE
from anyaccel.engines.ray.snapshot import read_snapshot
from anyaccel.engines.remote.given import Given, check_known, given_broker, plain
from anyaccel.engines.remote.messages import Order, Spec
from anyaccel.errors import WorkerStartError
from anyaccel.inventory.detect import detect
from anyaccel.model import UNITS_PER_DEVICE, Allocation, Device, Grant, Inventory, Request
from anyaccel.pool.call import Options
from anyaccel.pool.core import Core
from anyaccel.pool.launching import CPU
from anyaccel.scheduler.choice import share
from anyaccel.scheduler.serving import serves

Slots = Mapping[str, Sequence[tuple[int, float]]]
"""By resource, the slots that a call holds and how much of each: Ray's own form."""

MARGIN_SECONDS = 5.0
_SETTLE_SECONDS = 0.005
MOST_OPTIONS = 256
_KEPT = re.compile(rb"RAY_|PYTHON|SPT_")


class RayNode:
    """What Ray knows of this node, for one pool; see :class:`~anyaccel.engines.remote.host.Node`."""

    def __init__(self, spec: Spec) -> None:
        ray = import_ray()
        restore_environ()
        context = ray.get_runtime_context()
        self.name = f"{ray.util.get_node_ip_address()} ({context.get_node_id()[:8]})"
        self._inventory = node_inventory()
        self._shared = spec.shared
        self.broker = given_broker(self._inventory, shared=spec.shared, note=f"Ray job {context.get_job_id()}")
        self._grace = spec.grace
        self._options: dict[object, Options] = {}

    def refresh(self) -> None:
        """Undo what Ray has written into the environment."""
        restore_environ()

    def options(self, order: Order) -> Options:
        """How workers are to run it: on the devices that Ray has given to us."""
        if order.request is None:
            return Options.of(max_calls=order.max_calls, timeout=order.timeout)
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
            self._options[key] = Options.of(needs=needs, max_calls=max_calls, timeout=order.timeout)
        return self._options[key]

    def expected(self, options: Options) -> Allocation | None:
        """What Ray has given."""
        needs = options.needs
        if not isinstance(needs, Given):
            return CPU
        return Allocation(id="ray", request=plain(needs), grants=needs.grants)

    def settle(self, core: Core) -> None:
        """Where nobody else would wait for devices that are on their way back, wait for them."""
        end = time.monotonic() + self._grace + MARGIN_SECONDS
        while not self._shared and any(member.held for member in tuple(core.members)) and time.monotonic() < end:
            time.sleep(_SETTLE_SECONDS)


@functools.cache
def started_with() -> Mapping[str, str]:
    """The environment that this process was started with, before Ray wrote masks of its own into it."""
    return {os.fsdecode(name): os.fsdecode(value) for name, value in _started_with().items()}


@functools.cache
def _started_with() -> dict[bytes, bytes]:
    with open("/proc/self/environ", "rb") as file:
        pairs = [pair.partition(b"=") for pair in file.read().split(b"\0") if pair]
    return {name: value for name, _, value in pairs if name}


def restore_environ() -> None:
    """Undo what Ray has written into the environment for its call: masks, and a number of threads."""
    # Its data, since a look at each variable through the mapping takes longer than all the rest of a call.
    before, now = _started_with(), os.environb._data  # type: ignore[attr-defined]  # noqa: SLF001
    for name, _ in now.items() - before.items():
        if name not in before and not _KEPT.match(name):
            del os.environb[name]
    for name, value in before.items() - now.items():
        os.environb[name] = value


@functools.cache
def node_inventory() -> Inventory:
    """What is on this node: what ``anyaccel ray start`` found, or what is found now.

    Raises:
        AnyaccelError: When that cannot be found out.
    """
    environ = started_with()
    path = environ.get(SNAPSHOT_VARIABLE)
    return read_snapshot(path) if path else detect(environ=environ)


def held_slots() -> Slots:
    """What Ray has given to the call or actor of this process."""
    ids: Slots = _core_worker().resource_ids()
    return {_plain(name): slots for name, slots in ids.items() if not re.search(r"_group_\d+_[0-9a-f]+$", name)}


@functools.cache
def _core_worker() -> Any:
    return import_ray()._private.worker.global_worker.core_worker  # noqa: SLF001 - the public call leaves resources out


def given(request: Request, resources: Sequence[str], slots: Slots, inventory: Inventory) -> Given:
    """Say which devices the slots of a call are.

    Args:
        request: What was asked for.
        resources: For each term, the resource that it was asked of Ray as.
        slots: What Ray gave.
        inventory: What is on this node.

    Raises:
        WorkerStartError: When Ray does not count the devices one by one, or counts more than there are.
    """
    devices = by_resource(inventory.usable)
    left = {name: sorted(slots.get(name, ())) for name in set(resources)}
    grants = []
    for term, resource in zip(request.terms, resources, strict=True):
        _check_counted(resource)
        own, left[resource] = left[resource][: term.count], left[resource][term.count :]
        units = [round(part * UNITS_PER_DEVICE) for _, part in own]
        if len(own) != term.count or sum(units) != term.units:
            raise WorkerStartError(f"Ray gave {own} of {resource} for {term}, which are not devices one by one")
        found = [_device(devices, resource, slot) for slot, _ in own]
        wrong = [device.id for device in found if not serves(device, term, inventory)]
        if wrong:
            raise WorkerStartError(f"Ray gave {', '.join(wrong)} for {term}, which is none; start all nodes alike")
        shares = (share(device, part) for device, part in zip(found, units, strict=True))
        grants.append(Grant(term=term, shares=tuple(shares)))
    units_of = tuple((share.device.id, share.units) for grant in grants for share in grant.shares)
    return Given(terms=request.terms, else_cpu=request.else_cpu, grants=tuple(grants), units=units_of)


def _device(devices: Mapping[str, list[Device]], resource: str, slot: int) -> Device:
    found = devices.get(resource, [])
    if slot >= len(found):
        raise WorkerStartError(
            f"Ray gave {resource} number {slot} and this node has {len(found)}; start it with 'anyaccel ray start'"
        )
    return found[slot]


def _check_counted(resource: str) -> None:
    listed = started_with().get(UNIT_VARIABLE)
    names = own_unit_instances() if listed is None else tuple(listed.split(","))
    if resource != PREDEFINED and resource not in names:
        raise WorkerStartError(
            f"Ray counts {resource} as one pool on this node and cannot say which devices it gave;"
            " start the node with 'anyaccel ray start'"
        )


def _plain(name: str) -> str:
    """A resource of a placement group by the name that it has outside."""
    return re.sub(r"_group_[0-9a-f]+$", "", name)
