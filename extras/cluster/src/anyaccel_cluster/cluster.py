"""The interface of a cluster, the messages between a pool and its hosts on nodes, and a search for fitting nodes."""

# Methods without a default have a docstring and no body: each cluster implements them.
# pyright: reportReturnType=false

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from anyaccel.errors import NeverFitsError, UnknownNameError
from anyaccel.model import Allocation, Inventory, Request, Value, VendorState, replace
from anyaccel.pool import GangFuture, Message, Options, Pickled, PoolSettings, dumps_error, read_exception
from anyaccel.scheduler import NameRegistry, Scheduler, Verdict
from anyaccel.vendors import KnownNames, validate

FRESH_SECONDS = 5.0
"""Seconds after which the list of nodes is fetched again."""
FAILED = 0
"""Kind of an answer that no worker gave: the host could not run the call to its end. The data is the error."""


class PoolSpec(Value):
    """What the hosts of a pool must know.

    Attributes:
        pool: Name of the pool, unique on the cluster.
        path: Module path of the pool's process.
        settings: Settings of the workers on each node.
    """

    pool: str
    path: tuple[str, ...]
    settings: PoolSettings


class Order(Value):
    """How a call or an actor is to be run.

    Attributes:
        name: Name of the call in messages.
        request: The request, or None for the CPU alone.
        resources: For each term of the request, the resource of the cluster; empty where the node chooses the devices.
        max_calls: Calls after which a process is replaced; 0 for never.
        timeout: Seconds that the call may run, or None.
        concurrency: Number of methods of an actor that may run at the same time.
    """

    name: str
    request: Request | None
    resources: tuple[str, ...]
    max_calls: int
    timeout: float | None
    concurrency: int


class Started(NamedTuple):
    """The notice of a running call.

    Attributes:
        node: Name of its node.
        allocation: The devices that it holds; None if not known yet.
    """

    node: str
    allocation: Allocation | None


class Answer(NamedTuple):
    """The answer to a call.

    Attributes:
        kind: Kind of the worker's message, or :data:`FAILED`.
        data: The pickled value or error.
        buffers: Memory that the pickle refers to.
        started: Where the call ran, if it did.
    """

    kind: int
    data: bytes
    buffers: tuple[bytearray, ...] = ()
    started: Started | None = None

    def message(self, number: int = 0) -> Message:
        """Return the worker's message, with the number of the call in this process."""
        return Message(self.kind, self.data, [memoryview(each) for each in self.buffers], [], number)

    def error(self) -> Any:
        """Return the error of a host, or the one of a worker's setup, which the host has read and written again."""
        return read_exception(self.message(), plain=False)


def make_failure(error: BaseException) -> Answer:
    """Make the answer of a call after a failure of the host: of the kind :data:`FAILED`, with the error."""
    return Answer(FAILED, dumps_error(error, "").data)


class Plan(Value):
    """The cluster's own form of a request, shared by calls with the same request; each cluster adds fields.

    Attributes:
        request: The devices of a worker; None for the CPU alone.
        terms: For each term of the request, the resource of the cluster; empty where the node chooses the devices.
    """

    request: Request | None = None
    terms: tuple[str, ...] = ()


P = TypeVar("P", bound=Plan)
T = TypeVar("T")


class Cluster(Protocol[P]):
    """A cluster in use by a pool. Any thread may call any method.

    A *ref* below is the cluster's own handle of a value that is not there yet.

    Attributes:
        title: Name of the cluster in messages.
    """

    title: str
    _lock: threading.Lock
    _plans: dict[Request, P]
    _refreshed: float

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans = {}
        self._refreshed = float("-inf")

    @property
    def connected(self) -> bool:
        """Whether this process is connected to the cluster."""

    def open(self, driver: Any, spec: bytes) -> None:
        """Begin to serve a pool.

        Args:
            driver: The engine; its ``on_started`` is told where calls run.
            spec: The pickled :class:`PoolSpec` for the hosts.
        """

    def plan(self, request: Request) -> P:
        """Return the plan of a request: the same object until the nodes change.

        The list of nodes is fetched again if it is older than :data:`FRESH_SECONDS`.

        Raises:
            AnyaccelError: When no node can ever serve the request.
        """
        with self._lock:
            if time.monotonic() - self._refreshed > FRESH_SECONDS:
                self.refresh()
                self._refreshed = time.monotonic()
            plan = self._plans.get(request)
            if plan is None:
                plan = self._plans[request] = self.find_plan(request)
            return plan

    def check_nodes(self, request: Request) -> None:
        """Check that a node that is there now, or that may be added, can serve a request.

        Raises:
            AnyaccelError: When there is none.
        """
        self.plan(request)

    def refresh(self) -> None:
        """Drop all plans, as they may be stale; the caller holds the lock."""
        self._plans.clear()

    def find_plan(self, request: Request) -> P:
        """Compute the plan of a request; the caller holds the lock."""

    def place(self, order: Order, plan: P, *, actor: bool) -> Any:
        """Return the ``place`` argument of :meth:`run` and :meth:`host`."""

    def run(self, place: Any, order: bytes, key: str, log: str | None, body: Pickled) -> Any:
        """Submit a call with its pickled order; return a ref of the pickled answer."""

    def host(self, place: Any, order: bytes, key: str) -> RemoteHost:
        """Submit the host of an actor with its pickled order."""

    def future(self, ref: Any) -> Future[Any]:
        """Return a future of the value of a ref; a future is returned unchanged."""
        found: Future[Any] = ref
        return found

    def cancel(self, key: str, ref: Any) -> None:
        """End a call, running or not. The host grants the pool's time of grace."""

    def remove_call(self, key: str, *, left: bool) -> None:
        """Remove the cluster's records of a finished call; ``left`` if the host could not do so."""

    def explain_loss(self, error: BaseException) -> str:
        """Return a clause with the failure of the cluster's own code; empty after the death of a process."""

    def gang(self, driver: Any, options: Options, hosts: int, name: str, work: bytes) -> GangFuture[Any]:
        """Run a pickled call on several nodes at the same time.

        Raises:
            UsageError: When the cluster cannot reserve several nodes at once.
        """

    def close(self) -> None:
        """Release what :meth:`open` took, because the pool has ended. Called once."""


class RemoteHost(Protocol):
    """The host of an actor on a node, from submission to exit."""

    def started(self) -> Any:
        """Return a ref of a :class:`Started`, or of the answer that says why the host failed."""

    def call(self, method: str, log: str | None, data: bytes, *buffers: bytes) -> Any:
        """Return a ref of the answer to a method call, or to the construction if the method's name is empty."""

    def ended(self) -> Any:
        """Return a ref of the answer that says why the object's process has ended."""

    def close(self) -> None:
        """Let the object's process exit."""

    def stop(self, grace: float) -> None:
        """End the object's process, with so many seconds between SIGTERM and SIGKILL."""

    def kill(self) -> None:
        """End the host at once."""


class Fitting(NamedTuple, Generic[T]):
    """The result of a search for nodes.

    Attributes:
        served: For each kind of nodes that can serve the request, by its number, what the cluster is asked for.
        verdicts: The scheduler's verdict on each kind that knows all names.
        reasons: A clause for each kind that cannot serve the request.
        unknown: The error of a name that no node and no installed plug-in knows.
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
    there = {name.lower(): name for _, inventory in kinds for device in inventory.devices for name in device.names}
    known = NameRegistry(chain(there.values(), KnownNames()))  # a name of one node is no typo on another
    for number, (name, inventory) in enumerate(kinds):
        try:
            verdict = Scheduler(inventory, validate=validate, known=known).why(request)
        except UnknownNameError:
            unknown = _make_unknown(request, known, there, [inventory for _, inventory in kinds])
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


def _make_unknown(
    request: Request, known: NameRegistry, there: Iterable[str], inventories: Iterable[Inventory]
) -> UnknownNameError:
    """Make the error for the first unknown name of a request, with the names of all nodes."""
    name = next(term.names[0] for term in request.terms if len(known.find_unknown(term.names)) == len(term.names))
    reports = (report for inventory in inventories for report in inventory.vendors)
    silent = [report.vendor for report in reports if report.state is VendorState.FAILED and not report.resource]
    return known.make_error(name, there, silent, where="the cluster")


def describe_nodes(names: Sequence[str]) -> str:
    """Name equal nodes in a message: the first name, and the number of further nodes."""
    first, *others = names
    return f"node {first}" + (f" and {len(others)} like it" if others else "")


def without_durations(inventory: Inventory) -> Inventory:
    """Return an inventory without the durations of detection, so that nodes with the same devices compare equal."""
    return replace(inventory, vendors=tuple(replace(report, seconds=0.0) for report in inventory.vendors))


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text, which follows the traceback in errors of clusters.

    For an error without a text, return the name of its class.
    """
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def get_outcome(done: Future[Any]) -> tuple[Any, BaseException | None]:
    """Return the value and the error of a future, which is waited for; either is None."""
    try:
        return done.result(), None
    except BaseException as error:  # noqa: BLE001 - clusters raise many kinds, also CancelledError
        return None, error
