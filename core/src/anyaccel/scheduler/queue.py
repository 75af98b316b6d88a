"""The order of those who wait: strict first come first served, by priority, among requests for the same devices."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class Queue(Generic[T]):
    """Waiting items, grouped by priority and by the devices that they want.

    Items of one group compete with each other, so only the first of each is ever looked at: the cost of a decision
    grows with the kinds of requests that wait, not with their number.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int], OrderedDict[int, T]] = {}

    def add(self, item: T, *, priority: int, number: int, mask: int) -> None:
        """Let an item wait.

        Args:
            item: What waits.
            priority: The higher, the earlier.
            number: Position in the order of arrival.
            mask: The devices that it wants, as a bit mask.
        """
        self._groups.setdefault((-priority, mask), OrderedDict())[number] = item

    def remove(self, *, priority: int, number: int, mask: int) -> bool:
        """Take an item out; False when it does not wait."""
        group = self._groups.get((-priority, mask), OrderedDict())
        found = group.pop(number, None) is not None
        if found and not group:
            del self._groups[-priority, mask]
        return found

    def blocked(self, *, priority: int, mask: int) -> bool:
        """Whether somebody who would be served before a newcomer of this priority wants one of its devices."""
        return any(rank <= -priority and wanted & mask for rank, wanted in self._groups)

    def ahead(self, *, priority: int, number: int, mask: int) -> Iterator[T]:
        """Those who are served before the given one and want one of its devices, first to be served first."""
        for rank, other, wanted, item in self._sorted():
            if (rank, other) < (-priority, number) and wanted & mask:
                yield item

    def serve(self, changed: int, place: Callable[[T], bool]) -> None:
        """Place who can be placed, in order.

        Args:
            changed: The devices about which something changed, as a bit mask; nobody else needs another look.
            place: Called for each item whose turn it is; says whether it was placed.
        """
        firsts = [(rank, next(iter(group)), mask) for (rank, mask), group in self._groups.items()]
        heapify(firsts)
        blocked = 0
        while firsts:
            rank, number, mask = heappop(firsts)
            group = self._groups[rank, mask]
            if mask & blocked or not mask & changed or not place(group[number]):
                blocked |= mask
                continue
            changed |= mask  # whoever waited behind this one may be next
            del group[number]
            if group:
                heappush(firsts, (rank, next(iter(group)), mask))
            else:
                del self._groups[rank, mask]

    def __iter__(self) -> Iterator[T]:
        return (item for _, _, _, item in self._sorted())

    def _sorted(self) -> list[tuple[int, int, int, T]]:
        found = (
            (rank, number, mask, item) for (rank, mask), group in self._groups.items() for number, item in group.items()
        )
        return sorted(found, key=lambda entry: entry[:2])
