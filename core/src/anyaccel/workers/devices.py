"""The devices of a pool: asked for, held, given back, or kept aside."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial

from anyaccel.model import Allocation
from anyaccel.workers.backlog import Place
from anyaccel.workers.handle import Gone
from anyaccel.workers.leases import Held, Leases
from anyaccel.workers.lifecycle import Lifecycle
from anyaccel.workers.loop import loop
from anyaccel.workers.member import Member
from anyaccel.workers.reclaim import can_tell, release_when_free


class Devices(Lifecycle):
    """A pool as a neighbor of others that take devices from the same leases.

    No lock is held while devices are asked for or given back: both may call others, and come back to us.

    Args:
        leases: Gives the machine and its devices; called once, when they are needed first.
        grace: Seconds between asking a process to end and killing it.
        idle: Seconds after which an unused process gives its devices back.
        confined: Whether holders will be confined to their devices.
    """

    def __init__(self, leases: Callable[[], Leases], *, grace: float, idle: float, confined: bool) -> None:
        super().__init__(grace=grace, idle=idle)
        self._confined = confined
        self._leases_of = leases
        self._leases: Leases | None = None
        self._opening = threading.Lock()
        self._aside: dict[int, tuple[Allocation, str]] = {}

    @abstractmethod
    def pump(self) -> None:
        """Start whatever can be started now."""

    @property
    def leases(self) -> Leases:
        """The machine and its devices.

        Raises:
            MachineError: When the machine cannot be understood.
        """
        if self._leases is None:
            with self._opening:
                if self._leases is None:
                    leases = self._leases_of()
                    leases.join(self)
                    self._leases = leases
        return self._leases

    def line_up(self) -> None:
        """Somebody else comes for devices: let all who wait here have a place in front of them."""
        with self.lock:
            places = self.backlog.line_up()
        for place in places:
            self.claim(place)

    @abstractmethod
    def go_on(self, member: Member) -> bool:
        """Give an unused worker the next call of its kind, unless that would overtake somebody."""

    @abstractmethod
    def rest(self, member: Member) -> None:
        """Keep a worker for later calls, unless somebody waits for its devices."""

    def make_way(self, devices: frozenset[str]) -> None:
        """Somebody waits for devices: those that we hold without using them go back, unless it is us who wait."""
        with self.lock:
            # Where a claim is being made just now, nobody can say yet who comes first; whoever makes it comes again.
            unused = self.resting.take_holders(devices, unless=self.backlog.claiming)
        for member in unused:
            if self.go_on(member):
                continue
            if self.leases.wanted(member.ids):  # still: the one before may have run what they were wanted for
                member.finish()
            else:
                self.rest(member)

    def claim(self, place: Place | None) -> None:
        """Stand in line for devices, where there is anybody to do so."""
        task = None if place is None else place.task
        if place is None or task is None or task.options.needs is None:
            return
        try:
            claim = self.leases.claim(
                task.options.needs,
                task.name,
                partial(self._on_held, place),
                partial(self._on_failed, place),
                confined=self._confined,
                line=None if task.options.reuse is None else (id(self), task.options.reuse),
            )
        except Exception as error:  # noqa: BLE001 - the request was served before; whatever has changed, it is told
            self._on_failed(place, error)
            return
        with self.lock:
            place.claim = claim
            unwanted = place.task is None
        if unwanted:
            claim.withdraw()
        self._look_at_resting()

    def kept_aside(self) -> tuple[tuple[Allocation, str], ...]:
        """Devices that nobody gets although their holder has been ended, and why."""
        with self.lock:
            return tuple(self._aside.values())

    def set_aside(self, held: Held, reason: str) -> None:
        """Say why devices are kept."""
        with self.lock:
            known = self._aside.get(id(held))
            self._aside[id(held)] = (held.allocation, reason)
        if known is None or known[1] != reason:
            held.set_aside(reason)

    def give_back(self, held: Held, gone: Gone) -> None:
        """Give devices back: at once when their holder has ended by itself, else when nothing of it is left."""
        inventory = self.leases.inventory

        def release() -> None:
            with self.lock:
                self._aside.pop(id(held), None)
            held.release()

        if gone.status == 0 or not gone.forked or not can_tell(inventory, held.allocation):
            release()
        else:
            release_when_free(inventory, held.allocation, gone.pid, keep=partial(self.set_aside, held), release=release)

    @staticmethod
    def give_up(place: Place | None) -> None:
        """Leave a place in line that nobody inherits."""
        if place is not None and place.claim is not None:
            place.claim.withdraw()

    def _on_failed(self, place: Place, error: Exception) -> None:
        with self.lock:
            task = place.task
            if task is not None:
                self.backlog.remove(task)
            heir = place.task
        if task is not None:
            task.fail(error)
        if heir is not None:
            loop().call_soon(partial(self.claim, place))  # not from here: a thousand may follow
        self._look_at_resting()
        self.settle()

    def _on_held(self, place: Place, held: Held) -> None:
        with self.lock:
            taken, following = self.backlog.grant(place, held)
        if not taken:
            held.release()
        if following is not None:
            self.claim(following)
        self.pump()

    def _look_at_resting(self) -> None:
        """A claim has been made, or not: now it can be said for whom the devices of unused workers are."""
        if self.resting:
            with self.lock:
                held = self.resting.held()
            self.make_way(self.leases.wanted(held))

    def _end_idle(self) -> None:
        """End workers that have held devices for too long without a call."""
        with self.lock:
            old = self.resting.take_old()
            when = self.resting.next_look()
            unused = self.resting.held()
        for member in old:
            member.finish()
        if when is not None:
            self.make_way(self.leases.wanted(unused))
            self.look_at_idle(when)

    def look_at_idle(self, when: float) -> None:
        """Look at unused workers that hold devices: when the first gets too old, and as often as others have to ask."""
        every = self.leases.look_seconds
        loop().call_at(when if every is None else min(when, time.monotonic() + every), self._end_idle)
