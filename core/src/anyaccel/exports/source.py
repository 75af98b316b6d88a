"""What exports are made of: collected once, so that each export is a pure function of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from anyaccel.errors import EnvConflictError
from anyaccel.model import ContainerEdits, Device, EnvEdits, Health, Inventory, Value, field, parts_of
from anyaccel.vendors.process import vendor_process


class ExportSource(Value):
    """A machine, and what the vendors' plug-ins say about its devices.

    Attributes:
        inventory: What was found.
        node: The name under which a cluster knows the machine.
        facts: What requests filter by beside the type, by name, by device id.
        shards: Shares into which each device that can be shared is cut, where a target has such a thing; 0 for none.
        cores: The numbers of the cores that are near a NUMA node, by node, where a target is to be told.
        alone: What a container needs for one device, by device id.
        together: What a container needs for all exported devices of one vendor, by vendor.
        environments: The edits by which a process sees one device and no other, by device id.
        everything: The edits by which a process sees all exported devices and no other.
    """

    inventory: Inventory
    node: str = "localhost"
    facts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    shards: int = 0
    cores: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    alone: Mapping[str, ContainerEdits] = field(default_factory=dict)
    together: Mapping[str, ContainerEdits] = field(default_factory=dict)
    environments: Mapping[str, EnvEdits] = field(default_factory=dict)
    everything: EnvEdits = field(default_factory=EnvEdits)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices to export: those that may be given out. Hidden and broken ones are nobody's business."""
        return usable(self.inventory)


class Export(Value):
    """What a target gets.

    Attributes:
        text: The text in the target's own form, ending with a newline unless it is empty.
        notes: Sentences that people should see, such as what could not be expressed.
    """

    text: str
    notes: tuple[str, ...] = ()


def usable(inventory: Inventory) -> tuple[Device, ...]:
    """The devices that may be given out, all at once: of a device and its parts the parts."""
    found = inventory.usable
    divided = parts_of(found)
    return tuple(device for device in found if device.id not in divided)


def left_out(inventory: Inventory) -> Iterator[str]:
    """Say which devices are not exported, and why."""
    hidden = sum(not device.visible for device in inventory.devices)
    if hidden:
        what, them = ("1 device is", "it") if hidden == 1 else (f"{hidden} devices are", "them")
        yield f"{what} left out, because the environment that we started in hides {them}."
    for device in inventory.devices:
        if device.visible and device.health is Health.UNHEALTHY:
            told = "; ".join(filter(None, (device.health_reason, device.health_remedy)))
            reason = f": {told}" if told else "."
            yield f"{device.name} ({device.id}) is left out, because it is unhealthy{reason}"
    for device_id in parts_of(inventory.usable):
        yield f"{device_id} is left out, because its parts are exported: whoever has these must not have it as well."


def container_edits(devices: Sequence[Device]) -> tuple[dict[str, ContainerEdits], dict[str, ContainerEdits]]:
    """Ask the vendors' plug-ins what containers need.

    Returns:
        Edits for each device alone, by its id, and for all devices of a vendor together, by vendor.

    Raises:
        PluginError: When a plug-in cannot say.
    """
    alone = {device.id: _edits((device,)) for device in devices}
    vendors = dict.fromkeys(device.vendor for device in devices)
    together = {vendor: _edits(tuple(d for d in devices if d.vendor == vendor)) for vendor in vendors}
    return alone, together


def _edits(devices: Sequence[Device]) -> ContainerEdits:
    """What a container needs for devices of one vendor; declared ones have no plug-in and need nothing."""
    if devices[0].declared:
        return ContainerEdits()
    return vendor_process(devices[0].vendor).container(devices)


def nothing_needed(source: ExportSource) -> Iterator[str]:
    """Say for which vendors a container needs nothing."""
    for vendor, found in source.together.items():
        if found == ContainerEdits():
            yield f"There are no flags for the devices of {vendor}, because a container needs nothing for them."


def merged(edits: Mapping[str, ContainerEdits]) -> ContainerEdits:
    """What a container needs for several vendors: each node, each group and what is mounted at each path once.

    Raises:
        EnvConflictError: When two vendors set one variable differently.
    """
    env: dict[str, str] = {}
    owner: dict[str, str] = {}
    for vendor, edit in edits.items():
        for name, value in edit.env.items():
            if env.setdefault(name, value) != value:
                raise EnvConflictError(
                    f"{owner[name]} and {vendor} set the variable {name} differently in a container"
                    f" ({env[name]!r} and {value!r}), so one container cannot hold both; set ANYACCEL_PLUGINS to one"
                )
            owner.setdefault(name, vendor)
    all_of_them = edits.values()
    return ContainerEdits(
        nodes=tuple(dict.fromkeys(node for edit in all_of_them for node in edit.nodes)),
        mounts=tuple({mount.target: mount for edit in all_of_them for mount in edit.mounts}.values()),
        env=env,
        groups=tuple(sorted({group for edit in all_of_them for group in edit.groups})),
    )


def own_nodes(inventory: Inventory) -> dict[str, tuple[str, ...]]:
    """The device nodes that belong to one device alone, by device id: what a cgroup can keep others from."""
    users = Counter(node for device in inventory.devices for node in set(device.nodes))
    return {device.id: tuple(node for node in device.nodes if users[node] == 1) for device in inventory.devices}


def by_resource(devices: Iterable[Device]) -> dict[str, list[Device]]:
    """The devices by the resource under which they are counted, in order."""
    found: dict[str, list[Device]] = {}
    for device in devices:
        found.setdefault(device.resource, []).append(device)
    return found
