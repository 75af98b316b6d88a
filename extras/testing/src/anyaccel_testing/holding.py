"""Hold devices for a test worker: no other one, and nobody else on the machine, gets them meanwhile."""

from __future__ import annotations

from anyaccel import detect
from anyaccel.errors import AnyaccelError
from anyaccel.launcher import DeviceLease, acquire, refuse_if_loaded
from anyaccel.model import Device, Inventory, Request, Term
from anyaccel.scheduler import parse_request


def hold_devices(wanted: str | None) -> DeviceLease:
    """Hold the devices of one test worker, if they are free now.

    Args:
        wanted: What it asks for; one device of any kind when None.

    Raises:
        RequestError, UnknownNameError: When the request is wrong.
        AnyaccelError: When there are no such devices, others hold them, or a runtime is loaded that would not see them.
    """
    inventory = detect()
    refuse_if_loaded(inventory)
    request = parse_request(wanted) if wanted else _any_device(inventory)
    return acquire(request, inventory=inventory, wait=0, note="pytest")


def _any_device(inventory: Inventory) -> Request:
    """One device, of the vendor whose devices come first."""
    vendors = dict.fromkeys(device.vendor for device in inventory.usable)
    if not vendors:
        found = [f"{device.id} is {_obstacle(device)}" for device in inventory.devices]
        failed = [str(report.problem) for report in inventory.vendors if report.problem is not None]
        raise AnyaccelError("; ".join(["this machine has no accelerator that can be used", *found, *failed]))
    return Request(terms=(Term(names=tuple(vendors)),))


def _obstacle(device: Device) -> str:
    """Why a device cannot be used."""
    return f"unhealthy ({device.health_reason})" if device.visible else "hidden by the environment"
