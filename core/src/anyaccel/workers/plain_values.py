"""The types that :mod:`anyaccel.workers.plain` allows, each with a function that makes a value of it.

Every function is called with values that somebody else chose: it checks them, or hands them to a constructor of the
standard library that does. Whatever it raises means that there is no value.
"""

from __future__ import annotations

import builtins
import datetime as dt
import re
import sys
from collections.abc import Callable, Mapping
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
