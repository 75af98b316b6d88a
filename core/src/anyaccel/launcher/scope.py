"""Under which names the ledger counts the devices of a machine, and what it must ask and say of them there."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from anyaccel.inventory.contested import families, places
from anyaccel.inventory.current import LEASE_VARIABLE, current
from anyaccel.launcher.choosing import remembered
from anyaccel.ledger import LeaseRecord, Want
from anyaccel.ledger.device_locks import DeviceLock
from anyaccel.ledger.names import device_name, vendor_and_id
from anyaccel.model import (
    DIVIDED,
    NOTHING,
    UNITS_PER_DEVICE,
    Device,
    Extent,
    Grant,
    Inventory,
    Value,
    parts_of,
    replace,
)
from anyaccel.policy import Need
from anyaccel.probe import HOST
from anyaccel.scheduler import Choice
from anyaccel.scheduler.choice import extent_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Scope(Value):
    """Under which names the ledger counts the devices of a machine.

    A host's devices go by their vendors and ids, as :func:`anyaccel.ledger.names.device_name` writes them. Those of
    another machine, recorded or simulated, have names of their own. Inside a worker that holds a lease, what it holds
    is a machine of its own, whose devices are what it holds of them. A device that says which physical parts it
    occupies goes by these: others may see the same parts as other devices.

    Attributes:
        prefix: What all ids and parts begin with.
        units: Units that are all of a device in this scope, by device id.
        names: The names of each device, by device id.
        ids: The device that goes by a name; the inverse.
        parts: The devices that are parts of others, by the id of these.
        wholes: Names of the devices that a device is a part of, listed or not, by its id. A device that says which
            physical parts it occupies excludes by these all that do so, too.
    """

    prefix: str
    units: Mapping[str, int]
    names: Mapping[str, tuple[str, ...]]
    ids: Mapping[str, str]
    parts: Mapping[str, frozenset[str]]
    wholes: Mapping[str, tuple[str, ...]]

    @classmethod
    def make(cls, inventory: Inventory, environ: Mapping[str, str]) -> Scope:
        """The scope of the process that has this environment."""
        held = current(environ)
        leased = held.id if held is not None and held.id == environ.get(LEASE_VARIABLE) else ""
        return remembered(inventory, f"scope {leased}", lambda: cls._of(inventory, leased))

    @classmethod
    def _of(cls, inventory: Inventory, leased: str) -> Scope:
        """The scope of a process that holds a lease, if it does."""
        prefix = "" if inventory.machine == HOST else f"{zlib.crc32(os.fsencode(inventory.machine)):08x}|"
        if leased:
            prefix += f"{leased}|"
        names = {device.id: _names(device, prefix) for device in inventory.devices}
        ids = {name: device_id for device_id, own in names.items() for name in own}
        units = {
            device.id: UNITS_PER_DEVICE if device.slots > 1 and not leased else device.units
            for device in inventory.devices
        }
        wholes = {}
        devices = {device.id: device for device in inventory.devices}
        for device in inventory.devices:
            keys = [
                key
                for whole in _wholes(device, devices)
                if not device.occupies or (whole in devices and not devices[whole].occupies)
                for key in names.get(whole, (device_name(device.vendor, whole, prefix),))
            ]
            if keys:
                wholes[device.id] = tuple(keys)
        parts = parts_of(inventory.devices)
        return cls(prefix=prefix, units=units, names=names, ids=ids, parts=parts, wholes=wholes)

    def keys(self, device_ids: Iterable[str]) -> frozenset[str]:
        """Names of devices in the ledger."""
        return frozenset().union(*map(self.names.__getitem__, device_ids))

    def with_parts(self, device_ids: Iterable[str]) -> frozenset[str]:
        """Devices and their parts: two such sets meet where a device of one excludes one of the other."""
        ids = frozenset(device_ids)
        return ids.union(*(self.parts[each] for each in ids if each in self.parts)) if self.parts else ids

    def excluded_by(self, device_ids: Iterable[str]) -> frozenset[str]:
        """Devices, their parts, and those that they are parts of."""
        ids = self.with_parts(device_ids)
        return ids.union(whole for whole, parts in self.parts.items() if not ids.isdisjoint(parts))

    def want(self, candidates: Collection[str], needs: Iterable[Need] = (), **more: Any) -> Want:
        """What to ask the ledger for.

        Args:
            candidates: Ids of the devices that could serve.
            needs: How much is needed of which of them, by id.
            more: The other attributes of :class:`~anyaccel.ledger.Want`.
        """
        more["needs"] = tuple(
            replace(
                need,
                among=self.keys(map(str, need.among)),
                sizes={key: units for each, units in need.sizes.items() for key in self.names[str(each)]},
            )
            for need in needs
        )
        wholes = frozenset(key for each in candidates for key in self.wholes.get(each, ()))
        return Want(candidates=self.keys(self.with_parts(candidates)), wholes=wholes, **more)

    def want_of(self, choice: Choice, inventory: Inventory) -> Want:
        """Return what every request with this choice among the devices of a machine asks the ledger for."""

        def make() -> Want:
            candidates = [device.id for device in choice.candidates]
            locks = self.device_locks(inventory, choice.candidates)
            return self.want(candidates, choice.needs, device_locks=locks, request=str(choice.request))

        return remembered(inventory, (choice, self.prefix), make)

    def to_ledger(self, grants: Iterable[Grant]) -> dict[str, Extent]:
        """What grants take, by name in the ledger: parts of what is ours, rounded up, so that shares never overlap.

        What is held of a device that is no longer listed is of a whole one.
        """
        held: dict[str, Extent] = {}
        lost: dict[str, Device] = {}
        for grant in grants:
            for share in grant.shares:
                held[share.device.id] = held.get(share.device.id, NOTHING).joined(extent_of(share))
                if share.device.id not in self.names:
                    lost[share.device.id] = share.device
        found: dict[str, Extent] = {}
        for each in held if self.wholes else ():
            found |= dict.fromkeys(self.wholes.get(each, ()), DIVIDED)
        for each, extent in held.items():
            part = Extent(-(-extent.units * UNITS_PER_DEVICE // self.units.get(each, UNITS_PER_DEVICE)), extent.slots)
            found |= dict.fromkeys(_names(lost[each], self.prefix) if each in lost else self.names[each], part)
        return found

    def taken(self, taken: Mapping[str, Extent]) -> dict[str, Extent]:
        """What others hold of our devices, by device id, given what the ledger counts: of the part most taken.

        A device is taken as well where a holder that sees other devices than we do has a part of it, or all of which
        it is a part.
        """
        found: dict[str, Extent] = {}
        divided = set()
        for name, extent in taken.items():
            if (device_id := self.ids.get(name)) is None:
                continue
            if extent.units:
                known = found.get(device_id, NOTHING)
                units = max(known.units, self._ours(device_id, extent.units))
                found[device_id] = Extent(units, known.slots | extent.slots)
            elif extent.divided:
                divided.add(device_id)
        for device_id, wholes in self.wholes.items():
            if any(name not in self.ids and taken.get(name, NOTHING).units for name in wholes):
                found[device_id] = Extent()
        for device_id in divided:
            if self.parts.get(device_id, frozenset()).isdisjoint(found):
                found[device_id] = Extent()
        return found

    def device_locks(self, inventory: Inventory, devices: Sequence[Device]) -> dict[str, tuple[DeviceLock, ...]]:
        """Inodes of this host to lock, by name of a device: of its physical parts, and of the device itself.

        What stands for a device is the directory of its PCI function, so that users whose plug-ins know the function,
        or a node of it, lock the same. Which vendors list it makes no difference. The lock is shared where the device
        is a part of what the directory stands for: it has a parent or says which parts it occupies, or another device
        of its vendor is at the same place. A part locks its parent's as well, as far as that is listed.

        Devices that are not those of this host as every user sees them have none.
        """
        if self.prefix:
            return {}
        concerned = {device.id for device in devices} | {device.parent for device in devices}
        found: dict[str, tuple[DeviceLock, ...]] = {}
        for vendor in {device.vendor for device in devices}:
            for device, paths, shared in _places(inventory, vendor):
                if device.id in concerned:
                    whole = tuple(DeviceLock(path, shared=shared) for path in paths)
                    found |= {
                        name: (DeviceLock(name), *whole) if name in device.occupies else whole
                        for name in self.names[device.id]
                    }
        return {name: locks for name, locks in found.items() if locks}

    def _ours(self, device_id: str, units: int) -> int:
        """Units of a device of which the ledger counts parts of what is ours."""
        return -(-units * self.units[device_id] // UNITS_PER_DEVICE)

    def ours(self, records: Iterable[LeaseRecord]) -> tuple[LeaseRecord, ...]:
        """The leases of our devices, with the devices' own ids and units; several parts of a device are one record.

        Who holds a device holds all of its parts, and all that it is a part of: these records say so (``through``).
        """
        found: dict[tuple[str, str], LeaseRecord] = {}
        further: list[tuple[str, LeaseRecord]] = []
        for record in records:
            device_id = self.ids.get(record.device)
            if device_id is not None and record.units:
                ours = replace(record, device=device_id, units=self._ours(device_id, record.units))
                found.setdefault((record.id or record.device, device_id), ours)
            elif device_id is not None:
                further.append((device_id, record))
            if record.units:
                whole = replace(record, through=device_id or vendor_and_id(record.device)[1].removeprefix(self.prefix))
                further += [(part, whole) for part, names in self.wholes.items() if record.device in names]
        for device_id, record in further:
            held = (part for part in sorted(self.parts.get(device_id, ())) if (record.id, part) in found)
            through = record.through or next(held, "")
            units = self._ours(device_id, UNITS_PER_DEVICE)
            other = replace(record, device=device_id, units=units, slots=(), through=through)
            found.setdefault((record.id or record.device, device_id), other)
        return tuple(found.values())


def _names(device: Device, prefix: str) -> tuple[str, ...]:
    """The names of a device in the ledger, given what all of its machine begin with."""
    return tuple(prefix + part for part in device.occupies) or (device_name(device.vendor, device.id, prefix),)


def _places(inventory: Inventory, vendor: str) -> Iterator[tuple[Device, tuple[str, ...], bool]]:
    """The devices of a vendor, with what stands for each in sysfs, and whether others are there, too."""
    report = inventory.report(vendor)
    own = [device for device in inventory.of_vendor(vendor) if not device.declared]
    nodes = {
        device.id: family.nodes
        for family in families(own, report.control_nodes if report else ())
        for device in family.devices
    }
    found = [(device, places(device, nodes[device.id])) for device in own]
    users = Counter(path for device, paths in found if device.parent is None for path in paths)
    for device, paths in found:
        part = device.parent is not None or bool(device.occupies)
        yield device, paths, part or any(users[path] > 1 for path in paths)


def _wholes(device: Device, devices: Mapping[str, Device]) -> list[str]:
    """The devices that a device is a part of, nearest first; the last may not be listed."""
    found: list[str] = []
    above = device.parent
    while above is not None and above not in found:
        found.append(above)
        above = devices[above].parent if above in devices else None
    return found
