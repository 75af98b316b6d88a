"""Open file descriptors of processes: their files, and the locks on these."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping

from anyaccel.linux.process import UNSEEN

_LOOKS_AT_LOCKS = 5
_HARMLESS_MAJORS = {1, 4, 5, 136, 137, 138, 139, 140, 141, 142, 143}
"""Memory, consoles and terminals. Every other character device is hardware."""
_MEMORY = ("/dev/shm/", "/dev/zero")  # noqa: S108 - nothing is written there


def list_descriptors(pid: int | str = "self") -> list[int]:
    """Return the descriptors of a process, in no order; one of this process, opened for the listing, is closed by now.

    Args:
        pid: The process; ``"self"`` for this process.

    Raises:
        OSError: When the process has ended, or belongs to another user.
    """
    return list(map(int, os.listdir(f"/proc/{pid}/fd")))


def open_files(files: set[tuple[int, int]], pid: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield process id and descriptor of each open descriptor of the given files.

    Processes that have ended, or that this process may not inspect, are passed over.

    Args:
        files: The files, by device number and inode.
        pid: The process to look at; None for all processes that this process may inspect.

    Raises:
        OSError: When this process has no descriptor left to look.
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
    """Return whether a descriptor of a process holds a ``flock``; False if the descriptor cannot be inspected.

    A process that only inspects a lock file holds no lock, or a shared lock for a moment.

    Args:
        pid: The process.
        descriptor: The descriptor.
        shared: Whether a shared lock counts as an exclusive one does.
    """
    kinds = ({"FLOCK", "WRITE"}, {"FLOCK", "READ"})[: 1 + shared]
    try:
        with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="utf-8") as info:
            locks = [set(line.split()) for line in info if line.startswith("lock:")]
    except UNSEEN:
        return False
    return any(kind <= lock for kind in kinds for lock in locks)


def lock_owner(file: os.stat_result) -> int | None:
    """Return the process that took the ``flock`` on a file, shared or exclusive; None when the kernel shows none.

    A process of another pid namespace is not shown. Another process may hold the lock by an inherited descriptor.

    The kernel returns a long ``/proc/locks`` in parts, and skips a lock when earlier locks are dropped in between. So
    the table is read up to five times.
    """
    wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    for _ in range(_LOOKS_AT_LOCKS):
        try:
            with open("/proc/locks", encoding="utf-8") as table:
                lines = [line.split() for line in table]
        except OSError:
            return None
        owners = [int(fields[4]) for fields in lines if fields[1] == "FLOCK" and fields[5] == wanted]
        if pid := next((pid for pid in owners if pid > 0), None):  # not positive: of another pid namespace
            return pid
    return None


def open_devices(pid: int | str = "self") -> dict[int, str]:
    """Return the character devices that a process has open: a path of each, by device number.

    Raises:
        OSError: When the process has ended, or belongs to another user.
    """
    found = {}
    for descriptor in list_descriptors(pid):
        path = f"/proc/{pid}/fd/{descriptor}"
        try:
            status = os.stat(path)
            if stat.S_ISCHR(status.st_mode):
                found[status.st_rdev] = os.readlink(path)
        except OSError:  # closed in between
            continue
    return found


def list_hardware(devices: Mapping[int, str]) -> list[str]:
    """Return the paths of devices that are hardware, sorted, which leaves out memory, consoles and terminals.

    Args:
        devices: A path of each device, by device number.
    """
    return sorted(path for number, path in devices.items() if os.major(number) not in _HARMLESS_MAJORS)


def touched_devices() -> list[str]:
    """Return the sorted paths of hardware that this process has open or mapped, and would share with a fork."""
    mapped = {path for path in list_mapped() if path.startswith("/dev/") and not path.startswith(_MEMORY)}
    return sorted({*list_hardware(open_devices()), *mapped})


def list_mapped() -> list[str]:
    """Return the paths of the files that are mapped into this process, each once, in the order of their addresses."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        return list(dict.fromkeys(line[line.index("/") :].rstrip("\n") for line in file if "/" in line))
