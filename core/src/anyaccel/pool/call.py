"""Calls, the futures of their results, and gangs: calls that run together, one on each of several machines."""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, InvalidStateError
from concurrent.futures._base import CANCELLED, PENDING, RUNNING
from functools import partial
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar, cast

from anyaccel.durations import Duration, read_seconds
from anyaccel.errors import RemoteError, UsageError, WorkerError
from anyaccel.model import Allocation, Request, Value
from anyaccel.pool.messages import Message, MessageKind, Pickled, loads, summarize_error
from anyaccel.pool.reactor import NO_TIMER, allow_forks, find_reactor, run_guarded

if TYPE_CHECKING:
    import asyncio

    from anyaccel.scheduler import Verdict


T = TypeVar("T")

AHEAD = 16
"""Default number of items that a stream is prefetched."""

_numbers = count(1)


class BrokenPoolError(WorkerError, BrokenExecutor):
    """Raised when no worker of a pool can be used: enforcement, the sandbox, the initializer or the warm-up fails."""

    code = "broken-pool"


class Options(Value):
    """Options of calls.

    Attributes:
        needs: The devices that a call holds while it runs, or None for the CPU alone.
        max_calls: Calls after which a worker process is replaced; 0 for never.
        timeout: Seconds that a call may run, or None. Waiting for devices does not count.
        retries: Number of times that a call is run again when its worker or its machine has died.
        concurrency: Number of methods of an actor that may run at the same time.
        ahead: Number of items that a stream is prefetched.
    """

    needs: Request | None = None
    max_calls: int = 0
    timeout: float | None = None
    retries: int = 0
    concurrency: int = 1
    ahead: int = AHEAD

    @property
    def alike(self) -> tuple[Request | None, int]:
        """Request and ``max_calls``: calls of one pool with an equal pair wait in one queue, and share processes.

        Constructions of actors wait in a queue of their own, and each actor has its own process.
        """
        return self.needs, self.max_calls


def check_whole(least: int, **values: object) -> None:
    """Check that each argument is a whole number of at least ``least``; booleans are refused.

    Raises:
        UsageError: When an argument is not; the message names it.
    """
    for name, value in values.items():
        if not is_whole(value, least):
            raise UsageError(f"{name} must be a whole number, {least} or more (got {value!r:.60})")


def is_whole(value: object, least: int) -> bool:
    """Return whether a value is an int of at least ``least``, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class InterruptibleCondition(_thread.RLock, threading.Condition):  # type: ignore[misc]  # final for type checkers alone
    """A condition and lock in a single object, made and locked without a line of Python, where Ctrl-C might come."""

    def __init__(self) -> None:
        self._waiters: deque[Any] = deque()

    def wait_until(self, over: Callable[[], bool], seconds: float | None) -> None:
        """Return at once if ``over`` returns True; else wait for :meth:`notify_all`, or until time is over.

        This method does not take the lock, and the caller must not hold the lock. ``over`` is called once, after the
        waiter is registered: a :meth:`notify_all` during that call ends the wait at once. The result does not tell a
        notification from a timeout. ``seconds`` is None for no limit, else 0 or more and at most
        ``threading.TIMEOUT_MAX``.

        :meth:`wait` is not interruptible: a signal handler may raise between the release of the lock and the statement
        that takes the lock again. Its caller then releases the lock twice, which is a RuntimeError. Here an exception
        of a handler leaves a waiter behind, which the next :meth:`notify_all` drops.
        """
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        if over() or not waiter.acquire(timeout=-1 if seconds is None else seconds):
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)

    def notify_all(self) -> None:
        """Wake the waiters; the caller holds the lock. Cheap in the usual case without waiters."""
        if self._waiters:
            super().notify_all()


class AwaitableFuture(Future[T]):
    """A future for coroutines, too. Cancelling the awaiting task cancels the future.

    A signal handler may raise during a wait, unlike with ``concurrent.futures.Future``. In a forked child, a wait for
    an outcome that was not there at the fork lasts until the timeout; only :class:`CallFuture` raises RuntimeError.
    """

    def __init__(self) -> None:
        super().__init__()
        # Not of its own type, which as_completed() of the standard library does not take, say type checkers.
        self._condition: threading.Condition = InterruptibleCondition()

    def __reduce__(self) -> str:
        raise TypeError("a future belongs to the process that made it and cannot be sent to another; pass its result()")

    def __await__(self) -> Generator[Any, None, T]:
        # Not asyncio.wrap_future(): in Python 3.11, a call that raises StopIteration is awaited without end there.
        import asyncio

        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self.add_done_callback(partial(_wake, loop, waiter))
        try:
            yield from waiter
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.cancelled():
            raise asyncio.CancelledError
        return self.result()

    def result(self, timeout: Duration | None = None) -> T:
        """Wait for the call, and return the result.

        Raises:
            TimeoutError: When that takes longer than ``timeout``; the call goes on.
            CancelledError: When it was cancelled.
            UsageError: When ``timeout`` is no duration.
            Exception: The exception of the call, or the reason why it was not run to its end.
        """
        return super().result(self._wait(timeout))

    def exception(self, timeout: Duration | None = None) -> BaseException | None:
        """Wait for the call; return the exception, or the reason for a missing answer, or None after a result.

        Raises:
            TimeoutError: When that takes longer than ``timeout``; the call goes on.
            CancelledError: When it was cancelled.
            UsageError: When ``timeout`` is no duration.
        """
        return super().exception(self._wait(timeout))

    def _wait(self, timeout: Duration | None) -> float | None:
        """Wait at most so many seconds for the outcome.

        Returns:
            The seconds left, 0 if time is over; the whole timeout if the outcome was there; None without a limit.

        Raises:
            UsageError: When ``timeout`` is no duration.
        """
        if timeout is not None:
            timeout = read_seconds("timeout", timeout, least=-inf)
        if self._is_over():
            return timeout
        end = None if timeout is None else time.monotonic() + timeout
        # A lock takes -1 as no limit, and refuses other negative numbers and large ones.
        most = None if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        cast("InterruptibleCondition", self._condition).wait_until(self._is_over, most)
        return None if end is None else max(0.0, end - time.monotonic())

    def _is_over(self) -> bool:
        """Return what :meth:`done` does, without a lock, which a signal handler that raises might leave taken."""
        return self._state not in (PENDING, RUNNING)


def _wake(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None], _: object) -> None:
    """Have an event loop go on where a future is awaited, from any thread; no effect in a closed loop."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_set_done, waiter)


def _set_done(waiter: asyncio.Future[None]) -> None:
    """Set the result, unless the waiting task was cancelled."""
    if not waiter.done():
        waiter.set_result(None)


class CallFuture(AwaitableFuture[T]):
    """The future of a call.

    It can be cancelled while the call runs: the worker is ended then, with everything that it started. Only the method
    of an actor, which may have other callers, runs to its end.

    Attributes:
        allocation: The devices that the call holds or held; None while it waits.
        log: File with its output, if the pool has logs; None otherwise.
    """

    allocation: Allocation | None = None
    log: str | None = None

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call: Call | None = call  # until it is over: no reference cycle is left for the garbage collector

    def cancel(self) -> bool:
        """Cancel the call, waiting or running, unless it is a running method; return whether it is or was cancelled.

        A call that is over, or belongs to the parent process, stays as it is. The worker is ended later, by the
        reactor. A method that was sent to its actor behind other short ones counts as running. The done-callbacks run
        in this thread.
        """
        call = self._call
        if call is None or call.foreign or (call.kind == MessageKind.METHOD and self.running()):
            return self.cancelled()
        try:
            return super().cancel()
        finally:
            if self._state == CANCELLED:
                self.release_call()
                find_reactor().call_soon(partial(_on_cancelled, call))

    def _wait(self, timeout: Duration | None) -> float | None:
        """Wait at most so many seconds for the end of the call; see :class:`AwaitableFuture`.

        Raises:
            RuntimeError: When this process is a fork of the one that made the call, and the call was not over before.
            UsageError: When ``timeout`` is no duration.
        """
        call = self._call
        if call is not None and call.foreign:
            raise RuntimeError(f"the answer to {call.name} goes to the process that this one was forked from")
        return super()._wait(timeout)

    def running(self) -> bool:
        """Return whether a worker has the call, perhaps behind other methods of an actor, and it has no outcome yet."""
        call = self._call
        return call is not None and call.sent and not self.done()

    def why(self) -> Verdict | None:
        """Explain why the call waits for devices.

        On this machine, the verdict is that of a new, equal request, by the ledger as it is now. On a cluster, the
        verdict only says that the cluster has not placed the call yet.

        Returns:
            The verdict; None if the call needs no devices, was sent to a worker, was placed by the cluster, is held
            back by ``max_workers`` on a cluster, or is over.

        Raises:
            ConfigurationError: When the machine's configuration is invalid or untrusted; not on a cluster.
            LedgerError: When the ledger cannot be read; not on a cluster.
        """
        call = self._call
        return None if call is None or call.sent or call.waits is None else call.waits()

    def _invoke_callbacks(self) -> None:
        """Run the done-callbacks, during which other threads may fork.

        In the reactor's thread, also SystemExit and the like are logged: what the reactor does next must be done.
        """
        if self._done_callbacks:  # type: ignore[attr-defined]
            invoke = super()._invoke_callbacks  # type: ignore[misc]
            with allow_forks():
                run_guarded(invoke) if find_reactor().inside else invoke()

    def release_call(self) -> None:
        """Drop the reference to the call, which is over."""
        self._call = None


def _on_cancelled(call: Call) -> None:
    """Report a cancellation to ``concurrent.futures.wait`` and ``as_completed``, the first time, and to the engine.

    Runs in the reactor's thread.
    """
    if call.future._state == CANCELLED:  # noqa: SLF001 - not yet CANCELLED_AND_NOTIFIED
        call.future.set_running_or_notify_cancel()
    call.on_cancel(call)


class Call:
    """A call: function, arguments, state, and future.

    Attributes:
        name: Name of the function in messages.
        options: Its options.
        on_cancel: Called in the thread of the reactor once the call was cancelled.
        body: The pickled function and arguments, until they are not needed any more.
        number: Number of the call, unique in this process and its forks.
        kind: Kind of its message.
        actor: The actor that it constructs, or None.
        waits: Explains what devices it waits for; None if it needs none, or has them.
        sent: Whether it was sent to a process, which may have started it, and on a cluster is known to run it.
        log: File for its output; None for the pool's.
        tries: Number of times that it was run and lost.
        timer: Timer of its time limit.
        future: Its future.
    """

    def __init__(self, name: str, options: Options, on_cancel: Callable[[Call], None]) -> None:
        self.name = name
        self.options = options
        self.on_cancel = on_cancel
        self.body: Pickled | None = None
        self.number = next(_numbers)
        self._process = os.getpid()
        self.kind = MessageKind.CALL
        self.actor: Any = None
        self.waits: Callable[[], Verdict] | None = None
        self.sent = False
        self.log: str | None = None
        self.tries = 0
        self.timer = NO_TIMER
        self.future: CallFuture[Any] = CallFuture(self)

    @property
    def foreign(self) -> bool:
        """Whether it belongs to the parent of this process, whose channels must not be touched."""
        return self._process != os.getpid()

    @property
    def may_be_retried(self) -> bool:
        """Whether the call has no outcome yet and a retry left, for the case that its worker dies."""
        return self.tries < self.options.retries and self.is_pending()

    def retry(self) -> None:
        """Count a lost run, and :meth:`reset` the call for the next run; the caller queues the call."""
        self.tries += 1
        self.reset()

    def reset(self) -> None:
        """Count the call as not sent, and cancel its timer: the time limit starts anew with the next worker."""
        self.timer.cancel()
        self.timer = NO_TIMER
        self.sent = False

    def is_pending(self) -> bool:
        """Return whether the call has no outcome and was not cancelled."""
        return self.future._state == PENDING  # noqa: SLF001 - its part

    def succeed(self, value: Any) -> None:
        """Set the result, unless the call has an outcome or was cancelled; cancel its timer."""
        self._finish(self.future.set_result, value)

    def fail(self, error: BaseException) -> None:
        """Set the exception, unless the call has an outcome or was cancelled; cancel its timer."""
        self._finish(self.future.set_exception, error)

    def _finish(self, setter: Callable[[Any], None], outcome: Any) -> None:
        """Cancel the timer, set the outcome, and drop the future's reference to the call; done-callbacks run here.

        A call with an outcome, or a cancelled call, keeps its state.
        """
        self.timer.cancel()
        with contextlib.suppress(InvalidStateError):
            setter(outcome)
        self.future.release_call()


class RemoteTraceback(Exception):  # noqa: N818 - shown as the cause of an error, as in other executors
    """The traceback of a worker, as the cause of the exception that came from there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class UnreadableError(RemoteError):
    """Stands for the exception in a worker's message that cannot be read."""


def set_outcome(call: Call, message: Message, *, plain: bool) -> None:
    """Set the outcome of a call from the answer of its worker; in the reactor's thread, which gets no signals.

    An answer that cannot be read fails the call with a :class:`RemoteError`; any other kind of message than a result is
    read as an exception.

    Args:
        call: The call.
        message: The answer.
        plain: Whether the answer is read as plain data; see :mod:`anyaccel.pool.plain`.
    """
    try:
        if message.kind != MessageKind.RESULT:
            call.fail(read_exception(message, plain=plain))
            return
        value = _get_reader(plain=plain)(message.data, message.buffers)
    except BaseException as error:  # noqa: BLE001 - unpickling runs code of the result's class
        if plain:
            reason = (
                f"must be made of plain types, since answers of confined workers are read as data: {error}; return"
                " numbers, texts, lists, dicts or arrays, or make the pool with results='pickle' to let workers have"
                " code run here"
            )
        else:
            reason = f"cannot be unpickled here: {type(error).__name__}: {error}; can its module be imported?"
        failure = RemoteError(f"the result of {call.name} {reason}")
        failure.__cause__ = None if plain else error
        call.fail(failure)
    else:
        call.succeed(value)


def _get_reader(*, plain: bool) -> Callable[..., Any]:
    """Return the function that reads values of answers: as plain data, or as pickles."""
    if plain:
        from anyaccel.pool.plain import loads as read

        return read
    return loads


_PICKLED = "let its class pass all arguments of __init__ to super().__init__(), or define __reduce__"
_NO_PLAIN = (
    "answers of confined workers are read as data, as which only exceptions of Python and anyaccel keep their class;"
    " raise one of these, or make the pool with results='pickle' to let workers have code run here"
)


def read_exception(message: Message, *, plain: bool) -> BaseException:
    """Read the exception in a worker's answer, with the worker's traceback as its cause.

    Args:
        message: The answer.
        plain: Whether only exceptions in :data:`anyaccel.pool.plain.TYPES` are made; others become a
            :class:`RemoteError`.

    Returns:
        The exception; if it cannot be made here, a :class:`RemoteError` with its summary, whose hint has the reason; an
        :class:`UnreadableError`, without a traceback, if the message is damaged.
    """
    read = _get_reader(plain=plain)
    try:
        body, summary, text = read(message.data, message.buffers)
        described = isinstance(body, bytes | str) and isinstance(summary, str) and isinstance(text, str)
    except (Exception, SystemExit) as problem:  # noqa: BLE001 - as in set_outcome()
        return UnreadableError(f"an exception that cannot be read: {problem}")
    if not described:
        return UnreadableError("an exception that cannot be read: it has no text")
    made, hint = None, f"the exception cannot be pickled and unpickled: {body}; {_PICKLED}"
    if isinstance(body, bytes):
        try:
            made, hint = read(body), ""
        except (Exception, SystemExit) as problem:  # noqa: BLE001 - as in set_outcome()
            hint = f"the exception cannot be unpickled here: {summarize_error(problem)}; can its module be imported?"
    shown = made if isinstance(made, BaseException) else RemoteError(summary, hint=_NO_PLAIN if plain else hint)
    if text:
        BaseException.__setattr__(shown, "__cause__", RemoteTraceback(text))  # the class may refuse an assignment
    return shown


def get_call_name(function: Any) -> str:
    """Return the name of a call in messages: the qualified name of the function.

    A method given by name keeps that name. A callable without a name goes by the plain name of its class.
    """
    return function if isinstance(function, str) else getattr(function, "__qualname__", None) or type(function).__name__


class GangFuture(AwaitableFuture[list[T]]):
    """The future of the results of all calls of a gang, by rank.

    Its exception is that of the first call that failed; the others are ended then. It can be cancelled while they run,
    too, and is cancelled when a call is.

    Attributes:
        members: The futures of the calls, by rank; each has its devices and its log.
    """

    def __init__(self, members: Sequence[CallFuture[T]]) -> None:
        super().__init__()
        self.members = tuple(members)
        self._decided = False
        self._step = threading.Lock()
        for rank, member in enumerate(members):
            member.add_done_callback(lambda done, rank=rank: self._on_done(done, rank))  # type: ignore[misc]

    def cancel(self) -> bool:
        """Cancel every call, waiting or running, unless the gang is over; return whether it is or was cancelled.

        In a forked child only this copy of the future is cancelled; the calls go on.
        """
        if not self._decide():
            return self.cancelled()
        self._end_others()  # before waiters wake and perhaps start the next gang
        super().cancel()
        self.set_running_or_notify_cancel()
        return True

    def running(self) -> bool:
        """Return whether a worker runs one of the calls."""
        return any(member.running() for member in self.members)

    def _on_done(self, member: Future[Any], rank: int) -> None:
        """Set the results after the last result. The first failure or cancellation ends the gang.

        The first exception gets a note with its rank; later failures are ignored. Runs in the thread that ends or
        cancels the call; of a call that has ended before, in the thread that makes the gang.
        """
        if member.cancelled():
            self.cancel()
        elif (error := member.exception()) is not None:
            if self._decide():
                with contextlib.suppress(Exception):  # the class may refuse attributes, as a frozen dataclass does
                    error.add_note(f"It is rank {rank} of a gang of {len(self.members)}; the others were ended.")
                self._end_others()
                self.set_exception(error)
        elif all(map(has_result, self.members)) and self._decide():
            self.set_result([each.result() for each in self.members])

    def _decide(self) -> bool:
        """Return True to the first caller alone, which sets the outcome: calls end in several threads."""
        with self._step:
            first, self._decided = not self._decided, True
        return first

    def _end_others(self) -> None:
        """Cancel every call, waiting or running; no effect on finished calls."""
        for member in self.members:
            member.cancel()


def has_result(future: Future[Any]) -> bool:
    """Return whether a call is over, and has neither failed nor been cancelled."""
    return future.done() and not future.cancelled() and future.exception() is None


def make_ranked_call(
    rank: int, count: int, rendezvous: Mapping[str, str], work: bytes
) -> tuple[Any, tuple[Any, ...], Any]:
    """Make the call of a single member of a gang.

    Args:
        rank: Rank of the member, from 0.
        count: Number of members.
        rendezvous: Variables with the address where the members meet.
        work: A pickled function, with its arguments.

    Returns:
        The work of a call, for an engine's ``enter``: :func:`run_ranked`, the tuple of its arguments, and an empty dict
        of keyword arguments. None in place of the dict would mean a batch.
    """
    from anyaccel.launcher.rendezvous import make_rank_variables

    return run_ranked, ({**make_rank_variables(rank, count, local=(0, 1)), **rendezvous}, work), {}


def run_alone(call: Call, hosts: int, work: bytes, enter: Callable[[Call, tuple[Any, ...]], None]) -> GangFuture[Any]:
    """Queue a call as a gang of one, on this machine; return the future, whose end frees the meeting address.

    Args:
        call: The call.
        hosts: Number of machines that were asked for.
        work: The pickled function, with its arguments.
        enter: Queues the call with its function and arguments.

    Raises:
        UsageError: When ``hosts`` is more than 1.
        AnyaccelError: When no port is free for the meeting address.
        Exception: An exception of ``enter``; the address is freed.
    """
    from anyaccel.launcher.rendezvous import Rendezvous

    if hosts > 1:
        raise UsageError(
            f"hosts must be 1 with engine='local', which has this machine alone (got {hosts}); engine='ray' has those"
            " of a cluster"
        )
    rendezvous = Rendezvous()
    future: GangFuture[Any] = GangFuture([call.future])
    future.add_done_callback(lambda _: rendezvous.close())
    try:
        enter(call, make_ranked_call(0, 1, rendezvous.variables, work))
    except BaseException:
        rendezvous.close()
        raise
    return future


def run_ranked(variables: Mapping[str, str], work: bytes) -> Any:
    """Set the variables of a rank in the worker, then unpickle the function, call it, and return its result.

    In this order, because modules that the pickle imports may read the variables, which stay set.
    """
    os.environ.update(variables)
    function, args, kwargs = loads(work)
    return function(*args, **kwargs)
