"""The scheduler of several machines, in one process."""

from __future__ import annotations

from collections.abc import Mapping

from anyaccel.model import Allocation, Extent, Inventory
from anyaccel.scheduler.allocator import Allocator
from anyaccel.scheduler.books import Books
from anyaccel.scheduler.ticket import notify


class Fleet(Allocator):
    """Gives the devices of several machines to requests, exactly and in order. Any thread may call any method.

    A request is served by the first machine, in their order, that can serve it now; so machines fill up one after the
    other. A gang, for which ``hosts`` is more than 1, is served by the first machines that can, by all at once.

    Args:
        machines: The machines by name.
        validate: The vendors' rules, as of :class:`Scheduler`, like the next.
        known: Names that are known beside those on the machines.
        policy: The order of service, and which requests may pass; None for priority and arrival alone.
        clock: Seconds of the clock that the policy goes by.

    Examples:
        >>> nodes = {"node-a": anyaccel.detect("sim:H100:2"), "node-b": anyaccel.detect("sim:H100:2")}
        >>> fleet = anyaccel.open_scheduler(nodes)
        >>> fleet.allocate("GPU:1").machine, fleet.allocate("GPU:2").machine
        ('node-a', 'node-b')
    """

    @property
    def machines(self) -> Mapping[str, Inventory]:
        """The machines by name, as they were last told."""
        return {name: site.books.inventory for name, site in self._arrangement.by_name.items()}

    def update(self, machine: str, inventory: Inventory | None) -> None:
        """Go on with a machine that is new, has changed, or is gone.

        Nothing that is held is lost, also of a machine that is gone, until it is released. Who waits keeps the place;
        see :meth:`Scheduler.update`.

        Args:
            machine: Its name.
            inventory: What it has now; None when it is gone.

        Raises:
            ValueError: When two of its devices have one id; then nothing has changed.
        """
        with self._lock:
            placed = self._update(machine, inventory)
        notify(placed)

    def occupy(self, machine: str, held: Mapping[str, Extent], *, holder: str, note: str = "") -> Allocation:
        """Count parts of one machine's devices as held by somebody who did not ask; see :meth:`Scheduler.occupy`.

        Raises:
            KeyError: When no machine has this name, or no device of it one of the ids.
            ValueError: When something is held under this identity already.
        """
        return self._occupy(machine, held, holder, note)

    def on(self, machine: str) -> Books:
        """The books of one machine, to look at: ``inventory``, what is ``free`` there and the ``holders`` of a device.

        Raises:
            KeyError: When no machine has this name.
        """
        return self._books[machine]
