"""The types of checks and of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from anyaccel.model import Value

SHOWN = 3
"""Number of faults that a message lists; the rest are only counted."""


class CheckFailed(Exception):  # noqa: N818 - it reads as what happened
    """Raised by a check when the plug-in breaks the rule; the message names the remedy."""


class NotApplicable(Exception):  # noqa: N818 - it is no error
    """Raised by a check when its rule does not apply to the plug-in or cannot be tested, with the reason."""


class State(Enum):
    """How a check ended."""

    OK = "ok"
    FAILED = "failed"
    EXPECTED = "expected"  # failed, and the author has declared the failure with a reason
    SKIPPED = "skipped"


class Check(Value):
    """A rule of the contract, with the function testing a plug-in against the rule.

    Attributes:
        id: ``C01`` and so on; never reused.
        name: The rule in one or two words, for the ids of tests.
        hook: Optional hook without which the check does not apply; empty when the check always applies.
        per_machine: Whether the check runs on every recorded machine and reports a result for each.
        simulated: Whether the check also runs on machines simulated from the plug-in's products.
        function: Takes a subject, or a subject and a machine; returns None, or raises CheckFailed or NotApplicable. Its
            docstring is the id and the rule in one sentence.
    """

    id: str
    name: str
    function: Callable[..., None]
    hook: str = ""
    per_machine: bool = False
    simulated: bool = False

    @property
    def title(self) -> str:
        """The rule in one sentence."""
        return " ".join(str(self.function.__doc__).partition(": ")[2].partition("\n\n")[0].split())

    @property
    def label(self) -> str:
        """Id and name, for the ids of tests."""
        return f"{self.id}-{self.name}"


class Result(Value):
    """The result of a check on one machine.

    Attributes:
        check: Id of the check.
        state: Passed, failed, failed as declared, or skipped.
        machine: Name of the recording, ``products`` for all simulated machines, or empty for the plug-in as such.
        message: Reason of the failure or of the skip; empty when the check passed.
        details: Traceback or captured output; empty when there is none.
    """

    check: str
    state: State
    machine: str = ""
    message: str = ""
    details: str = ""


def demand(faults: Iterable[str]) -> None:
    """Fail the check if there are faults, and list the first :data:`SHOWN`.

    Raises:
        CheckFailed: When there is at least one fault.
    """
    found = list(dict.fromkeys(faults))  # one cause often shows in many sets of devices, with the same words
    if found:
        rest = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise CheckFailed("; ".join(found[:SHOWN]) + rest)
