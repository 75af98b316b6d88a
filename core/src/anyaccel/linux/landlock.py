"""Landlock, the Linux security module by which a process gives up rights for itself and all that it starts, for good.

It is an allow-list: what opens a file for reading or writing is refused unless the file, or a directory above it on
the way to the root, was granted. No privilege is needed. See landlock(7).
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
"""Oldest usable version (Linux 5.19): under the first one, no file can be moved from one directory to another."""
IOCTL = 5
"""First version that can refuse the control calls of a device (Linux 6.10)."""

Node = tuple[int, int]
"""A device as the kernel knows it: whether it is a character or a block device, and its number."""


class Right(IntFlag):
    """Rights of the kernel's interface that we take away from, or grant to, a worker."""

    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    MAKE_CHAR = 1 << 6
    MAKE_BLOCK = 1 << 11
    REFER = 1 << 13
    IOCTL_DEV = 1 << 15


def version() -> int:
    """Version of Landlock in this kernel.

    Raises:
        OSError: When there is none: ENOSYS, EOPNOTSUPP when it is switched off, EPERM when a filter forbids the call.
    """
    return syscall(LANDLOCK_CREATE_RULESET, None, 0, VERSION)


def unavailable() -> str:
    """Say why this kernel cannot confine anybody; an empty string when it can."""
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
    """Say what this kernel's Landlock lets through, where a later version would not; an empty string for nothing."""
    if version() >= IOCTL:
        return ""
    return (
        "a program that means to can send control calls to other devices: this kernel's Landlock refuses reading and"
        " writing alone; the rest came with Linux 6.10"
    )


def restrict(paths: Iterable[str], closed: Collection[Node]) -> None:
    """Let the calling thread, and all that it starts, open nothing but what is at or below some paths.

    What is open already stays usable. New device nodes cannot be made either, and no program gets privileges from its
    file's owner (set-user-id).

    Args:
        paths: What is granted. One that is gone is passed over.
        closed: Devices that stay closed even where a path leads to one.

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
        prctl(SET_NO_NEW_PRIVS, 1)
        syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _grant(ruleset: int, path: str, on_files: Right, closed: Collection[Node]) -> None:
    try:
        target = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # what cannot even be looked up here cannot be opened by the worker either
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
    """The device behind a node; None for what is no device node."""
    if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
        return stat.S_IFMT(status.st_mode), status.st_rdev
    return None
