"""See what a hook does beside its work: files opened, processes started, libraries loaded, state changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, Self

from anyaccel.linux import list_descriptors, process
from anyaccel.vendors import Source

EVENTS = (
    "open",
    "ctypes.dlopen",
    "fcntl.",
    "glob.glob",
    "mmap.",
    "os.",
    "pty.spawn",
    "shutil.",
    "socket.",
    "sqlite3.",
    "subprocess.",
    "tempfile.",
    "time.sleep",
    "urllib.",
)
"""Audit events, or the beginnings of their names, that tell of the machine being touched."""
SEEN_ELSEWHERE = ("os.putenv", "os.unsetenv", "os.chdir")
"""Events that change the process rather than touch the machine: :func:`process_state` tells of them."""
OURS = ("anyaccel", "pluggy")


class Watch:
    """What happens in this process while the watch is on, beside imports of the standard library and of the plug-in.

    Files in the plug-in's own package, such as its catalog, may be read at any time.

    Audit hooks stay for good, so a process that had a watch should end soon.

    Attributes:
        events: What happened, each once, in words that continue a sentence.
    """

    def __init__(self, source: Source) -> None:
        self.events: list[str] = []
        self._source = source
        self._on = False
        sys.addaudithook(self._hear)

    def __enter__(self) -> Self:
        self._on = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._on = False

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on:
            return
        self._on = False  # what we do ourselves does not count
        try:
            self._judge(event, arguments)
        finally:
            self._on = True

    def _judge(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import":
            found = foreign_modules([str(arguments[0])], self._source)
            text = f"imports {found[0]}" if found else ""
        elif event == "open" and self._is_own(arguments[0]):
            return
        elif event.startswith(EVENTS) and event not in SEEN_ELSEWHERE and not _importing(sys._getframe()):  # noqa: SLF001
            text = f"causes {event}({', '.join(f'{argument!r:.60}' for argument in arguments[:2])})"
        else:
            return
        if text and text not in self.events:
            self.events.append(text)

    def _is_own(self, path: object) -> bool:
        """Whether a file lies in the plug-in's package."""
        package = sys.modules.get(self._source.target.partition(":")[0].partition(".")[0])
        folders = [os.path.join(os.path.abspath(folder), "") for folder in getattr(package, "__path__", ())]
        return isinstance(path, str) and os.path.abspath(path).startswith(tuple(folders))


def _importing(frame: FrameType | None) -> bool:
    """Whether the interpreter's own import machinery is at work: a lazy import inside a hook reads its file."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def foreign_modules(names: Iterable[str], source: Source) -> list[str]:
    """Top-level modules that belong neither to Python, nor to anyaccel, nor to the plug-in's own distribution."""
    own = {*OURS, source.target.partition(":")[0].partition(".")[0]}
    tops = sorted({name.partition(".")[0] for name in names} - own - sys.stdlib_module_names)
    tops = [name for name in tops if not name.startswith("_")]
    if not tops or not source.distribution:
        return tops
    from importlib.metadata import packages_distributions

    shipped_by = packages_distributions()
    return [name for name in tops if source.distribution not in shipped_by.get(name, [])]


def process_state() -> dict[str, Any]:
    """What a hook must leave as it found it, by name, in forms that can be compared and shown."""
    import locale
    import logging
    import signal
    import threading

    sys.stdout.flush()
    sys.stderr.flush()
    return {
        "the environment (os.environ)": dict(os.environ),
        "the working directory": os.getcwd(),
        "the umask": _umask(),
        "signal handlers": {int(number): signal.getsignal(number) for number in signal.valid_signals()},
        "open file descriptors": dict(_descriptors()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "kernel threads": len(os.listdir("/proc/self/task")),
        "child processes": sorted(process.children(os.getpid())),
        "the module path (sys.path)": list(sys.path),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the handlers of the root logger": list(logging.getLogger().handlers),
        "the exception hook": sys.excepthook,
        "what was printed": [_printed(number) for number in (1, 2)],
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Say what differs between two states of the process."""
    for name, value in before.items():
        if value != after[name]:
            yield f"{name}: {_difference(value, after[name])}"


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, dict):
        names = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        return ", ".join(f"{key}={after.get(key, 'gone')!r:.60}" for key in names[:3])
    return f"{before!r:.60} became {after!r:.60}"


def _umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def _descriptors() -> Iterator[tuple[int, str]]:
    for number in list_descriptors():
        try:
            yield number, os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the one that lists the directory
            continue


def _printed(descriptor: int) -> int:
    """Bytes written to a file so far; what is no file cannot tell."""
    import stat

    status = os.fstat(descriptor)
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
