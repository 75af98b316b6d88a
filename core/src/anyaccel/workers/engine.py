"""What a pool leaves to its engine: where calls run, and on which devices."""

# The methods of a protocol have a docstring and no body.
# pyright: reportReturnType=false

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from anyaccel.errors import UsageError
from anyaccel.model import Allocation, Request, Value
from anyaccel.probe.machine import Machine
from anyaccel.workers.launching import Preparation
from anyaccel.workers.logs import Logs
from anyaccel.workers.tasks import Options, Task, TaskFuture

if TYPE_CHECKING:
    from anyaccel.workers.gangs import GangFuture

ENGINES = {"local": "anyaccel.engines.local", "ray": "anyaccel.engines.ray.engine"}
"""Where to find ``open_engine`` of each engine, which is imported once somebody asks for it."""


class Setting(Value):
    """What all calls of a pool have in common; see :class:`anyaccel.Pool`.

    Attributes:
        preparation: What is done in each worker before the first call.
        preload: Modules that are imported once for all workers of a machine.
        max_workers: Processes at the same time, or None.
        grace: Seconds between asking a process to end and killing it.
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
    idle: float = 10.0
    logs: Logs | None = None
    shared: bool = True
    machine: str | Machine | None = None
    declare: Mapping[str, int] | None = None
    address: str | None = None


class Engine(Protocol):
    """Runs the calls of one pool. Every method may be called by any thread."""

    grace: float
    foreign: bool

    @property
    def lock(self) -> threading.Lock:
        """Held over every look at what calls wait and run."""

    def check(self, request: Request) -> None:
        """Raise the error of a request that can never be served."""

    def submit(self, options: Options, function: Callable[..., Any], args: Any, kwargs: Any) -> TaskFuture:
        """Let a call be run as soon as there is a worker and, where it needs them, devices for it."""

    def gang(self, options: Options, hosts: int, name: str, call: bytes) -> GangFuture:
        """Let a pickled call be run on each of several machines at once."""

    def enter(self, task: Task, call: object) -> None:
        """The same for a call that has a future already."""

    def keep(self, task: Task) -> None:
        """Let a call that has to wait not see what becomes of its arguments."""

    def on_cancel(self, task: Task) -> None:
        """A call was cancelled: if it runs, end its worker."""

    def kept_aside(self) -> tuple[tuple[Allocation, str], ...]:
        """Devices that nobody gets although their holder has been ended, and why."""

    def stop(self, grace: float) -> None:
        """Take no more calls, cancel those that wait, and end the workers of those that run."""

    def shutdown(self, *, wait: bool, cancel_futures: bool = False) -> None:
        """Take no more calls; end when those that there are have been run."""


def open_engine(name: str, setting: Setting) -> Engine:
    """Make the engine of a pool.

    Raises:
        UsageError: When there is none of this name, or it cannot do what it is asked for.
    """
    if name not in ENGINES:
        raise UsageError(f"engine must be one of {', '.join(map(repr, ENGINES))} (got {name!r:.60})")
    made: Engine = import_module(ENGINES[name]).open_engine(setting)
    return made
