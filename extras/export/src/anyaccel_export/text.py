"""Names and values in other programs' notations; unsupported characters are replaced, never dropped silently."""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anyaccel.errors import UsageError
from anyaccel.model import Device, EnvEdits
from anyaccel.shell import shell_quote
from anyaccel.text import printable, shown

_LONGEST_COMMENT = 200
_PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_RESERVED = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}  # other types than text in YAML 1.1


def slug(text: str, allowed: str = "a-z0-9", fill: str = "-") -> str:
    """Replace characters that a target does not accept in a name, and begin and end with a letter or digit.

    Args:
        text: The name; made lower case if no upper-case letter is allowed.
        allowed: The accepted characters, as within brackets of a regular expression.
        fill: Replacement of a run of other characters.
    """
    text = text if "A-Z" in allowed else text.lower()
    return re.sub(rf"[^{allowed}]+", fill, text).strip("-_.:/") or "x"


def unique_names(ids: Iterable[str], *, allowed: str, most: int) -> dict[str, str]:
    """Make a name for each id, independent of other devices, unless two ids would get the same name.

    Args:
        ids: Different ids.
        allowed: The accepted characters.
        most: Length of the longest accepted name.
    """
    names = {item: slug(item, allowed) for item in ids}
    seen = Counter(names.values())
    return {
        item: name if seen[name] == 1 and len(name) <= most else f"{name[: most - 9]}-{_checksum(item)}"
        for item, name in names.items()
    }


def _checksum(text: str) -> str:
    """Return eight hexadecimal digits for a text, which may have lone surrogates: bytes that are no UTF-8."""
    return f"{zlib.crc32(text.encode(errors='surrogatepass')):08x}"


def by_resource(devices: Iterable[Device]) -> dict[str, list[Device]]:
    """Group devices by resource, in order; of a device and its parts only the parts.

    On a node of Ray, slot i of a resource is the i-th of these devices, on the node as in the worker.
    """
    known = tuple(devices)
    divided = {device.parent for device in known}
    found: dict[str, list[Device]] = {}
    for device in known:
        if device.id not in divided:
            found.setdefault(device.resource, []).append(device)
    return found


def only_type(devices: Iterable[Device]) -> str:
    """Return the common type of devices, or ``mixed``: a target without a choice of devices must promise no type."""
    types = {device.type for device in devices}
    return types.pop() if len(types) == 1 else "mixed"


def comment(text: str) -> str:
    """Return text for a comment in any file: one line of ASCII, at most 200 characters.

    Parsers of configuration files limit the length of a line, and some take a backslash at the end for a continuation.
    """
    line = printable(text).replace("\\", "/").encode("ascii", "replace").decode()
    return line if len(line) <= _LONGEST_COMMENT else f"{line[: _LONGEST_COMMENT - 3]}..."


def shell_join(words: Iterable[str]) -> str:
    """Quote words for a POSIX shell, as one line.

    Raises:
        UsageError: When a word is not printable.
    """
    return " ".join(map(shell_quote, words))


def assignments(edits: EnvEdits) -> str:
    """Write edits as arguments of the command ``env``."""
    words = [f"--unset={name}" for name in sorted(edits.unset)]
    names = sorted(edits.set, key=lambda name: (name.startswith("ANYACCEL_"), name))  # the vendor's variables first
    return shell_join([*words, *(f"{name}={edits.set[name]}" for name in names)])


def quote(value: object) -> str:
    """Write a value with the same meaning in JSON, YAML and HCL, with escapes for characters that are not printable.

    Raises:
        UsageError: When a text has lone surrogates, which no such file may hold.
    """
    if not isinstance(value, str):
        return json.dumps(value)
    if any(0xD800 <= ord(char) <= 0xDFFF for char in value):  # noqa: PLR2004 -- surrogates
        raise UsageError(f"text must be Unicode to be exported (got {shown(value)})", hint="rename what has this name")
    return '"' + "".join(map(_escape, value)) + '"'


def _escape(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}" if ord(char) <= 0xFFFF else f"\\U{ord(char):08x}"  # noqa: PLR2004 -- four digits


def to_yaml(value: Mapping[str, Any] | Sequence[Any], indent: str = "") -> str:
    """Write mappings, sequences and scalars as YAML. Strings are quoted, so that YAML reads no other type.

    Args:
        value: The value.
        indent: Prefix of each line.
    """
    if isinstance(value, Mapping):
        return "".join(f"{indent}{_key(name)}:{_entry(item, indent)}" for name, item in value.items())
    return "".join(f"{indent}-{_entry(item, indent, first=True)}" for item in value)


def _entry(item: Any, indent: str, *, first: bool = False) -> str:
    if not isinstance(item, (Mapping, list, tuple)):
        return f" {quote(item)}\n"
    if not item:
        return " {}\n" if isinstance(item, Mapping) else " []\n"
    block = to_yaml(item, f"{indent}  ")
    return f" {block[len(indent) + 2 :]}" if first else f"\n{block}"


def _key(name: str) -> str:
    return name if _PLAIN_KEY.fullmatch(name) and name.lower() not in _RESERVED else quote(name)
