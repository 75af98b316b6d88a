"""The names of :mod:`typing` that modules of commands need at run time, without its import.

The import of typing and the first class with annotations as text take 21 million instructions, half of an interpreter's
start; each command that asks for devices would pay them. Type checkers read the names from typing.
"""

__all__ = ["Generic", "NamedTuple", "TypeVar", "TypedDict", "overload"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Generic, NamedTuple, TypedDict, TypeVar, overload
else:
    from collections import namedtuple

    class Generic:
        """A class with parameters, which have no effect at run time."""

        def __class_getitem__(cls, _: object) -> type:
            return cls

    def TypeVar(name: str, **_: object) -> str:  # noqa: N802 - the name in typing
        """Return a stand-in for a parameter."""
        return name

    def overload(function: object) -> object:
        """Return a declaration for type checkers; the definition below it takes its place."""
        return function

    class _NamedTupleType(type):
        """Makes a class of named tuples of its annotations, with defaults and methods."""

        def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, object]) -> type:
            if not bases:
                return super().__new__(cls, name, bases, namespace)
            fields = [*namespace["__annotations__"]]
            defaults = [namespace.pop(each) for each in fields if each in namespace]
            row = namedtuple(name, fields, defaults=defaults)  # noqa: PYI024 - this is what typing does
            return type(name, (row, *bases[1:]), {"__slots__": (), **namespace})

    class NamedTuple(metaclass=_NamedTupleType):
        """Base of tuples with named fields."""

    class _TypedDictType(type):
        """Makes a class that names the keys of a dict, with those of its bases; no object of it is made."""

        def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, object], **_: bool) -> type:
            inherited = {key: kind for base in bases for key, kind in base.__annotations__.items()}
            namespace["__annotations__"] = inherited | namespace.get("__annotations__", {})
            return super().__new__(cls, name, bases, namespace)

        def __init__(cls, *given: object, **_: bool) -> None:
            super().__init__(*given)

    class TypedDict(metaclass=_TypedDictType):
        """Base of classes that name the keys of a dict."""
