"""C15, C21 and C24: devices can be requested and allocated, also beside devices of other vendors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files

from anyaccel.errors import EnvConflictError, PluginError
from anyaccel.inventory import VendorNames, contest
from anyaccel.launcher import worker_environment
from anyaccel.model import (
    UNITS_PER_DEVICE,
    Allocation,
    Device,
    Grant,
    Inventory,
    Request,
    Share,
    Term,
    VendorReport,
    VendorState,
)
from anyaccel.probe import Machine, Simulated
from anyaccel.vendors import Source, VendorPlugin, installed, presence, tasks

from anyaccel_testing.check import CheckFailed, NotApplicable, demand
from anyaccel_testing.checks.environment import Devices, choose_subsets, list_accepted
from anyaccel_testing.subject import Subject, TestedMachine, interpret_here, payload

KNOWN_NAMES = "known_names.json"
SENTENCE = re.compile(r"[^\n]*\S \S+ \S[^\n]*")
"""Three words or more, on one line."""
LONGEST = 500
MOST_TIMES = 4
"""Largest ratio of the memory of a device to that of its product: sizes of a product differ, units differ more."""


def check_tags(subject: Subject, machine: TestedMachine) -> None:
    """C15: Every device and product has tags, the product's name first, and a policy for sharing."""
    if machine.problem is not None:
        if machine.problem.hook in ("anyaccel_tags", "anyaccel_fractional", "anyaccel_products"):
            raise CheckFailed(f"{machine.problem.hook}: {machine.problem.reason}")
        raise NotApplicable("detection fails here; see C07 and C09")
    product = machine.product
    demand(_find_wrong_sizes(subject, machine.devices))
    for device in machine.devices:
        if product is not None and device.tags[:1] != (product,):
            raise CheckFailed(
                f"the first tag of a {product} must be {product!r}, as Product.name says (got {device.tags!r}); correct"
                " the product's attributes, or anyaccel_tags"
            )


def _find_wrong_sizes(subject: Subject, devices: Devices) -> Iterator[str]:
    """Yield devices with a memory far from the memory of the product that their first tag names."""
    for device in devices:
        wanted, memory = subject.sizes.get(device.tags[0], []) if device.tags else [], device.memory_bytes
        # A part of a card, such as a partition, may have the card's name and some of the memory.
        if not wanted or not memory or device.parent is not None:
            continue
        if not any(each / MOST_TIMES <= memory <= each * MOST_TIMES for each in wanted):
            yield (
                f"Device.memory_bytes of {device.id} must be bytes, near the {wanted[0]} of the product"
                f" {device.tags[0]!r} (got {memory}); correct the unit, the tag or the product"
            )


def check_refusals(subject: Subject, machine: TestedMachine) -> None:
    """C21: Refusals are sentences, and at least one set of devices is accepted."""
    devices = tuple(device for device in machine.devices if device.usable)
    demand(_find_bad_reasons(subject, devices))
    if devices and next(list_accepted(subject, choose_subsets(devices)), None) is None:
        raise CheckFailed(
            f"PluginInfo.counts and anyaccel_validate accept none of the sets of the {len(devices)} usable devices that"
            " were tried, so no request can ever get a device"
        )


def _find_bad_reasons(subject: Subject, devices: Devices) -> Iterator[str]:
    resource = subject.plugin.info.resource
    for chosen in choose_subsets(devices):
        for term in (
            Term(names=(resource,), units=len(chosen) * UNITS_PER_DEVICE),
            Term(
                names=(resource,),
                units=len(chosen) * UNITS_PER_DEVICE,
                filters=(("mem", "1B"),),
                linked=True,
                mixed=True,
            ),
            *([Term(names=(resource,), units=units) for units in (1, 5000, 9999)] if len(chosen) == 1 else []),
        ):
            try:
                reason = subject.plugin.validate(term, chosen)
            except PluginError as error:
                yield f"anyaccel_validate of {term} with {len(chosen)} devices: {error.problem.reason}"
                continue
            if reason is not None and (not SENTENCE.fullmatch(reason) or len(reason) > LONGEST):
                yield f"anyaccel_validate must give one sentence with the rule and what is allowed (got {reason!r:.80})"


def check_together(subject: Subject) -> None:
    """C24: Beside every other installed vendor, neither a device nor a name nor a variable is claimed by both."""
    vendor = subject.source.vendor
    subject.plugin  # noqa: B018 - raises NotApplicable if it cannot be loaded
    sources = installed()[0]
    others = [source for source in sources if source.vendor != vendor]
    rivals = [plugin for source in others if (plugin := _load(source)) is not None]
    faults = [*_find_conflicts(subject, rivals), *_find_foreign_names(subject, others)]
    demand([*faults, *_find_listed_twice(subject, others, rivals)])


def _read_known_names() -> dict[str, presence.Presence]:
    """Read resources and product names of the vendors with plug-ins of anyaccel's own, installed or not."""
    known = json.loads(files("anyaccel_testing").joinpath(KNOWN_NAMES).read_text(encoding="utf-8"))
    return {
        vendor: presence.Presence(resource=told["resource"], names=frozenset(map(str.casefold, told["names"])))
        for vendor, told in known.items()
    }


def _find_foreign_names(subject: Subject, others: Sequence[Source]) -> Iterator[str]:
    """Yield tags and product names of another vendor."""
    products = {source.vendor: _list_product_names(source) for source in (subject.source, *others)}
    said = presence.read_presences([subject.source, *others])
    missing = {vendor: signs for vendor, signs in _read_known_names().items() if vendor not in said}
    sources = [subject.source, *others, *(Source(vendor=vendor, target="") for vendor in missing)]
    names = VendorNames(sources, said | missing, products)
    tags = [tag for machine in subject.machines for device in machine.known_devices for tag in device.tags]
    for tag in dict.fromkeys((*tags, *products[subject.source.vendor])):
        if owner := names.owner(tag, subject.source.vendor, sharing=False):
            yield f"{tag!r} must be no tag and no product, since it is {owner}; choose another name"


def _list_product_names(source: Source) -> list[str]:
    listed = tasks.products(payload(source, {})).get("value") or []
    return [name for product in listed for name in (product["name"], *product.get("aliases", ()))]


def _find_listed_twice(subject: Subject, others: Sequence[Source], rivals: Sequence[VendorPlugin]) -> Iterator[str]:
    """Yield devices that another plug-in lists as well, on recorded machines and on an empty machine."""
    own, said = subject.plugin, presence.read_presences(others)
    nothing = TestedMachine(subject, machine=Machine(text="a machine without devices"))
    for machine in (*subject.machines, nothing):
        facts = machine.facts
        found = {own.info.vendor: _detect_devices(own, machine)}
        present = presence.select_present(said, facts, facts.environ) if found[own.info.vendor] else {}
        seen = [own, *(rival for rival in rivals if rival.info.vendor in present)]
        found |= {plugin.info.vendor: _detect_devices(plugin, machine) for plugin in seen[1:]}
        control_nodes = {plugin.info.vendor: plugin.info.control_nodes for plugin in seen}
        after = contest(found, control_nodes, host=subject.live)[own.info.vendor]
        for device, contested in zip(found[own.info.vendor], after, strict=True):
            if device != contested:  # the core marks a device that two plug-ins list as unhealthy
                yield (
                    f"{machine.name}: {device.id} would be given to no request: {contested.health_reason}; detect only"
                    " devices that are certainly this vendor's, such as by the PCI vendor id"
                )
                break  # one device per machine is enough to find the cause


def _load(source: Source) -> VendorPlugin | None:
    try:
        return VendorPlugin(source)
    except PluginError:  # its own check reports it
        return None


def _detect_devices(plugin: VendorPlugin, machine: TestedMachine) -> list[Device]:
    try:
        detected = plugin.detect(machine.context())
    except PluginError:  # see C07
        return []
    return list(detected.devices) if detected is not None else []


Simulation = tuple[VendorReport, Devices]


def _simulate_largest(source: Source) -> Simulation | None:
    """Simulate a vendor's largest machine; None if the plug-in has no product or fails."""
    shared = payload(source, {})
    listed = tasks.products(shared).get("value")
    if not listed:
        return None
    # The first product with the most devices: conflicts are about variables, which products of a vendor share.
    machine = Machine(
        text="sim", products=(Simulated(product=listed[0]["name"], count=max(listed[0].get("counts", [1]))),)
    )
    report, devices = interpret_here(source, machine, {})
    return (report, tuple(devices)) if report.state is VendorState.OK else None


def _find_conflicts(subject: Subject, rivals: Sequence[VendorPlugin]) -> Iterator[str]:
    # A conflict is over a variable, and a plug-in may change only those that it names.
    named = {*subject.plugin.info.env_vars}
    rivals = [rival for rival in rivals if named & {*rival.info.env_vars}]
    own = _simulate_largest(subject.source) if rivals else None
    for rival in rivals if own else ():
        other = _simulate_largest(rival.source)
        if own is None or other is None:
            continue
        inventory = Inventory(machine="sim", devices=(*own[1], *other[1]), vendors=(own[0], other[0]))
        for given in _list_divisions(own[1], other[1]):
            if len({device.vendor for device in given}) > 1 and own[0].shared_with(other[0]):
                continue  # placement keeps vendors apart that share a variable
            try:
                worker_environment(_make_allocation(given), inventory, environ={})
            except EnvConflictError as error:
                yield f"{error} (given: {', '.join(device.id for device in given[:4]) or 'nothing'})"
            except PluginError:
                continue  # C16 and C18 report it, of this plug-in or of the other


def _list_divisions(own: Devices, other: Devices) -> Iterator[Devices]:
    """Yield combinations of two vendors' devices for a worker: none, the first, or every device of each."""
    for mine in ((), own[:1], own):
        for theirs in ((), other[:1], other):
            yield (*mine, *theirs)


def _make_allocation(devices: Devices) -> Allocation:
    term = Term(names=("any",), units=max(1, len(devices)) * UNITS_PER_DEVICE)
    shares = tuple(Share(device=device, memory_bytes=device.memory_bytes) for device in devices)
    return Allocation(id="1", request=Request(terms=(term,)), grants=(Grant(term=term, shares=shares),))
