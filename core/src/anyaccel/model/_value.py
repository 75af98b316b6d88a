"""The base of all values: frozen, with slots, made by keyword, without generated code.

A frozen dataclass takes about a millisecond to make, and the command line had twenty-five of them to make whenever it
started. See docs/decisions/start-up-time.md.
"""

from __future__ import annotations

from functools import cache
from operator import attrgetter

TYPE_CHECKING = False  # not from typing: its import takes longer than the import of this module
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from dataclasses import Field
    from typing import Any, ClassVar, NoReturn, Self, TypeVar, dataclass_transform

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
        """Make a class whose annotations are text, as with ``from __future__ import annotations``."""
        own = [each for each, kind in namespace.get("__annotations__", {}).items() if not kind.startswith("ClassVar")]
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
    from anyaccel.text import suggest

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
