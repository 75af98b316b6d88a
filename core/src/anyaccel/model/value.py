"""The base of all values: frozen, with slots, made by keyword, without generated code; and values as JSON data.

A frozen dataclass takes about a millisecond to make, and the command line had twenty-five of them to make whenever it
started. See docs/decisions/start-up-time.md.

Data of plug-ins, child processes and files is not trusted: :func:`decode` returns only values without a fault, and its
error names every fault of the data.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from enum import Enum
from functools import cache
from itertools import repeat
from operator import attrgetter
from types import GenericAlias, UnionType

from anyaccel.text import shown, suggest

TYPE_CHECKING = False  # not from typing: its import takes longer than the import of this module
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from dataclasses import Field
    from typing import Any, ClassVar, NoReturn, Self, TypeVar, dataclass_transform

    Reader = Callable[[Any, Any, str, list[str], bool], Any]
    T = TypeVar("T")
    V = TypeVar("V", bound="Value")
else:

    def dataclass_transform(**_: object) -> object:
        """Do nothing at run time: only type checkers use the decorator."""
        return lambda kind: kind


REQUIRED = object()
"""Marks a field without a default."""


class _Factory:
    """A default that is made anew for each value."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], object]) -> None:
        self.make = make


def field(*, default_factory: Callable[[], T]) -> T:
    """Return a default that is made anew for each value, such as an empty dict."""
    return _Factory(default_factory)  # type: ignore[return-value] # pyright: ignore[reportReturnType]


class _ValueType(type):
    """The metaclass of values: annotated names become slots, and assigned objects their defaults."""

    _fields: Mapping[str, object]
    """Defaults by field."""
    _contents: attrgetter[Any]
    """Gets the contents of all fields of a value, for comparison and hash."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> _ValueType:
        """Make a class whose annotations are text, as with ``from __future__ import annotations``.

        Raises:
            TypeError: When one is none.
        """
        evaluate = namespace.pop("__annotate_func__", None)  # of a module without that import, from Python 3.14 on
        if evaluate is not None:
            namespace["__annotations__"] = evaluate(1)
        kinds = namespace.get("__annotations__", {})
        if not all(isinstance(kind, str) for kind in kinds.values()):
            raise TypeError(f"the annotations of {name} must be text: write 'from __future__ import annotations'")
        own = [each for each, kind in kinds.items() if not kind.startswith("ClassVar")]
        fields: dict[str, object] = {}
        for base in bases:  # inherited fields come first, as in dataclasses
            fields |= getattr(base, "_fields", {})
        fields |= {each: namespace.pop(each, REQUIRED) for each in own}
        first = {"__init__": _first_init} if fields else {}
        return super().__new__(cls, name, bases, {"__slots__": own, "_fields": fields, **first, **namespace})


def _first_init(self: Value, **given: object) -> None:
    """Make the ``__init__`` of a class with its first value: a process makes values of few classes."""
    kind = type(self)
    kind._contents = attrgetter(*kind._fields)  # noqa: SLF001 - our own
    kind.__init__ = _initializer(kind)  # type: ignore[method-assign]
    kind.__init__(self, **given)


def _initializer(kind: _ValueType) -> Callable[..., None]:
    """Make the ``__init__`` of a class."""
    slots = tuple((name, getattr(kind, name).__set__) for name in kind._fields)
    factories = {name: default.make for name, default in kind._fields.items() if isinstance(default, _Factory)}
    defaults = {
        name: default for name, default in kind._fields.items() if default is not REQUIRED and name not in factories
    }
    count = len(slots)

    def __init__(self: Value, **given: object) -> None:  # noqa: N807
        content = given  # no copy where the caller gives every field, as decode() and replace() do
        if len(given) != count:
            content = {**defaults, **given}
            for name, make in factories.items():
                if name not in given:
                    content[name] = make()
        try:
            for name, put in slots:  # by the slot's descriptor, since __setattr__ refuses
                put(self, content[name])
        except KeyError:  # a check ahead of the loop would cost each value, a mistake costs only its author
            raise _wrong(type(self), given) from None
        if len(content) != count:  # an unknown name
            raise _wrong(type(self), given)

    return __init__


def _wrong(kind: _ValueType, given: Mapping[str, object]) -> TypeError:
    """Return the error for wrong arguments of a value."""
    unknown = next((name for name in given if name not in kind._fields), None)
    if unknown is None:
        missing = [name for name, default in kind._fields.items() if default is REQUIRED and name not in given]
        return TypeError(f"{kind.__name__}() needs {', '.join(missing)}")
    way_out = suggest(unknown, kind._fields, f"it has {', '.join(kind._fields)}", most=1)
    return TypeError(f"{kind.__name__}() got an unexpected keyword argument {unknown!r}; {way_out}")


class _DataclassFields:
    """The attribute of dataclasses that functions of :mod:`dataclasses` read; made at the first use."""

    def __get__(self, value: object, kind: type[Value]) -> dict[str, Field[Any]]:
        return _dataclass_fields(kind)


@cache
def _dataclass_fields(kind: type[Value]) -> dict[str, Field[Any]]:
    import dataclasses

    made = []
    for name, default in kind._fields.items():
        how: dict[str, Any] = {"default": default}
        if default is REQUIRED:
            how = {}
        elif isinstance(default, _Factory):
            how = {"default_factory": default.make}
        made.append((name, object, dataclasses.field(**how)))  # dataclasses.replace() ignores the type
    # dataclasses.Field has no public constructor, so a real dataclass with the same fields lends its own.
    twin: Any = dataclasses.make_dataclass(kind.__name__, made, kw_only=True)
    found: dict[str, Field[Any]] = twin.__dataclass_fields__
    return found


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Value(metaclass=_ValueType):
    """Base of the values: a class declares fields as a dataclass does, ``name: kind`` or ``name: kind = default``.

    A value is made with keyword arguments alone, and never changes; :func:`replace` makes another value. Two values are
    equal when their classes and fields are equal, and the hash is made of the fields. Values can be copied and pickled,
    and work with the functions of :mod:`dataclasses`. A class may inherit fields.
    """

    if TYPE_CHECKING:
        _fields: ClassVar[Mapping[str, object]]
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    else:
        __dataclass_fields__ = _DataclassFields()

    def __setattr__(self, name: str, content: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} never changes, so its {name!r} cannot be set; use replace()")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} never changes, so its {name!r} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        contents = type(self)._contents
        return bool(contents(self) == contents(other))

    def __hash__(self) -> int:
        return hash(type(self)._contents(self))  # noqa: SLF001 - our own

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._fields)})"

    def __reduce__(self) -> tuple[object, ...]:  # pickle restores slots by setattr(), which a value refuses
        return _make, (type(self), {name: getattr(self, name) for name in self._fields})

    def __replace__(self, **changes: object) -> Self:
        return replace(self, **changes)


def _make(kind: type[V], content: Mapping[str, Any]) -> V:
    """Make a copied or pickled value."""
    return kind(**content)


def replace(value: V, **changes: Any) -> V:
    """Return a copy of a value with some fields changed.

    Raises:
        TypeError: When the value has no such field.
    """
    for name in value._fields:
        if name not in changes:
            changes[name] = getattr(value, name)
    return type(value)(**changes)


@cache
def fields(kind: type[Value]) -> dict[str, Any]:
    """Return the fields of a class in order, each with its default or :data:`REQUIRED`."""
    return {
        name: default.make() if isinstance(default, _Factory) else default for name, default in kind._fields.items()
    }


class Literal:
    """Replaces ``typing.Literal`` in annotations of values, since the import of typing takes long."""

    def __class_getitem__(cls, options: Any) -> GenericAlias:
        return GenericAlias(cls, options)


_AS_THEY_ARE = frozenset({str, int, float, bool, type(None)})
"""Scalar types of JSON."""


def encode(value: Any, without: Collection[str] = ()) -> Any:
    """Return a value as JSON data. Fields with their default value are left out.

    Args:
        value: The value.
        without: Names of further fields to leave out, of values at any depth.
    """
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, Value):
        # A reader of a later version adds new fields with their default, so documents stay small and stable.
        return {
            name: encode(content, without)
            for name, default in fields(type(value)).items()
            if ((content := getattr(value, name)) != default or default is REQUIRED) and name not in without
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): encode(content, without) for key, content in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(content, without) for content in value]
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
    return _read(kind, data, where, found, False), found


def faults(value: Any, kind: Any, where: str) -> list[str]:
    """Return every place where a value does not fit an annotation, as ``where must be X (got Y that is a Z)``."""
    found: list[str] = []
    _read(kind, value, where, found, True)
    return found


def _read(kind: Any, data: Any, place: str, found: list[str], made: bool) -> Any:
    """Shape and check data like an annotation; a part that does not fit stays unchanged.

    Args:
        kind: The annotation.
        data: The data.
        place: Place of the data, for messages.
        found: List to which the faults are appended.
        made: Whether the data is a finished value, which is only checked, instead of JSON data.
    """
    if kind is str and type(data) is str:  # the usual case
        return data
    return _reader(kind)(kind, data, place, found, made)


@cache
def _reader(kind: Any) -> Reader:
    """Return the function that reads an annotation."""
    origin = getattr(kind, "__origin__", None)
    if isinstance(kind, UnionType):
        return _read_union
    if origin in (tuple, frozenset):
        return _read_row
    if origin not in (None, Literal):
        return _read_mapping
    return _read_value if origin is None and issubclass(kind, Value) else _read_scalar


def _read_scalar(kind: Any, data: Any, place: str, found: list[str], made: bool) -> Any:
    """Read a scalar, an enum or a ``Literal``."""
    if kind is int or kind is float:
        accepted = int if kind is int else (int, float)  # JSON has no difference between 1 and 1.0
        fits = isinstance(data, accepted) and not isinstance(data, bool) and _is_usual(data)
    elif isinstance(kind, type):
        if issubclass(kind, Enum) and isinstance(data, str) and not made:
            data = next((member for member in kind if member.value == data), data)
        fits = isinstance(data, kind)
    else:
        fits = data in kind.__args__
    if not fits:
        found.append(_mismatch(place, data, kind))
    return data


def _read_row(kind: Any, data: Any, place: str, found: list[str], made: bool) -> Any:
    """Read a tuple or a frozenset, which is a list in JSON."""
    origin, arguments = kind.__origin__, kind.__args__
    length = None if origin is frozenset or arguments[-1] is Ellipsis else len(arguments)
    if not isinstance(data, origin if made else (list, origin)) or length not in (None, len(data)):
        found.append(_mismatch(place, data, kind, "" if made else f"a list of {length}" if length else "a list"))
        return data
    if not length and _all_text(arguments[0], data):
        return data if made else origin(data)
    rows = enumerate(zip(arguments if length else repeat(arguments[0]), data, strict=False))
    row = [_read(inside, content, f"{place}[{n}]", found, made) for n, (inside, content) in rows]
    return data if made else origin(row)


def _all_text(kind: Any, contents: Iterable[Any]) -> bool:
    """Return whether contents of an annotation are all text, and should be: most are, and no place is made for each."""
    return kind is str and {str}.issuperset(map(type, contents))


def _read_mapping(kind: Any, data: Any, place: str, found: list[str], made: bool) -> Any:
    """Read a mapping, which is an object in JSON."""
    if not isinstance(data, kind.__origin__ if made else dict):
        found.append(_mismatch(place, data, kind, "" if made else "an object"))
        return data
    key_kind, content_kind = kind.__args__
    if _all_text(key_kind, data) and _all_text(content_kind, data.values()):
        return data
    contents = {}
    for key, content in data.items():
        _read(key_kind, key, f"{place} key", found, made)
        wrong: list[str] = []
        contents[key] = _read(content_kind, content, "", wrong, made)
        found += [f"{place}[{shown(key)}]{each}" for each in wrong]  # each fault begins with its place
    return data if made else contents


def _read_union(kind: UnionType, data: Any, place: str, found: list[str], made: bool) -> Any:
    """Read a union: the first option without a fault counts."""
    nearest: tuple[Any, list[str]] | None = None
    for option in kind.__args__:
        wrong: list[str] = []
        value = _read(option, data, place, wrong, made)
        if not wrong:
            return value
        if isinstance(data, dict | Value) and isinstance(option, type) and issubclass(option, Value):
            nearest = nearest or (value, wrong)  # its faults say more than "must be X | None"
    value, wrong = nearest or (data, [_mismatch(place, data, kind)])
    found += wrong
    return value


def _read_value(kind: type[Value], data: Any, place: str, found: list[str], made: bool) -> Any:
    """Read a value, which is an object in JSON."""
    kinds, defaults = hints(kind), fields(kind)
    ready = isinstance(data, kind)
    if not ready:
        if made or not isinstance(data, dict):
            found.append(_mismatch(place, data, kind, "" if made else "an object"))
            return data
        wrong = [
            f"{place} must have no field {shown(name)}: {kind.__name__} has {', '.join(kinds)}"
            for name in data
            if name not in kinds
        ]
        wrong += [
            f"{place} must have the field {name!r}"
            for name, default in defaults.items()
            if default is REQUIRED and name not in data
        ]
        if wrong:
            found += wrong
            return data
    given: Mapping[str, Any] = (
        {name: content for name, default in defaults.items() if (content := getattr(data, name)) is not default}
        if ready  # a default is right
        else data
    )
    contents = {name: _read(kinds[name], given[name], f"{place}.{name}", found, ready) for name in given}
    return data if ready else kind(**contents)


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


def _mismatch(place: str, value: Any, kind: Any, name: str = "") -> str:
    """Describe a value that does not fit an annotation; with another name for the type, if given."""
    if not name:
        plain_class = isinstance(kind, type) and getattr(kind, "__origin__", None) is None
        name = kind.__name__ if plain_class else str(kind).replace("anyaccel.", "").replace("collections.abc.", "")
    if isinstance(value, (int, float)) and not _is_usual(value):
        name += ", finite and of at most 64 bits"
    return f"{place} must be {name} (got {shown(value)} that is a {type(value).__name__})"
