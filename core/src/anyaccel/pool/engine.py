"""What a pool leaves to its engine: where calls run, and on which devices."""

# The methods of a protocol that each engine has its own way to do have a docstring and no body.
# pyright: reportReturnType=false

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from anyaccel import extras
from anyaccel.errors import UsageError
from anyaccel.model import Allocation, Request, Value
from anyaccel.pool.call import BrokenPoolError, Call, CallFuture, Options, name_of
from anyaccel.pool.launching import Preparation
from anyaccel.pool.logs import Logs
from anyaccel.pool.payload import Pickled
from anyaccel.probe.machine import Machine
from anyaccel.vendors.entry_points import entry_points

if TYPE_CHECKING:
    from anyaccel.launcher.time_limit import EarlySignal
    from anyaccel.pool.gang import GangFuture

GROUP = "anyaccel.engines"
"""Group of the entry points by which engines are found; each is a function that takes a :class:`PoolSettings`."""
LOCAL = "local", "anyaccel.engines.local:open_engine"
"""The one that is looked for nowhere, since most pools are of it."""


class PoolSettings(Value):
    """What all calls of a pool have in common; see :class:`anyaccel.Pool`.

    Attributes:
        preparation: What is done in each worker before the first call.
        preload: Modules that are imported once for all workers of a machine.
        max_workers: Processes at the same time, or None.
        grace: Seconds between asking a process to end and killing it.
        early: The signal that a call gets before its time is over, or None.
        idle: Seconds after which an unused process gives its devices back.
        logs: Where the output of each call goes, or None.
        shared: Whether every process on a machine knows what is held there.
        machine: The machine, or None for the one that the engine finds.
        declare: Devices to count whatever is found.
        address: Where the engine's cluster is, or None.
    """

    preparation: Preparation
    preload: tuple[str, ...] = ()
    max_workers: int | None = None
    grace: float = 10.0
    early: EarlySignal | None = None
    idle: float = 10.0
    logs: Logs | None = None
    shared: bool = True
    machine: str | Machine | None = None
    declare: Mapping[str, int] | None = None
    address: str | None = None

    def check_cluster(self, title: str) -> None:
        """Check what an engine of a cluster is given.

        Args:
            title: Name of the cluster.

        Raises:
            UsageError: When it is something for one machine.
        """
        for name, given in (("machine", self.machine), ("declare", self.declare)):
            if given is not None:
                raise UsageError(f"{name} is for engine='local': each node of a {title} cluster has devices of its own")


class Engine(Protocol):
    """Runs the calls of one pool. Every method may be called by any thread.

    Args:
        settings: What all calls have in common.

    Attributes:
        lock: Held over every look at what calls wait and run.
        members: What runs calls, or is about to.
        settings: What all calls have in common.
        foreign: Whether we are a fork of the process that the pool belongs to.
        closed: Whether no more calls are taken.
        broken: Why no call can be run, or None.
        drained: Set when it is closed and nothing is left.
    """

    lock: threading.Lock
    members: set[Any]
    settings: PoolSettings
    foreign: bool
    closed: bool
    broken: BrokenPoolError | None
    drained: threading.Event

    def __init__(self, settings: PoolSettings) -> None:
        self.lock = threading.Lock()
        self.members = set()
        self.settings = settings
        self.foreign = self.closed = False
        self.broken = None
        self.drained = threading.Event()

    def check(self, request: Request) -> None:
        """Raise the error of a request that can never be served."""

    def most_ahead(self, options: Options) -> int:  # noqa: ARG002
        """Batches of a ``map`` that are made before it is known how long calls take; 0 for all, one call each."""
        return 0

    def check_open(self) -> None:
        """Raise what keeps a call from being taken."""
        if self.foreign:
            raise RuntimeError("this pool belongs to the process that this one was forked from; make a new one here")
        self.check_whole()
        if self.closed:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def check_whole(self) -> None:
        """Raise why no call can be run."""
        if self.broken is not None:
            raise BrokenPoolError(str(self.broken)) from self.broken.__cause__

    def submit(
        self, options: Options, function: Callable[..., Any], args: Any, kwargs: Any, *, late: bool = False
    ) -> CallFuture:
        """Let a call be run as soon as there is a worker and, where it needs them, devices for it.

        Args:
            options: How.
            function: The function.
            args: Its arguments.
            kwargs: The same.
            late: Whether it belongs to what was taken before the pool was closed.
        """
        call = Call(name_of(function, args), options, self.on_cancel)
        self.enter(call, (function, args, kwargs), late=late)
        return call.future

    def gang(self, options: Options, hosts: int, name: str, work: bytes) -> GangFuture:
        """Let a pickled call be run on each of several machines at once."""

    def enter(self, call: Call, work: Pickled | tuple[Any, ...], *, late: bool = False) -> None:
        """The same for a call that has a future already, and whose work may be pickled already."""

    def keep(self, call: Call) -> None:
        """Let a call that has to wait not see what becomes of its arguments."""
        body = call.body
        if body is not None and body.buffers:
            frozen = body.frozen()
            with self.lock:
                if call.body is body:
                    call.body = frozen

    def on_cancel(self, call: Call) -> None:
        """A call was cancelled: if it runs, end its worker."""

    def unfinished(self) -> Iterable[Call]:
        """Calls that wait, or run."""

    def break_off(self, cause: BaseException, *others: Call) -> None:
        """Run no more calls, since a worker could not be set up, and let those that are left fail."""
        error = BrokenPoolError(f"the pool is broken: setting up a worker failed with {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self.broken = self.broken or error
        for call in (*self.unfinished(), *others):
            call.fail(error)
        self.stop(self.settings.grace)

    def quarantined(self) -> tuple[tuple[Allocation, str], ...]:
        """Devices that nobody gets although their holder has been ended, and why."""

    def stop(self, grace: float) -> None:
        """Take no more calls, cancel those that wait, and end the workers of those that run."""
        if self.foreign:
            return
        self.shutdown(wait=False, cancel_futures=True)
        with self.lock:
            members = list(self.members)
        for member in members:
            member.stop(grace)

    def shutdown(self, *, wait: bool, cancel_futures: bool = False) -> None:
        """Take no more calls; end when those that there are have been run."""


def engines() -> dict[str, str]:
    """Find the engines that are installed: where each is opened, by name."""
    return {LOCAL[0]: LOCAL[1]} | {each: target for each, target, _, _ in entry_points(GROUP)}


def find_engine(name: str) -> str:
    """Find where an engine is opened.

    Raises:
        UsageError: When there is none of this name, or its extra is not installed.
    """
    if name == LOCAL[0]:
        return LOCAL[1]
    found = engines()
    if name in found:
        return found[name]
    if name in extras.ENGINES:
        raise extras.not_installed(f"the engine {name!r}", extras.ENGINES[name])
    known = sorted({*found, *extras.ENGINES})
    raise UsageError(f"engine must be one of {', '.join(map(repr, known))} (got {name!r:.60})")


def open_engine(name: str, settings: PoolSettings) -> Engine:
    """Make the engine of a pool.

    Raises:
        UsageError: When there is none of this name, its extra is not installed, or it cannot do what it is asked for.
    """
    module, _, attribute = find_engine(name).partition(":")
    made: Engine = getattr(import_module(module), attribute)(settings)
    return made
