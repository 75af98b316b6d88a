"""What is in the state directory: counted by names first, by locks only where it matters."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from anyaccel.ledger.lockfile import Life, left_behind, look
from anyaccel.ledger.names import LeaseName, parse_hidden, parse_lease
from anyaccel.model.device import UNITS_PER_DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The names in the state directory at one moment.

    Attributes:
        named: Those of leases, also of dead ones and such as are not understood.
        tickets: Names of tickets, in the order of service.
        hidden: Names of what is being made, or was left behind.
    """

    named: tuple[str, ...]
    tickets: tuple[str, ...]
    hidden: tuple[str, ...]

    @property
    def leases(self) -> tuple[LeaseName, ...]:
        """What the names of leases say; most of those who wait in line need not know."""
        return tuple(filter(None, map(parse_lease, self.named)))

    def taken(self, over: Collection[str] = ()) -> dict[str, int]:
        """Units that are taken, by device id, at most all of a device; those of some names left out."""
        taken: dict[str, int] = {}
        for lease in self.leases:
            if lease.name not in over:
                taken[lease.device] = min(UNITS_PER_DEVICE, taken.get(lease.device, 0) + lease.units)
        return taken


def read(directory: int) -> Listing:
    """List the state directory."""
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
    return Listing(named=tuple(named), tickets=tuple(tickets), hidden=tuple(hidden))


def life(directory: int, lease: LeaseName) -> Life:
    """Say what keeps a lease in force. One that is over stays so: names are never used twice."""
    found, file = look(directory, lease.name)
    if found is Life.OVER and file and lease.understood and not left_behind(lease.pid, lease.start, lease.boot):
        return Life.LEAVING if _exists(directory, lease.name) else Life.OVER
    return found


def fits(choice: Mapping[str, int], taken: Mapping[str, int]) -> bool:
    """Whether what is chosen is free."""
    return all(taken.get(device, 0) + units <= UNITS_PER_DEVICE for device, units in choice.items())


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


def _exists(directory: int, name: str) -> bool:
    """Whether a name is still there: a holder that released it lives on, but not for this lease."""
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
