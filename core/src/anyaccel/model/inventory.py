"""Answers of vendors' plug-ins, and the inventory of a machine that is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from anyaccel.model.device import UNITS_PER_DEVICE, Device, Health, Share, Term
from anyaccel.model.value import Value, field, replace
from anyaccel.text import html_table, memory

TYPE_CHECKING = False  # that of typing, which takes longer to import than the model
if TYPE_CHECKING:
    from typing import Literal


class PluginInfo(Value):
    """The identity of a vendor plug-in, the same on every machine.

    Attributes:
        vendor: Key of the vendor, ``[a-z][a-z0-9_]{0,31}``, equal to the entry point's name.
        resource: Name under which schedulers count its devices: ``GPU``, ``TPU``, ``NPU`` ...
        kind: Kind of accelerator in lower case: ``gpu``, ``tpu``, ``npu`` ...
        env_vars: All variables that the plug-in may set or unset; edits of other variables are refused. Empty for a
            runtime without a mask; then set ``maskable`` to False.
        borrowed: Variables of ``env_vars`` that belong to another vendor, or to no vendor, and that this vendor's
            runtime obeys. A worker never gets devices of two vendors that obey a variable which one of them borrows,
            since no value stands for devices of both.
        cleared: Other vendors' variables that the plug-in only unsets, so that no program misreads them. The vendor's
            runtime does not obey them. A value that another vendor sets stays.
        url: Address of the plug-in's documentation.
        runtimes: Beginnings of the file names of the vendor's runtime libraries, such as ``libacme.so``. A process that
            has loaded such a library has read the mask, and cannot get other devices.
        counts: Numbers of devices that a job may have, in ascending order; empty for any. Placement applies these
            numbers without a call. ``anyaccel_validate`` checks rules about particular devices.
        exclusive: A clause that says why a device can have only one holder, for requests of a part; empty for a device
            that can be shared, and where no reason is needed.
        control_nodes: Device nodes that all devices of the vendor use, such as ``/dev/acmectl``. Any other node of a
            single device belongs to that device: if another vendor lists the node, too, neither device is given out.
        maskable: Whether a variable hides devices from a process. If False, each launch warns that the devices are open
            to workers that are not confined.
        masked_software: The software that obeys the mask, if not all of the vendor's does, as a noun phrase: ``the
            compiler's runtime``. Then each launch warns that the devices are open to other software. Empty otherwise.
        ray_switch: Variable that keeps Ray from writing the mask, if its name is not ``RAY_EXPERIMENTAL_NOSET_`` and
            the first of ``env_vars``.
    """

    vendor: str
    resource: str
    kind: str
    env_vars: tuple[str, ...]
    borrowed: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()
    url: str = ""
    runtimes: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    exclusive: str = ""
    control_nodes: tuple[str, ...] = ()
    maskable: bool = True
    masked_software: str = ""
    ray_switch: str = ""

    def describe(self, device: Device) -> Device:
        """Return a device with the plug-in's vendor, resource and kind, and with defaults in the core's fields."""
        own = {"vendor": self.vendor, "resource": self.resource, "kind": self.kind}
        core = {"declared": False, "labels": {}, "units": UNITS_PER_DEVICE, "own_slots": (), "visible": True}
        return replace(device, **own, **core, order=0)

    def refusal(self, term: Term, devices: Sequence[Device]) -> str | None:
        """Return the reason why a job cannot have a term of the vendor's devices; None when it can."""
        # The reason of the vendor comes before that of the numbers: no number would help.
        if self.exclusive and term.fraction:
            whole = f": {_listed(self.counts)}" if self.counts else ""
            return (
                f"one {self.resource} cannot be divided or shared: {self.exclusive}; ask for a whole number of devices"
                f"{whole}"
            )
        if self.counts and devices and len(devices) not in self.counts:
            return (
                f"one job can use {_listed(self.counts)} {self.resource}s of a machine (got {len(devices)});"
                " ask for one of these numbers"
            )
        return None


def _listed(numbers: Sequence[int]) -> str:
    """Write numbers for people: ``1, 2, 4 or 8``."""
    words = [str(number) for number in numbers]
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)


class ProblemKind(Enum):
    """The kind of a plug-in's fault."""

    LOAD = "load"
    """The plug-in could not be imported or registered."""
    RAISED = "raised"
    """A hook raised an exception."""
    TIMEOUT = "timeout"
    """A hook did not answer before its deadline."""
    DIED = "died"
    """The process that ran a hook ended: a crash, a signal, an exit."""
    CONTRACT = "contract"
    """A hook returned a value that the contract does not allow."""
    CONFLICT = "conflict"
    """Two plug-ins claim the same vendor."""


class Problem(Value):
    """A fault of a plug-in.

    Attributes:
        vendor: Key of the vendor.
        kind: Kind of the fault.
        reason: The fault, in the words of the plug-in or the core.
        distribution: Name of the distribution that ships the plug-in; empty when unknown.
        version: Version of that distribution.
        hook: Name of the hook; empty before the first hook.
        next_step: The way out.
        details: A traceback or captured output; may be empty.
    """

    vendor: str
    kind: ProblemKind
    reason: str
    distribution: str = ""
    version: str = ""
    hook: str = ""
    next_step: str = ""
    details: str = ""

    def __str__(self) -> str:
        origin = " ".join(part for part in (self.distribution, self.version) if part)
        subject = f"{origin} (vendor {self.vendor!r})" if origin else f"vendor {self.vendor!r}"
        what = f"{self.hook}: {self.reason}" if self.hook else self.reason
        end = "" if what.endswith((".", "?", "!")) else "."
        return f"{subject}: {what}{end} {self.next_step}" if self.next_step else f"{subject}: {what}"


class DeviceProcess(Value):
    """A process that uses a device.

    Attributes:
        pid: Process id as the vendor reports it; inside a container it may be the host's.
        memory_bytes: Device memory of the process, or None when unknown.
    """

    pid: int
    memory_bytes: int | None = None


class Stats(Value):
    """The state of a device at one moment. An unknown quantity is None, never 0.

    Attributes:
        memory_used_bytes: Device memory in use.
        utilization: Share of time that the device was busy, from 0 to 1.
        temperature_celsius: Temperature in degrees Celsius.
        power_watts: Power drawn, in watts.
        clock_hz: Clock of the compute units, in hertz.
        memory_clock_hz: Clock of the memory, in hertz.
        ecc_errors_corrected: Corrected memory errors, since the driver was loaded where the vendor counts so.
        ecc_errors_uncorrected: Uncorrectable memory errors, counted in the same way.
        health: Whether the device can be used.
        health_reason: Reason why the device is unhealthy, in a clause.
        health_remedy: The way out; empty when unknown.
        processes: Processes that use the device, or None when unknown.
    """

    memory_used_bytes: int | None = None
    utilization: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    clock_hz: int | None = None
    memory_clock_hz: int | None = None
    ecc_errors_corrected: int | None = None
    ecc_errors_uncorrected: int | None = None
    health: Health = Health.UNKNOWN
    health_reason: str = ""
    health_remedy: str = ""
    processes: tuple[DeviceProcess, ...] | None = None


class Mount(Value):
    """A path of the host that a container needs.

    Attributes:
        source: Path on the host.
        target: Path in the container.
        read_only: Whether the container may only read there.
    """

    source: str
    target: str
    read_only: bool = True


class ContainerEdits(Value):
    """The files, variables and groups that a container or a sandbox needs for devices.

    Attributes:
        nodes: Paths of device nodes, shared nodes included.
        mounts: Files and directories of the host.
        env: Variables of the container.
        groups: Numbers of the host's groups that may open the device nodes, for users other than root. Not names, since
            a name may be another group inside.
    """

    nodes: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[int, ...] = ()


class Severity(Enum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(Value):
    """A fact about a machine for its users, with one way out.

    Attributes:
        severity: Severity of the finding.
        reason: The fact, in one sentence.
        remedy: The way out, as a command or a sentence; empty for the severity ``ok``.
    """

    severity: Severity
    reason: str
    remedy: str = ""


class EnvContext(Value):
    """Facts for ``anyaccel_env`` beside the given devices.

    Attributes:
        devices: All devices of the vendor on the machine, hidden and used devices included.
        shares: Share of each allocated device, by device id.
        environ: The environment to be edited.
        mask: Whether a mask names devices by stable id or by index, where the runtime accepts both.
    """

    devices: tuple[Device, ...]
    shares: Mapping[str, Share] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    mask: Literal["id", "index"] = "id"


class EnvEdits(Value):
    """A plug-in's edits to a worker's environment, which the launcher applies.

    Attributes:
        set: Variables to set.
        unset: Variables to remove.
        memory_by: Name of the mechanism that the edits switch on, and that enforces the share of the memory even if the
            worker does not cooperate; empty for none.
        compute_by: The same for the share of the compute units.
        limited_by: Frameworks whose own memory limit the edits set.
        memory_regions: Name of each device's memory in the cgroup controller ``dmem``, such as
            ``drm/0000:03:00.0/vram``, by device id. The launcher limits shares there if the kernel allows.
    """

    set: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()
    memory_by: str = ""
    compute_by: str = ""
    limited_by: tuple[str, ...] = ()
    memory_regions: Mapping[str, str] = field(default_factory=dict)


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
