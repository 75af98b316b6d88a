"""What is on a machine, and how each vendor's plug-in fared in finding out."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from anyaccel.model._value import Value
from anyaccel.model.allocation import EnvEdits
from anyaccel.model.device import Device
from anyaccel.model.problem import Problem
from anyaccel.text import memory


def parts_of(devices: Iterable[Device]) -> dict[str, frozenset[str]]:
    """Which devices are parts of which, by id: of each device that has some, all of them, and their parts."""
    parents = {device.id: device.parent for device in devices}
    found: dict[str, set[str]] = {}
    for device_id, parent in parents.items():
        above, seen = parent, {device_id}
        while above is not None and above not in seen:
            if above in parents:
                found.setdefault(above, set()).add(device_id)
            seen.add(above)
            above = parents.get(above)
    return {device_id: frozenset(parts) for device_id, parts in found.items()}


class VendorState(Enum):
    """How a vendor's detection ended. Failed is not absent."""

    OK = "ok"
    ABSENT = "absent"
    NOT_ASKED = "not asked"
    """The data beside the plug-in says that its hardware is certainly not here, so its code was not run."""
    FAILED = "failed"


class VendorReport(Value):
    """How one vendor's plug-in fared on this machine.

    Attributes:
        vendor: Key of the vendor.
        state: Whether it found its hardware, found none, or failed.
        resource: Resource name of its devices; empty when the plug-in did not get to say.
        kind: Kind of accelerator; empty likewise.
        env_vars: Variables that the plug-in may set or unset.
        borrowed: Those of them that are another vendor's, and
        cleared: those that it only removes; see :class:`PluginInfo`.
        runtimes: How the file names of the vendor's runtime libraries begin.
        control_nodes: Device nodes that all of its devices use.
        maskable: Whether a variable hides its devices; see :class:`PluginInfo`.
        ray_switch: See :class:`PluginInfo`.
        distribution: Distribution that ships the plug-in, and
        version: its version.
        driver_version: Version of the driver; empty when unknown.
        partial: Whether some devices could not be read.
        notes: Sentences that people should see.
        problem: What went wrong, when the state is failed, or None.
        hidden: The edits by which a worker sees none of its devices; None when they are not known.
        seconds: Time that detection took.
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
        """The variable that keeps devices of two vendors from one worker; empty where there is none.

        Both obey it, and one of them borrows it, so that no value of it means devices of both.
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
    """Everything that was found on one machine.

    Attributes:
        machine: The machine in words: ``host``, ``sim:...`` or the path of a recording.
        devices: All devices, hidden and unhealthy ones too, in the order in which they are handed out.
        vendors: One report per installed plug-in, in the order of their keys.
    """

    machine: str
    devices: tuple[Device, ...]
    vendors: tuple[VendorReport, ...] = ()

    def __repr__(self) -> str:
        types = [device.type for device in self.devices]
        counted = ", ".join(f"{types.count(each)} {each}" for each in dict.fromkeys(types))
        return f"<Inventory of {self.machine}: {counted or 'no devices'}>"

    def _repr_html_(self) -> str:
        """Show the devices in a notebook."""
        from anyaccel.model.html import html_table

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
        """The devices of one vendor."""
        return tuple([device for device in self.devices if device.vendor == vendor])

    def report(self, vendor: str) -> VendorReport | None:
        """The report of one vendor, or None when no plug-in of that name is installed."""
        return next((report for report in self.vendors if report.vendor == vendor), None)

    def excluded_vendors(self, vendor: str) -> dict[str, str]:
        """The vendors of which no device is given to a worker that has some of this one's, each with the variable."""
        own = self.report(vendor)
        others = () if own is None else (report for report in self.vendors if report.vendor != vendor)
        return {other.vendor: name for other in others if own and (name := own.shared_with(other))}
