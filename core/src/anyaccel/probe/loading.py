"""Read and check the files of a recording, from any source, so that no other module has to check them.

A file that is not regular, too large, no JSON, or not of the form in :mod:`anyaccel.probe.recording` is refused in one
message, which names the place, the rule and the value.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import posixpath
import re
import stat
from collections.abc import Iterator, Mapping
from functools import lru_cache

from anyaccel.errors import MachineError
from anyaccel.model import Value, field
from anyaccel.model.wire import read
from anyaccel.text import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal

SCHEMA = "anyaccel.recording/1"
FILE_NAME = "machine.json"
WAY_OUT = "correct the file, or record the machine again, into a new directory: anyaccel record DIR"

LARGEST = 32 << 20
"""Most bytes of a file. Recordings of plug-ins have 6 KB to 140 KB."""
LONGEST_PATH = 4096
MOST_PARTS = 64
"""Most directories in a path."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

KEPT = 8
"""Recordings that are kept in memory: each call for a machine needs its recording, and a parse takes 0.4 ms or more."""


class RecordedPath(Value):
    """The entry of a path; see :mod:`anyaccel.probe.recording`, as for the classes that follow."""

    text: str = ""
    link: str = ""
    dir: bool = False
    char: tuple[int, int] = (0, 0)
    block: tuple[int, int] = (0, 0)
    access: Literal["", "r", "w", "rw"] = "rw"
    group: int = 0
    errno: str = ""


class RecordedCommand(Value):
    """The result of a command."""

    argv: tuple[str, ...]
    returncode: int = 0
    stdout: str = ""
    stderr: str = ""
    timeout: bool = False


class RecordedError(Value):
    """The exception of a query."""

    kind: str
    message: str
    value: int | None = None


class RecordedAnswer(Value):
    """The answer of a query, which is any JSON data, or an exception."""

    value: object = None
    error: RecordedError | None = None


class RecordingParts(Value):
    """The parts of a recording."""

    environ: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, RecordedPath] = field(default_factory=dict)
    commands: tuple[RecordedCommand, ...] = ()
    queries: Mapping[str, RecordedAnswer] = field(default_factory=dict)


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
    parts = {name: recording[name] for name in ("environ", "paths", "commands", "queries") if name in recording}
    value, faults = read(RecordingParts, parts, "recording")
    fault = next(iter(faults) if faults else _rule_faults(value), None)
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
            JSON of whole Unicode text.
    """
    try:
        text = _read(path).decode()
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # refuses halves of a character
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise MachineError(f"{path} cannot be read: {reason}", hint=way_out) from error
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
        raise ValueError(f"it must be a regular file (its mode is {stat.filemode(found.st_mode)})")
    if not 0 < found.st_size <= LARGEST:
        raise ValueError(f"it must have from 1 to {LARGEST} bytes (got {found.st_size})")


def _rule_faults(parts: RecordingParts) -> Iterator[str]:
    """Yield the faults of parts whose values have the right types."""
    for name, text in parts.environ.items():
        if not name or "=" in name or "\0" in name + text:
            yield f"a variable must have a name without '=', and no NUL (got {shown(f'{name}={text}')})"
    for path, entry in parts.paths.items():
        if not path.startswith("/") or "\0" in path or plain(path) != path or not _is_short(path):
            yield f"a path must be absolute, without '.', '..', '//' and NUL, and of a usual length (got {shown(path)})"
        if "\0" in entry.link or not _is_short(entry.link):
            yield f"the link {shown(path)} must have a target without NUL, of a usual length (got {shown(entry.link)})"
        if min(*entry.char, *entry.block, entry.group) < 0:
            yield f"the numbers of {shown(path)} must be 0 or more (got {shown(entry)})"
        if entry.errno and not (re.fullmatch("E[A-Z0-9]+", entry.errno) and hasattr(errno, entry.errno)):
            yield f"'errno' of {shown(path)} must be the name of an error such as EACCES (got {shown(entry.errno)})"
    for command in parts.commands:
        if not command.argv or "\0" in "".join(command.argv):
            yield f"a command must have 'argv', the program first, without NUL (got {shown(command.argv)})"


def _is_short(path: str) -> bool:
    return len(path) <= LONGEST_PATH and path.count("/") <= MOST_PARTS


def plain(path: str) -> str:
    """Return an absolute path in the normal form of recordings: one name for each place."""
    if "/." not in path and "//" not in path and not path.endswith("/"):
        return path
    return f"/{posixpath.normpath(path).lstrip('/')}"
