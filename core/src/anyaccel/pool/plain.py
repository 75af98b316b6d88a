"""Results of confined workers: values of plain types in MessagePack. Reading them runs no code of the worker.

Integers of up to 64 bits, floats, texts, bytes and lists are MessagePack's own types. A value of any other type is a
map with one key, the name of the type in :data:`TYPES`, and the list of the value's parts. Each type has a constructor
here, and a name from a worker is looked up nowhere else.

A worker may send any bytes. The memory and the time to read them grow with the size of the message: MessagePack limits
nesting, lengths are those of the message, there are no references, and each type limits its computations.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime as dt
import math
import re
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from numbers import Rational
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, cast

import msgpack  # type: ignore[import-untyped, unused-ignore]

from anyaccel import errors
from anyaccel.pool.messages import LARGE, Pickled
from anyaccel.text import printable

MOST_NESTED = 200
MOST_REPEATED = 1 << 21
"""Number of values that may be sent again because a value is referred to more than once; see :data:`_MOST_COPIES`."""
_MOST_COPIES = 16
"""Number of values that may be sent again beside those, for each value that is sent once.

A list of datetimes refers to one timezone, and one of numpy's scalars to one dtype, as often as it is long. The message
of such a list grows with the list, but that of a list which holds the same list twice, 30 levels deep, without end.
"""

_SHOWN = 120
"""Length to which names from a worker are cut in messages."""
_MOST_BITS = 1 << 16
"""Maximum size of an integer that is passed to a constructor."""
_MOST_COMPARED = 1 << 10
"""Maximum size of a number that is a key and has the same hash as another key."""
_MOST_ALIKE = 100
"""Maximum number of keys with the same hash."""
_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_DTYPE = re.compile(r"[<>|][biufcSUVMm]\d{1,9}(\[([1-9]\d{0,8})?[A-Za-z]{1,2}\])?", re.ASCII)
_ARRAY = "numpy.ndarray"
_REFUSED = "refused"
"""Name of the type that stands for a result that is not plain; its part is the reason."""
_OBJECTS = "it holds an array of other things than numbers, texts and times"


class NotPlainError(ValueError):
    """Raised when a value is not made of plain types, or a message is damaged; its text is a clause with the reason."""


class PlainType(NamedTuple):
    """A plain type.

    Attributes:
        parts: Returns the parts of a value.
        make: Makes a value of its parts, or raises.
        takes: Permitted types of the parts; None if ``make`` permits any, or checks them itself.
    """

    parts: Callable[[Any], Iterable[Any]]
    make: Callable[..., Any]
    takes: Collection[type] | None = None


def dumps(value: Any) -> Pickled:
    """Write a result; if it is not plain, write a stand-in for which :func:`loads` raises the reason.

    The memory of large contiguous arrays becomes ``buffers`` without a copy. Other exceptions pass, such as ValueError
    for a text too long for MessagePack.
    """
    buffers: list[memoryview] = []
    try:
        return Pickled(_pack(_Writer(buffers).form(value)), buffers)
    except NotPlainError as reason:
        return Pickled(_pack({_REFUSED: [str(reason)]}), [])


def dumps_whole(value: Any) -> bytes:
    """Write a value in one piece.

    Raises:
        NotPlainError: When it is not plain.
        Exception: An exception of the value's own code.
    """
    return _pack(_Writer(None).form(value))


def loads(data: bytes | memoryview, buffers: Sequence[memoryview] | None = None) -> Any:
    """Read a value. Large arrays use the memory of ``buffers`` without a copy.

    Raises:
        NotPlainError: When the data is not made of plain types, is damaged, is the stand-in of :func:`dumps`, or holds
            an array, scalar or dtype of numpy, and numpy has not been imported here.
    """
    # A copy, because the worker may still write to shared memory while it is read.
    packed, reader = bytes(data), _Reader(buffers or ())
    try:
        return msgpack.unpackb(
            packed, object_pairs_hook=reader.make, max_map_len=1, max_ext_len=0, ext_hook=_never,
            unicode_errors="surrogatepass",
        )  # fmt: skip
    except NotPlainError:
        raise
    except Exception as error:
        raise NotPlainError(f"it is damaged ({type(error).__name__})") from error


def _pack(form: Any) -> bytes:
    """Return the MessagePack of a form; integers of more than 64 bits are converted on the way.

    Texts may have lone surrogates.

    Raises:
        ValueError: When a text or a list is too long for MessagePack.
    """
    return cast("bytes", msgpack.packb(form, default=_large_integer, unicode_errors="surrogatepass"))


def _large_integer(value: int) -> dict[str, list[bytes]]:
    """Return the form of an integer of more than 64 bits: its bytes, signed and little-endian."""
    return {"int": [value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]}


class _Writer:
    """Converts values to forms made of MessagePack's own types.

    Args:
        buffers: Receives the memory of large arrays; None to keep everything in one piece.
    """

    def __init__(self, buffers: list[memoryview] | None) -> None:
        self.buffers = buffers
        self.names: dict[type, str] = {}
        self.seen: dict[int, Any] = {}  # with the value: another one would get the id of a value that is gone
        self.once = self.repeated = 0

    def form(self, value: Any, depth: int = 0) -> Any:
        """Return the form of a value: an atom itself, a list of forms for a list, or a dict of type and parts' forms.

        The memory of large arrays goes to ``buffers``. Exceptions of the value's own code pass.

        Args:
            value: The value.
            depth: Number of values around it.

        Raises:
            NotPlainError: When the value or a part is not plain, nested too deeply, or repeated too often.
        """
        if type(value) in _ATOMS:
            return value
        if depth > MOST_NESTED:
            raise NotPlainError(f"it is nested more than {MOST_NESTED} levels deep, or holds itself")
        if type(value) is list:
            return self.forms(value, value, depth)
        name = self.names.get(type(value))
        if name is None:
            name = self.names[type(value)] = _name_of(type(value))
        if name == _ARRAY:
            return {name: self.forms(value, self.array_parts(value), depth)}
        if name not in TYPES:
            raise NotPlainError(f"it holds {_shown(value)}")
        return {name: self.forms(value, list(TYPES[name].parts(value)), depth)}

    def forms(self, value: Any, parts: list[Any], depth: int) -> list[Any]:
        """Return the forms of the parts of a value; count the value and its parts if its ``id()`` was seen before.

        Args:
            value: The value.
            parts: Its parts, which are converted one level deeper; atoms alone are returned as the same list.
            depth: Depth of the value.

        Raises:
            NotPlainError: When a part is not plain, or the count exceeds the sum of :data:`MOST_REPEATED` and
                :data:`_MOST_COPIES` for each value that was seen once.
        """
        if id(value) in self.seen:
            self.repeated += 1 + len(parts)
            if self.repeated > MOST_REPEATED + _MOST_COPIES * self.once:
                raise NotPlainError("it holds the same values again and again")
        else:
            self.seen[id(value)] = value
            self.once += 1 + len(parts)
        return parts if set(map(type, parts)) <= _ATOMS else [self.form(part, depth + 1) for part in parts]

    def array_parts(self, array: Any) -> list[Any]:
        """Return the parts of an array: type, shape, order, whether it is writeable, and bytes or a buffer's number.

        The memory of a large array, or a contiguous copy, is appended to ``buffers`` unless that is None.

        Raises:
            NotPlainError: When the array holds Python objects.
        """
        if array.dtype.hasobject:
            raise NotPlainError(_OBJECTS)
        order = "F" if array.flags.fnc else "C"
        data: Any = memoryview(array.ravel(order).view("u1")) if array.nbytes else b""
        if self.buffers is None or len(data) < LARGE:
            data = bytes(data)
        else:
            self.buffers.append(data)
            data = len(self.buffers) - 1
        return [array.dtype, list(array.shape), order, array.flags.writeable, data]


class _Reader:
    """Makes values of forms, the innermost first."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self.buffers = buffers

    def make(self, pairs: Iterable[tuple[Any, Any]]) -> Any:
        """Make the value of a map, whose one pair is a type's name in :data:`TYPES` and the list of its parts.

        Any other exception, such as for an empty map, is one for :func:`loads` to report as damage.

        Raises:
            NotPlainError: When the name is unknown, no value can be made of the parts, or the map stands for a refused
                result; its reason is the text then.
        """
        ((name, parts),) = pairs
        if type(parts) is not list or name not in TYPES:
            raise NotPlainError(f"it holds {ascii(name)[:_SHOWN]}")
        _, make, takes = TYPES[name]
        try:
            if takes is not None:
                _check(parts, takes)
            return self.array(*parts) if name == _ARRAY else make(*parts)
        except NotPlainError:
            raise
        except Exception as error:
            raise NotPlainError(f"its {name} cannot be made ({type(error).__name__})") from error

    def array(self, kind: Any, shape: Any, order: Any, writeable: Any, data: Any) -> Any:
        """Make an array of the parts of :meth:`_Writer.array_parts`: on the buffer's memory, or on a copy of the bytes.

        The array is read-only unless ``writeable``, and if the buffer's memory is read-only.

        Raises:
            NotPlainError: When numpy has not been imported here.
            Exception: When the parts do not match, for :meth:`make` to report.
        """
        memory = self.buffers[data] if type(data) is int else memoryview(bytearray(_is(data, bytes)))
        return _array(kind, shape, order, memory if writeable else memory.toreadonly())


def _name_of(kind: type) -> str:
    """Return the name under which :data:`TYPES` would list a type: ``module.name``, of a builtin the name alone.

    Empty if its module lacks the type, or is not imported. All dtypes of numpy, also those of other packages, go by
    ``numpy.dtype``, and numpy's own scalars by ``numpy.generic``.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.dtype):
        return "numpy.dtype"
    if numpy is not None and issubclass(kind, numpy.generic) and kind.__module__ == "numpy":
        return "numpy.generic"
    module = str(kind.__module__).removesuffix("._local")  # Python 3.13 defines the paths of pathlib there
    known = getattr(sys.modules.get(module), kind.__name__, None) is kind
    return f"{module}.{kind.__name__}".removeprefix("builtins.") if known else ""


_NAMED = type, FunctionType, BuiltinFunctionType
"""Types of values that have a full name of their own."""


def _shown(value: Any) -> str:
    """Return the full name of a class or function, or of another value's class, in ASCII and cut, for a message."""
    # By the type, since an attribute of the value may run its own code, which may raise anything.
    named = value if issubclass(type(value), _NAMED) else type(value)
    return ascii(f"{named.__module__}.{named.__qualname__}")[1:-1][:_SHOWN]


def _never(*_: object) -> Any:
    """Raise TypeError for any arguments: in :data:`TYPES` for a conversion that is made elsewhere or not permitted."""
    raise TypeError


def _refuse(reason: str) -> Any:
    """Raise NotPlainError with the reason from a worker, cut and made printable."""
    raise NotPlainError(printable(reason[: 2 * _SHOWN]))


def _is(value: Any, kind: type) -> Any:
    """Return the value; raise TypeError unless its type is exactly ``kind``."""
    if type(value) is not kind:
        raise TypeError
    return value


def _check(parts: Sequence[Any], types: Collection[type]) -> None:
    """Refuse parts of other types, and integers that are too large to compute with.

    Raises:
        TypeError: When there is such a part.
    """
    for part in parts:
        if type(part) not in types or (type(part) is int and part.bit_length() > _MOST_BITS):
            raise TypeError


def _folded(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Return a constructor of times, whose last part is the keyword argument ``fold``."""
    return lambda *parts: kind(*parts[:-1], fold=parts[-1])


def _fields(*names: str) -> Callable[[Any], list[Any]]:
    """Return a function that lists the named attributes of a value."""
    return lambda value: [getattr(value, name) for name in names]


def _text(value: Any) -> list[str]:
    """Return a list with the value's string."""
    return [str(value)]


def _hashable(keys: Sequence[Any]) -> Sequence[Any]:
    """Return the keys, unless many keys have the same hash: comparing such keys takes quadratic time.

    Raises:
        ValueError: When more than :data:`_MOST_ALIKE` keys have a hash in common, or a key that shares its hash with
            another key is or contains a large number.
        TypeError: When a key cannot be hashed.
    """
    alike = Counter(map(hash, keys))
    twins = [] if len(alike) == len(keys) else [key for key in keys if alike[hash(key)] > 1]
    if len(twins) > 1 and (max(alike.values()) > _MOST_ALIKE or any(map(_takes_long, twins))):
        raise ValueError
    return keys


def _takes_long(key: Any) -> bool:
    """Return whether a key is a large number, which is slow to compare with a Decimal, or contains such a number.

    Large is an integer or fraction whose numerator has more than :data:`_MOST_COMPARED` bits.
    """
    if isinstance(key, (tuple, frozenset)):
        return any(map(_takes_long, key))
    return isinstance(key, Rational) and int(key.numerator).bit_length() > _MOST_COMPARED


def _dict(*parts: Any) -> dict[Any, Any]:
    """Make a dict of alternating keys and values; of equal keys, the last value counts.

    Raises:
        ValueError: When a key lacks its value, or :func:`_hashable` refuses the keys.
        TypeError: When a key cannot be hashed.
    """
    return dict(zip(_hashable(parts[::2]), parts[1::2], strict=True))


def _exception(kind: type[Exception]) -> PlainType:
    """Return the plain type of a class of exceptions; its parts are arguments, and a dict of notes and attributes.

    Cause, context and traceback are dropped; :func:`restore` selects the attributes.
    """

    def parts(error: Exception) -> Iterable[Any]:
        """Return the arguments of an exception as a tuple, and its notes and attributes as a dict."""
        made: Any = error.__reduce__()
        return made[1], *(made[2:] or ({},))

    def make(arguments: tuple[Any, ...], state: dict[str, Any]) -> Exception:
        """Make an exception of its arguments, and restore notes and permitted attributes."""
        error = kind(*arguments)
        restore(error, state)
        return error

    return PlainType(parts, make, {tuple, dict})


def restore(error: Exception, state: dict[str, Any]) -> None:
    """Add notes to an exception, and set attributes, except private attributes and attributes of the class.

    A name that is no identifier is skipped. Of our own errors, ``hint`` and ``exit_status`` are set in any case.

    Raises:
        TypeError, AttributeError: When a note or a name is no text.
    """
    for note in state.get("__notes__", ()):
        error.add_note(note)
    for name, value in state.items():
        ours = type(error).__module__ == errors.__name__ and name in {"hint", "exit_status"}
        if ours or (name.isidentifier() and not name.startswith("_") and not hasattr(type(error), name)):
            setattr(error, name, value)


def _numpy() -> Any:
    """Return the module numpy.

    Raises:
        NotPlainError: When it has not been imported here.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        raise NotPlainError("it holds an array, and numpy has not been imported here")
    return numpy


def _dtype_parts(kind: Any) -> Iterable[Any]:
    """Return the parts of a dtype of numpy, as :func:`_dtype` takes them.

    The dtypes of fields and of a subarray are parts, not checked here but when their own parts are asked for.

    Raises:
        NotPlainError: When a dtype without fields and shape does not match :data:`_DTYPE`, as a dtype of objects, or
            is defined by another package.
    """
    if kind.subdtype is not None:
        return kind.subdtype  # type: ignore[no-any-return]
    if kind.names is None:
        # Dtypes of other packages have the string of a plain void type (bfloat16), or one that numpy refuses (float8).
        with contextlib.suppress(TypeError):
            if _DTYPE.fullmatch(kind.str) and _numpy().dtype(kind.str) == kind:
                return (kind.str,)
        raise NotPlainError(_OBJECTS)
    return kind.names, [(*kind.fields[name], None)[:3] for name in kind.names], kind.itemsize


def _dtype(first: Any, *more: Any) -> Any:
    """Make a dtype of numpy: of its string; of another dtype and a shape; or of names, fields and a size.

    Raises:
        NotPlainError: When :data:`_DTYPE` does not match the string, or numpy has not been imported here.
        Exception: When the parts do not match.
    """
    numpy = _numpy()
    if not more:
        if not _DTYPE.fullmatch(first):
            raise NotPlainError(_OBJECTS)
        return numpy.dtype(first)
    if len(more) == 1:
        return numpy.dtype((_is_dtype(first), _is(more[0], tuple)))
    fields, size = more
    kinds, offsets, titles = ([field[place] for field in _is(fields, list)] for place in range(3))
    _check(titles, {str, type(None)})
    return numpy.dtype({
        "names": _is(first, tuple), "formats": list(map(_is_dtype, kinds)), "offsets": offsets, "titles": titles,
        "itemsize": size,
    })  # fmt: skip


def _is_dtype(value: Any) -> Any:
    """Return the value; raise TypeError unless it is a dtype of numpy, NotPlainError if numpy is not imported here."""
    if not isinstance(value, _numpy().dtype):
        raise TypeError
    return value


def _scalar_parts(value: Any) -> Iterable[Any]:
    """Return the dtype and the bytes of a scalar of numpy."""
    array = _numpy().asarray(value)
    return array.dtype, array.tobytes()


def _scalar(kind: Any, data: Any) -> Any:
    """Make a scalar of numpy from dtype and bytes.

    Raises:
        NotPlainError: When numpy has not been imported here.
        TypeError, ValueError: When the parts do not match.
    """
    return _array(kind, [], "C", _is(data, bytes))[()]


def _array(kind: Any, shape: Any, order: Any, data: memoryview | bytes) -> Any:
    """Make an array on the memory of the data, without a copy; writeable if that memory is.

    Raises:
        NotPlainError: When numpy has not been imported here.
        TypeError, ValueError: When the shape is no list, ``kind`` no dtype, or the length of the data does not match.
    """
    array = _numpy().ndarray(_is(shape, list), _is_dtype(kind), data, order=order)
    if array.nbytes != len(data) or math.prod(array.shape) > sys.maxsize:
        raise ValueError
    return array


_DATE = _fields("year", "month", "day")
_TIME = _fields("hour", "minute", "second", "microsecond", "tzinfo", "fold")
_START_STOP_STEP = _fields("start", "stop", "step")
_CLOCK: set[type] = {int, type(None), dt.timezone}

TYPES = {
    "int": PlainType(_never, lambda data: int.from_bytes(data, "little", signed=True), {bytes}),  # larger than 64 bits
    "complex": PlainType(_fields("real", "imag"), complex, {float}),
    "bytearray": PlainType(lambda value: [bytes(value)], bytearray, {bytes}),
    "range": PlainType(_START_STOP_STEP, range, {int}),
    "slice": PlainType(_START_STOP_STEP, slice),
    "tuple": PlainType(list, lambda *parts: parts),
    "dict": PlainType(lambda value: chain.from_iterable(value.items()), _dict),
    "set": PlainType(list, lambda *parts: set(_hashable(parts))),
    "frozenset": PlainType(list, lambda *parts: frozenset(_hashable(parts))),
    "datetime.date": PlainType(_DATE, dt.date, {int}),
    "datetime.time": PlainType(_TIME, _folded(dt.time), _CLOCK),
    "datetime.datetime": PlainType(lambda value: _DATE(value) + _TIME(value), _folded(dt.datetime), _CLOCK),
    "datetime.timedelta": PlainType(_fields("days", "seconds", "microseconds"), dt.timedelta, {int}),
    "datetime.timezone": PlainType(lambda value: value.__getinitargs__(), dt.timezone, {dt.timedelta, str}),
    "decimal.Decimal": PlainType(_text, Decimal, {str}),
    "fractions.Fraction": PlainType(_fields("numerator", "denominator"), Fraction, {int}),
    "uuid.UUID": PlainType(
        lambda value: [value.int, value.is_safe.value],
        lambda number, safety: uuid.UUID(int=number, is_safe=uuid.SafeUUID(safety)),
        {int, type(None)},
    ),
    "numpy.dtype": PlainType(_dtype_parts, _dtype),
    "numpy.generic": PlainType(_scalar_parts, _scalar),
    _ARRAY: PlainType(_never, _never),  # by methods of the writer and the reader, which have the buffers
    _REFUSED: PlainType(_never, _refuse, {str}),
}
"""Plain types by module and name; builtins by their name alone."""

for _path in (PurePosixPath, PureWindowsPath, PosixPath):
    TYPES[_name_of(_path)] = PlainType(_text, _path, {str})
for _class in (*vars(builtins).values(), *vars(errors).values()):
    # These two have attributes that are not plain, such as a verdict, and travel as text.
    if (
        isinstance(_class, type)
        and issubclass(_class, Exception)
        and not issubclass(_class, (errors.PlacementError, errors.PluginError))
    ):
        TYPES[_name_of(_class)] = _exception(_class)
