"""Values as JSON, and back, checked field by field on the way.

What comes from a plug-in, a child process or a file is not trusted: :func:`faults` compares a value with the
annotation it should satisfy and names every fault at once, and :func:`decode` builds nothing else.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from types import GenericAlias, UnionType

from anyaccel.model._value import Value, fields
from anyaccel.text import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    T = TypeVar("T")


class Literal:
    """Stands for that of typing in annotations of values, which do without that module: it takes long to import."""

    def __class_getitem__(cls, options: Any) -> GenericAlias:
        return GenericAlias(cls, options)


def encode(value: Any) -> Any:
    """Turn a value into JSON data. Fields that have their default are left out."""
    if isinstance(value, Value):
        return {
            name: encode(content)
            for name, default in fields(type(value)).items()
            if (content := getattr(value, name)) != default
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): encode(content) for key, content in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, (tuple, list)):
        return [encode(content) for content in value]
    return value


def decode(kind: type[T], data: Any, where: str = "") -> T:
    """Build a value from JSON data.

    Args:
        kind: A class of values.
        data: What :func:`encode` made of such a value, from a source that may lie.
        where: Name of the value in messages.

    Raises:
        ValueError: When the data has another shape; the message names every fault.
    """
    value = _build(kind, data)
    found = list(faults(value, kind, where or kind.__name__))
    if found:
        raise ValueError("; ".join(found))
    return value  # type: ignore[no-any-return]


def faults(value: Any, kind: Any, where: str) -> Iterator[str]:
    """Name every place where a value does not satisfy an annotation, as ``where must be X (got Y that is a Z)``."""
    if isinstance(kind, UnionType):
        if all(next(faults(value, option, where), None) for option in _arguments(kind)):
            yield _mismatch(value, kind, where)
    elif not _fits(value, kind):
        yield _mismatch(value, kind, where)
    else:
        for content, content_kind, place in _parts(value, kind, where):
            yield from faults(content, content_kind, place)


def _origin(kind: Any) -> Any:
    """What an annotation is an alias of: that of ``tuple[int, ...]`` is ``tuple``."""
    return getattr(kind, "__origin__", None)


def _arguments(kind: Any) -> tuple[Any, ...]:
    """What stands in the brackets of an annotation, or between its bars."""
    return getattr(kind, "__args__", ())


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value itself is of a kind, whatever it holds."""
    origin = _origin(kind)
    if origin is Literal:
        return value in _arguments(kind)
    if kind in (int, float) and (isinstance(value, bool) or not _is_usual(value)):
        return False
    accepted = (int, float) if kind is float else origin or kind
    return isinstance(value, accepted)


def _is_usual(number: Any) -> bool:
    """Whether a number is one that every reader of JSON takes: finite, and of at most 64 bits when it is whole."""
    if isinstance(number, float):
        return math.isfinite(number)
    return not isinstance(number, int) or -(1 << 63) <= number < 1 << 64


def _parts(value: Any, kind: Any, where: str) -> Iterator[tuple[Any, Any, str]]:
    """What a value holds, each with its annotation and its place."""
    arguments = _arguments(kind)
    if isinstance(value, Value):
        for name, annotation in hints(kind).items():
            yield getattr(value, name), annotation, f"{where}.{name}"
    elif isinstance(value, (tuple, frozenset)) and arguments:
        for position, content in enumerate(value):
            yield content, arguments[0], f"{where}[{position}]"
    elif isinstance(value, Mapping) and arguments:
        for key, content in value.items():
            yield key, arguments[0], f"{where} key"
            yield content, arguments[1], f"{where}[{key!r}]"


@cache
def hints(kind: type[Value]) -> dict[str, Any]:
    """The resolved annotations of a value's fields."""
    resolved: dict[str, Any] = {}
    for home in reversed(kind.__mro__):
        names = {"Literal": Literal, **vars(sys.modules[home.__module__])}
        for name, annotation in home.__dict__.get("__annotations__", {}).items():  # noqa: RUF063 - without inspect
            resolved[name] = eval(annotation, names)  # noqa: S307 - it is text of ours
    return {name: resolved[name] for name in fields(kind)}


def _mismatch(value: Any, kind: Any, where: str) -> str:
    name = kind.__name__ if isinstance(kind, type) and _origin(kind) is None else str(kind).replace("anyaccel.", "")
    if isinstance(value, (int, float)) and not _is_usual(value):
        name += ", finite and of at most 64 bits"
    return f"{where} must be {name} (got {shown(value)} that is a {type(value).__name__})"


def _build(kind: Any, data: Any) -> Any:
    """Shape data like an annotation; what does not fit is left as it is, for :func:`faults` to name."""
    origin = _origin(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next((member for member in kind if member.value == data), data)
    if isinstance(kind, UnionType):
        built = (_build(option, data) for option in _arguments(kind))
        return next((value for value in built if not isinstance(value, (list, dict))), data)
    if origin in (tuple, frozenset) and isinstance(data, list):
        return origin(_build(_arguments(kind)[0], content) for content in data)
    if origin is not None and isinstance(data, Mapping):
        return {key: _build(_arguments(kind)[1], content) for key, content in data.items()}
    if isinstance(kind, type) and issubclass(kind, Value) and isinstance(data, Mapping):
        return _build_value(kind, data)
    return data


def _build_value(kind: type[Value], data: Mapping[str, Any]) -> Any:
    known = hints(kind)
    try:
        return kind(**{name: _build(known[name], content) for name, content in data.items()})
    except (KeyError, TypeError):  # an unknown field, or a missing one
        return data
