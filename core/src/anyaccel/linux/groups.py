"""Whether a control group (cgroup v2) has processes, for observers in any container."""

from __future__ import annotations

import os
import re
from functools import cache

_MOUNTS = "/proc/self/mountinfo"
_NAMESPACE = "/proc/self/ns/cgroup"
_INITIAL = 0xEFFFFFFB
"""Inode of the initial cgroup namespace, by the kernel's ``include/linux/proc_ns.h``."""
_PATH = r"(/[^/\0]+)+"


@cache
def _mount() -> str:
    """Return the directory where cgroup v2 is mounted; empty if it is not."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                before, _, after = line.partition(" - ")
                if after.startswith("cgroup2 "):
                    return before.split()[4]
    except OSError:
        pass
    return ""


def _directory(group: str) -> str:
    """Return the directory of a group; empty for a path that is not plain, which another user may have written."""
    plain = re.fullmatch(_PATH, group) and not {".", ".."} & set(group.split("/"))
    return f"{_mount()}{group}" if plain and _mount() else ""


def group_inode(group: str) -> int | None:
    """Return the inode of a group, which no later group of the same path shares; None if there is no such group.

    Args:
        group: Path below the root of the hierarchy, such as ``/kubepods.slice/kubepods-pod1234.slice``.
    """
    path = _directory(group)
    try:
        return os.stat(path).st_ino if path else None
    except OSError:
        return None


def is_populated(group: str, inode: int) -> bool | None:
    """Return whether a group, given by path and inode, or a group below it has processes; None if it cannot be seen.

    A missing group counts as empty only in the initial cgroup namespace: a container sees a part of the hierarchy.
    """
    path = _directory(group)
    try:
        if path and os.stat(path).st_ino == inode:
            with open(f"{path}/cgroup.events", encoding="utf-8") as file:
                return "populated 1" in file.read().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        import errno

        if error.errno != errno.ENODEV:  # removed while it was read
            return None
    try:
        sees_all = bool(_mount()) and os.stat(_NAMESPACE).st_ino == _INITIAL
    except OSError:
        sees_all = False
    return False if sees_all else None
