"""Waiting requests: tickets are locked files like leases, served in the order of their names.

A waiting process shows that it still looks for devices by a stamp: the modification time of its ticket, in nanoseconds
of the machine's monotonic clock. A process that has not stamped for a while, since it was stopped, frozen or starved,
is passed, and takes its position again as soon as it goes on. A stamp affects the order only, never a lease.

For the queue policy, a user is the owner of a file, which no user can choose. The name of a ticket, with the arrival,
and the body, with time limit and quantities, affect the order only.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Hashable, Iterator, Mapping
from functools import lru_cache

from anyaccel._typing import NamedTuple
from anyaccel.backfill import forecast
from anyaccel.errors import LeaseNotFoundError, LeasePermissionError, LedgerError
from anyaccel.ledger import entries, record
from anyaccel.ledger.directory import StateDirectory
from anyaccel.ledger.entries import Listing, TicketName
from anyaccel.ledger.lease import LockedFile, Want
from anyaccel.ledger.machine_policy import policy_for_display, read_blocks, with_past
from anyaccel.linux import process, tidy_in_child
from anyaccel.model import Value
from anyaccel.policy import Holding, Need, Policy, Waiting, sum_usage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BODY_LIMIT = 1 << 18
"""Bytes of a ticket: a request for many devices lists them in the body."""
_REMEMBERED = 10_000  # far more than any line has; a bound against processes that make tickets without end

_MOST_NEEDS, _MOST = 64, 1 << 20
_PATIENCE = 2.0  # a stamp that is older than eight intervals: the process does not run
_LOOKS_EVERY = 0.25
_PER_PLACE = 0.05  # requests further back look less often, since requests ahead would be served first
_CANCEL_LOOK = 0.02

_files: set[LockedFile] = set()
"""Files of tickets of this process."""


@tidy_in_child
def _close_in_child() -> None:
    """Close the copies of ticket files: in a forked child their locks would keep positions after the parent's end.

    The files stay. Runs in each forked child.
    """
    while _files:
        _files.pop().close()


def recheck_interval(place: int) -> float:
    """Return the seconds after which a waiting process looks again without an event, as a multiple of the place.

    These are ``_PER_PLACE`` for each of the ``place`` requests ahead, at least ``_LOOKS_EVERY``; there is no maximum.
    """
    return max(_LOOKS_EVERY, _PER_PLACE * place)


class TicketFile(LockedFile):
    """A position in the line, kept from :meth:`publish` until :meth:`drop` or the end of this process.

    Args:
        path: The state directory.
    """

    __slots__ = ("_owner",)

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._owner = os.getpid()
        _files.add(self)

    def publish(self, directory: int, want: Want, facts: Waiting, note: str, number: int | None = None) -> int:
        """Enter the line: make the ticket's file, stamped and locked under a hidden name, and then rename the file.

        Args:
            directory: Descriptor of the state directory, locked, so that each ticket gets a time of its own.
            want: The request.
            facts: The request as the queue policy sees it.
            note: Purpose.
            number: Number of the request's former ticket, to keep the position; None for the end of the line.

        Returns:
            The number: the time of arrival in microseconds since the boot.

        Raises:
            OSError: When the file cannot be made or named; call :meth:`drop` then.
        """
        self.make(directory, record.write_body(want.request, note, **write_ticket_words(facts)))
        self.stamp()  # before the file has its name, so that no rival sees a ticket without a stamp
        if number is None:
            # A time, not the highest number so far plus 1: the highest may be that of another user's false ticket.
            number = int(process.boot_seconds() * 1e6)
        self.rename(directory, entries.ticket_name(facts.priority, number, entries.new_nonce(), want.candidates))
        return number

    def stamp(self) -> None:
        """Show that this process still looks for devices: set the file's times to the monotonic clock.

        No effect in a forked child.

        Raises:
            OSError: When the times cannot be set, as before :meth:`publish` or after :meth:`drop`.
        """
        now = process.monotonic_ns()
        if self._owner == os.getpid():
            os.utime(self.fd, ns=(now, now))

    @property
    def cancelled(self) -> bool:
        """Whether the owner, or root, has cancelled the ticket by making the file read-only: see :func:`cancel`.

        False before :meth:`publish`, after :meth:`drop`, in a forked child, and if the file's state cannot be read.
        """
        try:
            return not os.fstat(self.fd).st_mode & stat.S_IWUSR
        except OSError:  # the file system has failed: the next look at the directory raises the error
            return False

    def drop(self) -> None:
        """Leave the line: remove and unlock the file; failures are ignored.

        No effect in a forked child: the position stays with the parent.
        """
        if self._owner == os.getpid():
            self.discard()
            _files.discard(self)


class _WaitingLine(NamedTuple):
    """The waiting requests in the order of service, as the queue policy sees them.

    Attributes:
        order: The requests.
        files: State of each ticket's file, if it has one, by name.
        silent: Keys of the requests whose processes have not looked lately.
        held: The active leases.
    """

    order: list[Waiting]
    files: Mapping[str, os.stat_result | None]
    silent: Collection[Hashable]
    held: list[Holding]

    @classmethod
    def collect(cls, policy: Policy, directory: int, listing: Listing, *newcomers: Waiting) -> _WaitingLine:
        """Sort the locked tickets and the newcomers, which have no ticket, in the order of service.

        Ended leases, and tickets whose processes have ended, are left out.

        Raises:
            OSError: When a lock cannot be tested, as for want of descriptors.
        """
        # Files of other users that have ended stay in a shared directory, which only they and root can clean.
        held = list_holdings(directory, listing, find_ended(directory, listing))
        looks = {name: entries.probe_lock(directory, name) for name in listing.tickets}
        files = {name: file for name, (locked, file) in looks.items() if locked}
        waiting = [facts for name in files if (facts := read_ticket(directory, name))]
        order = policy.order([*waiting, *newcomers], held, process.boot_seconds())
        now = process.monotonic_ns()
        silent = {
            each.key
            for position, each in enumerate(order)
            if (file := files.get(str(each.key))) is not None and is_silent(file, now, position)
        }
        return cls(order, files, silent, held)

    def forecast(self, policy: Policy) -> dict[Hashable, float]:
        """Forecast the start of each request by key, if known, in seconds since 1970; none for a silent request.

        Every lease is taken to last until its time limit. A silent request delays no other.
        """
        looking = [each for each in self.order if each.key not in self.silent]
        starts = forecast(policy, looking, self.held, process.boot_seconds())
        # Whole seconds: the two clocks are read one after the other, and 17:00 must not become 16:59.
        return {key: float(round(record.since_1970(start))) for key, start in starts.items() if start is not None}


def list_tickets(
    state: StateDirectory,
    directory: int,
    listing: Listing,
    *,
    past: bool,
    devices: Collection[str] | None = None,
) -> Iterator[record.TicketRecord]:
    """Describe the waiting requests in the order of service; tickets whose process has ended are left out.

    A stopped process is listed as not ``responsive``. A faulty configuration of the machine counts as none. See
    :meth:`anyaccel.ledger.Ledger.tickets`.

    Args:
        state: The state directory.
        directory: Its descriptor.
        listing: The names in the directory.
        past: Whether fair shares count also ended leases, from the machine's journals; the order may differ without
            them. ``used`` counts active leases in both cases. If the policy has no half-life, no journal is read, and
            ``used`` is None.
        devices: Names of devices: requests for others alone are left out; None for all requests.

    Raises:
        OSError: When a lock cannot be tested, as for want of descriptors.
    """
    among = None if devices is None else frozenset(map(entries.hash_device, devices))
    policy = policy_for_display(state)
    if past:
        policy = with_past(policy)
    line = _WaitingLine.collect(policy, directory, listing)
    if not line.order:
        return
    clock, held, blocks = process.boot_seconds(), list(record.list_leases(directory, listing)), read_blocks(state)
    starts, units = line.forecast(policy), sum_usage(line.held)
    used = None if policy.half_life is None else policy.usage(line.held, clock)
    for position, facts in enumerate(line.order):
        name = str(facts.key)
        ticket, found = entries.parse_ticket(name), line.files[name]
        if ticket is None or (among is not None and facts.wants is not None and facts.wants.isdisjoint(among)):
            continue
        words = record.read_words(entries.read_body(directory, name, BODY_LIMIT))
        whose = record.owner(found)
        user = "" if whose["uid"] == os.geteuid() else whose["user"]
        responsive = name not in line.silent
        limits = tuple(each.message(user) for each in policy.over_limits(facts, units))
        behind = sum(
            policy.keeps_waiting(other, facts, units, competes=policy.competes(other, facts, clock))
            for other in line.order[:position]
        )
        if limits:
            reason = "; ".join(limits)
        elif not responsive:
            reason = "its process is stopped or stuck; later requests are served first"
        elif behind:
            reason = record.describe_ahead(behind)
        else:
            withheld = (each for block in blocks if block.policy_block.meets(facts, clock) for each in block.records())
            wanted = (
                each
                for each in (*held, *withheld)
                if facts.wants is None or entries.hash_device(each.device) in facts.wants
            )
            reason = record.describe_obstacles(wanted, {}) or "it is served next"
        yield record.TicketRecord(
            id=ticket.id,
            priority=policy.priority(facts),
            pid=ticket.pid,
            **whose,
            waited=max(0.0, clock - ticket.since),
            responsive=responsive,
            seconds=facts.seconds,
            starts=starts.get(name),
            behind=behind,
            limits=limits,
            reason=reason,
            used=None if used is None else used.get(facts.user, 0.0),
            request=words["request"],
            note=words["note"],
            command=words["command"],
        )


def cancel(state: StateDirectory, ticket_id: str, *, seconds: float) -> int:
    """Remove a waiting request from the line: its call for devices fails, its process goes on.

    See :meth:`anyaccel.ledger.Ledger.cancel`. A ticket is cancelled by making its file read-only, which the kernel
    permits only to the owner and root. No process is signalled. Returns the id of the waiting process, once the ticket
    is gone or unlocked.

    Raises:
        LeaseNotFoundError: When no request waits with this ticket, or the ticket is leaving the line at this moment.
        LeasePermissionError: When the ticket belongs to another user.
        LedgerError: When the ticket is still there after ``seconds``, and stays cancelled; or when the directory cannot
            be used, or a system call fails.
    """
    with state.opened() as directory:
        named = (ticket for ticket in map(entries.parse_ticket, entries.list_names(directory).tickets) if ticket)
        same = (ticket for ticket in named if ticket.id == ticket_id)
        found = [ticket for ticket in same if entries.probe_lock(directory, ticket.name)[0]]
        if not found:
            raise LeaseNotFoundError(
                f"no request waits with ticket {ticket_id!r} in {state.path}",
                hint="'anyaccel queue' lists the requests that wait",
            )
        try:
            ours = [ticket for ticket in found if _forbid_writing(directory, ticket.name)]
        except FileNotFoundError as error:
            raise LeaseNotFoundError(f"ticket {ticket_id!r} has just left the line") from error
        if not ours:
            user = record.owner(entries.stat_of(directory, found[0].name))["user"]
            raise LeasePermissionError(
                f"ticket {ticket_id} belongs to {user}; only {user} and root can cancel it", hint=f"ask {user}"
            )
        deadline = time.monotonic() + seconds
        while left := [ticket for ticket in ours if entries.probe_lock(directory, ticket.name)[0]]:
            if time.monotonic() > deadline:
                raise LedgerError(
                    f"ticket {ticket_id} is cancelled, but process {left[0].pid} has not noticed within {seconds:g} s:"
                    " it is stopped, or of an older version",
                    hint=f"end it with 'kill {left[0].pid}' where that is right",
                )
            time.sleep(_CANCEL_LOOK)
        return ours[0].pid


def _forbid_writing(directory: int, name: str) -> bool:
    """Make a ticket read-only, which cancels it; return False if the ticket belongs to another user.

    Raises:
        FileNotFoundError: When the ticket is gone.
        OSError: When the ticket cannot be opened.
    """
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.fchmod(descriptor, 0o444)
    except PermissionError:
        return False
    finally:
        os.close(descriptor)
    return True


def forecast_newcomer(state: StateDirectory, directory: int, listing: Listing, own: Waiting) -> float | None:
    """Forecast the start of a request that came now if leases last until their time limits: whole seconds since 1970.

    None if the start is unknown; see :func:`anyaccel.backfill.forecast`. Past usage counts for fair shares; a faulty
    configuration of the machine counts as none.
    """
    policy = with_past(policy_for_display(state))
    return _WaitingLine.collect(policy, directory, listing, own).forecast(policy).get(own.key)


def find_wanted_by_others(directory: int, listing: Listing, devices: frozenset[str]) -> frozenset[str]:
    """Return the subset of ``devices`` that locked tickets name, without tickets of this process id.

    Silent and cancelled tickets count until they are unlocked. Tickets name devices by hashes, so a device with an
    equal hash is included, too. A ticket without a readable list of devices counts as naming each.
    """
    found: set[str] = set()
    for ticket in filter(None, map(entries.parse_ticket, listing.tickets)):
        facts = None if ticket.pid == os.getpid() else read_ticket(directory, ticket.name, brief=True)
        if facts is None:
            continue
        more = {each for each in devices - found if facts.wants is None or entries.hash_device(each) in facts.wants}
        if more and entries.probe_lock(directory, ticket.name)[0]:
            found |= more
    return frozenset(found)


def is_silent(found: os.stat_result, now: int, position: int) -> bool:
    """Return whether a stamp is too old, or over 2 s in the future, which no honest process writes.

    Too old is over 2 s, and 0.15 s more for each request ahead.

    Args:
        found: State of the ticket's file, whose modification time is the stamp.
        now: Nanoseconds of the monotonic clock.
        position: Number of requests ahead; requests further back stamp less often.
    """
    patience = _PATIENCE + 3 * _PER_PLACE * position
    return not -_PATIENCE < (now - found.st_mtime_ns) / 1e9 < patience


class _Words(Value):
    """The part of a ticket's body that the queue policy reads, with devices as hashes.

    Attributes:
        seconds: Time limit; None for no limit.
        inner: Whether the request is for parts of a lease of its user.
        wanted: The devices for which the request competes; None if unknown.
        needs: Count, units, devices and sizes of each need; see :class:`anyaccel.policy.Need`.
    """

    seconds: float | None = None
    inner: bool = False
    wanted: frozenset[int] | None = None
    needs: tuple[tuple[int, int, frozenset[int], tuple[tuple[int, int], ...]], ...] = ()


def write_ticket_words(facts: Waiting) -> dict[str, Any]:
    """Return the part of a ticket's body that the queue policy reads, as JSON values: the fields of :class:`_Words`."""
    return {
        "seconds": facts.seconds,
        "inner": facts.inner,
        "wanted": list(facts.wants or ()),
        "needs": [[each.count, each.units, list(each.among), list(each.sizes.items())] for each in facts.needs],
    }


def read_ticket(directory: int, name: str, *, brief: bool = False) -> Waiting | None:
    """Return a ticket as the queue policy sees it; None if the name is not a ticket's, or the ticket is gone.

    A ticket that was read once is remembered, and so returned even after its end. An unreadable file counts as empty,
    until it can be read. Locks are not tested.

    Args:
        directory: Descriptor of the state directory.
        name: Name of the ticket.
        brief: Whether number, priority and wanted devices suffice: then the file is not read if the name has them, and
            a ticket that is gone is returned, too.
    """
    if brief and (found := _named(name)) is not None and found.wants is not None:
        return found
    found = _waiting.get((directory_id := os.fstat(directory).st_ino, name))
    if found is None:
        ticket, file = entries.parse_ticket(name), entries.stat_of(directory, name)
        if ticket is None or file is None:
            return None
        body = entries.read_body(directory, name, BODY_LIMIT)
        found = _read_waiting(ticket, process.find_outer_user(file.st_uid), body)
        if len(_waiting) > _REMEMBERED:
            _waiting.clear()
        if body:  # else no descriptor may have been free
            _waiting[directory_id, name] = found
    return found


@lru_cache(maxsize=2048)
def _named(name: str) -> Waiting | None:
    """Return the facts in the name of a ticket, without user, time limit and needs; None for any other name."""
    ticket = entries.parse_ticket(name)
    return _read_waiting(ticket, None, b"") if ticket else None


_waiting: dict[tuple[int, str], Waiting] = {}
"""Tickets by directory and name: a ticket never changes. Reading 300 takes 18 ms, and each look needs each of them. No
lock is needed: a lost entry is read again."""


def _read_waiting(ticket: TicketName, user: int | None, body: bytes) -> Waiting:
    """Combine name, owner and body of a ticket; an implausible body counts as empty.

    An arrival in the future counts as now. The wanted devices are from the name or, if not listed
    there, from the body; None if neither lists them. The first 64 needs count, without impossible ones.

    Args:
        ticket: The parsed name.
        user: Owner of the file, by the number outside of user namespaces; None if unknown.
        body: Content of the file.
    """
    words = (entries.read_value(_Words, entries.read_object(body)) if body else None) or _Words()
    return Waiting(
        key=ticket.name,
        number=ticket.number,
        since=min(ticket.since, process.boot_seconds()),  # no request came in the future
        priority=ticket.priority,
        user=user,
        seconds=entries.read_number(words.seconds),
        needs=tuple(
            Need(count=count, units=units, among=among, sizes=dict(sizes))
            for count, units, among, sizes in words.needs[:_MOST_NEEDS]
            if 0 < count <= _MOST and 0 < units <= _MOST
        ),
        wants=words.wanted if ticket.wanted is None else ticket.wanted,
        inner=words.inner,
    )


def hashed(need: Need) -> Need:
    """Return a need with each device, also in ``sizes``, replaced by the hash that tickets compare.

    The devices are names in the ledger, although the type of a need permits other objects.
    """
    return Need(
        count=need.count,
        units=need.units,
        among=entries.hashes(frozenset(map(str, need.among))),
        sizes={entries.hash_device(str(device)): units for device, units in need.sizes.items()},
    )


def list_holdings(directory: int, listing: Listing, over: Collection[str] = ()) -> list[Holding]:
    """Return the listed leases as the queue policy sees them, without the leases in ``over``.

    Locks are not checked: without ``over``, ended leases count, too. A lease whose file is gone is left out. There is a
    holding for each device of a lease, also if several processes have a file for it, as after a recovery. A name that
    is not understood is a holding of the whole device. Times are by the clock since the boot.

    Args:
        directory: Descriptor of the state directory.
        listing: The names in the directory.
        over: Names of the files to leave out.
    """
    found: dict[object, Holding] = {}
    for lease in listing.leases:
        file = None if lease.name in over else entries.stat_of(directory, lease.name)
        if file is None:
            continue
        until, passed = lease.period
        # With the owner: a user who copies the identity of another user's lease hides no part of that lease.
        found[lease.id or lease.name, lease.device, lease.extent, file.st_uid] = Holding(
            device=entries.hash_device(lease.device),
            units=lease.extent.units,
            user=process.find_outer_user(file.st_uid),
            since=record.since_boot(file.st_mtime),
            until=None if until is None else until / 1000,
            passed=None if passed is None else passed / 1000,
            inner=entries.is_inner(lease.device),
        )
    return list(found.values())


def find_ended(directory: int, listing: Listing) -> frozenset[str]:
    """Return the names of listed leases that have ended, whether their files are left or gone; nothing is removed.

    A lease without a lock has not ended while its holder leaves the kernel, a process carries the mark, or the tenure
    lasts: see :func:`~anyaccel.ledger.entries.find_active`.

    Raises:
        OSError: When a lock cannot be tested, as for want of descriptors.
    """
    return frozenset(lease.name for lease in listing.leases) - entries.find_active(directory, listing.leases).keys()
