"""One record per fault of a plug-in, in the same shape wherever it is shown."""

from __future__ import annotations

from enum import Enum

from anyaccel.model._value import Value


class ProblemKind(Enum):
    """What went wrong with a plug-in."""

    LOAD = "load"
    """It could not be imported or registered."""
    RAISED = "raised"
    """A hook raised an exception."""
    TIMEOUT = "timeout"
    """A hook did not answer before its deadline."""
    DIED = "died"
    """The process that ran a hook ended: a crash, a signal, an exit."""
    CONTRACT = "contract"
    """A hook returned a value that the contract does not allow."""
    CONFLICT = "conflict"
    """Two plug-ins claim the same thing."""


class Problem(Value):
    """A fault of one plug-in.

    Attributes:
        vendor: Key of the vendor.
        kind: What went wrong.
        reason: Why, in the words of whoever failed.
        distribution: Name of the distribution that ships the plug-in; empty when unknown.
        version: Version of that distribution.
        hook: Name of the hook; empty when none was reached.
        next_step: What somebody can do about it.
        details: A traceback or captured output; empty when there is none.
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
