"""Find nodes of a cluster for a request, and explain a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from anyaccel.errors import NeverFitsError, UnknownNameError
from anyaccel.launcher.choosing import KnownNames, validate
from anyaccel.model import Inventory, Request
from anyaccel.scheduler import Scheduler, Verdict
from anyaccel.scheduler.placement import NameRegistry

T = TypeVar("T")


class Fitting(NamedTuple, Generic[T]):
    """The result of a search for nodes.

    Attributes:
        served: For each kind of nodes that can serve the request, by its number, what the cluster is asked for.
        verdicts: The scheduler's verdict on each kind that knows all names.
        reasons: A clause for each kind that cannot serve the request.
        unknown: The error of a kind that does not know a name.
    """

    served: dict[int, T]
    verdicts: tuple[Verdict, ...]
    reasons: tuple[str, ...]
    unknown: UnknownNameError | None

    def refuse(self, request: Request) -> None:
        """Raise the error of a request that no node can serve; return if the request falls back to the CPU.

        Raises:
            UnknownNameError: When no node and no installed plug-in knows one of the names.
            NeverFitsError: When no node has the devices.
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
    """Ask the scheduler for each kind of nodes whether it can ever serve a request, and sort the kinds.

    A kind that does not know a name counts as unable, and no UnknownNameError is raised. For each able kind, ``ask`` is
    called.

    Args:
        request: The request.
        kinds: For each kind of nodes, a name for messages and the inventory of each node.
        ask: Returns what the cluster is asked for on the kind of a number; or None and a clause that says why it cannot
            be asked.
    """
    served, verdicts, reasons = {}, [], []
    unknown = None
    there = (name for _, inventory in kinds for device in inventory.devices for name in device.names)
    known = NameRegistry(chain(there, KnownNames()))  # a name of one node is no typo on another
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


def describe_nodes(names: Sequence[str]) -> str:
    """Name equal nodes in a message: the first name, and the number of further nodes."""
    first, *others = names
    return f"node {first}" + (f" and {len(others)} like it" if others else "")
