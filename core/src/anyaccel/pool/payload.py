"""Values for another process: pickles, and shared memory that both sides map."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import mmap
import os
import pickle
import sys
import time
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

PROTOCOL = 5
LARGE = 1 << 15
"""Size in bytes from which a buffer travels outside of the pickle: mapping a smaller one costs more than a copy."""

SCRIPT = b"__main__"

_ATOMS: frozenset[type] = frozenset((bool, int, float, complex, str, bytes, type(None), type(Ellipsis)))

BEFORE_USERS = {
    __name__, "anyaccel.pool.worker", "anyaccel.forkserver.server", "concurrent.futures._base",
}  # fmt: skip
"""Modules whose frames at the start of a traceback are not shown."""

_NO_FILE = "<dynamic-code>"
"""The file name that cloudpickle 3.1.3 writes in place of the real one."""
_CLOUDPICKLE = "cloudpickle.cloudpickle"
"""The module with the functions that cloudpickle calls to make a function sent by value."""

CONSTANT = (*_ATOMS, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
"""Types of globals that change only by assignment to the global."""


class Pickled(NamedTuple):
    """A pickled value.

    Attributes:
        data: The pickle.
        buffers: Large buffers that it refers to, in order: memory of the value itself, not copies.
        stored: Data and buffers in shared memory, if they were written there; then the other two are empty.
    """

    data: bytes
    buffers: list[memoryview]
    stored: SharedParts | None = None

    @property
    def size(self) -> int:
        """Size of data and buffers in bytes; 0 if they were written to shared memory."""
        return len(self.data) + sum(map(len, self.buffers))

    def copy(self) -> Pickled:
        """Return a copy of which the buffers are independent of the value's memory; itself if there are no buffers."""
        return Pickled(self.data, [memoryview(bytes(buffer)) for buffer in self.buffers]) if self.buffers else self

    def to_shared_memory(self) -> Pickled:
        """Return a copy in shared memory, for one worker, which may write to the memory.

        Raises:
            OSError: When no memory or descriptor is left.
        """
        return Pickled(b"", [], SharedParts([self.data, *self.buffers]))


class SharedParts:
    """The parts of a message in shared memory.

    Attributes:
        descriptor: Descriptor of the memory, closed with this object.
        lengths: Lengths of the parts in bytes.
    """

    __slots__ = ("descriptor", "lengths")

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self.lengths = tuple(map(len, parts))
        self.descriptor = write_shared(parts)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def dumps(value: Any) -> Pickled:
    """Pickle a call for a worker, or a result for the caller; buffers of :data:`LARGE` bytes or more are not copied.

    Functions and classes are pickled by name; those of a script, a shell or a closure, and those of modules registered
    with cloudpickle, by value. The value's own code may run twice, as a second attempt is made with cloudpickle.

    Raises:
        Exception: An exception of the value's own code, or one of pickle's.
    """
    if type(value) in _ATOMS:
        return Pickled(pickle.dumps(value, PROTOCOL), [])
    buffers: list[memoryview] = []
    return Pickled(_dumps(value, buffers), buffers)


def dumps_whole(value: Any) -> bytes:
    """Pickle a value in one piece, for use in several messages; functions by name or by value as :func:`dumps` does.

    Raises:
        Exception: An exception of the value's own code, or one of pickle's.
    """
    return _dumps(value, None)


def dumps_error(error: BaseException, text: str) -> Pickled:
    """Pickle a tuple: the pickled exception, summary and traceback.

    The exception is pickled by itself inside, so that the caller can read the texts when its class cannot be imported.

    Args:
        error: The exception; its pickle is empty if it cannot be pickled or unpickled, which is tried here.
        text: Its traceback.
    """
    try:
        body = dumps_whole(error)
        loads(body)  # many classes of exceptions can be pickled and not unpickled, because of their __init__
    except Exception:  # noqa: BLE001
        body = b""
    return dumps((body, summarize_error(error), text))


def summarize_error(error: BaseException) -> str:
    """Return the class and the text of an exception; the class alone if its ``__str__`` raises."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:  # noqa: BLE001 - __str__ is code of the user
        return name


def dump_call_error(error: BaseException, dumps_error: Callable[[BaseException, str], Pickled]) -> Pickled:
    """Pickle the exception of a call with ``dumps_error``, and a traceback that begins with the user's code.

    The traceback is removed from the exception.
    """
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in BEFORE_USERS:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    error.__traceback__ = None
    return dumps_error(error, text)


def _dumps(value: Any, buffers: list[memoryview] | None) -> bytes:
    """Pickle a value, with cloudpickle if pickle fails or the pickle names ``__main__`` or a module sent by value.

    cloudpickle sends functions and classes of these by value. Whether the other side can import the rest is not
    checked.

    Args:
        value: The value.
        buffers: Receives the buffers of :data:`LARGE` bytes or more, which are left out; None keeps all inside.

    Raises:
        Exception: An exception of the value's own code, or one of pickle's.
    """

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        """Keep a small buffer inside of the pickle; record a large one, and return False."""
        view = buffer.raw()
        if buffers is None or view.nbytes < LARGE:
            return True
        buffers.append(view)
        return False

    # Lambdas and closures raise several kinds of exceptions; pickling by value raises the real one.
    with contextlib.suppress(Exception):
        data = pickle.dumps(value, PROTOCOL, buffer_callback=keep_inside)
        # A name in __main__ would be looked up in the worker's own __main__.
        if not (SCRIPT in data or _by_value(data)):
            return data
    if buffers:
        buffers.clear()
    file = io.BytesIO()
    _pickler_by_value()(file, PROTOCOL, buffer_callback=keep_inside).dump(value)
    return file.getvalue()


@cache
def _pickler_by_value() -> Any:
    """Return a subclass of cloudpickle's pickler that keeps the file names of code objects; made once.

    Version 3.1.3 drops them, so that tracebacks would show no source lines of functions that were sent by value.
    """
    import cloudpickle  # type: ignore[import-untyped, unused-ignore]

    known: Any = cloudpickle.Pickler.dispatch_table

    def reduce_code(code: types.CodeType) -> tuple[Any, ...]:
        """Reduce a code object as cloudpickle does, but with its file name."""
        make, arguments = known[types.CodeType](code)
        return make, tuple(code.co_filename if each == _NO_FILE else each for each in arguments)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, unused-ignore]
        dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: reduce_code}, known)

    return Pickler


def loads(data: bytes | memoryview, buffers: Sequence[memoryview] | None = None) -> Any:
    """Unpickle a value, which may run any code. Large arrays use the memory of ``buffers`` without a copy.

    Raises:
        Exception: An exception of that code, or one of pickle's.
    """
    return pickle.loads(data, buffers=buffers or ())  # noqa: S301 - from a process that runs the same user's code


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
            Exception: An exception of the call, or of unpickling.
        """
        function, arguments = self._loads(data)
        before = {module: dict(space) for module, space in self._modules.items()}
        function(*arguments)
        for module, old in before.items():
            for name, value in self._modules[module].items():
                private = name.startswith("__") and name.endswith("__")
                if not private and not (name in old and _same(old[name], value)):
                    self._names.setdefault(module, set()).add(name)

    def loads(self, data: bytes | memoryview, buffers: list[memoryview] | None = None) -> Any:
        """Unpickle a value, which may run any code; functions sent by value see the globals that initializers set."""
        return self._loads(data, buffers) if self._names else loads(data, buffers)

    def _loads(self, data: bytes | memoryview, buffers: list[memoryview] | None = None) -> Any:
        """Unpickle a value, with shared globals for the functions sent by value in it."""
        unpickler = _Unpickler(io.BytesIO(data), buffers=buffers or ())
        unpickler.replaced = {"_make_function": self._make_function, "_function_setstate": self._set_state}
        return unpickler.load()

    def _make_function(self, make: Callable[..., Any], code: object, space: dict[str, Any], *rest: object) -> Any:
        """Make a function with cloudpickle's maker, and with the shared globals of its module.

        The globals of the first function of a module become the shared globals.
        """
        return make(code, self._modules.setdefault(space.get("__name__", ""), space), *rest)

    def _set_state(self, set_state: Callable[..., Any], function: types.FunctionType, state: tuple[Any, Any]) -> None:
        """Set the attributes and globals of a function with cloudpickle's setter, except globals of an initializer."""
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
        """Return a global of a module, or the replacement of a function of cloudpickle."""
        found = super().find_class(module, name)
        return partial(self.replaced[name], found) if module == _CLOUDPICKLE and name in self.replaced else found


def _same(old: object, new: object) -> bool:
    """Return whether a global is the same object as before, of a type in :data:`CONSTANT`.

    An object of another type may have changed inside, so the result is False for the same object, too.
    """
    return old is new and isinstance(new, CONSTANT)


def _by_value(data: bytes) -> bool:
    """Return whether a pickle contains the name of a module that was registered with cloudpickle for pickling by value.

    Any occurrence counts, also in a text.
    """
    cloudpickle = sys.modules.get("cloudpickle")
    names = () if cloudpickle is None else cloudpickle.list_registry_pickle_by_value()
    return any(name.encode() in data for name in names)


ALIGNMENT = 64
"""Of each part in bytes: a cache line."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_BLOCK = 512
"""Unit of st_blocks."""
_MAP_POPULATE = 0x8000
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def write_shared(parts: Sequence[bytes | memoryview]) -> int:
    """Write aligned parts one after the other into new shared memory.

    Returns:
        The descriptor, which the caller closes. The size is sealed, so that a process that maps the memory gets no
        SIGBUS when the other truncates it.

    Raises:
        OSError: When no memory or descriptor is left.
    """
    descriptor = os.memfd_create("anyaccel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        offset = 0
        for part in parts:
            view = memoryview(part)
            while view:
                written = os.pwrite(descriptor, view[: 1 << 30], offset)
                view = view[written:]
                offset += written
            offset = _aligned(offset)
        os.ftruncate(descriptor, max(offset, 1))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_shared(descriptor: int, lengths: Sequence[int]) -> list[memoryview]:
    """Map the parts that :func:`write_shared` wrote, without a copy, for reading and writing.

    The mapping lives as long as a view of it; the descriptor stays open and is not needed for that.

    Raises:
        ValueError: When the memory is too small, has holes, or is not sealed.
        OSError: When it cannot be mapped, or can have no seals.
    """
    offsets = [0]
    for length in lengths:
        offsets.append(_aligned(offsets[-1] + length))
    size = offsets[-1]
    found = os.fstat(descriptor)
    # No holes: the worker may claim any size, and reading a hole would allocate that memory here.
    if (
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS
        or found.st_size < size
        or found.st_blocks * _BLOCK < size
    ):
        raise ValueError(f"shared memory must be sealed and hold {size} bytes")
    whole = _map(descriptor, size) if size else memoryview(b"")
    return [whole[start : start + length] for start, length in zip(offsets, lengths, strict=False)]


def _map(descriptor: int, size: int) -> memoryview:
    """Map shared memory for reading and writing; it is unmapped when the last view has gone, but not at exit.

    Raises:
        OSError: When it cannot be mapped.
    """
    # Not mmap.mmap: before Python 3.13 that keeps one descriptor for each array that lives.
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED | _MAP_POPULATE, descriptor, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{size} bytes of shared memory cannot be mapped: {os.strerror(code)}")
    block = (ctypes.c_char * size).from_address(address)
    weakref.finalize(block, _libc.munmap, address, size).atexit = False  # at exit, views may still be in use
    return memoryview(block).cast("B")


def _aligned(offset: int) -> int:
    """Round an offset up to a multiple of :data:`ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


class Batch(NamedTuple):
    """The outcome of a batch of calls.

    Attributes:
        results: The results of the calls before the first that failed.
        failure: The exception of that one; None if all returned.
        seconds: Duration of the batch, from the first coroutine on if a call returned a coroutine.
    """

    results: list[Any]
    failure: Exception | None
    seconds: float


def call_each(function: Callable[..., Any], batch: list[tuple[Any, ...]]) -> Any:
    """Call a function with the arguments of each call of a batch, until the first failure; runs in a worker.

    The exception of the failed call is returned, not raised, except SystemExit and others that are no Exception. A
    result that is a generator counts as a failure.

    Returns:
        A :class:`Batch`; from the first call that returns a coroutine on, the coroutine of :func:`_await_each`.
    """
    results: list[Any] = []
    began = time.monotonic()
    failure = None
    try:
        left = iter(batch)
        for arguments in left:
            value = function(*arguments)
            if type(value) is types.CoroutineType:
                return _await_each(function, results, value, left)
            refuse_generator(value)
            results.append(value)
    except Exception as error:  # noqa: BLE001 - it belongs to one call, and the results before it count
        failure = error
    return Batch(results, failure, time.monotonic() - began)


def refuse_generator(value: Any) -> None:
    """Raise an error if the result of a call is a generator; a generator is closed before, unless asynchronous.

    Raises:
        TypeError: When the function is a generator, which is for :meth:`anyaccel.Pool.stream`.
    """
    if isinstance(value, (types.GeneratorType, types.AsyncGeneratorType)):
        name = value.__qualname__
        value.close() if isinstance(value, types.GeneratorType) else None
        raise TypeError(f"{name} yields its results one by one; call it with pool.stream({name}, ...)")


async def _await_each(
    function: Callable[..., Any],
    results: list[Any],
    first: types.CoroutineType[Any, Any, Any],
    left: Iterator[tuple[Any, ...]],
) -> Batch:
    """Continue :func:`call_each` from the first call that returned a coroutine, and return the whole batch.

    The duration counts from here.

    Args:
        function: The function. Later calls may return a value instead of a coroutine.
        results: The results of the calls before.
        first: The coroutine.
        left: Arguments of the calls after.
    """
    began = time.monotonic()
    failure = None
    try:
        value = await first
        refuse_generator(value)
        results.append(value)
        for arguments in left:
            value = function(*arguments)
            value = await value if type(value) is types.CoroutineType else value
            refuse_generator(value)
            results.append(value)
    except Exception as error:  # noqa: BLE001 - as in call_each()
        failure = error
    return Batch(results, failure, time.monotonic() - began)


def call_each_method(actor: Any, method: str, batch: list[tuple[Any, ...]]) -> Any:
    """Call a method of an actor, by name, for each call of a batch, and return what :func:`call_each` returns.

    Raises:
        AttributeError: When there is no such method.
    """
    return call_each(getattr(actor, method), batch)


class YieldedItems:
    """The items that a function yields: the object of a stream's actor, in the worker.

    Args:
        function: The function. It returns an iterable, or an asynchronous one.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begin: Callable[[], Any] = partial(function, *args, **kwargs)
        self._items: Any = None  # not called here: an exception of the function is raised where the first item is taken

    def take(self) -> Any:
        """Return the next item in a tuple, or an empty tuple at the end; a coroutine for an asynchronous iterable.

        The first call calls the function.

        Raises:
            Exception: The exception of the function or of its iterable.
        """
        if self._items is None:
            made = self._begin()
            self._items = aiter(made) if hasattr(made, "__aiter__") else iter(made)
        if hasattr(self._items, "__anext__"):
            return self._take()
        for item in self._items:
            return (item,)
        return ()

    async def _take(self) -> tuple[Any, ...]:
        """Return the next item of an asynchronous iterable in a tuple, or an empty tuple at the end."""
        async for item in self._items:
            return (item,)
        return ()

    def end(self) -> Any:
        """Close the generator, so the function cleans up.

        No effect before the first item, or on an iterable that cannot be closed. Exceptions of the clean-up are raised.

        Returns:
            A coroutine for an asynchronous generator, else None.
        """
        if hasattr(self._items, "aclose"):
            return self._items.aclose()
        if hasattr(self._items, "close"):
            self._items.close()
        return None
