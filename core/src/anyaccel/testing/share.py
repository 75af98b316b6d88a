"""Divide the accelerators of a machine among test workers that do not talk to each other."""

from __future__ import annotations

from anyaccel.errors import AnyaccelError, NotFreeError
from anyaccel.inventory.detect import detect
from anyaccel.launcher.environment import WorkerEnvironment, worker_environment
from anyaccel.launcher.launch import open_scheduler
from anyaccel.model import Device, Inventory, Request, Term
from anyaccel.scheduler import parse_request


def share(wanted: str | None, worker: int) -> WorkerEnvironment:
    """Choose the devices of one test worker, and make its environment.

    Every worker places what all workers before it ask for, and then its own request: placement is a pure function, so
    all of them see the same division.

    Args:
        wanted: What each worker asks for; one device of any kind when None.
        worker: Number of the worker, from 0.

    Raises:
        RequestError, UnknownNameError: When the request is wrong.
        AnyaccelError: When there are no such devices, or the workers before this one have taken all.
    """
    inventory = detect()
    request = parse_request(wanted) if wanted else _any_device(inventory)
    scheduler = open_scheduler(inventory)
    try:
        for _ in range(worker):
            scheduler.allocate(request)
        allocation = scheduler.allocate(request)
    except NotFreeError as error:
        raise AnyaccelError(
            f"test worker {worker + 1} finds nothing left for {request}; start fewer with -n"
        ) from error
    return worker_environment(allocation, inventory)


def _any_device(inventory: Inventory) -> Request:
    """One device, of the vendor whose devices come first."""
    vendors = dict.fromkeys(device.vendor for device in inventory.devices if device.usable)
    if not vendors:
        found = [f"{device.id} is {_obstacle(device)}" for device in inventory.devices]
        failed = [str(report.problem) for report in inventory.vendors if report.problem is not None]
        raise AnyaccelError("; ".join(["this machine has no accelerator that can be used", *found, *failed]))
    return Request(terms=(Term(names=tuple(vendors)),))


def _obstacle(device: Device) -> str:
    """Why a device cannot be used."""
    return f"unhealthy ({device.health_reason})" if device.visible else "hidden by the environment"
