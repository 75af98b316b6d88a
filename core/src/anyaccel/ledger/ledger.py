"""The ledger: the devices of this machine that are in use, their holders, and the order of waiting requests."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from anyaccel.ledger import machine_policy, tickets
from anyaccel.ledger.acquisition import Acquisition, Choose
from anyaccel.ledger.directory import NoStateDirectoryError, StateDirectory, find
from anyaccel.ledger.entries import LeaseName, Listing, find_active, list_names, sweep
from anyaccel.ledger.lease import Lease, Want
from anyaccel.ledger.record import LeaseRecord, TicketRecord, list_leases, since_boot
from anyaccel.linux import mark as marks
from anyaccel.linux import open_files, process
from anyaccel.policy import Waiting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Unpack

    from anyaccel.ledger.acquisition import Terms
    from anyaccel.ledger.entries import Tenure
    from anyaccel.ledger.handovers import HandoverFile
    from anyaccel.policy import OverLimit


class Ledger:
    """Leases that every process on the machine shares. Methods are thread-safe.

    There is no server: a lease is a file that its holder keeps locked, and the kernel ends the lease with the last
    process that carries the lock. See ``docs/explanation/ledger.md``.

    Attributes:
        state: The state directory.
        path: The path of the state directory.
        shared: Whether other users take part.
    """

    def __init__(self, state: StateDirectory) -> None:
        self.state = state

    @classmethod
    def open(cls, environ: Mapping[str, str] | None = None) -> Ledger:
        """Open the ledger of this machine. A missing directory is not made, and is no error if its parent exists.

        An existing directory is checked. The first check by this user after a boot also makes missing files of active
        leases again.

        Args:
            environ: The environment, in which ``ANYACCEL_STATE_DIR`` names another directory than ``/run/anyaccel``;
                the environment of this process when None.

        Raises:
            StateDirectoryError: When the directory cannot be trusted, when the variable has a relative path or one
                whose parent is missing, or when this is not Linux.
            LedgerError: When a system call fails.
        """
        return cls(find(os.environ if environ is None else environ))

    @property
    def path(self) -> str:
        """The state directory; before there is one, the place where this user would make it."""
        return self.state.path

    @property
    def shared(self) -> bool:
        """Whether other users can take part; before there is a directory, as in one made by this user."""
        return self.state.shared

    def acquire(self, want: Want, choose: Choose, **terms: Unpack[Terms]) -> Lease:
        """Acquire devices as soon as the request is next. A missing state directory is made.

        Requests that compete for a device are served by priority and arrival, unless the machine's policy gives another
        order; a request that competes with none ahead is served at once. A ticket is made after 10 ms. From then on a
        later request of the same priority is served before only by the policy, a reservation or backfill (see
        :mod:`anyaccel.backfill`), or if this process stops looking for seconds.

        Args:
            want: The request; without a time limit, it gets the longest that the policy allows this user.
            choose: Called with the taken extents by device name; returns the :class:`~anyaccel.model.Extent` to hold of
                each device, or None if the free ones do not suffice. Called often, without a lock, by this thread. An
                empty choice gives an empty lease.
            terms: How to wait, and what others see; see :class:`~anyaccel.ledger.acquisition.Terms`.

        Returns:
            The lease, to be released.

        Raises:
            DevicesBusyError: When the devices were not free in time.
            LimitError: When the request is over a limit of this user, whatever leases the user releases; also later,
                when the policy has changed.
            LeaseCancelledError: When the ticket was cancelled.
            ConfigurationError: When the machine's configuration cannot be trusted or understood.
            StateDirectoryError: When the state directory cannot be used (any more).
            LedgerBusyError: When another process keeps the directory locked.
            LedgerError: When the kernel is out of space or descriptors.
            UsageError: When ``wait`` or ``priority`` is out of range.
            Exception: As ``choose`` raises.
        """
        return Acquisition(self.state, want, choose, **terms).get()

    def make(self) -> None:
        """Make the state directory if it is missing; root also moves users' own leases to the machine's directory.

        If ``ANYACCEL_STATE_DIR`` names another directory, no lease is moved. Users' own directories are removed after
        the move, unless other files are left there.

        Raises:
            LedgerError: When the directory cannot be made, or leases cannot be moved.
        """
        self.state.bring_over()

    def leases(self) -> tuple[LeaseRecord, ...]:
        """List the active leases, one record for each device of each lease; and devices drained or reserved now.

        A device that a lease only divides has a record with 0 units. Leases are sorted by device; drained and reserved
        devices follow. Without a state directory, no lease is active.

        Raises:
            LedgerError: When the ledger cannot be read.
        """
        now = time.time()
        return self._list([block for block in self.blocks() if block.begin is None or block.begin <= now])

    def find_obstacles(self, seconds: float | None) -> tuple[LeaseRecord, ...]:
        """List the active leases, and devices that are withheld from a request of this user that starts now.

        Withheld devices are drained, or reserved for other users from before the request would end.

        Args:
            seconds: Time limit of the request; None for no limit, so that each later reservation counts.

        Raises:
            LedgerError: When the ledger cannot be read.
        """
        own = Waiting(key=None, number=0, since=0.0, user=process.find_outer_user(os.geteuid()), seconds=seconds)
        now = process.boot_seconds()
        return self._list([block for block in self.blocks() if block.policy_block.meets(own, now)])

    def _list(self, blocks: Iterable[machine_policy.DeviceBlock]) -> tuple[LeaseRecord, ...]:
        """List the active leases, then the devices of drains and reservations."""
        with self._looking() as (directory, listing):
            return (*list_leases(directory, listing), *(record for block in blocks for record in block.records()))

    def blocks(self) -> tuple[machine_policy.DeviceBlock, ...]:
        """List the drains and reservations that have not ended, also future ones.

        The directory's own file counts, if trusted; else, for the machine's directory, even a missing one, the copy
        that outlasts a boot. None without a trusted file.

        Raises:
            LedgerError: When the file cannot be read.
        """
        return machine_policy.read_blocks(self.state)

    def change_blocks(
        self, change: Callable[[tuple[machine_policy.DeviceBlock, ...]], Sequence[machine_policy.DeviceBlock]]
    ) -> None:
        """Replace the drains and reservations; running leases go on. A missing state directory is made.

        After an error of writing, the change may come with the next boot; see
        :func:`~anyaccel.ledger.machine_policy.write_blocks`.

        Args:
            change: Returns the new drains and reservations, given those that have not ended. Called with the state
                directory locked: each lease of that moment is seen by :meth:`find_leased`, and each later one is
                checked against what is returned. An OSError becomes a LedgerError; other exceptions pass unchanged.

        Raises:
            LeasePermissionError: When this user is neither root nor the owner of the state directory.
            LedgerError: When the directory stays locked, the blocks cannot be read, or cannot be written.
        """
        with self.state.locked(make=True) as directory:
            machine_policy.check_permission(self.state, os.fstat(directory).st_uid)
            machine_policy.write_blocks(self.state, change(self.blocks()))

    def find_leased(self, when: float) -> frozenset[str]:
        """Return the devices that may be leased at a time, in seconds since 1970.

        A device of a lease without a time limit may be leased at any time.

        Raises:
            LedgerError: When the ledger cannot be read.
        """
        start = since_boot(when) * 1000
        with self._looking() as (directory, listing):
            over = tickets.find_ended(directory, listing)
            leases = [lease for lease in listing.leases if lease.name not in over]
        ends = ((lease.device, lease.period.until) for lease in leases)
        return frozenset(device for device, until in ends if until is None or until > start)

    def tickets(self, *, past: bool = True, devices: Collection[str] | None = None) -> tuple[TicketRecord, ...]:
        """List the waiting requests in the order of service; none without a state directory.

        A faulty configuration of the machine counts as none.

        Args:
            past: Whether fair shares count ended leases, which are read from the journals. Without them, the order of
                service may be another one.
            devices: Names of devices in the ledger: requests for others alone are left out; None for all requests.

        Raises:
            LedgerError: When the ledger cannot be read.
        """
        with self._looking() as (directory, listing):
            return tuple(tickets.list_tickets(self.state, directory, listing, past=past, devices=devices))

    def forecast_start(self, want: Want) -> float | None:
        """Forecast the start of a request with priority 0 that came now, if every lease lasted until its time limit.

        A faulty configuration of the machine counts as none.

        Returns:
            Seconds since 1970, whole. None if unknown: a lease or request ahead has no time limit, needed devices are
            drained, ``want`` has no needs, or the request is over a limit of this user that lasts.

        Raises:
            LedgerError: When the ledger cannot be read.
        """
        own = self._make_newcomer(want).facts
        with self._looking() as (directory, listing):
            return tickets.forecast_newcomer(self.state, directory, listing, own)

    def count_ahead(self, want: Want, priority: int, choose: Choose) -> int:
        """Count the earlier requests that would block a request that came now; 0 if each may be passed.

        With a running reservation for this user, only requests that may have the reserved devices count, as long as
        these are free and suffice.

        Ended and silent requests are left out at the front of the line only. Without a state directory, none is ahead.
        A faulty configuration of the machine counts as none.

        Args:
            want: The request.
            priority: The higher, the earlier.
            choose: As for :meth:`acquire`; only called if a reservation for this user is running.

        Raises:
            LedgerError: When the ledger cannot be read, or ``choose`` raises an OSError. Other exceptions of ``choose``
                pass unchanged.
        """
        newcomer = self._make_newcomer(want, priority, choose)
        with self._looking() as (directory, listing):
            return newcomer.count_ahead(directory, listing)

    def find_time_to_pass(self, want: Want, priority: int) -> float:
        """Return the longest time limit with which a request that came now could be served before all earlier ones.

        The devices need not be free, and a reservation may begin earlier. A faulty configuration of the machine counts
        as none.

        Args:
            want: The request.
            priority: The higher, the earlier.

        Returns:
            Seconds; infinity if no request is ahead, 0 or less if no time limit is short enough.

        Raises:
            LedgerError: When the ledger cannot be read.
        """
        newcomer = self._make_newcomer(want, priority)
        with self._looking() as (directory, listing):
            return newcomer.find_time_to_pass(directory, listing)

    def count_usage(self) -> float | None:
        """Return the device-seconds that fair shares count for this user; None if the machine sets no half-life.

        Past and active leases count, each half after every half-life; 0 if none is known. Without a state directory no
        lease is active. A faulty configuration of the machine counts as none.

        Raises:
            LedgerError: When the ledger cannot be read.
        """
        policy = machine_policy.with_past(machine_policy.policy_for_display(self.state))
        if policy.half_life is None:
            return None
        with self._looking() as (directory, listing):
            held = tickets.list_holdings(directory, listing, tickets.find_ended(directory, listing))
        return policy.usage(held, process.boot_seconds()).get(process.find_outer_user(os.geteuid()), 0.0)

    def _make_newcomer(self, want: Want, priority: int = 0, choose: Choose = lambda _: None) -> Acquisition:
        """Return an acquisition for the queue position of a request that came now, which is never attempted.

        Limits of the user are not checked, and a faulty configuration of the machine counts as none.
        """
        newcomer = Acquisition(self.state, want, choose, priority=priority)
        newcomer.adopt_policy(machine_policy.policy_for_display(self.state))
        return newcomer

    def over_limits(self, want: Want, priority: int, *, only: Collection[str] | None = None) -> tuple[OverLimit, ...]:
        """Return the limits of this user, and of this user's group, in the way of a new request; empty if none is.

        Leases that have ended do not count, and without a state directory nothing is held.

        Args:
            want: The request.
            priority: The higher, the earlier.
            only: Identities of the active leases that count; every active lease when None.

        Raises:
            ConfigurationError: When the machine's configuration cannot be trusted or understood.
            LedgerError: When the ledger cannot be read.
        """
        policy = machine_policy.current_policy(self.state)
        if policy.plain:
            return ()
        newcomer = Acquisition(self.state, want, lambda _: None, priority=priority)
        newcomer.adopt_policy(policy)
        with self._looking() as (directory, listing):
            others = {lease.name for lease in listing.leases if only is not None and lease.id not in only}
            return newcomer.over_limits(directory, listing, tickets.find_ended(directory, listing) | others)

    def unfinished_handovers(self) -> Mapping[str, str]:
        """Return the devices that a vendor changed for a holder and that were not put back, with the lease's identity.

        Devices of active leases, and changes before this boot, are left out.

        Raises:
            LedgerError: When the ledger cannot be read.
        """
        from anyaccel.ledger.handovers import list_unfinished

        with self._looking() as (directory, listing):
            return list_unfinished(directory, listing)

    def lock_handovers(self, devices: Iterable[str]) -> AbstractContextManager[Mapping[str, HandoverFile]]:
        """Context with the locked files of handovers, by device; see :func:`~anyaccel.ledger.handovers.lock_handovers`.

        Entering makes missing files and a missing state directory, and waits for each locked file in turn: up to 60 s
        for one owner of the lock, and 60 s more for each next owner.

        Args:
            devices: Names of the devices in the ledger.

        Raises:
            LedgerBusyError: On entering, when one process keeps a file locked for 60 s.
            LedgerError: When the directory or a file cannot be opened or locked; and in place of any OSError that
                leaves the body of the context.
        """
        from anyaccel.ledger.handovers import lock_handovers

        return lock_handovers(self.state, devices)

    def find_wanted(self, devices: frozenset[str]) -> frozenset[str]:
        """Return the subset of ``devices`` that requests of other processes wait for; none without a directory.

        A device may be included by mistake: requests name devices by hashes, and an unreadable request counts for each.

        Raises:
            LedgerError: When the ledger cannot be read.
        """
        with self._looking() as (directory, listing):
            return tickets.find_wanted_by_others(directory, listing, devices)

    @contextlib.contextmanager
    def _looking(self) -> Iterator[tuple[int, Listing]]:
        """Context with the open state directory and the names there; -1 and no names without a directory.

        Raises:
            LedgerError: When the directory cannot be trusted, or a system call fails in the context.
        """
        with contextlib.ExitStack() as rest:
            try:
                directory = rest.enter_context(self.state.opened())
            except NoStateDirectoryError:
                yield -1, Listing()
            else:
                yield directory, list_names(directory)

    def find_carriers(self, lease_id: str) -> tuple[int, ...] | None:
        """Return the visible processes that keep a lease whose holder has ended; None if the lease has ended.

        The files of an ended lease are removed, as far as this process may. The processes carry the mark of the lease;
        sorted. Empty while the holder lives, for a lease on behalf of other processes, and if only hidden processes, or
        only copies of the descriptors, keep the lease. An unknown identity counts as ended.

        Raises:
            LedgerError: When the ledger cannot be read.
        """
        with self._looking() as (directory, listing):
            files = listing.find_lease(lease_id)
            active = find_active(directory, files)
            if not active:
                sweep(directory, [lease.name for lease in files])
                return None
        return tuple(sorted({pid for state in active.values() for pid in state.carriers}))

    def end_lease(self, lease_id: str, *, grace: float = 10.0, force: bool = False) -> tuple[int, ...]:
        """End an own lease from outside, or any lease as root, by ending each process that was started with the lease.

        A process is signalled only if the kernel confirms that the process holds the lease or carries its mark, and if
        the process belongs to the owner of the lease; the calling process is not. The call returns once the lease has
        ended, and removes its files.

        Args:
            lease_id: Identity of the lease.
            grace: Seconds for the processes to end after SIGTERM.
            force: Whether to kill processes that have not ended by then.

        Returns:
            Ids of the signalled processes, sorted; empty if the lease ended without a signal.

        Raises:
            LeaseNotFoundError: When no such lease is active.
            LeasePermissionError: When the lease belongs to another user.
            LedgerError: When the lease is still held in the end, also after signals; when the lease is held by this
                process itself, is on behalf of other processes, or is released at the beginning of the call; when
                several other users have files with this identity.
        """
        from anyaccel.ledger.ending import end_lease

        return end_lease(self.state, lease_id, grace=grace, force=force)

    def renew(self, lease_id: str, tenure: Tenure, *, note: str | None = None) -> None:
        """Replace the tenure of an own lease on behalf of other processes; each file is replaced in one step.

        Args:
            lease_id: Identity of the lease.
            tenure: The new tenure.
            note: The new purpose of the lease, for display, cut to 250 characters; None leaves the old purpose.

        Raises:
            LeaseNotFoundError: When the lease has ended, or may have been taken for ended during the call, which then
                removes its files.
            LeasePermissionError: When the lease belongs to another user, also for root.
            LedgerError: When the lease has no tenure, since a process holds it; when the directory stays locked, or a
                file cannot be written.
        """
        from anyaccel.ledger.ending import renew

        renew(self.state, lease_id, tenure, note)

    def cancel(self, ticket_id: str, *, seconds: float = 30.0) -> int:
        """Remove an own waiting request from the line, or any request as root; wait until the request has left.

        The waiting call raises :class:`~anyaccel.errors.LeaseCancelledError`; the process is not ended.

        Args:
            ticket_id: Identity of the ticket.
            seconds: Time for the waiting process to react.

        Returns:
            Id of the waiting process, as the ticket says.

        Raises:
            LeaseNotFoundError: When no request waits with this ticket.
            LeasePermissionError: When the ticket belongs to another user.
            LedgerError: When the waiting process does not react in time; the ticket stays cancelled.
        """
        return tickets.cancel(self.state, ticket_id, seconds=seconds)

    def drop_lease(self, lease_id: str) -> tuple[int, ...]:
        """Free the devices of an own lease, although processes go on using them; none is signalled.

        The files are removed, and locks on the devices themselves are dropped through copies of the processes'
        descriptors. A device lock that another active lease names stays.

        Returns:
            Ids of the visible processes, other than this one, that still run with the devices; sorted.

        Raises:
            LeaseNotFoundError: When no such lease is active.
            LeasePermissionError: When the lease belongs to another user, also for root.
            LedgerError: When the ledger cannot be written, when the lease is released meanwhile, or when the lease is
                gone but a process keeps the lock on the device itself, or no descriptor is free to unlock it.
        """
        from anyaccel.ledger.ending import drop_lease

        return drop_lease(self.state, lease_id)

    def explain_refusal(self, lease_id: str) -> str:
        """Return the reason why a lease does not cover this process, as a clause; empty if the lease does.

        The reason is either that the lease has ended, or that this process was not started with the lease. An active
        lease with a mark covers each process that carries the mark, or a mark inside it: the holder, too, if the holder
        carries it. A lease without a mark covers the holder, the holder's descendants, and each process that has a file
        of the lease open. An unknown identity counts as ended.

        Raises:
            LedgerError: When the ledger cannot be read.
        """
        with self._looking() as (directory, listing):
            files = listing.find_lease(lease_id)
            active = find_active(directory, files)
            if not active:
                return "it has ended"
            covered = any(_covers(directory, lease) for lease in files if lease.name in active)
        return "" if covered else "this process was not started with it"

    def __repr__(self) -> str:
        return f"<Ledger {self.path}{'' if self.shared else ' (not shared)'}>"


def _covers(directory: int, lease: LeaseName) -> bool:
    """Return whether this process carries a lease's mark, or a mark inside; whether the lease is active is not tested.

    A lease without a mark covers the process in its name, the descendants by present parents, and each process with the
    file open.

    Raises:
        OSError: When the lease has no mark and its file, which is examined last, is gone.
    """
    if lease.mark:
        return marks.carried(lease.mark)
    if process.me() == (lease.pid, lease.start) or process.is_ancestor(lease.pid, lease.start):
        return True
    found = os.stat(lease.name, dir_fd=directory, follow_symlinks=False)
    return any(pid == os.getpid() for pid, _ in open_files({(found.st_dev, found.st_ino)}, os.getpid()))
