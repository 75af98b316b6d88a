"""Which devices a name means: a resource, a vendor or an accelerator-type tag, compared without case."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from anyaccel.errors import UnknownNameError
from anyaccel.model import Device, Inventory


def goes_by(device: Device, names: Iterable[str]) -> bool:
    """Whether a device goes by one of some names."""
    own = {name.lower() for name in device.names}
    return any(name.lower() in own for name in names)


class LazyNames:
    """Names that are known though no machine has them: looked for once, when one of the machines wants to know."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = names
        self._found: tuple[str, ...] | None = None

    def __iter__(self) -> Iterator[str]:
        if self._found is None:
            self._found = tuple(self._names)
        return iter(self._found)


class DeviceNames:
    """The names of one machine and of the products that somebody here could have.

    Args:
        inventory: The machine.
        known: Further names that installed plug-ins know; a request for one of them is no typing error, it just
            never fits here. They may be costly to find: they are looked at once a name is not on the machine.
    """

    def __init__(self, inventory: Inventory, known: Iterable[str] = ()) -> None:
        self._devices: dict[str, int] = {}
        self._spelled: dict[str, str] = {}
        self._known: Iterable[str] = known
        for position, device in enumerate(inventory.devices):
            for name in device.names:
                self._devices[name.lower()] = self._devices.get(name.lower(), 0) | 1 << position
                self._spelled.setdefault(name.lower(), name)
        for report in inventory.vendors:
            self.learn((report.resource, report.vendor))

    def devices(self, name: str) -> int:
        """The positions of the devices that go by a name, as a bit mask; 0 when none on this machine does.

        Raises:
            UnknownNameError: When no device and no installed plug-in knows the name.
        """
        key = name.lower()
        if key not in self._spelled:
            self.learn(self._known)
            self._known = ()
        if key not in self._spelled:
            raise UnknownNameError(self._unknown(name))
        return self._devices.get(key, 0)

    def __iter__(self) -> Iterator[str]:
        """The names that are known, as far as they were looked at."""
        return iter(self._spelled.values())

    def learn(self, names: Iterable[str]) -> None:
        """Know some more names, of devices that are elsewhere."""
        for name in filter(None, names):
            self._spelled.setdefault(name.lower(), name)

    def keep(self, other: DeviceNames) -> None:
        """Know what another one knew or could find out: a name stays one when its last device is lost."""
        self.learn(other)
        self._known = other._known

    def spelled(self, name: str) -> str:
        """The name as its owner spells it."""
        return self._spelled.get(name.lower(), name)

    def _unknown(self, name: str) -> str:
        from difflib import get_close_matches

        close = [self._spelled[key] for key in get_close_matches(name.lower(), sorted(self._spelled))]
        here = [self._spelled[key] for key in sorted(self._devices)]
        if close:
            way_out = f"did you mean {' or '.join(close)}?"
        elif here:
            way_out = f"on this machine there are {', '.join(here)}."
        else:
            way_out = "this machine has no devices; is the vendor's plug-in installed?"
        return f"unknown name {name!r}: no device and no installed plug-in goes by it; {way_out}"
