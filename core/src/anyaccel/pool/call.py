"""One call on its way through a pool, and the future of its result."""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import BrokenExecutor, Future, InvalidStateError
from concurrent.futures._base import CANCELLED, PENDING
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from anyaccel.errors import RemoteError, UsageError, WorkerError
from anyaccel.linux.fork import tidy_in_child
from anyaccel.model import Allocation, Request, Value, replace
from anyaccel.pool.channel import Message, MessageKind
from anyaccel.pool.payload import Pickled, call_each, call_each_method, loads
from anyaccel.pool.reactor import allow_forks, reactor

if TYPE_CHECKING:
    from anyaccel.pool.reactor import Timer
    from anyaccel.scheduler import Verdict


T = TypeVar("T")

AHEAD = 16
"""Items that a stream may be ahead of whoever takes them, where nothing else is said."""

_numbers = count(1)
_first = 0
"""Calls of lower numbers are those of the process that this one was forked from."""
_kinds: dict[tuple[Request | None, int], int] = {}
_kind_numbers = count(1)


class BrokenPoolError(WorkerError, BrokenExecutor):
    """Raised when no worker of a pool can be used, because its initializer or its sandbox fails."""

    code = "broken-pool"


class Options(Value):
    """How calls are to be run.

    Attributes:
        needs: The devices that a call holds while it runs, or None for the CPU alone.
        max_calls: Calls after which a worker's process is replaced; 0 for never.
        timeout: Seconds that a call may run, or None. Waiting for its devices does not count.
        retries: Times that a call is run again when its worker or its machine has died.
        concurrency: Methods of an actor that may run at the same time.
        ahead: Items that a stream may be ahead of whoever takes them.
        alike: Calls for which this is equal ask for the same, wait in one line and share processes.
    """

    needs: Request | None
    max_calls: int
    timeout: float | None
    retries: int
    concurrency: int
    ahead: int
    alike: int

    def kept(self) -> Options:
        """The same for processes that are kept for calls that nobody else's processes run: those of an actor."""
        return replace(self, max_calls=0, alike=next(_kind_numbers))

    @classmethod
    def of(
        cls,
        *,
        needs: Request | None = None,
        max_calls: int = 0,
        timeout: float | None = None,
        retries: int = 0,
        concurrency: int = 1,
        ahead: int = AHEAD,
    ) -> Options:
        """Make options, and number what calls must have in common to share a process."""
        # A number, since it is looked up several times for each call, and a request takes long to hash.
        alike = _kinds.setdefault((needs, max_calls), next(_kind_numbers))
        return cls(
            needs=needs, max_calls=max_calls, timeout=timeout, retries=retries, concurrency=concurrency, ahead=ahead,
            alike=alike,
        )  # fmt: skip


def checked(*, max_calls: object, timeout: object, retries: object, max_concurrency: object, ahead: object) -> None:
    """Check options that are numbers.

    Raises:
        UsageError: When one makes no sense.
    """
    if max_calls is not None and not is_whole(max_calls, 0):
        raise UsageError(f"max_calls must be a whole number, 0 for unlimited (got {max_calls!r:.60})")
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise UsageError(f"timeout must be a positive number of seconds, or None for no limit (got {timeout!r:.60})")
    if not is_whole(retries, 0):
        raise UsageError(f"retries must be a whole number, 0 for none (got {retries!r:.60})")
    for name, value in (("max_concurrency", max_concurrency), ("ahead", ahead)):
        if not is_whole(value, 1):
            raise UsageError(f"{name} must be a whole number, 1 or more (got {value!r:.60})")


def is_whole(value: object, least: int) -> bool:
    """Whether a value is a whole number, and large enough."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class Runner:
    """Whatever runs a call, or is about to."""

    __slots__ = ()

    @property
    def begun(self) -> bool:
        """Whether it runs the call by now, as far as is known."""
        return True

    def attend(self, pending: Callable[[], bool], seconds: float | None) -> None:
        """Take its next answer in this thread, where that saves time and the call still waits for it."""


class _Condition(_thread.RLock, threading.Condition):  # type: ignore[misc]  # final for type checkers alone
    """A condition that is its own lock: it is made and locked without a line of Python, where Ctrl-C might come."""

    def __init__(self) -> None:
        self._waiters: deque[Any] = deque()

    def await_end(self, pending: Callable[[], bool], seconds: float | None) -> None:
        """Wait until something has ended, without the lock.

        An interrupt in :meth:`wait` may come between the release of the lock and the statement that takes it again, and
        its caller releases it twice, which is a RuntimeError. Here, an interrupt leaves a waiter that harms nothing.
        """
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        if pending() and not waiter.acquire(timeout=-1 if seconds is None else seconds):
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)

    def notify_all(self) -> None:
        """Wake all who wait, who mostly are none."""
        if self._waiters:
            super().notify_all()


class AwaitableFuture(Future[T]):
    """A future that coroutines wait for, too: ``await future``. A task that is cancelled meanwhile cancels it."""

    def __await__(self) -> Generator[Any, None, T]:
        from asyncio import wrap_future

        return wrap_future(self).__await__()


class CallFuture(AwaitableFuture[Any]):
    """The future of a call.

    It can be cancelled while the call runs, too: then the worker is ended, with everything that it started. Only the
    method of an actor, which may have other users, runs to its end.

    Attributes:
        allocation: What the call holds or held; None as long as it waits.
        log: File that its output went to, where logs were asked for; None otherwise.
    """

    allocation: Allocation | None = None
    log: str | None = None

    def __init__(self, call: Call) -> None:
        # As the base class has it, but for the condition, which is most of what a future costs.
        self._condition: _Condition = _Condition()  # pyright: ignore[reportIncompatibleVariableOverride]
        self._state = PENDING
        self._result = None
        self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Callable[[Future[Any]], object]] = []
        self._call: Call | None = call  # until it is over: so nothing is left for the garbage collector

    def cancel(self) -> bool:
        """Cancel the call, whether it waits or runs; False when it is over, and in a fork of the process it is of."""
        call = self._call
        if call is None or call.foreign or (call.kind == MessageKind.METHOD and self.running()):
            return self.cancelled()
        try:
            return super().cancel()
        finally:
            if self._state == CANCELLED:
                reactor().call_soon(partial(_on_cancelled, call))

    def result(self, timeout: float | None = None) -> Any:
        """What the call returned, as soon as it has.

        Raises:
            TimeoutError: When that takes longer than ``timeout`` seconds; the call goes on.
            CancelledError: When it was cancelled.
            RuntimeError: When this is a fork of the process that made the call.
            Exception: What it raised, or why it was not run to its end.
        """
        return super().result(self._attend(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call raised, or why it was not run to its end; None when it returned.

        Raises:
            TimeoutError: When that takes longer than ``timeout`` seconds; the call goes on.
            CancelledError: When it was cancelled.
            RuntimeError: When this is a fork of the process that made the call.
        """
        return super().exception(self._attend(timeout))

    def _attend(self, timeout: float | None) -> float | None:
        """Wait for the answer, which may be taken in this thread; returns what is left of the time."""
        call = self._call
        if call is not None and call.foreign:
            raise RuntimeError(f"the answer to {call.name} goes to the process that this one was forked from")
        if call is None:
            return timeout
        end = None if timeout is None else time.monotonic() + timeout
        if (worker := call.worker) is not None:
            worker.attend(call.undecided, timeout)
        left = None if end is None else max(0.0, end - time.monotonic())
        self._condition.await_end(call.undecided, left)
        return None if end is None else max(0.0, end - time.monotonic())

    def running(self) -> bool:
        """Whether a worker is at it."""
        call = self._call
        worker = None if call is None else call.worker
        return worker is not None and worker.begun and not self.done()

    def why(self) -> Verdict | None:
        """Say what the call waits for; None when it does not wait for devices."""
        call = self._call
        return None if call is None or call.sent or call.waits is None else call.waits()

    def _invoke_callbacks(self) -> None:
        if self._done_callbacks:
            with allow_forks():
                super()._invoke_callbacks()  # type: ignore[misc]

    def forget(self) -> None:
        """It is over: let go of the call."""
        self._call = None

    def notify_cancelled(self) -> None:
        """ProgressCallback whoever waits for it that it was cancelled; does nothing the second time."""
        if self._state == CANCELLED:
            self.set_running_or_notify_cancel()


def _on_cancelled(call: Call) -> None:
    """A call was cancelled, by whichever thread."""
    call.future.notify_cancelled()
    call.on_cancel(call)


class Call:
    """A call: what is to be run, where it stands, and whom to tell."""

    __slots__ = (
        "actor", "body", "future", "kind", "log", "name", "number", "on_cancel", "options", "relay", "sent", "timer",
        "tries", "waits", "worker",
    )  # fmt: skip

    def __init__(self, name: str, options: Options, on_cancel: Callable[[Call], None]) -> None:
        self.name = name
        self.options = options
        self.on_cancel = on_cancel
        self.body: Pickled | None = None
        self.number = next(_numbers)
        self.kind = MessageKind.CALL
        self.actor: Any = None  # what it makes, where it makes an actor
        self.waits: Callable[[], Verdict] | None = None  # says what devices it waits for, until it is sent
        self.worker: Runner | None = None
        self.sent = False  # to a process, which may have begun with it
        self.log: str | None = None  # file for its output; None for where the pool's goes
        self.relay: Callable[[Message], None] | None = None  # wants the answer as it is
        self.tries = 0
        self.timer: Timer | None = None
        self.future = CallFuture(self)

    @property
    def foreign(self) -> bool:
        """Whether we are a fork of the process that made it: its channel is not ours to read, write or shut down."""
        return self.number < _first

    @property
    def may_be_retried(self) -> bool:
        """Whether it is to be run again when its worker has died: less often than it may be, and still wanted."""
        return self.tries < self.options.retries and self.undecided()

    def retry(self) -> None:
        """Say that it is to be run again, by whichever worker."""
        self.tries += 1
        self.withdraw()

    def withdraw(self) -> None:
        """No worker has it any more."""
        if self.timer is not None:  # its time begins anew
            self.timer.cancel()
        self.worker = None
        self.sent = False

    def undecided(self) -> bool:
        """Whether its outcome is open."""
        return self.future._state == PENDING  # noqa: SLF001 - its part

    def succeed(self, value: Any) -> None:
        """Set the result, unless the call was cancelled."""
        self._settle(self.future.set_result, value)

    def fail(self, error: BaseException) -> None:
        """Set the exception, unless the call was cancelled."""
        self._settle(self.future.set_exception, error)

    def _settle(self, tell: Callable[[Any], None], outcome: Any) -> None:
        if self.timer is not None:
            self.timer.cancel()
        with contextlib.suppress(InvalidStateError):
            tell(outcome)
        self.future.forget()


class RemoteTraceback(Exception):  # noqa: N818 - it is shown as the cause of the error, as other executors do
    """The traceback of a worker, as the cause of the exception that came from there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class UnreadableError(RemoteError):
    """Stands for an exception that a worker sent and that is none."""


def settle_call(call: Call, message: Message, *, plain: bool) -> None:
    """Give a call the outcome that its worker sent.

    Args:
        call: The call.
        message: Its answer.
        plain: Whether the answer is read as plain data; see :mod:`anyaccel.pool.plain`.
    """
    if call.relay is not None:
        call.relay(message)
        return
    if message.kind != MessageKind.RESULT:
        call.fail(exception_in(message, plain=plain))
        return
    try:
        value = _reader(plain=plain)(message.data, message.buffers)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the class of the result decides what that is
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


def _reader(*, plain: bool) -> Callable[..., Any]:
    """What makes the values of answers again."""
    if plain:
        from anyaccel.pool.plain import loads as read

        return read
    return loads


def exception_in(message: Message, *, plain: bool) -> BaseException:
    """The exception in a worker's answer, with the worker's traceback as its cause.

    Args:
        message: The answer.
        plain: Whether only exceptions of Python and of ours are made again; others are told by their text.
    """
    read = _reader(plain=plain)
    try:
        body, summary, text = read(message.data, message.buffers)
        described = isinstance(body, bytes) and isinstance(summary, str) and isinstance(text, str)
    except (Exception, SystemExit) as problem:  # noqa: BLE001 - it is handed over, with its reason
        return UnreadableError(f"an exception that cannot be read: {problem}")
    if not described:
        return UnreadableError("an exception that cannot be read: it has no text")
    made = None
    if body:
        try:
            made = read(body)
        except (Exception, SystemExit) as problem:  # noqa: BLE001 - it is handed over, with its reason
            if not plain:
                summary = f"an exception that cannot be unpickled here: {type(problem).__name__}: {problem}"
    shown = made if isinstance(made, BaseException) else RemoteError(summary)
    shown.__cause__ = RemoteTraceback(text)
    return shown


def name_of(function: Any, args: Sequence[Any] = ()) -> str:
    """What to call a function in messages; where it calls another one several times, that."""
    if function is call_each or function is call_each_method:
        function = args[0]
    return function if isinstance(function, str) else getattr(function, "__qualname__", None) or type(function).__name__


@tidy_in_child
def _disown() -> None:
    global _first  # noqa: PLW0603 - there is one process
    _first = next(_numbers)
