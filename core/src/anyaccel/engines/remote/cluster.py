"""What an engine gives to a pool on a cluster: a way to have calls run and actors hosted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from anyaccel.model import Request
from anyaccel.pool.call import Options
from anyaccel.pool.payload import Pickled
from anyaccel.pool.reactor import reactor

if TYPE_CHECKING:
    from anyaccel.pool.gang import GangFuture


class Cluster(Protocol):
    """What a cluster does for one pool. Every method may be called by any thread.

    What it returns for a call on its way, *ref* below, belongs to it.

    Attributes:
        title: Its name, in messages.
    """

    title: str

    @property
    def connected(self) -> bool:
        """Whether this process still belongs to it."""
        raise NotImplementedError

    def open(self, driver: Any, spec: bytes) -> None:
        """Begin: with the pool that wants to hear of what starts, and what its hosts must know."""

    def check(self, request: Request) -> None:
        """Raise the error of a request that no node can ever serve."""

    def plan(self, request: Request) -> Any:
        """What to ask for; the same object for the same request, until the nodes change.

        Raises:
            AnyaccelError: When no node can ever serve it.
        """

    def place(self, name: str, options: Options, plan: Any, *, actor: bool) -> Any:
        """What :meth:`run` and :meth:`host` take, for all calls that are alike; ``plan`` is None for the CPU alone."""

    def run(self, place: Any, key: str, log: str | None, body: Pickled) -> Any:
        """Have a call run; returns its ref, of which the value is a pickled :class:`Answer`."""

    def host(self, place: Any, key: str) -> RemoteHost:
        """Have an actor hosted."""
        raise NotImplementedError

    def follow(self, ref: Any, hear: Callable[[Any, BaseException | None], None], wanted: Callable[[], bool]) -> None:
        """Have a value handed over in the thread of the reactor once it is there, or why it never will be."""

    def attend(self, ref: Any, pending: Callable[[], bool], seconds: float | None) -> tuple[Any, Any] | None:
        """Wait for a value in this thread, where that saves time: value and error, or None when it is not there."""

    def cancel(self, key: str, ref: Any) -> None:
        """End a call, whether it runs or not. Its host gives it the pool's time of grace."""

    def recall(self, key: str, ref: Any) -> None:
        """End a call unless it runs; then :meth:`recalled` says whether an error came of that."""

    def recalled(self, error: BaseException) -> bool:
        """Whether a call has ended because it was recalled."""
        raise NotImplementedError

    def forget(self, key: str, *, left: bool) -> None:
        """A call is over; ``left`` when nobody has seen to what it left behind."""

    def lost(self, error: BaseException) -> str:
        """Why a process of the cluster has not answered: a clause when its own code failed, empty when it has died."""
        raise NotImplementedError

    def gang(self, driver: Any, options: Options, hosts: int, name: str, work: bytes) -> GangFuture:
        """Run a pickled call on several nodes at once.

        Raises:
            UsageError: When the cluster cannot.
        """
        raise NotImplementedError

    def close(self) -> None:
        """The pool has ended."""


class RemoteHost(Protocol):
    """The host of an actor, on its way or there."""

    def started(self) -> Any:
        """Ref of a :class:`Started`, or of an answer that says why there is no host."""

    def construct(self, log: str | None, data: bytes, *buffers: bytes) -> Any:
        """Ref of the answer to making the object."""

    def call(self, method: str, log: str | None, data: bytes, *buffers: bytes) -> Any:
        """Ref of the answer to a call of a method."""

    def ended(self) -> Any:
        """Ref of an answer that says why the object has gone."""

    def close(self) -> None:
        """Let the object's process end by itself."""

    def stop(self, grace: float) -> None:
        """End it."""

    def kill(self) -> None:
        """End the host, whatever it does."""


def last_line(error: BaseException) -> str:
    """What an error of a cluster comes to; it may have a traceback in its text."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def outcome(done: Future[Any]) -> tuple[Any, BaseException | None]:
    """The value of a future that is done, or why there is none."""
    try:
        return done.result(), None
    except BaseException as error:  # noqa: BLE001 - clusters raise many kinds
        return None, error


def hand_over(
    future: Future[Any], hear: Callable[[Any, BaseException | None], None], wanted: Callable[[], bool]
) -> None:
    """Have the outcome of a future handed over in the thread of the reactor, if somebody wants it by then."""

    def tell(done: Future[Any]) -> None:
        if wanted():
            reactor().call_soon(partial(hear, *outcome(done)))

    future.add_done_callback(tell)
