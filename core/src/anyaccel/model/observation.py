"""Observations of running devices, findings, and the needs of containers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from anyaccel.model._value import Value, field
from anyaccel.model.device import Health


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
