"""Reasons why leases are active: the lock, the process, the mark, or the tenure of a lease.

No process holds the lock of a lease on behalf of other processes, which outlives the program that took it. The body of
its files has a tenure instead: the lease is active until a moment that its program postpones from time to time, and
beyond that while a named control group has processes. Every process can judge a tenure, so a program that is killed,
stopped or upgraded frees nothing that others still use.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable

from anyaccel._typing import NamedTuple
from anyaccel.errors import UsageError
from anyaccel.ledger.lockfile import Life, clean, is_left_behind, probe_lock, read_body, read_number, read_object
from anyaccel.ledger.names import LeaseName, boot, parse_hidden
from anyaccel.linux import mark as marks
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


class LeaseState(NamedTuple):
    """Reason why a lease is active, or the end of the lease.

    Attributes:
        life: The kind of reason.
        carriers: Visible processes that carry the mark of a lease whose holder has ended.
        reason: Reason why a lease on behalf of others is active; empty for other leases.
    """

    life: Life
    carriers: tuple[int, ...] = ()
    reason: str = ""


def find_states(directory: int, leases: Iterable[LeaseName]) -> dict[str, LeaseState]:
    """Test each lease, and return by its name why it is active: ``OVER`` if it has ended. Nothing is removed.

    Each lock is tested; the processes are scanned at most once, and only for marks of leases whose holder has ended.

    A lease that has ended stays ended in this directory: names are never reused. Only if the directory was deleted, the
    names are made again in the next directory. A lease whose holder has ended, and whose descriptors are still open in
    a carrier of its mark, is kept like a lease with the mark alone. A marked lease is also kept, without carriers, if a
    carrier may be hidden: ``/proc`` hides processes of other users, and this user is neither root nor the owner of the
    lease, or processes start faster than the scan can follow. A lease of another version is judged by its lock alone.

    Raises:
        OSError: When a lock cannot be tested, as for want of descriptors.
    """
    found, marked = {}, []
    for lease in leases:
        life, file = probe_lock(directory, lease.name)
        if file is not None and lease.understood and (life is Life.OVER or lease.mark):
            left = is_left_behind(lease.pid, lease.start, lease.boot)
            if left and lease.mark and lease.boot == boot():
                marked.append(lease)
            elif life is Life.OVER and not left and owner_of(directory, lease.name) is not None:
                life = Life.LEAVING
            elif life is Life.OVER and (tenure := read_tenure(directory, lease)) and (reason := tenure.reason()):
                found[lease.name] = LeaseState(Life.ON_BEHALF, reason=reason)
                continue
        found[lease.name] = LeaseState(life)
    carried = marks.carriers({lease.mark for lease in marked}) if marked else {}
    for lease in marked:
        carriers = () if carried is None else carried.get(lease.mark, ())
        owner = owner_of(directory, lease.name)
        hidden = not carriers and (carried is None or (owner != os.geteuid() and marks.hidden()))
        if owner is not None and (carriers or (hidden and found[lease.name].life is Life.OVER)):
            found[lease.name] = LeaseState(Life.KEPT, carriers)
    return found


def sweep(directory: int, names: Iterable[str]) -> None:
    """Remove the named files, which the caller found to have ended; locks are not tested again, failures ignored."""
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)


def find_debris(directory: int, hidden: Iterable[str]) -> list[str]:
    """Return the hidden names whose files are unlocked, irregular or gone and whose makers have ended.

    Names of another form are left out. Nothing is removed.

    Raises:
        OSError: When a lock cannot be tested.
    """
    found = []
    for name in hidden:
        maker = parse_hidden(name)
        # In another container the maker seems to have ended: the lock tells that the file is in use.
        if maker and is_left_behind(*maker) and probe_lock(directory, name)[0] is Life.OVER:
            found.append(name)
    return found


def owner_of(directory: int, name: str) -> int | None:
    """Return the user id of a file's owner, by the number in this user namespace; None if the file is gone."""
    found = stat_of(directory, name)
    return None if found is None else found.st_uid


def stat_of(directory: int, name: str) -> os.stat_result | None:
    """Return the state of a file, of a symbolic link itself; None if the file is gone. Other errors pass."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
