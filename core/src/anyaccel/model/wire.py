"""Values as JSON data and back, with a check of every field.

Data of plug-ins, child processes and files is not trusted: :func:`faults` compares a value with an annotation and names
every fault at once, and :func:`decode` returns only values without a fault.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from types import GenericAlias, UnionType

from anyaccel.model._value import REQUIRED, Value, fields
from anyaccel.text import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Any, TypeVar

    Builder = Callable[[Any], Any]
    Check = Callable[[Any], bool]
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
    value: T = build(kind, data)
    found = list(faults(value, kind, where or kind.__name__))
    if found:
        raise ValueError("; ".join(found))
    return value


def build(kind: Any, data: Any) -> Any:
    """Shape JSON data like an annotation; parts that do not fit stay unchanged, for :func:`faults`."""
    builder = _builder(kind)
    return builder(data) if builder else data


def prepare(kind: type[Value]) -> None:
    """Make the cached builder and check of a class of values ahead of the first use."""
    annotation: Any = kind
    _builder(annotation)
    _satisfies(annotation)


def faults(value: Any, kind: Any, where: str) -> Iterator[str]:
    """Yield every place where a value does not fit an annotation, as ``where must be X (got Y that is a Z)``."""
    if _satisfies(kind)(value):
        return
    if isinstance(kind, UnionType):
        found = {option: list(faults(value, option, where)) for option in _arguments(kind)}
        if all(found.values()):
            # The faults of the one option that is a class say more than "must be X | None".
            meant = [option for option in found if isinstance(value, (dict, Value)) and _is_value(option)]
            yield from found[meant[0]] if meant else [_mismatch(value, kind, where)]
    elif not _fits(value, kind):
        wrong = list(_wrong_fields(value, kind, where)) if isinstance(value, dict) and _is_value(kind) else []
        yield from wrong or [_mismatch(value, kind, where)]
    else:
        for content, content_kind, place in _parts(value, kind, where):
            yield from faults(content, content_kind, place)


def _is_value(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Value)


def _wrong_fields(data: Mapping[Any, Any], kind: type[Value], where: str) -> Iterator[str]:
    """Yield unknown fields of data, and missing fields."""
    known = fields(kind)
    for name in data:
        if name not in known:
            yield f"{where} must have no field {shown(name)}: {kind.__name__} has {', '.join(known)}"
    for name, default in known.items():
        if default is REQUIRED and name not in data:
            yield f"{where} must have the field {name!r}"


# 0.5 ms for 64 devices, where faults() alone takes 9 ms: each detection and each start of a worker checks values.
@cache
def _satisfies(kind: Any) -> Check:  # noqa: PLR0911 - one for each kind of annotation
    """Return a fast check of an annotation. A value that fails the check may still fit: :func:`faults` decides."""
    origin, arguments = _origin(kind), _arguments(kind)
    if isinstance(kind, UnionType):
        return _any_of([_satisfies(option) for option in arguments])
    if origin is Literal:
        return lambda value: value in arguments
    if kind in (int, float):
        return lambda value: type(value) is kind and _is_usual(value)  # not isinstance: a bool is an int
    if origin in (tuple, frozenset):
        inside = _satisfies(arguments[0])
        if origin is tuple and arguments[-1] is not Ellipsis:
            return lambda value: _fits(value, kind) and all(map(inside, value))
        return lambda value: isinstance(value, origin) and all(map(inside, value))
    if origin is not None:
        key, content = _satisfies(arguments[0]), _satisfies(arguments[-1])
        return lambda value: isinstance(value, dict) and all(map(key, value)) and all(map(content, value.values()))
    if issubclass(kind, Value):
        return _all_fields(kind, [(name, _satisfies(annotation)) for name, annotation in hints(kind).items()])
    return lambda value: isinstance(value, kind)


def _any_of(options: Sequence[Check]) -> Check:
    def check(value: Any) -> bool:
        for option in options:  # noqa: SIM110 - a generator takes as long as all that it asks
            if option(value):
                return True
        return False

    return check


def _all_fields(kind: type[Value], fields: Sequence[tuple[str, Check]]) -> Check:
    def check(value: Any) -> bool:
        if not isinstance(value, kind):
            return False
        for name, fits in fields:  # noqa: SIM110 - likewise
            if not fits(getattr(value, name)):
                return False
        return True

    return check


def _origin(kind: Any) -> Any:
    """Return the origin of an annotation: ``tuple`` for ``tuple[int, ...]``."""
    return getattr(kind, "__origin__", None)


def _arguments(kind: Any) -> tuple[Any, ...]:
    """Return the arguments of an annotation, in brackets or between bars."""
    return getattr(kind, "__args__", ())


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value itself fits an annotation, without its contents."""
    origin = _origin(kind)
    if origin is Literal:
        return value in _arguments(kind)
    if kind in (int, float) and (isinstance(value, bool) or not _is_usual(value)):
        return False
    if origin is tuple and isinstance(value, tuple) and _arguments(kind)[-1] is not Ellipsis:
        return len(value) == len(_arguments(kind))
    accepted = (int, float) if kind is float else origin or kind  # JSON has no difference between 1 and 1.0
    return isinstance(value, accepted)


def _is_usual(number: Any) -> bool:
    """Return whether every JSON reader accepts a number: finite, and at most 64 bits for an integer."""
    if isinstance(number, float):
        return math.isfinite(number)
    return not isinstance(number, int) or -(1 << 63) <= number < 1 << 64  # Go and C readers have no larger


def _parts(value: Any, kind: Any, where: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield the contents of a value, each with its annotation and its place."""
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
    """Return the resolved annotations of a value's fields."""
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


@cache
def _builder(kind: Any) -> Builder | None:  # noqa: PLR0911 - one for each kind of annotation
    """Return a function that shapes data like an annotation, and leaves other parts for :func:`faults`.

    Returns:
        None where data needs no change.
    """
    origin, arguments = _origin(kind), _arguments(kind)
    if isinstance(kind, UnionType):
        options = [builder for option in arguments if (builder := _builder(option))]
        return (lambda data: _first_built(options, data)) if options else None
    if origin is Literal:
        return None
    if origin in (tuple, frozenset):
        inside = _builder(arguments[0])
        return lambda data: origin(map(inside, data) if inside else data) if isinstance(data, list) else data
    if origin is not None:
        content = _builder(arguments[-1])
        if content is None:
            return None
        return lambda data: {k: content(v) for k, v in data.items()} if isinstance(data, dict) else data
    if issubclass(kind, Enum):
        members = {member.value: member for member in kind}  # values of enums are texts
        return lambda data: members.get(data, data) if isinstance(data, str) else data
    return _value_builder(kind) if issubclass(kind, Value) else None


def _first_built(options: Sequence[Builder], data: Any) -> Any:
    """Return the first result of the options that is no list or dict."""
    built = (option(data) for option in options)
    return next((value for value in built if not isinstance(value, (list, dict))), data)


def _value_builder(kind: type[Value]) -> Builder:
    known = {name: _builder(annotation) for name, annotation in hints(kind).items()}

    def build(data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        try:
            return kind(**{name: shape(each) if (shape := known[name]) else each for name, each in data.items()})
        except (KeyError, TypeError):  # an unknown field, or a missing one
            return data

    return build
