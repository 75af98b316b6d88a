"""Who is next: the order of those who wait, who may pass whom, and when somebody will start.

Everything here is a pure function of facts that everybody sees: who waits, since when and for what, and what is held
and until when. So all who wait compute the same order, whether they are processes of a machine or requests of one
scheduler. Times are seconds of one clock; devices are anything that can be compared.

**Backfill.** Somebody whose end is known may pass those ahead who cannot start yet, if it has ended by the time that
each of them could start in turn at the earliest, plus a bound. What passed that one itself since it came does not make
this time later. So all who ever pass a request delay it together by no more than the bound, beyond when it would start
in turn if everything lasted as long as it may. What is held without a known end may end at any moment: then the bound
counts from when the request came.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from anyaccel.model import UNITS_PER_DEVICE, Value, field
from anyaccel.text import span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from anyaccel.configuration import Configuration

ROOT = 0
FOREVER = float("inf")


class Need(Value):
    """What one term of a request needs.

    Attributes:
        count: How many devices.
        units: How much of each, in 1/10000.
        among: The devices that could serve.
    """

    count: int
    units: int
    among: frozenset[Hashable]


class Waiting(Value):
    """Somebody who waits.

    Attributes:
        key: Identity.
        number: Position in the order of arrival.
        since: When it came.
        priority: The higher, the earlier, as it was asked for.
        user: Number of the user; None when unknown.
        seconds: How long it holds what it gets at most; None when it does not say.
        needs: What it needs; empty when it does not say.
        sites: Where several machines could serve it, what it needs of each; else empty.
        hosts: On how many of these it is to be served.
        wants: The devices for which it competes; None for all of them.
        inner: Whether it asks for parts of what its user holds already, which counts once.
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
        """Whether both want one of the same devices."""
        return self.wants is None or other.wants is None or not self.wants.isdisjoint(other.wants)

    @property
    def units(self) -> int:
        """What it will hold in all, in 1/10000 of a device."""
        return self.hosts * sum(need.count * need.units for need in self.needs)


class Holding(Value):
    """A part of a device that is held.

    Attributes:
        device: The device.
        units: How much of it.
        user: Number of the user; None when unknown.
        until: When it ends at the latest; None when it does not say.
        passed: When it was given, where it was not its turn; None where it was.
        inner: Whether it is a part of what another lease of the user holds, which counts once.
    """

    device: Hashable
    units: int = UNITS_PER_DEVICE
    user: int | None = None
    until: float | None = None
    passed: float | None = None
    inner: bool = False


class Limits(Value):
    """What one user may have.

    Attributes:
        devices: Devices at once; None without limit, like the two below.
        seconds: The longest time.
        priority: The highest priority.
        weight: How much of the machine the user's fair share is, beside 1 for others.
    """

    devices: float | None = None
    seconds: float | None = None
    priority: int | None = None
    weight: float = 1


_NO_LIMITS = Limits()


class OverLimit(Value):
    """A limit of a user that stands in the way of a request.

    Attributes:
        limit: Its name in the machine's configuration: ``devices``, ``time`` or ``priority``.
        most: The limit: devices, seconds, or a priority.
        asked: How much the request asks for.
        held: How many devices the user holds.
    """

    limit: str
    most: float
    asked: float
    held: float = 0.0

    @property
    def lasting(self) -> bool:
        """Whether the limit stands in the way whatever the user gives back."""
        return self.asked > self.most

    def message(self, user: str = "") -> str:
        """Say what the limit is, as a clause without capital and period.

        Args:
            user: Name of the user; empty for the one who reads it.
        """
        whose = f"{user}'s" if user else "your"
        if self.limit != "devices":
            asked, most = map(self._written, (self.asked, self.most))
            return f"a {self.limit} of {asked} is over {whose} limit of {most}"
        if self.lasting:
            verb = "is" if self.asked == 1 else "are"
            return f"{self._written(self.asked)} {verb} over {whose} limit of {self.most:g}"
        if self.held >= self.most:
            return f"{f'{user} is at the' if user else 'you are at your'} limit of {self._written(self.most)}"
        holds = f"{user} holds" if user else "you hold"
        verb = "is" if self.asked == 1 else "are"
        return f"{holds} {self._written(self.held)}, and {self.asked:g} more {verb} over {whose} limit of {self.most:g}"

    @property
    def remedy(self) -> str:
        """The way out."""
        from anyaccel.configuration import MACHINE_FILE

        if not self.lasting:
            return "'anyaccel status' lists your leases, and 'anyaccel release LEASE' ends one"
        administrator = f"the administrator can raise {self.limit!r} in {MACHINE_FILE}"
        nothing = self.limit == "devices" and not self.most
        return administrator if nothing else f"ask for {self._written(self.most)} at most; {administrator}"

    def _written(self, number: float) -> str:
        if self.limit == "time":
            return span(number)
        if self.limit == "priority":
            return f"{number:.0f}"
        return f"{number:g} device{'s' * (number != 1)}"


class Policy(Value):
    """The rules of a machine.

    Attributes:
        backfill: By how many seconds who passes may delay who came before.
        fair_shares: Whether who holds less comes first, of two of one priority.
        patience: Who has waited for so many seconds comes before all who have not; None for never.
        limits: What users may have of whom nothing is said by number.
        users: What the others may have.
    """

    backfill: float = 0.0
    fair_shares: bool = False
    patience: float | None = None
    limits: Limits = _NO_LIMITS
    users: Mapping[int, Limits] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether the order is that of priority and arrival, without limits: it depends on nothing that is held."""
        return not self.fair_shares and self.patience is None and not self.users and self.limits == _NO_LIMITS

    @classmethod
    def of(cls, configuration: Configuration) -> Policy:
        """The rules that a machine's configuration asks for; users it names who do not exist are left out."""
        if not configuration.found:
            return PLAIN
        numbers = {_user(name): name for name in configuration.names("users")}
        users = {each: _limits(configuration, f"users.{name}") for each, name in numbers.items() if each is not None}
        limits = _limits(configuration, "limits")
        fair = configuration.get("queue.fair_shares")
        changed = fair or users or limits != _NO_LIMITS or "queue.patience" in configuration.values
        return cls(
            backfill=configuration.get("queue.backfill"),
            fair_shares=fair,
            patience=configuration.get("queue.patience") if changed else None,
            limits=limits,
            users=users,
        )

    def limits_of(self, user: int | None) -> Limits:
        """What a user may have; root has no limit."""
        if user == ROOT:
            return self.users.get(ROOT, _NO_LIMITS)
        return self.limits if user is None else self.users.get(user, self.limits)

    def priority(self, waiting: Waiting) -> int:
        """The priority that counts: what is asked for, and no more than the user may."""
        highest = self.limits_of(waiting.user).priority
        return waiting.priority if highest is None else min(waiting.priority, highest)

    def turn(self, held: Iterable[Holding], now: float) -> Callable[[Waiting], tuple[bool, int, float, int]]:
        """Return what requests are sorted by to be in the order of service.

        Args:
            held: All that is held.
            now: The time.
        """
        used = usage(held) if self.fair_shares else {}

        def turn(each: Waiting) -> tuple[bool, int, float, int]:
            if self.patience is not None and now - each.since >= self.patience:
                return False, 0, 0.0, each.number
            share = used.get(each.user, 0) / self.limits_of(each.user).weight if used else 0.0
            return True, -self.priority(each), share, each.number

        return turn

    def order(self, waiting: Iterable[Waiting], held: Iterable[Holding], now: float) -> list[Waiting]:
        """Put those who wait in the order of service.

        Args:
            waiting: Who waits.
            held: All that is held.
            now: The time.
        """
        return sorted(waiting, key=self.turn(held, now))

    def over_limits(self, waiting: Waiting, held: Iterable[Holding]) -> tuple[OverLimit, ...]:
        """Return the limits of its user that stand in the way of a request: the one answer for all that ask.

        Args:
            waiting: The request.
            held: All that is held.
        """
        limits, found = self.limits_of(waiting.user), []
        if limits.devices is not None and not waiting.inner:
            has = usage(held).get(waiting.user, 0)
            if has + waiting.units > limits.devices * UNITS_PER_DEVICE:
                asked = waiting.units / UNITS_PER_DEVICE
                found.append(OverLimit(limit="devices", most=limits.devices, asked=asked, held=has / UNITS_PER_DEVICE))
        if limits.seconds is not None and waiting.seconds is not None and waiting.seconds > limits.seconds:
            found.append(OverLimit(limit="time", most=limits.seconds, asked=waiting.seconds))
        if limits.priority is not None and waiting.priority > limits.priority:
            found.append(OverLimit(limit="priority", most=limits.priority, asked=waiting.priority))
        return tuple(found)

    def limited(self, waiting: Waiting, held: Iterable[Holding]) -> bool:
        """Whether a request waits until its user holds less: it waits for no other request then, and none for it."""
        return any(each.limit == "devices" for each in self.over_limits(waiting, held))

    def may_pass(self, one: Waiting, ahead: Sequence[Waiting], held: Sequence[Holding], now: float) -> bool:
        """Whether somebody may be served before those ahead, who cannot start yet.

        Args:
            one: Who would pass.
            ahead: Those ahead that want one of the same devices, in the order of service.
            held: All that is held.
            now: The time.
        """
        if one.seconds is None:
            return not ahead
        return all(now + one.seconds <= start + self.backfill for start in self.earliest(ahead, held))

    @staticmethod
    def earliest(waiting: Sequence[Waiting], held: Iterable[Holding]) -> list[float]:
        """When each of some who wait could start in turn at the earliest, as far as is known.

        Args:
            waiting: Who waits, in the order of service.
            held: All that is held.
        """
        ends = _known_ends(held)
        found: list[float] = []
        for position, one in enumerate(waiting):
            before = [start for other, start in zip(waiting[:position], found, strict=True) if one.competes(other)]
            found.append(max([_alone(one, ends), *before]))
        return found


PLAIN = Policy()
"""First come, first served, by priority; backfill where it delays nobody."""


def usage(held: Iterable[Holding]) -> dict[int | None, int]:
    """What each user holds, in 1/10000 of a device; what is a part of another lease is held once."""
    found: dict[int | None, int] = {}
    for each in held:
        if not each.inner:
            found[each.user] = found.get(each.user, 0) + each.units
    return found


def forecast(waiting: Sequence[Waiting], held: Iterable[Holding], now: float) -> dict[Hashable, float | None]:
    """Say when those who wait start if all that has a known end lasts as long as it may, by key; None for unknown.

    Args:
        waiting: Who waits, in the order of service.
        held: All that is held.
        now: The time.
    """
    busy: dict[Hashable, list[tuple[float, int]]] = {}
    for each in held:
        end = FOREVER if each.until is None else max(each.until, now)
        busy.setdefault(each.device, []).append((end, each.units))
    starts: dict[Hashable, float | None] = {}
    passed: list[tuple[Waiting, float]] = []
    for one in waiting:
        own = [_when(need, busy) for need in one.needs] or [FOREVER]
        start = max([now, *own, *(before for other, before in passed if one.competes(other))])
        passed.append((one, start))
        starts[one.key] = None if start == FOREVER else start
        end = FOREVER if one.seconds is None else start + one.seconds
        for need in one.needs:
            soonest = sorted(need.among, key=lambda device: (_free_at(busy.get(device, ()), need.units), str(device)))
            for device in soonest[: need.count]:
                left = [(until, units) for until, units in busy.get(device, ()) if until > start]
                busy[device] = [*left, (end, need.units)]
    return starts


def _known_ends(held: Iterable[Holding]) -> dict[Hashable, list[tuple[float, int, float]]]:
    """By device, what is held of it with a known end: the end, how much, and when it passed somebody, if it did."""
    ends: dict[Hashable, list[tuple[float, int, float]]] = {}
    for each in held:
        if each.until is not None:
            passed = -FOREVER if each.passed is None else each.passed
            ends.setdefault(each.device, []).append((each.until, each.units, passed))
    return ends


def _alone(one: Waiting, ends: Mapping[Hashable, Sequence[tuple[float, int, float]]]) -> float:
    """When somebody could start if nobody else waited and none had passed it since it came."""

    def at(needs: Iterable[Need]) -> float:
        before = {
            device: [(until, units) for until, units, passed in each if passed < one.since]
            for need in needs
            for device in need.among
            if (each := ends.get(device))
        }
        return max([one.since, *(_when(need, before) for need in needs)])

    return sorted(map(at, one.sites or [one.needs]))[one.hosts - 1]


def _when(need: Need, busy: Mapping[Hashable, Sequence[tuple[float, int]]]) -> float:
    """When enough devices have room for a need."""
    times = sorted(_free_at(busy.get(device, ()), need.units) for device in need.among)
    return times[need.count - 1] if 0 < need.count <= len(times) else -FOREVER


def _free_at(busy: Sequence[tuple[float, int]], units: int) -> float:
    """When a device has room for some units, given what ends when."""
    taken, free = sum(each for _, each in busy), -FOREVER
    for end, each in sorted(busy):
        if taken + units <= UNITS_PER_DEVICE:
            break
        taken, free = taken - each, end
    return free


def _limits(configuration: Configuration, table: str) -> Limits:
    """What a table of a machine's configuration says of a user, and where it does not, ``[limits]``."""
    values = configuration.values

    def value(name: str) -> Any:
        return values.get(f"{table}.{name}", values.get(f"limits.{name}"))

    weight = values.get(f"{table}.weight", 1)
    return Limits(devices=value("devices"), seconds=value("time"), priority=value("priority"), weight=weight)


def _user(name: str) -> int | None:
    """Number of a user, by name or number; None when there is none."""
    import pwd

    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):  # the latter for a name with a NUL
        return None


def unknown_users(configuration: Configuration) -> tuple[str, ...]:
    """The names in a machine's configuration that are of no user here: what it says of them has no effect."""
    return tuple(name for name in configuration.names("users") if _user(name) is None)
