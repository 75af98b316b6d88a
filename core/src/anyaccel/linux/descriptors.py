"""Descriptors that processes have open, what they are of, and the locks that they carry."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from anyaccel.linux.process import UNSEEN

_LOOKS_AT_LOCKS = 5
_HARMLESS_MAJORS = {1, 4, 5, 136, 137, 138, 139, 140, 141, 142, 143}
"""Memory, consoles and terminals: all other character devices are hardware."""
_MEMORY = ("/dev/shm/", "/dev/zero")  # noqa: S108 - nothing is written there


def list_descriptors(pid: int | str = "self") -> list[int]:
    """Numbers of what a process has open; one of its own, which listed them, is closed by now.

    Raises:
        OSError: When it has ended, or we may not look into it.
    """
    return list(map(int, os.listdir(f"/proc/{pid}/fd")))


def open_files(files: set[tuple[int, int]], pid: int | None = None) -> Iterator[tuple[int, int]]:
    """Descriptors, by process id and number, of some files by device number and inode.

    Args:
        files: The files.
        pid: The process that is looked at; None for all that this process may look into.
    """
    pids = filter(str.isdigit, os.listdir("/proc")) if pid is None else (str(pid),)
    for each in pids if files else ():
        try:
            numbers = list_descriptors(each)
        except UNSEEN:
            continue
        for descriptor in numbers:
            try:
                found = os.stat(f"/proc/{each}/fd/{descriptor}")
            except OSError:
                continue
            if (found.st_dev, found.st_ino) in files:
                yield int(each), descriptor


def has_lock(pid: int | str, descriptor: int | str, *, shared: bool = False) -> bool:
    """Whether a descriptor of a process carries a lock: ``/proc/PID/fdinfo`` lists those of its open file.

    A descriptor that was opened to look at a file has none, or a shared one for a moment.

    Args:
        pid: The process.
        descriptor: The descriptor.
        shared: Whether a shared lock counts, too.
    """
    kinds = ({"FLOCK", "WRITE"}, {"FLOCK", "READ"})[: 1 + shared]
    try:
        with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii") as info:
            locks = [set(line.split()) for line in info if line.startswith("lock:")]
    except UNSEEN:
        return False
    return any(kind <= lock for kind in kinds for lock in locks)


def lock_owner(file: os.stat_result) -> int | None:
    """Process that took the exclusive lock on a file, by the kernel's table of locks; None when none is visible.

    The kernel hands out a long table in parts, and skips a lock when others of an earlier part are dropped in between:
    so who finds none looks again.
    """
    wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    for _ in range(_LOOKS_AT_LOCKS):
        try:
            with open("/proc/locks", encoding="ascii") as table:
                lines = [line.split() for line in table]
        except OSError:
            return None
        owners = [int(fields[4]) for fields in lines if fields[1] == "FLOCK" and fields[5] == wanted]
        if pid := next((pid for pid in owners if pid > 0), None):
            return pid
    return None


def touched_devices() -> list[str]:
    """Return the hardware that this process has open or mapped, by path: a fork would share it with the child."""
    found = set()
    for descriptor in list_descriptors():
        try:
            status = os.stat(f"/proc/self/fd/{descriptor}")
            if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) not in _HARMLESS_MAJORS:
                found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue
    return sorted(found | {path for path in _mapped() if path.startswith("/dev/") and not path.startswith(_MEMORY)})


def _mapped() -> set[str]:
    with open("/proc/self/maps") as file:
        return {line[line.index("/") :].strip() for line in file if "/" in line}
