"""What is in the state directory: counted by names first, by locks only where it matters."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from anyaccel.ledger import mark as marks
from anyaccel.ledger.lockfile import Life, left_behind, look
from anyaccel.ledger.names import LeaseName, boot, parse_hidden, parse_lease
from anyaccel.model import Value
from anyaccel.model.extent import NOTHING, Extent


class Listing(Value):
    """The names in the state directory at one moment.

    Attributes:
        named: Those of leases, also of dead ones and such as are not understood.
        tickets: Names of tickets, in the order of service.
        hidden: Names of what is being made, or was left behind.
        devices: Names of devices. A lease that says no vendor is one of each of these that has its id.
    """

    named: tuple[str, ...]
    tickets: tuple[str, ...]
    hidden: tuple[str, ...]
    devices: frozenset[str] = frozenset()

    @property
    def leases(self) -> tuple[LeaseName, ...]:
        """What the names of leases say; most of those who wait in line need not know."""
        return _summary(self.named, self.devices).leases

    @property
    def pids(self) -> frozenset[int]:
        """Processes that took them."""
        return _summary(self.named, self.devices).pids

    @property
    def marks(self) -> frozenset[marks.Mark]:
        """Marks that they name."""
        return _summary(self.named, self.devices).marks

    def taken(self, over: Collection[str] = ()) -> dict[str, Extent]:
        """What is taken, by the device's name; what some names say left out."""
        return _taken(self.leases, over) if over else dict(_summary(self.named, self.devices).taken)


class _Summary(NamedTuple):
    leases: tuple[LeaseName, ...]
    pids: frozenset[int]
    marks: frozenset[marks.Mark]
    taken: Mapping[str, Extent]


@lru_cache(maxsize=4)
def _summary(named: tuple[str, ...], devices: frozenset[str]) -> _Summary:
    """What some names say in all. Who takes devices lists the directory twice, and mostly finds the same leases."""
    leases = tuple(each for lease in map(parse_lease, named) if lease for each in _of_devices(lease, devices))
    pids = frozenset(lease.pid for lease in leases)
    return _Summary(leases, pids, frozenset(lease.mark for lease in leases), _taken(leases))


def _of_devices(lease: LeaseName, devices: frozenset[str]) -> Iterable[LeaseName]:
    """A lease as those of some devices that it takes, if it takes any of them."""
    if lease.vendor or not devices:
        return (lease,)
    return [lease._replace(device=name) for name in sorted(lease.means(devices))] or (lease,)


def _taken(leases: Iterable[LeaseName], over: Collection[str] = ()) -> dict[str, Extent]:
    taken: dict[str, Extent] = {}
    for lease in leases:
        if lease.name not in over:
            taken[lease.device] = taken.get(lease.device, NOTHING).joined(lease.extent)
    return taken


def read(directory: int, devices: frozenset[str] = frozenset()) -> Listing:
    """List the state directory.

    Args:
        directory: Its descriptor.
        devices: Names of the devices that matter, to which leases of older versions are counted; see :class:`Listing`.
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
    return Listing(named=tuple(named), tickets=tuple(tickets), hidden=tuple(hidden), devices=devices)


class LeaseState(NamedTuple):
    """What keeps a lease in force.

    Attributes:
        life: The kind of thing that does.
        carriers: Processes that carry its mark, where these do; empty where they cannot be seen.
    """

    life: Life
    carriers: tuple[int, ...] = ()


def without_marks(directory: int, lease: LeaseName) -> Life:
    """Say what keeps a lease in force, without a look at all processes: ``KEPT`` where only that can tell.

    A lease that is over stays so: names are never used twice.
    """
    found, file = look(directory, lease.name)
    if found is not Life.OVER or file is None or not lease.understood:
        return found
    if not left_behind(lease.pid, lease.start, lease.boot):
        found = Life.LEAVING
    elif lease.mark and lease.boot == boot():
        found = Life.KEPT
    return found if found is Life.OVER or _exists(directory, lease.name) else Life.OVER


def by_marks(directory: int, leases: Collection[LeaseName]) -> dict[str, LeaseState]:
    """Say of leases whose lock is free and whose process is gone whether their marks are carried, by name.

    One look at all processes answers for all of them. Where ``/proc`` hides processes of other users, only the owner of
    a lease and root can tell.
    """
    found = marks.carriers({lease.mark for lease in leases}) if leases else {}
    hidden = bool(leases) and marks.hidden()
    states = {}
    for lease in leases:
        carriers = found.get(lease.mark, ()) if found is not None else ()
        unknown = found is None or (hidden and not carriers and _owner(directory, lease.name) != os.geteuid())
        states[lease.name] = LeaseState(Life.KEPT if carriers or unknown else Life.OVER, carriers)
    return states


def states(directory: int, leases: Iterable[LeaseName]) -> dict[str, LeaseState]:
    """Say what keeps each of some leases in force, by name; looks at all processes at most once.

    A lease whose holder has ended, and whose descriptors a carrier of its mark still has, is kept like one of which a
    carrier has the mark alone.
    """
    found = {lease: without_marks(directory, lease) for lease in leases}
    asked = {
        lease: life
        for lease, life in found.items()
        if life is Life.KEPT or (life is Life.HELD and lease.mark and left_behind(lease.pid, lease.start, lease.boot))
    }
    marked = by_marks(directory, asked)
    for lease, life in asked.items():
        if life is Life.HELD and not marked[lease.name].carriers:
            del marked[lease.name]
    return {lease.name: LeaseState(life) for lease, life in found.items()} | marked


def fits(choice: Mapping[str, Extent], taken: Mapping[str, Extent]) -> bool:
    """Whether what is chosen is free."""
    return all(taken.get(device, NOTHING).leaves(extent) for device, extent in choice.items())


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


def _owner(directory: int, name: str) -> int | None:
    """User id of a file's owner; None when the file has gone."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid
    except OSError:
        return None


def _exists(directory: int, name: str) -> bool:
    """Whether a name is still there: a holder that released it lives on, but not for this lease."""
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
