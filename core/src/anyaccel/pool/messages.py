"""Messages between a caller and its workers: pickles, shared memory that both sides map, and packets of a socket pair.

A socket pair has no name and no listener, so no other process can connect. Packets keep their boundaries, so a message
arrives whole or not at all. A message that does not fit into a packet travels in shared memory, and the packet carries
its descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import mmap
import os
import pickle
import select
import socket
import struct
import sys
import types
import typing
import weakref
from array import array
from collections import ChainMap
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from functools import cache, cached_property, lru_cache, partial
from typing import Any, ClassVar, NamedTuple, cast

PROTOCOL = 5
LARGE = 1 << 15
"""Size in bytes from which a buffer travels outside of the pickle: mapping a smaller one costs more than a copy."""

MOST_STORED = 64
"""Maximum number of calls whose arguments wait in shared memory: each keeps a descriptor open."""
SCRIPT = b"__main__"

ATOMS: frozenset[type] = frozenset((bool, int, float, complex, str, bytes, type(None), type(Ellipsis)))

BEFORE_USERS = {
    __name__, "anyaccel.pool.worker", "anyaccel.forkserver.server", "concurrent.futures._base",
}  # fmt: skip
"""Modules whose frames at the start of a traceback are not shown."""

_NO_FILE = "<dynamic-code>"
"""The file name that cloudpickle 3.1.3 writes in place of the real one."""
_TypeAlias: Any = getattr(typing, "TypeAliasType", None)  # from Python 3.12 on


class Pickled(NamedTuple):
    """A pickled value.

    Attributes:
        data: The pickle.
        buffers: Large buffers that it refers to, in order: memory of the value itself, or copies.
        stored: Data and buffers in shared memory, if they were written there; then the other two are empty.
    """

    data: bytes
    buffers: Sequence[memoryview | bytes]
    stored: SharedParts | None = None

    @property
    def size(self) -> int:
        """Size of data and buffers in bytes; 0 if they were written to shared memory."""
        return len(self.data) + sum(map(len, self.buffers))

    def copy(self, *, shared: bool = False) -> Pickled:
        """Return a copy that is independent of the value's memory; itself if there are no buffers to copy.

        Args:
            shared: Whether to copy to shared memory, as far as there are buffers or the data is too large for a packet.
                The copy is for one worker, which may write to the memory. It is private all the same if shared memory
                or descriptors are exhausted, or this process has :data:`MOST_STORED` such copies.
        """
        large = self.buffers or len(self.data) > MOST_INLINE
        if shared and large and len(_stored) < MOST_STORED:
            with contextlib.suppress(OSError):
                parts = SharedParts([self.data, *self.buffers])
                _stored.add(parts)
                return Pickled(b"", [], parts)
        return Pickled(self.data, [*map(bytes, self.buffers)]) if self.buffers else self


class SharedParts:
    """The parts of a message in shared memory.

    Attributes:
        descriptor: Descriptor of the memory, closed with this object.
        lengths: Lengths of the parts in bytes.
    """

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self.lengths = tuple(map(len, parts))
        self.descriptor = write_shared(parts)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


_stored: weakref.WeakSet[SharedParts] = weakref.WeakSet()
"""The parts of calls that wait for a worker."""


def dumps(value: Any) -> Pickled:
    """Pickle a call for a worker, or a result for the caller; buffers of :data:`LARGE` bytes or more are not copied.

    Buffers are the memory of arrays and the like; ``bytes`` and texts are copied. Functions and classes are pickled by
    name; those of a script, a shell or a closure, and those of modules registered with cloudpickle, by value. The
    value's own code runs twice if a second attempt, with cloudpickle, is needed.

    Raises:
        Exception: An exception of the value's own code, or of pickle.
    """
    if type(value) in ATOMS:
        return Pickled(pickle.dumps(value, PROTOCOL), [])
    buffers: list[memoryview] = []
    return Pickled(_dumps(value, buffers), buffers)


def dumps_whole(value: Any) -> bytes:
    """Pickle a value in one piece, for use in several messages; functions by name or by value as :func:`dumps` does.

    The value's own code runs twice if a second attempt, with cloudpickle, is needed.

    Raises:
        Exception: An exception of the value's own code, or of pickle, in the last attempt.
    """
    return _dumps(value, None)


def dumps_error(error: BaseException, text: str, form: Any = sys.modules[__name__]) -> Pickled:
    """Write a tuple: the written exception, summary and traceback; :func:`anyaccel.pool.call.read_exception` reads it.

    The exception is written by itself inside, so that the caller can read the texts when its class cannot be imported.

    Args:
        error: The exception; if it cannot be written and read, which is tried here, the reason stands in its place.
        text: Its traceback.
        form: The module that writes: this one, or :mod:`anyaccel.pool.plain`.
    """
    body: bytes | str
    try:
        body = form.dumps_whole(error)
        form.loads(body)  # many classes of exceptions can be pickled and not unpickled, because of their __init__
    except Exception as problem:  # noqa: BLE001
        body = summarize_error(problem)
    return cast("Pickled", form.dumps((body, summarize_error(error), text)))


def summarize_error(error: BaseException) -> str:
    """Return the class and the text of an exception; the class alone if its ``__str__`` raises."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:  # noqa: BLE001 - __str__ is code of the user
        return name


def dump_call_error(error: BaseException, form: Any) -> Pickled:
    """Write the exception of a call, and a traceback that begins with the user's code, as :func:`dumps_error` does.

    The traceback is removed from the exception. An exception that cannot be formatted, because of its own code or odd
    attributes, has the calls of its traceback alone.
    """
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in BEFORE_USERS:
        trace = trace.tb_next
    try:
        lines = traceback.format_exception(type(error), error, trace)
    except Exception:  # noqa: BLE001 - such as a SyntaxError whose position is no number
        lines = [*traceback.format_tb(trace), summarize_error(error)]
    error.with_traceback(None)  # no assignment, which the class may refuse, as a frozen dataclass does
    return dumps_error(error, "".join(lines), form)


def _dumps(value: Any, buffers: list[memoryview] | None) -> bytes:
    """Pickle a value, with cloudpickle if pickle fails or the pickle contains ``__main__`` or a module sent by value.

    Any occurrence of these names counts, also in a text. cloudpickle sends functions and classes of these by value.
    Whether the other side can import the rest is not checked.

    Args:
        value: The value.
        buffers: Receives the buffers of :data:`LARGE` bytes or more, which are left out; None keeps all inside.

    Raises:
        Exception: An exception of the value's own code, or of pickle.
    """

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        """Return True to keep a buffer in the pickle; without a list, every buffer; record a large one in the list."""
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
    try:
        return _dump_by_value(value, keep_inside)
    except Exception as error:
        if names := _list_unsent(value):
            error.add_note(f"what cannot be sent: {', '.join(names)}")
        raise


def _dump_by_value(value: Any, callback: Callable[[pickle.PickleBuffer], bool] | None = None) -> bytes:
    """Pickle a value with cloudpickle; see :func:`_pickler_by_value`."""
    file = io.BytesIO()
    _pickler_by_value()(file, PROTOCOL, buffer_callback=callback).dump(value)
    return file.getvalue()


def _list_unsent(value: Any) -> list[str]:
    """Return which parts of a call cannot be pickled, in words: arguments, globals of the function, its closure.

    Empty for other values, and when each part can be pickled by itself.
    """
    work: Any = value if isinstance(value, tuple) else (None,)
    function, *parts = work or (None,)
    named: list[tuple[str, Any]] = []
    if callable(function):
        named.append((f"the arguments of {getattr(function, '__name__', 'the call')}", parts))
    if isinstance(function, types.FunctionType):
        code = function.__code__
        variables = ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
        named += [(f"the global {name}", part) for name, part in variables]
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it has no value yet
                named.append((f"the variable {name}", cell.cell_contents))
    found: list[str] = []
    for name, part in named:
        try:
            _dump_by_value(part)
        except Exception:  # noqa: BLE001 - code of the value
            found.append(name)
    return found


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Return a function with a cache of its own; see :func:`functools.lru_cache`."""
    return lru_cache(**parameters)(function)


def _read_annotations(owner: Any) -> dict[str, Any]:
    """Return the annotations of a function or class; as text where Python cannot evaluate them.

    From Python 3.14 on, annotations are evaluated when they are read, and may name what only type checkers import.
    """
    try:
        return dict(owner.__annotations__)
    except Exception:  # noqa: BLE001 - code of the user
        from annotationlib import (  # type: ignore[import-not-found, unused-ignore] # pyright: ignore[reportMissingImports]
            Format,
            get_annotations,
        )

        return cast("dict[str, Any]", get_annotations(owner, format=Format.STRING))


def _with_read_annotations(function: types.FunctionType) -> types.FunctionType:
    """Return a copy of a function whose annotations need not be evaluated."""
    code, space, closure = function.__code__, function.__globals__, function.__closure__
    copied = types.FunctionType(code, space, function.__name__, function.__defaults__, closure)
    copied.__annotations__ = _read_annotations(function)
    copied.__kwdefaults__, copied.__doc__ = function.__kwdefaults__, function.__doc__
    copied.__module__, copied.__qualname__ = function.__module__, function.__qualname__
    copied.__dict__.update(function.__dict__)
    return copied


def _make_alias(name: str, module: str, parameters: tuple[Any, ...], box: list[Any]) -> Any:
    """Return what the statement ``type`` makes, from Python 3.12 on.

    Args:
        name: Its name.
        module: Name of its module.
        parameters: Its parameters; a value that names the alias itself cannot be sent with parameters.
        box: A list with the value. Without parameters, it may be filled later: the value is read at each use.
    """
    if parameters or not name.isidentifier():  # made by a call, not by the statement
        return _TypeAlias(name, box[0], type_params=parameters)
    space: dict[str, Any] = {"__name__": module, "box": box}
    exec(f"type {name} = box[0]", space)  # noqa: S102 - evaluated when it is read, as its value may name it
    return space[name]


def _fill_alias(_: object, contents: tuple[list[Any], Any]) -> None:
    """Put the value of an alias into its box."""
    box, value = contents
    box.append(value)


def _is_sent(module: str) -> bool:
    """Return whether functions and classes of a module go by value."""
    parts = module.split(".")
    owners = {".".join(parts[: size + 1]) for size in range(len(parts))}
    return not owners.isdisjoint({SCRIPT.decode(), *_list_sent()})


def _reduce_cached(function: Any) -> str | tuple[Any, ...]:
    """Reduce a function of :func:`functools.lru_cache` by value, with an empty cache, where others go by value."""
    if _is_sent(function.__module__) or "<locals>" in function.__qualname__:
        return _cached, (function.__wrapped__, function.cache_parameters())
    return cast("str", function.__qualname__)


def _reduce_property(prop: cached_property[Any]) -> tuple[Any, ...]:
    """Reduce a cached property without the lock that it has in Python 3.11."""
    return cached_property, (prop.func,), {"attrname": prop.attrname}


def _reduce_alias(alias: Any) -> str | tuple[Any, ...]:
    """Reduce an alias by value where classes go by value; without the value if that cannot be evaluated."""
    name, module, parameters = alias.__name__, alias.__module__ or "", alias.__type_params__
    if not _is_sent(module):
        return cast("str", name)
    try:
        value = alias.__value__
    except Exception:  # noqa: BLE001 - code of the user, which may name what only type checkers import
        return _make_alias, (name, module, (), [])
    if parameters or not name.isidentifier():
        return _make_alias, (name, module, parameters, [value])
    box: list[Any] = []
    return _make_alias, (name, module, (), box), (box, value), None, None, _fill_alias


@cache
def _pickler_by_value() -> Any:
    """Return a subclass of cloudpickle's pickler that sends what version 3.1.3 loses; made once.

    Without it, tracebacks show no source lines of functions that were sent by value, since their files have no name
    there; instances of classes with ``__slots__`` cannot be read where their class was made, since it comes without
    slots elsewhere; functions with a cache, and from Python 3.12 on aliases of the statement ``type``, are looked up by
    name in a module that has no such name; and in Python 3.11, classes with a cached property are refused for its lock.
    From Python 3.14 on, functions with annotations that cannot be evaluated are refused, and classes lose their
    annotations.
    """
    import cloudpickle  # type: ignore[import-untyped, unused-ignore]

    known: Any = cloudpickle.Pickler.dispatch_table

    def reduce_code(code: types.CodeType) -> tuple[Any, ...]:
        """Reduce a code object as cloudpickle does, but with its file name."""
        make, arguments = known[types.CodeType](code)
        return make, tuple(code.co_filename if each == _NO_FILE else each for each in arguments)

    table = {
        types.CodeType: reduce_code, type(_pickler_by_value): _reduce_cached, cached_property: _reduce_property,
        **({_TypeAlias: _reduce_alias} if _TypeAlias else {}),
    }  # fmt: skip

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, unused-ignore]
        dispatch_table: ClassVar[Any] = ChainMap(table, known)

        def reducer_override(self, obj: Any) -> Any:
            try:
                reduced: Any = super().reducer_override(obj)
            except Exception:
                if not isinstance(obj, types.FunctionType):
                    raise
                reduced = super().reducer_override(_with_read_annotations(obj))
            if isinstance(obj, type) and reduced is not NotImplemented and "__annotate_func__" in obj.__dict__:
                reduced[2][0]["__annotations__"] = _read_annotations(obj)
            # Without slots of its own, a class may be a named tuple, which takes no such name from outside.
            slots = obj.__dict__.get("__slots__") if isinstance(obj, type) else None
            if slots and reduced is not NotImplemented and reduced[0].__name__ == "_make_skeleton_class":
                reduced[1][3]["__slots__"] = slots  # the namespace that the class begins with
            return reduced

    return Pickler


def loads(data: bytes | memoryview, buffers: Sequence[memoryview] | None = None) -> Any:
    """Unpickle a value, which may run any code. Large arrays use the memory of ``buffers`` without a copy.

    Raises:
        Exception: An exception of that code, or of pickle.
    """
    return pickle.loads(data, buffers=buffers or ())  # noqa: S301 - from a process that runs the same user's code


def _by_value(data: bytes) -> bool:
    """Return whether a pickle contains the name of a module that was registered with cloudpickle for pickling by value.

    Any occurrence counts, also in a text.
    """
    return any(name.encode() in data for name in _list_sent())


def _list_sent() -> Collection[str]:
    """Return the names of the modules that were registered with cloudpickle."""
    cloudpickle = sys.modules.get("cloudpickle")
    return () if cloudpickle is None else cast("Collection[str]", cloudpickle.list_registry_pickle_by_value())


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

    Every process that maps the memory sees what is written. The mapping lives as long as a view of it; the descriptor
    stays open and is not needed for that.

    Raises:
        ValueError: When the memory is too small, has holes, or is not sealed.
        OSError: When the memory cannot be mapped, or can have no seals.
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


MOST_INLINE = 1 << 16
MOST_DESCRIPTORS = 250
"""Of one packet; the kernel passes at most 253 (SCM_MAX_FD)."""

_HEAD = struct.Struct("=BBQ")
"""Kind of the message, form of its data (inline or shared), and number of its call."""
_PACKET = _HEAD.size + MOST_INLINE
_ANCILLARY = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)
_INLINE, _SHARED = 0, 1
# Plain numbers: the constants are enumerations, whose union takes longer than a system call.
_NO_WAIT = int(socket.MSG_DONTWAIT)
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


class MessageKind(IntEnum):
    """Kinds of messages. The numbers are those of the protocol."""

    SETUP = 1
    """To the worker, first: environment, sandbox, initializer."""
    CALL = 2
    """To the worker: call a function."""
    CONSTRUCT = 4
    """To the worker: make the object of an actor."""
    METHOD = 5
    """To the worker: call a method of the actor's object."""
    RESULT = 6
    """From the worker: the value that the call returned."""
    ERROR = 7
    """From the worker: the exception that the call raised."""
    BROKEN = 8
    """From the worker: the exception of its setup."""
    READY = 9
    """From the worker: it is about to run user code; or, the last time, sandbox and initializer are done.

    A BROKEN after the last one, perhaps of hostile code, is not believed.
    """


class Message(NamedTuple):
    """A received message.

    Attributes:
        kind: A :class:`MessageKind`, or another number from a faulty worker.
        data: The pickle.
        buffers: Memory that the pickle refers to.
        descriptors: Descriptors that came with it; the receiver closes them.
        number: Number of its call, or 0.
    """

    kind: int
    data: bytes | memoryview
    buffers: list[memoryview]
    descriptors: list[int]
    number: int = 0


def send(
    channel: socket.socket,
    kind: MessageKind,
    body: Pickled | bytes = b"",
    descriptors: Sequence[int] = (),
    *,
    number: int = 0,
) -> None:
    """Send one message, after a wait while the channel is full.

    Large data goes to shared memory, so sending to an idle receiver never blocks.

    Args:
        channel: The channel.
        kind: Kind of the message.
        body: The pickle; with buffers or more than :data:`MOST_INLINE` bytes, it travels in shared memory.
        descriptors: Descriptors to pass along; they stay open here.
        number: Number of the call, or 0.

    Raises:
        OSError: When the other side has closed the channel, or no memory or descriptor is left.
    """
    data, buffers, stored = (body, None, None) if isinstance(body, bytes) else body
    if stored is not None or buffers or len(data) > MOST_INLINE:
        stored = stored or SharedParts([data, *(buffers or ())])
        head = _HEAD.pack(kind, _SHARED, number) + array("Q", stored.lengths).tobytes()
        _send(channel, head, (stored.descriptor, *descriptors))
    elif descriptors:
        _send(channel, _HEAD.pack(kind, _INLINE, number) + data, descriptors)
    else:
        channel.send(_HEAD.pack(kind, _INLINE, number) + data)


def receive(channel: socket.socket, *, wait: bool = True, passes: bool = True) -> Message | None:
    """Receive one message; None when the other side has closed the channel or shut writing, or this side reading.

    Args:
        channel: The channel.
        wait: Whether to wait for a message.
        passes: Whether the other side may pass descriptors along, beside that of a message in shared memory.

    Raises:
        BlockingIOError: When there is none and ``wait`` is False.
        ConnectionResetError: Once, when the other side has closed the channel before it had read all messages.
        ValueError: When the packet is empty, cut short, not one of our messages, or passes descriptors without leave,
            or its shared memory is too small, has holes or is not sealed; all descriptors are closed.
        OSError: When its descriptor is not of shared memory, the memory cannot be mapped, or the channel was closed
            here.
    """
    flags = _CLOSE_ON_EXEC if wait else _CLOSE_ON_EXEC | _NO_WAIT
    packet, ancillary, got, _ = channel.recvmsg(_PACKET, _ANCILLARY, flags)
    descriptors = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    if not packet:
        _close(descriptors)  # an empty packet can pass some, too
        if not _hung_up(channel):
            raise ValueError("an empty message")
        return None
    if len(packet) < _HEAD.size or got & _CUT:
        _close(descriptors)
        raise ValueError("a message was cut short: the process may have no descriptors left (see ulimit -n)")
    message = _unpack(packet, descriptors)
    if message.descriptors and not passes:
        _close(message.descriptors)
        raise ValueError("it passes descriptors along")
    return message


def _unpack(packet: bytes, descriptors: array[int]) -> Message:
    """Make a message of a packet, at least as long as the head; map its shared memory, and close that descriptor.

    Raises:
        ValueError: When the packet is not one of our messages, or its shared memory is too small, has holes or is not
            sealed; all descriptors are closed.
        OSError: When its descriptor is not of shared memory, or the memory cannot be mapped; all descriptors are
            closed.
    """
    kind, form, number = _HEAD.unpack_from(packet)
    if form not in (_INLINE, _SHARED) or (form == _SHARED and not descriptors):
        _close(descriptors)
        raise ValueError("a message that is neither here nor in shared memory")
    if form == _INLINE:
        return Message(kind, memoryview(packet)[_HEAD.size :], [], list(descriptors), number)
    try:
        data, *buffers = read_shared(descriptors[0], array("Q", packet[_HEAD.size :]))
    except BaseException:
        _close(descriptors[1:])
        raise
    finally:
        os.close(descriptors[0])
    return Message(kind, data, buffers, list(descriptors[1:]), number)


def _send(channel: socket.socket, packet: bytes, descriptors: Sequence[int]) -> None:
    """Send a packet with descriptors, which stay open here; OSError passes."""
    channel.sendmsg((packet,), ((socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors)),))


def _hung_up(channel: socket.socket) -> bool:
    """Return whether the channel is at its end for reading: no further message can arrive.

    True if the other side has closed the channel or shut down its writing, or if this side has shut down its reading.
    Messages that arrived before may be unread, and sending may still work. An empty packet, as a faulty worker may
    send, is no end. Does not wait, and takes no message.
    """
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    return bool(poll.poll(0))


def _close(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


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

        The first call calls the function, and so does each later one until the function returns an iterable.

        Raises:
            Exception: The exception of the function or of its iterable; a TypeError if the result is no iterable.
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
        """Close the generator, so the function cleans up; a coroutine for an asynchronous generator, else None.

        No effect before the first item, or on an iterator without ``close`` or ``aclose``. Exceptions of the clean-up
        are raised.
        """
        if hasattr(self._items, "aclose"):
            return self._end()
        if hasattr(self._items, "close"):
            self._items.close()
        return None

    async def _end(self) -> None:
        """Close an asynchronous generator; what ``aclose`` returns need not be a coroutine, as the worker takes it."""
        await self._items.aclose()
