"""Functions run in processes that see exactly the devices they were given."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from anyaccel.errors import UsageError
from anyaccel.launcher.options import StartOptions, check_options
from anyaccel.linux.fork import tidy_in_child
from anyaccel.model import Allocation, replace
from anyaccel.pool.actor import Actor, ActorState
from anyaccel.pool.actors import ActorGroup, Actors
from anyaccel.pool.call import AHEAD, CallFuture, Options, checked, is_whole, name_of
from anyaccel.pool.engine import Engine, PoolSettings, open_engine
from anyaccel.pool.launching import USUAL, Preparation, pickled_call
from anyaccel.pool.logs import Logs
from anyaccel.pool.payload import call_each, dumps, dumps_whole
from anyaccel.pool.progress import ProgressCallback
from anyaccel.pool.reactor import reactor
from anyaccel.pool.results import Batches, MapResults, Results, check_batch
from anyaccel.pool.stream import Stream, YieldedItems
from anyaccel.probe.machine import Machine
from anyaccel.scheduler import RequestLike, parse_request

if TYPE_CHECKING:
    from typing import Unpack

    from anyaccel.launcher.time_limit import EarlySignal
    from anyaccel.pool.gang import GangFuture


class Submitter(Executor):
    """A pool with options for the calls that go through it; see :meth:`Pool.options`."""

    def __init__(self, core: Engine, options: Options, owner: object = None) -> None:
        self._core = core
        self._options = options
        self._owner = owner  # the pool lives as long as somebody can submit to it

    def options(self, **options: Unpack[CallOptions]) -> Submitter:
        """The same pool with other options for the calls that go through what is returned.

        Args:
            needs: The devices that a call holds while it runs; None for the CPU alone.
            timeout: Seconds that a call may run; None for no limit.
            max_calls: Calls after which the process is replaced, 0 for never; None for 1 where devices are needed, and
                else 0.
            retries: Times that a call is run again when its worker or its machine has died.
            max_concurrency: Methods of one actor that may run at the same time, in threads of its process; those of
                ``async`` methods in one event loop.
            ahead: Items that the worker of a :meth:`stream` may be ahead of whoever takes them.

        Raises:
            UsageError: When an option makes no sense.
            UnknownOptionError: When there is no such option.
            NeverFitsError: When the machine can never serve the request.
        """
        check_options("Pool.options", options, CallOptions.__annotations__)
        own = self._options
        known: CallOptions = {"timeout": own.timeout, "retries": own.retries, "ahead": own.ahead}
        known["max_concurrency"] = own.concurrency
        if "needs" not in options:
            known |= {"needs": own.needs, "max_calls": own.max_calls}
        merged: CallOptions = {**known, **options}
        changed = make_options(**merged)
        if changed.needs is not None:
            self._core.check(changed.needs)
        return Submitter(self._core, changed, self._owner or self)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> CallFuture:
        """Run a function in a worker as soon as there is one, and devices for it.

        Returns:
            The future of its result. It can be cancelled also while the function runs.

        Raises:
            RuntimeError: When the pool was shut down.
            BrokenPoolError: When its workers cannot be set up.
        """
        return self._core.submit(self._options, fn, args, kwargs)

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | None = None,
        batch: int | None = None,
        progress: bool | ProgressCallback = False,
    ) -> Results:
        """Run a function over arguments; the results come in their order.

        All arguments are taken at once. What is returned is for one ``for`` or ``async for``. When it ends early, by an
        exception of a call or its ``close()``, the calls that are left are cancelled, those that run included.

        Args:
            fn: The function.
            iterables: Its arguments, one from each.
            timeout: Seconds until all results must be there.
            chunksize: The same as ``batch``, by the name that ``concurrent.futures`` has for it.
            batch: How many calls go to a worker in one message, and come back in one; None to go by the time that they
                take, where a process is used for any number of calls without ``timeout``, ``retries`` and ``logs``, and
                for 1 else.
            progress: True to show how far it is where a terminal or a notebook is, with tqdm or rich where one is
                installed; or a function that is told.

        Raises:
            TimeoutError: When a result is not there in time.
            Exception: What the first call that failed raised, in its place.
        """
        check_batch(batch=batch, chunksize=chunksize)
        size = max(filter(None, (batch, chunksize)), default=None)
        return self._run_all(fn, zip(*iterables, strict=False), timeout, size, progress, in_order=True)

    def map_unordered(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        batch: int | None = None,
        progress: bool | ProgressCallback = False,
    ) -> Results:
        """The same as :meth:`map`; each result comes as soon as it is there."""
        check_batch(batch=batch)
        return self._run_all(fn, zip(*iterables, strict=False), timeout, batch, progress, in_order=False)

    def starmap(
        self, fn: Callable[..., Any], iterable: Iterable[Iterable[Any]], chunksize: int | None = None
    ) -> list[Any]:
        """Run a function over tuples of its arguments, and wait for the results, as ``multiprocessing.Pool`` does.

        Args:
            fn: The function.
            iterable: Its arguments, all for one call together.
            chunksize: How many calls go to a worker in one message; None as for :meth:`map`.

        Raises:
            Exception: What the first call that failed raised; the others are cancelled.
        """
        check_batch(chunksize=chunksize)
        return list(self._run_all(fn, map(tuple, iterable), None, chunksize, progress=False, in_order=True))

    def _run_all(
        self,
        fn: Callable[..., Any],
        arguments: Iterable[tuple[Any, ...]],
        timeout: float | None,
        batch: int | None,
        progress: bool | ProgressCallback,
        *,
        in_order: bool,
    ) -> Results:
        core, options = self._core, self._options
        own = options.max_calls or options.timeout or options.retries or core.settings.logs  # for each call
        most_ahead = core.most_ahead(options)
        batches = Batches(
            arguments,
            lambda part, late: core.submit(options, call_each, (fn, part), {}, late=late),
            size=1 if batch is None and (own or not most_ahead) else batch,
            most_ahead=most_ahead,
            in_order=in_order,
            progress=progress,
        )
        return MapResults(batches, timeout, plain=core.settings.preparation.plain)

    def stream(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Stream:
        """Run a function that yields, and give what it yields as soon as it is there.

        It has a process of its own, and holds its devices until it ends. The worker is so many items ahead as
        :meth:`options` says, and then waits. A ``timeout`` is for each item.

        Args:
            fn: The function, an ``async`` one also. It returns whatever can be iterated over.
            args: Its arguments.
            kwargs: The same.

        Returns:
            What is for one ``for`` or ``async for``. When it ends early, by ``close()`` for instance, the function is
            ended, too.

        Raises:
            RuntimeError: When the pool was shut down.
        """
        state = ActorState(self._core, name_of(fn), replace(self._options, concurrency=1, retries=0))
        stream = Stream(state, self._core.settings.grace, self)  # first: an interrupt that comes later ends it
        self._core.enter(state.construction, (YieldedItems, (fn, args, kwargs), {}, 1))
        return stream

    def gang(self, hosts: int, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> GangFuture:
        """Run a function on several machines at once: one call on each, none before all have their devices.

        Each call finds its place in ``RANK`` and ``WORLD_SIZE``, and a port of rank 0's machine in ``MASTER_ADDR`` and
        ``MASTER_PORT``, as programs for ``torchrun`` do. Where devices of several machines are wired together in a
        slice, the machines are all those of one slice, and the ranks are their numbers in it. When a call fails, the
        others are ended.

        Args:
            hosts: How many machines. The engine ``"local"`` has one.
            fn: The function.
            args: Its arguments, the same for all.
            kwargs: The same.

        Returns:
            The future of a list of the results, by rank.

        Raises:
            RuntimeError: When the pool was shut down.
            UsageError: When the pool's options make no sense for a gang.
            NeverFitsError: When there will never be so many machines that can serve the pool's needs.
            Exception: When the function or an argument cannot be pickled.
        """
        check_gang(hosts, self._options)
        # Each call has a process of its own: its variables say which rank it is.
        options = Options.of(needs=self._options.needs, max_calls=1, timeout=self._options.timeout)
        return self._core.gang(options, hosts, name_of(fn), dumps_whole((fn, args, kwargs)))

    def actor(self, cls: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Actor:
        """Make an object in a process of its own, on devices of its own, and keep it there.

        Args:
            cls: Its class, or whatever makes it.
            args: Arguments of that.
            kwargs: Arguments of that.

        Returns:
            The actor; ``actor.method(...)`` returns a future. It may wait for its devices still.

        Raises:
            RuntimeError: When the pool was shut down.
        """
        state = ActorState(self._core, name_of(cls), replace(self._options, retries=0))
        actor = Actor(state)  # first: an interrupt that comes later ends it
        self._core.enter(state.construction, (cls, args, kwargs, self._options.concurrency))
        return actor

    def actors(self, cls: Callable[..., Any], n: int, /, *args: Any, **kwargs: Any) -> Actors:
        """Make several such objects, each in a process of its own on devices of its own, and use them as one.

        Args:
            cls: Their class, or whatever makes one.
            n: How many. Those that find no devices wait for some, while the others work.
            args: Arguments of that.
            kwargs: Arguments of that.

        Returns:
            What calls the methods of whichever is free.

        Raises:
            UsageError: When ``n`` makes no sense.
            RuntimeError: When the pool was shut down.
            Exception: When the class or an argument cannot be pickled.
        """
        if not is_whole(n, 1):
            raise UsageError(f"n must be a whole number, 1 or more (got {n!r:.60})")
        work = dumps((cls, args, kwargs, self._options.concurrency)).frozen()
        group = ActorGroup(self._core, name_of(cls), self._options, work, n)
        actors = Actors(group)  # first: an interrupt that comes later ends them
        group.begin()
        return actors

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, let those that there are run, and end all workers.

        Args:
            wait: Whether to return only then. A done-callback never waits, since what it would wait for waits for it.
            cancel_futures: Whether to cancel calls that have not started.
        """
        self._core.shutdown(wait=wait, cancel_futures=cancel_futures)


class CallOptions(TypedDict, total=False):
    """The options of the calls of a pool; see :meth:`Pool.options`."""

    needs: RequestLike | None
    timeout: float | None
    max_calls: int | None
    retries: int
    max_concurrency: int
    ahead: int


def make_options(
    needs: RequestLike | None = None,
    *,
    max_calls: int | None = None,
    timeout: float | None = None,
    retries: int = 0,
    max_concurrency: int = 1,
    ahead: int = AHEAD,
) -> Options:
    """Check options and fill in what depends on others.

    Raises:
        UsageError: When one makes no sense.
    """
    checked(max_calls=max_calls, timeout=timeout, retries=retries, max_concurrency=max_concurrency, ahead=ahead)
    request = None if needs is None else parse_request(needs)
    if max_calls is None:
        max_calls = 0 if request is None else 1
    return Options.of(
        needs=request, max_calls=max_calls, timeout=timeout, retries=retries, concurrency=max_concurrency, ahead=ahead
    )


def check_gang(hosts: object, options: Options) -> None:
    """Check what a gang is asked for.

    Raises:
        UsageError: When it makes no sense.
    """
    if not is_whole(hosts, 1):
        raise UsageError(f"hosts must be a whole number, 1 or more (got {hosts!r:.60})")
    if options.retries:
        raise UsageError("a gang is not run again when a worker has died; retries must be 0 for it")


def _early(signal: str | None, timeout: float | None) -> EarlySignal | None:
    """Read the signal that a call gets before its time is over."""
    if signal is None:
        return None
    from anyaccel.launcher.time_limit import check_early

    return check_early(signal, float("inf") if timeout is None else timeout)  # a call may have a time of its own


def check_seconds(**seconds: object) -> None:
    """Check arguments that are times.

    Raises:
        UsageError: When one makes no sense.
    """
    for name, value in seconds.items():
        if not (isinstance(value, (int, float)) and value >= 0):
            raise UsageError(f"{name} must be a number of seconds, 0 or more (got {value!r:.60})")


CONFINING = ("anyaccel.launcher.sandbox", "anyaccel.linux.landlock", "anyaccel.launcher.reach")
"""Modules by which a worker is confined: imported once for all."""


class Pool(Submitter):
    """An executor whose calls run in processes that see exactly the devices they were given.

    A call that holds devices has a process of its own by default, since vendors' runtimes give memory back only when
    their process ends. Calls without needs run on the CPU with all devices hidden, in processes that are used again.

    Args:
        needs: The devices that each call holds while it runs, such as ``"GPU:1"``; None for the CPU alone.
        engine: What decides where calls run: ``"local"`` for this machine, ``"ray"`` or ``"dask"`` for the nodes of a
            cluster, or the name of an entry point of the group ``anyaccel.engines``.
        address: Where the cluster is, as ``ray.init`` or ``dask.distributed.Client`` takes it; None for the one that is
            found, or made on this machine where there is none.
        max_workers: Processes at the same time; None for as many as there are devices, and processors for calls
            without needs.
        machine: The machine, where the engine is local; see :func:`anyaccel.detect`.
        declare: Devices to count by resource name whatever is found; see :func:`anyaccel.declare`.
        max_calls: Calls after which a process is replaced, 0 for never; None for 1 where devices are needed, and
            else 0.
        preload: Modules that are imported once for all workers, before they are forked.
        initializer: Called in each worker before its first call.
        initargs: Arguments of the initializer.
        warmup: Called without arguments in each worker that holds devices, after the initializer and before its first
            call. When it fails, the pool is broken, and says on which device.
        timeout: Seconds that a call may run; None for no limit. Waiting for devices does not count.
        retries: Times that a call is run again when its worker or its machine has died. A call that raises, takes too
            long or is cancelled is not run again.
        grace: Seconds between asking a process to end and killing it.
        signal: A signal to send before a call's ``timeout``, such as ``"USR1@60s"``: 60 seconds before, to each process
            of its worker that catches it. A call whose ``timeout`` is no longer than that gets none.
        idle: Seconds after which a process that is kept for later calls gives its devices back.
        logs: Directory for the output of the calls, a file each; None to let it go where that of this process goes.
        sandbox: Called in each worker right before any code of yours, to confine the process further; when it
            raises, none of your code runs.
        results: How what workers send is read: ``"plain"`` as data of plain types, none of which runs code here, or
            ``"pickle"`` as whatever they made it, which may run any. None for ``"plain"`` where ``enforce`` is given,
            and ``"pickle"`` else.
        shared: Whether every process on the machine knows what is held. When not, only pools of this process that are
            not shared either respect each other.
        start: How workers are started. ``unallocated``: whether vendors of which nothing was given are hidden
            (``"hide"``), or left as the environment has them (``"inherit"``). ``mask``: whether masks name devices by
            stable ``"id"`` or by ``"index"``, where the vendor's runtime takes both. ``cap``, by default True: whether
            PyTorch and TensorFlow are capped at the share of memory of a worker that holds a share of one device, when
            the worker imports them. ``bind``: whether workers run on the processors that are nearest to their devices,
            as far as the machine tells; None, the default, for those of whole devices. ``memory``: how much of the
            host's memory the kernel leaves each worker, with all that it starts and without swap: bytes, or a text such
            as ``"8GiB"``; what takes more is killed, and its call fails. A share of a device is held to its memory
            likewise where the kernel can. ``enforce``: whether the kernel refuses workers, and all that they start, the
            device nodes of all other devices: True to insist, ``"try"`` to do without where the kernel cannot. What is
            not refused is said by ``future.allocation.gaps``, and inside of a call by ``anyaccel.current().gaps``.

    Raises:
        UsageError: When an argument makes no sense.
        UnknownOptionError: When there is no such option.
        EnforcementError: When workers must be confined, or held to ``memory``, and the kernel cannot.
        MachineError: When ``machine`` names no machine.
        StateDirectoryError: When there is no directory for leases that can be trusted.
        NeverFitsError: When the machine can never serve ``needs``.

    Examples:
        >>> def work(number):
        ...     return number * number, anyaccel.current().devices[0].type
        >>> with anyaccel.Pool("GPU:1", machine="sim:H100:2") as pool:
        ...     print(list(pool.map(work, [1, 2, 3])))
        ...     print(pool.options(needs="GPU:2").submit(work, 4).result())
        [(1, 'H100'), (4, 'H100'), (9, 'H100')]
        (16, 'H100')
    """

    def __init__(
        self,
        needs: RequestLike | None = None,
        *,
        engine: str = "local",
        address: str | None = None,
        max_workers: int | None = None,
        machine: str | Machine | None = None,
        declare: Mapping[str, int] | None = None,
        max_calls: int | None = None,
        preload: Sequence[str] = (),
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
        warmup: Callable[[], object] | None = None,
        timeout: float | None = None,
        retries: int = 0,
        grace: float = 10.0,
        signal: str | None = None,
        idle: float = 10.0,
        logs: str | os.PathLike[str] | None = None,
        sandbox: Callable[[], None] | None = None,
        results: Literal["plain", "pickle"] | None = None,
        shared: bool = True,
        **start: Unpack[StartOptions],
    ) -> None:
        check_options("Pool", start, StartOptions.__annotations__, Pool.__init__.__kwdefaults__)
        start = {**USUAL, **start}
        enforce = start.get("enforce", False)
        if max_workers is not None and not is_whole(max_workers, 1):
            raise ValueError(f"max_workers must be greater than 0, and a whole number (got {max_workers!r:.60})")
        for name, call in (("initializer", initializer), ("warmup", warmup), ("sandbox", sandbox)):
            if call is not None and not callable(call):
                raise TypeError(f"{name} must be a callable (got {call!r:.60})")
        if results not in ("plain", "pickle", None):
            raise UsageError(f"results must be 'plain', 'pickle' or None (got {results!r:.60})")
        check_seconds(grace=grace, idle=idle)
        options = make_options(needs, max_calls=max_calls, timeout=timeout, retries=retries)
        settings = PoolSettings(
            preparation=Preparation(
                start=start,
                sandbox=pickled_call(sandbox),
                initializer=pickled_call(initializer, tuple(initargs)),
                warmup=pickled_call(warmup),
                plain=results == "plain" or (results is None and bool(enforce)),
            ),
            preload=((preload,) if isinstance(preload, str) else tuple(preload)) + (CONFINING if enforce else ()),
            max_workers=max_workers,
            grace=grace,
            early=_early(signal, timeout),
            idle=idle,
            logs=None if logs is None else Logs(os.fspath(logs)),
            shared=shared,
            machine=machine,
            declare=declare,
            address=address,
        )
        core = open_engine(engine, settings)
        super().__init__(core, options)
        if options.needs is not None:
            try:
                core.check(options.needs)
            except BaseException:
                core.shutdown(wait=False)
                raise
        _cores.add(core)
        atexit.unregister(_finish_all)
        atexit.register(_finish_all)  # before whatever the engine has registered: that may be what our calls need
        # A finalizer runs wherever garbage is collected, perhaps under one of our locks: it only leaves a note.
        weakref.finalize(self, _abandon, core).atexit = False

    @property
    def quarantined(self) -> tuple[tuple[Allocation, str], ...]:
        """Devices that nobody gets although their holder has been ended, each with the reason.

        A process may be stuck in the kernel, or its memory on the device may not be free yet. They come back when that
        changes.
        """
        return self._core.quarantined()

    def _workers(self) -> list[tuple[str, str, str]]:
        """What each process runs, how many calls stand behind that, and the devices that it holds."""
        core = self._core
        if core.foreign:
            return []
        with core.lock:
            members = [(member.outstanding, member.allocation) for member in core.members if member.begun]
        return sorted(
            (
                calls[0].name if calls else "idle",
                str(len(calls[1:])),
                ", ".join(f"{device.name} {device.id}" for device in (allocation.devices if allocation else ()))
                or "CPU",
            )
            for calls, allocation in members
        )

    def __repr__(self) -> str:
        core, needs, count = self._core, self._options.needs or "CPU", len(self._workers())
        state = (
            "of another process" if core.foreign else "broken" if core.broken else "shut down" if core.closed else ""
        )
        return f"<Pool {needs}: {state or f'{count} worker' + 's' * (count != 1)}>"

    def _repr_html_(self) -> str:
        """Show the workers in a notebook."""
        from anyaccel.model.html import html_table

        return html_table(repr(self)[1:-1], ("runs", "behind it", "devices"), self._workers())

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: object) -> None:
        """Wait for all calls; after Ctrl-C, stop them, and kill them when it is pressed again."""
        try:
            if kind is not None and issubclass(kind, KeyboardInterrupt):
                self._core.stop(self._core.settings.grace)
            self.shutdown(wait=True)
        except KeyboardInterrupt:
            self._core.stop(0)
            raise


_cores: weakref.WeakSet[Engine] = weakref.WeakSet()


def _abandon(core: Engine) -> None:
    if not core.foreign:
        reactor().call_soon(lambda: core.shutdown(wait=False))


@atexit.register
def _finish_all() -> None:
    import sys

    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    try:
        for core in list(_cores):
            if interrupted:
                core.stop(core.settings.grace)
            core.shutdown(wait=True)
    except KeyboardInterrupt:
        for core in list(_cores):
            core.stop(0)


@tidy_in_child
def _disown_all() -> None:
    for core in list(_cores):
        core.foreign = True
