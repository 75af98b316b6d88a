"""What an engine gives to a pool on a cluster: a way to have calls run and actors hosted."""

# The methods of a protocol that each cluster has its own way to do have a docstring and no body.
# pyright: reportReturnType=false

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from anyaccel.engines.remote.messages import Order
from anyaccel.model import Inventory, Request, Value, replace
from anyaccel.pool.call import Options
from anyaccel.pool.payload import Pickled

if TYPE_CHECKING:
    from anyaccel.pool.gang import GangFuture

FRESH_SECONDS = 5.0
"""How long what was found out about the nodes holds."""


class Plan(Value):
    """What a cluster is asked for, for all calls with the same needs; each cluster adds what it has to say.

    Attributes:
        request: What the workers are to be given; None for the CPU alone.
        terms: For each term of the request, the resource that it is asked as; empty where the node chooses the devices.
    """

    request: Request | None = None
    terms: tuple[str, ...] = ()


P = TypeVar("P", bound=Plan)


class Cluster(Protocol[P]):
    """What a cluster does for one pool. Every method may be called by any thread.

    What it returns for a call on its way, *ref* below, belongs to it.

    Attributes:
        title: Its name, in messages.
    """

    title: str
    _lock: threading.Lock
    _plans: dict[Request, P]
    _looked: float

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans = {}
        self._looked = float("-inf")

    @property
    def connected(self) -> bool:
        """Whether this process still belongs to it."""

    def open(self, driver: Any, spec: bytes) -> None:
        """Begin: with the pool that wants to hear of what starts, and what its hosts must know."""

    def plan(self, request: Request) -> P:
        """What to ask for; the same object for the same request, until the nodes change.

        Raises:
            AnyaccelError: When no node can ever serve it.
        """
        with self._lock:
            if time.monotonic() - self._looked > FRESH_SECONDS:
                self.look()
                self._looked = time.monotonic()
            plan = self._plans.get(request)
            if plan is None:
                plan = self._plans[request] = self.find(request)
            return plan

    def look(self) -> None:
        """Drop the plans that may not hold any more; called with the lock held."""
        self._plans.clear()

    def find(self, request: Request) -> P:
        """What to ask for, found out anew; called with the lock held."""

    def place(self, order: Order, plan: P, *, actor: bool) -> Any:
        """What :meth:`run` and :meth:`host` take, for all calls that are alike."""

    def run(self, place: Any, order: bytes, key: str, log: str | None, body: Pickled) -> Any:
        """Have a call run, as a pickled order says; returns its ref, of which the value is a pickled answer."""

    def host(self, place: Any, order: bytes, key: str) -> RemoteHost:
        """Have an actor hosted, as a pickled order says."""

    def future(self, ref: Any) -> Future[Any]:
        """A future of a value, or of why it never will be there; a ref may be one."""
        found: Future[Any] = ref
        return found

    def attend(self, ref: Any, pending: Callable[[], bool], seconds: float | None) -> tuple[Any, Any] | None:  # noqa: ARG002
        """Wait for a value in this thread, where that saves time: value and error, or None when it is not there."""
        return None

    def cancel(self, key: str, ref: Any) -> None:
        """End a call, whether it runs or not. Its host gives it the pool's time of grace."""

    def recall(self, key: str, ref: Any) -> None:
        """End a call unless it runs; then :meth:`recalled` says whether an error came of that."""

    def recalled(self, error: BaseException) -> bool:
        """Whether a call has ended because it was recalled."""

    def forget(self, key: str, *, left: bool) -> None:
        """A call is over; ``left`` when nobody has seen to what it left behind."""

    def lost(self, error: BaseException) -> str:
        """Why a process of the cluster has not answered: a clause when its own code failed, empty when it has died."""

    def gang(self, driver: Any, options: Options, hosts: int, name: str, work: bytes) -> GangFuture:
        """Run a pickled call on several nodes at once.

        Raises:
            UsageError: When the cluster cannot.
        """

    def close(self) -> None:
        """The pool has ended."""


class RemoteHost(Protocol):
    """The host of an actor, on its way or there."""

    def started(self) -> Any:
        """Ref of a :class:`Started`, or of an answer that says why there is no host."""

    def call(self, method: str, log: str | None, data: bytes, *buffers: bytes) -> Any:
        """Ref of the answer to a call of a method of the object; where that has no name, to making the object."""

    def ended(self) -> Any:
        """Ref of an answer that says why the object has gone."""

    def close(self) -> None:
        """Let the object's process end by itself."""

    def stop(self, grace: float) -> None:
        """End it."""

    def kill(self) -> None:
        """End the host, whatever it does."""


def alike(inventory: Inventory) -> Inventory:
    """What is on a node, the same each time that the same is found: without how long that took."""
    return replace(inventory, vendors=tuple(replace(report, seconds=0.0) for report in inventory.vendors))


def last_line(error: BaseException) -> str:
    """What an error of a cluster comes to; it may have a traceback in its text."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def outcome(done: Future[Any]) -> tuple[Any, BaseException | None]:
    """The value of a future that is done, or why there is none."""
    try:
        return done.result(), None
    except BaseException as error:  # noqa: BLE001 - clusters raise many kinds
        return None, error
