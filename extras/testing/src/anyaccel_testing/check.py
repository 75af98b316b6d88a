"""What a check is, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from anyaccel.model import Value

SHOWN = 3
"""Faults of one kind that a message repeats."""


class CheckFailed(Exception):  # noqa: N818 - it reads as what happened
    """Raised by a check that a plug-in does not pass; the message says what to change."""


class NotApplicable(Exception):  # noqa: N818 - it is no error
    """Raised by a check that has nothing to say about a plug-in, or cannot; the message says why."""


class State(Enum):
    """How a check ended."""

    OK = "ok"
    FAILED = "failed"
    EXPECTED = "expected"  # it failed, as the author has declared, with the reason
    SKIPPED = "skipped"


class Check(Value):
    """One demand on plug-ins.

    Attributes:
        id: ``C01`` and so on; never reused.
        name: The demand in two or three words, for the ids of tests.
        hook: Optional hook without which the check does not apply; empty when it always does.
        per_machine: Whether it is made on every recorded machine, and reported for each.
        simulated: Whether it is made on machines simulated from the plug-in's products too.
        function: The check itself: takes a subject, or a subject and a machine; returns nothing, or raises. Its
            docstring is the id and the demand in one sentence.
    """

    id: str
    name: str
    function: Callable[..., None]
    hook: str = ""
    per_machine: bool = False
    simulated: bool = False

    @property
    def title(self) -> str:
        """The demand in one sentence."""
        return " ".join(str(self.function.__doc__).partition(": ")[2].partition("\n\n")[0].split())

    @property
    def label(self) -> str:
        """Id and name, as tests are called."""
        return f"{self.id}-{self.name}"


class Result(Value):
    """How a check ended on one machine.

    Attributes:
        check: Id of the check.
        state: How it ended.
        machine: Name of the recording, ``products`` for all simulated machines, or empty for the plug-in as such.
        message: Why it failed, was expected to, or was skipped; empty when it passed.
        details: Traceback or captured output, where there is any.
    """

    check: str
    state: State
    machine: str = ""
    message: str = ""
    details: str = ""


def demand(faults: Iterable[str]) -> None:
    """Fail when there are faults, with the first few of them.

    Raises:
        CheckFailed: When there is any.
    """
    found = list(dict.fromkeys(faults))
    if found:
        rest = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise CheckFailed("; ".join(found[:SHOWN]) + rest)
