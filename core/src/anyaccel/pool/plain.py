"""Read what a worker sends as data: plain values, made here, whatever the worker names.

``pickle.loads`` calls what a pickle names, sets attributes of what it made, asks the registry of ``copyreg``, and
believes counts and positions. This reader takes the same bytes and does none of that. It knows the instructions that
Python's pickler writes for plain values, and for each type that it allows a function that checks what it was given.

What it makes is bounded. Positions in the memo count up one by one, and lengths are those of the message. Nesting has
a limit, since Python has none when it computes the hash of a tuple in tuples. A message may refer to one list twice,
which refers to another one twice, and so on; so what it would be in full has a limit, too. Nothing holds itself.
"""

from __future__ import annotations

import builtins
import datetime as dt
import re
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anyaccel import errors

_SHOWN = 120
_MOST_BITS = 1 << 16
_DIGITS = re.compile(r"(-?\d+)(?:/(\d+))?", re.ASCII)
_DTYPE = re.compile(r"[biufcSUV]\d{1,9}|[Mm]8", re.ASCII)
_UNIT = re.compile(rb"[A-Za-z]{1,2}|generic")
_ORDERS = "<>=|"


class Refused(ValueError):  # noqa: N818 - it is the reason, and becomes the text of an error
    """Raised when what a worker sent is not made of plain values; says what is in the way."""


class Name:
    """What a pickle names: no class or function, and good for nothing but being looked up."""

    __slots__ = ("key",)

    def __init__(self, module: str, name: str) -> None:
        self.key = module, name

    def __str__(self) -> str:
        module, _ = self.key
        if module.partition(".")[0] == "cloudpickle":  # which sends classes of a script by value
            return "a class or function of a script"
        return ascii(".".join(self.key))[1:-1][:_SHOWN]


class Partial:
    """Something of which the pickle's next instructions say what it is.

    Attributes:
        name: What to call it in messages.
        finish: Makes it, given its state.
        places: Where in the memo it stands.
    """

    __slots__ = ("finish", "name", "places")

    def __init__(self, name: str, finish: Callable[[Any], Any]) -> None:
        self.name = name
        self.finish = finish
        self.places: list[int] = []


class Known:
    """What is known of a container.

    Attributes:
        value: The container, which lives as long as its id is used.
        depth: How deep it is nested.
        weight: How many values are in it, in what it holds, and so on.
        raw: Whether something in it is no value, such as the name of a class.
        placed: Whether something holds it: then nothing more comes into it.
    """

    __slots__ = ("depth", "placed", "raw", "value", "weight")

    def __init__(self, value: object, depth: int = 1, weight: int = 1, raw: bool = False) -> None:
        self.value = value
        self.depth = depth
        self.weight = weight
        self.raw = raw
        self.placed = False


class Allowed(NamedTuple):
    """A type that is allowed.

    Attributes:
        make: Makes a value.
        raw: Whether it takes arguments that are no values themselves.
    """

    make: Callable[..., Any]
    raw: bool = False


def restore(error: Exception, state: object) -> None:
    """Give an exception the notes and plain attributes that it had, but none that its class has."""
    if not isinstance(state, dict):
        raise Refused("the attributes of an exception are no dict")
    notes = state.get("__notes__")
    for note in notes if isinstance(notes, list) else ():
        if isinstance(note, str):
            error.add_note(note)
    for name, value in state.items():
        if not isinstance(name, str):
            continue
        ours = type(error).__module__ == errors.__name__ and name in {"hint", "exit_status"}
        if ours or (name.isidentifier() and not name.startswith("_") and not hasattr(type(error), name)):
            setattr(error, name, value)


def _of(kind: Callable[..., Any], *types: type) -> Callable[..., Any]:
    """A constructor that takes values of these types only."""

    def make(*arguments: object) -> Any:
        if not all(type(argument) in types for argument in arguments):
            raise TypeError
        return kind(*arguments)

    return make


def _fraction(*arguments: Any) -> Any:
    from fractions import Fraction

    if len(arguments) == 1 and isinstance(arguments[0], str):
        match = _DIGITS.fullmatch(arguments[0])
        arguments = tuple(map(int, match.groups("1"))) if match else ()
    top, bottom = [*arguments]
    if not (type(top) is int and type(bottom) is int and max(top.bit_length(), bottom.bit_length()) <= _MOST_BITS):
        raise ValueError
    return Fraction(top, bottom)


def _decimal(text: str) -> Any:
    from decimal import Decimal

    return _of(Decimal, str)(text)


def _path(name: str) -> Callable[..., Any]:
    def make(*parts: str) -> Any:
        import pathlib

        return _of(getattr(pathlib, name), str)(*parts)

    return make


def _uuid() -> Partial:
    def finish(state: Mapping[str, Any]) -> Any:
        import uuid

        number, safety = state["int"], uuid.SafeUUID(state.get("is_safe"))
        return _of(lambda value: uuid.UUID(int=value, is_safe=safety), int)(number)

    return Partial("uuid.UUID", finish)


def _numpy() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        raise Refused("it holds an array, and numpy has not been imported here")
    return numpy


def _dtype(code: object, *_: object) -> Partial:
    """A type of numpy's, from what it says about itself: without objects, and never by numpy's own ``__setstate__``."""
    if not (isinstance(code, str) and _DTYPE.fullmatch(code)):
        raise Refused("it holds an array of other things than numbers, texts and times")

    def finish(state: tuple[Any, ...]) -> Any:
        numpy = _numpy()
        order, base, names, fields, size = state[1:6]
        if order not in _ORDERS:
            raise ValueError
        if base is not None:
            return numpy.dtype((_is_dtype(base[0]), base[1]))
        if names is not None:
            parts = [fields[name] for name in names]
            formats = [_is_dtype(part[0]) for part in parts]
            offsets = [part[1] for part in parts]
            return numpy.dtype({"names": list(names), "formats": formats, "offsets": offsets, "itemsize": size})
        unit = ""
        if code in {"M8", "m8"}:
            word, count, *_ = state[8][1]
            if not (_UNIT.fullmatch(word) and type(count) is int):
                raise ValueError
            unit = "" if word == b"generic" else f"[{count}{word.decode()}]"
        return numpy.dtype(f"{order}{code}{unit}")

    return Partial("numpy.dtype", finish)


def _is_dtype(value: Any) -> Any:
    if not isinstance(value, _numpy().dtype) or value.hasobject:
        raise TypeError
    return value


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    """An array that uses the memory of its data."""
    numpy = _numpy()
    if type(data) not in {memoryview, bytes, bytearray} or order not in {"C", "F"}:
        raise TypeError
    kind = _is_dtype(dtype)
    if 0 in shape:
        return numpy.zeros(shape, kind, order=order)  # such an array has no memory
    return numpy.frombuffer(data, kind).reshape(shape, order=order)


def _array_to_be(kind: object, *_: object) -> Partial:
    """An array that is no block of memory, such as every second item of another one."""
    if not isinstance(kind, Name) or kind.key != ("numpy", "ndarray"):
        raise Refused(f"it holds {kind}")

    def finish(state: tuple[Any, ...]) -> Any:
        _, shape, dtype, fortran, data = state
        return _array(bytearray(data), dtype, shape, "F" if fortran else "C")

    return Partial("numpy.ndarray", finish)


def _scalar(dtype: Any, data: bytes) -> Any:
    return _array(data, dtype, (1,), "C")[0]


def _never(*_: object) -> Any:
    raise TypeError


_ALLOWED: dict[tuple[str, str], Allowed] = {
    ("builtins", "complex"): Allowed(_of(complex, int, float)),
    ("builtins", "range"): Allowed(_of(range, int)),
    ("builtins", "slice"): Allowed(slice),
    ("builtins", "bytearray"): Allowed(_of(bytearray, bytes)),
    ("datetime", "date"): Allowed(_of(dt.date, bytes)),
    ("datetime", "time"): Allowed(_of(dt.time, bytes, dt.timezone)),
    ("datetime", "datetime"): Allowed(_of(dt.datetime, bytes, dt.timezone)),
    ("datetime", "timedelta"): Allowed(_of(dt.timedelta, int)),
    ("datetime", "timezone"): Allowed(_of(dt.timezone, dt.timedelta, str)),
    ("decimal", "Decimal"): Allowed(_decimal),
    ("fractions", "Fraction"): Allowed(_fraction),
    ("uuid", "UUID"): Allowed(_uuid),
    ("numpy", "dtype"): Allowed(_dtype),
    ("numpy", "ndarray"): Allowed(_never),
}
for _module in ("pathlib", "pathlib._local"):
    for _kind in ("PurePosixPath", "PureWindowsPath", "PosixPath"):
        _ALLOWED[_module, _kind] = Allowed(_path(_kind))
for _core in ("numpy.core", "numpy._core"):  # before numpy 2, and since
    _ALLOWED[f"{_core}.numeric", "_frombuffer"] = Allowed(_array, raw=True)
    _ALLOWED[f"{_core}.multiarray", "_reconstruct"] = Allowed(_array_to_be, raw=True)
    _ALLOWED[f"{_core}.multiarray", "scalar"] = Allowed(_scalar)
for _home, _base in ((builtins, Exception), (errors, errors.AnyaccelError)):
    for _class in vars(_home).values():
        # A placement's verdict and a plug-in's problem are no plain values, so these two travel as text.
        if (
            isinstance(_class, type)
            and issubclass(_class, _base)
            and not issubclass(_class, (errors.PlacementError, errors.PluginError))
        ):
            _ALLOWED[_class.__module__, _class.__name__] = Allowed(_class)

ALLOWED: Mapping[tuple[str, str], Allowed] = _ALLOWED
"""By module and name."""


MOST_NESTED = 200
MOST_REPEATED = 1 << 22
"""Values in a message beyond its bytes, each as often as it occurs; as many may be in keys of dicts and sets."""

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_FILLED = frozenset({list, dict, set})
_UNFINISHED = frozenset({Name, Partial, memoryview})
_OPCODES = 256


def read_plain(data: bytes | memoryview, buffers: Sequence[memoryview] | None = None) -> Any:
    """Make a value of plain types again. Large arrays keep using the memory of ``buffers``.

    Args:
        data: The pickle.
        buffers: What it refers to.

    Raises:
        Refused: When it holds something else, or is damaged.
    """
    # A copy: its sender may still write to the memory that it is in.
    return _Reader(bytes(data), buffers or ()).read()


class _Reader:
    """A stack of values, as in ``pickle``, with what is known of containers among them."""

    def __init__(self, data: bytes, buffers: Sequence[memoryview]) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: list[Any] = []
        self.buffers = iter(buffers)
        self.known: dict[int, Known] = {}
        self.hashed = 0
        self.most = len(data) + MOST_REPEATED

    def read(self) -> Any:
        data, steps = self.data, _STEPS
        try:
            while (code := data[self.at]) != _STOP:
                self.at += 1
                steps[code](self)
            (value,) = self.stack
        except Refused:
            raise
        except (LookupError, ValueError, TypeError, OverflowError, StopIteration, struct.error) as error:
            raise Refused(f"it is damaged ({type(error).__name__})") from error
        if self.outer:
            raise Refused("it is damaged (it ends too early)")
        self.check_finished((value,))
        return value

    def take(self, size: int) -> bytes:
        """The next bytes."""
        end = self.at + size
        if size < 0 or end > len(self.data):
            raise Refused("it is damaged (it ends too early)")
        chunk = self.data[self.at : end]
        self.at = end
        return chunk

    def number(self, layout: struct.Struct) -> Any:
        """The next number of a fixed layout."""
        return layout.unpack(self.take(layout.size))[0]

    def since_mark(self) -> list[Any]:
        """The values since the last mark, which are taken from the stack."""
        items, self.stack = self.stack, self.outer.pop()
        return items

    def look(self, items: Sequence[Any]) -> tuple[int, int, bool]:
        """How deep a container of these is nested, how many values it holds in all, and whether some are no values."""
        if set(map(type, items)) <= _SCALARS:
            return 1, 1 + len(items), False
        depth, weight, raw = 0, 1 + len(items), False
        for item in items:
            known = self.known.get(id(item))
            if known is None and type(item) in _FILLED:
                known = self.known[id(item)] = Known(item)
            if known is not None:
                depth, weight, raw = max(depth, known.depth), weight + known.weight, raw or known.raw
                known.placed = True
            else:
                raw = raw or type(item) in _UNFINISHED
        if depth >= MOST_NESTED:
            raise Refused(f"it is nested more than {MOST_NESTED} levels deep")
        if weight > self.most:
            raise Refused("it holds the same values again and again")
        return depth + 1, weight, raw

    def check_finished(self, items: Sequence[Any]) -> None:
        """Refuse what is no value: a class or function itself, or one that was begun with."""
        if not self.look(items)[2]:
            return
        for item in items:
            if type(item) is Name:
                raise Refused(f"it holds {item} itself")
        raise Refused("it holds something that is no plain value")

    def fixed(self, value: Any, items: Sequence[Any]) -> Any:
        """A tuple or the like of some items; it may hold what is no value, for whoever makes something of it."""
        self.known[id(value)] = Known(value, *self.look(items))
        return value

    def fill(self, container: Any, items: Sequence[Any]) -> None:
        """Items have been put into a container."""
        known = self.known.setdefault(id(container), Known(container))
        self.check_finished(items)
        if known.placed:
            raise Refused("it holds itself")
        depth, weight, _ = self.look(items)
        known.depth = max(known.depth, depth)
        known.weight += weight

    def keys(self, keys: Sequence[Any]) -> None:
        """Allow some values to be hashed."""
        if set(map(type, keys)) <= _SCALARS:
            return
        for key in keys:
            known = self.known.get(id(key))
            self.hashed += known.weight if known is not None else 1
        if self.hashed > self.most:
            raise Refused("the keys of its dicts and sets hold too much")

    # The instructions of a pickle: see pickletools

    def skip_version(self) -> None:
        self.at += 1

    def skip_frame(self) -> None:
        self.at += 8

    def mark(self) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def memoize(self) -> None:
        top = self.stack[-1]
        if type(top) is Partial:
            top.places.append(len(self.memo))
        self.memo.append(top)

    def buffer(self) -> None:
        self.stack.append(next(self.buffers))

    def buffer_readonly(self) -> None:
        self.stack[-1] = memoryview(self.stack[-1]).toreadonly()

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise Refused("it is damaged (it appends to what is no list)")
        self.fill(target, items)
        target.extend(items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.update([key, value])

    def update(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        if type(target) is not dict:
            raise Refused("it is damaged (it sets an item of what is no dict)")
        self.fill(target, items)
        self.keys(keys)
        target.update(zip(keys, items[1::2], strict=True))

    def add_items(self) -> None:
        items = self.since_mark()
        target = self.stack[-1]
        if type(target) is not set:
            raise Refused("it is damaged (it adds to what is no set)")
        self.fill(target, items)
        self.keys(items)
        target.update(items)

    def frozen(self) -> None:
        items = self.since_mark()
        self.check_finished(items)
        self.keys(items)
        self.stack.append(self.fixed(frozenset(items), items))

    def tuple(self) -> None:
        items = self.since_mark()
        self.stack.append(self.fixed(tuple(items), items))

    def name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(module) is not str or type(name) is not str:
            raise Refused("it is damaged (a name is no text)")
        found = Name(module, name)
        if found.key not in ALLOWED:
            raise Refused(f"it holds {found}")
        self.stack.append(found)

    def reduce(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or type(arguments) is not tuple:
            raise Refused("it is damaged (it calls what is no class)")
        allowed = ALLOWED[name.key]
        if not allowed.raw:
            self.check_finished(arguments)
        try:
            value = allowed.make(*arguments)
        except Refused:
            raise
        except Exception as error:
            raise Refused(f"its {name} cannot be made ({type(error).__name__})") from error
        # An array uses what is no value itself, and is one.
        self.stack.append(value if allowed.raw or type(value) is Partial else self.fixed(value, arguments))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        self.check_finished((state,))
        if type(target) is Partial:
            try:
                value = target.finish(state)
            except Refused:
                raise
            except Exception as error:
                raise Refused(f"its {target.name} cannot be made ({type(error).__name__})") from error
            self.stack[-1] = value
            for place in target.places:
                self.memo[place] = value
        elif isinstance(target, Exception):
            restore(target, state)
        else:
            raise Refused("it is damaged (it sets attributes of a plain value)")


def _unknown(code: int) -> Callable[[_Reader], None]:
    def refuse(_: _Reader) -> None:
        raise Refused(f"it uses the pickle instruction {code:#04x}, which no plain value needs")

    return refuse


def _constant(value: Any) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(value)


def _fresh(kind: Callable[[], Any]) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(kind())


def _number(layout: str) -> Callable[[_Reader], None]:
    packed = struct.Struct(layout)
    return lambda reader: reader.stack.append(reader.number(packed))


def _counted(layout: str, make: Callable[[bytes], Any]) -> Callable[[_Reader], None]:
    """What a length stands in front of."""
    packed = struct.Struct(layout)
    return lambda reader: reader.stack.append(make(reader.take(reader.number(packed))))


def _recalled(layout: str) -> Callable[[_Reader], None]:
    packed = struct.Struct(layout)
    return lambda reader: reader.stack.append(reader.memo[reader.number(packed)])


def _few(count: int) -> Callable[[_Reader], None]:
    def make(reader: _Reader) -> None:
        stack = reader.stack
        if len(stack) < count:
            raise Refused("it is damaged (a tuple is too short)")
        items = stack[-count:]
        stack[-count:] = [reader.fixed(tuple(items), items)]

    return make


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


_STOP = ord(".")
_STEPS = [_unknown(code) for code in range(_OPCODES)]
for _code, _step in {
    b"\x80": _Reader.skip_version,
    b"\x95": _Reader.skip_frame,
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"K": _number("<B"),
    b"M": _number("<H"),
    b"J": _number("<i"),
    b"\x8a": _counted("<B", _integer),
    b"\x8b": _counted("<i", _integer),
    b"G": _number(">d"),
    b"\x8c": _counted("<B", _text),
    b"X": _counted("<I", _text),
    b"\x8d": _counted("<Q", _text),
    b"C": _counted("<B", bytes),
    b"B": _counted("<I", bytes),
    b"\x8e": _counted("<Q", bytes),
    b"\x96": _counted("<Q", bytearray),
    b"(": _Reader.mark,
    b"\x94": _Reader.memoize,
    b"h": _recalled("<B"),
    b"j": _recalled("<I"),
    b"]": _fresh(list),
    b"a": lambda reader: reader.extend([reader.stack.pop()]),
    b"e": lambda reader: reader.extend(reader.since_mark()),
    b"}": _fresh(dict),
    b"s": _Reader.set_item,
    b"u": lambda reader: reader.update(reader.since_mark()),
    b"\x8f": _fresh(set),
    b"\x90": _Reader.add_items,
    b"\x91": _Reader.frozen,
    b")": _fresh(tuple),
    b"\x85": _few(1),
    b"\x86": _few(2),
    b"\x87": _few(3),
    b"t": _Reader.tuple,
    b"\x93": _Reader.name,
    b"R": _Reader.reduce,
    b"\x81": _Reader.reduce,
    b"b": _Reader.build,
    b"\x97": _Reader.buffer,
    b"\x98": _Reader.buffer_readonly,
}.items():
    _STEPS[_code[0]] = _step
