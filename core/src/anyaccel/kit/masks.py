"""Variables with a comma list of devices, written and read as a vendor's runtime does."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from anyaccel.kit.fault import FaultError
from anyaccel.plugin import Device

Rule = Literal["error", "skip", "stop", "void"]
"""Effect of a wrong entry: the runtime refuses the value, skips the entry, ends the list at the entry, or takes the
whole list as empty."""
Empty = Literal["nothing", "everything", "error"]
"""Effect of an empty value: the runtime sees nothing or everything, or refuses the value."""


def c_integer(text: str) -> int:
    """Read a whole number as C's ``strtol`` does with base 0: hexadecimal behind ``0x``, octal behind ``0``.

    Raises:
        ValueError: The text holds anything but one number.
    """
    digits = text.strip().lstrip("+-").lower()
    return int(text, 16 if digits.startswith("0x") else 8 if digits.startswith("0") else 10)


class Form(Protocol):
    """A form of entries: how a mask names devices."""

    def name(self, device: Device) -> str:
        """Return the entry for a device."""
        ...

    def fits(self, entry: str) -> bool:
        """Return True if an entry has this form, even if no device has that name."""
        ...

    def find(self, entry: str, devices: Sequence[Device]) -> Sequence[Device]:
        """Return the devices of an entry of this form: mostly one; none if no device has such a name."""
        ...


class Numbers:
    """Entries that name devices by number, such as ``0`` or, with ``ranges``, ``0-3``."""

    def __init__(
        self,
        number: Callable[[Device], int] = lambda device: device.index,
        *,
        pattern: str = r"\d+",
        value: Callable[[str], int] = int,
        ranges: bool = False,
    ) -> None:
        """Describe the numbers of a runtime.

        Args:
            number: Returns the number of a device; by default its index.
            pattern: Regular expression that a whole entry must match.
            value: Converts an entry to a number.
            ranges: Whether an entry may be a range such as ``0-3``, both ends included. A backward range, or a range
                with a number of no device, names nothing.
        """
        self._number = number
        self._pattern = f"({pattern})-({pattern})|{pattern}" if ranges else pattern
        self._value = value

    def name(self, device: Device) -> str:
        """Return the number of a device."""
        return str(self._number(device))

    def fits(self, entry: str) -> bool:
        """Return True if an entry is a number, or a range where ranges are allowed."""
        return re.fullmatch(self._pattern, entry, re.ASCII) is not None

    def find(self, entry: str, devices: Sequence[Device]) -> Sequence[Device]:
        """Return the devices with a number, or with the numbers of a range."""
        match = re.fullmatch(self._pattern, entry, re.ASCII)
        ends = [end for end in (match.groups() if match else ()) if end is not None] or [entry]
        first, last = self._value(ends[0]), self._value(ends[-1])
        # A hostile range such as 0-999999999999 is not walked through.
        if last - first >= len(devices):
            return ()
        numbered = {self._number(device): device for device in devices}
        found = [numbered[number] for number in range(first, last + 1) if number in numbered]
        return found if len(found) == last - first + 1 else ()


class Ids:
    """Entries that name devices by id, or by the unique beginning of an id."""

    def __init__(
        self,
        id: Callable[[Device], str] = lambda device: device.id,  # noqa: A002 - what it gives
        *,
        pattern: str = ".+",
        shortest: int = 0,
        case: bool = True,
        part: bool = False,
    ) -> None:
        """Describe the ids of a runtime.

        Args:
            id: Returns the name of a device in the runtime; by default its id.
            pattern: Regular expression that a whole entry must match.
            shortest: Least number of characters of a beginning; 0 where ids must be complete.
            case: Whether case matters.
            part: Whether any part of an id is accepted; the entry then means the first device that matches.
        """
        self._id = id if case else lambda device: id(device).lower()
        self._pattern = pattern
        self._flags = re.ASCII if case else re.ASCII | re.IGNORECASE
        self._shortest = shortest
        self._part = part
        self._fold: Callable[[str], str] = str if case else str.lower

    def name(self, device: Device) -> str:
        """Return the id of a device."""
        return self._id(device)

    def fits(self, entry: str) -> bool:
        """Return True if an entry looks like an id."""
        return re.fullmatch(self._pattern, entry, self._flags) is not None

    def find(self, entry: str, devices: Sequence[Device]) -> Sequence[Device]:
        """Return the device with an id, or with an id that begins so; none if several match."""
        wanted = self._fold(entry)
        if self._part:
            return [device for device in devices if wanted in self._id(device)][:1]
        alike = [device for device in devices if self._id(device).startswith(wanted)]
        # A complete id wins over a longer id that begins with it.
        same = [device for device in alike if self._id(device) == wanted]
        found = same or (alike if 0 < self._shortest <= len(entry) else [])
        return found if len(found) == 1 else ()


class Sets:
    """Entries that name a set of devices by an id, such as a board: ``quad0``. A mask takes whole sets.

    Attributes:
        attribute: Attribute of a device with the id of its set.
    """

    def __init__(self, attribute: str) -> None:
        """Name the attribute of a device in which detection stores the id of its set."""
        self.attribute = attribute

    def name(self, device: Device) -> str:
        """Return the id of a device's set; a device without the attribute is a set of its own, named by its index."""
        # All simulated devices of a product have the same attributes, so those are in no set.
        return str(device.attributes.get(self.attribute, device.index))

    def fits(self, entry: str) -> bool:
        """Return True if an entry is not empty: ids of sets have no known form."""
        return bool(entry)

    def find(self, entry: str, devices: Sequence[Device]) -> Sequence[Device]:
        """Return the devices of a set."""
        return [device for device in devices if self.name(device) == entry]


class Mask:
    """A variable with a comma list of devices, written and read as a vendor's runtime does.

    Attributes:
        variable: Name of the variable.
        nothing: The value that hides every device.
    """

    def __init__(
        self,
        variable: str,
        *forms: Form,
        nothing: str = "",
        empty: Empty = "nothing",
        strict: bool = False,
        malformed: Rule = "error",
        blank: Rule | None = None,
        unknown: Rule = "skip",
        repeated: Rule = "skip",
        entries: str = "device numbers such as '0,1'",
        remedy: str = "",
        blanks: bool = True,
        ordered: bool = True,
    ) -> None:
        """Describe how the runtime reads the variable.

        Args:
            variable: Name of the variable.
            forms: How entries name devices. The first form is written; each is tried on entries that are read. Without
                a form: ``Numbers()``.
            nothing: The value that hides every device, written for an empty list.
            empty: Effect of an empty value, unless ``nothing`` is the empty value.
            strict: Whether only an unambiguous list is accepted: devices of this machine, each once, in the order of
                their indexes. For a closed runtime, whose reading of other lists is unknown. The same as
                ``unknown="error", repeated="error", ordered=False``.
            malformed: Effect of an entry that has none of the forms.
            blank: Effect of a blank entry, if it differs from ``malformed``.
            unknown: Effect of an entry that names no device of this machine.
            repeated: Effect of an entry that names a device again.
            entries: Description of a valid value, for messages.
            remedy: Remedy for a value that is refused; ``unset VARIABLE`` if empty.
            blanks: Whether blanks around an entry are ignored.
            ordered: Whether the process sees the devices in the order of the list. If the runtime keeps its own order,
                the list is written and read in the order of the devices' indexes. So is a list of ``Sets``, which
                says nothing about the order within a set.
        """
        self.variable = variable
        self.nothing = nothing
        self._forms: tuple[Form, ...] = forms or (Numbers(),)
        self._empty = empty
        self._rules: Mapping[str, Rule] = {
            "malformed": malformed,
            "blank": blank or malformed,
            "unknown": "error" if strict else unknown,
            "repeated": "error" if strict else repeated,
        }
        self._entries = entries
        self._remedy = remedy or f"unset {variable}"
        self._blanks = blanks
        self._ordered = ordered and not strict and not self.set_attribute

    @property
    def set_attribute(self) -> str:
        """Attribute of a device with the id of its set, if the mask is written as :class:`Sets`; otherwise empty."""
        return self._forms[0].attribute if isinstance(self._forms[0], Sets) else ""

    def write(self, devices: Sequence[Device]) -> str:
        """Return the value for exactly these devices.

        Raises:
            FaultError: A device is listed twice.
        """
        names = [self._forms[0].name(device) for device in self._in_order(devices)]
        if self.set_attribute:
            # Each device of a set has the id of the set; Vendor.validate() sees to whole sets.
            return ",".join(dict.fromkeys(names)) or self.nothing
        if len(set(names)) < len(names):
            raise FaultError(
                f"{self.variable} must name each device once (got {','.join(names)})", "pass each device once"
            )
        return ",".join(names) or self.nothing

    def read(self, environ: Mapping[str, str], devices: Sequence[Device]) -> list[Device] | None:
        """Return the devices that the variable leaves visible, in the runtime's order.

        Args:
            environ: The environment.
            devices: The devices that the runtime can see without the variable.

        Returns:
            The devices; None if the variable hides nothing.

        Raises:
            FaultError: The runtime would refuse the value.
        """
        value = environ.get(self.variable)
        if value is None:
            return None
        stripped = value.strip() if self._blanks else value
        # Comes before the rules for entries: "nothing" may itself be an entry that the runtime would refuse.
        if stripped == self.nothing:
            return []
        if not stripped:
            if self._empty == "error":
                raise self.refusal(value)
            return [] if self._empty == "nothing" else None
        found: dict[str, Device] = {}
        # Cached: an untrusted value may repeat an entry ten thousand times, and ids are compared with every device.
        find = functools.cache(lambda entry: self._find_devices(entry, devices))
        for part in value.split(","):
            entry = part.strip() if self._blanks else part
            rule = self._enter(entry, find(entry), found)
            if rule == "error":
                raise self.refusal(value)
            if rule == "void":
                return []
            if rule == "stop":
                break
        return self._in_order(list(found.values()))

    def _in_order(self, devices: Sequence[Device]) -> list[Device]:
        return list(devices) if self._ordered else sorted(devices, key=lambda device: device.index)

    def refusal(self, value: str) -> FaultError:
        """Build the error for a value that the runtime refuses."""
        return FaultError(f"{self.variable} must be {self._entries} (got {value!r})", self._remedy)

    def _find_devices(self, entry: str, devices: Sequence[Device]) -> Sequence[Device] | None:
        """Return the devices that an entry names; None if the entry has no known form."""
        form = next((form for form in self._forms if form.fits(entry)), None)
        return None if form is None else form.find(entry, devices)

    def _enter(self, entry: str, named: Sequence[Device] | None, found: dict[str, Device]) -> Rule | None:
        """Add the devices of an entry to ``found``; return the rule for an entry that adds nothing new."""
        if named is None:
            return self._rules["malformed" if entry.strip() else "blank"]
        if not named:
            return self._rules["unknown"]
        before = len(found)
        found.update((device.id, device) for device in named)
        # A range that overlaps an earlier entry counts as a repetition, as a whole.
        return None if len(found) - before == len(named) else self._rules["repeated"]
