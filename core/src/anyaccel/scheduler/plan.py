"""A request in the terms of the machines that could serve it, found out once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from anyaccel.model import Request
from anyaccel.policy import Need
from anyaccel.scheduler.books import Books, Placed, kept
from anyaccel.scheduler.cells import bits
from anyaccel.scheduler.placement import Wanted, needs


class Site(NamedTuple):
    """Where a machine stands among all.

    Attributes:
        number: Its number.
        offset: Position of its first device among all devices.
        books: Its books.
    """

    number: int
    offset: int
    books: Books


class Arrangement:
    """The machines that are there, in order, until one of them changes; and all that was found out about requests.

    It also notes on which machines something was given back: who asks takes note of what is new, and nothing else.

    Args:
        machines: Their books.
    """

    def __init__(self, machines: Iterable[Books]) -> None:
        sites: list[Site] = []
        offset = 0
        for number, books in enumerate(machines):
            sites.append(Site(number, offset, books))
            offset += len(books.layout.devices)
        self.sites: Sequence[Site] = sites
        self.by_name = {site.books.machine: site for site in sites}
        self._plans: dict[tuple[Request, int], Plan] = {}
        self._most = 2 * len(sites) + 64
        self._changed: list[int] = []
        self._dropped = 0

    def plan(self, request: Request, hosts: int) -> Plan:
        """Resolve a request against all machines. Needs no lock: it depends on nothing that is held.

        Raises:
            UnknownNameError: When nothing goes by one of its names.
        """
        return kept(self._plans, (request, hosts), lambda: Plan(request, hosts, self))

    def note(self, machine: int) -> None:
        """Something was given back on a machine."""
        self._changed.append(machine)
        if len(self._changed) > 2 * self._most:
            del self._changed[: self._most]
            self._dropped += self._most

    def since(self, at: int) -> tuple[int, Sequence[int] | None]:
        """How many notes there are, and the machines of those after so many; None when that is too long ago."""
        new = self._changed[at - self._dropped :] if at >= self._dropped else None
        return self._dropped + len(self._changed), new


class Plan:
    """A request in the terms of all machines.

    Attributes:
        request: The request.
        hosts: On how many machines it is to be served.
        arrangement: The machines.
        wanted: Its terms, by the number of each machine that can ever serve it.
        machines: These machines, as a bit mask.
        open: Those of them that have not refused it since something was given back there, likewise.
        mask: All devices that could serve it, and their parts, by their positions among those of all machines:
            requests whose masks overlap are rivals.
        ever_fits: Whether it would be served if nothing were held.
    """

    def __init__(self, request: Request, hosts: int, arrangement: Arrangement) -> None:
        self.request = request
        self.hosts = hosts
        self.arrangement = arrangement
        self.wanted: dict[int, tuple[Wanted, ...]] = {}
        masks = [0, 0]  # of the machines that can never serve it, and of those that can
        for site in arrangement.sites:
            found = site.books.resolve(request)
            masks[found.ever_fits] |= found.mask << site.offset
            if found.ever_fits:
                self.wanted[site.number] = found.wanted
        self.machines = self.open = sum(1 << number for number in self.wanted)
        self.mask = masks[True] or masks[False]
        self.ever_fits = len(self.wanted) >= hosts
        self._ready = self._seen = 0

    @cached_property
    def needs(self) -> tuple[tuple[Need, ...], ...]:
        """What it needs of each machine, as the policy sees it."""
        offsets = {number: self.arrangement.sites[number].offset for number in self.wanted}
        return tuple(needs(each, offsets[number].__add__) for number, each in self.wanted.items())

    @cached_property
    def wants(self) -> frozenset[int]:
        """The devices of the mask, likewise."""
        return frozenset(bits(self.mask))

    def find(self) -> dict[int, Placed] | None:
        """The devices that it would get now, by the number of the machine; nothing is taken.

        A machine that refused is asked again only once it got something back. Of a gang, the machines that could serve
        it when too few could are asked last, so that one machine more that refuses ends the search.
        """
        self._catch_up()
        found: dict[int, Placed] = {}
        chosen = 0
        while self.open.bit_count() >= self.hosts:
            left = self.open & ~chosen
            ready = left & self._ready
            left = ready if len(found) + ready.bit_count() >= self.hosts else left & ~ready
            lowest = left & -left
            number = lowest.bit_length() - 1
            placed = self.arrangement.sites[number].books.find(self.wanted[number])
            if placed is None:
                self.open ^= lowest
                continue
            found[number] = placed
            chosen |= lowest
            if len(found) == self.hosts:
                self._ready = 0
                return found
        self._ready = self.open & (self._ready | chosen)
        return None

    def _catch_up(self) -> None:
        """Take note of the machines where something was given back."""
        self._seen, new = self.arrangement.since(self._seen)
        if new is None:
            self.open = self.machines
            return
        for number in new:
            self.open |= self.machines & 1 << number
