"""A request in the terms of the machines that could serve it, found out once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import NamedTuple

from anyaccel.model import Request
from anyaccel.model.extent import bits
from anyaccel.policy import Need
from anyaccel.scheduler.books import Books, Placed
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

    It also counts on which machines something was given back: a plan asks only those again that have changed since.

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
        self._plan = lru_cache(maxsize=4_096)(self._make)
        self._given_back: OrderedDict[int, int] = OrderedDict()  # by machine, the count at the last time
        self._count = 0

    def plan(self, request: Request, hosts: int) -> RequestPlan:
        """Resolve a request against all machines. Needs no lock: it depends on nothing that is held.

        Raises:
            UnknownNameError: When nothing goes by one of its names.
        """
        return self._plan(request, hosts)

    def _make(self, request: Request, hosts: int) -> RequestPlan:
        return RequestPlan(request, hosts, self)

    def note(self, machine: int) -> None:
        """Count that something was given back on a machine."""
        self._count += 1
        self._given_back[machine] = self._count
        self._given_back.move_to_end(machine)

    def since(self, count: int) -> tuple[int, Iterable[int]]:
        """Return the count now, and the machines on which something was given back after another one."""
        new = takewhile(lambda each: each[1] > count, reversed(self._given_back.items()))
        return self._count, (machine for machine, _ in new)


class RequestPlan:
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
        self._seen = 0

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

        A machine that refused is asked again only once it got something back.
        """
        self._seen, changed = self.arrangement.since(self._seen)
        for number in changed:
            self.open |= self.machines & 1 << number
        found: dict[int, Placed] = {}
        for number in bits(self.open):
            if self.open.bit_count() < self.hosts:
                break
            placed = self.arrangement.sites[number].books.find(self.wanted[number])
            if placed is None:
                self.open ^= 1 << number
                continue
            found[number] = placed
            if len(found) == self.hosts:
                return found
        return None
