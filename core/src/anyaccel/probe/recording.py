"""Record the facts of a detection; read, check and replay recordings.

A recording is a directory with one file, ``machine.json``:

    {"schema": "anyaccel.recording/1",
     "environ": {"NAME": "value"},
     "paths": {"/sys/...": {"text": "..."}                     a file
               "/sys/...": {"link": "../target"}                a symbolic link
               "/dev/...": {"char": [195, 0], "access": "rw"}   a character device ("block": block), its "group"
               "/opt/...": {"dir": true}                        a directory; those above a path need no entry
               "/proc/..": {"errno": "EACCES"}}                 something that cannot be read
     "commands": [{"argv": ["tool", "-x"], "returncode": 0, "stdout": "...", "stderr": ""}
                  {"argv": ["tool"], "timeout": true}],
     "queries": {"library/question": {"value": ...}
                 "library/question": {"error": {"kind": "Class", "message": "...", "value": 9}}}}

A fact that is not in the file does not exist on the recorded machine. A file from any source is checked once, by
:func:`load`: one that is not regular, too large, no JSON, or not of this form is refused in one message, which names
the place, the rule and the value.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import posixpath
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from anyaccel.errors import CommandTimeoutError, MachineError, QueryError
from anyaccel.model import Value, field, read
from anyaccel.probe.context import CommandResult, DeviceNode, Facts, Json
from anyaccel.probe.paths import find_paths, natural
from anyaccel.text import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal

    Entry = dict[str, Any]

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
    """The entry of a path, in the form above, like the classes that follow."""

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


class RecordedFacts:
    """Facts of a recorded machine.

    Args:
        recording: A result of :func:`anyaccel.probe.loading.load`.
        environ: An environment in place of the recorded environment.
    """

    def __init__(self, recording: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> None:
        self.environ: Mapping[str, str] = recording.get("environ", {}) if environ is None else environ
        self._paths: dict[str, Entry] = dict(recording.get("paths", {}))
        self._commands = {tuple(entry["argv"]): entry for entry in recording.get("commands", [])}
        self._queries: dict[str, Entry] = dict(recording.get("queries", {}))
        self._inside: dict[str, set[str]] = {}
        """Names by directory."""
        for path in self._paths:  # the directories above a path exist without an entry
            directory = path
            while directory:
                directory, _, name = directory.rpartition("/")
                self._inside.setdefault(directory, set()).add(name)

    def read(self, path: str) -> str | None:
        entry = self._entry(self._resolve(path))
        text = entry.get("text") if entry else None
        return str(text) if text is not None else None

    def glob(self, pattern: str) -> list[str]:
        found = find_paths(pattern, lambda path: self._inside.get(path, ()))
        return [path for path in found if path in self._paths or path in self._inside]

    def readlink(self, path: str) -> str | None:
        path = plain(path)
        directory, _, name = path.rpartition("/")
        entry = self._paths.get(path) or self._paths.get(f"{self._resolve(directory)}/{name}")
        return entry.get("link") if entry else None

    def exists(self, path: str) -> bool:
        return any(known in self._paths or known in self._inside for known in (plain(path), self._resolve(path)))

    def is_dir(self, path: str) -> bool:
        path = self._resolve(path)
        return path in self._inside or bool(self._paths.get(path, {}).get("dir"))

    def node(self, path: str) -> DeviceNode | None:
        entry = self._entry(self._resolve(path))
        numbers = (entry.get("char") or entry.get("block")) if entry else None
        if not entry or not numbers:
            return None
        access = entry.get("access", "rw")
        return DeviceNode(
            path=path,
            major=numbers[0],
            minor=numbers[1],
            readable="r" in access,
            writable="w" in access,
            group=entry.get("group"),
        )

    def run(self, argv: Sequence[str], timeout: float) -> CommandResult | None:
        entry = self._commands.get(tuple(argv))
        if entry is None:
            return None
        if entry.get("timeout"):
            raise CommandTimeoutError(f"{argv[0]} did not end within {timeout:.1f} s and was killed")
        return CommandResult(
            returncode=entry.get("returncode", 0), stdout=entry.get("stdout", ""), stderr=entry.get("stderr", "")
        )

    def write(self, path: str, text: str) -> None:  # noqa: ARG002 - as the host has it
        raise PermissionError(errno.EPERM, "a recording cannot be changed", path)

    def query(self, name: str, fn: Callable[[], Json]) -> Json:  # noqa: ARG002 - replayed without a call
        answer = self._queries.get(name)
        if answer is None:
            raise QueryError("NotRecorded", f"{name}: the recording has no answer")
        if "error" in answer:
            error = answer["error"]
            raise QueryError(error["kind"], error["message"], error.get("value"))
        return answer.get("value")

    def _entry(self, path: str) -> Entry | None:
        entry = self._paths.get(path)
        if entry and "errno" in entry:
            number = getattr(errno, entry["errno"])
            raise OSError(number, os.strerror(number), path)
        return entry

    def _resolve(self, path: str) -> str:
        """Follow the links on a path as the kernel does; sysfs shows most devices through links."""
        path = plain(path)
        if "link" not in self._paths.get(path, {"link": ""}):
            return path
        for _ in range(40):  # the limit of the kernel, see path_resolution(7)
            link = next((part for part in [*_parents(path), path] if "link" in self._paths.get(part, {})), None)
            if link is None or (path != link and path in self._paths):
                return path
            target = os.path.join(os.path.dirname(link), self._paths[link]["link"])
            path = os.path.normpath(target + path[len(link) :])
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _parents(path: str) -> Iterator[str]:
    """Yield the directories above a path, the topmost first."""
    at = path.find("/", 1)
    while at > 0:
        yield path[:at]
        at = path.find("/", at + 1)


class Recorder:
    """A source of facts that records each fact."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.root = getattr(facts, "root", "")
        self.environ = RecordingEnviron(facts.environ)
        self.paths: dict[str, Entry] = {}
        self.commands: list[Entry] = []
        self.queries: dict[str, Entry] = {}

    def recording(self) -> dict[str, Any]:
        """Return the facts so far, in the form of ``machine.json``."""
        return {
            "schema": SCHEMA,
            "environ": dict(sorted(self.environ.asked.items())),
            "paths": {plain(path): self.paths[path] for path in sorted(self.paths, key=natural)},
            "commands": self.commands,
            "queries": dict(sorted(self.queries.items())),
        }

    def read(self, path: str) -> str | None:
        try:
            text = self._facts.read(path)
        except OSError as error:
            self.paths[path] = {"errno": errno.errorcode.get(error.errno or 0, "EIO")}
            raise
        if text is not None:
            self.paths.setdefault(path, {})["text"] = text  # keeps an empty entry of _look()
        return text

    def glob(self, pattern: str) -> list[str]:
        found = self._facts.glob(pattern)
        for path in found:
            self._look(path)
        return found

    def readlink(self, path: str) -> str | None:
        target = self._facts.readlink(path)
        if target is not None:
            self.paths[path] = {"link": target}
        return target

    def exists(self, path: str) -> bool:
        found = self._facts.exists(path)
        if found:
            self._look(path)
        return found

    def is_dir(self, path: str) -> bool:
        found = self._facts.is_dir(path)
        if found:
            self._look(path)
        return found

    def node(self, path: str) -> DeviceNode | None:
        node = self._facts.node(path)
        if node is not None:
            access = "r" * node.readable + "w" * node.writable
            group = {} if node.group is None else {"group": node.group}
            self.paths[path] = {"char": [node.major, node.minor], "access": access, **group}
        return node

    def run(self, argv: Sequence[str], timeout: float) -> CommandResult | None:
        try:
            result = self._facts.run(argv, timeout)
        except CommandTimeoutError:
            self.commands.append({"argv": list(argv), "timeout": True})  # the replay times out as well, at once
            raise
        if result is not None:
            entry = {"returncode": result.returncode, "stdout": result.stdout, "stderr": result.stderr}
            self.commands.append({"argv": list(argv), **entry})
        return result

    def write(self, path: str, text: str) -> None:  # noqa: ARG002 - as the host has it
        raise PermissionError(errno.EPERM, "a recording cannot be changed", path)

    def query(self, name: str, fn: Callable[[], Json]) -> Json:
        try:
            value = self._facts.query(name, fn)
        except QueryError as error:
            self.queries[name] = {"error": {"kind": error.kind, "message": str(error), "value": error.value}}
            raise
        self.queries[name] = {"value": value}
        return value

    def _look(self, path: str) -> None:
        """Record the existence and the type of a path."""
        if path in self.paths or self.node(path) is not None:
            return
        target = self._facts.readlink(path)
        if target is not None:
            self.paths[path] = {"link": target}
        elif self._facts.is_dir(path):
            self.paths[path] = {"dir": True}
        else:
            self.paths[path] = {}


class RecordingEnviron(Mapping[str, str]):
    """An environment that records which variables are read."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.asked: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        value = self._environ[name]
        self.asked[name] = value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._environ)

    def __len__(self) -> int:
        return len(self._environ)


def merge(recordings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the recordings of several plug-ins on one machine."""
    environ: dict[str, str] = {}
    paths: dict[str, Entry] = {}
    commands: list[Entry] = []
    queries: dict[str, Entry] = {}
    for recording in recordings:
        environ |= recording["environ"]
        for path, entry in recording["paths"].items():
            paths[path] = paths.get(path, {}) | entry  # one plug-in may have looked, and another one read
        for entry in recording["commands"]:  # a plug-in may ask the same twice, and two plug-ins as well
            if entry not in commands:
                commands.append(entry)
        queries |= recording["queries"]
    return {
        "schema": SCHEMA,
        "environ": dict(sorted(environ.items())),
        "paths": dict(sorted(paths.items(), key=lambda item: natural(item[0]))),
        "commands": commands,
        "queries": dict(sorted(queries.items())),
    }
