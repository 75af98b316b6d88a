"""Faults: a reason and a remedy, as two fields from plug-in to terminal."""

from __future__ import annotations

from typing import TypedDict

from anyaccel._typing import NamedTuple
from anyaccel.plugin import Finding, Health, Severity


class Fault(NamedTuple):
    """Why a device, tool, file or variable cannot be used.

    Attributes:
        reason: What is wrong, in a clause without a full stop: ``no driver is bound to it``.
        remedy: What the user should do, as a command or a clause; empty if no remedy is known.
    """

    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


class FaultError(ValueError):
    """Raised if a tool, file or variable cannot be understood, or a mask cannot name a device.

    A hook that raises this error reports ``reason`` and ``remedy`` to the user. It is a ``ValueError``, since
    ``anyaccel_visible`` raises that for a variable that the runtime would refuse.

    Attributes:
        fault: Reason and remedy.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        self.fault = Fault(reason, remedy)
        super().__init__(str(self.fault))


class Condition(TypedDict):
    """The health of a device, as fields of :class:`~anyaccel.plugin.Device` and :class:`~anyaccel.plugin.Stats`."""

    health: Health
    health_reason: str
    health_remedy: str


def condition(fault: Fault | None, *, sound: bool = True, doubt: Fault | None = None) -> Condition:
    """Return the health of a device as keyword arguments: ``Stats(**measures, **condition(fault))``.

    Args:
        fault: Why the device cannot be used, or None.
        sound: Whether driver or tool confirmed that the device works. With neither confirmation nor fault, the health
            is unknown.
        doubt: Why driver and tool contradict each other about the device, or None: then its health is unknown, too.
    """
    if fault is not None:
        return {"health": Health.UNHEALTHY, "health_reason": fault.reason, "health_remedy": fault.remedy}
    if doubt is not None:
        return {"health": Health.UNKNOWN, "health_reason": doubt.reason, "health_remedy": doubt.remedy}
    return {"health": Health.HEALTHY if sound else Health.UNKNOWN, "health_reason": "", "health_remedy": ""}


def fail(reason: str, remedy: str) -> Finding:
    """Make a finding about a fault that keeps devices from being used."""
    return Finding(severity=Severity.FAIL, reason=reason, remedy=remedy)


def warn(reason: str, remedy: str) -> Finding:
    """Make a finding about a setting or state that should change although the devices work."""
    return Finding(severity=Severity.WARN, reason=reason, remedy=remedy)
