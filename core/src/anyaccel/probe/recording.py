"""Record the facts of a detection, and replay recordings.

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

A fact that is not in the file does not exist on the recorded machine. :mod:`anyaccel.probe.loading` reads the file.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from anyaccel.errors import CommandTimeoutError, QueryError
from anyaccel.probe.context import CommandResult, DeviceNode, Facts, Json
from anyaccel.probe.host import natural
from anyaccel.probe.loading import SCHEMA, plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Entry = dict[str, Any]


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
        root, *parts = pattern.split("/")
        found = [root]
        for part in parts:
            found = [f"{above}/{name}" for above in found for name in _matching(self._inside.get(above, ()), part)]
        return sorted(found, key=natural)

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


def _matching(names: Collection[str], part: str) -> list[str]:
    """Return the names that a part of a pattern matches. A pattern is compiled, so that a plain name is dearer."""
    if glob.has_magic(part):
        return fnmatch.filter(names, part)
    return [part] if part in names else []


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
        commands += [entry for entry in recording["commands"] if entry not in commands]
        queries |= recording["queries"]
    return {
        "schema": SCHEMA,
        "environ": dict(sorted(environ.items())),
        "paths": dict(sorted(paths.items(), key=lambda item: natural(item[0]))),
        "commands": commands,
        "queries": dict(sorted(queries.items())),
    }
