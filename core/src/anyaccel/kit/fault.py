"""What is wrong, and what to do about it: two fields wherever they go."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from anyaccel.plugin import Finding, Health, Severity


class Fault(NamedTuple):
    """Why something cannot be used or known.

    Attributes:
        reason: What is wrong, in a clause without a full stop: ``no driver is bound to it``.
        remedy: What to do about it, as a command or a clause; empty when nobody knows.
    """

    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


class FaultError(ValueError):
    """Raised when a tool, a file or a variable cannot be understood.

    It is a ``ValueError``, which is what ``anyaccel_visible`` raises for a variable that the runtime would refuse.

    Attributes:
        fault: What is wrong, and what to do about it.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        self.fault = Fault(reason, remedy)
        super().__init__(str(self.fault))


class Condition(TypedDict):
    """How a device is, as fields of :class:`~anyaccel.plugin.Device` and :class:`~anyaccel.plugin.Stats`."""

    health: Health
    health_reason: str
    health_remedy: str


def condition(fault: Fault | None, *, sound: bool = True) -> Condition:
    """Say how a device is: ``Stats(**measures, **condition(fault))``.

    Args:
        fault: Why it cannot be used, or None.
        sound: Whether something said that it works. Without that, and without a fault, its health is unknown.
    """
    if fault is not None:
        return {"health": Health.UNHEALTHY, "health_reason": fault.reason, "health_remedy": fault.remedy}
    return {"health": Health.HEALTHY if sound else Health.UNKNOWN, "health_reason": "", "health_remedy": ""}


def fail(reason: str, remedy: str) -> Finding:
    """Make a finding of something that keeps devices from being used."""
    return Finding(severity=Severity.FAIL, reason=reason, remedy=remedy)


def warn(reason: str, remedy: str) -> Finding:
    """Make a finding of something that should be known or changed, while devices work."""
    return Finding(severity=Severity.WARN, reason=reason, remedy=remedy)
