"""Detection of a hook's side effects: opened files, started processes, loaded libraries, changed state."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, Self, TextIO

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
"""Names or prefixes of audit events that mean access to the machine."""
SEEN_ELSEWHERE = ("os.putenv", "os.unsetenv", "os.chdir")
"""Events that change the process, not the machine: :func:`process_state` covers these."""
OURS = ("anyaccel", "pluggy")


class Watch:
    """Context that records side effects in this process, except imports of the standard library and the plug-in.

    A plug-in may read files of its own package, such as its catalog, at any time.

    Python cannot remove an audit hook, so a process with a watch should end soon.

    Attributes:
        events: Distinct side effects, each as a verb phrase for a message.
    """

    def __init__(self, source: Source) -> None:
        self.events: list[str] = []
        self._source = source
        self._on = False
        sys.addaudithook(self._receive)

    def __enter__(self) -> Self:
        self._on = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._on = False

    def _receive(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on:  # an audit hook hears every event of the process from now on
            return
        self._on = False  # the judgement itself opens files and imports modules
        try:
            self._judge(event, arguments)
        finally:
            self._on = True

    def _judge(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import":
            found = list_foreign_modules([str(arguments[0])], self._source)
            text = f"imports {found[0]}" if found else ""
        elif event == "open" and self._is_own(arguments[0]):
            return
        elif event.startswith(EVENTS) and event not in SEEN_ELSEWHERE and not _is_importing(sys._getframe()):  # noqa: SLF001
            text = f"causes {event}({', '.join(f'{argument!r:.60}' for argument in arguments[:2])})"
        else:
            return
        if text and text not in self.events:
            self.events.append(text)

    def _is_own(self, path: object) -> bool:
        """Return True if a file lies in the plug-in's package."""
        package = sys.modules.get(self._source.target.partition(":")[0].partition(".")[0])
        folders = [os.path.join(os.path.abspath(folder), "") for folder in getattr(package, "__path__", ())]
        return isinstance(path, str) and os.path.abspath(path).startswith(tuple(folders))


def _is_importing(frame: FrameType | None) -> bool:
    """Return True inside the import machinery: a lazy import in a hook opens and lists files too."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def list_foreign_modules(names: Iterable[str], source: Source) -> list[str]:
    """Return the top-level modules of third parties: not of Python, anyaccel or the plug-in's distribution."""
    own = {*OURS, source.target.partition(":")[0].partition(".")[0]}
    tops = sorted({name.partition(".")[0] for name in names} - own - sys.stdlib_module_names)
    tops = [name for name in tops if not name.startswith("_")]
    if not tops or not source.distribution:
        return tops
    from importlib.metadata import packages_distributions

    shipped_by = packages_distributions()
    return [name for name in tops if source.distribution not in shipped_by.get(name, [])]


def read_process_state() -> dict[str, Any]:
    """Return the process-wide state that a hook must not change, by name, in comparable form."""
    import locale
    import logging
    import resource
    import signal
    import threading

    flush_output()
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "the environment (os.environ)": dict(os.environ),
        "the working directory": os.getcwd(),
        "the umask": _read_umask(),
        "signal handlers": {int(number): signal.getsignal(number) for number in signal.valid_signals()},
        "blocked signals": sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        # The time left is another one at each look.
        "the alarm": signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0),
        "resource limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "the priority": os.getpriority(os.PRIO_PROCESS, 0),
        "the process group": os.getpgrp(),
        "the recursion limit": sys.getrecursionlimit(),
        "the trace function": sys.gettrace(),
        "open standard streams": [is_open(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "open file descriptors": dict(_list_descriptors()),
        # A library may start threads that Python does not know, so the kernel is asked as well.
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "kernel threads": len(os.listdir("/proc/self/task")),
        "child processes": sorted(process.children(os.getpid())),
        "the module path (sys.path)": list(sys.path),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the handlers of the root logger": list(logging.getLogger().handlers),
        "the exception hook": sys.excepthook,
        "what was printed": [_count_printed(number) for number in (1, 2)],
    }


def is_open(stream: TextIO | None) -> bool:
    """Return True if a standard stream is there and was not closed."""
    return stream is not None and not stream.closed


def flush_output() -> None:
    """Write what is buffered for standard output and error, as far as a plug-in has left these open."""
    for stream in (sys.stdout, sys.stderr):
        if is_open(stream):
            stream.flush()


def find_changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield the differences between two process states."""
    for name, value in before.items():
        if value != after[name]:
            yield f"{name}: {_format_difference(value, after[name])}"


def _format_difference(before: Any, after: Any) -> str:
    if isinstance(before, dict):
        names = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        return ", ".join(f"{key}={after.get(key, 'gone')!r:.60}" for key in names[:3])
    return f"{before!r:.60} became {after!r:.60}"


def _read_umask() -> int:
    mask = os.umask(0o22)  # the only way to read it is to set it
    os.umask(mask)
    return mask


def _list_descriptors() -> Iterator[tuple[int, str]]:
    for number in list_descriptors():
        try:
            yield number, os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the descriptor that listed the directory is closed by now
            continue


def _count_printed(descriptor: int) -> int:
    """Return the bytes written to a descriptor so far; 0 if not a regular file."""
    import stat

    status = os.fstat(descriptor)
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
