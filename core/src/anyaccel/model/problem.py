"""Problems: faults of plug-ins in the same form everywhere."""

from __future__ import annotations

from enum import Enum

from anyaccel.model._value import Value


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
