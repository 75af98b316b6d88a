"""Names of devices: a resource, a vendor or an accelerator-type tag, compared without case."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from anyaccel.errors import UnknownNameError
from anyaccel.model import Device


def goes_by(device: Device, names: Iterable[str]) -> bool:
    """Return whether a device has one of the names, compared without case."""
    own = {name.lower() for name in device.names}
    return any(name.lower() in own for name in names)


class NameRegistry:
    """Names that requests may use, in their original spelling. All machines of a scheduler share one registry.

    Args:
        further: Names that installed plug-ins know, beside those that :meth:`add` gets: a request for one of them is
            not a typing error. They may be costly to compute, and are read once, for the first name that is unknown.
    """

    def __init__(self, further: Iterable[str] = ()) -> None:
        self._spelled: dict[str, str] = {}
        self._further = further

    def add(self, names: Iterable[str]) -> None:
        """Add names, of devices or of none; empty names are left out. A name stays known when its device is lost."""
        for name in filter(None, names):
            self._spelled.setdefault(name.lower(), name)

    def find_unknown(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names that no device and no installed plug-in has."""
        unknown = tuple(name for name in names if name.lower() not in self._spelled)
        if not unknown:
            return ()
        self.add(self._further)  # reading the plug-ins' catalogs takes longer than most placements
        self._further = ()
        return tuple(name for name in unknown if name.lower() not in self._spelled)

    def spelled(self, name: str) -> str:
        """Return a known name in its original spelling, and an unknown name as it is."""
        return self._spelled.get(name.lower(), name)

    def __iter__(self) -> Iterator[str]:
        """Yield the known names."""
        self.add(self._further)
        self._further = ()
        return iter(tuple(self._spelled.values()))

    def make_error(self, name: str, there: Iterable[str]) -> UnknownNameError:
        """Make the error for an unknown name, with similar names, or else the names on the machine, as the way out."""
        from difflib import get_close_matches

        from anyaccel.extras import plugin_remedy  # only errors need it

        close = [self._spelled[key] for key in get_close_matches(name.lower(), sorted(self._spelled))]
        here = [self.spelled(each) for each in sorted(there)]
        if remedy := plugin_remedy(name):
            way_out = remedy
        elif close:
            way_out = f"did you mean {' or '.join(close)}?"
        elif here:
            way_out = f"on this machine there are {', '.join(here)}."
        else:
            way_out = "this machine has no devices; is the vendor's plug-in installed?"
        return UnknownNameError(f"unknown name {name!r}: no device and no installed plug-in goes by it; {way_out}")
