"""Names of devices: a resource, a vendor or an accelerator-type tag, compared without case."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from anyaccel.errors import UnknownNameError
from anyaccel.model import Device, Inventory


def goes_by(device: Device, names: Iterable[str]) -> bool:
    """Return whether a device has one of the names, compared without case."""
    own = {name.lower() for name in device.names}
    return any(name.lower() in own for name in names)


class LazyNames:
    """Known names without devices here, computed at the first use and then kept."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = names
        self._found: tuple[str, ...] | None = None

    def __iter__(self) -> Iterator[str]:
        if self._found is None:
            self._found = tuple(self._names)
        return iter(self._found)


class DeviceNames:
    """Names of devices on a machine, and of known products.

    Args:
        inventory: The machine.
        known: Further names from installed plug-ins; a request for one of them is not a typing error, but never fits
            here. They may be costly to compute, and are read only if a name is not on the machine.
    """

    def __init__(self, inventory: Inventory, known: Iterable[str] = ()) -> None:
        self._devices: dict[str, int] = {}  # bit masks, by name in lower case
        self._spelled: dict[str, str] = {}
        self._known: Iterable[str] = known
        for position, device in enumerate(inventory.devices):
            for name in device.names:
                self._devices[name.lower()] = self._devices.get(name.lower(), 0) | 1 << position
                self._spelled.setdefault(name.lower(), name)
        for report in inventory.vendors:
            self.learn((report.resource, report.vendor))

    def devices(self, *names: str) -> tuple[int, ...]:
        """Return the positions of the devices with each of some names, as bit masks; 0 for none.

        If none of the names is on the machine, the further known names are computed, once. An unknown name beside a
        known one is no error: the request may be for several machines, with different plug-ins.

        Raises:
            UnknownNameError: When no device and no installed plug-in has any of the names.
        """
        if not any(name.lower() in self._spelled for name in names) and len(self.find_unknown(names)) == len(names):
            raise UnknownNameError(self._unknown(names[0]))
        return tuple(self._devices.get(name.lower(), 0) for name in names)

    def find_unknown(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names that no device and no installed plug-in has; compute the further known names, once."""
        self.learn(self._known)  # reading the plug-ins' catalogs takes longer than most placements
        self._known = ()
        return tuple(name for name in names if name.lower() not in self._spelled)

    def __iter__(self) -> Iterator[str]:
        """Yield the known names, as far as they were computed."""
        return iter(self._spelled.values())

    def learn(self, names: Iterable[str]) -> None:
        """Add names without devices here, such as names on other machines; empty names are left out."""
        for name in filter(None, names):
            self._spelled.setdefault(name.lower(), name)

    def keep(self, other: DeviceNames) -> None:
        """Add the names of an earlier state of the machine: a name stays known when its last device is lost.

        The further known names of the earlier state, if not computed yet, replace this object's own.
        """
        self.learn(other)
        self._known = other._known

    def spelled(self, name: str) -> str:
        """Return a known name in its original spelling, and an unknown name as it is."""
        return self._spelled.get(name.lower(), name)

    def _unknown(self, name: str) -> str:
        """Make the message for an unknown name, with similar names or else the names on this machine."""
        from difflib import get_close_matches

        close = [self._spelled[key] for key in get_close_matches(name.lower(), sorted(self._spelled))]
        here = [self._spelled[key] for key in sorted(self._devices)]
        from anyaccel.extras import plugin_remedy  # only errors need it

        if remedy := plugin_remedy(name):
            way_out = remedy
        elif close:
            way_out = f"did you mean {' or '.join(close)}?"
        elif here:
            way_out = f"on this machine there are {', '.join(here)}."
        else:
            way_out = "this machine has no devices; is the vendor's plug-in installed?"
        return f"unknown name {name!r}: no device and no installed plug-in goes by it; {way_out}"
