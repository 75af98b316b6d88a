"""Workers of a pool that are kept for later calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyaccel.workers.member import Member


class Resting:
    """Unused workers, the one used last at the end. Whoever uses it holds the pool's lock; nothing here calls anybody.

    Args:
        idle: Seconds after which an unused worker gives its devices back. One without devices costs nobody anything.
    """

    def __init__(self, idle: float) -> None:
        self._idle = idle
        self._members: list[Member] = []
        self._watched = False

    def __bool__(self) -> bool:
        return bool(self._members)

    def add(self, member: Member) -> bool:
        """Keep a worker; returns whether somebody must come for the old ones at :meth:`next_look`."""
        member.rested = time.monotonic()
        self._members.append(member)
        watch = member.held is not None and not self._watched
        self._watched = self._watched or watch
        return watch

    def take(self, reuse: object) -> Member | None:
        """A worker for calls that may share its process: the one used last, so that the others get old enough to go."""
        if reuse is not None:
            for place in range(len(self._members) - 1, -1, -1):
                if self._members[place].options.reuse == reuse:
                    return self._members.pop(place)
        return None

    def take_oldest(self) -> Member:
        """The worker that has been unused for longest."""
        return self._members.pop(0)

    def take_all(self) -> list[Member]:
        """All of them."""
        return self._take(lambda _: True)

    def take_holders(self, devices: frozenset[str], *, unless: Callable[[object], bool]) -> list[Member]:
        """Those that hold one of some devices, by id, unless that is so for the calls that they may run."""
        return self._take(lambda member: bool(member.ids & devices) and not unless(member.options.reuse))

    def take_old(self) -> list[Member]:
        """Those that hold devices and were not used for too long."""
        latest = time.monotonic() - self._idle
        old = self._take(lambda member: member.held is not None and member.rested <= latest)
        self._watched = self.next_look() is not None
        return old

    def next_look(self) -> float | None:
        """When the next one gets too old, as a time of ``time.monotonic()``; None when none ever does."""
        rested = [member.rested for member in self._members if member.held is not None]
        return min(rested) + self._idle if rested else None

    def held(self) -> frozenset[str]:
        """Ids of the devices that they hold."""
        return frozenset().union(*(member.ids for member in self._members))

    def discard(self, member: Member) -> None:
        """Forget one that has gone."""
        if member in self._members:
            self._members.remove(member)

    def _take(self, wanted: Callable[[Member], bool]) -> list[Member]:
        taken = [member for member in self._members if wanted(member)]
        self._members = [member for member in self._members if member not in taken]
        return taken
