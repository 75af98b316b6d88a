"""What a vendor observes while a machine runs, and what a container needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from anyaccel.model._value import Value, field
from anyaccel.model.device import Health


class DeviceProcess(Value):
    """A process that uses a device.

    Attributes:
        pid: Process id as the vendor reports it; inside a container it may be the host's.
        memory_bytes: Device memory that it holds, or None when unknown.
    """

    pid: int
    memory_bytes: int | None = None


class Stats(Value):
    """The state of one device at one moment. What the vendor cannot tell is None, never 0.

    Attributes:
        memory_used_bytes: Device memory in use.
        utilization: Share of time that the device was busy, from 0 to 1.
        temperature_celsius: Temperature in degrees Celsius.
        power_watts: Power drawn, in watts.
        clock_hz: Clock of the compute units, in hertz.
        memory_clock_hz: Clock of the memory, in hertz.
        ecc_errors_corrected: Memory errors that were corrected, since the driver was loaded where the vendor can tell.
        ecc_errors_uncorrected: Memory errors that could not be corrected, likewise.
        health: Whether the device can be used.
        health_reason: Why not, in a clause about the device.
        health_remedy: What to do about it; empty when nobody knows.
        processes: Processes that use the device, or None when the vendor cannot tell.
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
    """What a container or a sandbox needs so that the devices work inside.

    Attributes:
        nodes: Paths of device nodes, those that all devices share among them.
        mounts: Files and directories of the host.
        env: Variables of the container.
        groups: Numbers of the groups of the host that the device nodes are open to, for who is not root inside. No
            names: inside, a name may be another group.
    """

    nodes: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[int, ...] = ()


class Severity(Enum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(Value):
    """One thing that somebody should know about this machine, with one way out.

    Attributes:
        severity: How bad it is.
        reason: What was found, in one sentence.
        remedy: What to do about it, as a command or one sentence; empty when all is well.
    """

    severity: Severity
    reason: str
    remedy: str = ""
