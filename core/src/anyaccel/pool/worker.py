"""The code of a worker process, from the fork to its end.

The order is fixed: environment, working directory and output first, then the sandbox, then user code. By then the
process has a session of its own, keeps its leases open, and dies with the fork server.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import os
import pickle
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NoReturn

from anyaccel.errors import WorkerError
from anyaccel.launcher import ProcessSetup
from anyaccel.linux import set_name
from anyaccel.pool import messages
from anyaccel.pool.messages import (
    ATOMS,
    Message,
    MessageKind,
    Pickled,
    dump_call_error,
    dumps,
    loads,
    receive,
    send,
)

OUTPUTS = (1, 2)
_CLOUDPICKLE = "cloudpickle.cloudpickle"
"""The module with the functions that cloudpickle calls to make a function sent by value."""

CONSTANT = (*ATOMS, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
"""Types of globals that change only by assignment to the global."""


class Terminated(SystemExit):
    """Raised in user code by SIGTERM, so that ``finally`` and ``with`` clean up within the grace period."""


def serve(descriptors: list[int], ahead: bool) -> NoReturn:
    """Answer messages by :func:`_work`, then exit with its status. A target of the fork server.

    The exit waits for non-daemon threads and runs the exit handlers; SIGTERM is ignored meanwhile. After an earlier
    SIGTERM, the process dies by that signal in the end.

    Args:
        descriptors: Our end of the channel, as the only item.
        ahead: Whether the process is forked ahead of need, so that there is time to rehearse.
    """
    set_name("accel-worker")
    try:
        code = _work(descriptors[0], ahead=ahead)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # exiting already; the fork server kills us if it takes too long
    except Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code = -signal.SIGTERM
    _exit_process(code)


def _work(descriptor: int, *, ahead: bool) -> int:
    """Prepare the process, and answer messages until the channel is closed, or setup or user code ends the process.

    Args:
        descriptor: Our end of the channel.
        ahead: Whether to rehearse a call before.

    Returns:
        The exit status: 0, also after a failed setup or construction; the status of a SystemExit of user code; or 1
        after another exception, which is written to standard error.

    Raises:
        Terminated: When SIGTERM has come.
    """
    try:
        _reset_signals()
        if ahead:
            _rehearse()
        MessageLoop(socket.socket(fileno=descriptor)).run()
    except Terminated:
        raise
    except SystemExit as error:  # of user code
        return _get_status(error)
    except BaseException as error:  # noqa: BLE001 - the process exits either way
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


class MessageLoop:
    """Receives messages and sends answers; has the object of an actor.

    Attributes:
        channel: The channel to the caller.
        actor: The object, once it was constructed.
        globals: Globals that the initializer has set.
        threaded: Whether methods run at the same time, each in a thread.
        loop: The event loop, from the first coroutine on.
        exit: The exception with which such a thread ends the process.
        lock: Protects lazy initialization against other such threads.
        form: The module that writes answers: ``anyaccel.pool.messages`` or ``anyaccel.pool.plain``.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.actor: Any = None
        self.globals = SharedGlobals()
        self.threaded = False
        self.loop: Loop | None = None
        self.exit: BaseException | None = None
        self.lock = threading.Lock()
        self.form: Any = messages

    def run(self) -> None:
        """Answer one message after the other until the caller closes the channel; close the event loop in any case.

        Also ends after a failed setup or construction.

        Raises:
            SystemExit: When user code has raised it, also in a thread of a method, or SIGTERM has come.
            ValueError, OSError: When a message cannot be read, or no memory or descriptor is left for an answer, also
                of such a thread.
        """
        try:
            self._run()
        except ConnectionResetError:  # the caller has gone, with answers that it has not read
            pass
        finally:
            if self.loop is not None:
                self.loop.close()
        if self.exit is not None:
            raise self.exit

    def _run(self) -> None:
        """Handle messages until the channel is closed or a handler returns False.

        A call with a log file redirects the outputs, until the next call with a log file. Exceptions of :func:`receive`
        and of the handlers pass.
        """
        handlers: dict[int, Callable[[Message], bool]] = {
            MessageKind.SETUP: self._set_up,
            MessageKind.CALL: partial(self._perform, self._call_function),
            MessageKind.CONSTRUCT: self._construct,
            MessageKind.METHOD: self._method,
        }
        while (message := receive(self.channel)) is not None:
            if message.descriptors and message.kind != MessageKind.SETUP:
                _redirect(message.descriptors)
            if not handlers[message.kind](message):
                return

    def _set_up(self, message: Message) -> bool:
        """Set up the process as the message says, before any call.

        In order: outputs, leases (inherited by programs that user code starts), format of answers, environment, READY,
        sandbox, initializer, warm-up, READY; each READY only if asked for.

        Returns:
            False if the message could not be read, or a step from the format of answers on failed with an Exception,
            which was reported with BROKEN. A SystemExit passes through, and so does an error of outputs or leases.
        """
        outputs, leases = message.descriptors[:2], message.descriptors[2:]
        _redirect(outputs)
        for lease in leases:  # inherited by programs that user code starts: the lease lasts as long as one of them runs
            os.set_inheritable(lease, True)
        try:
            setup: Mapping[str, Any] = loads(message.data, message.buffers)
            if setup["plain"]:
                from anyaccel.pool import plain

                self.form = plain
            setup["inside"].apply()
            if setup["ready"]:
                send(self.channel, MessageKind.READY)
            for stage in ("sandbox", "initializer"):
                if setup[stage] is not None:
                    self.globals.prepare(setup[stage])
            if setup["warmup"] is not None:
                self._warm_up(*setup["warmup"])
            if setup["staged"]:
                send(self.channel, MessageKind.READY)
        except Exception as error:  # noqa: BLE001 - the caller reports it
            self._answer(MessageKind.BROKEN, self._describe(error))
            return False
        return True

    def _warm_up(self, call: bytes, where: str) -> None:
        """Run the pickled warm-up, and record globals as :meth:`SharedGlobals.prepare` does.

        Args:
            call: The warm-up.
            where: Names of the devices in the error.

        Raises:
            WorkerError: When it raises an Exception; the message names the devices.
        """
        try:
            self.globals.prepare(call)
        except Exception as error:
            raise WorkerError(f"the warm-up on {where} failed: {type(error).__name__}: {error}") from error

    def _call_function(self, message: Message) -> Any:
        """Unpickle a call, run the function, and return the value; see :meth:`_call`."""
        return self._call(*self._unpickle(message))

    def _call(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None) -> Any:
        """Call a function, and return the value as :meth:`_finish` does.

        Without ``kwargs``, it is a batch: the function is called with each tuple of arguments in ``args``, in turn,
        until the first failure.

        Returns:
            The value. Of a batch, the list of the values before the first failure, the pickled exception of that or
            None, and the duration of the batch in seconds.

        Raises:
            BaseException: Of the function; of a batch, only those that are no Exception, and those by which
                :meth:`_perform` knows that the event loop was closed.
        """
        if kwargs is not None:
            return self._finish(function, function(*args, **kwargs))
        values, failure, began = [], None, time.monotonic()
        for arguments in args:
            try:
                values.append(self._finish(function, function(*arguments)))
            except Exception as error:
                if self.loop is not None and self.loop.ended(error):
                    raise
                failure = self._describe(error).data
                break
        return values, failure, time.monotonic() - began

    def _construct(self, message: Message) -> bool:
        """Construct the object of the actor; answer with the process id or the exception.

        Returns:
            False if the construction has failed or has made None, or the caller has closed the channel. The answer for
            None is the process id, too.
        """

        def construct(message: Message) -> int:
            """Construct the object, and note whether its methods run in threads; return the process id."""
            kind, args, kwargs, concurrency = self._unpickle(message)
            self.actor = kind(*args, **kwargs)
            self.threaded = concurrency > 1
            return os.getpid()

        return self._perform(construct, message) and self.actor is not None

    def _method(self, message: Message) -> bool:
        """Run a method and answer, or start a thread that does, and return at once.

        A method for which no thread can be started is answered with that error.

        Returns:
            False if the loop must end: the caller has closed the channel, or the event loop was closed.
        """
        if self.threaded:
            try:
                # A daemon thread: a process that is asked to end does not wait for it.
                threading.Thread(
                    target=self._run_in_thread, args=(message,), name="anyaccel method", daemon=True
                ).start()
            except RuntimeError as error:
                return self._answer(MessageKind.ERROR, self._describe(error), message.number)
            return True
        return self._perform(self._call_method, message)

    def _call_method(self, message: Message) -> Any:
        """Unpickle a method call, run the method, and return the value; see :meth:`_call`."""
        with self.lock:
            method, args, kwargs = self._unpickle(message)
        return self._call(getattr(self.actor, method), args, kwargs)

    def _run_in_thread(self, message: Message) -> None:
        """Run a method and answer. A SystemExit is kept for the main thread.

        So is the exception of an answer that cannot be written or sent, for instance without memory or descriptors: the
        caller would wait for the answer without end. The channel is shut for reading then: the main thread finds the
        end after the messages that have arrived.
        """
        try:
            self._perform(self._call_method, message)
        except BaseException as error:  # noqa: BLE001 - the main thread exits the process, once its receive() has ended
            self.exit = error
            self.channel.shutdown(socket.SHUT_RD)

    def _perform(self, call: Callable[[Message], Any], message: Message) -> bool:
        """Run a call, flush the outputs, and answer with the value or the exception.

        A value that cannot be pickled or sent is answered with an exception. So are KeyboardInterrupt and others that
        are no Exception.

        Returns:
            False if the caller has closed the channel, or the event loop was closed, which is not answered; True also
            after an exception of the call.

        Raises:
            SystemExit: When the call has raised it, or SIGTERM has come before the answer; the call gets none.
            OSError: When no memory or descriptor is left to send even the exception.
        """
        try:
            body = self.form.dumps(call(message))
            _flush()
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001 - the caller's future reports it
            if self.loop is not None and self.loop.ended(error):
                return False  # the process exits; the caller reports its exit status
            _flush()
            return self._answer(MessageKind.ERROR, self._describe(error), message.number)
        try:
            return self._answer(MessageKind.RESULT, body, message.number)
        except (OSError, MemoryError) as error:  # no memory for a large result
            return self._answer(MessageKind.ERROR, self._describe(error), message.number)

    def _describe(self, error: BaseException) -> Pickled:
        """Pickle an exception for an answer, and remove its traceback."""
        return dump_call_error(error, self.form)

    def _finish(self, function: Callable[..., Any], value: Any) -> Any:
        """Return the value of a call: of a coroutine, what it returns in the event loop, started if needed.

        Raises:
            BaseException: The exception of the coroutine.
            TypeError: When it is a generator, asynchronous or not; the message names :meth:`anyaccel.Pool.stream`, and
                for a method of an actor, which that does not take, a list.
        """
        if isinstance(value, CoroutineType):
            with self.lock:
                if self.loop is None:
                    self.loop = Loop()
            value = self.loop.finish(value)
        if isinstance(value, (GeneratorType, AsyncGeneratorType)):
            name = value.__qualname__
            value.close() if isinstance(value, GeneratorType) else None
            way = f"call it with pool.stream({name}, ...)"
            if self.actor is not None and getattr(function, "__self__", None) is self.actor:
                way = "a method of an actor has one result: return a list, or call a function with pool.stream()"
            raise TypeError(f"{name} yields its results one by one; {way}")
        return value

    def _unpickle(self, message: Message) -> Any:
        """Unpickle a call, with the shared globals for functions sent by value.

        Raises:
            Exception: An exception of unpickling; a ModuleNotFoundError gets a note with the ways out.
        """
        try:
            return self.globals.loads(message.data, message.buffers)
        except ModuleNotFoundError as error:
            error.add_note(
                "The worker has the module path (sys.path) of its caller. Put the module's folder on it, or have the"
                " module sent along with cloudpickle.register_pickle_by_value(module)."
            )
            raise

    def _answer(self, kind: MessageKind, body: Pickled, number: int = 0) -> bool:
        """Send an answer; return False if the caller has closed the channel.

        Raises:
            OSError: When no memory or descriptor is left for the message.
        """
        try:
            send(self.channel, kind, body, number=number)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True


class SharedGlobals:
    """In a worker: globals set by an initializer, for functions sent by value.

    cloudpickle makes a function with a dict of the globals that it uses, not with those of a module. Once an
    initializer has set a global, all functions of its module share one dict, in which later functions leave the global
    as it is.
    """

    def __init__(self) -> None:
        self._modules: dict[str, dict[str, Any]] = {}
        self._names: dict[str, set[str]] = {}

    def prepare(self, data: bytes) -> None:
        """Run the pickled call of an initializer, and record the globals that it sets for functions sent by value.

        Only modules count of which a function was sent by value by then, such as the initializer. A global counts as
        set if its value is another object than before, or an object whose content may have changed. Names with two
        underscores on both sides are left out. The returned value is dropped.

        Raises:
            Exception: An exception of the call, or of unpickling; no global is recorded then.
        """
        function, arguments = self._loads(data)
        before = {module: dict(space) for module, space in self._modules.items()}
        function(*arguments)
        for module, old in before.items():
            for name, value in self._modules[module].items():
                private = name.startswith("__") and name.endswith("__")
                # An object of another type than these may have changed inside.
                same = name in old and old[name] is value and isinstance(value, CONSTANT)
                if not (private or same):
                    self._names.setdefault(module, set()).add(name)

    def loads(self, data: bytes | memoryview, buffers: list[memoryview] | None = None) -> Any:
        """Unpickle a value, which may run any code; functions sent by value see the globals that initializers set.

        Until an initializer has set a global, the functions of one module in the same pickle share their globals, and
        those of different pickles do not. After that, all functions of a module share them, across pickles.
        """
        return self._loads(data, buffers) if self._names else loads(data, buffers)

    def _loads(self, data: bytes | memoryview, buffers: list[memoryview] | None = None) -> Any:
        """Unpickle a value, which may run any code; functions sent by value get the shared globals of their modules.

        The first function of a module begins these globals, also before an initializer has set a global.
        """
        unpickler = _Unpickler(io.BytesIO(data), buffers=buffers or ())
        unpickler.replaced = {"_make_function": self._make_function, "_function_setstate": self._set_state}
        return unpickler.load()

    def _make_function(self, make: Callable[..., Any], code: object, space: dict[str, Any], *rest: object) -> Any:
        """Make a function with cloudpickle's maker, and with the shared globals of its module.

        The globals of the first function of a module become the shared globals.
        """
        return make(code, self._modules.setdefault(space.get("__name__", ""), space), *rest)

    def _set_state(self, set_state: Callable[..., Any], function: types.FunctionType, state: tuple[Any, Any]) -> None:
        """Set the attributes and globals of a function with cloudpickle's setter.

        Globals that an initializer has set, and that still exist, keep their values.
        """
        space, slots = function.__globals__, state[1]
        for name in self._names.get(space.get("__name__", ""), ()):
            if name in space:
                slots["__globals__"].pop(name, None)
        set_state(function, state)


class _Unpickler(pickle.Unpickler):
    """An unpickler that replaces functions of cloudpickle.

    Attributes:
        replaced: The replacements by name, each called with the function itself as the first argument.
    """

    replaced: Mapping[str, Callable[..., Any]]

    def find_class(self, module: str, name: str) -> Any:
        """Import a module and return its global, or the replacement of a cloudpickle function in :attr:`replaced`.

        The replacement has the function itself bound as its first argument. Exceptions of the import pass.
        """
        found = super().find_class(module, name)
        return partial(self.replaced[name], found) if module == _CLOUDPICKLE and name in self.replaced else found


async def _contain(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """Return the value of a coroutine, or its KeyboardInterrupt or SystemExit; of a task, these would end the loop."""
    try:
        return await coroutine, None
    except (KeyboardInterrupt, SystemExit) as error:
        return None, error


class Loop:
    """The event loop of this process, in a thread of its own, so that tasks go on between calls."""

    def __init__(self) -> None:
        import asyncio  # not at the top: most workers run no coroutine

        self._closing = False
        # With a factory, or the loop would be that of the calling thread, too.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="anyaccel loop", daemon=True)
        self._thread.start()

    def finish(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the loop's thread, and wait; return the value or raise the exception.

        Raises:
            CancelledError: When the loop is closing, so that the coroutine is not run; or when the coroutine was
                cancelled, also by the end of the loop.
            RuntimeError: When the loop has closed just now, or has ended by itself; see :meth:`_run`.
            BaseException: The exception of the coroutine; a KeyboardInterrupt or SystemExit leaves the loop running.
        """
        if self._closing:
            coroutine.close()
            raise CancelledError
        import asyncio

        value, error = asyncio.run_coroutine_threadsafe(_contain(coroutine), self._loop).result()
        if error is not None:
            raise error
        return value

    def ended(self, error: BaseException) -> bool:
        """Return whether an exception of a coroutine is the consequence of :meth:`close`.

        Any CancelledError or RuntimeError counts after that.
        """
        return self._closing and isinstance(error, (CancelledError, RuntimeError))

    def close(self) -> None:
        """Cancel all tasks, stop the loop, and return when the tasks' clean-up is over."""
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        """Run the event loop until :meth:`close`, then cancel its tasks; a task that raises SystemExit ends alone."""
        with self._runner:
            while not self._closing:
                # Of a task that a call has left behind; asyncio logs the exception like any other of a task.
                with contextlib.suppress(KeyboardInterrupt, SystemExit):
                    self._loop.run_forever()


def _redirect(descriptors: list[int]) -> None:
    """Flush the outputs, redirect standard output and error to two descriptors, and close the descriptors."""
    _flush()
    for target, descriptor in zip(OUTPUTS, descriptors, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)


def _flush() -> None:
    """Flush standard output, then standard error; return silently at the first exception, as of a closed stream."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:  # noqa: BLE001, S110 - user code may have closed or replaced the streams
        pass


def _reset_signals() -> None:
    """Make SIGTERM raise :class:`Terminated`, read standard input from ``/dev/null``, and enable the fault handler.

    SIGTERM is unblocked. If numpy or PyTorch was imported before, its global random generator gets a new seed.
    """
    signal.signal(signal.SIGTERM, _terminate)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # User code must not read the standard input that was inherited from the fork server.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    faulthandler.enable(2)  # a crash in a library prints the Python stack
    # Of preloaded modules: without a new seed, all workers would draw the same numbers.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    generator = getattr(sys.modules.get("torch"), "default_generator", None)  # of the processor; a device makes its own
    if generator is not None:
        generator.seed()


def _rehearse() -> None:
    """Run a setup and a call of ``int`` on a channel of our own, before a caller waits; the answer is dropped.

    A forked process shares its memory pages with its parent, and the first write to each page costs a page fault.
    """
    # Worth its lines: a fresh call takes 4.8 ms instead of 5.9 where calls follow one another.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        nothing = dict.fromkeys(("ready", "staged", "plain", "sandbox", "initializer", "warmup"))
        send(ours, MessageKind.SETUP, dumps({"inside": ProcessSetup(directory="."), **nothing}), OUTPUTS)
        send(ours, MessageKind.CALL, dumps((int, (), {})))
        ours.shutdown(socket.SHUT_WR)
        MessageLoop(theirs).run()
        receive(ours)


def _terminate(number: int, _: object) -> NoReturn:
    """Raise :class:`Terminated`: the handler of SIGTERM."""
    raise Terminated(128 + number)


def _get_status(error: SystemExit) -> int:
    """Return the exit status of a SystemExit as the interpreter does: the low 8 bits of the code, 0 for None.

    A code that is no whole number is written to standard error, if there is any, with status 1.
    """
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    with contextlib.suppress(Exception):  # None, as in a program without streams, or closed by user code
        sys.stderr.write(f"{error.code}\n")
    return 1


def _exit_process(code: int) -> NoReturn:
    """Wait for non-daemon threads, run the exit handlers, flush the outputs, and exit with a status.

    An exception, such as an interrupt of the wait, skips the steps that are left. A negative code stands for a
    signal, by which the process dies.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as multiprocessing's children do
        atexit._run_exitfuncs()  # noqa: SLF001
        _flush()
    finally:
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)
