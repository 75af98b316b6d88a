"""Landlock, the security module by which a process gives up rights for itself and its descendants, for good.

Landlock is an allow-list: a process may open a file only if the file, or a directory above the file, was granted. No
privilege is needed. See landlock(7).
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Collection, Iterable
from enum import IntFlag

from anyaccel.linux.system import (
    LANDLOCK_ADD_RULE,
    LANDLOCK_CREATE_RULESET,
    LANDLOCK_RESTRICT_SELF,
    SET_NO_NEW_PRIVS,
    prctl,
    syscall,
)

VERSION = 1
PATH_BENEATH = 1

OLDEST = 2
"""Oldest usable version (Linux 5.19). Under version 1, no file can move from one directory to another."""
IOCTL = 5
"""First version that can refuse ioctl calls of a device (Linux 6.10)."""

Node = tuple[int, int]
"""A device by type (character or block) and device number."""


class Right(IntFlag):
    """Access rights of the kernel's interface that a worker loses, or is granted."""

    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    MAKE_CHAR = 1 << 6
    MAKE_BLOCK = 1 << 11
    REFER = 1 << 13
    IOCTL_DEV = 1 << 15


def version() -> int:
    """Return the version of Landlock in this kernel.

    Raises:
        OSError: ENOSYS when the kernel has no Landlock, EOPNOTSUPP when it is switched off, EPERM when a seccomp filter
            forbids the call.
    """
    return syscall(LANDLOCK_CREATE_RULESET, None, 0, VERSION)


def unavailable() -> str:
    """Return the reason why this kernel cannot confine workers; empty when it can."""
    try:
        found = version()
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return "this kernel has no Landlock, which came with Linux 5.13"
        if error.errno == errno.EOPNOTSUPP:
            return "Landlock is switched off in this kernel; boot it with landlock first in the list 'lsm='"
        if error.errno == errno.EPERM:
            return "a filter on system calls forbids Landlock here; a container needs a seccomp profile that allows it"
        return f"Landlock cannot be asked: {error.strerror}"
    if found < OLDEST:
        return f"this kernel's Landlock has version {found}, and version {OLDEST} is needed, which came with Linux 5.19"
    return ""


def gap() -> str:
    """Return the accesses that only a later version of Landlock refuses, in a sentence; empty for none.

    Raises:
        OSError: As for :func:`version`.
    """
    if version() >= IOCTL:
        return ""
    return (
        "the worker could send control calls (ioctl) to other devices: this kernel's Landlock refuses only reading and"
        " writing; Linux 6.10 refuses control calls"
    )


def restrict(paths: Iterable[str], closed: Collection[Node]) -> None:
    """Confine the calling thread and its later descendants to files at or below the given paths, for good.

    Open descriptors stay usable. The thread can make no device nodes either, and set-user-id bits have no effect.

    Args:
        paths: The granted paths; a path that is gone, or is a link, is passed over. A directory grants all files below.
        closed: Devices whose nodes are not granted, even if named in ``paths``.

    Raises:
        OSError: When the kernel refuses.
    """
    ioctl = Right.IOCTL_DEV if version() >= IOCTL else Right(0)
    on_files = Right.READ_FILE | Right.WRITE_FILE | ioctl
    handled = on_files | Right.REFER | Right.MAKE_CHAR | Right.MAKE_BLOCK
    attributes = struct.pack("=Q", handled)
    ruleset = syscall(LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path in paths:
            _grant(ruleset, path, on_files, closed)
        prctl(SET_NO_NEW_PRIVS, 1)  # the kernel demands this of users without privilege
        syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _grant(ruleset: int, path: str, on_files: Right, closed: Collection[Node]) -> None:
    """Grant the access to a path and all files below; does nothing for a link, a closed device, or a path that is gone.

    Args:
        ruleset: Descriptor of the rules.
        path: The path.
        on_files: The rights on files.
        closed: Devices that are not granted.

    Raises:
        OSError: When the kernel refuses the rule.
    """
    try:
        target = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)  # O_PATH: the device itself is not opened
    except OSError:  # a path that cannot be looked up here cannot be opened by the worker either
        return
    try:
        status = os.fstat(target)  # of what was opened: the name may mean something else by now
        if node_of(status) in closed or stat.S_ISLNK(status.st_mode):
            return
        rights = on_files | Right.REFER if stat.S_ISDIR(status.st_mode) else on_files
        syscall(LANDLOCK_ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", rights, target), 0)
    finally:
        os.close(target)


def node_of(status: os.stat_result) -> Node | None:
    """Return the device behind a device node; None for any other file."""
    if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
        return stat.S_IFMT(status.st_mode), status.st_rdev
    return None
