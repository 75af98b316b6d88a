"""What is wrong, and what to do about it: two fields wherever they go."""

from __future__ import annotations

from typing import NamedTuple

from anyaccel.plugin import Finding, Severity


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


def fail(reason: str, remedy: str) -> Finding:
    """Make a finding of something that keeps devices from being used."""
    return Finding(severity=Severity.FAIL, reason=reason, remedy=remedy)


def warn(reason: str, remedy: str) -> Finding:
    """Make a finding of something that should be known or changed, while devices work."""
    return Finding(severity=Severity.WARN, reason=reason, remedy=remedy)
