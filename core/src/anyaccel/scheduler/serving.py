"""The test whether a device serves a term, for placement, reasons and engines alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from anyaccel._typing import NamedTuple
from anyaccel.model import UNITS_PER_DEVICE, Device, Health, Inventory, Term, format_memory_beside
from anyaccel.model.verdict import ReasonCode
from anyaccel.scheduler.filters import AskedFilter, asked, explain_unknown_memory
from anyaccel.scheduler.names import goes_by
from anyaccel.text import listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


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
        yield _large_enough(term)
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


def _large_enough(term: Term) -> DeviceRule:
    """Return the condition of a share by memory: the device has that much memory."""

    def explain(devices: Sequence[Device]) -> str:
        largest = max(device.memory_bytes or 0 for device in devices)
        if not largest:
            return explain_unknown_memory(devices)
        return f"the largest memory is {format_memory_beside(largest, term.memory_bytes)}, less than {term.quantity}"

    return DeviceRule(ReasonCode.FILTER, lambda device: term.units_on(device) <= UNITS_PER_DEVICE, explain, "mem")


def _ids(devices: Sequence[Device]) -> str:
    """Return the ids of devices as a list in words."""
    return listed([device.id for device in devices])


def _broken(devices: Sequence[Device]) -> str:
    """Return the ids of unhealthy devices, with the reasons, as a list in words."""
    reasons = (f" ({device.health_reason})" if device.health_reason else "" for device in devices)
    return listed([device.id + reason for device, reason in zip(devices, reasons, strict=True)])


_VISIBLE = DeviceRule(
    ReasonCode.HIDDEN,
    lambda device: device.visible,
    lambda devices: f"hidden by the environment: {_ids(devices)}",
)
_HEALTHY = DeviceRule(
    ReasonCode.UNHEALTHY,
    lambda device: device.health is not Health.UNHEALTHY,
    lambda devices: f"unhealthy: {_broken(devices)}",
)
_WHOLE = DeviceRule(
    ReasonCode.PART,
    lambda device: device.units == UNITS_PER_DEVICE,
    lambda devices: f"ours in part only: {_ids(devices)}",
)
_DIVISIBLE = DeviceRule(
    ReasonCode.NOT_FRACTIONAL,
    lambda device: bool(device.fractional),
    lambda devices: f"given out whole only: {_ids(devices)}",
)
