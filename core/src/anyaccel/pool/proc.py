"""Processes as the kernel knows them: what is told to it of ours, what descends from one, how one ended."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Iterable, Iterator

from anyaccel.ledger.process import descriptors, send, stat_fields

_HARMLESS_MAJORS = {1, 4, 5, 136, 137, 138, 139, 140, 141, 142, 143}
"""Memory, consoles and terminals: all other character devices are hardware."""

_MEMORY = ("/dev/shm/", "/dev/zero")  # noqa: S108 - nothing is written there


def touched_devices() -> list[str]:
    """Hardware that this process has open or mapped, by path: a fork would share it with the child."""
    found = set()
    for descriptor in descriptors():
        try:
            status = os.stat(f"/proc/self/fd/{descriptor}")
            if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) not in _HARMLESS_MAJORS:
                found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue
    return sorted(found | {path for path in _mapped() if path.startswith("/dev/") and not path.startswith(_MEMORY)})


def threads() -> list[str]:
    """Names of the threads of this process, the first one first."""
    found = []
    for thread in sorted(map(int, os.listdir("/proc/self/task"))):
        with open(f"/proc/self/task/{thread}/comm") as file:
            found.append(file.read().strip())
    return found


def _mapped() -> set[str]:
    with open("/proc/self/maps") as file:
        return {line[line.index("/") :].strip() for line in file if "/" in line}


def children(pid: int) -> list[int]:
    """The living and the dead but unreaped children of a process; empty when it has gone itself."""
    if not os.path.exists(f"/proc/self/task/{threading.get_native_id()}/children"):
        return [other for other in _processes() if parent_of(other) == pid]  # a kernel built without these files
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found.extend(map(int, file.read().split()))
    return found


def descendants(pid: int) -> Iterator[tuple[int, int]]:
    """Everything below a process, with the parent of each, parents first."""
    for child in children(pid):
        yield child, pid
        yield from descendants(child)


def signal_one(pid: int, parent: int, number: signal.Signals) -> bool:
    """Signal a process that was seen as the child of another, unless it is not any more; whether it was."""
    return send(pid, number, lambda: parent_of(pid) == parent)


def signal_all(pids: Iterable[tuple[int, int]], number: signal.Signals = signal.SIGKILL) -> int:
    """Signal every one of some processes, given with their parents; returns how many there were."""
    return sum([signal_one(pid, parent, number) for pid, parent in pids])


def parent_of(pid: int) -> int | None:
    """The parent of a process, or None when there is no such process."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else None


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def ending(status: int | None) -> str:
    """Say how a process with this exit status ended; negative numbers are signals."""
    if status is None:
        return "ended"
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"
