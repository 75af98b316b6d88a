"""Values on their way to another process: pickles, and memory that both sides map."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import io
import mmap
import operator
import os
import pickle
import struct
import sys
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

PROTOCOL = 5
LARGE = 1 << 15
"""Bytes from which a buffer travels beside the pickle: below, a page of its own costs more than a copy."""

SCRIPT = b"__main__"

MOST_NAMED = 1 << 20
"""A function of more bytes, with the globals that it uses, goes along with each of its calls."""

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

MAKES_CLASS = b"_make_skeleton"
"""In names of what it calls to make a class. A process has one of each class, which the last one to come changes."""

CONSTANT = (*_ATOMS, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
"""Types of globals that change by assignment only."""


class Pickled(NamedTuple):
    """A value on its way.

    Attributes:
        data: The pickle.
        buffers: What it refers to, in order; memory of the value itself, not copies.
    """

    data: bytes
    buffers: list[memoryview]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self.data) + sum(map(len, self.buffers))

    def frozen(self) -> Pickled:
        """The same, independent of what becomes of the value's memory."""
        return Pickled(self.data, [memoryview(bytes(buffer)) for buffer in self.buffers]) if self.buffers else self


def dumps(value: Any) -> Pickled:
    """Pickle a value for a worker, or a result for the caller.

    What the other side can import goes by name; what it cannot - from a script, a shell, a closure - goes by value.

    Raises:
        Exception: What the value's own code raised, or ``pickle.PicklingError`` and its like.
    """
    if type(value) in _ATOMS:
        return Pickled(pickle.dumps(value, PROTOCOL), [])
    buffers: list[memoryview] = []
    keep_inside = _keeper(buffers)
    data = _dumps(value, keep_inside)
    if data is None:
        buffers.clear()
        data = _dumps_by_value(value, keep_inside)
    return Pickled(data, buffers)


def _keeper(buffers: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """What pickles with large buffers beside them take: it puts these into a list."""

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < LARGE:
            return True
        buffers.append(view)
        return False

    return keep_inside


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


class Function(NamedTuple):
    """A function that is sent by value, and the globals that it uses.

    Attributes:
        name: Digest of the pickle: it has the same name as long as it and all that it uses are the same.
        data: The pickle.
    """

    name: bytes
    data: bytes

    def called(self, arguments: Pickled, *, known: bool, keep: bool) -> Pickled:
        """A call of it, on its way to a worker.

        Args:
            arguments: The pickled arguments.
            known: Whether the worker has kept it, so that its name will do.
            keep: Whether the worker is to keep it.
        """
        data = b"" if known else self.data
        head = _FUNCTION.pack(not known, keep, self.name, len(data))
        return Pickled(b"".join((head, data, arguments.data)), arguments.buffers)


_FUNCTION = struct.Struct("=??16sI")
"""Whether a pickled function follows, whether it is to be kept, its name, and its length."""


def arguments_of(data: bytes | memoryview) -> bytes:
    """The pickled arguments in what :meth:`Function.called` made."""
    return bytes(memoryview(data)[_FUNCTION.size + _FUNCTION.unpack_from(data)[3] :])


def dumps_call(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Pickled, Function | None]:
    """Pickle a call for a worker of this machine.

    Returns:
        The arguments and the function, where it is one to be sent once; otherwise both together, and None.

    Raises:
        Exception: As :func:`dumps` does.
    """
    each = function is call_each
    named = _named(args[0] if each else function)
    if named is not None:
        buffers: list[memoryview] = []
        # Arguments with functions or classes by value have their globals in common with the function: all go together.
        data = _dumps((args[1:] if each else args, kwargs, each), _keeper(buffers))
        if data is not None:
            return Pickled(data, buffers), named
    return dumps((function, args, kwargs)), None


class _Examined:
    """What a function that is sent by value and all that it uses were made of when it was pickled.

    Attributes:
        function: The function.
        fixed: Whether all of it changes by assignment only, so that :meth:`unchanged` can tell.
        safe: Whether it may be sent once: what a closure holds and a call changes would be there at the next call.
        named: The function, pickled; None when it is not to be sent once.
    """

    def __init__(self, function: types.FunctionType) -> None:
        self.function = function
        self.fixed = self.safe = True
        self.named: Function | None = None
        self._modules = len(sys.modules)  # of packages, cloudpickle names the submodules that are imported by now
        self._registry = _registry()
        self._parts: list[tuple[types.FunctionType, tuple[Any, ...]]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        todo, seen = [function], set()
        while todo and self.safe:
            each = todo.pop()
            if id(each) not in seen:
                seen.add(id(each))
                self._examine(each, todo)

    def _examine(self, function: types.FunctionType, todo: list[types.FunctionType]) -> None:
        self._parts.append((function, _parts(function)))
        self.fixed = self.fixed and not function.__dict__ and function.__kwdefaults__ is None
        self.safe = not (function.__closure__ and _rebinds(function.__code__))
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                self.safe = False
                return
            self._cells.append((cell, value))
            self.safe = self.safe and _fixed(value, todo)
        self.fixed = self.fixed and all(_fixed(value, todo) for value in function.__defaults__ or ())
        for name in _names(function.__code__):
            value = function.__globals__.get(name, _MISSING)
            self._globals.append((function.__globals__, name, value))
            self.fixed = self.fixed and (value is _MISSING or _fixed(value, todo))

    def unchanged(self) -> bool:
        """Whether it still is what was pickled."""
        if not self.fixed or len(sys.modules) != self._modules or _registry() != self._registry:
            return False
        for space, name, value in self._globals:
            if space.get(name, _MISSING) is not value:
                return False
        for function, parts in self._parts:
            if function.__dict__ or not _identical(parts, _parts(function)):
                return False
        try:
            return all(cell.cell_contents is value for cell, value in self._cells) if self._cells else True
        except ValueError:  # a cell is empty by now
            return False


_MISSING = object()
_MOST_EXAMINED = 256
_examined: dict[int, _Examined] = {}
_whole: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()
"""Functions that go along with each call, which always is right; what they refer to may be large, and is not kept."""


def _named(function: Any) -> Function | None:
    """A function that is sent by value and may be sent once, or None."""
    if type(function) is not types.FunctionType:
        return None
    examined = _examined.get(id(function))
    if examined is not None and examined.function is function and examined.unchanged():
        return examined.named
    if function in _whole or _dumps(function, None) is not None:
        return None
    examined = _Examined(function)
    if examined.safe:
        size = 0

        def inside(buffer: pickle.PickleBuffer) -> bool:
            nonlocal size
            size += buffer.raw().nbytes
            return size <= MOST_NAMED

        data = _dumps_by_value(function, inside)
        if max(size, len(data)) <= MOST_NAMED and MAKES_CLASS not in data:
            examined.named = Function(hashlib.blake2b(data, digest_size=16).digest(), data)
    if examined.named is None:
        _whole.add(function)
    elif examined.fixed:
        if len(_examined) >= _MOST_EXAMINED:
            _examined.clear()
        _examined[id(function)] = examined
    return examined.named


def _parts(function: types.FunctionType) -> tuple[Any, ...]:
    annotations = function.__annotations__
    return (
        function.__code__, function.__defaults__, function.__kwdefaults__, function.__name__, function.__qualname__,
        function.__module__, function.__doc__, annotations, *annotations.values(),
    )  # fmt: skip


def _identical(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    return len(old) == len(new) and all(map(operator.is_, old, new))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and that of all functions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _rebinds(code: types.CodeType) -> bool:
    """Whether code may assign to a variable of a function around it: the next call would begin with that."""
    import dis

    return any(
        each.opname in {"STORE_DEREF", "DELETE_DEREF"} and each.argval in part.co_freevars
        for part in _codes(code)
        for each in dis.get_instructions(part)
    )


def _names(code: types.CodeType) -> set[str]:
    """Names of all globals that code may use."""
    return {name for part in _codes(code) for name in part.co_names}


def _fixed(value: Any, todo: list[types.FunctionType]) -> bool:
    """Whether a value changes by assignment only, once the functions that are added to ``todo`` do."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is tuple:
        return all(type(each) in _ATOMS for each in value)
    if kind is types.BuiltinFunctionType:
        return isinstance(value.__self__, types.ModuleType | None)
    if isinstance(value, types.ModuleType):
        return sys.modules.get(value.__name__) is value and not _by_value(value.__name__.encode())
    if kind is types.FunctionType:
        if _dumps(value, None) is None:
            todo.append(value)
        return True
    return isinstance(value, type) and _dumps(value, None) is not None


class Globals:
    """The globals of modules that are sent by value, in a worker.

    Each value that arrives brings the globals that its functions use, in a dict of its own. What an initializer sets is
    shared by all of them, as it would be in the module: it is put in place before each call, and taken back after it.
    """

    def __init__(self) -> None:
        self._modules: dict[str, tuple[dict[str, Any], set[str]]] = {}
        self._kept: dict[bytes, bytes | tuple[Any, list[dict[str, Any]]]] = {}

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

    def call(self, data: bytes | memoryview, buffers: list[memoryview]) -> tuple[Any, list[dict[str, Any]]]:
        """Make a call again: a function and its arguments; with globals as :meth:`loads` does."""
        if data[0] == pickle.PROTO[0]:
            return self.loads(data, buffers)
        follows, keep, name, length = _FUNCTION.unpack_from(data)
        start = _FUNCTION.size
        given = bytes(memoryview(data)[start : start + length])
        if follows and keep:
            self._kept.setdefault(name, given)
        made = self._kept.get(name, given)
        if isinstance(made, bytes):
            made = self.loads(made)
            if keep:
                self._kept[name] = made
        function, spaces = made
        args, kwargs, each = loads(memoryview(data)[start + length :], buffers)
        return (call_each, (function, *args), kwargs) if each else (function, args, kwargs), spaces

    def enter(self, spaces: list[dict[str, Any]]) -> list[Shared]:
        """Put the shared globals in place among those of a call; returns what to give to :meth:`leave`."""
        entered = []
        for space in spaces:
            if (module := self._modules.get(space["__name__"])) is not None:
                first, names = module
                given = {name: first[name] for name in names if name in first}
                space.update(given)
                entered.append(Shared(space, first, given))
        return entered

    @staticmethod
    def leave(entered: list[Shared]) -> None:
        """Take back what a call has set."""
        for space, first, given in entered:
            first.update({name: space[name] for name, old in given.items() if space.get(name, old) is not old})


class Shared(NamedTuple):
    """Shared globals among those of a call.

    Attributes:
        space: The call's.
        first: The initializer's.
        given: Those that were put in place.
    """

    space: dict[str, Any]
    first: dict[str, Any]
    given: dict[str, Any]


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
    """

    results: list[Any]
    failure: Exception | None


def call_each(function: Callable[..., Any], batch: list[tuple[Any, ...]]) -> Any:
    """Call a function with each of some arguments, in a worker, until a call fails.

    Returns:
        A :class:`Batch`; for an ``async`` function, a coroutine that returns one.
    """
    results: list[Any] = []
    try:
        for arguments in batch:
            value = function(*arguments)
            if type(value) is types.CoroutineType:
                return _await_each(function, value, batch[1:])
            check_over(value)
            results.append(value)
    except Exception as error:  # noqa: BLE001 - it belongs to one call, and the others have their results
        return Batch(results, error)
    return Batch(results, None)


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
    try:
        results.append(await first)
        for arguments in batch:
            results.append(await function(*arguments))  # noqa: PERF401 - those that there are count when one fails
    except Exception as error:  # noqa: BLE001 - as above
        return Batch(results, error)
    return Batch(results, None)


def call_each_method(actor: Any, method: str, batch: list[tuple[Any, ...]]) -> Any:
    """The same for a method of an actor."""
    return call_each(getattr(actor, method), batch)
