"""The ledger: which devices of this machine are held, by whom, and who is next."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from anyaccel.errors import LeaseNotFoundError, StateDirectoryError
from anyaccel.ledger.acquisition import Acquisition, Choose, OnWait
from anyaccel.ledger.directory import NoStateDirectoryError, StateDirectory, find
from anyaccel.ledger.lease import Lease, Place, Want
from anyaccel.ledger.listing import Listing, read, states
from anyaccel.ledger.lockfile import Life
from anyaccel.ledger.names import MAX_PRIORITY, LeaseName
from anyaccel.ledger.record import LeaseRecord, TicketRecord, records
from anyaccel.ledger.turns import ended, lenient_rules, rules
from anyaccel.linux import mark as marks
from anyaccel.linux import process
from anyaccel.linux.descriptors import open_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.policy import OverLimit

_Found = TypeVar("_Found")


class Ledger:
    """Leases that every process on the machine shares. Every method may be called by any thread.

    There is no server: a lease is a file that its holder keeps locked, and the kernel ends it with the last process
    that carries it. See ``docs/explanation/ledger.md``.

    Attributes:
        path: The state directory.
        shared: Whether other users take part.
    """

    def __init__(self, state: StateDirectory) -> None:
        self._state = state

    @classmethod
    def open(cls, environ: Mapping[str, str] | None = None) -> Ledger:
        """Open the ledger of this machine.

        Args:
            environ: The environment, in which ``ANYACCEL_STATE_DIR`` names another directory than ``/run/anyaccel``;
                that of this process when None.

        Raises:
            StateDirectoryError: When there is no directory that can be trusted.
        """
        if sys.platform != "linux":
            raise StateDirectoryError(f"leases need Linux (this is {sys.platform}); devices can still be listed")
        return cls(find(os.environ if environ is None else environ))

    @property
    def path(self) -> str:
        """The state directory."""
        return self._state.path

    @property
    def shared(self) -> bool:
        """Whether other users take part."""
        return self._state.shared

    def acquire(
        self,
        want: Want,
        choose: Choose,
        *,
        wait: float | None = None,
        priority: int = 0,
        note: str = "",
        on_wait: OnWait | None = None,
    ) -> Lease:
        """Get devices, when it is our turn.

        Requests that compete for a device are served strictly in the order of arrival, by priority; others may pass.
        A place in line is taken after 10 ms; from then on nobody who comes later is served before, unless we stop
        looking for seconds.

        Args:
            want: What is wanted.
            choose: Called with what is taken, an :class:`~anyaccel.model.Extent` by the device's name; returns what to
                hold, likewise, or None when what is left does not do. Without any lock, often, and by this thread. An
                empty choice gives a lease of nothing.
            wait: Seconds to wait; 0 to take what is free now or nothing, None to wait for as long as it takes.
            priority: The higher, the earlier; by agreement among users.
            note: What it is for, for people to read.
            on_wait: Called with the place in line, 1 for the next, and with who holds devices that would do: once we
                are in line, and when the place changes. What it raises ends the wait.

        Returns:
            The lease, to be released.

        Raises:
            DevicesBusyError: When they were not free in time.
            LeaseCancelledError: When its ticket was cancelled.
            StateDirectoryError: When the state directory cannot be used (any more).
            LedgerBusyError: When another process keeps it locked.
            LedgerError: When the kernel refuses something: space, descriptors.
        """
        return self.begin(want, choose, wait=wait, priority=priority, note=note, on_wait=on_wait).get()

    def begin(
        self,
        want: Want,
        choose: Choose,
        *,
        wait: float | None = None,
        priority: int = 0,
        note: str = "",
        on_wait: OnWait | None = None,
        place: Place | None = None,
    ) -> Acquisition:
        """Begin what :meth:`acquire` does, for a caller that drives it, or may have to undo it after an interrupt.

        With the ``place`` of a request that was given up, this one stands where that one stood.
        """
        if wait is not None and not 0 <= wait <= math.inf:
            raise ValueError(f"wait must be seconds, 0 or more, or None (got {wait!r})")
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise ValueError(f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY} (got {priority!r})")
        return Acquisition(
            self._state, want, choose, wait=wait, priority=priority, note=note, on_wait=on_wait, kept=place
        )

    def make(self) -> None:
        """Make the state directory where there is none, and bring over the leases that users keep in their own.

        Raises:
            StateDirectoryError: When it cannot be made.
        """
        self._state.bring_over()

    def leases(self) -> tuple[LeaseRecord, ...]:
        """The leases that are in force: one record for each device of each."""
        return self._looked(records)

    def tickets(self) -> tuple[TicketRecord, ...]:
        """Those who wait, first to be served first."""
        from anyaccel.ledger.tickets import records

        return self._looked(records)

    def starts(self, want: Want) -> float | None:
        """When a request that came now would start if everything lasts as long as it may.

        Returns:
            Seconds since 1970; None when that is not known, since something says no end.
        """
        from anyaccel.ledger.tickets import newcomer_starts

        own = self._newcomer(want).facts
        found = self._looked(lambda directory, listing: newcomer_starts(directory, listing, own))
        return found[0] if found else None

    def ahead(self, want: Want, priority: int) -> int:
        """How many requests ahead must be waited for by one that came now, and want one of the same devices."""
        newcomer = self._newcomer(want, priority)

        def look(directory: int, listing: Listing) -> Iterable[int]:
            newcomer.stand(directory, listing)
            return (newcomer.place,) if newcomer.before is not None else ()

        found = self._looked(look)
        return found[0] if found else 0

    def _newcomer(self, want: Want, priority: int = 0) -> Acquisition:
        """Return a request that takes nothing, for a look at where it would stand."""
        return Acquisition(self._state, want, lambda _: None, priority=priority, policy=lenient_rules())

    def over_limits(self, want: Want, priority: int, *, only: Collection[str] | None = None) -> tuple[OverLimit, ...]:
        """Return the limits of this user that stand in the way of a request that came now.

        Args:
            want: What it wants.
            priority: The higher, the earlier.
            only: Identities of the leases that count; all of them when None.

        Raises:
            ConfigurationError: When the machine's configuration cannot be trusted or understood.
            StateDirectoryError: When the ledger cannot be read.
        """
        policy = rules()
        if policy.plain:
            return ()
        newcomer = Acquisition(self._state, want, lambda _: None, priority=priority, policy=policy)

        def look(directory: int, listing: Listing) -> tuple[OverLimit, ...]:
            others = {lease.name for lease in listing.leases if only is not None and lease.id not in only}
            return newcomer.over_limits(directory, listing, ended(directory, listing) | others)

        found = self._looked(look)
        return found or policy.over_limits(newcomer.facts, ())  # there may be no state directory yet

    def wanted(self, devices: frozenset[str]) -> frozenset[str]:
        """Those of some devices for which another process waits: a quick look for those who could give some back."""
        from anyaccel.ledger.tickets import wanted_by_others

        return frozenset(self._looked(lambda directory, listing: wanted_by_others(directory, listing, devices)))

    def _looked(self, look: Callable[[int, Listing], Iterable[_Found]]) -> tuple[_Found, ...]:
        """What is found in the state directory, given its descriptor and what is in it; nothing where there is none."""
        try:
            with self._state.opened() as directory:
                return tuple(look(directory, read(directory)))
        except NoStateDirectoryError:
            return ()

    def carriers(self, lease_id: str) -> tuple[int, ...] | None:
        """The processes that keep a lease whose holder has ended, as far as they can be seen; None when it is over.

        Raises:
            StateDirectoryError: When the ledger cannot be read.
        """

        def look(directory: int, listing: Listing) -> Iterable[tuple[int, ...]]:
            found = states(directory, listing.of(lease_id))
            return (state.carriers for state in found.values() if state.life is not Life.OVER)

        found = self._looked(look)
        return tuple(sorted({pid for pids in found for pid in pids})) if found else None

    def release_of(self, lease_id: str, *, grace: float = 10.0, force: bool = False) -> tuple[int, ...]:
        """End a lease of one's own from outside, or any lease as root, by ending all that was started with it.

        A process is ended only where the kernel confirms that it holds the lease or carries its mark, and where it
        belongs to the owner of the lease.

        Args:
            lease_id: Identity of the lease.
            grace: Seconds for the processes to end after SIGTERM.
            force: Whether to kill those that did not.

        Returns:
            The processes that were asked to end.

        Raises:
            LeaseNotFoundError: When there is no such lease.
            LeasePermissionError: When it belongs to another user.
            LedgerError: When it is still held in the end, or by this process itself.
        """
        from anyaccel.ledger.ending import end

        try:
            return end(self._state, lease_id, grace=grace, force=force)
        except NoStateDirectoryError as error:
            raise LeaseNotFoundError(f"no lease {lease_id!r} is in force: {error}") from error

    def cancel(self, ticket_id: str, *, seconds: float = 30.0) -> int:
        """Have somebody of one's own who waits leave the line, or anybody as root.

        Its call for devices raises :class:`~anyaccel.errors.LeaseCancelledError`; its process is not ended.

        Args:
            ticket_id: Identity of the ticket.
            seconds: Time for the one who waits to notice.

        Returns:
            The process that waited, as its ticket says.

        Raises:
            LeaseNotFoundError: When nobody waits with this ticket.
            LeasePermissionError: When it belongs to another user.
            LedgerError: When the one who waits does not notice in time.
        """
        from anyaccel.ledger.tickets import cancel

        try:
            return cancel(self._state, ticket_id, seconds=seconds)
        except NoStateDirectoryError as error:
            raise LeaseNotFoundError(f"nobody waits with ticket {ticket_id!r}: {error}") from error

    def forget(self, lease_id: str) -> tuple[int, ...]:
        """Give back what a lease of one's own holds, and leave alone what still runs with it.

        Returns:
            The processes that still run with the devices, as far as they can be seen.

        Raises:
            LeaseNotFoundError: When there is no such lease.
            LeasePermissionError: When it belongs to another user, also for root.
            LedgerError: When the ledger cannot be written, or a process keeps the lock on the device itself.
        """
        from anyaccel.ledger.ending import forget

        return forget(self._state, lease_id)

    def refusal(self, lease_id: str) -> str:
        """Say why a lease does not cover this process; empty when it does.

        It covers a process that was started with it, as long as it is in force.
        """

        def look(directory: int, listing: Listing) -> Iterable[bool]:
            files = listing.of(lease_id)
            found = states(directory, files)
            return (_covers(directory, lease) for lease in files if found[lease.name].life is not Life.OVER)

        covers = self._looked(look)
        if not covers:
            return "it has ended"
        return "" if any(covers) else "this process was not started with it"

    def __repr__(self) -> str:
        return f"<Ledger {self.path}{'' if self.shared else ' (not shared)'}>"


def _covers(directory: int, lease: LeaseName) -> bool:
    """Whether this process was started with a lease, as the kernel tells; it is in force."""
    if lease.mark:
        return marks.carried(lease.mark)
    if process.me() == (lease.pid, lease.start) or process.is_ancestor(lease.pid, lease.start):
        return True
    found = os.stat(lease.name, dir_fd=directory, follow_symlinks=False)
    return any(pid == os.getpid() for pid, _ in open_files({(found.st_dev, found.st_ino)}, os.getpid()))
