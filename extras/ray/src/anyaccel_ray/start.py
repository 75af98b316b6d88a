"""The node that ``anyaccel ray start`` starts: fewer devices if asked for, masks for broken ones, Ray's token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyaccel.errors import PluginError, UsageError
from anyaccel.model import Device, EnvContext, Health, Inventory, Share, replace
from anyaccel.vendors import vendor_process
from anyaccel_export.ray import RayNode, by_resource, countable

from anyaccel_ray import authentication


def prepare(node: RayNode, inventory: Inventory, environ: Mapping[str, str]) -> RayNode:
    """Add masks for broken devices, and the variable with which Ray uses an existing token.

    Args:
        node: The description of the machine for Ray.
        inventory: The inventory of the machine.
        environ: The environment in which the node starts.

    Raises:
        UsageError: When the environment requires a token of Ray's, and there is none.
    """
    masks, more = _masks(inventory, inventory.usable, environ)
    token = authentication.variables(environ)
    if token:
        words = " ".join(f"{name}={value}" for name, value in token.items())
        source = authentication.token_source(environ)
        more.append(
            f"this node requires Ray's token in {source}. A Pool sends it; a program of Ray's own that names an"
            f" address needs {words} in its environment."
        )
    return replace(node, variables={**node.variables, **masks, **token}, notes=(*node.notes, *more))


def narrowed(inventory: Inventory, quantities: Mapping[str, float]) -> Inventory:
    """Hide all but the first devices of each named resource.

    Args:
        inventory: The inventory of the machine.
        quantities: Number of devices to keep by resource; resources that are no devices are ignored.

    Raises:
        UsageError: When a quantity exceeds the number of devices, or is no whole number.
    """
    have = by_resource(inventory.usable)
    left_out: set[str] = set()
    for resource in sorted(countable(inventory) & quantities.keys()):
        quantity, own = quantities[resource], have.get(resource, [])
        if quantity != int(quantity):
            raise UsageError(
                f"a node has whole devices: the quantity of {resource} must be a whole number (got {quantity})"
            )
        if quantity > len(own):
            raise UsageError(
                f"this node cannot have {int(quantity)} {resource}: it has {len(own)} that may be given out (see"
                f" 'anyaccel'); ask for fewer, or add '--declare {resource}={int(quantity)}' where they are there and"
                " cannot be found"
            )
        left_out.update(device.id for device in own[int(quantity) :])
    devices = tuple(replace(device, visible=False) if device.id in left_out else device for device in inventory.devices)
    return replace(inventory, devices=devices)


def _masks(
    inventory: Inventory, devices: Sequence[Device], environ: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return masks that hide broken devices from Ray's own tasks, and notes: Ray counts broken devices, too."""
    masks: dict[str, str] = {}
    notes = []
    broken = {device.vendor for device in inventory.devices if device.visible and device.health is Health.UNHEALTHY}
    for vendor in sorted(broken):
        everything = inventory.of_vendor(vendor)
        own = tuple(device for device in devices if device.vendor == vendor)
        shares = {device.id: Share(device=device, memory_bytes=device.memory_bytes) for device in own}
        try:
            edits = vendor_process(vendor).env(
                own, EnvContext(devices=everything, shares=shares, environ=environ, mask="index")
            )
        except PluginError as error:
            notes.append(f"Ray's own tasks may be given broken devices of {vendor}, which cannot be hidden: {error}")
        else:
            masks |= edits.set
    return masks, notes
