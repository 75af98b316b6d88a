"""The scheduler of one machine, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from time import monotonic

from anyaccel.model import Allocation, Extent, Inventory
from anyaccel.policy import Policy
from anyaccel.scheduler.allocator import Allocator
from anyaccel.scheduler.placement import Validate
from anyaccel.scheduler.ticket import notify


class Scheduler(Allocator):
    """Gives the devices of one machine to requests, exactly and in order. Every method may be called by any thread.

    Args:
        inventory: The machine.
        validate: The vendors' rules: called with a term and the devices of one vendor, returns a reason against them
            or None. Must be a pure function; it is called while the scheduler is locked.
        known: Names that installed plug-ins know beside those on this machine: a request for one of them never fits,
            while any other name is an error.
        policy: The order of service, and which requests may pass others, as in the machine's ledger; None for priority
            and arrival alone.
        clock: Seconds of the clock that the policy goes by.
    """

    def __init__(
        self,
        inventory: Inventory,
        validate: Validate | None = None,
        known: Iterable[str] = (),
        *,
        policy: Policy | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        super().__init__({"": inventory}, validate, known, policy=policy, clock=clock)
        self._own = self._books[""]

    @property
    def inventory(self) -> Inventory:
        """The machine, as it was last told."""
        return self._own.inventory

    def update(self, inventory: Inventory) -> None:
        """Go on with a machine of which devices were lost, added, repaired or divided anew.

        Nothing that is held is lost: what somebody holds of a device that is no longer there, or that can no longer be
        given out, counts until it is released, also should the device come back meanwhile. Who waits keeps the place,
        and whoever can be served now is. Who waits for what can never fit any more stands in nobody's way until it can
        again; with ``else=cpu`` it gets an allocation without devices. Names that were known stay known.

        Args:
            inventory: The machine as it is now.

        Raises:
            ValueError: When two of its devices have one id; then nothing has changed.
        """
        with self._lock:
            placed = self._update("", inventory)
        notify(placed)

    def occupy(self, held: Mapping[str, Extent], *, holder: str, note: str = "") -> Allocation:
        """Count parts of devices as held by somebody who did not ask this scheduler.

        Args:
            held: What is held, by device id; no more than is free is counted.
            holder: Identity of the allocation, as others know it.
            note: Who that is, in words.

        Returns:
            An allocation, to be given back to :meth:`release` when it is over.

        Raises:
            KeyError: When no device has one of the ids.
            ValueError: When something is held under this identity already.
        """
        return self._occupy("", held, holder, note)

    def free(self, device_id: str) -> int:
        """Free units of a device in 1/10000; 0 for one that is hidden or unhealthy.

        Raises:
            KeyError: When no device has this id.
        """
        return self._own.free(device_id)

    def holders(self, device_id: str) -> tuple[Allocation, ...]:
        """The allocations that hold a device, first to come first.

        Raises:
            KeyError: When no device has this id.
        """
        return self._own.holders(device_id)
