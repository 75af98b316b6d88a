"""Values on their way to another process: pickles, and memory that both sides map."""

from __future__ import annotations

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
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

PROTOCOL = 5
LARGE = 1 << 15
"""Bytes from which a buffer travels beside the pickle: below, a page of its own costs more than a copy."""

SCRIPT = b"__main__"

_ATOMS: frozenset[type] = frozenset((bool, int, float, complex, str, bytes, type(None), type(Ellipsis)))

BEFORE_USERS = {
    __name__, "anyaccel.pool.worker", "anyaccel.pool.together", "anyaccel.forkserver.server", "anyaccel.pool.stream",
    "concurrent.futures._base",
}  # fmt: skip
"""Modules of which a traceback shows no frames before those of the user."""

_NO_FILE = "<dynamic-code>"
"""What cloudpickle 3.1.3 says in place of the name of a file."""
MAKES_FUNCTION = ("cloudpickle.cloudpickle", "_make_function")
"""What cloudpickle calls to make a function that was sent by value."""

CONSTANT = (*_ATOMS, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
"""Types of globals that change by assignment only."""


class Pickled(NamedTuple):
    """A value on its way.

    Attributes:
        data: The pickle.
        buffers: What it refers to, in order; memory of the value itself, not copies.
        stored: All of it, where it has been written to shared memory already; then the others are empty.
    """

    data: bytes
    buffers: list[memoryview]
    stored: SharedParts | None = None

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self.data) + sum(map(len, self.buffers))

    def frozen(self) -> Pickled:
        """The same, independent of what becomes of the value's memory."""
        return Pickled(self.data, [memoryview(bytes(buffer)) for buffer in self.buffers]) if self.buffers else self

    def written(self) -> Pickled:
        """The same in shared memory, which is independent of the value's, too; for one worker.

        Raises:
            OSError: When there is no memory or no descriptor left.
        """
        return Pickled(b"", [], SharedParts([self.data, *self.buffers]))


class SharedParts:
    """Parts of a message in shared memory.

    Attributes:
        descriptor: The memory; open as long as this lives.
        lengths: Lengths of the parts.
    """

    __slots__ = ("descriptor", "lengths")

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self.lengths = tuple(map(len, parts))
        self.descriptor = write_shared(parts)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def dumps(value: Any) -> Pickled:
    """Pickle a value for a worker, or a result for the caller.

    What the other side can import goes by name; what it cannot - from a script, a shell, a closure - goes by value.

    Raises:
        Exception: What the value's own code raised, or ``pickle.PicklingError`` and its like.
    """
    if type(value) in _ATOMS:
        return Pickled(pickle.dumps(value, PROTOCOL), [])
    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < LARGE:
            return True
        buffers.append(view)
        return False

    data = _dumps(value, keep_inside)
    if data is None:
        buffers.clear()
        data = _dumps_by_value(value, keep_inside)
    return Pickled(data, buffers)


def dumps_whole(value: Any) -> bytes:
    """The same in one piece, for what is sent more than once."""
    data = _dumps(value, None)
    return _dumps_by_value(value, None) if data is None else data


def dumps_error(error: BaseException, text: str) -> Pickled:
    """Pickle an exception and its traceback as text: the exception by itself, so that its text can be read without it.

    Args:
        error: The exception. Where it cannot travel, its text must do.
        text: Its traceback.
    """
    try:
        body = _without_registry(error) or dumps_whole(error)
        loads(body)  # an exception's class decides how it is made again, and many get it wrong
    except Exception:  # noqa: BLE001
        body = b""
    return dumps((body, summary_of(error), text))


def summary_of(error: BaseException) -> str:
    """The class and the text of an exception."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:  # noqa: BLE001 - its class decides what its text is
        return name


def describe(error: BaseException, dumps_error: Callable[[BaseException, str], Pickled]) -> Pickled:
    """An exception of a user's call, and its traceback as text, which begins with the user's code."""
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in BEFORE_USERS:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    error.__traceback__ = None
    return dumps_error(error, text)


def _without_registry(error: BaseException) -> bytes | None:
    """Pickle an exception by name as its class says, or None where that would not do.

    Some libraries register a way of their own for all exceptions, which not every caller can read.
    """
    file = io.BytesIO()
    pickler = pickle.Pickler(file, PROTOCOL)
    pickler.dispatch_table = {}
    try:
        pickler.dump(error)
    except Exception:  # noqa: BLE001 - as in _dumps()
        return None
    data = file.getvalue()
    return None if SCRIPT in data or _by_value(data) else data


def _dumps(value: Any, keep_inside: Callable[[pickle.PickleBuffer], bool] | None) -> bytes | None:
    """Pickle by name, or None where that would not do."""
    try:
        data = pickle.dumps(value, PROTOCOL, buffer_callback=keep_inside)
    except Exception:  # noqa: BLE001 - lambdas, closures and the like raise several kinds; the other way tells the truth
        return None
    # A name in the script of this process would be looked up in the script of another.
    return None if SCRIPT in data or _by_value(data) else data


def _dumps_by_value(value: Any, keep_inside: Callable[[pickle.PickleBuffer], bool] | None) -> bytes:
    """Pickle, by value, what the other side cannot import."""
    file = io.BytesIO()
    _pickler_by_value()(file, PROTOCOL, buffer_callback=keep_inside).dump(value)
    return file.getvalue()


@cache
def _pickler_by_value() -> Any:
    """Make cloudpickle's pickler, which keeps the names of files.

    Version 3.1.3 drops them, and a traceback through a function that was sent by value would show no line of code.
    """
    import cloudpickle  # type: ignore[import-untyped, unused-ignore]

    known: Any = cloudpickle.Pickler.dispatch_table

    def reduce_code(code: types.CodeType) -> tuple[Any, ...]:
        make, arguments = known[types.CodeType](code)
        return make, tuple(code.co_filename if each == _NO_FILE else each for each in arguments)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, unused-ignore]
        dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: reduce_code}, known)

    return Pickler


def loads(data: bytes | memoryview, buffers: Sequence[memoryview] | None = None) -> Any:
    """Make the value again. Large arrays keep using the memory of ``buffers``: nothing is copied."""
    return pickle.loads(data, buffers=buffers or ())  # noqa: S301 - from a process that runs the same user's code


class SharedGlobals:
    """The globals of modules that are sent by value, in a worker.

    Each value that arrives brings the globals that its functions use, in a dict of its own. What an initializer sets is
    shared by all of them, as it would be in the module: it is put in place before each call, and taken back after it.
    """

    def __init__(self) -> None:
        self._modules: dict[str, tuple[dict[str, Any], set[str]]] = {}

    def prepare(self, data: bytes) -> None:
        """Run a pickled call of a function with arguments, and note which globals it sets.

        Those count as set that it assigns, and those that hold objects that it can change.
        """
        (function, arguments), spaces = self._loads(data)
        before = [dict(space) for space in spaces]
        function(*arguments)
        for space, old in zip(spaces, before, strict=True):
            first, names = self._modules.setdefault(space["__name__"], (space, set()))
            found = {name for name, value in space.items() if not (name in old and _same(old[name], value))}
            found -= {name for name in found if name.startswith("__") and name.endswith("__")}
            first.update({name: space[name] for name in found})
            names |= found

    def loads(
        self, data: bytes | memoryview, buffers: list[memoryview] | None = None
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Make a value again.

        Returns:
            The value, and the globals of the functions that were sent by value in it, as far as any are shared.
        """
        return self._loads(data, buffers) if self._modules else (loads(data, buffers), [])

    @staticmethod
    def _loads(data: bytes | memoryview, buffers: list[memoryview] | None = None) -> tuple[Any, list[dict[str, Any]]]:
        unpickler = _Unpickler(io.BytesIO(data), buffers=buffers or ())
        value = unpickler.load()
        spaces = {id(function.__globals__): function.__globals__ for function in unpickler.functions}
        return value, [space for space in spaces.values() if "__name__" in space]

    def enter(self, spaces: list[dict[str, Any]]) -> Callable[[], None]:
        """Put the shared globals in place among those of a call; returns what takes back what the call has set."""
        entered: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        for space in spaces:
            if (module := self._modules.get(space["__name__"])) is not None:
                first, names = module
                given = {name: first[name] for name in names if name in first}
                space.update(given)
                entered.append((space, first, given))

        def leave() -> None:
            for space, first, given in entered:
                first.update({name: space[name] for name, old in given.items() if space.get(name, old) is not old})

        return leave


class _Unpickler(pickle.Unpickler):
    """Notes the functions that were sent by value."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.functions: list[types.FunctionType] = []

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return partial(self._made, found) if (module, name) == MAKES_FUNCTION else found

    def _made(self, make: Callable[..., types.FunctionType], *arguments: Any) -> types.FunctionType:
        self.functions.append(make(*arguments))
        return self.functions[-1]


def _same(old: object, new: object) -> bool:
    """Whether a global is what it was: the same object, and none whose content may have been changed."""
    return old is new and isinstance(new, CONSTANT)


def _by_value(data: bytes) -> bool:
    """Whether the pickle names a module that the user asked cloudpickle to send by value."""
    return any(name.encode() in data for name in _registry())


def _registry() -> frozenset[str]:
    """Names of modules that the user asked cloudpickle to send by value."""
    cloudpickle = sys.modules.get("cloudpickle")
    return frozenset() if cloudpickle is None else frozenset(cloudpickle.list_registry_pickle_by_value())


ALIGNMENT = 64
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_BLOCK = 512
_MAP_POPULATE = 0x8000
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def write_shared(parts: Sequence[bytes | memoryview]) -> int:
    """Put parts one after the other, aligned, into memory of their own.

    Returns:
        A descriptor to pass on; its size is sealed, so that whoever maps it can rely on it.

    Raises:
        OSError: When there is no memory or no descriptor left.
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
    """Map what :func:`write_shared` wrote, without a copy. The memory lives as long as a view of it.

    Raises:
        ValueError: When the memory is smaller than it should be, has gaps, or could shrink under us.
        OSError: When it cannot be mapped.
    """
    offsets = [0]
    for length in lengths:
        offsets.append(_aligned(offsets[-1] + length))
    size = offsets[-1]
    found = os.fstat(descriptor)
    # It must have the memory that it says: to map it would fill a gap of any size with memory of ours.
    if (
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS
        or found.st_size < size
        or found.st_blocks * _BLOCK < size
    ):
        raise ValueError(f"shared memory must be sealed and hold {size} bytes")
    whole = _map(descriptor, size) if size else memoryview(b"")
    return [whole[start : start + length] for start, length in zip(offsets, lengths, strict=False)]


def _map(descriptor: int, size: int) -> memoryview:
    # Not mmap.mmap: before Python 3.13 that keeps a descriptor for every array that lives.
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED | _MAP_POPULATE, descriptor, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{size} bytes of shared memory cannot be mapped: {os.strerror(code)}")
    block = (ctypes.c_char * size).from_address(address)
    weakref.finalize(block, _libc.munmap, address, size).atexit = False  # views may outlive the interpreter's end
    return memoryview(block).cast("B")


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


class Batch(NamedTuple):
    """What became of calls that travel together.

    Attributes:
        results: What those returned that did.
        failure: What the next one raised, after which none was made; None when all returned.
        seconds: How long they took.
    """

    results: list[Any]
    failure: Exception | None
    seconds: float


def call_each(function: Callable[..., Any], batch: list[tuple[Any, ...]]) -> Any:
    """Call a function with each of some arguments, in a worker, until a call fails.

    Returns:
        A :class:`Batch`; for an ``async`` function, a coroutine that returns one.
    """
    results: list[Any] = []
    began = time.monotonic()
    failure = None
    try:
        for arguments in batch:
            value = function(*arguments)
            if type(value) is types.CoroutineType:
                return _await_each(function, value, batch[1:])
            check_over(value)
            results.append(value)
    except Exception as error:  # noqa: BLE001 - it belongs to one call, and the others have their results
        failure = error
    return Batch(results, failure, time.monotonic() - began)


def check_over(value: Any) -> None:
    """Check what a function has returned.

    Raises:
        TypeError: When it yields its results instead.
    """
    if isinstance(value, (types.GeneratorType, types.AsyncGeneratorType)):
        name = value.__qualname__
        value.close() if isinstance(value, types.GeneratorType) else None
        raise TypeError(f"{name} yields its results one by one; call it with pool.stream({name}, ...)")


async def _await_each(
    function: Callable[..., Any], first: types.CoroutineType[Any, Any, Any], batch: list[tuple[Any, ...]]
) -> Batch:
    """The same for an ``async`` function of which the first call has begun."""
    results = []
    began = time.monotonic()
    failure = None
    try:
        results.append(await first)
        for arguments in batch:
            results.append(await function(*arguments))  # noqa: PERF401 - those that there are count when one fails
    except Exception as error:  # noqa: BLE001 - as above
        failure = error
    return Batch(results, failure, time.monotonic() - began)


def call_each_method(actor: Any, method: str, batch: list[tuple[Any, ...]]) -> Any:
    """The same for a method of an actor."""
    return call_each(getattr(actor, method), batch)
