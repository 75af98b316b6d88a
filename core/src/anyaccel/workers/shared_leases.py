"""Devices that every process on the machine shares: leases of the ledger, for the pools of this process."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import count

from anyaccel.launcher.hold import Scope
from anyaccel.launcher.launch import KnownNames, validate
from anyaccel.ledger import Ledger
from anyaccel.model import Allocation, Extent, Inventory, Request
from anyaccel.scheduler import Choice
from anyaccel.workers.leases import Neighbor, OnFailed, OnHeld, check
from anyaccel.workers.loop import loop
from anyaccel.workers.shared_claim import SharedClaim, SharedHeld

LOOK_SECONDS = 0.05
"""How often to look whether another process waits for what we have and could give back."""
OWN_SECONDS = 0.01
"""How long to wait for what this process holds itself before standing in the machine's line for it."""


class SharedLeases:
    """Devices of a machine, shared by every process on it.

    Claims of this process that compete for the same devices stand in one line, of which only the first stands in the
    machine's, too: a thousand calls that wait are one ticket there.

    Args:
        inventory: The machine.

    Raises:
        StateDirectoryError: When there is no state directory that can be trusted.
    """

    look_seconds: float | None = LOOK_SECONDS

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.ledger = Ledger.open()
        self.scope = Scope.of(inventory, os.environ)
        self.numbers = count()
        self._lock = threading.Lock()
        self._order = threading.RLock()
        self._lining_up = False
        self._waiting: dict[int, SharedClaim] = {}
        self._own: dict[str, list[Extent]] = {}
        self._neighbors: weakref.WeakSet[Neighbor] = weakref.WeakSet()
        self._looked = float("-inf")
        self._others: frozenset[str] = frozenset()
        self._ids = self.scope.ids

    def check(self, request: Request) -> None:
        """Raise what :meth:`claim` would raise for a request that can never be served."""
        check(self.inventory, request)

    def choice(self, request: Request) -> Choice:
        """What chooses devices for a request.

        Raises:
            UnknownNameError: When nothing goes by one of its names.
        """
        return Choice(self.inventory, request, validate, KnownNames())

    def join(self, neighbor: Neighbor) -> None:
        """Tell somebody of others; held weakly."""
        with self._lock:
            self._neighbors.add(neighbor)

    def claim(
        self,
        request: Request,
        note: str,
        on_held: OnHeld,
        on_failed: OnFailed,
        *,
        confined: bool = False,
        line: object = None,
    ) -> SharedClaim:
        """Ask for devices; see :class:`~anyaccel.workers.leases.Leases`."""
        with self._order:
            self._line_up(line)
            claim = SharedClaim(self, request, note, on_held, on_failed, confined=confined, line=line)
            if not claim.fits({}):
                self.check(request)
                held: SharedHeld | None = SharedHeld(self, Allocation(id="", request=request, grants=()), None)
            else:
                with self._lock:
                    own = self._held()
                    ahead = any(other.ids & claim.ids for other in self._waiting.values())
                held = None if ahead or not claim.fits(own) else claim.take(wait=False)
                if held is None:
                    with self._lock:
                        self._waiting[claim.number] = claim
        if held is not None:
            on_held(held)
        else:
            self.go_on()
            for neighbor in self._present():
                neighbor.make_way(self.scope.excluded_by(claim.ids))
        return claim

    def took(self, devices: Mapping[str, Extent]) -> None:
        """Count what this process holds, by key of the ledger."""
        with self._lock:
            for key, extent in devices.items():
                self._own.setdefault(key, []).append(extent)

    def gave(self, devices: Mapping[str, Extent]) -> None:
        """Count that no more, and tell who waits for it."""
        with self._lock:
            for key, extent in devices.items():
                self._own[key].remove(extent)
            freed = self.scope.with_parts(self._ids[key] for key in devices if key in self._ids)
            starting = [claim for claim in self._waiting.values() if claim.waits and claim.ids & freed]
        for claim in starting:
            claim.start()

    def _held(self) -> dict[str, Extent]:
        """What this process holds, by key of the ledger; called with the lock held."""
        return {key: reduce(Extent.joined, extents) for key, extents in self._own.items() if extents}

    def waits(self, claim: SharedClaim) -> bool:
        """Whether a claim is among those who wait."""
        return claim.number in self._waiting

    def left(self, claim: SharedClaim) -> bool:
        """Count a claim no more among those who wait; False when it was not."""
        with self._lock:
            return self._waiting.pop(claim.number, None) is not None

    def go_on(self) -> None:
        """Let those stand in the machine's line who have nobody in front of them in ours."""
        starting = []
        with self._lock:
            own = self._held()
            seen: frozenset[str] = frozenset()
            for claim in self._waiting.values():
                if not claim.waits and not claim.ids & seen:
                    claim.waits = True
                    starting.append(claim)
                seen |= claim.ids
        for claim in starting:
            if claim.fits(own):
                claim.start()
            else:  # a kept worker of ours may take its call by then
                loop().call_later(OWN_SECONDS, claim.start)

    def first(self, claim: SharedClaim) -> bool:
        """Whether nobody of another line who competes for the same devices comes before."""
        with self._lock:
            head = next(self._competing(claim), None)
            mine = head is claim or (head is not None and claim.line is not None and head.line == claim.line)
            return mine and claim.number in self._waiting and claim.ids.isdisjoint(self._wanted_elsewhere())

    def alone(self, claim: SharedClaim) -> bool:
        """Whether nobody of another line waits for one of the same devices."""
        with self._lock:
            own = claim.line
            for other in self._competing(claim):
                if other is not claim and (own is None or other.line != own):
                    return False
            return claim.number in self._waiting and claim.ids.isdisjoint(self._wanted_elsewhere())

    def _competing(self, claim: SharedClaim) -> Iterator[SharedClaim]:
        """Those of this process who wait for one of the same devices, itself included; called with the lock held."""
        return (other for other in self._waiting.values() if not other.ids.isdisjoint(claim.ids))

    def wanted(self, devices: frozenset[str]) -> frozenset[str]:
        """Those of some devices, by id, for which somebody waits."""
        with self._lock:
            wanted = self._wanted_elsewhere().union(*(claim.ids for claim in self._waiting.values()))
        return frozenset(each for each in devices if not wanted.isdisjoint(self.scope.with_parts((each,))))

    def _wanted_elsewhere(self) -> frozenset[str]:
        """Devices for which other processes wait, as of a moment ago; called with the lock held."""
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS:
            self._looked = now
            keys = self.ledger.wanted(frozenset(self._ids))
            self._others = frozenset(self._ids[key] for key in keys)
        return self._others

    def _line_up(self, line: object) -> None:
        """Let neighbors claim what they have put off, once for all of it; it stands behind a claim that waits."""
        with self._lock:
            needless = all(line is not None and claim.line == line for claim in self._waiting.values())
        if self._lining_up or needless:
            return
        self._lining_up = True
        try:
            for neighbor in self._present():
                neighbor.line_up()
        finally:
            self._lining_up = False

    def _present(self) -> list[Neighbor]:
        with self._lock:
            return list(self._neighbors)
