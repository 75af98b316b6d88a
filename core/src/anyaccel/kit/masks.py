"""Variables that hold a comma list of devices, written and read as a vendor's runtime does."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from anyaccel.kit.fault import FaultError
from anyaccel.plugin import Device

Rule = Literal["error", "skip", "stop", "void"]
"""What an entry does that is not as it should be: the value is refused, the entry is skipped, it ends the list, or it
voids the whole list."""
Empty = Literal["nothing", "everything", "error"]
"""What an empty value shows."""


def c_integer(text: str) -> int:
    """Read a whole number as C's ``strtol`` does with base 0: hexadecimal behind ``0x``, octal behind ``0``.

    Raises:
        ValueError: When anything else is in the text.
    """
    digits = text.strip().lstrip("+-").lower()
    return int(text, 16 if digits.startswith("0x") else 8 if digits.startswith("0") else 10)


class Form(Protocol):
    """A way in which the entries of a mask name devices."""

    def name(self, device: Device) -> str:
        """What a device is called."""
        ...

    def fits(self, entry: str) -> bool:
        """Whether an entry has this form, whether or not there is such a device."""
        ...

    def find(self, entry: str, devices: Sequence[Device]) -> Sequence[Device]:
        """The devices that an entry of this form names: one mostly; none where there is no such device."""
        ...


class Numbers:
    """Devices by number."""

    def __init__(
        self,
        number: Callable[[Device], int] = lambda device: device.index,
        *,
        pattern: str = r"\d+",
        value: Callable[[str], int] = int,
        ranges: bool = False,
    ) -> None:
        """Say what numbers look like.

        Args:
            number: The number of a device; its index unless said otherwise.
            pattern: Regular expression that a whole entry must match.
            value: What number an entry is.
            ranges: Whether an entry may be a range such as ``0-3``, whose ends count. One that runs backwards, or
                that holds a number of no device, names nothing.
        """
        self._number = number
        self._pattern = f"({pattern})-({pattern})|{pattern}" if ranges else pattern
        self._value = value

    def name(self, device: Device) -> str:
        """The number of a device."""
        return str(self._number(device))

    def fits(self, entry: str) -> bool:
        """Whether an entry is a number."""
        return re.fullmatch(self._pattern, entry, re.ASCII) is not None

    def find(self, entry: str, devices: Sequence[Device]) -> Sequence[Device]:
        """The devices with a number, or with the numbers of a range."""
        match = re.fullmatch(self._pattern, entry, re.ASCII)
        ends = [end for end in (match.groups() if match else ()) if end is not None] or [entry]
        first, last = self._value(ends[0]), self._value(ends[-1])
        if last - first >= len(devices):
            return ()
        numbered = {self._number(device): device for device in devices}
        found = [numbered[number] for number in range(first, last + 1) if number in numbered]
        return found if len(found) == last - first + 1 else ()


class Ids:
    """Devices by id, or by the beginning of an id where it fits one device only."""

    def __init__(
        self,
        id: Callable[[Device], str] = lambda device: device.id,  # noqa: A002 - what it gives
        *,
        pattern: str = ".+",
        shortest: int = 0,
        case: bool = True,
        part: bool = False,
    ) -> None:
        """Say what ids look like.

        Args:
            id: What the runtime calls a device; its id unless said otherwise.
            pattern: Regular expression that a whole entry must match.
            shortest: Least number of characters of a beginning; 0 where ids must be complete.
            case: Whether upper and lower case differ.
            part: Whether any part of an id will do, and means the first device that has it.
        """
        self._id = id if case else lambda device: id(device).lower()
        self._pattern = re.compile(pattern, re.ASCII | (0 if case else re.IGNORECASE))
        self._shortest = shortest
        self._part = part
        self._fold: Callable[[str], str] = str if case else str.lower

    def name(self, device: Device) -> str:
        """The id of a device."""
        return self._id(device)

    def fits(self, entry: str) -> bool:
        """Whether an entry looks like an id."""
        return self._pattern.fullmatch(entry) is not None

    def find(self, entry: str, devices: Sequence[Device]) -> Sequence[Device]:
        """The one device with an id, or whose id begins so; none where there are several."""
        wanted = self._fold(entry)
        if self._part:
            return [device for device in devices if wanted in self._id(device)][:1]
        alike = [device for device in devices if self._id(device).startswith(wanted)]
        same = [device for device in alike if self._id(device) == wanted]
        found = same or (alike if 0 < self._shortest <= len(entry) else [])
        return found if len(found) == 1 else ()


class Mask:
    """A variable that holds a comma list of devices.

    Attributes:
        variable: Its name.
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
        """Say how the runtime reads the variable.

        Args:
            variable: Its name.
            forms: How entries name devices; the first is written, and each is tried on what is read. Numbers of
                devices' indexes when there is none.
            nothing: The value that hides every device, written for an empty list.
            empty: What an empty value shows, where it is not ``nothing`` itself.
            strict: Whether only a list is taken that leaves no doubt, of devices that are here, each once, in the order
                of their indexes: for a closed runtime, of which nobody knows what it makes of another one. It means
                ``unknown="error", repeated="error", ordered=False``.
            malformed: What an entry of another form does.
            blank: What an entry with nothing in it does, where that is not what another malformed one does.
            unknown: What an entry does that names no device of this machine.
            repeated: What an entry does that names a device a second time.
            entries: What the variable must hold, for messages.
            remedy: What to do about a value that is refused; ``unset VARIABLE`` when empty.
            blanks: Whether blanks around an entry do not count.
            ordered: Whether the order of the list is that of the devices in the process. Where the runtime keeps its
                own, the list is written, and read, in the order of the devices' indexes.
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
        self._ordered = ordered and not strict

    def write(self, devices: Sequence[Device]) -> str:
        """Write the value that shows exactly these devices.

        Raises:
            FaultError: When a device is given twice.
        """
        names = [self._forms[0].name(device) for device in self._in_order(devices)]
        if len(set(names)) < len(names):
            raise FaultError(
                f"{self.variable} must name each device once (got {','.join(names)})", "pass each device once"
            )
        return ",".join(names) or self.nothing

    def read(self, environ: Mapping[str, str], devices: Sequence[Device]) -> list[Device] | None:
        """Say which devices the variable leaves visible, in the runtime's order.

        Args:
            environ: The environment.
            devices: The devices that the runtime can see without the variable.

        Returns:
            The devices; None when the variable hides nothing.

        Raises:
            FaultError: When the runtime would refuse the value.
        """
        value = environ.get(self.variable)
        if value is None:
            return None
        stripped = value.strip() if self._blanks else value
        if stripped == self.nothing:
            return []
        if not stripped:
            if self._empty == "error":
                raise self.refusal(value)
            return [] if self._empty == "nothing" else None
        found: dict[str, Device] = {}
        known: dict[str, Sequence[Device] | None] = {}
        for part in value.split(","):
            entry = part.strip() if self._blanks else part
            if entry not in known:  # a mask may repeat one ten thousand times
                known[entry] = self._named(entry, devices)
            rule = self._enter(entry, known[entry], found)
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
        """The error for a value that the runtime refuses."""
        return FaultError(f"{self.variable} must be {self._entries} (got {value!r})", self._remedy)

    def _named(self, entry: str, devices: Sequence[Device]) -> Sequence[Device] | None:
        """The devices that an entry names; None when it has no form that is known."""
        form = next((form for form in self._forms if form.fits(entry)), None)
        return None if form is None else form.find(entry, devices)

    def _enter(self, entry: str, named: Sequence[Device] | None, found: dict[str, Device]) -> Rule | None:
        """Add what an entry names, by id; what to do when it names nothing new."""
        if named is None:
            return self._rules["malformed" if entry.strip() else "blank"]
        if not named:
            return self._rules["unknown"]
        before = len(found)
        found.update((device.id, device) for device in named)
        return None if len(found) - before == len(named) else self._rules["repeated"]
