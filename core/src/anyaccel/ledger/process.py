"""Processes as the kernel knows them: a process id alone is only a label, since it is given out again."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

_ME: tuple[int, int] | None = None
_ahead: int | None = None


def exists(pid: int) -> bool:
    """Whether there is a process of this number here: the cheapest question; the number may be another's by now."""
    try:
        os.kill(max(pid, 0), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def me() -> tuple[int, int]:
    """Process id and start time of this process."""
    global _ME  # noqa: PLW0603 -- asked for by every lease, and reading /proc is dear
    pid = os.getpid()
    if _ME is None or _ME[0] != pid:
        _ME = (pid, start_time(pid) or 0)
    return _ME


def start_time(pid: int) -> int | None:
    """When a process was started, in ticks since the boot; None when there is none, or none that we may see.

    The number is the same for all who ask, also in a time namespace, where the kernel shifts what it says.
    """
    fields = _stat(pid)
    return int(fields[19]) - _ticks_ahead() if fields else None


def state(pid: int) -> str:
    """Letter of a process's state: ``R``, ``S``, ``D``, ``T`` for stopped, ``Z`` ...; empty when unknown."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def waits_in(pid: int) -> str:
    """Name of the kernel function that a process waits in; empty when it does not or we may not know."""
    try:
        with open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:
            name = file.read(128)
    except OSError:
        return ""
    return "" if name == "0" else name


def gone(pid: int, start: int) -> bool:
    """Whether a process has left the kernel, with all of its threads and all that it had open.

    Only the kernel's own answer counts: ``/proc`` calls a process a zombie as soon as its first thread has ended. In
    doubt it is not gone.

    Args:
        pid: Its id.
        start: Its start time; 0 when unknown.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # forbidden, or the number is that of a thread
        found = start_time(pid)
        return found is None or bool(start and found != start)
    try:
        found = start_time(pid)
        return bool(start and found is not None and found != start) or ended(descriptor)
    finally:
        os.close(descriptor)


def ended(pidfd: int) -> bool:
    """Whether the process of a process file descriptor has left the kernel."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def lock_owner(file: os.stat_result) -> int | None:
    """Process that took the exclusive lock on a file, by the kernel's table of locks; None when none is visible."""
    wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    try:
        with open("/proc/locks", encoding="ascii") as table:
            lines = [line.split() for line in table]
    except OSError:
        return None
    owners = [int(fields[4]) for fields in lines if fields[1] == "FLOCK" and fields[5] == wanted]
    return next((pid for pid in owners if pid > 0), None)


def carriers(files: set[tuple[int, int]]) -> Iterator[int]:
    """Processes that have one of some files open, by device number and inode; those that we may look into."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                found = os.stat(f"/proc/{pid}/fd/{descriptor}")
            except OSError:
                continue
            if (found.st_dev, found.st_ino) in files:
                yield int(pid)
                break


def _ticks_ahead() -> int:
    """How far the clock of this process's time namespace is ahead of the machine's; see ``time_namespaces(7)``."""
    global _ahead  # noqa: PLW0603 -- a process with an offset has it from its start
    if _ahead is None:
        _ahead = 0
        try:
            with open("/proc/self/timens_offsets", encoding="ascii") as file:
                offsets = {clock: (int(seconds), int(rest)) for clock, seconds, rest in map(str.split, file)}
            # The file tells of the namespace of our children, which is ours unless we have just asked for a new one.
            if os.readlink("/proc/self/ns/time") == os.readlink("/proc/self/ns/time_for_children"):
                seconds, nanoseconds = offsets["boottime"]
                _ahead = (seconds * 10**9 + nanoseconds) * os.sysconf("SC_CLK_TCK") // 10**9
        except (OSError, ValueError, KeyError):  # a kernel without time namespaces
            pass
    return _ahead


def _stat(pid: int) -> list[str]:
    """Fields of ``/proc/<pid>/stat`` from the third on; the second may contain anything."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode("ascii").split()
    except OSError:
        return []
