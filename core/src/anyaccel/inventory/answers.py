"""Interpret the answers of vendors' processes to detection.

A device has no tag that is another vendor's key, resource or product.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from anyaccel.errors import MachineError, PluginError
from anyaccel.model import (
    Detected,
    Device,
    EnvEdits,
    PluginInfo,
    VendorReport,
    VendorState,
    fields,
    hints,
    replace,
    slots_by_id,
)
from anyaccel.probe import Machine, Simulated
from anyaccel.text import shown
from anyaccel.vendors import (
    Answers,
    Outcome,
    Presence,
    Source,
    check_answer,
    contract,
    problem_in,
    qualified,
    read_answer,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


MOST_TOLD = 4
"""Most tags that a note names."""
_IDENTITY = fields(PluginInfo).keys() & fields(VendorReport).keys() - {"vendor"}
"""Fields of a report that are those of the plug-in's identity."""

# During the import, while the vendors answer.
for kind in (PluginInfo, EnvEdits, Detected, Device):
    hints(kind)
for pattern in contract.PATTERNS:
    re.compile(pattern)


def interpret(source: Source, outcome: Outcome) -> tuple[VendorReport, list[Device]]:
    """Check the answer of a vendor's detection, and make the report and the devices.

    Args:
        source: The plug-in.
        outcome: The answer of :func:`anyaccel.vendors.tasks.detect`.

    Returns:
        The report, and the devices in the order in which they are handed out: none where the answer has a fault.
    """
    answer: dict[str, Any] = outcome.value if isinstance(outcome.value, dict) else {}
    problem = problem_in(source, outcome, "anyaccel_detect")
    info = detected = hidden = None
    devices: list[Device] = []
    try:
        info = check_answer(source, "info", answer.get("info")) if "info" in answer or problem is None else None
        detected = check_answer(source, "detect", answer.get("detected"))
        for device in detected.devices if detected else ():  # their hooks were called in the vendor's process
            check_answer(source, "tags", device.tags)
            check_answer(source, "fractional", device.fractional, info, [device])
        hidden = check_answer(source, "env", answer["hidden"], info) if info and "hidden" in answer else None
        if info is not None and detected is not None and problem is None:
            devices, notes = _show(source, info, detected.devices, answer.get("visible"))
            detected = replace(detected, notes=(*detected.notes, *notes))
    except PluginError as error:
        problem = problem or error.problem
    if problem is not None:
        detected = None
    state = VendorState.FAILED if problem else VendorState.OK if detected else VendorState.ABSENT
    seconds = answer.get("seconds", 0.0)  # of the vendor's process, like all of the answer
    report = VendorReport(
        vendor=source.vendor,
        state=state,
        **({name: getattr(info, name) for name in _IDENTITY} if info else {}),
        distribution=source.distribution,
        version=source.version,
        driver_version=detected.driver_version if detected else "",
        partial=detected.partial if detected else False,
        notes=detected.notes if detected else (),
        problem=problem,
        hidden=hidden,
        seconds=seconds if isinstance(seconds, float) and seconds >= 0 else 0.0,
    )
    return report, devices if detected else []


def _show(
    source: Source, info: PluginInfo, found: Sequence[Device], visible: Any
) -> tuple[list[Device], tuple[str, ...]]:
    """Narrow devices to what the environment leaves visible, and put visible devices first, in the runtime's order.

    Where the plug-in refuses the value of its variable, no device is visible: the environment only ever narrows.

    Returns:
        The devices, and notes for the report.
    """
    devices = [info.describe(device) for device in found]
    notes: tuple[str, ...] = ()
    try:
        slots = slots_by_id(read_answer(source, "visible", Outcome(value=visible), devices, info))
    except PluginError as error:
        slots, notes = {}, (f"The environment hides every device of {source.vendor}: {error.problem.reason}",)
    if slots is None:
        slots = {device.id: () for device in devices}
    place = {device_id: position for position, device_id in enumerate(slots)}
    # Hidden devices follow in the order of indexes.
    devices.sort(key=lambda device: place.get(device.id, len(place) + device.index))
    shown = [device.narrowed(slots[device.id]) if slots.get(device.id) else device for device in devices]
    return [replace(device, visible=device.id in place, order=order) for order, device in enumerate(shown)], notes


def qualify_ids(found: Mapping[str, list[Device]]) -> list[Device]:
    """Return the devices of all vendors. Where vendors use the same id, the ids of theirs begin with the vendor."""
    uses = Counter(device.id for devices in found.values() for device in devices)
    return [
        qualified(device) if any(uses[each.id] > 1 for each in devices) else device
        for devices in found.values()
        for device in devices
    ]


class VendorNames:
    """The names of all vendors with an installed plug-in, absent vendors included.

    Args:
        sources: The plug-ins.
        said: Signs by vendor; see :func:`~anyaccel.vendors.presence.read_presences`.
        products: Names of products by vendor; None where the vendor's process was not asked.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        said: Mapping[str, Presence | None],
        products: Mapping[str, Sequence[str] | None],
    ) -> None:
        self._sources = {source.vendor: source for source in sources}
        self._resources: dict[str, str] = {}
        self._products: dict[str, Collection[str]] = {}
        for vendor in self._sources:
            signs = said.get(vendor) or Presence()
            names = products.get(vendor)
            self._resources[vendor] = signs.resource.casefold()
            self._products[vendor] = signs.names or () if names is None else frozenset(map(str.casefold, names))

    def owner(self, name: str, vendor: str, *, sharing: bool = True) -> str | None:
        """Return whose a name is, such as ``the key of acme``; None where a vendor may use the name.

        Where two vendors list a product of that name, a vendor among anyaccel's extras goes before another vendor; else
        both may use the name.

        Args:
            name: The name, in any case.
            vendor: Key of the vendor that uses it.
            sharing: Whether two vendors with a product of the same name may both use the name.
        """
        name = name.casefold()
        if name in self._sources:  # keys go first: they are unique among installed plug-ins, and in lower case
            return None if name == vendor else f"the key of {name}"
        if self._resources.get(vendor) == name:
            return None
        for other, resource in self._resources.items():
            if resource == name:
                return f"the resource of {other}"
        makers = [other for other, names in self._products.items() if name in names and other != vendor]
        if makers and name in self._products.get(vendor, ()):
            offered = _list_offered()
            if sharing or vendor in offered:
                makers = [] if vendor in offered else [other for other in makers if other in offered]
        return f"a product of {makers[0]}" if makers else None

    def own(
        self, reports: Sequence[VendorReport], found: Mapping[str, list[Device]]
    ) -> tuple[list[VendorReport], dict[str, list[Device]]]:
        """Remove tags with names of other vendors, and add a note to the vendors' reports."""
        # A plug-in without presence.json gives its resource name only in its answer.
        self._resources |= {report.vendor: report.resource.casefold() for report in reports if report.resource}
        noted, owned = {report.vendor: report for report in reports}, dict(found)
        for vendor, devices in found.items():
            tags = dict.fromkeys(tag for device in devices for tag in device.tags)
            taken = {tag: owner for tag in tags if (owner := self.owner(tag, vendor))}
            if taken:
                notes = (*noted[vendor].notes, self._note(vendor, taken))
                noted[vendor] = replace(noted[vendor], notes=notes)
                left = (tuple(tag for tag in device.tags if tag not in taken) for device in devices)
                owned[vendor] = [replace(device, tags=tags) for device, tags in zip(devices, left, strict=True)]
        return list(noted.values()), owned

    def _note(self, vendor: str, taken: Mapping[str, str]) -> str:
        said = [f"{shown(tag)} is {owner}" for tag, owner in taken.items()][:MOST_TOLD]
        more = f" and {len(taken) - MOST_TOLD} more" if len(taken) > MOST_TOLD else ""
        origin = self._sources[vendor].distribution or f"the plug-in {vendor}"
        return (
            f"tags of {vendor} that are names of other vendors do not count: {', '.join(said)}{more}; have the authors"
            f" of {origin} rename them in anyaccel_tags"
        )


def _list_offered() -> Collection[str]:
    """Return the keys of the vendors among the extras of anyaccel's own distribution."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        return metadata("anyaccel").get_all("Provides-Extra") or ()
    except PackageNotFoundError:  # it was not installed
        return ()


def product_names(outcome: Outcome) -> list[str] | None:
    """Return the names of a vendor's products; None where its process was not asked for names."""
    names = outcome.value.get("products") if isinstance(outcome.value, dict) else None
    return [each for each in names if isinstance(each, str)] if isinstance(names, list) else None


def check_products(machine: Machine, answers: Answers, names: VendorNames) -> dict[str, tuple[Simulated, ...]]:
    """Refuse a simulated product without a plug-in, or with several plug-ins.

    Returns:
        The vendors that have simulated another vendor's product, with the products that each may simulate.
    """
    known = {vendor: product_names(outcome) or [] for vendor, (_, outcome) in answers.items()}
    others: dict[str, set[str]] = {}
    for name in (item.product for item in machine.products):
        makers = [vendor for vendor, listed in known.items() if name.casefold() in map(str.casefold, listed)]
        whole = name.partition("/")[0]
        # A product that another vendor owns does not count: a plug-in must not take over a known name.
        owners = [vendor for vendor in makers if names.owner(whole, vendor) is None]
        if len(owners) > 1:
            raise MachineError(f"{name!r} is a product of {' and '.join(owners)}: set ANYACCEL_PLUGINS to one of them")
        if not owners:
            from anyaccel.extras import plugin_remedy
            from anyaccel.text import suggest

            listed = sorted({name for listed in known.values() for name in listed})
            way_out = suggest(name, listed, "see 'anyaccel plugins' for what is installed", cutoff=0.5)
            way_out = plugin_remedy(name) or way_out
            failed = [problem for source, outcome in answers.values() if (problem := problem_in(source, outcome, ""))]
            if failed:
                way_out = f"perhaps one that failed does: {failed[0]}"
            raise MachineError(f"no installed plug-in knows the product {name!r} in {machine.text!r}; {way_out}")
        for vendor in set(makers).difference(owners):
            others.setdefault(vendor, set()).add(name)
    return {
        vendor: tuple(item for item in machine.products if item.product not in lost) for vendor, lost in others.items()
    }
