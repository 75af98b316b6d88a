"""What is in the state directory: counted by names first, by locks only where it matters."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from anyaccel.ledger.lockfile import Life, left_behind, look
from anyaccel.ledger.names import LeaseName, boot, parse_hidden, parse_lease
from anyaccel.linux import mark as marks
from anyaccel.model.extent import NOTHING, Extent

_PID, _MARK = attrgetter("pid"), attrgetter("mark")


class Summary(NamedTuple):
    """What the names of some leases say in all.

    Attributes:
        leases: What each of them says.
        pids: Processes that took them.
        marks: Marks that they name.
        taken: What is taken, by the device's name.
    """

    leases: tuple[LeaseName, ...]
    pids: frozenset[int]
    marks: frozenset[marks.Mark]
    taken: Mapping[str, Extent]


_last: tuple[list[str], Summary] = ([], Summary((), frozenset(), frozenset(), {}))
"""The names that were read last, and what they say: who takes devices lists the directory twice, and mostly finds the
same leases. There is no lock: what is lost is read again."""


class Listing:
    """The names in the state directory at one moment.

    Args:
        named: Those of leases, also of dead ones and such as are not understood.
        tickets: Names of tickets, in the order of service.
        hidden: Names of what is being made, or was left behind.
    """

    def __init__(self, named: list[str], tickets: list[str], hidden: list[str]) -> None:
        self._named = named
        self.tickets = tickets
        self.hidden = hidden

    @cached_property
    def summary(self) -> Summary:
        """What the names of leases say in all; most of those who wait in line need not know."""
        global _last  # noqa: PLW0603 -- see there
        known, found = _last
        if known != self._named:
            leases = tuple(filter(None, map(parse_lease, self._named)))
            pids, marks = map(_PID, leases), map(_MARK, leases)
            found = Summary(leases, frozenset(pids), frozenset(marks), taken(leases))
            _last = self._named, found
        return found

    @property
    def leases(self) -> tuple[LeaseName, ...]:
        """What the names of leases say."""
        return self.summary.leases

    def of(self, lease_id: str) -> list[LeaseName]:
        """What the names say of one lease."""
        return [lease for lease in self.leases if lease.id == lease_id and lease.id]


def taken(leases: Iterable[LeaseName], over: Collection[str] = ()) -> dict[str, Extent]:
    """What is taken, by the device's name; what some names say left out."""
    found: dict[str, Extent] = {}
    for lease in leases:
        if lease.name not in over:
            found[lease.device] = found.get(lease.device, NOTHING).joined(lease.extent)
    return found


def read(directory: int) -> Listing:
    """List the state directory, given its descriptor."""
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
    """What keeps a lease in force.

    Attributes:
        life: The kind of thing that does.
        carriers: Processes that carry its mark, where these do; empty where they cannot be seen.
    """

    life: Life
    carriers: tuple[int, ...] = ()


def states(directory: int, leases: Iterable[LeaseName]) -> dict[str, LeaseState]:
    """Say what keeps each of some leases in force, by name; looks at all processes at most once.

    A lease that is over stays so in this directory: names are never used twice. Where the directory was deleted, its
    names are made again in the next one. A lease whose holder has ended, and whose descriptors a carrier of its mark
    still has, is kept like one of which a carrier has the mark alone. Where ``/proc`` hides processes of other users,
    only the owner of a lease and root can tell that no process carries its mark.
    """
    found, marked = {}, []
    for lease in leases:
        life, file = look(directory, lease.name)
        if file is not None and lease.understood and (life is Life.OVER or lease.mark):
            left = left_behind(lease.pid, lease.start, lease.boot)
            if left and lease.mark and lease.boot == boot():
                marked.append(lease)
            elif life is Life.OVER and not left and owner_of(directory, lease.name) is not None:
                life = Life.LEAVING
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
    """Whether what is chosen is free."""
    for device, extent in choice.items():  # noqa: SIM110 - a generator takes longer, and the directory is locked
        if not taken.get(device, NOTHING).leaves(extent):
            return False
    return True


def sweep(directory: int, names: Iterable[str]) -> None:
    """Remove names that are known to be over; those of other users stay."""
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)


def debris(directory: int, hidden: Iterable[str]) -> list[str]:
    """Hidden names of files that nobody is going to publish any more."""
    found = []
    for name in hidden:
        maker = parse_hidden(name)
        if maker and left_behind(*maker) and look(directory, name)[0] is Life.OVER:
            found.append(name)
    return found


def owner_of(directory: int, name: str) -> int | None:
    """User id of a file's owner; None when the file has gone: a holder that released it lives on without this lease."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid
    except FileNotFoundError:
        return None
