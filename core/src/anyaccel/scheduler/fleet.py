"""The scheduler of several machines, in one process."""

from __future__ import annotations

from collections.abc import Mapping

from anyaccel.model import Allocation, Extent, Inventory
from anyaccel.scheduler.allocator import Allocator
from anyaccel.scheduler.books import Books
from anyaccel.scheduler.ticket import notify


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
