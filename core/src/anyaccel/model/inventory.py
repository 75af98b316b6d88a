"""The inventory of a machine, with a report for each vendor."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from anyaccel.model._value import Value
from anyaccel.model.allocation import EnvEdits
from anyaccel.model.device import Device
from anyaccel.model.plugin import Problem
from anyaccel.text import html_table, memory


def parts_of(devices: Iterable[Device]) -> dict[str, frozenset[str]]:
    """Return the ids of all parts, parts of parts included, of each device with parts."""
    parents = {device.id: device.parent for device in devices}
    found: dict[str, set[str]] = {}
    for device_id, parent in parents.items():
        above, seen = parent, {device_id}  # a document may have parents in a circle
        while above is not None and above not in seen:
            if above in parents:  # a parent need not be listed
                found.setdefault(above, set()).add(device_id)
            seen.add(above)
            above = parents.get(above)
    return {device_id: frozenset(parts) for device_id, parts in found.items()}


class VendorState(Enum):
    """The result of a vendor's detection. Failed is not absent."""

    OK = "ok"
    ABSENT = "absent"
    NOT_ASKED = "not asked"
    """The data beside the plug-in rules out its hardware, so its code was not run."""
    FAILED = "failed"


class VendorReport(Value):
    """The report of a vendor's plug-in on a machine.

    Attributes:
        vendor: Key of the vendor.
        state: Result of the detection.
        resource: Resource name of the devices; empty when the plug-in failed before it gave its identity.
        kind: Kind of accelerator; empty likewise.
        env_vars: Variables that the plug-in may set or unset.
        borrowed: See :class:`PluginInfo`.
        cleared: See :class:`PluginInfo`.
        runtimes: Beginnings of the file names of the vendor's runtime libraries.
        control_nodes: Device nodes that all devices of the vendor use.
        maskable: Whether a variable hides the devices; see :class:`PluginInfo`.
        masked_software: See :class:`PluginInfo`.
        ray_switch: See :class:`PluginInfo`.
        distribution: Distribution of the plug-in.
        version: Version of the distribution.
        driver_version: Version of the driver; empty when unknown.
        partial: Whether some devices could not be read.
        notes: Sentences for people.
        problem: The problem of a failed detection, or None.
        hidden: The edits by which a worker sees none of the devices; None when unknown.
        seconds: Duration of the detection.
    """

    vendor: str
    state: VendorState
    resource: str = ""
    kind: str = ""
    env_vars: tuple[str, ...] = ()
    borrowed: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()
    runtimes: tuple[str, ...] = ()
    control_nodes: tuple[str, ...] = ()
    maskable: bool = True
    masked_software: str = ""
    ray_switch: str = ""
    distribution: str = ""
    version: str = ""
    driver_version: str = ""
    partial: bool = False
    notes: tuple[str, ...] = ()
    problem: Problem | None = None
    hidden: EnvEdits | None = None
    seconds: float = 0.0

    def shared_with(self, other: VendorReport) -> str:
        """Return the variable that keeps devices of two vendors from one worker; empty for none.

        Both vendors obey the variable, and one of them borrows it, so that no value stands for devices of both.
        """
        both = (name for name in self.env_vars if name in other.env_vars)
        return next(
            (
                name
                for name in both
                if name in (*self.borrowed, *other.borrowed) and name not in (*self.cleared, *other.cleared)
            ),
            "",
        )


class Inventory(Value):
    """The detected devices of a machine, and the reports of vendors.

    Attributes:
        machine: Name of the machine: ``host``, ``sim:...`` or the path of a recording.
        devices: All devices, hidden and unhealthy devices included, in the order in which they are handed out.
        vendors: A report for each installed plug-in, in the order of keys.
    """

    machine: str
    devices: tuple[Device, ...]
    vendors: tuple[VendorReport, ...] = ()

    def __repr__(self) -> str:
        types = [device.type for device in self.devices]
        counted = ", ".join(f"{types.count(each)} {each}" for each in dict.fromkeys(types))
        return f"<Inventory of {self.machine}: {counted or 'no devices'}>"

    def _repr_html_(self) -> str:
        """Return a table of the devices, for notebooks."""
        rows = [
            (device.name, device.type, memory(device.memory_bytes), device.health.value, device.id)
            for device in self.devices
        ]
        caption = f"{len(self.devices)} devices of {self.machine}"
        return html_table(caption, ("device", "type", "memory", "health", "id"), rows)

    @property
    def usable(self) -> tuple[Device, ...]:
        """The devices that may be given out."""
        return tuple(device for device in self.devices if device.usable)

    def of_vendor(self, vendor: str) -> tuple[Device, ...]:
        """Return the devices of a vendor."""
        return tuple([device for device in self.devices if device.vendor == vendor])

    def report(self, vendor: str) -> VendorReport | None:
        """Return the report of a vendor; None without an installed plug-in."""
        return next((report for report in self.vendors if report.vendor == vendor), None)

    def excluded_vendors(self, vendor: str) -> dict[str, str]:
        """Return vendors whose devices no worker gets together with this vendor's, with the shared variable."""
        own = self.report(vendor)
        others = () if own is None else (report for report in self.vendors if report.vendor != vendor)
        return {other.vendor: name for other in others if own and (name := own.shared_with(other))}
