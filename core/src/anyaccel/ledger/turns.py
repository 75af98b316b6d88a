"""Facts of the state directory in the form that the queue policy reads.

Requests and leases are known by the names of files, users by the owners of files, which no user can choose. The body of
a ticket, with arrival, time limit and quantities, affects the order only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable
from functools import lru_cache

from anyaccel import configuration
from anyaccel.configuration import Configuration
from anyaccel.errors import ConfigurationError
from anyaccel.ledger.blocks import read_blocks
from anyaccel.ledger.bodies import read_number, read_object
from anyaccel.ledger.directory import StateDirectory
from anyaccel.ledger.lease import Want
from anyaccel.ledger.listing import Listing, find_states, owner_of, stat_of
from anyaccel.ledger.lockfile import Life, read_body
from anyaccel.ledger.names import TicketName, hash_device, hashes, is_inner, parse_ticket
from anyaccel.linux import process
from anyaccel.linux.users import outside
from anyaccel.model import replace
from anyaccel.model.device import UNITS_PER_DEVICE
from anyaccel.policy import PLAIN, Holding, Need, Policy, Waiting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BODY_LIMIT = 1 << 18
"""Bytes of a ticket: a request for many devices lists them in the body."""
_REMEMBERED = 10_000  # far more than any line has; a bound against processes that make tickets without end

_known: tuple[Configuration, Policy] = (Configuration(path=""), PLAIN)


def current_policy(state: StateDirectory | None = None) -> Policy:
    """Return the queue policy of this machine, from its present configuration, without past usage.

    Rules are kept in this process until the configuration changes; drains and reservations are looked up at each call.

    Args:
        state: The state directory whose drains and reservations count; None for none.

    Raises:
        ConfigurationError: When the machine's configuration cannot be trusted or understood.
    """
    global _known  # noqa: PLW0603 -- each acquisition needs the policy, and the configuration rarely changes
    found = configuration.machine()
    if found is not _known[0]:
        _known = found, Policy.from_configuration(found)
    return with_blocks(_known[1], state)


def with_blocks(policy: Policy, state: StateDirectory | None) -> Policy:
    """Return a policy with the drains and reservations of a state directory in place of its own; none if None.

    Blocks of ended reservations are left out. The given policy is not changed.
    """
    blocks = () if state is None else read_blocks(state)
    if not blocks and not policy.blocks:
        return policy
    return replace(policy, blocks=tuple(block.policy_block for block in blocks))


def with_past(policy: Policy) -> Policy:
    """Return a policy with the past usage of each user, read from the journals, by the clock since the boot.

    A policy without a half-life counts no past usage and is returned as it is.
    """
    if policy.half_life is None:
        return policy
    from anyaccel.ledger.journal import read_usage  # few machines count use over time

    offset = _clock_offset()
    past = {user: replace(each, at=each.at + offset) for user, each in read_usage(policy.half_life).items()}
    return replace(policy, past=past)


def _clock_offset() -> float:
    """Return the seconds, negative, to add to a time since 1970 for the time since the boot."""
    return process.boot_seconds() - time.time()


def own_user() -> int:
    """Return the number of this process's effective user outside of user namespaces."""
    return outside(os.geteuid())


def write_ticket_words(want: Want, since: float) -> dict[str, Any]:
    """Return the part of a ticket's body that the queue policy reads, as JSON values.

    These are ``since``, rounded to milliseconds, and where they apply ``seconds``, ``inner`` and ``needs``, with
    devices as hashes. The wanted devices are not in this part: see :meth:`anyaccel.ledger.tickets.TicketFile.publish`.

    Args:
        want: The request.
        since: Arrival, in seconds since the boot.
    """
    words: dict[str, Any] = {"since": round(since, 3)}
    if want.seconds is not None:
        words["seconds"] = want.seconds
    if any(map(is_inner, want.candidates)):
        words["inner"] = True
    if want.needs:
        words["needs"] = [
            [
                need.count,
                need.units,
                None if need.among == want.candidates else sorted(hashes(_texts(need.among))),
                *([[hash_device(str(device)), units] for device, units in need.sizes.items()],) * bool(need.sizes),
            ]
            for need in want.needs
        ]
    return words


def read_ticket(directory: int, name: str, *, brief: bool = False) -> Waiting | None:
    """Return a ticket as the queue policy sees it; None if the name is not a ticket's, or the ticket is gone.

    A ticket that was read once is remembered, and so returned even after its end. Locks are not tested.

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
        ticket, owner = parse_ticket(name), owner_of(directory, name)
        if ticket is None or owner is None:
            return None
        found = _read_waiting(ticket, outside(owner), read_body(directory, name, BODY_LIMIT))
        if len(_waiting) > _REMEMBERED:
            _waiting.clear()
        _waiting[directory_id, name] = found
    return found


@lru_cache(maxsize=2048)
def _named(name: str) -> Waiting | None:
    """Return the facts in the name of a ticket; None for any other name.

    User, time limit and needs are missing, and ``since`` is 0; ``wants`` is None if the name does not list the devices.
    """
    ticket = parse_ticket(name)
    if ticket is None:
        return None
    return Waiting(key=name, number=ticket.number, since=0.0, priority=ticket.priority, wants=ticket.wanted)


_waiting: dict[tuple[int, str], Waiting] = {}
"""Tickets by directory and name: a ticket never changes. Reading 300 takes 18 ms, and each look needs each of them. No
lock is needed: a lost entry is read again."""


def _read_waiting(ticket: TicketName, user: int, body: bytes) -> Waiting:
    """Combine name, owner and body of a ticket; implausible values of the body are left out.

    An arrival that is missing or in the future counts as now. The wanted devices are from the name or, if not listed
    there, from the body; None if neither lists them.

    Args:
        ticket: The parsed name.
        user: Owner of the file, by the number outside of user namespaces.
        body: Content of the file.
    """
    words = read_object(body)
    listed = words.get("wanted")
    wants = ticket.wanted
    if wants is None and isinstance(listed, list):
        wants = frozenset(each for each in listed if type(each) is int)
    since, seconds = read_number(words.get("since")), read_number(words.get("seconds"))
    now = process.boot_seconds()
    return Waiting(
        key=ticket.name,
        number=ticket.number,
        since=now if since is None else min(since, now),  # no request came in the future
        priority=ticket.priority,
        user=user,
        seconds=seconds,
        needs=tuple(_needs(words.get("needs"), wants or frozenset())),
        wants=wants,
        inner=words.get("inner") is True,
    )


def _needs(value: object, wants: frozenset[int]) -> Iterable[Need]:
    """Decode the first 64 needs in a ticket's body; implausible needs are skipped.

    Args:
        value: The decoded JSON.
        wants: The devices of a need without a list of its own.
    """
    for each in value[:64] if isinstance(value, list) else ():
        if not isinstance(each, list) or len(each) not in {3, 4}:
            continue
        count, units, among, *sizes = each
        if type(count) is not int or type(units) is not int or not 0 < count <= 1 << 20 or not 0 < units <= 1 << 20:
            continue
        own = frozenset(one for one in among if type(one) is int) if isinstance(among, list) else wants
        yield Need(count=count, units=units, among=own, sizes=dict(_sizes(*sizes)))


def _sizes(value: object = None) -> Iterable[tuple[int, int]]:
    """Decode the units of a need by hash of the device, from the first 10,000 pairs; implausible pairs are skipped."""
    for each in value[:_REMEMBERED] if isinstance(value, list) else ():
        if isinstance(each, list) and len(each) == 2:  # noqa: PLR2004
            device, units = each
            if type(device) is int and type(units) is int and 0 < units <= UNITS_PER_DEVICE:
                yield device, units


def hashed(need: Need) -> Need:
    """Return a need with devices as the numbers that tickets compare."""
    return Need(
        count=need.count,
        units=need.units,
        among=hashes(_texts(need.among)),
        sizes={hash_device(str(device)): units for device, units in need.sizes.items()},
    )


def list_holdings(directory: int, listing: Listing, over: Collection[str] = ()) -> list[Holding]:
    """Return the listed leases as the queue policy sees them, without the leases in ``over``.

    Locks are not checked: without ``over``, ended leases count, too. A lease whose file is gone is left out. Each
    device of a lease is a holding of its own, with times by the clock since the boot.

    Args:
        directory: Descriptor of the state directory.
        listing: The names in the directory.
        over: Names of leases that have ended.
    """
    found = []
    offset = _clock_offset()
    for lease in listing.leases:
        if lease.name in over:
            continue
        file = stat_of(directory, lease.name)
        if file is None:
            continue
        until, passed = lease.period
        found.append(
            Holding(
                device=hash_device(lease.device),
                units=lease.extent.units,
                user=outside(file.st_uid),
                since=file.st_mtime + offset,
                until=None if until is None else until / 1000,
                passed=None if passed is None else passed / 1000,
                inner=is_inner(lease.device),
            )
        )
    return found


def find_ended(directory: int, listing: Listing) -> frozenset[str]:
    """Return the names of listed leases that have ended, whether their files are left or gone.

    Each lock is tested, and nothing is removed.

    Raises:
        OSError: When a lock cannot be tested, as for want of descriptors.
    """
    return frozenset(name for name, state in find_states(directory, listing.leases).items() if state.life is Life.OVER)


def _texts(devices: Iterable[object]) -> frozenset[str]:
    """Return devices as texts."""
    return frozenset(map(str, devices))


def policy_for_display(state: StateDirectory | None) -> Policy:
    """Return the queue policy for a process that only inspects: the default policy if the configuration is faulty.

    Drains and reservations of ``state`` count in both cases; none when None.
    """
    with contextlib.suppress(ConfigurationError):
        return current_policy(state)
    return with_blocks(PLAIN, state)
