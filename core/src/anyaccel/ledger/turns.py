"""Whose turn it is: the facts in the state directory as the machine's rules see them.

Who waits and what is held is told by names; who it is, by the owners of files, which nobody can choose. What a ticket
says in its body - since when and how long, how much - decides about order only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from functools import lru_cache

from anyaccel import configuration
from anyaccel.configuration import Configuration
from anyaccel.errors import ConfigurationError
from anyaccel.ledger.lease import Want
from anyaccel.ledger.listing import Listing, owner_of, states
from anyaccel.ledger.lockfile import Life, read_body
from anyaccel.ledger.names import TicketName, hash_device, hashes, is_inner, parse_ticket
from anyaccel.ledger.record import read_number, read_object
from anyaccel.linux import process
from anyaccel.linux.users import outside
from anyaccel.policy import PLAIN, Holding, Need, Policy, Waiting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BODY_LIMIT = 1 << 18
"""Bytes of a ticket: one that wants many devices lists them in its body."""
_REMEMBERED = 10_000

_known: tuple[Configuration, Policy] = (Configuration(path=""), PLAIN)


def rules() -> Policy:
    """The rules of this machine, as its configuration says now.

    Raises:
        ConfigurationError: When the machine's configuration cannot be trusted or understood.
    """
    global _known  # noqa: PLW0603 -- asked for by everybody who takes devices
    found = configuration.machine()
    if found is not _known[0]:
        _known = found, Policy.of(found)
    return _known[1]


def own_user() -> int:
    """Number of the user of this process, as the rest of the machine knows it."""
    return outside(os.geteuid())


def ticket_words(want: Want, since: float) -> dict[str, Any]:
    """What a ticket's body says for the rules, beside words for people."""
    words: dict[str, Any] = {"since": round(since, 3)}
    if want.seconds is not None:
        words["seconds"] = want.seconds
    if any(map(is_inner, want.candidates)):
        words["inner"] = True
    if want.needs:
        words["needs"] = [
            [need.count, need.units, None if need.among == want.candidates else sorted(hashes(_texts(need.among)))]
            for need in want.needs
        ]
    return words


def facts_of(directory: int, name: str, *, brief: bool = False) -> Waiting | None:
    """Return what a ticket says; None when its name is none of ours, or it has gone.

    Args:
        directory: Descriptor of the state directory.
        name: Name of the ticket.
        brief: Whether its order by priority and arrival is enough, and the devices that it wants.
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


@lru_cache(maxsize=8192)
def _named(name: str) -> Waiting | None:
    """What the name of a ticket says."""
    ticket = parse_ticket(name)
    if ticket is None:
        return None
    return Waiting(key=name, number=ticket.number, since=0.0, priority=ticket.priority, wants=ticket.wanted)


_waiting: dict[tuple[int, str], Waiting] = {}
"""What tickets say, by directory and name: they never change. To read 300 takes 18 ms, and each look needs them. There
is no lock: what is lost is read again."""
_owners: dict[tuple[int, str], int] = {}
"""Owners of leases, likewise: of 256 they take 1 ms."""


def _read_waiting(ticket: TicketName, user: int, body: bytes) -> Waiting:
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
        since=now if since is None else min(since, now),
        priority=ticket.priority,
        user=user,
        seconds=seconds,
        needs=tuple(_needs(words.get("needs"), wants or frozenset())),
        wants=wants,
        inner=words.get("inner") is True,
    )


def _needs(value: object, wants: frozenset[int]) -> Iterable[Need]:
    for each in value[:64] if isinstance(value, list) else ():
        if not isinstance(each, list) or len(each) != 3:  # noqa: PLR2004
            continue
        count, units, among = each
        if type(count) is not int or type(units) is not int or not 0 < count <= 1 << 20 or not 0 < units <= 1 << 20:
            continue
        own = frozenset(one for one in among if type(one) is int) if isinstance(among, list) else wants
        yield Need(count=count, units=units, among=own)


def holdings(directory: int, listing: Listing, over: Collection[str] = ()) -> list[Holding]:
    """All that is held, for the rules; without what some names say.

    Args:
        directory: Descriptor of the state directory.
        listing: What is in it.
        over: Names of leases that are over.
    """
    found = []
    here = os.fstat(directory).st_ino
    for lease in listing.leases:
        if lease.name in over:
            continue
        user = _owners.get((here, lease.name))
        if user is None:
            owner = owner_of(directory, lease.name)
            if owner is None:
                continue
            if len(_owners) > _REMEMBERED:
                _owners.clear()
            user = _owners[here, lease.name] = outside(owner)
        until, passed = lease.period
        found.append(
            Holding(
                device=hash_device(lease.device),
                units=lease.extent.units,
                user=user,
                until=None if until is None else until / 1000,
                passed=None if passed is None else passed / 1000,
                inner=is_inner(lease.device),
            )
        )
    return found


def ended(directory: int, listing: Listing) -> frozenset[str]:
    """Names of leases that are over and have been left behind."""
    return frozenset(name for name, state in states(directory, listing.leases).items() if state.life is Life.OVER)


def _texts(devices: Iterable[object]) -> frozenset[str]:
    return frozenset(map(str, devices))


def lenient_rules() -> Policy:
    """The rules, for those who only look: plain ones where the configuration is not to be trusted or understood."""
    with contextlib.suppress(ConfigurationError):
        return rules()
    return PLAIN
