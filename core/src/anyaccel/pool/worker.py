"""The inside of a worker: what a process does between the fork and its end.

The order is fixed: environment, working directory and output first, then the sandbox, then user code. By then the
process has a session of its own, carries its leases, and dies with the fork server.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NoReturn

from anyaccel.errors import WorkerError
from anyaccel.launcher.inside import ProcessSetup
from anyaccel.linux.process import set_name
from anyaccel.pool.channel import Message, MessageKind, receive, send
from anyaccel.pool.payload import Batch, Pickled, SharedGlobals, check_over, describe, dumps, dumps_error, loads

if TYPE_CHECKING:
    from anyaccel.pool.together import Lanes, Loop

OUTPUTS = (1, 2)


class Terminated(SystemExit):
    """Raised in user code by SIGTERM, so that ``finally`` and ``with`` clean up in the time of grace."""


def serve(descriptors: list[int], ahead: bool) -> NoReturn:
    """Do what the caller asks until it closes the channel; never returns. A target of the fork server.

    Args:
        descriptors: Our end of the channel.
        ahead: Whether nothing waits for us yet, so that there is time to get ready.
    """
    set_name("accel-worker")
    try:
        code = _work(descriptors[0], ahead=ahead)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # we are about to end; what takes too long is killed
    except Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code = -signal.SIGTERM
    _end(code)


def _work(descriptor: int, *, ahead: bool) -> int:
    """Answer until there is nothing more to do; returns the status to end with, or the negative number of a signal."""
    try:
        _reset_signals()
        if ahead:
            _rehearse()
        MessageLoop(socket.socket(fileno=descriptor)).run()
    except Terminated:
        raise
    except SystemExit as error:  # user code wanted to end the process
        return _leave(error)
    except BaseException as error:  # noqa: BLE001 - the process ends either way, and its end is what the caller sees
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


class MessageLoop:
    """The state of the process: its channel, and the object of an actor."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.actor: Any = None
        self.waiting: deque[Message] = deque()  # taken out of the channel while something else ran
        self.globals = SharedGlobals()
        self.leave_construction: Callable[[], None] = lambda: None  # takes back the globals that it has set
        self.lanes: Lanes | None = None  # where methods run at the same time
        self.loop: Loop | None = None  # from the first coroutine on
        self.exit: SystemExit | None = None  # of a method in a lane
        self.lock = threading.Lock()
        self.dumps: Callable[[Any], Pickled] = dumps
        self.dumps_error: Callable[[BaseException, str], Pickled] = dumps_error

    def run(self) -> None:
        """Answer one message after the other until the caller has no more."""
        try:
            self._run()
        finally:
            if self.loop is not None:
                self.loop.close()
        if self.exit is not None:
            raise self.exit

    def _run(self) -> None:
        handlers: dict[int, Callable[[Message], bool]] = {
            MessageKind.SETUP: self._set_up,
            MessageKind.CALL: self._call,
            MessageKind.CONSTRUCT: self._construct,
            MessageKind.METHOD: self._method,
        }
        while True:
            message = self.waiting.popleft() if self.waiting else receive(self.channel)
            if message is None:
                return
            if message.kind == MessageKind.SKIP:
                continue
            if message.descriptors and message.kind != MessageKind.SETUP:
                _redirect(message.descriptors)
            if not handlers[message.kind](message):
                return

    def _set_up(self, message: Message) -> bool:
        outputs, leases = message.descriptors[:2], message.descriptors[2:]
        _redirect(outputs)
        for lease in leases:  # kept open: a lease lasts as long as anybody carries it, also programs started from here
            os.set_inheritable(lease, True)
        try:
            setup: Mapping[str, Any] = loads(message.data, message.buffers)
            if setup["plain"]:
                from anyaccel.pool import plain

                self.dumps, self.dumps_error = plain.dumps, plain.dumps_error
            setup["inside"].apply()
            if setup["ready"]:
                send(self.channel, MessageKind.READY)
            for stage in ("sandbox", "initializer"):
                if setup[stage] is not None:
                    self.globals.prepare(setup[stage])
            if setup["warmup"] is not None:
                self._warm_up(*setup["warmup"])
            if setup["staged"]:
                send(self.channel, MessageKind.PREPARED)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller should hear of it
            self._answer(MessageKind.BROKEN, self._describe(error))
            return False
        return True

    def _warm_up(self, call: bytes, where: str) -> None:
        """Run a pickled call for the first use of the devices.

        Raises:
            WorkerError: When it fails; that says on which devices.
        """
        try:
            self.globals.prepare(call)
        except Exception as error:
            raise WorkerError(f"the warm-up on {where} failed: {type(error).__name__}: {error}") from error

    def _call(self, message: Message) -> bool:
        return self._perform(self._call_function, message)

    def _call_function(self, message: Message) -> Any:
        (function, args, kwargs), leave = self._unpickled(message)
        try:
            return function(*args, **kwargs)
        finally:
            leave()

    def _construct(self, message: Message) -> bool:
        def construct(message: Message) -> int:
            (kind, args, kwargs, concurrency), self.leave_construction = self._unpickled(message)
            self.actor = kind(*args, **kwargs)
            if concurrency > 1:
                from anyaccel.pool.together import Lanes

                self.lanes = Lanes(self._run_in_lane)
            return os.getpid()

        return self._perform(construct, message) and self.actor is not None

    def _method(self, message: Message) -> bool:
        if self.lanes is not None:
            self.lanes.put(message)
            return True
        if message.number in self._skipped():
            return self._answer(MessageKind.RESULT, self.dumps(None), message.number)
        return self._perform(self._call_method, message)

    def _skipped(self) -> set[int]:
        """Numbers of the calls that were cancelled while they stood behind others, as far as is known now."""
        with contextlib.suppress(BlockingIOError):
            while (message := receive(self.channel, wait=False)) is not None:
                self.waiting.append(message)
        return {message.number for message in self.waiting if message.kind == MessageKind.SKIP}

    def _call_method(self, message: Message) -> Any:
        with self.lock:
            self.leave_construction()
            (method, args, kwargs), _ = self._unpickled(message)
        if callable(method):
            return method(self.actor, *args, **kwargs)
        return getattr(self.actor, method)(*args, **kwargs)

    def _run_in_lane(self, message: Message) -> None:
        try:
            self._perform(self._call_method, message)
        except SystemExit as error:  # it ends the process, which is for the main thread to do
            self.exit = error
            self.channel.shutdown(socket.SHUT_RD)

    def _perform(self, call: Callable[[Message], Any], message: Message) -> bool:
        """Answer with what a call returned or raised; False when there is nobody to answer."""
        try:
            value = call(message)
            if isinstance(value, CoroutineType):
                value = self._finish(value)
            check_over(value)
            if type(value) is Batch:
                failure = None if value.failure is None else self._describe(value.failure).data
                value = (value.results, failure, value.seconds)
            body = self.dumps(value)
            _flush()
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            if self.loop is not None and self.loop.ended(error):
                return False  # the end of the process is what the caller is to hear
            _flush()
            return self._answer(MessageKind.ERROR, self._describe(error), message.number)
        try:
            return self._answer(MessageKind.RESULT, body, message.number)
        except (OSError, MemoryError) as error:  # no memory to put it into
            return self._answer(MessageKind.ERROR, self._describe(error), message.number)

    def _describe(self, error: BaseException) -> Pickled:
        return describe(error, self.dumps_error)

    def _finish(self, value: Any) -> Any:
        """Run a coroutine to its end."""
        with self.lock:
            if self.loop is None:
                from anyaccel.pool.together import Loop

                self.loop = Loop()
        return self.loop.finish(value)

    def _unpickled(self, message: Message) -> tuple[Any, Callable[[], None]]:
        """What is to be called, and with what; and what takes back the shared globals that it sets."""
        try:
            value, spaces = self.globals.loads(message.data, message.buffers)
        except ModuleNotFoundError as error:
            error.add_note(
                "The worker has the module path (sys.path) of its caller. Put the module's folder on it, or have the"
                " module sent along with cloudpickle.register_pickle_by_value(module)."
            )
            raise
        return value, self.globals.enter(spaces)

    def _answer(self, kind: MessageKind, body: Pickled, number: int = 0) -> bool:
        try:
            send(self.channel, kind, body, number=number)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True


def _redirect(descriptors: list[int]) -> None:
    """Let output go where the caller's goes, or into the file of a log."""
    _flush()
    for target, descriptor in zip(OUTPUTS, descriptors, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)


def _flush() -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:  # noqa: BLE001, S110 - user code may have closed or replaced them
        pass


def _reset_signals() -> None:
    signal.signal(signal.SIGTERM, _terminate)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    faulthandler.enable(2)  # a crash in a library says where
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # preloaded: without this all workers would draw the same numbers
        numpy.random.seed()


def _rehearse() -> None:
    """Set up for nothing and call nothing: the memory that this touches is copied now, not when somebody waits.

    A forked process shares its memory with its parent until it writes to it, and each page costs a fault then: for what
    follows, more time than all the rest.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        nothing = dict.fromkeys(("ready", "staged", "plain", "sandbox", "initializer", "warmup"))
        send(ours, MessageKind.SETUP, dumps({"inside": ProcessSetup(directory="."), **nothing}), OUTPUTS)
        send(ours, MessageKind.CALL, dumps((int, (), {})))
        ours.shutdown(socket.SHUT_WR)
        MessageLoop(theirs).run()
        receive(ours)


def _terminate(number: int, _: object) -> NoReturn:
    raise Terminated(128 + number)


def _leave(error: SystemExit) -> int:
    """The status with which an exit ends, as the interpreter would have it."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _end(code: int) -> NoReturn:
    """Run what was registered for the end, then end: with a status, or by the signal that a negative code names."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as multiprocessing's children do
        atexit._run_exitfuncs()  # noqa: SLF001
        _flush()
    finally:
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)
