"""Inventories, requests and allocations as JSON documents, for programs that keep them or send them to others."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import UnionType

from anyaccel.model._value import REQUIRED, Value, fields
from anyaccel.model.allocation import Allocation
from anyaccel.model.inventory import Inventory
from anyaccel.model.labels import label_faults
from anyaccel.model.request import Request
from anyaccel.model.wire import decode, encode, hints

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KINDS: dict[str, type[Value]] = {
    "anyaccel.inventory/1": Inventory,
    "anyaccel.request/1": Request,
    "anyaccel.allocation/1": Allocation,
}
"""What a document can hold, by the name of its schema. Within a version, fields are added and never removed."""


def to_json(value: Inventory | Request | Allocation) -> dict[str, Any]:
    """Turn a value into a document that ``json.dumps`` takes. Fields that have their default are left out."""
    name = next(name for name, kind in KINDS.items() if isinstance(value, kind))
    return {"schema": name, **encode(value)}


def from_json(document: Any) -> Inventory | Request | Allocation:
    """Make the value of which a document tells.

    Args:
        document: What :func:`to_json` made, from a source that may lie; nothing in it is taken unchecked.

    Raises:
        ValueError: When it is no such document; the message names every fault.

    Examples:
        >>> inventory = anyaccel.detect("sim:H100:2")
        >>> anyaccel.from_json(anyaccel.to_json(inventory)) == inventory
        True
    """
    name = document.get("schema") if isinstance(document, Mapping) else None
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"the schema of a document must be one of {', '.join(KINDS)} (got {name!r:.100})")
    found = decode(kind, {key: content for key, content in document.items() if key != "schema"})
    assert isinstance(found, Inventory | Request | Allocation)  # noqa: S101 -- KINDS has no others
    wrong = list(label_faults(() if isinstance(found, Request) else found.devices))
    if wrong:
        raise ValueError("; ".join(wrong))
    return found


def schema() -> dict[str, Any]:
    """The JSON schema of all documents."""
    definitions: dict[str, Any] = {}
    options = []
    for name, kind in KINDS.items():
        _describe(kind, definitions)
        own = definitions[kind.__name__]
        options.append({**own, "properties": {"schema": {"const": name}, **own["properties"]}})
        options[-1]["required"] = ["schema", *own["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "oneOf": options, "$defs": definitions}


def _describe(annotation: Any, definitions: dict[str, Any]) -> dict[str, Any]:  # noqa: PLR0911 - one for each kind
    """The schema of what :func:`encode` makes of a value with an annotation."""
    origin: Any = getattr(annotation, "__origin__", None)
    arguments: Any = getattr(annotation, "__args__", ())
    if isinstance(annotation, UnionType):
        return {"anyOf": [_describe(option, definitions) for option in arguments]}
    if origin in (tuple, frozenset):
        return {"type": "array", "items": _describe(arguments[0], definitions)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _describe(arguments[1], definitions)}
    if origin is not None:
        return {"enum": list(arguments)}
    if issubclass(annotation, Enum):
        return {"enum": [member.value for member in annotation]}
    if issubclass(annotation, Value):
        return _describe_value(annotation, definitions)
    names: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return {"type": names[annotation]}


def _describe_value(kind: type[Value], definitions: dict[str, Any]) -> dict[str, Any]:
    name = kind.__name__
    if name not in definitions:
        definitions[name] = {}
        definitions[name] = {
            "type": "object",
            "properties": {field: _describe(each, definitions) for field, each in hints(kind).items()},
            "required": [field for field, default in fields(kind).items() if default is REQUIRED],
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{name}"}
