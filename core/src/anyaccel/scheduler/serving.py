"""Whether a device serves a term: the one place that decides it, for placement, reasons and engines alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from anyaccel.model import UNITS_PER_DEVICE, Device, Health, Inventory, Term
from anyaccel.model.verdict import ReasonCode
from anyaccel.scheduler.filters import AskedFilter, asked
from anyaccel.scheduler.names import goes_by
from anyaccel.text import listed


class DeviceRule(NamedTuple):
    """One thing that a term asks of each of its devices.

    Attributes:
        code: What stands in the way where a device does not pass.
        passes: Whether a device passes.
        said: Why some devices do not: a clause without capital and period, or empty.
        filter: Name of the filter; empty where the rule is none.
        counts: Whether it names devices one by one, of which some may not be there.
    """

    code: ReasonCode
    passes: Callable[[Device], bool]
    said: Callable[[Sequence[Device]], str]
    filter: str = ""
    counts: bool = False


def serves(device: Device, term: Term, inventory: Inventory) -> bool:
    """Whether a device serves a term when nobody holds it.

    Args:
        device: The device.
        term: The term; its filters are known.
        inventory: The machine that the device is on.
    """
    return goes_by(device, term.names) and all(rule.passes(device) for rule in rules(term, inventory))


def rules(term: Term, inventory: Inventory) -> Iterator[DeviceRule]:
    """What a term asks of each device of a machine beside the name, what the term itself says first."""
    for each in asked(term, inventory):
        yield _of_filter(each)
    yield _VISIBLE
    yield _HEALTHY
    yield _DIVISIBLE if term.fraction else _WHOLE


def _of_filter(asked: AskedFilter[Any]) -> DeviceRule:
    entry = asked.filter
    return DeviceRule(
        code=ReasonCode.FILTER,
        passes=entry.predicate(asked),
        said=lambda devices: entry.said(asked, devices),
        filter=entry.name,
        counts=entry.count(asked.wanted) is not None,
    )


def _ids(devices: Sequence[Device]) -> str:
    return listed([device.id for device in devices])


def _broken(devices: Sequence[Device]) -> str:
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
