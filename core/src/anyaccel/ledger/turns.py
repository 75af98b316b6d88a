"""Whose turn it is: the facts in the state directory, and what the machine's rules say about them.

Who waits and what is held is told by names; who it is, by the owners of files, which nobody can choose. What a ticket
says in its body - since when and how long, how much - decides about order only.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property, lru_cache

from anyaccel import configuration
from anyaccel.configuration import Configuration
from anyaccel.errors import ConfigurationError, LimitError
from anyaccel.ledger.lease import Want
from anyaccel.ledger.listing import Listing, states
from anyaccel.ledger.lockfile import Life, read_body
from anyaccel.ledger.names import TicketName, hashes, is_inner, parse_ticket
from anyaccel.ledger.record import read_object
from anyaccel.linux import process
from anyaccel.linux.users import outside
from anyaccel.model import replace
from anyaccel.policy import PLAIN, Holding, Limits, Need, OverLimit, Policy, Waiting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BODY_LIMIT = 1 << 18
"""Bytes of a ticket: one that wants many devices lists them in its body."""
_LAST = 1 << 62
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


def bounded(want: Want, policy: Policy) -> Want:
    """Return what is wanted with the time for which this user gets it: one that gives none gets the longest."""
    longest = policy.limits_of(own_user()).seconds
    return want if longest is None or want.seconds is not None else replace(want, seconds=longest)


def permitted(want: Want, priority: int, policy: Policy) -> Want:
    """Say how long a request may hold what it wants; refuse what the user may never have.

    Args:
        want: What is wanted.
        priority: The priority that is asked for.
        policy: The rules of the machine.

    Raises:
        LimitError: When the user may not have it.
    """
    if policy.plain:
        return want
    want = bounded(want, policy)
    limits = [each for each in policy.over_limits(Turns(want, priority, policy).own, ()) if each.lasting]
    if limits:
        reasons = tuple(each.message() for each in limits)
        raise LimitError(
            f"{want.request or 'what was asked for'} can never fit: {'; '.join(reasons)}.",
            reasons=reasons,
            hint="\n".join(each.remedy for each in limits),
        )
    return want


class Turns:
    """What the rules of the machine say about one request.

    Args:
        want: What is wanted.
        priority: The higher, the earlier.
        policy: The rules.
        since: When it came, in seconds since the boot; now when None.

    Attributes:
        want: What is wanted.
        priority: The higher, the earlier.
        policy: The rules; they may change.
        since: When it came, in seconds since the boot.
    """

    def __init__(self, want: Want, priority: int, policy: Policy, since: float | None = None) -> None:
        self.policy = policy
        self.since = process.boot_seconds() if since is None else since
        self.want = want
        self.priority = priority

    @cached_property
    def own(self) -> Waiting:
        """The request as the rules see it."""
        want = self.want
        return Waiting(
            key=None,
            number=_LAST,
            since=self.since,
            priority=self.priority,
            user=own_user(),
            seconds=want.seconds,
            needs=tuple(replace(need, among=hashes(_texts(need.among))) for need in want.needs),
            wants=hashes(want.candidates),
            inner=any(map(is_inner, want.candidates)),
        )

    def renew(self, want: Want, policy: Policy) -> None:
        """Go on by other rules, which may give the request another time."""
        self.want, self.policy = want, policy
        vars(self).pop("own", None)

    @property
    def watches_all(self) -> bool:
        """Whether leases matter to it wherever it stands in line: it may pass, or the order depends on them."""
        return not self.policy.plain or self.want.seconds is not None

    def ahead(self, directory: int, listing: Listing, own: str | None) -> list[str]:
        """Names of all tickets ahead, in the order of service, without those that wait for a limit of their user's."""
        held = holdings(directory, listing)
        waiting = [each for name in listing.tickets if name != own and (each := waiting_of(directory, name))]
        mine = self._as(own)
        before: list[Waiting] = []
        for each in self.policy.order([*waiting, mine], held, process.boot_seconds()):
            if each is mine:
                break
            before.append(each)
        return [str(each.key) for each in before if not self.policy.limited(each, held)]

    def may_pass(self, directory: int, listing: Listing, ahead: Sequence[str]) -> bool:
        """Whether it may be served before those ahead who want one of the same devices."""
        if self.want.seconds is None:
            return False
        found = [waiting_of(directory, name) for name in ahead]
        waiting = [each for each in found if each]
        if len(waiting) < len(ahead):  # another version's
            return False
        return self.policy.may_pass(self.own, waiting, holdings(directory, listing), process.boot_seconds())

    def over_limits(self, directory: int, listing: Listing, over: Collection[str]) -> tuple[OverLimit, ...]:
        """Return the limits of the user that stand in the way of the request.

        Args:
            directory: Descriptor of the state directory.
            listing: What is in it.
            over: Names of leases that are over.
        """
        if self.policy.plain or self.policy.limits_of(self.own.user) == Limits():
            return ()
        return self.policy.over_limits(self.own, holdings(directory, listing, over))

    def _as(self, own: str | None) -> Waiting:
        """The request under the name that it has in line."""
        ticket = parse_ticket(own) if own else None
        return replace(self.own, key=own, number=ticket.number) if ticket else self.own


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


def waiting_of(directory: int, name: str) -> Waiting | None:
    """What is known of somebody who waits; None when the ticket's name is none of ours, or it has gone."""
    found = _waiting.get((directory_id := os.fstat(directory).st_ino, name))
    if found is None:
        ticket = parse_ticket(name)
        try:
            owner = os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid
        except OSError:
            return None
        if ticket is None:
            return None
        found = _read_waiting(ticket, outside(owner), read_body(directory, name, BODY_LIMIT))
        if len(_waiting) > _REMEMBERED:
            _waiting.clear()
        _waiting[directory_id, name] = found
    return found


_waiting: dict[tuple[int, str], Waiting] = {}
"""What tickets say, by directory and name: they never change. There is no lock: what is lost is read again."""
_owners: dict[tuple[int, str], int] = {}
"""Owners of leases, likewise."""


def _read_waiting(ticket: TicketName, user: int, body: bytes) -> Waiting:
    words = read_object(body)
    listed = words.get("wanted")
    wants = ticket.wanted
    if wants is None and isinstance(listed, list):
        wants = frozenset(each for each in listed if type(each) is int)
    since, seconds = _number(words.get("since")), _number(words.get("seconds"))
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


def _number(value: object) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < 1 << 40 else None  # type: ignore[operator, arg-type] # pyright: ignore[reportOperatorIssue, reportArgumentType]


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
            try:
                user = outside(os.stat(lease.name, dir_fd=directory, follow_symlinks=False).st_uid)
            except OSError:
                continue
            if len(_owners) > _REMEMBERED:
                _owners.clear()
            _owners[here, lease.name] = user
        until, passed = lease.period
        found.append(
            Holding(
                device=_hash(lease.device),
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


@lru_cache(maxsize=4096)
def _hash(device: str) -> int:
    return zlib.crc32(device.encode())


def _texts(devices: Iterable[object]) -> frozenset[str]:
    return frozenset(map(str, devices))


def since_1970(boot: float) -> float:
    """A time of the clock since the boot, in seconds since 1970 by the clock as it goes now."""
    return time.time() - process.boot_seconds() + boot


def lenient_rules() -> Policy:
    """The rules, for those who only look: plain ones where the configuration is not to be trusted or understood."""
    with contextlib.suppress(ConfigurationError):
        return rules()
    return PLAIN
