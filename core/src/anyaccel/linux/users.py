"""Names and groups of users, and their numbers inside and outside of a user namespace: see ``user_namespaces(7)``."""

from __future__ import annotations

import os
from functools import cache

from anyaccel.linux.process import UNSEEN

_ALL = 1 << 32


def user_name(uid: int) -> str:
    """Return the name of a user, or the number where the user has no name."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Return the name of a group, or the number where the group has no name."""
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def find_user(name: str) -> int | None:
    """Return the number of a user, by name or number; None for an unknown name. A number need not be in use."""
    import pwd

    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):  # ValueError for a name with a NUL
        return None


def find_group(name: str) -> int | None:
    """Return the number of a group, by name or number; None for an unknown name. A number need not be in use."""
    import grp

    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):
        return None


@cache
def find_groups(uid: int) -> frozenset[int]:
    """Return the numbers of a user's groups, primary or not; empty for a user without an account.

    The answer is that of the first call in this process: each look of a waiting request asks for every user in line.
    """
    import pwd

    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return frozenset()
    return frozenset(os.getgrouplist(account.pw_name, account.pw_gid))


def outside(uid: int) -> int:
    """Return the number of a user outside of our user namespace, which is the same for processes inside and outside.

    Args:
        uid: The number inside; without a mapping, the number stays the same.
    """
    for inside, start, count in _map():
        if inside <= uid < inside + count:
            return start + uid - inside
    return uid


def unmapped(uid: int) -> bool:
    """Return whether a file owner that the kernel shows may stand for any user without a mapping.

    Args:
        uid: The owner that the kernel shows.
    """
    return uid == _overflow() and sum(count for _, _, count in _map()) < _ALL - 1


@cache
def _map() -> tuple[tuple[int, int, int], ...]:
    """Return the mapped ranges of users: first number inside, first number outside, count.

    If the kernel's map cannot be read, every number stands for itself.
    """
    try:
        with open("/proc/self/uid_map", encoding="utf-8") as file:
            found = [tuple(map(int, line.split())) for line in file]
    except (*UNSEEN, ValueError):
        found = []
    return tuple((first, second, count) for first, second, count in found) or ((0, 0, _ALL - 1),)


@cache
def _overflow() -> int:
    """Return the number that the kernel shows for users without a mapping; 65534 if unknown."""
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="utf-8") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65534
