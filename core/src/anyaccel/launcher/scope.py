"""Requests for devices of a machine in the form of the ledger, and the ledger's names of the devices."""

from __future__ import annotations

import os
from binascii import crc32
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from anyaccel._typing import TypeVar
from anyaccel.errors import UsageError
from anyaccel.inventory import LEASE_VARIABLE, families, places
from anyaccel.inventory.current import current
from anyaccel.ledger import DeviceLock, LeaseRecord, Want, device_name, vendor_and_id
from anyaccel.model import (
    DIVIDED,
    NOTHING,
    UNITS_PER_DEVICE,
    Device,
    Extent,
    Grant,
    Inventory,
    Request,
    Value,
    parts_of,
    replace,
)
from anyaccel.policy import Need
from anyaccel.probe import HOST
from anyaccel.scheduler import Choice, extent_of
from anyaccel.text import shown
from anyaccel.vendors import KnownNames, validate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

T = TypeVar("T")
_CACHE_SIZE = 64


class Scope(Value):
    """The ledger's names of the devices of a machine.

    A device of this host is named by vendor and id, as :func:`anyaccel.ledger.entries.device_name` does. Devices of a
    recorded or simulated machine have names of their own. A worker with a lease sees its part of each device as a
    machine of its own. A device that lists the physical parts that it occupies is named by them, since another
    process may see the same parts as another device.

    Attributes:
        prefix: Beginning of all names.
        units: Units of a whole device in this scope, by device id.
        names: The names of each device, by device id.
        ids: The device id of each name.
        parts: Ids of the devices that are parts of a device, by the id of that device.
        wholes: Names of the devices of which a device is a part, listed or not, by device id. A device that lists its
            physical parts excludes other such devices by these parts.
    """

    prefix: str
    units: Mapping[str, int]
    names: Mapping[str, tuple[str, ...]]
    ids: Mapping[str, str]
    parts: Mapping[str, frozenset[str]]
    wholes: Mapping[str, tuple[str, ...]]

    @classmethod
    def make(cls, inventory: Inventory, environ: Mapping[str, str]) -> Scope:
        """Return the names for a process with an environment; the result is cached with the inventory.

        The lease that the environment names counts only if :func:`anyaccel.current` returns its allocation: then the
        lease is active, and covers this process. Otherwise the names are those of a process without a lease; a warning
        may be logged.

        Raises:
            UsageError: If ``inventory`` is no inventory, or the environment names a lease, and ``ANYACCEL_ALLOCATION``
                is invalid.
        """
        given: object = inventory  # callers without a type checker may pass any value
        if not isinstance(given, Inventory):
            raise UsageError(
                f"inventory must be what anyaccel.detect() returns (got {shown(given)})",
                hint="machine= takes the name of a machine",
            )
        leased = environ.get(LEASE_VARIABLE, "")
        if leased:
            held = current(environ)
            leased = held.id if held is not None and held.id == leased else ""
        return _cached(inventory, f"scope {leased}", lambda: cls._make(inventory, leased))

    @classmethod
    def _make(cls, inventory: Inventory, leased: str) -> Scope:
        """Make the names for a process with the lease ``leased``, or for a process without a lease if that is empty."""
        # A name is part of a file name, so a machine's text of any length becomes a short number.
        prefix = "" if inventory.machine == HOST else f"{crc32(os.fsencode(inventory.machine)):08x}|"
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
                for whole in _find_wholes(device, devices)
                if not device.occupies or (whole in devices and not devices[whole].occupies)
                for key in names.get(whole, (device_name(device.vendor, whole, prefix),))
            ]
            if keys:
                wholes[device.id] = tuple(keys)
        parts = parts_of(inventory.devices)
        return cls(prefix=prefix, units=units, names=names, ids=ids, parts=parts, wholes=wholes)

    def keys(self, device_ids: Iterable[str]) -> frozenset[str]:
        """Return all ledger names of devices, given by id; KeyError for the id of an unlisted device."""
        return frozenset().union(*map(self.names.__getitem__, device_ids))

    def with_parts(self, device_ids: Iterable[str]) -> frozenset[str]:
        """Return device ids, listed or not, with the ids of all their parts: overlapping sets exclude each other."""
        ids = frozenset(device_ids)
        return ids.union(*(self.parts[each] for each in ids if each in self.parts)) if self.parts else ids

    def excluded_by(self, device_ids: Iterable[str]) -> frozenset[str]:
        """Return the ids of devices, of all their parts, and of every device with any of these as a part."""
        ids = self.with_parts(device_ids)
        return ids.union(whole for whole, parts in self.parts.items() if not ids.isdisjoint(parts))

    def make_want(self, choice: Choice, inventory: Inventory) -> Want:
        """Make the ledger request of a choice among the devices of a machine.

        Time limit, mark, confinement and tenure are left out: the caller adds these to a copy.
        """
        ids = [device.id for device in choice.candidates]
        return Want(
            candidates=self.keys(self.with_parts(ids)),
            wholes=frozenset(key for each in ids for key in self.wholes.get(each, ())),
            needs=tuple(map(self._name_need, choice.needs)),
            device_locks=self.device_locks(inventory, choice.candidates),
            request=str(choice.request),
        )

    def _name_need(self, need: Need) -> Need:
        """Return a need with the ledger's names instead of device ids."""
        return replace(
            need,
            among=self.keys(map(str, need.among)),
            sizes={key: units for each, units in need.sizes.items() for key in self.names[str(each)]},
        )

    def to_ledger(self, grants: Iterable[Grant]) -> dict[str, Extent]:
        """Return the granted part of each device, under each of its ledger names; rounded up, so shares never overlap.

        The devices of which a granted device is a part are added as divided, unless granted themselves. A device that
        is no longer listed keeps its names and its fraction of a whole device.
        """
        held: dict[str, Extent] = {}
        devices: dict[str, Device] = {}
        for grant in grants:
            for share in grant.shares:
                held[share.device.id] = held.get(share.device.id, NOTHING).joined(extent_of(share))
                devices[share.device.id] = share.device
        found: dict[str, Extent] = {}
        for each in held if self.wholes else ():
            found |= dict.fromkeys(self.wholes.get(each, ()), DIVIDED)
        for each, extent in held.items():
            # Rounded up: two shares whose sum exceeds a device must never both fit.
            part = Extent(-(-extent.units * UNITS_PER_DEVICE // self.units.get(each, UNITS_PER_DEVICE)), extent.slots)
            found |= dict.fromkeys(self.names.get(each) or _names(devices[each], self.prefix), part)
        return found

    def to_devices(self, taken: Mapping[str, Extent]) -> dict[str, Extent]:
        """Return the taken part of each device, by device id, in the device's units rounded up; free ones are left out.

        If a device has several names, the most taken one counts, with the slots of all. A part of a taken, but
        unlisted device is taken as a whole. A device of which only parts are taken is left out if one of these parts is
        listed, and divided otherwise: its listed parts stay free. Names of other devices are ignored.

        Args:
            taken: The taken part by ledger name; divided for a device of which a part is taken.
        """
        found: dict[str, Extent] = {}
        divided = set()
        for name, extent in taken.items():
            if (device_id := self.ids.get(name)) is None:
                continue
            if extent.units:
                known = found.get(device_id, NOTHING)
                units = max(known.units, self._to_units(device_id, extent.units))
                found[device_id] = Extent(units, known.slots | extent.slots)
            elif extent.divided:
                divided.add(device_id)
        for device_id, wholes in self.wholes.items():
            if any(name not in self.ids and taken.get(name, NOTHING).units for name in wholes):
                found[device_id] = Extent()
        for device_id in divided:
            if self.parts.get(device_id, frozenset()).isdisjoint(found):
                found[device_id] = DIVIDED
        return found

    def device_locks(self, inventory: Inventory, devices: Sequence[Device]) -> dict[str, tuple[DeviceLock, ...]]:
        """Return the inodes of this host to lock for devices and their listed parents, by ledger name.

        A name that is a physical part has the part's own path in front. Names without inodes are left out.

        The inode of a device is the directory of its PCI function in sysfs, else those of its device nodes: two
        plug-ins that know the function, or a node of it, lock the same inode. The lock is shared if the device is a
        part of what the directory stands for: if it has a parent, lists the parts that it occupies, or shares the
        place with another device of its vendor that is no part.

        Declared devices, and devices of another machine or of a worker's lease, have no inodes.
        """
        if self.prefix:  # only this host's devices have inodes that other users lock, too
            return {}
        concerned = {device.id for device in devices} | {device.parent for device in devices}
        found: dict[str, tuple[DeviceLock, ...]] = {}
        for vendor in {device.vendor for device in devices}:
            for device, paths, shared in _find_places(inventory, vendor):
                if device.id in concerned:
                    whole = tuple(DeviceLock(path, shared=shared) for path in paths)
                    found |= {
                        name: (DeviceLock(name), *whole) if name in device.occupies else whole
                        for name in self.names[device.id]
                    }
        return {name: locks for name, locks in found.items() if locks}

    def _to_units(self, device_id: str, units: int) -> int:
        """Convert the ledger's units, of which UNITS_PER_DEVICE are a whole device, to a device's units, rounded up."""
        return -(-units * self.units[device_id] // UNITS_PER_DEVICE)

    def select_records(self, records: Iterable[LeaseRecord]) -> tuple[LeaseRecord, ...]:
        """Return the lease records of devices in this scope, with the devices' ids and units; others are dropped.

        Several parts of a device become one record of each lease, the first. A lease of a device also holds its parts,
        and the devices of which it is a part: their records count them as whole, and name the device in ``through``,
        which is empty for the record of a device with an unlisted part in the lease.
        """
        found: dict[tuple[str, str], LeaseRecord] = {}
        further: list[tuple[str, LeaseRecord]] = []
        for record in records:
            device_id = self.ids.get(record.device)
            if device_id is not None and record.units:
                ours = replace(record, device=device_id, units=self._to_units(device_id, record.units))
                found.setdefault((record.id or record.device, device_id), ours)
            elif device_id is not None:
                further.append((device_id, record))
            if record.units:
                whole = replace(record, through=device_id or vendor_and_id(record.device)[1].removeprefix(self.prefix))
                further += [(part, whole) for part, names in self.wholes.items() if record.device in names]
        for device_id, record in further:
            held = (part for part in sorted(self.parts.get(device_id, ())) if (record.id, part) in found)
            through = record.through or next(held, "")
            units = self._to_units(device_id, UNITS_PER_DEVICE)
            other = replace(record, device=device_id, units=units, slots=(), through=through)
            found.setdefault((record.id or record.device, device_id), other)
        return tuple(found.values())


class LedgerRequest:
    """A request for devices of a machine, in the form of the ledger.

    A request for a device that an installed plug-in knows and the machine lacks is no error: it never fits.

    Args:
        inventory: The machine.
        request: The request.
        environ: The environment of the process, for :meth:`Scope.make`.
        choice: Chooses the devices; None for any devices that serve the request.
        terms: Fields of ``want`` that the machine does not tell, such as ``seconds``.

    Attributes:
        inventory: The machine.
        request: The request; of a given ``choice``, the one that it serves.
        environ: The environment of the process.
        choice: Chooses the devices.
        scope: The ledger's names of the devices.
        want: The request to the ledger.
        grants: The devices that :meth:`choose` chose last; empty before.

    Raises:
        UnknownNameError: If neither a device of the machine nor an installed plug-in has one of the names.
        UsageError: If the environment names a lease, and ``ANYACCEL_ALLOCATION`` is invalid.
    """

    def __init__(
        self,
        inventory: Inventory,
        request: Request,
        environ: Mapping[str, str],
        choice: Choice | None = None,
        **terms: Any,
    ) -> None:
        self.inventory, self.environ = inventory, environ
        self.scope = scope = Scope.make(inventory, environ)

        def resolve() -> tuple[Choice, Want]:
            made = choice or Choice(inventory, request, validate, KnownNames())
            return made, scope.make_want(made, inventory)

        self.choice, want = resolve() if choice else _cached(inventory, (request, scope.prefix), resolve)
        self.request = self.choice.request
        self.want = replace(want, **terms)
        self.grants: tuple[Grant, ...] = ()

    def choose(self, taken: Mapping[str, Extent]) -> dict[str, Extent] | None:
        """Choose free devices, and keep the choice as :attr:`grants`.

        Args:
            taken: The taken part of each device, by the ledger's names.

        Returns:
            The part of each device to hold, by the ledger's names, and the devices of which a chosen one is a part, as
            divided; None if the request does not fit, with the last choice kept. A plug-in that fails to judge a set of
            devices counts as refusing the set.
        """
        grants = self.choice.choose(self.find_taken(taken))
        if grants is None:
            return None
        self.grants = grants
        return self.scope.to_ledger(grants)

    def find_taken(self, taken: Mapping[str, Extent]) -> dict[str, Extent]:
        """Return the part of each device that cannot be chosen, by id, given the taken parts by the ledger's names."""
        return self.scope.to_devices(taken)


def _names(device: Device, prefix: str) -> tuple[str, ...]:
    """Return the ledger's names of a device, given their common prefix: its physical parts, else vendor and id."""
    parts = tuple(device_name("", part, prefix) for part in device.occupies)
    return parts or (device_name(device.vendor, device.id, prefix),)


def _find_places(inventory: Inventory, vendor: str) -> Iterator[tuple[Device, tuple[str, ...], bool]]:
    """Yield the detected devices of a vendor, with their directories in sysfs, and whether these are shared.

    Without a PCI address, the directories are looked up by the device nodes, which are not opened; there may be none.

    The directories are shared if the device is a part, lists physical parts, or has a directory in common with another
    device that is no part.
    """
    report = inventory.report(vendor)
    own = [device for device in inventory.of_vendor(vendor) if not device.declared]
    nodes = {
        device.id: own_nodes
        for family, own_nodes in families(own, report.control_nodes if report else ())
        for device in family
    }
    found = [(device, places(device, nodes[device.id])) for device in own]
    users = Counter(path for device, paths in found if device.parent is None for path in paths)
    for device, paths in found:
        part = device.parent is not None or bool(device.occupies)
        yield device, paths, part or any(users[path] > 1 for path in paths)


def _find_wholes(device: Device, devices: Mapping[str, Device]) -> list[str]:
    """Return the ids of the devices of which a device is a part, nearest first; the last may not be listed."""
    found: list[str] = []
    above = device.parent
    while above is not None and above not in found:
        found.append(above)
        above = devices[above].parent if above in devices else None
    return found


def _cached(inventory: Inventory, key: object, make: Callable[[], T]) -> T:
    """Return an object made from an inventory and a key alone, and cache the object for the next call.

    A program that acquires devices in a loop uses one inventory. Measured with 8 devices: acquire and release take 0.95
    ms, without the cache 1.32 ms. Only the inventory of the last call is remembered, by its identity, with up to 64
    objects; another object then drops the 64. Exceptions of ``make`` pass through.

    Args:
        inventory: The machine.
        key: Identity of the object.
        make: Makes the object, which is never None.
    """
    global _cache  # noqa: PLW0603 - without a lock: an entry that another thread drops is made again
    if _cache[0] is not inventory:
        _cache = inventory, {}
    known = _cache[1]
    found: T | None = known.get(key)
    if found is None:
        found = make()
        if len(known) >= _CACHE_SIZE:
            known.clear()
        known[key] = found
    return found


_cache: tuple[Inventory | None, dict[object, Any]] = (None, {})
