"""Which nodes of a cluster can ever serve a request, and what to say when none can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from anyaccel.errors import NeverFitsError, UnknownNameError
from anyaccel.launcher.choosing import KnownNames, validate
from anyaccel.model import Inventory, Request
from anyaccel.scheduler import Scheduler, Verdict
from anyaccel.scheduler.names import LazyNames

T = TypeVar("T")


class Fitting(NamedTuple, Generic[T]):
    """What came of looking for nodes.

    Attributes:
        served: What each kind of nodes that can serve the request is to be asked for, by number of the kind.
        verdicts: Of each kind that was looked at, what our scheduler says.
        reasons: Why each other kind cannot, in words.
        unknown: The error where no node knows a name.
    """

    served: dict[int, T]
    verdicts: tuple[Verdict, ...]
    reasons: tuple[str, ...]
    unknown: UnknownNameError | None

    def refuse(self, request: Request) -> None:
        """Raise why no node can ever serve a request, unless the CPU will do.

        Raises:
            UnknownNameError: When no node and no installed plug-in knows one of the names.
            NeverFitsError: When none can serve it.
        """
        if not self.verdicts and self.unknown is not None:
            raise self.unknown
        if request.else_cpu:
            return
        nodes = "; ".join(self.reasons) or "no node has any device"
        verdict = self.verdicts[0] if self.verdicts else Verdict(request=request, fits_now=False, ever_fits=False)
        raise NeverFitsError(f"no node of the cluster can ever serve {request}: {nodes}", verdict=verdict)


def find_fitting(
    request: Request, kinds: Sequence[tuple[str, Inventory]], ask: Callable[[int], tuple[T | None, str]]
) -> Fitting[T]:
    """Look at all nodes.

    Args:
        request: What somebody wants.
        kinds: For each kind of nodes, what to call it, and what is on each.
        ask: What the cluster is to be asked for where the kind of this number would serve it; or None, and why not.
    """
    served, verdicts, reasons = {}, [], []
    unknown = None
    there = (name for _, inventory in kinds for device in inventory.devices for name in device.names)
    known = LazyNames(chain(there, KnownNames()))  # each node knows the names of all
    for number, (name, inventory) in enumerate(kinds):
        try:
            verdict = Scheduler(inventory, validate=validate, known=known).why(request)
        except UnknownNameError as error:
            unknown = error
            reasons.append(f"{name} has no such device")
            continue
        verdicts.append(verdict)
        if verdict.ever_fits:
            asked, why = ask(number)
            if asked is not None:
                served[number] = asked
        else:
            asked, why = None, "; ".join(reason.message for reason in verdict.reasons).replace("this machine", "it")
        if asked is None:
            reasons.append(f"{name}: {why}")
    return Fitting(served, tuple(verdicts), tuple(reasons), unknown)


def listed(names: Sequence[str]) -> str:
    """Nodes that are alike, in words."""
    first, *others = names
    return f"node {first}" + (f" and {len(others)} like it" if others else "")
