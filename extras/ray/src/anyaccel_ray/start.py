"""What ``anyaccel ray start`` makes of a machine: fewer devices, masks for broken ones, and the token of Ray's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyaccel.errors import PluginError, UsageError
from anyaccel.model import Device, EnvContext, Health, Inventory, Share, replace
from anyaccel.vendors import vendor_process
from anyaccel_export.ray import RayNode, by_resource, countable

from anyaccel_ray import authentication


def prepare(node: RayNode, inventory: Inventory, environ: Mapping[str, str]) -> RayNode:
    """Add what a node needs that starts here: masks for devices that are broken, and a token of Ray's that is there.

    Args:
        node: What Ray is told about the machine.
        inventory: What is on it.
        environ: The environment in which the node starts.

    Raises:
        UsageError: When the environment asks for a token of Ray's, and there is none.
    """
    masks, more = _masks(inventory, inventory.usable, environ)
    token = authentication.variables(environ)
    if token:
        words = " ".join(f"{name}={value}" for name, value in token.items())
        source = authentication.token_source(environ)
        more.append(
            f"this node asks for the token of Ray's in {source}. A Pool shows it by itself; a program of Ray's own that"
            f" names an address needs {words} in its environment."
        )
    return replace(node, variables={**node.variables, **masks, **token}, notes=(*node.notes, *more))


def narrowed(inventory: Inventory, quantities: Mapping[str, float]) -> Inventory:
    """Leave of each resource only the first so many devices; resources that are not named stay as they are.

    Args:
        inventory: What is on the machine.
        quantities: Devices to leave by resource; what is not counted by device does not matter here.

    Raises:
        UsageError: When more are asked for than there are, or a part of one.
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
    """Hide broken devices from Ray's own tasks: Ray counts slots from the first device on, whatever its health."""
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
