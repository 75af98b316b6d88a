"""Leases for test workers: no other process gets a worker's devices until its session ends."""

from __future__ import annotations

from anyaccel import detect
from anyaccel.errors import AnyaccelError
from anyaccel.launcher import DeviceLease, acquire, refuse_if_loaded
from anyaccel.model import Device, Inventory, Request, Term
from anyaccel.scheduler import parse_request


def hold_devices(wanted: str | None) -> DeviceLease:
    """Acquire the devices of a test worker, without waiting.

    Args:
        wanted: The request; one device of any kind when None.

    Raises:
        RequestError, UnknownNameError: When the request is wrong.
        AnyaccelError: When the machine has no such devices, they are in use, or this process has loaded a runtime that
            would not read the new mask.
    """
    inventory = detect()
    refuse_if_loaded(inventory)  # before the lease: a runtime reads its mask once, when it is loaded
    request = parse_request(wanted) if wanted else _request_any_device(inventory)
    return acquire(request, inventory=inventory, wait=0, note="pytest")


def _request_any_device(inventory: Inventory) -> Request:
    """Build a request for one device of any vendor, in the order of the inventory."""
    vendors = dict.fromkeys(device.vendor for device in inventory.usable)
    if not vendors:
        found = [f"{device.id} is {_describe_obstacle(device)}" for device in inventory.devices]
        failed = [str(report.problem) for report in inventory.vendors if report.problem is not None]
        raise AnyaccelError("; ".join(["this machine has no accelerator that can be used", *found, *failed]))
    return Request(terms=(Term(names=tuple(vendors)),))


def _describe_obstacle(device: Device) -> str:
    """Return the reason why a device is not usable."""
    return f"unhealthy ({device.health_reason})" if device.visible else "hidden by the environment"
