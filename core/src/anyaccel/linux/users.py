"""Users by name, and as a user namespace shows them, such as a rootless container's: see ``user_namespaces(7)``."""

from __future__ import annotations

from functools import cache

from anyaccel.linux.process import UNSEEN

_ALL = 1 << 32


def user_name(uid: int) -> str:
    """Name of a user, or the number where there is none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def outside(uid: int) -> int:
    """Number of a user outside of our user namespace, by which processes inside and outside name the same files.

    Args:
        uid: Its number inside; returned as it is where it is not mapped.
    """
    for inside, start, count in _map():
        if inside <= uid < inside + count:
            return start + uid - inside
    return uid


def unmapped(uid: int) -> bool:
    """Whether the kernel may show a number for any user who has none in our user namespace.

    Args:
        uid: What the kernel shows as the owner of a file.
    """
    return uid == _overflow() and sum(count for _, _, count in _map()) < _ALL - 1


@cache
def _map() -> tuple[tuple[int, int, int], ...]:
    """First number inside, first number outside and count, for each range of users that is mapped."""
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            found = [tuple(map(int, line.split())) for line in file]
    except (*UNSEEN, ValueError):
        found = []
    return tuple((first, second, count) for first, second, count in found) or ((0, 0, _ALL - 1),)


@cache
def _overflow() -> int:
    """What is shown for users who are not mapped."""
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65534
