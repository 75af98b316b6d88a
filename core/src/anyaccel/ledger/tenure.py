"""Leases on behalf of other processes, which outlive the program that took them.

No process holds the lock of such a lease. The body of its files has a tenure instead: the lease is active until a
moment that its program postpones from time to time, and beyond that while a named control group has processes. Every
process can judge a tenure, so a program that is killed, stopped or upgraded frees nothing that others still use.
"""

from __future__ import annotations

import json

from anyaccel.errors import UsageError
from anyaccel.ledger.lockfile import clean, read_body, read_number, read_object
from anyaccel.ledger.names import LeaseName, boot
from anyaccel.linux import process
from anyaccel.linux.groups import GroupState, group_state
from anyaccel.model import Value
from anyaccel.text import elapsed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ENTRY = "tenure"
"""Name of the tenure in the body of a lease."""
RENEWED = "for another"
"""Beginning of the reason of a lease that is renewed in time."""
_MOST_GROUPS = 16
_LONGEST_PATHS = 2048
"""Most characters of all paths in JSON, so that all of it stays below the limit of a body."""
_MOST_SECONDS = 2**31


class Tenure(Value):
    """The condition under which a lease that no process holds stays active.

    Attributes:
        key: Identity of the use, given by the program that took the lease.
        until: The lease is active until then at least, in seconds since the boot.
        groups: Control groups, by path below the root of the hierarchy and by inode: while one of them has processes,
            the lease stays active.
    """

    key: str
    until: float
    groups: tuple[tuple[str, int], ...] = ()

    def encode(self) -> dict[str, Any]:
        """Return the tenure as JSON values."""
        return {"key": self.key, "until": self.until, "groups": [list(group) for group in self.groups]}

    def reason(self) -> str:
        """Return the reason why the lease is active now, as a clause; empty once the tenure has ended.

        Before ``until``, the clause begins with :data:`RENEWED`, and the groups are not looked at. After that, a
        control group that cannot be seen from here counts as having processes.
        """
        left = self.until - process.boot_seconds()
        if left > 0:
            return f"{RENEWED} {elapsed(left)} unless renewed"
        for path, inode in self.groups:
            state = group_state(path, inode)
            if state is GroupState.POPULATED:
                return f"not renewed any more, and kept while control group {clean(path)} has processes"
            if state is GroupState.HIDDEN:
                return f"not renewed any more, and control group {clean(path)} cannot be seen from here"
        return ""


def read_tenure(directory: int, lease: LeaseName) -> Tenure | None:
    """Return the tenure of a lease, which may have ended; None if there is no valid tenure of this boot.

    None also if the file is unreadable or longer than 4096 bytes, or if ``until`` is no number from 0 to below 2**40. A
    missing key is empty. Of the first 16 groups, implausible ones are left out.
    """
    if not lease.understood or lease.boot != boot():
        return None
    found = read_object(read_body(directory, lease.name)).get(ENTRY)
    if not isinstance(found, dict) or (until := read_number(found.get("until"))) is None:
        return None
    groups = found.get("groups")
    return Tenure(
        key=clean(found.get("key")),
        until=until,
        groups=tuple(
            (each[0], each[1])
            for each in (groups if isinstance(groups, list) else ())[:_MOST_GROUPS]
            if isinstance(each, list) and len(each) == 2  # noqa: PLR2004 -- path and inode
            and isinstance(each[0], str) and len(each[0]) <= _LONGEST_PATHS and type(each[1]) is int
        ),
    )  # fmt: skip


def make_tenure(key: str, seconds: float, groups: tuple[tuple[str, int], ...] = ()) -> Tenure:
    """Make a tenure that begins now.

    Args:
        key: Identity of the use: 1 to 250 printable characters.
        seconds: Seconds until the tenure ends unless renewed; more than 0, and at most 2**31, which is 68 years.
        groups: Control groups by path and inode: 16 at most, with paths of 2048 characters in all as JSON writes them.
            While a group has processes, the lease stays active after ``seconds``.

    Raises:
        UsageError: When a value is out of range.
    """
    if not key or clean(key) != key:
        raise UsageError(f"key must be 1 to 250 printable characters (got {key!r:.80})")
    if not 0 < seconds <= _MOST_SECONDS:
        raise UsageError(f"seconds must be more than 0 and at most {_MOST_SECONDS} (got {seconds!r})")
    if len(groups) > _MOST_GROUPS or sum(len(json.dumps(path)) - 2 for path, _ in groups) > _LONGEST_PATHS:
        raise UsageError(
            f"a lease follows at most {_MOST_GROUPS} control groups, with {_LONGEST_PATHS} characters in all"
            f" (got {len(groups)})"
        )
    return Tenure(key=key, until=process.boot_seconds() + seconds, groups=groups)
