"""Those who wait: tickets are files of the same make as leases, served in the order of their names.

Somebody who waits shows that it still looks for devices by a stamp, the modification time of its ticket, in
nanoseconds of the machine's monotonic clock. Whoever has not stamped for a while - stopped, frozen, starved - is
overtaken and takes its place again as soon as it goes on. The stamp decides about order only, never about who holds
what.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from anyaccel.ledger import process
from anyaccel.ledger.directory import StateDirectory
from anyaccel.ledger.listing import Listing
from anyaccel.ledger.lockfile import Life, LockedFile, look, read_body
from anyaccel.ledger.names import (
    behind_tickets,
    hashes,
    last_number,
    listed_in_name,
    new_nonce,
    parse_ticket,
    rival_hashes,
    ticket_name,
    ticket_suffix,
)
from anyaccel.ledger.record import TicketRecord, owner, read_words, write_body
from anyaccel.model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PATIENCE = 2.0
_LOOKS_EVERY = 0.25
_PER_PLACE = 0.05
_WANTED_LIMIT = 1 << 18


def interval(place: int) -> float:
    """Seconds after which somebody looks again though nothing happened; ``place`` others are ahead."""
    return max(_LOOKS_EVERY, _PER_PLACE * place)


class Standing(Value):
    """Where a request stands among those that compete with it.

    Attributes:
        place: How many are ahead, as far as is known.
        before: The nearest of them that is there; None when nobody must be waited for.
        passed: Tickets ahead that need not be waited for.
        over: Those of them whose owner is gone.
    """

    place: int
    before: str | None
    passed: frozenset[str]
    over: tuple[str, ...]


class Line:
    """The waiting line, as one request sees it.

    Args:
        candidates: Ids of the devices that could serve the request.
        priority: The higher, the earlier.
    """

    def __init__(self, candidates: frozenset[str], priority: int) -> None:
        self._candidates = candidates
        self._behind = behind_tickets(priority)
        self._suffix = ticket_suffix(candidates) if listed_in_name(candidates) else "\0"
        self._in_bodies: dict[str, frozenset[int] | None] = {}

    def rivals(self, directory: int, listing: Listing, own: str | None) -> Iterator[str]:
        """Names of the tickets ahead that compete for a device, first to be served first."""
        for name in listing.tickets:
            if name >= (own or self._behind):
                return
            # Most want what we want, and their names need not be read then.
            if name.endswith(self._suffix) or self._competes(directory, name):
                yield name

    def stand(self, directory: int, listing: Listing, own: str | None) -> Standing:
        """Find out whether somebody who is ahead must be waited for.

        Looks at the locks and stamps of those at the head until one is found to be there, and at the nearest ones.
        """
        now = process.monotonic_ns()
        passed: set[str] = set()
        over: list[str] = []
        rivals = list(self.rivals(directory, listing, own))
        for position, name in enumerate(rivals):
            life, found = look(directory, name)
            if life is Life.OVER:
                over.append(name)
            elif found is None or not _silent(found, now, position):
                break
            passed.add(name)
        ahead = rivals[len(passed) :]
        before = next((name for name in reversed(ahead) if look(directory, name)[0] is not Life.OVER), None)
        return Standing(place=len(ahead), before=before, passed=frozenset(passed), over=tuple(over))

    def _competes(self, directory: int, name: str) -> bool:
        ticket = parse_ticket(name)
        if ticket is None:
            return False
        wanted = ticket.wanted
        if wanted is None:
            if name not in self._in_bodies:
                self._in_bodies[name] = _read_wanted(directory, name)
            wanted = self._in_bodies[name]
        return wanted is None or not rival_hashes(self._candidates).isdisjoint(wanted)


class Ticket:
    """A place in the line, ours from :meth:`publish` until :meth:`drop` or the end of this process.

    Args:
        state: The state directory.

    Attributes:
        name: Name of its file; empty before it is published.
    """

    __slots__ = ("_file", "_owner", "name")

    def __init__(self, state: StateDirectory) -> None:
        self.name = ""
        self._file = LockedFile(state.path)
        self._owner = os.getpid()

    def publish(self, directory: int, priority: int, candidates: frozenset[str], request: str, note: str) -> None:
        """Get in line.

        Args:
            directory: Descriptor of the state directory, locked: numbers are given in order.
            priority: The higher, the earlier.
            candidates: Ids of the devices that could serve the request.
            request: What was asked for, for people to read.
            note: What for.
        """
        more: dict[str, Any] = {"arrived": process.monotonic_ns()}
        if not listed_in_name(candidates):
            more["wanted"] = sorted(hashes(candidates))
        self._file.make(directory, write_body(request, note, **more))
        self.stamp()
        number = 1 + last_number(os.listdir(directory))
        self._file.rename(directory, ticket_name(priority, number, new_nonce(), candidates))
        self.name = self._file.name

    def stamp(self) -> None:
        """Show that we are here and look for devices."""
        now = process.monotonic_ns()
        os.utime(self._file.fd, ns=(now, now))

    def drop(self) -> None:
        """Leave the line. A copy in a forked child leaves it to its parent."""
        if self._owner == os.getpid():
            self._file.discard()
        else:
            self._file.close()


def records(directory: int, listing: Listing) -> Iterator[TicketRecord]:
    """Describe those who wait, first to be served first."""
    now = process.monotonic_ns()
    for position, ticket in enumerate(filter(None, map(parse_ticket, listing.tickets))):
        life, found = look(directory, ticket.name)
        if life is Life.OVER:
            continue
        words = read_words(read_body(directory, ticket.name, _WANTED_LIMIT))
        yield TicketRecord(
            id=ticket.id,
            priority=ticket.priority,
            pid=ticket.pid,
            **owner(found),
            waited=max(0, now - words["arrived"]) / 1e9,
            responsive=found is None or not _silent(found, now, position),
            request=words["request"],
            note=words["note"],
            command=words["command"],
        )


def wanted_by_others(directory: int, listing: Listing, devices: frozenset[str]) -> frozenset[str]:
    """Those of some devices for which a process that is not this one waits."""
    found: set[str] = set()
    for ticket in filter(None, map(parse_ticket, listing.tickets)):
        if found == devices:
            break
        if ticket.pid == os.getpid():
            continue
        wanted = ticket.wanted if ticket.wanted is not None else _read_wanted(directory, ticket.name)
        numbers = {device: rival_hashes(frozenset({device})) for device in devices - found}
        more = {device for device, number in numbers.items() if wanted is None or not number.isdisjoint(wanted)}
        if more and look(directory, ticket.name)[0] is not Life.OVER:
            found |= more
    return frozenset(found)


def _silent(found: os.stat_result, now: int, position: int) -> bool:
    """Whether a stamp is too old, or from the future, as no honest neighbor's is."""
    patience = _PATIENCE + 3 * _PER_PLACE * position
    return not -_PATIENCE < (now - found.st_mtime_ns) / 1e9 < patience


def _read_wanted(directory: int, name: str) -> frozenset[int] | None:
    """What a ticket wants that could not list it in its name; None when it does not say, which means everything."""
    try:
        wanted = json.loads(read_body(directory, name, _WANTED_LIMIT))["wanted"]
        return frozenset(int(each) for each in wanted)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):  # overflow: "1e999" is infinite
        return None
