"""Watch the leases of a machine for changes."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Event

from anyaccel.errors import UsageError
from anyaccel.launcher.verdicts import leases
from anyaccel.ledger import LeaseRecord
from anyaccel.model import Inventory, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

LOOK_SECONDS = 1.0
"""Seconds between two looks at the ledger."""


class LeaseWatch:
    """An iterator over the leases of a machine: the present leases first, then the new list after each change.

    :meth:`close` ends the iteration; any thread may call it.
    """

    def __init__(self, inventory: Inventory, environ: Mapping[str, str] | None, every: float) -> None:
        self._inventory, self._environ, self._every = inventory, environ, every
        self._known: tuple[LeaseRecord, ...] | None = None
        self._closed = Event()

    def close(self) -> None:
        """End the iteration; a thread that waits for the next change gets StopIteration at once."""
        self._closed.set()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[LeaseRecord, ...]:
        while not self._closed.wait(self._every if self._known is not None else 0):
            found = leases(self._inventory, self._environ)
            # A reason may tell a remaining time, which is no change.
            plain = tuple(replace(record, reason="", until=None) for record in found)
            if plain != self._known:
                self._known = plain
                return found
        raise StopIteration


def watch_leases(
    inventory: Inventory, *, every: float = LOOK_SECONDS, environ: Mapping[str, str] | None = None
) -> LeaseWatch:
    """Watch the leases, drains and reservations of a machine for changes.

    Args:
        inventory: The machine.
        every: Seconds between two looks at the ledger.
        environ: The environment, which may name the state directory; that of this process if None.

    Returns:
        An iterator over the records of :func:`anyaccel.leases`: the present ones at once, then again after each change,
        for which the iterator waits. A change of a reason or an end alone is none. The iteration raises
        StateDirectoryError if the ledger cannot be read.

    Raises:
        UsageError: If ``every`` is not more than 0.

    Examples:
        >>> watch = anyaccel.watch_leases(anyaccel.detect("sim:H100:2"))
        >>> next(watch)
        ()
        >>> with anyaccel.acquire("GPU:1", machine="sim:H100:2"):
        ...     len(next(watch))
        1
    """
    if not every > 0:
        raise UsageError(f"every must be seconds, more than 0 (got {every!r:.60})")
    return LeaseWatch(inventory, environ, every)
