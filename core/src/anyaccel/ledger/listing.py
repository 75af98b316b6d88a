"""Names in the state directory: leases are counted by name first, and by lock only if the answer depends on a lock."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property, lru_cache
from operator import attrgetter

from anyaccel._typing import NamedTuple
from anyaccel.ledger.lockfile import Life, is_left_behind, probe_lock
from anyaccel.ledger.names import LeaseName, boot, parse_hidden, parse_lease
from anyaccel.ledger.tenure import read_tenure
from anyaccel.linux import mark as marks
from anyaccel.model.extent import NOTHING, Extent

_PID, _MARK = attrgetter("pid"), attrgetter("mark")


class Summary(NamedTuple):
    """The content of the names of several leases.

    Attributes:
        leases: The parsed names.
        pids: Processes that took the leases.
        marks: Marks of the leases.
        taken: The taken extents by device name.
    """

    leases: tuple[LeaseName, ...]
    pids: frozenset[int]
    marks: frozenset[marks.Mark]
    taken: Mapping[str, Extent]


@lru_cache(maxsize=2)
def _summarize(named: tuple[str, ...]) -> Summary:
    """Summarize the names of leases. A name of another version counts as a lease of the whole device.

    Only a name without a readable device is left out. An acquisition lists the directory twice, and mostly finds the
    same leases: with 256 leases, acquire and release take 0.5 ms of processor time, and 1.6 ms without this cache.
    """
    leases = tuple(filter(None, map(parse_lease, named)))
    return Summary(leases, frozenset(map(_PID, leases)), frozenset(map(_MARK, leases)), sum_taken(leases))


class Listing:
    """The names in the state directory at one moment.

    Args:
        named: Names of leases, also of ended leases and of other versions.
        tickets: Names of tickets, in the order of service.
        hidden: Names of unfinished or leftover files.
    """

    def __init__(self, named: list[str], tickets: list[str], hidden: list[str]) -> None:
        self._named = named
        self.tickets = tickets
        self.hidden = hidden

    @cached_property
    def summary(self) -> Summary:
        """The summary of the names of leases, computed on first use: most waiting requests do not need the summary."""
        return _summarize(tuple(self._named))

    @property
    def leases(self) -> tuple[LeaseName, ...]:
        """The parsed names of leases, also of ended leases and of other versions; see :attr:`summary`."""
        return self.summary.leases

    def find_lease(self, lease_id: str) -> list[LeaseName]:
        """Return the parsed names of a lease, also of an ended lease; none for an unknown or empty id.

        Each device has a name, and after a recovery further names for further processes.
        """
        return [lease for lease in self.leases if lease.id == lease_id and lease.id]


def sum_taken(leases: Iterable[LeaseName], over: Collection[str] = ()) -> dict[str, Extent]:
    """Sum the taken extents by device name, up to the whole device, without the leases whose names are in ``over``.

    A device of a lease counts once, although after a recovery several processes have a file for it.
    """
    found: dict[str, Extent] = {}
    counted = set()
    for lease in leases:
        # With the extent: a user who copies the identity of another user's lease hides no part of that lease.
        part = lease.id, lease.device, lease.extent
        if lease.name not in over and part not in counted:
            counted.add(part)
            found[lease.device] = found.get(lease.device, NOTHING).joined(lease.extent)
    return found


def read(directory: int) -> Listing:
    """List the state directory of a descriptor by kind of name, which the first letter tells; omit other kinds.

    Only the tickets are sorted. Names are not parsed, and files are not opened. OSError passes.
    """
    named, tickets, hidden = [], [], []
    for name in os.listdir(directory):
        first = name[0]
        if first == "v":
            named.append(name)
        elif first == "t":
            tickets.append(name)
        elif first == ".":
            hidden.append(name)
    tickets.sort()
    return Listing(named, tickets, hidden)


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


def fits(choice: Mapping[str, Extent], taken: Mapping[str, Extent]) -> bool:
    """Return whether each chosen extent is free; a device without an entry in ``taken`` is free."""
    return all(taken.get(device, NOTHING).leaves(extent) for device, extent in choice.items())


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
