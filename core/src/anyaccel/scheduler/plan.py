"""Plans: requests resolved against each machine, computed once."""

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
    """Position of a machine among all machines.

    Attributes:
        number: Number of the machine.
        offset: Position of its first device among all devices.
        books: Books of the machine.
    """

    number: int
    offset: int
    books: Books


class Arrangement:
    """The present machines in order, and the plans of requests.

    An arrangement also counts releases per machine, so that a plan asks only changed machines again.

    Args:
        machines: Books of the machines.
    """

    def __init__(self, machines: Iterable[Books]) -> None:
        sites: list[Site] = []
        offset = 0
        for number, books in enumerate(machines):
            sites.append(Site(number, offset, books))
            offset += len(books.layout.devices)
        self.sites: Sequence[Site] = sites
        self.by_name = {site.books.machine: site for site in sites}
        self._plan = lru_cache(maxsize=4_096)(
            self._make
        )  # as many different requests may wait, and each release asks all
        self._given_back: OrderedDict[int, int] = OrderedDict()  # count at the last release, by machine
        self._count = 0

    def plan(self, request: Request, hosts: int) -> RequestPlan:
        """Resolve a request against every machine, or return the former plan. Needs no lock: allocations do not matter.

        Raises:
            UnknownNameError: When no device has one of its names.
        """
        return self._plan(request, hosts)

    def _make(self, request: Request, hosts: int) -> RequestPlan:
        return RequestPlan(request, hosts, self)

    def note(self, machine: int) -> None:
        """Count a release on a machine, so that each plan asks the machine again."""
        self._count += 1
        self._given_back[machine] = self._count
        self._given_back.move_to_end(machine)  # latest last, so that since() can stop early

    def since(self, count: int) -> tuple[int, Iterable[int]]:
        """Return the present count, and the machines with a release after the given count, latest first."""
        new = takewhile(lambda each: each[1] > count, reversed(self._given_back.items()))
        return self._count, (machine for machine, _ in new)


class RequestPlan:
    """A request resolved against every machine.

    Attributes:
        request: The request.
        hosts: Number of machines to be served on.
        arrangement: The machines.
        wanted: The terms, by number of each machine that can ever serve them.
        machines: These machines, as a bit mask.
        open: The machines that have not refused the request since their last release, as a bit mask.
        mask: The devices that could serve the request, and their parts, by position among the devices of every machine:
            requests with overlapping masks are rivals.
        ever_fits: Whether the request is served if nothing is held.
    """

    def __init__(self, request: Request, hosts: int, arrangement: Arrangement) -> None:
        self.request = request
        self.hosts = hosts
        self.arrangement = arrangement
        self.wanted: dict[int, tuple[Wanted, ...]] = {}
        masks = [0, 0]  # for machines that can never serve the request, and for machines that can
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
        """The needs on each machine, for the queue policy."""
        offsets = {number: self.arrangement.sites[number].offset for number in self.wanted}
        return tuple(needs(each, offsets[number].__add__) for number, each in self.wanted.items())

    @cached_property
    def wants(self) -> frozenset[int]:
        """The devices of the mask, for the queue policy."""
        return frozenset(bits(self.mask))

    def find(self) -> dict[int, Placed] | None:
        """Find free devices for the request, by machine number, without taking them; None if too few machines fit.

        A machine that refused is noted, and asked again only after a release there.
        """
        self._seen, changed = self.arrangement.since(self._seen)
        for number in changed:
            self.open |= self.machines & 1 << number
        found: dict[int, Placed] = {}
        for number in bits(self.open):
            if self.open.bit_count() < self.hosts:  # too few machines are left for the gang
                break
            placed = self.arrangement.sites[number].books.find(self.wanted[number])
            if placed is None:
                self.open ^= 1 << number
                continue
            found[number] = placed
            if len(found) == self.hosts:
                return found
        return None
