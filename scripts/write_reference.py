"""Write generated parts of docs/reference: commands, exit statuses, errors, values and the kit.

The parts are between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``. A test compares them with the code.

    python scripts/write_reference.py
"""

import argparse
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import FunctionType, UnionType
from typing import Any

from anyaccel import BrokenPoolError, errors, kit, plugin
from anyaccel.cli import commands as cli
from anyaccel.cli.arguments import Parser
from anyaccel.cli.parser import add_common
from anyaccel.model import Value, document
from anyaccel.model.value import REQUIRED, fields, hints

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"


def commands() -> Iterator[str]:
    """Yield each command with its arguments."""
    for name, summary in cli.COMMANDS.items():
        module = cli.module_of(name)
        parser = Parser(add_help=False)
        module.add_arguments(parser)
        yield f"### anyaccel {name}"
        yield f"{summary[0].upper()}{summary[1:]}."
        yield from table(parser)
        if parser.listed:
            title, listed = parser.listed
            rows = [f"| `{each}` | {escaped(summary)} |" for each, summary in listed.items()]
            yield "\n".join([f"| {title} | |", "| --- | --- |", *rows])


def common_options() -> Iterator[str]:
    """Yield the options of all commands."""
    parser = argparse.ArgumentParser(add_help=False)
    add_common(parser)
    yield from table(parser)


def table(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a table of the arguments of a parser, if it has any."""
    rows = [row(action) for action in parser._actions if action.help != argparse.SUPPRESS]  # noqa: SLF001
    if rows:
        yield "\n".join(["| argument | |", "| --- | --- |", *rows])


def row(action: argparse.Action) -> str:
    """Return the row of an argument: its forms and its help."""
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
    forms = [f"{form} {value}".strip() for form in action.option_strings] or [str(value or action.dest)]
    text = (action.help or "") % {"default": action.default}
    return f"| {', '.join(f'`{escaped(form)}`' for form in forms)} | {escaped(text)} |"


def escaped(text: str) -> str:
    """Return the text of a docstring or help message, escaped for a table."""
    plain = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"`\1`", text).replace("``", "`")
    return plain.replace("|", "\\|").replace("<", "&lt;")


def exit_statuses() -> Iterator[str]:
    """Yield the exit statuses of the command line with their errors."""
    by_status: dict[int, list[str]] = {}
    for error in error_classes():
        by_status.setdefault(error.exit_code, []).append(f"`{error.__name__}`")
    rows = [f"| {status} | {', '.join(names)} |" for status, names in sorted(by_status.items())]
    yield "\n".join(["| status | errors |", "| --- | --- |", *rows])


def error_table() -> Iterator[str]:
    """Yield the table of errors."""
    rows = []
    for error in error_classes():
        sentence = (error.__doc__ or "").partition("\n")[0].removeprefix("Raised when ").rstrip(".")
        parent = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        sentence = escaped(f"{sentence[0].lower()}{sentence[1:]}")
        rows.append(f"| `{error.__name__}` | {parent} | {sentence} | `{error.code}` | {error.exit_code} |")
    yield "\n".join(["| error | is a | raised when | `code` | exit status |", "| --- | --- | --- | --- | --- |", *rows])


def error_classes() -> list[type[errors.AnyaccelError]]:
    """Return the errors in the order of their module."""
    # BrokenPoolError stands in the pool: its second base is an executor's error.
    found = [*vars(errors).values(), BrokenPoolError]
    return [item for item in found if isinstance(item, type) and issubclass(item, errors.AnyaccelError)]


VALUES = (
    *(
        "PluginInfo",
        "Detected",
        "Device",
        "VisiblePart",
        "EnvEdits",
        "EnvContext",
        "Share",
        "Term",
        "Stats",
        "DeviceProcess",
    ),
    *("ContainerEdits", "Mount", "Finding", "Product", "PciFunction", "DeviceNode", "CommandResult"),
)
"""The values that hooks take and return, in the order of the page."""


def values() -> Iterator[str]:
    """Yield the fields of the values that hooks take and return."""
    for name in VALUES:
        value = getattr(plugin, name)
        yield f"### {name}"
        yield escaped(described(value).partition("\n\n")[0].replace("\n", " "))
        rows = [
            f"| `{field}` | `{escaped(str(inspect.get_annotations(value).get(field, '')))}` |"
            f" {'required' if value._fields.get(field) is REQUIRED else ''} | {escaped(text)} |"
            for field, text in attributes(value)
        ]
        yield "\n".join(["| field | type | | |", "| --- | --- | --- | --- |", *rows])


def vendor_attributes() -> Iterator[str]:
    """Yield the attributes of a vendor of the kit."""
    rows = [f"| `{name}` | {escaped(text)} |" for name, text in attributes(kit.Vendor)]
    yield "\n".join(["| attribute | |", "| --- | --- |", *rows])


def vendor_methods() -> Iterator[str]:
    """Yield the methods of a vendor of the kit that may be overridden."""
    rows = [
        f"| `{name}{arguments(method)}` | {escaped(first_line(method))} |"
        for name, method in vars(kit.Vendor).items()
        if isinstance(method, (FunctionType, property)) and not name.startswith(("_", "anyaccel_"))
    ]
    yield "\n".join(["| method | |", "| --- | --- |", *rows])


def arguments(method: object) -> str:
    """Return the arguments of a method in parentheses, without ``self``; empty for a property."""
    return f"({', '.join([*inspect.signature(method).parameters][1:])})" if isinstance(method, FunctionType) else ""


def first_line(item: object) -> str:
    """Return the first line of a docstring."""
    return described(item).partition("\n")[0]


def described(item: object) -> str:
    """Return a docstring without indentation."""
    return inspect.getdoc(item) or ""


def attributes(item: object) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the section ``Attributes`` of a docstring, which may have blank lines."""
    section = described(item).partition("Attributes:\n")[2]
    for entry in re.split(r"\n(?= {4}\S)", f"\n{section}")[1:]:
        name, _, text = entry.strip().partition(": ")
        yield name, " ".join(text.split())


PARTS: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "commands": ("commands.md", commands),
    "common options": ("commands.md", common_options),
    "exit statuses": ("commands.md", exit_statuses),
    "errors": ("errors.md", error_table),
    "values": ("hooks.md", values),
    "vendor attributes": ("kit.md", vendor_attributes),
    "vendor methods": ("kit.md", vendor_methods),
}


def document_schema() -> dict[str, Any]:
    """Return the JSON schema of all documents."""
    definitions: dict[str, Any] = {}
    options = []
    for name, kind in document.KINDS.items():
        _describe(kind, definitions)
        own = definitions[kind.__name__]
        options.append({**own, "properties": {"schema": {"const": name}, **own["properties"]}})
        options[-1]["required"] = ["schema", *own["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "oneOf": options, "$defs": definitions}


def _describe(annotation: Any, definitions: dict[str, Any]) -> dict[str, Any]:  # noqa: PLR0911 - one for each kind
    """Return the schema of an encoded value with an annotation: see :func:`encode`."""
    origin: Any = getattr(annotation, "__origin__", None)
    arguments: Any = getattr(annotation, "__args__", ())
    if isinstance(annotation, UnionType):
        return {"anyOf": [_describe(option, definitions) for option in arguments]}
    if origin in (tuple, frozenset):
        described: dict[str, Any] = {"type": "array", "items": _describe(arguments[0], definitions)}
        if origin is tuple and arguments[-1] is not Ellipsis:
            described |= {"minItems": len(arguments), "maxItems": len(arguments)}
        return described
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


def pages() -> dict[Path, str]:
    """Return the text of each page.

    Raises:
        SystemExit: When a page lacks the place for a part.
    """
    texts: dict[Path, str] = {}
    for name, (file, write) in PARTS.items():
        path = REFERENCE / file
        text = texts.get(path) or path.read_text(encoding="utf-8")
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"{path} must have one place for {name!r}, between {begin.strip()} and {end}")
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        texts[path] = "\n".join([before + begin, *(f"{block}\n" for block in write()), end + after])
    texts[REFERENCE / "documents.schema.json"] = json.dumps(document_schema(), indent=2) + "\n"
    return texts


if __name__ == "__main__":
    for page, content in pages().items():
        page.write_text(content, encoding="utf-8")
