"""Names of accelerators for programs: constants for requests, and the accelerators of cloud instance types.

The names come from the products of the installed plug-ins. The first use of a name asks the plug-ins, in guarded
processes. A product without constants gets a name from its vendor and tag, in capitals.

    from anyaccel.accelerators import ACME_ONE, instance_type

    anyaccel.prepare(f"{ACME_ONE}:2")
    anyaccel.detect(instance_type("acme.8xlarge").machine)  # a node that does not exist yet
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

from anyaccel.errors import UnknownNameError
from anyaccel.model import PluginInfo, Problem, Product, Value
from anyaccel.text import suggest

_CONSTANT = re.compile(r"[A-Z][A-Za-z0-9_]*")


class InstanceType(Value):
    """The accelerators of a machine of one cloud instance type.

    Attributes:
        name: Name of the instance type.
        vendor: Key of the vendor.
        resource: Resource name of the devices.
        tag: Accelerator type of the devices.
        count: Number of devices.
        memory_bytes: Memory of each device, or None when unknown.
        machine: A simulated machine of this type, for :func:`anyaccel.detect`.
    """

    name: str
    vendor: str
    resource: str
    tag: str
    count: int
    memory_bytes: int | None
    machine: str


def instance_type(name: str) -> InstanceType:
    """Return the accelerators of a cloud instance type.

    Raises:
        UnknownNameError: When no installed plug-in knows the instance type.

    Examples:
        >>> from anyaccel.accelerators import instance_type
        >>> found = instance_type("p5.48xlarge")
        >>> found.name
        'p5.48xlarge'
    """
    known = _installed().instance_types
    if name in known:
        return known[name]
    message, hint = _describe_unknown(f"the instance type {name!r}", name, known)
    raise UnknownNameError(message, hint=hint)


class _Installed(Value):
    """The names that the installed plug-ins know.

    Attributes:
        constants: By name, the vendors by tag; more than one tag where plug-ins disagree.
        instance_types: Instance types by name.
        vendors: Keys of the vendors that answered.
        problems: Problems of the other plug-ins.
    """

    constants: Mapping[str, Mapping[str, str]]
    instance_types: Mapping[str, InstanceType]
    vendors: tuple[str, ...]
    problems: tuple[Problem, ...]


@functools.cache
def _installed() -> _Installed:
    from anyaccel.vendors.process import known

    found, problems = known()
    constants: dict[str, dict[str, str]] = {}
    types: dict[str, InstanceType] = {}
    for each in found:
        vendor = each.info.vendor
        named = {product.name for product in each.products if product.constants}
        for product in each.products:
            own = product.constants or ({} if product.name in named else {_derived(vendor, product.name): product.name})
            for name, tag in own.items():
                constants.setdefault(name, {})[tag] = vendor
            for name, count in product.instance_types.items():
                types[name] = _instance_type(name, each.info, product, count, each.products)
    vendors = tuple(each.info.vendor for each in found)
    return _Installed(constants=constants, instance_types=types, vendors=vendors, problems=tuple(problems))


def _derived(vendor: str, tag: str) -> str:
    """Return ``ACME_ONE_16GB`` for the vendor ``acme`` and the tag ``Acme-One-16GB`` or ``One-16GB``."""
    name = "_".join(re.findall(r"[A-Z0-9]+", tag.upper()))
    return name if name.startswith(vendor.upper()) else f"{vendor.upper()}_{name}"


def _instance_type(
    name: str, info: PluginInfo, product: Product, count: int, products: Sequence[Product]
) -> InstanceType:
    from anyaccel.vendors.simulate import match_products

    names = [each for each in (product.name, *product.aliases) if match_products(each, products)[0] == product]
    return InstanceType(
        name=name,
        vendor=info.vendor,
        resource=info.resource,
        tag=product.name,
        count=count,
        memory_bytes=product.memory_bytes,
        machine=f"sim:{names[0] if names else product.name}:{count}",
    )


def _describe_unknown(what: str, name: str, known: Mapping[str, object]) -> tuple[str, str]:
    """Return the message about an unknown name, with similar names and the plug-ins' problems, and the way out."""
    found = _installed()
    reasons = [f"no installed plug-in knows {what}", suggest(name, known, cutoff=0.7), *map(str, found.problems)]
    vendors = ", ".join(found.vendors) or "none"
    way_out = f"names come from the installed plug-ins ({vendors}); pip install 'anyaccel[all]' adds those of anyaccel"
    return "; ".join(filter(None, reasons)), way_out


def __getattr__(name: str) -> str:
    """Return the tag of a constant."""
    if name == "__all__":
        return [*__dir__()]  # type: ignore[return-value]
    if not _CONSTANT.fullmatch(name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    known = _installed().constants
    tags = known.get(name, {})
    if len(tags) > 1:
        meanings = " and ".join(f"{tag!r} for {vendor}" for tag, vendor in sorted(tags.items()))
        raise AttributeError(f"{name} means {meanings}; write the tag that you mean")
    if not tags:
        message, hint = _describe_unknown(f"the accelerator {name}", name, known)
        raise AttributeError(f"{message} ({hint})")
    (tag,) = tags
    return tag


def __dir__() -> list[str]:
    return sorted(
        ["InstanceType", "instance_type", *(name for name, tags in _installed().constants.items() if len(tags) == 1)]
    )
