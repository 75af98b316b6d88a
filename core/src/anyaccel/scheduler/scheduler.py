"""The schedulers of one machine and of several, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from time import monotonic

from anyaccel.model import Allocation, Extent, Inventory
from anyaccel.policy import Policy
from anyaccel.scheduler.allocator import Allocator
from anyaccel.scheduler.books import Books
from anyaccel.scheduler.placement import Validate
from anyaccel.scheduler.ticket import notify


class Scheduler(Allocator):
    """Gives the devices of one machine to requests, exactly and in order. Methods are thread-safe.

    Args:
        inventory: The machine.
        validate: The vendors' rules: called with a term and devices of one vendor, returns a refusal or None. Must be a
            pure function; called while the scheduler is locked.
        known: Names that installed plug-ins know beside those on this machine: a request for one of them never fits,
            while any other name is an error.
        policy: The queue policy, as in the machine's ledger; None for priority and arrival alone.
        clock: Returns the time in seconds for the policy.
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
        """The machine, as of the last update."""
        return self._own.inventory

    def update(self, inventory: Inventory) -> None:
        """Adopt a machine with lost, added, repaired or repartitioned devices.

        Allocations stay: a held part of a lost or indivisible device counts until its release, also if the device
        returns meanwhile. Waiting requests keep their positions, and are served if they now can be. A request that can
        never fit any more blocks no other request until it can fit again; with ``else=cpu`` it gets an allocation
        without devices. Known names stay known.

        Args:
            inventory: The present machine.

        Raises:
            ValueError: When two of its devices have one id; then nothing has changed.
        """
        with self._lock:
            placed = self._update("", inventory)
        notify(placed)

    def occupy(self, held: Mapping[str, Extent], *, holder: str, note: str = "") -> Allocation:
        """Count parts of devices as held by a foreign holder.

        Args:
            held: Held extents by device id, counted as far as they are free.
            holder: Identity of the allocation, as known elsewhere.
            note: Description of the holder.

        Returns:
            An allocation, to be passed to :meth:`release`.

        Raises:
            KeyError: When no device has one of the ids.
            ValueError: When something is held under this identity already.
        """
        return self._occupy("", held, holder, note)

    def free(self, device_id: str) -> int:
        """Return the free units of a device in 1/10000; 0 for a hidden or unhealthy device.

        Raises:
            KeyError: When no device has this id.
        """
        return self._own.free(device_id)

    def holders(self, device_id: str) -> tuple[Allocation, ...]:
        """Return the allocations of a device, in order of arrival.

        Raises:
            KeyError: When no device has this id.
        """
        return self._own.holders(device_id)


class Fleet(Allocator):
    """Gives the devices of several machines to requests, exactly and in order. Methods are thread-safe.

    A request is served by the first machine, in their order, that can serve it now; so machines fill up one after the
    other. A gang, for which ``hosts`` is more than 1, is served by the first machines that can, by each at once.

    Args:
        machines: The machines by name.
        validate: The vendors' rules, as for :class:`Scheduler`, like the next.
        known: Names that are known beside those on the machines.
        policy: The queue policy; None for priority and arrival alone.
        clock: Returns the time in seconds for the policy.

    Examples:
        >>> nodes = {"node-a": anyaccel.detect("sim:H100:2"), "node-b": anyaccel.detect("sim:H100:2")}
        >>> fleet = anyaccel.open_scheduler(nodes)
        >>> fleet.allocate("GPU:1").machine, fleet.allocate("GPU:2").machine
        ('node-a', 'node-b')
    """

    @property
    def machines(self) -> Mapping[str, Inventory]:
        """The machines by name, as of the last updates."""
        return {name: site.books.inventory for name, site in self._arrangement.by_name.items()}

    def update(self, machine: str, inventory: Inventory | None) -> None:
        """Adopt a new, changed or removed machine.

        Allocations stay until their release, also on a removed machine. Waiting requests keep their positions; see
        :meth:`Scheduler.update`.

        Args:
            machine: Name of the machine.
            inventory: The present devices; None for a removed machine.

        Raises:
            ValueError: When two of its devices have one id; then nothing has changed.
        """
        with self._lock:
            placed = self._update(machine, inventory)
        notify(placed)

    def occupy(self, machine: str, held: Mapping[str, Extent], *, holder: str, note: str = "") -> Allocation:
        """Count parts of a machine's devices as held by a foreign holder; see :meth:`Scheduler.occupy`.

        Raises:
            KeyError: When no machine has this name, or no device of it one of the ids.
            ValueError: When something is held under this identity already.
        """
        return self._occupy(machine, held, holder, note)

    def on(self, machine: str) -> Books:
        """Return the books of a machine, for reading: ``inventory``, ``free`` units and ``holders`` of a device.

        The books of a removed machine stay as long as something is held there.

        Raises:
            KeyError: When no machine has this name.
        """
        return self._books[machine]
