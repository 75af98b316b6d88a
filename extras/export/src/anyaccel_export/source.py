"""Input of exports, collected once, so that each export is a pure function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from anyaccel.launcher import container
from anyaccel.model import ContainerEdits, Device, EnvEdits, Health, Inventory, Value, field, parts_of


class ExportSource(Value):
    """A machine, with the vendors' answers about its devices.

    Attributes:
        inventory: The machine.
        node: Name of the machine in a cluster.
        facts: Facts of filters other than the type, by name, by device id.
        shards: Shares into which each divisible device is cut, for targets with shards; 0 for none.
        cores: Numbers of the cores near a NUMA node, by node, for targets that need them.
        alone: Container edits for each single device, by device id.
        together: Container edits for the exported devices of each vendor, by vendor.
        environments: Environment edits that show a process one device only, by device id.
        everything: Environment edits that show a process the exported devices only.
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
        """The devices to export: visible and healthy ones."""
        return usable(self.inventory)


class Export(Value):
    """Output of an export.

    Attributes:
        text: Text in the target's own form, ending with a newline unless empty.
        notes: Sentences for the user, such as about facts that the target cannot express.
    """

    text: str
    notes: tuple[str, ...] = ()


def usable(inventory: Inventory) -> tuple[Device, ...]:
    """Return the usable devices without those whose parts are usable, too."""
    found = inventory.usable
    divided = parts_of(found)
    return tuple(device for device in found if device.id not in divided)


def left_out(inventory: Inventory) -> Iterator[str]:
    """Yield a sentence for each device that is not exported, with the reason."""
    hidden = sum(not device.visible for device in inventory.devices)
    if hidden:
        what, them = ("1 device is", "it") if hidden == 1 else (f"{hidden} devices are", "them")
        yield f"{what} left out, because the environment hides {them}."
    for device in inventory.devices:
        if device.visible and device.health is Health.UNHEALTHY:
            told = "; ".join(filter(None, (device.health_reason, device.health_remedy)))
            reason = f": {told}" if told else "."
            yield f"{device.name} ({device.id}) is left out, because it is unhealthy{reason}"
    for device_id in parts_of(inventory.usable):
        yield f"{device_id} is left out, because its parts are exported: no job may have a part beside the whole."


def container_edits(devices: Sequence[Device]) -> tuple[dict[str, ContainerEdits], dict[str, ContainerEdits]]:
    """Ask the vendors' plug-ins for container edits.

    Returns:
        Edits for each single device, by id, and for the devices of each vendor together, by vendor.

    Raises:
        PluginError: When a plug-in cannot answer.
    """
    alone = {device.id: container((device,)) for device in devices}
    vendors = dict.fromkeys(device.vendor for device in devices)
    together = {vendor: container(d for d in devices if d.vendor == vendor) for vendor in vendors}
    return alone, together


def nothing_needed(source: ExportSource) -> Iterator[str]:
    """Yield a sentence for each vendor whose devices need no container edits."""
    for vendor, found in source.together.items():
        if found == ContainerEdits():
            yield f"There are no flags for the devices of {vendor}, because a container needs nothing for them."


def own_nodes(inventory: Inventory) -> dict[str, tuple[str, ...]]:
    """Return the device nodes of a single device each, by device id: a cgroup can restrict these."""
    users = Counter(node for device in inventory.devices for node in set(device.nodes))
    return {device.id: tuple(node for node in device.nodes if users[node] == 1) for device in inventory.devices}
