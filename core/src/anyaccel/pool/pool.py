"""Pools: executors whose calls run in processes that see exactly their devices."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar, TypeVarTuple, overload

from anyaccel.durations import Duration, read_seconds
from anyaccel.errors import UsageError
from anyaccel.launcher import StartOptions, check_options
from anyaccel.model import Allocation, replace
from anyaccel.pool.actor import Actor, ActorGroup, Actors, Stream
from anyaccel.pool.call import AHEAD, CallFuture, GangFuture, Options, check_whole, get_call_name, is_whole
from anyaccel.pool.engine import USUAL, Engine, Logs, PoolSettings, open_engine, pickled_call
from anyaccel.pool.messages import YieldedItems, dumps, dumps_whole
from anyaccel.pool.reactor import find_reactor
from anyaccel.pool.results import Batches, MapResults, Results, UnorderedOptions, check_batch, read_end
from anyaccel.scheduler import RequestLike, parse_request

if TYPE_CHECKING:
    from typing import Unpack

    from anyaccel.launcher import EarlySignal
    from anyaccel.pool.results import ProgressCallback
    from anyaccel.probe import Machine


P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
Ts = TypeVarTuple("Ts")


class Submitter(Executor):
    """A pool with options for calls; see :meth:`Pool.options`."""

    def __init__(self, core: Engine, options: Options, owner: object = None) -> None:
        self._core = core
        self._options = options
        self._owner = owner  # keeps the pool alive as long as this object can submit to it

    def __reduce__(self) -> str:
        raise TypeError(
            "a pool belongs to the process that made it and cannot be sent to another, also not as a global or an"
            " attribute of what is sent; call it there, or make another one inside of the call"
        )

    def options(self, **options: Unpack[CallOptions]) -> Submitter:
        """Return a submitter to the same pool with other options for calls; the options of this object stay.

        Options that are not given are those of this object, except that ``needs`` resets ``max_calls`` to the default.
        The pool lives as long as the submitter. To shut the submitter down, also by a ``with`` statement, shuts the
        pool down.

        Args:
            needs: The devices that a call holds while it runs; None for the CPU alone.
            timeout: Time that a call may run; None for no limit.
            max_calls: Calls after which the process is replaced, 0 for never; None for 1 with devices and 0 without.
            retries: Number of times that a call is run again when its worker or its machine has died.
            max_concurrency: Number of methods of one actor that may run at the same time, in threads of its process;
                ``async`` methods in one event loop.
            ahead: Number of items that the worker of a :meth:`stream` prefetches.

        Raises:
            UsageError: When the value of an option is not permitted, or no device has a name in ``needs``.
            UnknownOptionError: When there is no such option.
            NeverFitsError: When the machine can never serve the request.
            AnyaccelError: When the engine cannot check that, for instance without a machine.
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

    @overload
    def submit(
        self, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> CallFuture[T]: ...

    @overload
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]: ...

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """Run a function in a worker as soon as there are a worker and devices; returns at once.

        Returns:
            The future of its result. It can be cancelled also while the function runs. An exception of pickling is its
            outcome. Later changes of the arguments have no effect.

        Raises:
            RuntimeError: When the pool was shut down, or belongs to the parent of this process.
            BrokenPoolError: When the setup of a worker has failed before.
            MachineError: When the machine cannot be detected; the first call of a pool detects the machine.
            UsageError: When ``ANYACCEL_PLUGINS`` or ``ANYACCEL_ALLOCATION`` is invalid, at the same time.
            LedgerError: When there is no directory for leases that can be trusted, or a system call fails.
        """
        return self._core.submit(self._options, fn, args, kwargs)

    # Not the signature of Executor.map(), which takes any iterables for any function.
    @overload  # type: ignore[override]
    def map(
        self, fn: Callable[[A], Coroutine[Any, Any, T]], iterable: Iterable[A], /, **options: Unpack[MapOptions]
    ) -> Results[T]: ...

    @overload
    def map(self, fn: Callable[[A], T], iterable: Iterable[A], /, **options: Unpack[MapOptions]) -> Results[T]: ...

    @overload
    def map(
        self, fn: Callable[[A, B], T], first: Iterable[A], second: Iterable[B], /, **options: Unpack[MapOptions]
    ) -> Results[T]: ...

    @overload
    def map(
        self,
        fn: Callable[..., T],
        first: Iterable[Any],
        second: Iterable[Any],
        third: Iterable[Any],
        /,
        *others: Iterable[Any],
        **options: Unpack[MapOptions],
    ) -> Results[T]: ...

    def map(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        fn: Callable[..., Any],
        /,
        *iterables: Iterable[Any],
        timeout: Duration | None = None,
        chunksize: int | None = None,
        batch: int | None = None,
        progress: bool | ProgressCallback = False,
    ) -> Results[Any]:
        """Run a function over arguments, up to the end of the shortest iterable; the results come in their order.

        All arguments are taken at once, and calls start before the first result is asked for. The result is for one
        ``for`` or ``async for``. When a begun iteration ends early, by an exception of a call, by ``close()``, or
        because nothing refers to the result any more, the calls that are left are cancelled, also running calls.
        Without any iteration or ``close()``, all calls run, even if nothing refers to the result.

        Args:
            fn: The function.
            iterables: Its arguments, one from each.
            timeout: Time from now until all results must be there.
            chunksize: The name of ``batch`` in ``concurrent.futures``; the larger one counts.
            batch: Number of calls that travel in one message. None chooses it by the duration of the calls on this
                machine, if processes are used for any number of calls and there are no ``timeout``, ``retries`` and
                ``logs``; else, and on a cluster, it is 1.
            progress: True to show the progress on a terminal or in a notebook, with tqdm if that is installed;
                or a function that is called with the :class:`Progress`, in a thread of the library, and not again after
                it has raised, which is logged.

        Raises:
            ValueError: When ``batch`` or ``chunksize`` is no whole number of 1 or more.
            UsageError: When ``timeout`` is no duration; no call was submitted then.
            RuntimeError: When the pool was shut down, or is broken; calls that were submitted before are cancelled.
            AnyaccelError: When the engine cannot take calls, for instance without a machine.
            TimeoutError: When a result is not there in time; raised by the iteration.
            Exception: The exception of a call that failed, in its place in the iteration.
        """
        check_batch(batch=batch, chunksize=chunksize)
        size = max(filter(None, (batch, chunksize)), default=None)
        return self._run_all(fn, zip(*iterables, strict=False), timeout, size, progress, in_order=True)

    @overload
    def map_unordered(
        self, fn: Callable[[A], Coroutine[Any, Any, T]], iterable: Iterable[A], /, **options: Unpack[UnorderedOptions]
    ) -> Results[T]: ...

    @overload
    def map_unordered(
        self, fn: Callable[[A], T], iterable: Iterable[A], /, **options: Unpack[UnorderedOptions]
    ) -> Results[T]: ...

    @overload
    def map_unordered(
        self, fn: Callable[[A, B], T], first: Iterable[A], second: Iterable[B], /, **options: Unpack[UnorderedOptions]
    ) -> Results[T]: ...

    @overload
    def map_unordered(
        self,
        fn: Callable[..., T],
        first: Iterable[Any],
        second: Iterable[Any],
        third: Iterable[Any],
        /,
        *others: Iterable[Any],
        **options: Unpack[UnorderedOptions],
    ) -> Results[T]: ...

    def map_unordered(
        self,
        fn: Callable[..., Any],
        /,
        *iterables: Iterable[Any],
        timeout: Duration | None = None,
        batch: int | None = None,
        progress: bool | ProgressCallback = False,
    ) -> Results[Any]:
        """Run a function over arguments, as :meth:`map` does, but return the results in the order of completion.

        The results of a batch come together, when the whole batch is over. For arguments and exceptions, see
        :meth:`map`.
        """
        check_batch(batch=batch)
        return self._run_all(fn, zip(*iterables, strict=False), timeout, batch, progress, in_order=False)

    def starmap(
        self, fn: Callable[[Unpack[Ts]], T], iterable: Iterable[tuple[*Ts]], chunksize: int | None = None
    ) -> list[T]:
        """Run a function over tuples of its arguments, and wait for the results, as ``multiprocessing.Pool`` does.

        Args:
            fn: The function.
            iterable: Tuples of the arguments of one call.
            chunksize: Number of calls in a message; None as for :meth:`map`.

        Raises:
            ValueError: When ``chunksize`` is no whole number of 1 or more.
            RuntimeError: When the pool was shut down, or is broken.
            AnyaccelError: When the engine cannot take calls, for instance without a machine.
            Exception: The exception of the first call, in order, that failed; the calls that are left are cancelled.
        """
        check_batch(chunksize=chunksize)
        return list(self._run_all(fn, map(tuple, iterable), None, chunksize, progress=False, in_order=True))

    def _run_all(
        self,
        fn: Callable[..., Any],
        arguments: Iterable[tuple[Any, ...]],
        timeout: Duration | None,
        batch: int | None,
        progress: bool | ProgressCallback,
        *,
        in_order: bool,
    ) -> Results[Any]:
        """Submit a function over tuples of arguments in batches; return the results, which are still to come.

        Args:
            fn: The function.
            arguments: Arguments of the calls; all are taken at once.
            timeout: Time from now until all results must be there, or None.
            batch: Calls of a batch. None chooses by their durations, or 1 if an option or a log is for each call, or
                the engine has no prefetch limit.
            progress: As for :meth:`map`.
            in_order: Whether results come in the order of the calls, or as soon as they are there.

        Raises:
            UsageError: When ``timeout`` is no duration; no call was submitted then.
            RuntimeError: When the pool was shut down, or is broken; calls that were submitted before are cancelled.
            AnyaccelError: When the engine cannot take calls, for instance without a machine.
            Exception: An exception of ``arguments``; no call was submitted then.
        """
        core, options, end = self._core, self._options, read_end(timeout)
        single = options.max_calls or options.timeout or options.retries or core.settings.logs  # each is per call
        limit = core.get_prefetch_limit(options)
        batches = Batches(
            arguments,
            lambda part, late: core.submit(options, fn, part, None, late=late),
            size=1 if batch is None and (single or not limit) else batch,
            prefetch_limit=limit,
            in_order=in_order,
            progress=progress,
        )
        return MapResults(batches, end, plain=core.settings.plain)

    def stream(
        self, fn: Callable[P, Iterable[T] | AsyncIterable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[T]:
        """Run a function that yields in a worker, and return an iterator of the items, each without delay.

        The function has a process of its own, and holds its devices until the end. The start waits for the devices,
        not for the first ``next``. The worker prefetches as many items as :meth:`options` says, and then waits. A
        ``timeout`` is for each item. ``retries`` and ``max_concurrency`` have no effect.

        Args:
            fn: A generator function, also an asynchronous one, or a function that returns an iterable of either kind.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            The stream, for one ``for`` or ``async for``. When that ends early, for instance by ``close()``, the
            function is ended, too. The iteration raises exceptions of the function, and of pickling.

        Raises:
            RuntimeError: When the pool was shut down, or is broken.
            AnyaccelError: When the engine cannot take calls, for instance without a machine.
        """
        group = ActorGroup(self._core, get_call_name(fn), replace(self._options, concurrency=1, retries=0))
        stream: Stream[T] = Stream(group, self)  # first: after an interrupt, its finalizer ends the worker
        group.begin((YieldedItems, (fn, args, kwargs), {}, 1))
        return stream

    def gang(self, hosts: int, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> GangFuture[T]:
        """Run a function on several machines at the same time: one call on each, all after all have their devices.

        Each call finds its rank in ``RANK`` and ``WORLD_SIZE``, and a port of rank 0's machine in ``MASTER_ADDR`` and
        ``MASTER_PORT``, like programs of ``torchrun``. If devices of several machines are wired together in a slice,
        the machines are those of one slice, and the ranks are their numbers in it. When a call fails, the others are
        ended. Of the pool's options, ``needs`` and ``timeout`` are used; ``retries`` and, on a cluster, ``max_workers``
        are refused. Each call has a new process.

        Args:
            hosts: Number of machines. The engine ``"local"`` has one.
            fn: The function.
            args: Its arguments, the same for all.
            kwargs: Its keyword arguments, the same for all.

        Returns:
            The future of a list of the results, by rank.

        Raises:
            RuntimeError: When the pool was shut down, or is broken.
            UsageError: When ``hosts`` is no whole number of 1 or more, or more than 1 with the engine ``"local"``; when
                the pool has ``retries``; or, on a cluster, when the pool has ``max_workers``, or the cluster cannot
                reserve several machines at once.
            NeverFitsError: When the cluster has too few machines that can serve the pool's needs.
            AnyaccelError: When no port is free, or the engine cannot take calls, for instance without a machine.
            Exception: When the function or an argument cannot be pickled.
        """
        check_whole(1, hosts=hosts)
        if self._options.retries:
            raise UsageError("a gang is not run again when a worker has died; retries must be 0 for it")
        # A process of its own for each call, because its environment has the rank.
        options = Options(needs=self._options.needs, max_calls=1, timeout=self._options.timeout)
        return self._core.gang(options, hosts, get_call_name(fn), dumps_whole((fn, args, kwargs)))

    def actor(self, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Actor[T]:
        """Make an actor: an object in a separate process, on separate devices, which are held until the process exits.

        The process exits after ``close()`` or ``kill()``, with the pool, or once nothing refers to the actor. Calls are
        not run again after the death of the process, whatever ``retries`` says.

        Args:
            cls: Its class, or a function that makes the object.
            args: Arguments of the class.
            kwargs: Keyword arguments of the class.

        Returns:
            The actor; ``actor.method(...)`` returns a future. The actor may still wait for its devices. An exception of
            pickling or of the class fails ``actor.ready`` and all calls.

        Raises:
            RuntimeError: When the pool was shut down, or is broken.
            AnyaccelError: When the engine cannot take calls, for instance without a machine.
        """
        group = ActorGroup(self._core, get_call_name(cls), replace(self._options, retries=0))
        actor: Actor[T] = Actor(group)  # first: after an interrupt, its finalizer ends the worker
        group.begin((cls, args, kwargs, self._options.concurrency))
        return actor

    def actors(self, cls: Callable[P, T], n: int, /, *args: P.args, **kwargs: P.kwargs) -> Actors[T]:
        """Make a group of equal actors, each in a separate process on separate devices.

        Args:
            cls: Their class, or a function that makes one.
            n: Number of objects. Those without devices wait for some, while the others work.
            args: Arguments of the class.
            kwargs: Keyword arguments of the class.

        Returns:
            The actors; each call of a method goes to one that is free. An actor whose construction has failed is not
            replaced; once each has failed, every call fails.

        Raises:
            UsageError: When ``n`` is no whole number of 1 or more.
            RuntimeError: When the pool was shut down, or is broken.
            AnyaccelError: When the engine cannot take calls, for instance without a machine.
            Exception: When the class or an argument cannot be pickled.
        """
        check_whole(1, n=n)
        work = dumps((cls, args, kwargs, self._options.concurrency)).copy()
        group = ActorGroup(self._core, get_call_name(cls), self._options, n)
        actors: Actors[T] = Actors(group)  # first: after an interrupt, its finalizer ends the workers
        group.begin(work)
        return actors

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, close the actors, run the queued calls, and end every worker.

        No effect in a forked child.

        Args:
            wait: Whether to return only after that. No effect in a done-callback, which would wait for itself.
            cancel_futures: Whether to cancel calls that were not sent to a worker.
        """
        self._core.shutdown(wait=wait, cancel_futures=cancel_futures)


class CallOptions(TypedDict, total=False):
    """The options of the calls of a pool; see :meth:`Pool.options`."""

    needs: RequestLike | None
    timeout: Duration | None
    max_calls: int | None
    retries: int
    max_concurrency: int
    ahead: int


class MapOptions(UnorderedOptions, total=False):
    """The options of :meth:`Pool.map`."""

    chunksize: int | None


def make_options(
    needs: RequestLike | None = None,
    *,
    max_calls: int | None = None,
    timeout: Duration | None = None,
    retries: int = 0,
    max_concurrency: int = 1,
    ahead: int = AHEAD,
) -> Options:
    """Check options, parse the request, and compute dependent defaults.

    ``max_calls`` is by default 1 with devices and 0, for no limit, without.

    Raises:
        UsageError: When the value of an option is not permitted.
        RequestError: When the request does not follow the grammar.
    """
    request = None if needs is None else parse_request(needs)
    if max_calls is None:
        max_calls = 0 if request is None else 1
    check_whole(0, max_calls=max_calls, retries=retries)
    check_whole(1, max_concurrency=max_concurrency, ahead=ahead)
    return Options(
        needs=request,
        max_calls=max_calls,
        timeout=read_seconds("timeout", timeout, positive=True),
        retries=retries,
        concurrency=max_concurrency,
        ahead=ahead,
    )


def _read_signal(signal: str | None, timeout: float | None) -> EarlySignal | None:
    """Parse the signal before the end of a call's time, such as ``USR1@60s``; None stays None.

    Raises:
        UsageError: When the signal is no such text, or the time is not shorter than ``timeout``, if there is a timeout.
    """
    if signal is None:
        return None
    from anyaccel.launcher.time_limit import check_early

    # Without a timeout of the pool, any time is permitted: options() may set a timeout.
    return check_early(signal, float("inf") if timeout is None else timeout)


CONFINING = ("anyaccel.launcher.sandbox",)
"""Modules that confine a worker, preloaded once for all workers."""


class Pool(Submitter):
    """An executor whose calls run in processes that see exactly their devices.

    A call with devices has a process of its own by default, because vendors' runtimes release memory only when their
    process exits. Calls without devices run with all devices hidden, in processes that serve many calls.

    Args:
        needs: The devices that each call holds while it runs, such as ``"GPU:1"``; None for the CPU alone.
        engine: Where calls run: ``"local"`` for this machine, ``"ray"`` or ``"dask"`` for the nodes of a cluster, or
            the name of an entry point of the group ``anyaccel.engines``.
        address: Address of the cluster, as ``ray.init`` or ``dask.distributed.Client`` takes it; None for the one that
            is found, or else for a new one on this machine.
        max_workers: Maximum number of processes; None for the number of devices or, for calls without devices, of
            processors.
        machine: The machine, if the engine is local; see :func:`anyaccel.detect`.
        declare: Devices to count by resource name, whatever is found; see :func:`anyaccel.declare`.
        max_calls: Calls after which a process is replaced, 0 for never; None for 1 with devices and 0 without.
        preload: Modules that are imported once for all workers, before they are forked.
        initializer: Called in each worker before its first call.
        initargs: Arguments of the initializer.
        warmup: Called without arguments in each worker with devices, after the initializer and before its first call.
            When it raises, the pool is broken, and the error names the device.
        timeout: Time that a call may run; None for no limit. Waiting for devices does not count.
        retries: Number of times that a call is run again when its worker or its machine has died. A call that raises,
            exceeds its timeout or is cancelled is not run again.
        grace: Time between SIGTERM and SIGKILL.
        signal: A signal before the end of a call's ``timeout``, such as ``"USR1@60s"``: 60 seconds before, to each
            process of its worker that catches it. A call with a ``timeout`` of 60 seconds or less gets none.
        idle: Time after which an idle process releases its devices.
        logs: Directory with a file for the output of each call; None for the output of this process.
        sandbox: Called in each worker before any of your code, to confine the process further. When it raises, none of
            your code runs.
        results: How answers of workers are read: ``"plain"`` as data of plain types, which run no code here, or
            ``"pickle"``, which may run code of the worker's choice. None for ``"plain"`` with ``enforce``, else
            ``"pickle"``.
        shared: Whether every process on the machine sees the leases. If not, they are seen only by other pools of this
            process that are not shared either.
        start: How workers are started. ``unallocated``: whether vendors without an allocated device are hidden
            (``"hide"``), or left as the environment has them (``"inherit"``). ``mask``: whether masks name devices by
            stable ``"id"`` or by ``"index"``, if the vendor's runtime takes both. ``cap``, by default True: whether
            PyTorch and TensorFlow are capped at the memory of a share of one device, when the worker imports them.
            ``bind``: whether workers run on the processors nearest to their devices, as far as the machine reports
            them; None, the default, for whole devices only. ``memory``: limit of the host memory of each worker, with
            all that it starts and without swap: bytes, or a text such as ``"8GiB"``; a process that exceeds it is
            killed, and its call fails. A share of a device is held to its memory likewise, if the kernel can.
            ``enforce``: whether the kernel denies workers, and all that they start, the device nodes of all other
            devices: True to insist, ``"try"`` to do without if the kernel cannot. Devices that stay open are listed in
            ``future.allocation.gaps``, and inside of a call in ``anyaccel.current().gaps``.

    Raises:
        UsageError: When the value of an argument is not permitted, or no device has a name in ``needs``.
        ValueError: When ``max_workers`` is no whole number of 1 or more.
        TypeError: When ``initializer``, ``warmup`` or ``sandbox`` cannot be called.
        OSError: When the directory of ``logs`` cannot be made.
        Exception: When such a function or an argument cannot be pickled.
        UnknownOptionError: When there is no such option.
        EnforcementError: When workers must be confined or held to ``memory``, and the kernel cannot.
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
        timeout: Duration | None = None,
        retries: int = 0,
        grace: Duration = 10.0,
        signal: str | None = None,
        idle: Duration = 10.0,
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
        options = make_options(needs, max_calls=max_calls, timeout=timeout, retries=retries)
        settings = PoolSettings(
            start=start,
            sandbox=pickled_call(sandbox),
            initializer=pickled_call(initializer, tuple(initargs)),
            warmup=pickled_call(warmup),
            plain=results == "plain" or (results is None and bool(enforce)),
            preload=((preload,) if isinstance(preload, str) else tuple(preload)) + (CONFINING if enforce else ()),
            max_workers=max_workers,
            grace=read_seconds("grace", grace),
            early=_read_signal(signal, options.timeout),
            idle=read_seconds("idle", idle),
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
        # Exit handlers run last in, first out: ours must run before those of the engine, whose cluster our calls need.
        atexit.register(_finish_all)
        # A finalizer runs in any thread that collects garbage, perhaps under one of our locks: it only leaves a note.
        weakref.finalize(self, _abandon, core).atexit = False

    @property
    def quarantined(self) -> tuple[tuple[Allocation, str], ...]:
        """Devices that are kept although their holder was ended, each with the reason.

        The process may be stuck in the kernel, or its memory on the device may still be in use. The devices are
        released when that changes. Always empty for a pool on a cluster: there the nodes keep such devices.
        """
        return self._core.quarantined()

    def _workers(self) -> list[tuple[str, str, str]]:
        """Return three texts for each process, sorted.

        These are the name of the current call or ``idle``, the number of pipelined calls, and the devices or ``CPU``.
        Workers that still wait for a process are left out. The list is empty in a forked child.
        """
        core = self._core
        if core.foreign:
            return []
        # A copy: other threads change the set.
        members = [(member.outstanding, member.allocation) for member in tuple(core.members) if member.begun]
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
        """Return a table of the workers for notebooks."""
        from anyaccel.text import html_table

        return html_table(repr(self)[1:-1], ("runs", "behind it", "devices"), self._workers())

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: object) -> None:
        """Shut the pool down, and wait for the calls and workers, also after an exception of the block.

        After a KeyboardInterrupt of the block, the queued calls are cancelled and the workers stopped with the pool's
        grace, so that running calls fail. Ctrl-C during the wait cancels the queued calls and kills the workers, whose
        end is not awaited then. No effect in a forked child.

        Raises:
            KeyboardInterrupt: When Ctrl-C has come during the wait.
        """
        try:
            if kind is not None and issubclass(kind, KeyboardInterrupt):
                self._core.stop(self._core.settings.grace)
            self.shutdown(wait=True)
        except KeyboardInterrupt:
            self._core.stop(0)
            raise


_cores: weakref.WeakSet[Engine] = weakref.WeakSet()


def _abandon(core: Engine) -> None:
    """Have the reactor shut down an engine whose pool was garbage collected, after its calls; not in a forked child."""
    if not core.foreign:
        find_reactor().call_soon(lambda: core.shutdown(wait=False))


@atexit.register
def _finish_all() -> None:
    """Shut down all pools at exit, at once, and wait for the calls and workers.

    If a KeyboardInterrupt ends the program, queued calls are cancelled, and the workers stopped with the pool's grace.
    Ctrl-C during the wait kills the workers of all pools and ends the wait; the KeyboardInterrupt is swallowed.
    """
    import sys

    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    try:
        for core in list(_cores):
            if interrupted:
                core.stop(core.settings.grace)
            core.shutdown(wait=False)
        for core in list(_cores):
            core.shutdown(wait=True)
    except KeyboardInterrupt:
        for core in list(_cores):
            core.stop(0)
