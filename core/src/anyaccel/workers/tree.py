"""The processes that a process started, and signals for exactly those."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator


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


def send(pid: int, parent: int, number: signal.Signals) -> bool:
    """Signal a process that was seen as the child of another, unless it is not any more.

    Between the look and the signal its id may have gone to a stranger, so the process is pinned by a descriptor first
    and looked at again.

    Returns:
        Whether there was such a process.
    """
    try:
        pinned = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if parent_of(pid) != parent:
            return False
        signal.pidfd_send_signal(pinned, number)
    except OSError:  # it has gone, or has become another user's
        return False
    finally:
        os.close(pinned)
    return True


def send_all(pids: Iterable[tuple[int, int]], number: signal.Signals = signal.SIGKILL) -> int:
    """Signal every one of some processes, given with their parents; returns how many there were."""
    return sum([send(pid, parent, number) for pid, parent in pids])


def parent_of(pid: int) -> int | None:
    """The parent of a process, or None when there is no such process."""
    fields = status_fields(pid)
    return int(fields[1]) if fields else None


def status_fields(pid: int) -> list[str]:
    """State, parent and so on of a process as ``/proc/PID/stat`` has them after its name; empty when it has gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()
    return []


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())
