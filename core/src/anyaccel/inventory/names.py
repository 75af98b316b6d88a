"""Ownership of names: a device has no tag that is another vendor's key, resource or product."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from anyaccel.model import Device, Value, VendorReport, replace
from anyaccel.text import shown
from anyaccel.vendors.discovery import Source
from anyaccel.vendors.presence import Presence

MOST_TOLD = 4
"""Most tags that a note names."""


class Owner(Value):
    """The owner of a name.

    Attributes:
        vendor: Key of the vendor.
        kind: Kind of the name: the vendor's ``key``, ``resource`` or ``product``.
    """

    vendor: str
    kind: str

    def __str__(self) -> str:
        return f"a product of {self.vendor}" if self.kind == "product" else f"the {self.kind} of {self.vendor}"


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
        self._keys = {source.vendor.casefold(): source.vendor for source in sources}
        self._resources: dict[str, str] = {}
        self._products: dict[str, frozenset[str]] = {}
        self._sources = {source.vendor: source for source in sources}
        for vendor in self._sources:
            signs = said.get(vendor)
            names = products.get(vendor)
            if names is not None:
                self._products[vendor] = frozenset(map(str.casefold, names))
            elif signs is not None and signs.names:
                self._products[vendor] = signs.names
            if signs is not None:
                self._resources[vendor] = signs.resource.casefold()

    def owner(self, name: str, vendor: str, *, sharing: bool = True) -> Owner | None:
        """Return the owner of a name that a vendor uses; None where the vendor may use the name.

        Where two vendors list a product of that name, a vendor among anyaccel's extras goes before another vendor; else
        both may use the name.

        Args:
            name: The name, in any case.
            vendor: Key of the vendor that uses it.
            sharing: Whether two vendors with a product of the same name may both use the name.
        """
        name = name.casefold()
        key = self._keys.get(name)  # keys go first: they are unique among installed plug-ins
        if key is not None:
            return None if key == vendor else Owner(vendor=key, kind="key")
        if self._resources.get(vendor) == name:
            return None
        for other, resource in self._resources.items():
            if resource == name:
                return Owner(vendor=other, kind="resource")
        makers = [other for other, names in self._products.items() if name in names and other != vendor]
        if makers and name in self._products.get(vendor, ()):
            offered = [] if vendor in self._offered else [other for other in makers if other in self._offered]
            makers = offered if sharing or vendor in self._offered else makers
        return Owner(vendor=makers[0], kind="product") if makers else None

    def own(
        self, reports: Sequence[VendorReport], found: Mapping[str, list[Device]]
    ) -> tuple[list[VendorReport], dict[str, list[Device]]]:
        """Remove tags with names of other vendors, and add a note to the vendors' reports."""
        # A plug-in without presence.json gives its resource name only in its answer.
        self._resources |= {report.vendor: report.resource.casefold() for report in reports if report.resource}
        taken = {vendor: self._taken(vendor, devices) for vendor, devices in found.items()}
        if not any(taken.values()):
            return list(reports), dict(found)
        noted = [
            replace(report, notes=(*report.notes, self._note(report.vendor, taken[report.vendor])))
            if taken.get(report.vendor)
            else report
            for report in reports
        ]
        return noted, {
            vendor: [_without(device, taken[vendor]) for device in devices] if taken[vendor] else devices
            for vendor, devices in found.items()
        }

    def _taken(self, vendor: str, devices: Sequence[Device]) -> dict[str, Owner]:
        tags = dict.fromkeys(tag for device in devices for tag in device.tags)
        return {tag: owner for tag in tags if (owner := self.owner(tag, vendor))}

    def _note(self, vendor: str, taken: Mapping[str, Owner]) -> str:
        said = [f"{shown(tag)} is {owner}" for tag, owner in taken.items()][:MOST_TOLD]
        more = f" and {len(taken) - MOST_TOLD} more" if len(taken) > MOST_TOLD else ""
        origin = self._sources[vendor].distribution or f"the plug-in {vendor}"
        return (
            f"tags of {vendor} that are names of other vendors do not count: {', '.join(said)}{more}; have the authors"
            f" of {origin} rename them in anyaccel_tags"
        )

    @cached_property
    def _offered(self) -> frozenset[str]:
        """Keys of the vendors among the extras of anyaccel's own distribution."""
        from importlib.metadata import PackageNotFoundError, metadata

        try:
            return frozenset(metadata("anyaccel").get_all("Provides-Extra") or ())
        except PackageNotFoundError:  # it was not installed
            return frozenset()


def _without(device: Device, taken: Collection[str]) -> Device:
    return replace(device, tags=tuple(tag for tag in device.tags if tag not in taken))
