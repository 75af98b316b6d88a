"""Filters of requests: conditions of a term on each device beside the name.

A filter is one entry of :data:`FILTERS`. The entry has the syntax, the condition, the message if no device passes, the
nearest alternatives, and the fact that a cluster is told about a device. The grammar, placement, reasons, the nearest
request, exports, engines and the command line's help read the table, so a new filter changes nothing else. With a few
conditions that every term has, the filters are the :func:`rules` by which a device serves a term.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from anyaccel._typing import Generic, NamedTuple, TypeVar
from anyaccel.model import (
    MOST_LABELS,
    UNITS_PER_DEVICE,
    Device,
    Health,
    Inventory,
    ReasonCode,
    Term,
    format_memory,
    format_memory_beside,
    format_row,
    format_units,
    join_names,
    read_label,
    read_row,
    replace,
    rows_of,
    write_label,
    write_labels,
)
from anyaccel.text import listed, shown, size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

T = TypeVar("T")

_MOST_DIGITS = 6  # of a NUMA node: longer numbers would only cost time to convert
_ID = r"[!-+\--~]{1,128}"  # no comma, which ends it
_NUMBERS = r"[0-9]{1,9}(?:\.[0-9]{1,9}){0,7}"
_VERSIONS = rf"({_NUMBERS})(?:(\+)|-({_NUMBERS}))?"


def goes_by(device: Device, names: Iterable[str]) -> bool:
    """Return whether a device has one of the names, compared without case."""
    own = {name.lower() for name in device.names}
    return any(name.lower() in own for name in names)


class AskedFilter(NamedTuple, Generic[T]):
    """A filter of a term, applied to the devices of one machine.

    Attributes:
        filter: The filter.
        wanted: The value, as parsed by ``read`` of the filter.
        term: The term.
        inventory: The machine.
    """

    filter: Filter[T]
    wanted: T
    term: Term
    inventory: Inventory


class Filter(Generic[T]):
    """One filter, over values parsed by ``read``.

    Attributes:
        name: Name of the filter. A word is an option of a term, ``name=value``; a sign stands behind the term's names.
        form: Syntax, in help and in messages.
        summary: The condition, as the rest of a sentence that begins with "each device", and an example.
        typed: Whether the type of a device decides on most machines, so that a request of types to a cluster suffices.
        portable: Whether the filter means the same on every machine. Other filters cannot be passed to a cluster.
    """

    name: str
    form: str
    summary: str
    typed: bool = False
    portable: bool = True

    @property
    def unknown(self) -> str:
        """Description of a device without a fact."""
        return f"unknown {self.name}"

    def read(self, text: str) -> T:
        """Parse a value.

        Raises:
            ValueError: When the value is invalid; the message is a clause that names the filter.
        """
        raise NotImplementedError

    def write(self, wanted: T) -> str:
        """Format the value in its usual form for :meth:`read`."""
        return str(wanted)

    def predicate(self, asked: AskedFilter[T]) -> Callable[[Device], bool]:
        """Return the condition on a device of the machine. A device with an unknown fact does not pass."""
        raise NotImplementedError

    def fact(self, device: Device, inventory: Inventory) -> str:
        """Return the fact about a device, in the form of a request's value; empty when unknown."""
        raise NotImplementedError

    def explain_failure(self, asked: AskedFilter[T], devices: Sequence[Device]) -> str:
        """Explain why devices do not pass: a clause without capital and period, or empty if the request says enough.

        There is at least one device, except for a filter that names devices: then too few may pass.
        """
        having: dict[str, list[str]] = {}
        for device in devices:
            fact = self.fact(device, asked.inventory)
            having.setdefault(fact or self.unknown, []).append(device.name)
        told = listed([f"{join_names(names)} ({fact})" for fact, names in having.items()])
        return f"not {self.name}={self.write(asked.wanted)}: {told}"

    def find_near(self, asked: AskedFilter[T], devices: Sequence[Device]) -> Iterator[Term]:  # noqa: ARG002
        """Yield terms with other values of existing devices, nearest first."""
        return iter(())

    def count(self, wanted: T) -> int | None:  # noqa: ARG002
        """Return the number of named devices, as the default quantity of a term; None for a value without names."""
        return None


class _Memory(Filter[int]):
    """Minimum memory in bytes of the device, or of the share; of the device for a share by memory."""

    name = "mem"
    form = "mem=SIZE"
    summary = "has at least so much memory; with a share, the share has: mem=40GiB"
    typed = True

    def read(self, text: str) -> int:
        """Parse an amount of memory, rounded up to a whole byte."""
        try:
            return size(text)
        except ValueError as error:
            raise ValueError(f"'mem' {error}") from None

    def write(self, wanted: int) -> str:
        return format_memory(wanted)

    def predicate(self, asked: AskedFilter[int]) -> Callable[[Device], bool]:
        # Both sides times 10000: whole numbers compare exactly. A share by memory has no units.
        units, least = min(asked.term.units or UNITS_PER_DEVICE, UNITS_PER_DEVICE), asked.wanted * UNITS_PER_DEVICE
        return lambda device: device.rounded(units) * (device.memory_bytes or 0) >= least

    def fact(self, device: Device, inventory: Inventory) -> str:  # noqa: ARG002
        return format_memory(device.memory_bytes) if device.memory_bytes else ""

    def explain_failure(self, asked: AskedFilter[int], devices: Sequence[Device]) -> str:
        largest, term = max(device.memory_bytes or 0 for device in devices), asked.term
        if not largest:
            return f"the memory is unknown of {_names(devices)}"
        amounts = largest, largest * term.units // UNITS_PER_DEVICE
        whole, share = (format_memory_beside(each, asked.wanted) for each in amounts)
        if term.memory_bytes:
            return f"the largest memory is {whole}, less than {term.quantity}"
        part = f", {format_units(term.units)} of it {share}" if term.fraction else ""
        return f"the largest memory is {whole}{part}, less than mem={format_memory(asked.wanted)}"

    def find_near(self, asked: AskedFilter[int], devices: Sequence[Device]) -> Iterator[Term]:
        """Yield terms with the smallest shares that have enough memory, then with less memory."""
        term = asked.term
        sizes = sorted({device.memory_bytes or 0 for device in devices} - {0}, reverse=True)
        for most in sizes:
            units = -(-asked.wanted * UNITS_PER_DEVICE // most)
            if term.units < units < UNITS_PER_DEVICE:
                yield replace(term, units=units)
        for most in sizes:
            share = most * min(term.units, UNITS_PER_DEVICE) // UNITS_PER_DEVICE
            if 0 < share < asked.wanted:
                yield with_filter(term, self.name, format_memory(share))


class _Versions(NamedTuple):
    """A range of versions.

    Attributes:
        text: Text of the range.
        low: Lowest version, as numbers.
        high: Highest version, as numbers, including its releases; None for no upper end.
    """

    text: str
    low: tuple[int, ...]
    high: tuple[int, ...] | None


class _Driver(Filter[_Versions]):
    """Version of the vendor's driver, compared by number; an exact version, or a range's end, includes its releases."""

    name = "driver"
    form = "driver=VERSION"
    summary = "has a driver of this version: driver=550+ at least, driver=550.54 exactly, driver=535-550 a range"

    def read(self, text: str) -> _Versions:
        match = re.fullmatch(_VERSIONS, text)
        if match is None:
            raise ValueError(f"'driver' must be a version such as 550, 550.54+ or 535-550 (got {shown(text)})")
        low = _version(match[1])
        high = None if match[2] else _version(match[3] or match[1])
        if high is not None and low[: len(high)] > high:  # the end of a range includes its releases
            raise ValueError(f"'driver' must be a range from less to more (got {shown(text)})")
        return _Versions(text, low, high)

    def write(self, wanted: _Versions) -> str:
        return wanted.text

    def predicate(self, asked: AskedFilter[_Versions]) -> Callable[[Device], bool]:
        _, low, high = asked.wanted
        versions = {report.vendor: _version(report.driver_version) for report in asked.inventory.vendors}

        def passes(device: Device) -> bool:
            version = versions.get(device.vendor)
            if not version:
                return False
            return not _Driver._above(low, version) and (high is None or version[: len(high)] <= high)

        return passes

    @staticmethod
    def _above(version: tuple[int, ...], other: tuple[int, ...]) -> bool:
        """Return whether a version is greater than another, with missing numbers as 0."""
        length = max(len(version), len(other))
        return version + (0,) * (length - len(version)) > other + (0,) * (length - len(other))

    def fact(self, device: Device, inventory: Inventory) -> str:
        report = inventory.report(device.vendor)
        return report.driver_version if report is not None and _version(report.driver_version) else ""

    def find_near(self, asked: AskedFilter[_Versions], devices: Sequence[Device]) -> Iterator[Term]:
        """Yield terms with the installed driver versions as the least, newest first."""
        texts = {self.fact(device, asked.inventory) for device in devices} - {""}
        versions = {_version(text) for text in texts}
        for version in sorted(versions, reverse=True):
            yield with_filter(asked.term, self.name, ".".join(map(str, version)) + "+")


def _version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, such as 550, 90 and 7 of 550.90.07; empty for none."""
    match = re.match(_NUMBERS, text)
    return tuple(map(int, match[0].split("."))) if match else ()


class _NumaNode(Filter[int]):
    """Nearest NUMA node of the host."""

    name = "numa"
    form = "numa=NODE"
    summary = "is nearest to this NUMA node of the machine: numa=0"

    def read(self, text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
            raise ValueError(f"'numa' must be the number of a NUMA node, such as 0 (got {shown(text)})")
        return int(text)

    def predicate(self, asked: AskedFilter[int]) -> Callable[[Device], bool]:
        return lambda device: device.numa_node == asked.wanted

    def fact(self, device: Device, inventory: Inventory) -> str:  # noqa: ARG002
        return "" if device.numa_node is None else str(device.numa_node)

    def find_near(self, asked: AskedFilter[int], devices: Sequence[Device]) -> Iterator[Term]:
        """Yield terms with other nodes that have devices, nearest number first."""
        nodes = {device.numa_node for device in devices if device.numa_node is not None}
        for node in sorted(nodes, key=lambda node: (abs(node - asked.wanted), node)):
            yield with_filter(asked.term, self.name, str(node))


class _Wanted(NamedTuple):
    """The condition on a label.

    Attributes:
        key: Key of the label.
        value: Required value; empty for any value, and for none.
        without: Whether devices without the label pass instead.
    """

    key: str
    value: str
    without: bool

    def __str__(self) -> str:
        return "-" * self.without + write_label(self.key, self.value)

    def passes(self, labels: Mapping[str, str]) -> bool:
        """Return whether a device with these labels passes."""
        has = self.key in labels and self.value in ("", labels[self.key])
        return has != self.without


class _Labels(Filter[tuple[_Wanted, ...]]):
    """Labels of the device, given by the administrator or a program."""

    name = "label"
    form = "label=LABEL"
    summary = (
        "has this label: label=team=vision, label=reserved whatever its value, label=-reserved without it, + for and"
    )

    @property
    def unknown(self) -> str:
        return "no label"

    def read(self, text: str) -> tuple[_Wanted, ...]:
        found: dict[_Wanted, None] = {}
        for each in text.split("+"):
            try:
                key, value = read_label(each.removeprefix("-"))
            except ValueError:
                raise ValueError(
                    f"'label' must be a key such as reserved, or a key and value such as team=vision, with - in front "
                    f"for devices without it and + between several (got {shown(text)})"
                ) from None
            found[_Wanted(key, value, each.startswith("-"))] = None
        if len(found) > MOST_LABELS:
            raise ValueError(f"'label' must be at most {MOST_LABELS} labels (got {len(found)})")
        return tuple(found)

    def write(self, wanted: tuple[_Wanted, ...]) -> str:
        return "+".join(map(str, wanted))

    def predicate(self, asked: AskedFilter[tuple[_Wanted, ...]]) -> Callable[[Device], bool]:
        return lambda device: all(each.passes(device.labels) for each in asked.wanted)

    def fact(self, device: Device, inventory: Inventory) -> str:  # noqa: ARG002
        return "+".join(write_labels(device.labels))

    def find_near(self, asked: AskedFilter[tuple[_Wanted, ...]], devices: Sequence[Device]) -> Iterator[Term]:
        """Yield terms with subsets of the labels that a device has together, largest first, then without labels."""
        passed = {tuple(each for each in asked.wanted if each.passes(device.labels)) for device in devices}
        for some in sorted(passed, key=lambda some: (-len(some), tuple(map(asked.wanted.index, some)))):
            if some:
                yield with_filter(asked.term, self.name, self.write(some))
        rest = tuple((name, value) for name, value in asked.term.filters if name != self.name)
        yield replace(asked.term, filters=rest)


class _Id(Filter[str]):
    """Stable id of one device, or a prefix that is unique among the term's devices, as in masks."""

    name = "id"
    form = "id=ID"
    summary = "has this id, or the only one that begins so: id=GPU-8932f937"
    portable = False

    def read(self, text: str) -> str:
        if not re.fullmatch(_ID, text):
            raise ValueError(f"'id' must be the id of a device, as 'anyaccel' shows it (got {shown(text)})")
        return text

    def predicate(self, asked: AskedFilter[str]) -> Callable[[Device], bool]:
        meant = self._meant(asked)
        return lambda device: len(meant) == 1 and device.id == meant[0]

    @staticmethod
    def _meant(asked: AskedFilter[str]) -> list[str]:
        """Return the ids of devices with the term's names that begin with the value; an equal id stands alone."""
        ids = [device.id for device in asked.inventory.devices if goes_by(device, asked.term.names)]
        begun = [each for each in ids if each.startswith(asked.wanted)]  # an exact id may be a prefix of others
        return [asked.wanted] if asked.wanted in begun else begun

    def fact(self, device: Device, inventory: Inventory) -> str:  # noqa: ARG002
        return device.id

    def explain_failure(self, asked: AskedFilter[str], devices: Sequence[Device]) -> str:
        meant = self._meant(asked)
        if len(meant) > 1:
            return f"id={asked.wanted} is the beginning of several ids: {listed(meant)}"
        if meant:
            return f"id={asked.wanted} is one device"
        if any(asked.wanted == device.name for device in asked.inventory.devices):
            return f"no id begins with {asked.wanted}; a device is asked for by name as {asked.wanted} alone"
        from difflib import get_close_matches

        ids = [device.id for device in devices]
        close = get_close_matches(asked.wanted, ids, n=3)
        return f"no id begins with {asked.wanted}; " + (
            f"close is {listed(close)}" if close else f"there is {listed(ids)}"
        )


class _Index(Filter[tuple[int, int]]):
    """Devices by index: the first and last index of a range, as numbered in the table per vendor."""

    name = "/"
    form = "NAME/INDEX"
    summary = "is this very one, or one of these: GPU/3, GPU/0-3 for all four, GPU/0-3:2 for two of them"
    portable = False

    def read(self, text: str) -> tuple[int, int]:
        row = read_row(text)
        if row is None:
            raise ValueError(f"what stands behind '/' must be an index or a row of them, 3 or 0-3 (got {shown(text)})")
        if row[0] > row[1]:
            raise ValueError(f"a row of devices must go from less to more (got {shown(text)})")
        return row

    def write(self, wanted: tuple[int, int]) -> str:
        return format_row(wanted)

    def count(self, wanted: tuple[int, int]) -> int:
        first, last = wanted
        return last - first + 1

    def predicate(self, asked: AskedFilter[tuple[int, int]]) -> Callable[[Device], bool]:
        first, last = asked.wanted
        return lambda device: first <= device.index <= last

    def fact(self, device: Device, inventory: Inventory) -> str:  # noqa: ARG002
        return str(device.index)

    def explain_failure(self, asked: AskedFilter[tuple[int, int]], devices: Sequence[Device]) -> str:  # noqa: ARG002
        first, last = asked.wanted
        name = asked.term.names[0]
        there = {device.index for device in asked.inventory.devices if goes_by(device, (name,))}
        missing = rows_of(set(range(first, last + 1)) - there)
        if not there:  # no device has the name, which is a reason of its own
            return ""
        if not missing:
            count = self.count(asked.wanted)
            return f"{name}/{self.write(asked.wanted)} is {count} of them" if count < asked.term.count else ""
        return f"there is no {self._named(name, missing)}, there is {self._named(name, rows_of(there))}"

    def find_near(self, asked: AskedFilter[tuple[int, int]], devices: Sequence[Device]) -> Iterator[Term]:
        """Yield terms with existing parts of the range, then with other single devices; quantities shrink to fit."""
        first, last = asked.wanted
        term, there = asked.term, {device.index for device in devices}
        inside = rows_of(each for each in there if first <= each <= last)
        others = sorted(there, key=lambda index: (max(first - index, index - last, 0), -index))
        for row in (*sorted(inside, key=self.count, reverse=True), *((index, index) for index in others)):
            units = min(term.units, self.count(row) * UNITS_PER_DEVICE)
            yield replace(with_filter(term, self.name, self.write(row)), units=units)

    def _named(self, name: str, rows: Sequence[tuple[int, int]]) -> str:
        """Return ranges of devices with a name in front, as a list in words."""
        return listed([f"{name}/{self.write(row)}" for row in rows])


_ENTRIES: tuple[Filter[Any], ...] = (_Index(), _Memory(), _Driver(), _NumaNode(), _Labels(), _Id())
FILTERS: dict[str, Filter[Any]] = {entry.name: entry for entry in _ENTRIES}
"""Every filter by name, in the order of a formatted request."""
BY_ID = _Id.name
"""Name of the filter that names one device by its id."""


_NOWHERE = Inventory(machine="", devices=())


def asked(term: Term, inventory: Inventory = _NOWHERE) -> tuple[AskedFilter[Any], ...]:
    """Return the filters of a term.

    Args:
        term: The term.
        inventory: The machine of the devices.

    Raises:
        ValueError: When a filter is unknown, or its value invalid.
    """
    for name, _ in term.filters:
        if name not in FILTERS:
            raise ValueError(f"a filter must be one of {', '.join(FILTERS)} (got {shown(name)})")
    return tuple(AskedFilter(FILTERS[name], FILTERS[name].read(text), term, inventory) for name, text in term.filters)


def asked_memory(term: Term) -> int:
    """Return the memory in bytes that the filter of a term asks for; 0 without such a filter.

    Raises:
        ValueError: When a filter of the term is unknown, or its value invalid.
    """
    return next((each.wanted for each in asked(term) if isinstance(each.filter, _Memory)), 0)


def counted(filters: Iterable[AskedFilter[Any]]) -> int | None:
    """Return the number of devices that one of a term's filters names; None without such a filter."""
    counts = (each.filter.count(each.wanted) for each in filters)
    return next((count for count in counts if count is not None), None)


def with_filter(term: Term, name: str, value: str) -> Term:
    """Return a term with another value of a filter; a term without the filter stays as it is."""
    return replace(term, filters=tuple((each, value if each == name else had) for each, had in term.filters))


class DeviceRule(NamedTuple):
    """A condition of a term on each of its devices.

    Attributes:
        code: Reason code if a device does not pass.
        passes: Returns whether a device passes.
        explain_failure: Explains why devices do not pass: a clause without capital and period, or empty.
        filter: Name of the filter; empty for a rule that is not a filter.
        counts: Whether the rule names devices, of which some may not exist.
    """

    code: ReasonCode
    passes: Callable[[Device], bool]
    explain_failure: Callable[[Sequence[Device]], str]
    filter: str = ""
    counts: bool = False


def serves(device: Device, term: Term, inventory: Inventory) -> bool:
    """Return whether a device serves a term if nothing is held.

    Args:
        device: The device.
        term: The term, with known filters.
        inventory: The machine of the device.
    """
    return goes_by(device, term.names) and all(rule.passes(device) for rule in rules(term, inventory))


def rules(term: Term, inventory: Inventory) -> Iterator[DeviceRule]:
    """Yield the conditions of a term on each device beside the name, filters first.

    Raises:
        ValueError: When a filter is unknown, or its value invalid.
    """
    for each in asked(term, inventory):
        yield _of_filter(each)
    # Filters first: their reasons name what the user wrote.
    yield _VISIBLE
    yield _HEALTHY
    if term.memory_bytes:
        yield _of_filter(AskedFilter(FILTERS[_Memory.name], term.memory_bytes, term, inventory))
    yield _DIVISIBLE if term.fraction else _WHOLE


def _of_filter(asked: AskedFilter[Any]) -> DeviceRule:
    """Return a filter of a term as a rule."""
    entry = asked.filter
    return DeviceRule(
        code=ReasonCode.FILTER,
        passes=entry.predicate(asked),
        explain_failure=lambda devices: entry.explain_failure(asked, devices),
        filter=entry.name,
        counts=entry.count(asked.wanted) is not None,
    )


def _names(devices: Sequence[Device]) -> str:
    """Return the names of devices, in ranges."""
    return join_names(device.name for device in devices)


def _broken(devices: Sequence[Device]) -> str:
    """Return the names of unhealthy devices, with the reasons, as a list in words."""
    reasons = (f" ({device.health_reason})" if device.health_reason else "" for device in devices)
    return listed([device.name + reason for device, reason in zip(devices, reasons, strict=True)])


_VISIBLE = DeviceRule(
    ReasonCode.HIDDEN,
    lambda device: device.visible,
    lambda devices: f"hidden by the environment: {_names(devices)}",
)
_HEALTHY = DeviceRule(
    ReasonCode.UNHEALTHY,
    lambda device: device.health is not Health.UNHEALTHY,
    lambda devices: f"unhealthy: {_broken(devices)}",
)
_WHOLE = DeviceRule(
    ReasonCode.PART,
    lambda device: device.units == UNITS_PER_DEVICE,
    lambda devices: f"ours in part only: {_names(devices)}",
)
_DIVISIBLE = DeviceRule(
    ReasonCode.NOT_FRACTIONAL,
    lambda device: bool(device.fractional),
    lambda devices: f"given out whole only: {_names(devices)}",
)
