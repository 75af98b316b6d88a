"""Values as JSON data and back, with a check of every field.

Data of plug-ins, child processes and files is not trusted: :func:`decode` returns only values without a fault, and its
error names every fault of the data. Each annotation has one reader, a function that shapes and checks data in one pass.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from enum import Enum
from functools import cache
from types import GenericAlias, UnionType

from anyaccel.model._value import REQUIRED, Value, fields
from anyaccel.text import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any, TypeVar

    Reader = Callable[[Any, list[str], bool], Any]
    T = TypeVar("T")


class Literal:
    """Replaces ``typing.Literal`` in annotations of values, since the import of typing takes long."""

    def __class_getitem__(cls, options: Any) -> GenericAlias:
        return GenericAlias(cls, options)


_AS_THEY_ARE = frozenset({str, int, float, bool, type(None)})
"""Scalar types of JSON."""
_defaults = cache(fields)


def encode(value: Any) -> Any:
    """Return a value as JSON data. Fields with their default value are left out."""
    if isinstance(value, (tuple, list)):
        return [content if type(content) in _AS_THEY_ARE else encode(content) for content in value]
    found = plain(value)
    if isinstance(found, dict):
        for name, content in found.items():
            if type(content) not in _AS_THEY_ARE:
                found[name] = encode(content)
    return found


def plain(value: Any, without: Collection[str] = ()) -> Any:
    """Return a value as a dict, a list or a scalar without conversion of its contents: a ``default`` for :mod:`json`.

    Args:
        value: The value.
        without: Names of further fields to leave out.
    """
    if isinstance(value, Value):
        found = {}
        for name, default in _defaults(type(value)).items():
            content = getattr(value, name)
            # A reader of a later version adds new fields with their default, so documents stay small and stable.
            if (default is REQUIRED or content != default) and name not in without:
                found[name] = content
        return found
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): content for key, content in value.items()}
    return sorted(value) if isinstance(value, frozenset) else value  # sorted: equal values, equal documents


def decode(kind: type[T], data: Any, where: str = "") -> T:
    """Return the value of JSON data.

    Args:
        kind: A class of values.
        data: A result of :func:`encode`, from any source.
        where: Name of the value in messages.

    Raises:
        ValueError: When the data has faults; the message names each.
    """
    value, found = read(kind, data, where or kind.__name__)
    if found:
        raise ValueError("; ".join(found))
    return value


def read(kind: type[T], data: Any, where: str) -> tuple[T, list[str]]:
    """Shape JSON data like an annotation; return also the faults, as :func:`faults` does.

    Parts that do not fit stay unchanged.
    """
    found: list[str] = []
    annotation: Any = kind
    value = _reader(annotation)(data, found, False)
    return value, [where + fault for fault in found]


def prepare(kind: type[Value]) -> None:
    """Make the cached reader of a class of values ahead of the first use."""
    _reader(kind)


def faults(value: Any, kind: Any, where: str) -> list[str]:
    """Return every place where a value does not fit an annotation, as ``where must be X (got Y that is a Z)``."""
    found: list[str] = []
    _reader(kind)(value, found, True)
    return [where + fault for fault in found]


@cache
def _reader(kind: Any) -> Reader:
    """Return the function that shapes and checks data for an annotation, made once for each annotation.

    The function takes the data, a list to which it appends faults, each beginning with its place below the data, and
    whether the data is a finished value, which is checked and returned, instead of JSON data. Parts that do not fit
    are returned unchanged.
    """
    origin, arguments = getattr(kind, "__origin__", None), getattr(kind, "__args__", ())
    if isinstance(kind, UnionType):
        return _union_reader(kind)
    if origin in (tuple, frozenset):
        return _row_reader(kind, origin, arguments)
    if origin is not None and origin is not Literal:
        return _mapping_reader(kind, origin, arguments)
    if origin is None and issubclass(kind, Value):
        return _value_reader(kind)
    return _scalar_reader(kind)


def _scalar_reader(kind: Any) -> Reader:
    """Return the reader of a scalar type, an enum or a ``Literal``."""
    options = kind.__args__ if getattr(kind, "__origin__", None) is Literal else None
    accepted = (int, float) if kind is float else kind  # JSON has no difference between 1 and 1.0
    members = {} if options or not issubclass(kind, Enum) else {member.value: member for member in kind}
    number = kind in (int, float)

    def read(data: Any, found: list[str], made: bool) -> Any:
        if members and not made and isinstance(data, str):
            data = members.get(data, data)
        fits = data in options if options else isinstance(data, accepted)
        if not fits or (number and (isinstance(data, bool) or not _is_usual(data))):
            found.append(_mismatch(data, kind))
        return data

    return read


def _row_reader(kind: Any, origin: Any, arguments: tuple[Any, ...]) -> Reader:
    """Return the reader of a tuple or a frozenset, which is a list in JSON."""
    inside = _reader(arguments[0])
    length = None if origin is frozenset or arguments[-1] is Ellipsis else len(arguments)

    def read(data: Any, found: list[str], made: bool) -> Any:
        if not isinstance(data, origin if made else (list, origin)) or length not in (None, len(data)):
            found.append(_mismatch(data, kind, "" if made else f"a list of {length}" if length else "a list"))
            return data
        row = [_read_at(f"[{n}]", inside, content, found, made) for n, content in enumerate(data)]
        return data if made else origin(row)

    return read


def _mapping_reader(kind: Any, origin: Any, arguments: tuple[Any, ...]) -> Reader:
    """Return the reader of a mapping, which is an object in JSON."""
    read_key, read_content = map(_reader, arguments)

    def read(data: Any, found: list[str], made: bool) -> Any:
        if not isinstance(data, origin if made else dict):
            found.append(_mismatch(data, kind, "" if made else "an object"))
            return data
        contents = {}
        for key, content in data.items():
            _read_at(" key", read_key, key, found, made)
            contents[key] = _read_at(f"[{shown(key)}]", read_content, content, found, made)
        return data if made else contents

    return read


def _union_reader(kind: UnionType) -> Reader:
    """Return the reader of a union: the first option without a fault counts."""
    options = [_reader(option) for option in kind.__args__]
    values = [_reader(option) for option in kind.__args__ if isinstance(option, type) and issubclass(option, Value)]

    def read(data: Any, found: list[str], made: bool) -> Any:
        count = len(found)
        for option in options:
            value = option(data, found, made)
            if len(found) == count:
                return value
            del found[count:]
        if values and isinstance(data, (dict, Value)):
            return values[0](data, found, made)  # its faults say more than "must be X | None"
        found.append(_mismatch(data, kind))
        return data

    return read


def _value_reader(kind: type[Value]) -> Reader:
    """Return the reader of a class of values, which are objects in JSON."""
    readers = {name: _reader(annotation) for name, annotation in hints(kind).items()}
    defaults = fields(kind)

    def read(data: Any, found: list[str], made: bool) -> Any:
        ready = isinstance(data, kind)
        if not ready:
            if not isinstance(data, dict):
                found.append(_mismatch(data, kind, "" if made else "an object"))
                return data
            wrong = [
                f" must have no field {shown(name)}: {kind.__name__} has {', '.join(readers)}"
                for name in data
                if name not in readers
            ]
            wrong += [
                f" must have the field {name!r}" for name in readers if defaults[name] is REQUIRED and name not in data
            ]
            if wrong or made:
                found += wrong or [_mismatch(data, kind)]
                return data
        given: Mapping[str, Any] = {name: getattr(data, name) for name in readers} if ready else data
        contents = {name: _read_at(f".{name}", readers[name], given[name], found, ready) for name in given}
        return data if ready else kind(**contents)

    return read


def _read_at(place: str, reader: Reader, data: Any, found: list[str], made: bool) -> Any:
    """Read a part of a value, and put the part's place in front of its faults."""
    count = len(found)
    value = reader(data, found, made)
    if len(found) > count:
        found[count:] = [place + fault for fault in found[count:]]
    return value


def _is_usual(number: Any) -> bool:
    """Return whether every JSON reader accepts a number: finite, and at most 64 bits for an integer."""
    if isinstance(number, float):
        return math.isfinite(number)
    return not isinstance(number, int) or -(1 << 63) <= number < 1 << 64  # Go and C readers have no larger


@cache
def hints(kind: type[Value]) -> dict[str, Any]:
    """Return the resolved annotations of a value's fields."""
    resolved: dict[str, Any] = {}
    for home in reversed(kind.__mro__):
        names = {"Literal": Literal, **vars(sys.modules[home.__module__])}
        for name, annotation in home.__dict__.get("__annotations__", {}).items():  # noqa: RUF063 - without inspect
            resolved[name] = eval(annotation, names)  # noqa: S307 - it is text of ours
    return {name: resolved[name] for name in fields(kind)}


def _mismatch(value: Any, kind: Any, name: str = "") -> str:
    """Describe a value that does not fit an annotation, without its place; with another name for the type, if given."""
    if not name:
        plain_class = isinstance(kind, type) and getattr(kind, "__origin__", None) is None
        name = kind.__name__ if plain_class else str(kind).replace("anyaccel.", "").replace("collections.abc.", "")
    if isinstance(value, (int, float)) and not _is_usual(value):
        name += ", finite and of at most 64 bits"
    return f" must be {name} (got {shown(value)} that is a {type(value).__name__})"
