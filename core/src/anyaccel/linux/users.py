"""Names and groups of users."""

from __future__ import annotations

import os
from functools import cache


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
