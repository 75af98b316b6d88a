"""Answers of plug-ins about other things than devices: identity, state, findings, needs of containers, and faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from anyaccel.model._value import Value, field, replace
from anyaccel.model.device import UNITS_PER_DEVICE, Device, Health
from anyaccel.model.request import Term


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
        read_only: Whether the container may write there.
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
