"""Queue policy: the order of service, and limits of users. Which request may pass is in :mod:`anyaccel.backfill`.

Every function is pure: the input is the waiting requests and the active leases, with their times. So each waiting
process computes the same order, whether a request waits in the ledger or in a scheduler. Times are seconds of one
clock; devices are any hashable values.

**Fair shares.** Among requests of one priority, the user with less usage over weight comes first. The usage is what the
user holds or, with a half-life, the device-seconds of past and active leases, of which each counts half after every
half-life. The members of a group share the group's weight; inside of the group the users' own weights count.

**Totals of groups.** A request over the device limit of its own user blocks no other request. The total of a group is
shared by several users: a request that waits for it blocks the later requests of the group's members, else these could
use the total up again and again. It blocks no request of other users.

**Reservations.** While a reservation runs, the request of its user, or of a member of its group, is served by the
reserved devices as if it asked for these alone: an earlier request that may not have them does not block it. Only if
they do not suffice, the request competes for all its devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Iterable, Mapping

from anyaccel.model import UNITS_PER_DEVICE, Value, field, replace
from anyaccel.text import span

ROOT = 0
FOREVER = float("inf")


class Need(Value):
    """Quantity of a term, with the devices for it.

    Attributes:
        count: Number of devices.
        units: Units of each device, in 1/10000.
        among: The devices that could serve the term.
        sizes: Units by device for a share by memory, of which ``units`` is the largest; empty for other terms.
    """

    count: int
    units: int
    among: frozenset[Hashable]
    sizes: Mapping[Hashable, int] = field(default_factory=dict)

    def units_on(self, device: Hashable) -> int:
        """Return the needed units of a device: from ``sizes``, else ``units``."""
        return self.sizes.get(device, self.units)


class Waiting(Value):
    """A waiting request.

    Attributes:
        key: Identity.
        number: Position in the order of arrival.
        since: Time of arrival.
        priority: The requested priority; the higher, the earlier.
        user: Number of the user; None when unknown.
        seconds: Time limit; None for no limit.
        needs: The needs; empty when unknown.
        sites: The needs on each machine, if several machines could serve the request; else empty.
        hosts: Number of these machines to be served on.
        wants: The devices for which the request competes; None for every device.
        inner: Whether the request is for parts of a lease of its user, which counts once.
    """

    key: Hashable
    number: int
    since: float
    priority: int = 0
    user: int | None = None
    seconds: float | None = None
    needs: tuple[Need, ...] = ()
    sites: tuple[tuple[Need, ...], ...] = ()
    hosts: int = 1
    wants: frozenset[Hashable] | None = None
    inner: bool = False

    def competes(self, other: Waiting) -> bool:
        """Return whether both requests want a common device; True if the devices of a request are unknown."""
        return self.wants is None or other.wants is None or not self.wants.isdisjoint(other.wants)

    @property
    def units(self) -> int:
        """Units that the request will hold in sum, in 1/10000 of a device: the needs, times the number of hosts."""
        return self.hosts * sum(need.count * need.units for need in self.needs)


class Holding(Value):
    """A held part of a device.

    Attributes:
        device: The device.
        units: Held units of the device.
        user: Number of the user; None when unknown.
        since: Start of the lease; None when unknown, then the lease adds no usage over time.
        until: End of the time limit; None for no limit.
        passed: Start of the lease, if its request passed earlier requests; None if served in turn.
        inner: Whether the lease is a part of another lease of the user, which counts once.
    """

    device: Hashable
    units: int = UNITS_PER_DEVICE
    user: int | None = None
    since: float | None = None
    until: float | None = None
    passed: float | None = None
    inner: bool = False

    def delays(self, waiting: Waiting) -> bool:
        """Return whether the lease counts for the start in turn of a request: the lease has not passed the request."""
        return self.passed is None or self.passed < waiting.since


class Block(Value):
    """Devices that are withheld from requests for a time: drained, or reserved for a user or a group.

    Attributes:
        devices: The devices.
        begin: Start; minus infinity for a drain.
        end: End; infinity for a drain.
        users: Numbers of the users whose requests may have the devices; empty for no user.
        names: Names of the devices in the ledger, where ``devices`` has their hashes.
    """

    devices: frozenset[Hashable]
    begin: float
    end: float
    users: Container[int | None] = ()
    names: tuple[str, ...] = ()

    def meets(self, waiting: Waiting, start: float) -> bool:
        """Return whether the devices are withheld from a request with a given start.

        A request with a time limit may have them if it ends before the block begins.
        """
        if start >= self.end or waiting.user in self.users:
            return False
        return waiting.seconds is None or start + waiting.seconds > self.begin

    def reserves(self, waiting: Waiting, now: float) -> bool:
        """Return whether this is a running reservation for the user of a request, by name or as a member of a group."""
        return waiting.user in self.users and self.begin <= now < self.end


class Usage(Value):
    """Device-seconds of ended leases, of which each counts half after every half-life.

    Attributes:
        seconds: Seconds, times devices.
        at: The time for which this quantity is computed.
    """

    seconds: float = 0.0
    at: float = -FOREVER

    def decayed(self, now: float, half_life: float) -> float:
        """Return the device-seconds that still count; a quantity for a later time than ``now`` counts as it is."""
        return self.seconds * 0.5 ** (max(0.0, now - self.at) / half_life) if self.seconds else 0.0

    def with_lease(self, devices: float, held: float, ended: float, half_life: float) -> Usage:
        """Return the usage with another ended lease.

        Args:
            devices: Number of devices.
            held: Seconds for which the lease held the devices, until ``ended``.
            ended: End of the lease.
            half_life: The half-life in seconds.
        """
        return self.plus(Usage(seconds=_integrate(devices, held, half_life), at=ended), half_life)

    def plus(self, other: Usage, half_life: float) -> Usage:
        """Return the sum of two quantities, at the later of their times."""
        at = max(self.at, other.at)  # a decay towards an earlier time would make a quantity grow
        return Usage(seconds=self.decayed(at, half_life) + other.decayed(at, half_life), at=at)


def _integrate(devices: float, held: float, half_life: float) -> float:
    """Return the device-seconds of a lease that count at its end: each second counts half after every half-life.

    Args:
        devices: Number of devices.
        held: Seconds for which the lease has lasted.
        half_life: The half-life in seconds.
    """
    # expm1(): of a short lease and a half-life of weeks, the difference of two powers would be rounded away.
    rate = math.log(2) / half_life
    return devices * -math.expm1(-held * rate) / rate


class Limits(Value):
    """Limits and fair share of a user, or of each member of a group.

    Attributes:
        devices: Devices at once; None without limit, like the two below.
        seconds: Longest time limit.
        priority: Highest priority.
        weight: Fair share of the user, or of the group as a whole, relative to 1 for other users and groups.
        total: Devices that the members of a group may hold together; None without limit, and for users.
    """

    devices: float | None = None
    seconds: float | None = None
    priority: int | None = None
    weight: float = 1
    total: float | None = None


NO_LIMITS = Limits()


class OverLimit(Value):
    """A limit of a user, or of the user's group, that stands in the way of a request.

    Attributes:
        limit: Name of the limit in the machine's configuration: ``devices``, ``total_devices``, ``time`` or
            ``priority``.
        most: The limit: devices, seconds, or a priority.
        asked: The requested quantity.
        held: Number of devices that the user holds, or that all members of the group hold.
        group: Name of the group whose total is the limit; empty for a limit of the user.
    """

    limit: str
    most: float
    asked: float
    held: float = 0.0
    group: str = ""

    @property
    def of_devices(self) -> bool:
        """Whether the limit is of devices at once, of the user or of the group: a lease that ends may make room."""
        return self.limit in {"devices", "total_devices"}

    @property
    def lasting(self) -> bool:
        """Whether the limit stands in the way even if the user, and each member of the group, releases every lease."""
        return self.asked > self.most

    def message(self, user: str = "") -> str:
        """Describe the limit, as a clause without capital and period.

        Args:
            user: Name of the user; empty to address the reader.
        """
        name = f"group {self.group}" if self.group else user
        whose = f"{name}'s" if name else "your"
        if not self.of_devices:
            asked, most = map(self._written, (self.asked, self.most))
            return f"a {self.limit} of {asked} is over {whose} limit of {most}"
        if self.lasting:
            verb = "is" if self.asked == 1 else "are"
            return f"{self._written(self.asked)} {verb} over {whose} limit of {self.most:g}"
        if self.held >= self.most:
            return f"{f'{name} is at the' if name else 'you are at your'} limit of {self._written(self.most)}"
        holds = f"{name} holds" if name else "you hold"
        verb = "is" if self.asked == 1 else "are"
        return f"{holds} {self._written(self.held)}, and {self.asked:g} more {verb} over {whose} limit of {self.most:g}"

    @property
    def remedy(self) -> str:
        """The way out: release a lease, ask for less, or have the administrator raise the limit."""
        from anyaccel.configuration import MACHINE_FILE

        if not self.lasting:
            if self.group:
                return (
                    f"'anyaccel status' lists the leases; one that a member of group {self.group} releases makes room"
                )
            return "'anyaccel status' lists your leases, and 'anyaccel release LEASE' ends one"
        administrator = f"the administrator can raise {self.limit!r} in {MACHINE_FILE}"
        return f"{self.lower}; {administrator}" if self.lower else administrator

    @property
    def lower(self) -> str:
        """The way out of asking for less; empty if nothing that could be asked for is within the limit."""
        nothing = not self.lasting or (self.of_devices and not self.most)
        return "" if nothing else f"ask for {self._written(self.most)} at most"

    def _written(self, number: float) -> str:
        """Format a quantity with the unit of the limit."""
        if self.limit == "time":
            return span(number)
        if self.limit == "priority":
            return f"{number:.0f}"
        return f"{number:g} device{'s' * (number != 1)}"


class Policy(Value):
    """Queue policy of a machine.

    Attributes:
        backfill: Seconds by which passing requests may delay an earlier request.
        fair_shares: Whether a user with less usage comes first, among requests of one priority.
        half_life: Seconds after which the usage of a lease counts half; None to count what users hold now.
        patience: Seconds of waiting after which a request comes before requests that have waited less; None for never.
        limits: Limits of users without an entry in ``users`` and without a group.
        users: Limits by number of the user.
        groups: Limits of each member, with weight and total of the group, by name of the group.
        members: Name of the group that counts for a user, by number of the user; none for other users.
        past: Usage by ended leases, by number of the user; counts only with a half-life.
        blocks: Drained and reserved devices.
    """

    backfill: float = 0.0
    fair_shares: bool = False
    half_life: float | None = None
    patience: float | None = None
    limits: Limits = NO_LIMITS
    users: Mapping[int, Limits] = field(default_factory=dict)
    groups: Mapping[str, Limits] = field(default_factory=dict)
    members: Mapping[int, str] = field(default_factory=dict)
    past: Mapping[int | None, Usage] = field(default_factory=dict)
    blocks: tuple[Block, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether the order is priority and arrival, without limits, so that leases do not matter.

        Backfill and withheld devices are not considered.
        """
        return (
            not self.fair_shares
            and self.patience is None
            and not self.users
            and not self.groups
            and (self.limits is NO_LIMITS or self.limits == NO_LIMITS)
        )

    def limits_of(self, user: int | None) -> Limits:
        """Return the limits of a user: the user's entry, else the group's, else the general limits.

        Root has none without an entry of its own. The weight is the user's own: 1 without an entry. The total of the
        group is not among them.
        """
        if user is None:
            return self.limits
        if (found := self.users.get(user)) is not None:
            return found
        if user == ROOT:
            return NO_LIMITS
        group = self.groups.get(self.members.get(user, ""))
        return self.limits if group is None else replace(group, weight=1, total=None)

    def priority(self, waiting: Waiting) -> int:
        """Return the effective priority: the requested one, up to the user's limit."""
        highest = self.limits_of(waiting.user).priority
        return waiting.priority if highest is None else min(waiting.priority, highest)

    def sort_key(
        self, held: Iterable[Holding], now: float
    ) -> Callable[[Waiting], tuple[bool, int, tuple[float, float], int]]:
        """Return the sort key of the order of service.

        Requests past the patience come first, by arrival. The others follow by effective priority, highest first, then
        with fair shares by usage over weight, first of the group and then of the user, lowest first, then by arrival. A
        user without a group counts as a group. The key is bound to ``held`` and ``now``.

        Args:
            held: The active leases.
            now: The time.
        """
        used = self.usage(held, now) if self.fair_shares else {}
        by_group: dict[str, list[float]] = {}
        for user, amount in used.items() if self.groups else ():
            by_group.setdefault(self._group_of(user), []).append(amount)

        def turn(each: Waiting) -> tuple[bool, int, tuple[float, float], int]:
            if self.patience is not None and now - each.since >= self.patience:  # so no request starves
                return False, 0, (0.0, 0.0), each.number
            share = (0.0, 0.0)
            if used:
                own = used.get(each.user, 0) / self.limits_of(each.user).weight
                group = self._group_of(each.user)
                # A user without a group counts as a group of its own. fsum(), since the order of terms must not matter.
                share = (math.fsum(by_group.get(group, ())) / self.groups[group].weight if group else own), own
            return True, -self.priority(each), share, each.number

        return turn

    def usage(self, held: Iterable[Holding], now: float) -> dict[int | None, float]:
        """Return the usage that fair shares compare, by user.

        The held units or, with a half-life, the device-seconds of past and active leases that still count.

        Args:
            held: The active leases.
            now: The time.
        """
        if self.half_life is None:
            return dict(sum_usage(held))
        found: dict[int | None, list[float]] = {
            user: [past.decayed(now, self.half_life)] for user, past in self.past.items()
        }
        for each in held:
            if not each.inner and each.since is not None:
                seconds = max(0.0, now - each.since)
                amount = _integrate(each.units / UNITS_PER_DEVICE, seconds, self.half_life)
                found.setdefault(each.user, []).append(amount)
        return {user: math.fsum(amounts) for user, amounts in found.items()}

    def _group_of(self, user: int | None) -> str:
        """Return the name of the group that counts for a user; empty for none."""
        return "" if user is None else self.members.get(user, "")

    def order(self, waiting: Iterable[Waiting], held: Iterable[Holding], now: float) -> list[Waiting]:
        """Sort waiting requests in the order of service; see :meth:`sort_key`.

        Args:
            waiting: The waiting requests.
            held: The active leases.
            now: The time.
        """
        return sorted(waiting, key=self.sort_key(held, now))

    def total_group(self, user: int | None) -> str:
        """Return the name of the group whose total counts a user; empty for none, for root, and for an unknown user."""
        group = "" if user == ROOT else self._group_of(user)
        return group if group and self.groups[group].total is not None else ""

    def _room(self, group: str, used: Mapping[int | None, int]) -> float:
        """Return the units that the members of a group with a total may take beside what they hold; possibly negative.

        Args:
            group: Name of the group.
            used: Held units by user; see :func:`sum_usage`.
        """
        held = sum(units for user, units in used.items() if self.total_group(user) == group)
        return (self.groups[group].total or 0) * UNITS_PER_DEVICE - held

    def over_limits(self, waiting: Waiting, used: Mapping[int | None, int]) -> tuple[OverLimit, ...]:
        """Return the limits of the user, and of the user's group, in the way of a request; empty if none is.

        The limits of devices count the leases, and not for a request for parts of a lease.

        Args:
            waiting: The request.
            used: Held units by user; see :func:`sum_usage`.
        """
        if self.plain:
            return ()
        limits, found = self.limits_of(waiting.user), []
        asked = waiting.units / UNITS_PER_DEVICE
        if limits.devices is not None and not waiting.inner:
            has = used.get(waiting.user, 0)
            if has + waiting.units > limits.devices * UNITS_PER_DEVICE:
                found.append(OverLimit(limit="devices", most=limits.devices, asked=asked, held=has / UNITS_PER_DEVICE))
        if not waiting.inner and (group := self.total_group(waiting.user)):
            most, room = self.groups[group].total or 0, self._room(group, used)
            if waiting.units > room:
                held = most - room / UNITS_PER_DEVICE
                found.append(OverLimit(limit="total_devices", most=most, asked=asked, held=held, group=group))
        if limits.seconds is not None and waiting.seconds is not None and waiting.seconds > limits.seconds:
            found.append(OverLimit(limit="time", most=limits.seconds, asked=waiting.seconds))
        if limits.priority is not None and waiting.priority > limits.priority:
            found.append(OverLimit(limit="priority", most=limits.priority, asked=waiting.priority))
        return tuple(found)

    def bars(self, waiting: Waiting) -> bool:
        """Return whether a request is over a limit that lasts: it can never be served, whatever is released."""
        return any(each.lasting for each in self.over_limits(waiting, {}))

    def limited(self, waiting: Waiting, used: Mapping[int | None, int]) -> bool:
        """Return whether a request waits for its own user, or for members of its group, to release devices.

        Args:
            waiting: The request.
            used: Held units by user; see :func:`sum_usage`.
        """
        return any(each.of_devices for each in self.over_limits(waiting, used))

    def keeps_waiting(
        self, earlier: Waiting, later: Waiting, used: Mapping[int | None, int], *, competes: bool
    ) -> bool:
        """Return whether an earlier request keeps a later one from being served, unless that one may pass.

        It does if both compete for devices, or if the total of their group has no room for both. A request that waits
        for a limit blocks only the members of its group, and these only if the limit is the group's total. A request
        over a limit that lasts is refused at its next look, and blocks none.

        Args:
            earlier: The request ahead.
            later: The request behind.
            used: Held units by user; see :func:`sum_usage`.
            competes: Whether both compete for devices; see :meth:`competes`.
        """
        if not competes and not self.total_group(later.user):
            return False
        limits = self.over_limits(earlier, used)
        if any(each.lasting or not each.group for each in limits):
            return False
        return (competes and not limits) or self.share_scarce_total(earlier, later, used)

    def share_scarce_total(self, earlier: Waiting, later: Waiting, used: Mapping[int | None, int]) -> bool:
        """Return whether two requests count in the total of one group, which has no room for both."""
        group = self.total_group(later.user)
        if not group or group != self.total_group(earlier.user) or earlier.inner or later.inner:
            return False
        # Pairs are enough: if each later request leaves room for the earlier one, all of them together do.
        return earlier.units + later.units > self._room(group, used)

    def barred(self, waiting: Waiting, now: float) -> frozenset[Hashable]:
        """Return the devices withheld from a request with a start now: drained or reserved ones."""
        found: frozenset[Hashable] = frozenset()
        return found.union(*(block.devices for block in self.blocks if block.meets(waiting, now)))

    def competes(self, one: Waiting, other: Waiting, now: float) -> bool:
        """Return whether two requests want a common device that both may have now.

        A request that may not have a device now does not keep another request from it: so a reservation cannot be
        broken by an earlier request, and a drained device blocks no line. If the devices of a request are unknown, the
        answer is True.
        """
        if one.wants is None or other.wants is None or not self.blocks:
            return one.competes(other)
        return not (one.wants - self.barred(one, now)).isdisjoint(other.wants - self.barred(other, now))


PLAIN = Policy()
"""First come, first served, by priority; backfill without delay for earlier requests."""


def sum_usage(held: Iterable[Holding]) -> dict[int | None, int]:
    """Sum the held units by user, in 1/10000 of a device; a part of another lease counts once."""
    found: dict[int | None, int] = {}
    for each in held:
        if not each.inner:
            found[each.user] = found.get(each.user, 0) + each.units
    return found
