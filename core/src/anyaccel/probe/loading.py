"""Read and check the files of a recording, from any source, so that no other module has to check them.

A file that is not regular, too large, no JSON, or not of the form in :mod:`anyaccel.probe.recording` is refused in one
message, which names the place, the rule and the value.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import posixpath
import re
import stat
from collections.abc import Callable, Iterator
from functools import lru_cache

from anyaccel.errors import MachineError
from anyaccel.text import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Rule = tuple[str, Callable[[Any], bool]]
    """The rule of a value in words, and its check."""

SCHEMA = "anyaccel.recording/1"
FILE_NAME = "machine.json"
PARTS: dict[str, type] = {"environ": dict, "paths": dict, "commands": list, "queries": dict}
WAY_OUT = "correct the file, or record the machine again, into a new directory: anyaccel record DIR"

LARGEST = 32 << 20
"""Most bytes of a file. Recordings of plug-ins have 6 KB to 140 KB."""
DEEPEST = 32
"""Most levels of nested values."""
LONGEST_PATH = 4096
MOST_PARTS = 64
"""Most directories in a path."""
INTEGERS = range(-(1 << 63), 1 << 64)

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)

KEPT = 8
"""Recordings that are kept in memory: each call for a machine needs its recording, and a parse takes 0.4 ms or more."""


def load(path: str) -> dict[str, Any]:
    """Read a recording; the last eight are kept while their files do not change, so callers must not change them.

    Raises:
        MachineError: When the file cannot be read, or is no recording.
    """
    state: tuple[int, ...] = ()
    with contextlib.suppress(OSError):  # the read below reports the error
        status = os.stat(path)
        state = status.st_ino, status.st_size, status.st_mtime_ns
    return _load(path, state)


@lru_cache(maxsize=KEPT)
def _load(path: str, _: tuple[int, ...]) -> dict[str, Any]:
    recording = read_json(path, WAY_OUT)
    found = recording.get("schema") if isinstance(recording, dict) else None
    if found != SCHEMA:
        raise MachineError(f'{path} must say "schema": "{SCHEMA}" (got {shown(found)})', hint=WAY_OUT)
    fault = next(_faults(recording), None)
    if fault is not None:
        raise MachineError(f"{path} is no recording: {fault}", hint=WAY_OUT)
    checked: dict[str, Any] = recording
    return checked


def read_json(path: str, way_out: str) -> Any:
    """Read a JSON file from any source, without ever blocking.

    Args:
        path: Path of a regular file, or of a link to one.
        way_out: The way out for the error message.

    Raises:
        MachineError: When the path is no regular file, the file is empty or larger than 32 MiB, or its content is not
            JSON of finite numbers, whole Unicode text and unique names, at most 32 levels deep.
    """
    try:
        data = _read(path)
        text = data.decode()
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_no_number,
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # refuses halves of a character
        _check_depth(value)
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror}", hint=way_out) from error
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is 0x{data[error.start]:02x}"
        raise MachineError(f"{path} must be UTF-8 ({reason})", hint=way_out) from error
    except UnicodeEncodeError as error:
        reason = f"it holds {error.object[error.start]!a}, half a character"
        raise MachineError(f"{path} must hold Unicode text ({reason})", hint=way_out) from error
    except RecursionError as error:
        raise MachineError(f"{path} must be at most {DEEPEST} levels deep (got more)", hint=way_out) from error
    except ValueError as error:
        raise MachineError(f"{path} cannot be read: {error}", hint=way_out) from error
    return value


def _read(path: str) -> bytes:
    """Read a regular file of limited size.

    Files of the kernel (``/proc``, ``/sys``) claim to be regular, and may block; their size is 0, so they are refused.
    """
    _check_regular(os.stat(path))  # before open(2), which has effects on some devices
    # The path may have become a FIFO or a terminal since the check.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    with open(descriptor, "rb") as file:
        _check_regular(os.fstat(descriptor))
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"it must have at most {LARGEST} bytes (got more)")
    return data


def _check_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(found.st_mode)), "something else")
        raise ValueError(f"it must be a regular file (got {kind})")
    if not 0 < found.st_size <= LARGEST:
        raise ValueError(f"it must have from 1 to {LARGEST} bytes (got {found.st_size})")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # readers differ in which of two equal names counts
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"every name must stand once in an object (got {shown(twice)} twice)")
    return found


def _integer(text: str) -> int:
    # The length first: int() of a million digits takes minutes.
    if len(text) > len(str(INTEGERS[0])) or int(text) not in INTEGERS:
        raise ValueError(f"an integer must have at most 64 bits (got {text:.40}{'...' * (len(text) > 40)})")  # noqa: PLR2004
    return int(text)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"a number must be finite (got {text:.40})")
    return number


def _no_number(text: str) -> None:
    raise ValueError(f"a number must be finite (got {text})")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST + 1):  # level by level, since a recursion could overflow the stack
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise RecursionError


def _faults(recording: dict[str, Any]) -> Iterator[str]:
    """Yield the faults of a recording's parts, each with its place."""
    parts = {name: recording.get(name, kind()) for name, kind in PARTS.items()}
    for name, kind in PARTS.items():
        if not isinstance(parts[name], kind):
            yield f"{name!r} must be {'an object' if kind is dict else 'a list'} (got {shown(parts[name])})"
            return
    for name, value in parts["environ"].items():
        if not name or "=" in name or "\0" in name:
            yield f"a variable of 'environ' must have a name without '=' and NUL (got {shown(name)})"
        yield from _wrong(value, _TEXT, f"the variable {shown(name)}")
    for path, entry in parts["paths"].items():
        yield from _wrong(path, _PATH, "a path")
        yield from _entry_faults(entry, _OF_A_PATH, f"the path {shown(path)}")
    for number, entry in enumerate(parts["commands"]):
        yield from _entry_faults(entry, _OF_A_COMMAND, f"command {number}", "argv")
    for name, answer in parts["queries"].items():
        where = f"the query {shown(name)}"
        yield from _entry_faults(answer, _OF_A_QUERY, where)
        if isinstance(answer, dict) and len(answer) != 1:
            yield f"{where} must have either 'value' or 'error' (got {shown(answer)})"


def _entry_faults(entry: Any, rules: dict[str, Rule], where: str, needed: str = "") -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"{where} must be an object (got {shown(entry)})"
        return
    if needed and needed not in entry:
        yield f"{where} must have {needed!r} (got {shown(entry)})"
    for key, value in entry.items():
        if key not in rules:
            yield f"{where} must have no keys but {', '.join(map(repr, rules))} (got {shown(key)})"
        else:
            yield from _wrong(value, rules[key], f"{key!r} of {where}")


def _wrong(value: Any, rule: Rule, where: str) -> Iterator[str]:
    said, fits = rule
    if not fits(value):
        yield f"{where} must be {said} (got {shown(value)})"


def _is_path(value: str) -> bool:
    return value.startswith("/") and "\0" not in value and plain(value) == value and _is_short(value)


def _is_short(path: str) -> bool:
    return len(path) <= LONGEST_PATH and path.count("/") <= MOST_PARTS


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(part) is int and part >= 0 for part in value)  # noqa: PLR2004


def _is_errno(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"E[A-Z0-9]+", value) is not None and hasattr(errno, value)


def _is_error(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() <= {"kind", "message", "value"}
        and isinstance(value.get("kind"), str)
        and isinstance(value.get("message"), str)
        and isinstance(value.get("value"), (int, type(None)))
    )


_TEXT: Rule = ("a text without NUL", _is_text)
_OUTPUT: Rule = ("a text", lambda value: isinstance(value, str))
_FLAG: Rule = ("true or false", lambda value: isinstance(value, bool))
_NUMBERS: Rule = ("the major and the minor number", _are_numbers)
_PATH: Rule = ("absolute, without '.', '..', '//' and NUL, and of a usual length", _is_path)
_OF_A_PATH: dict[str, Rule] = {
    "text": _OUTPUT,
    "link": ("the target of a link", lambda value: _is_text(value) and value != "" and _is_short(value)),
    "dir": _FLAG,
    "char": _NUMBERS,
    "block": _NUMBERS,
    "access": ("'', 'r', 'w' or 'rw'", lambda value: value in ("", "r", "w", "rw")),
    "group": ("the number of a group", lambda value: type(value) is int and 0 <= value < 1 << 32),
    "errno": ("the name of an error such as EACCES", _is_errno),
}
_OF_A_COMMAND: dict[str, Rule] = {
    "argv": (
        "a list of texts, the program first",
        lambda value: isinstance(value, list) and value != [] and all(map(_is_text, value)),
    ),
    "returncode": ("an integer", lambda value: type(value) is int),
    "stdout": _OUTPUT,
    "stderr": _OUTPUT,
    "timeout": _FLAG,
}
_OF_A_QUERY: dict[str, Rule] = {
    "value": ("", lambda _: True),
    "error": ("an object with the texts 'kind' and 'message' and perhaps the integer 'value'", _is_error),
}


def plain(path: str) -> str:
    """Return an absolute path in the normal form of recordings: one name for each place."""
    if "/." not in path and "//" not in path and not path.endswith("/"):
        return path
    return f"/{posixpath.normpath(path).lstrip('/')}"
