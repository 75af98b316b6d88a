"""The settings of a pool, and the interface to its engine, which decides where calls run and on which devices."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import InvalidStateError
from functools import partial
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any

from anyaccel import extras
from anyaccel.errors import UsageError, WorkerStartError
from anyaccel.launcher import plan_launch
from anyaccel.model import Allocation, Inventory, Request, Value, replace
from anyaccel.pool.call import AwaitableFuture, BrokenPoolError, Call, CallFuture, GangFuture, Options, get_call_name
from anyaccel.pool.messages import PROTOCOL, Pickled, dumps_whole
from anyaccel.pool.reactor import find_reactor
from anyaccel.vendors.entry_points import entry_points

if TYPE_CHECKING:
    from anyaccel.launcher import EarlySignal, StartOptions, WorkerEnvironment
    from anyaccel.linux import Mark
    from anyaccel.pool.devices import WorkerLease
    from anyaccel.pool.spawning import WorkerServer
    from anyaccel.probe import Machine

USUAL: StartOptions = {"cap": True, "bind": None}
"""Defaults of the options with which workers are started."""
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_NUMBER = re.compile(r"\d{6,12}(?=-)")
LONGEST = 80
GROUP = "anyaccel.engines"
"""Group of the entry points of engines; each is a function that takes a :class:`PoolSettings`."""
LOCAL = "local", "anyaccel.pool.dispatcher:open_engine"
"""Name and entry point of the local engine, found without a search because most pools use it."""


class Logs:
    """A directory with a log file per call, numbered on from existing files.

    Args:
        directory: The directory; made if it does not exist.

    Raises:
        OSError: When the directory cannot be made or listed.
    """

    def __init__(self, directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        self.directory = os.path.abspath(directory)
        earlier = (_NUMBER.match(name) for name in os.listdir(self.directory))
        self._numbers = count(1 + max((int(found[0]) for found in earlier if found), default=0))

    def path_for(self, name: str) -> str:
        """Make an empty log file for the next started call, and return the absolute path.

        Its name is the next number and the call's name, with unfit characters replaced and cut to :data:`LONGEST`
        characters. If the file exists already, the number after that is tried.

        Raises:
            OSError: When the file cannot be made.
        """
        # O_EXCL below, not a check before: another process may make the same file in between.
        while True:
            file = f"{next(self._numbers):06d}-{_UNFIT.sub('_', name)[:LONGEST]}.log"
            path = os.path.join(self.directory, file)
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            except FileExistsError:  # of another pool with the same directory
                continue
            return path


class PoolSettings(Value):
    """Settings of all calls of a pool; see :class:`anyaccel.Pool`.

    Attributes:
        start: Options with which workers are started on their devices.
        sandbox: Pickled call that confines a worker further before any other code of the user, or None.
        initializer: Pickled call of the user's initializer, or None.
        warmup: Pickled call for the first use of the devices, for workers with devices, or None.
        plain: Whether answers are plain data.
        preload: Modules that are imported once for all workers of a machine.
        max_workers: Maximum number of processes, or None.
        grace: Seconds between SIGTERM and SIGKILL.
        early: The signal before the end of a call's time, or None.
        idle: Seconds after which an idle process releases its devices.
        logs: The directory of logs, or None.
        shared: Whether every process on a machine sees the leases.
        machine: The machine, or None for the one that the engine finds.
        declare: Devices to count by resource name, whatever is found.
        address: Address of the engine's cluster, or None.
    """

    start: StartOptions = USUAL
    sandbox: bytes | None = None
    initializer: bytes | None = None
    warmup: bytes | None = None
    plain: bool = False
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

    @property
    def staged(self) -> bool:
        """Whether a worker reports the end of its preparation, because enforcement, a sandbox or user code may fail."""
        return bool(self.start.get("enforce") or self.sandbox or self.initializer or self.warmup)

    def make_setup(
        self, lease: WorkerLease, inventory: Inventory, server: WorkerServer, *, mark: Mark, ready: bool
    ) -> tuple[WorkerEnvironment, Pickled]:
        """Make the first message to a worker, and the worker's cgroup if a limit needs one; the caller removes that.

        Warnings about devices that stay open to the worker are printed on standard error, each once in this process;
        gaps of a sandbox are not.

        Args:
            lease: The lease of its devices.
            inventory: The machine.
            server: Its fork server. If the module path of this process is another one now, the message has that.
            mark: The mark that the worker sets on itself.
            ready: Whether it sends READY before it runs user code.

        Returns:
            The worker's environment, with the allocation as it is enforced and the cgroup; and the message.

        Raises:
            EnforcementError: When the worker must be confined or held to memory, and the kernel cannot.
            EnvConflictError, PluginError: When the environment or the sandbox cannot be made.
            UsageError: When the memory limit is invalid.
            WorkerStartError: When the working directory is gone, or its path cannot be found.
        """
        try:
            directory = os.getcwd()
        except OSError as error:
            raise WorkerStartError(
                f"no worker can be started: the working directory has gone ({error.strerror})"
            ) from error
        # After the check: an error between the plan and the start would leave the plan's cgroup.
        launch = plan_launch(lease.allocation, inventory, self.start, lease=lease.lease_id, forked=True)
        inside = replace(launch, mark=mark).make_setup(server.environ)
        names = ", ".join(f"{device.name} ({device.id})" for device in lease.allocation.devices)
        message = {
            "inside": inside._replace(directory=directory, path=None if sys.path == server.path else list(sys.path)),
            "ready": ready,
            "staged": self.staged,
            "plain": self.plain,
            "sandbox": self.sandbox,
            "initializer": self.initializer,
            "warmup": (self.warmup, names) if self.warmup and names else None,  # the names are for messages
        }
        return launch.environment, Pickled(pickle.dumps(message, PROTOCOL), [])

    def check_cluster(self, title: str) -> None:
        """Check the settings for the engine of a cluster; ``title`` is its name in the message.

        Raises:
            UsageError: When ``machine`` or ``declare`` is set, which are for the local engine alone.
        """
        for name, given in (("machine", self.machine), ("declare", self.declare)):
            if given is not None:
                raise UsageError(f"{name} is for engine='local': each node of a {title} cluster has devices of its own")


class Engine:
    """Runs the calls of one pool. Any thread may call any method.

    Methods without a default have a docstring and no body: each engine implements them.

    Args:
        settings: The settings of the pool.

    Attributes:
        members: Workers that live, or are being launched.
        groups: Actors that live, or wait for a worker.
        settings: The settings of the pool.
        closed: Whether no more calls are taken.
        broken: Why no call can be run, or None.
        drained: Future whose result, None, is set when the pool is closed and no worker is left.
    """

    def __init__(self, settings: PoolSettings) -> None:
        self.members: set[Any] = set()
        self.groups: set[Any] = set()
        self.settings = settings
        self.closed = False
        self._process = os.getpid()
        self.broken: BrokenPoolError | None = None
        self.drained: AwaitableFuture[None] = AwaitableFuture()

    @property
    def foreign(self) -> bool:
        """Whether this process is a fork of the one that made the pool."""
        return self._process != os.getpid()

    def check(self, request: Request) -> None:
        """Raise the error of a request that can never be served.

        Raises:
            UnknownNameError: When no device has one of its names.
            NeverFitsError: When there are too few such devices.
            AnyaccelError: When the machine or the cluster cannot be detected.
        """

    def get_prefetch_limit(self, options: Options) -> int:  # noqa: ARG002
        """Return the number of batches that a ``map`` submits before the durations are known.

        The default, 0, stands for all batches: each of one call, unless the caller of the ``map`` gives a size.
        """
        return 0

    def check_open(self) -> None:
        """Raise the error of a call that cannot be taken any more.

        Raises:
            RuntimeError: When the pool was shut down, or belongs to the parent of this process.
            BrokenPoolError: When the pool is broken.
        """
        if self.foreign:
            raise RuntimeError("this pool belongs to the process that this one was forked from; make a new one here")
        self.check_not_broken()
        if self.closed:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def check_not_broken(self) -> None:
        """Raise the reason why the pool is broken, if it is.

        Raises:
            BrokenPoolError: A new one for each call, because an exception keeps the traceback of each raise.
        """
        if self.broken is not None:
            raise BrokenPoolError(str(self.broken)) from self.broken.__cause__

    def submit(
        self,
        options: Options,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any] | None,
        *,
        late: bool = False,
    ) -> CallFuture[Any]:
        """Run a function as soon as there are a worker and the needed devices; return the future of the result.

        The buffers of the arguments are copied or sent before the return. An exception of pickling fails the future.

        Args:
            options: Options of the call.
            function: The function.
            args: Its arguments; of a batch, a tuple of them for each call.
            kwargs: Its keyword arguments; None for a batch.
            late: Whether the call belongs to a ``map`` that was taken before the pool was closed. The local engine
                takes such a call also after that; if the pool is broken, the future fails. Other engines ignore this.

        Raises:
            RuntimeError: When the pool was shut down, or belongs to the parent of this process.
            BrokenPoolError: When the pool is broken.
            AnyaccelError: When the local engine cannot detect the machine, or finds no directory for leases.
        """
        call = Call(get_call_name(function), options, self.on_cancel)
        self.enter(call, (function, args, kwargs), late=late)
        return call.future

    def gang(self, options: Options, hosts: int, name: str, work: bytes) -> GangFuture[Any]:
        """Run a pickled call on each of several machines at the same time; return the future of the results by rank.

        Raises:
            UsageError: When the engine, or its settings, cannot run so many hosts.
            RuntimeError: When the pool was shut down, or belongs to the parent of this process.
            BrokenPoolError: When the pool is broken.
        """
        raise NotImplementedError

    def enter(self, call: Call, work: Pickled | tuple[Any, ...], *, late: bool = False) -> None:
        """Run an existing call, given the work, pickled or not; an exception of pickling fails the call.

        See :meth:`submit` for ``late`` and the exceptions.
        """

    def copy_arguments(self, call: Call) -> None:
        """Copy the buffers of a call, so that later changes by the caller have no effect."""
        if call.body is not None:
            call.body = call.body.copy()

    def on_cancel(self, call: Call) -> None:
        """Drop a cancelled call, and stop the worker of a running call, unless the call is a method of an actor."""

    def unfinished(self) -> Iterable[Call]:
        """Return the unfinished calls, queued or with a worker; a call may be in the list twice."""
        raise NotImplementedError

    def _cancel_unsent(self) -> None:
        """Cancel, in this thread, the unfinished calls that are not known to have a worker; any thread may call this.

        A method call whose note the reactor has not handled yet is not found: call again in the reactor's thread.
        """
        for call in self.unfinished():
            if not call.sent:
                call.future.cancel()

    def mark_broken(self, cause: BaseException, *others: Call) -> None:
        """Break the pool because a worker could not be set up: fail every unfinished call, and those in ``others``.

        The failed calls have the same BrokenPoolError. The first cause is kept for later calls. Then the engine is
        stopped with the grace period of the settings; see :meth:`stop`.
        """
        error = BrokenPoolError(f"the pool is broken: setting up a worker failed with {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self.broken = self.broken or error
        for call in (*self.unfinished(), *others):
            call.fail(error)
        self.stop(self.settings.grace)

    def quarantined(self) -> tuple[tuple[Allocation, str], ...]:
        """Return the devices that are kept although their holder was ended, with reasons; none by default.

        On a cluster, the nodes keep such devices, and their ledgers say so.
        """
        return ()

    def stop(self, grace: float) -> None:
        """Take no more calls, cancel the queued calls, and have the reactor stop every worker; return before they end.

        A call that a worker has fails, unless the answer comes before. No effect in a forked child.

        Args:
            grace: Seconds between SIGTERM and SIGKILL; a call on a cluster gets the grace of the settings instead.
        """
        if not self.foreign:
            self.shutdown(wait=False, cancel_futures=True)
            find_reactor().call_soon(partial(self._stop, grace))

    def _stop(self, grace: float) -> None:
        """Stop every worker, in the reactor's thread; ``grace`` is as for :meth:`stop`."""
        for member in tuple(self.members):
            member.stop(grace)

    def set_drained(self) -> None:
        """Set the result of ``drained``; no effect the second time."""
        with contextlib.suppress(InvalidStateError):
            self.drained.set_result(None)

    def shutdown(self, *, wait: bool, cancel_futures: bool = False) -> None:
        """Take no more calls, close all actors, and end the workers after the last call. No effect in a forked child.

        Args:
            wait: Whether to return only after the end of the last worker; ignored in the reactor's thread, such as in a
                done-callback, which would wait for itself.
            cancel_futures: Whether to cancel the calls that are not known to have a worker.
        """
        if self.foreign:
            return
        self.closed = True
        if cancel_futures:
            self._cancel_unsent()
            find_reactor().call_soon(self._cancel_unsent)  # methods that wait as notes in front of this one
        find_reactor().call_soon(self._close_actors)
        if wait and not find_reactor().inside:
            self.drained.result()

    def _close_actors(self) -> None:
        """Close all actors, and finish the shutdown if no call waits.

        Actors without work may hold devices that calls in the queues wait for.
        """
        for group in list(self.groups):
            group.close()
        self.finish_shutdown()

    def finish_shutdown(self) -> None:
        """End the workers without work, if the pool is closed and no call waits; set ``drained`` after the last."""


def pickled_call(function: Callable[..., Any] | None, arguments: tuple[Any, ...] = ()) -> bytes | None:
    """Pickle a function with its arguments for :class:`PoolSettings`; return None if the function is None.

    Raises:
        Exception: When the function or an argument cannot be pickled.
    """
    return None if function is None else dumps_whole((function, arguments))


def engines() -> dict[str, str]:
    """Return the entry points (``module:function``) of the local engine and the installed ones, by name."""
    return {LOCAL[0]: LOCAL[1]} | {each: target for each, target, _, _ in entry_points(GROUP)}


def find_engine(name: str) -> str:
    """Return the entry point (``module:function``) of an engine.

    Raises:
        UsageError: When there is no engine of this name, or its extra is not installed.
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
    """Import the module of an engine, and make the engine of a pool.

    Raises:
        UsageError: When there is no engine of this name, its extra is not installed, or it refuses a setting.
        Exception: Another exception of the import or of the engine, such as an EnforcementError.
    """
    module, _, attribute = find_engine(name).partition(":")
    made: Engine = getattr(import_module(module), attribute)(settings)
    return made
