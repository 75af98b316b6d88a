"""Requests: terms that are served together or not at all."""

from __future__ import annotations

from anyaccel.model._value import Value
from anyaccel.model.device import UNITS_PER_DEVICE


def format_units(units: int) -> str:
    """Write 1/10000 devices as an exact decimal: 5000 as ``0.5``, 20000 as ``2``."""
    whole, rest = divmod(units, UNITS_PER_DEVICE)
    return f"{whole}.{rest:04d}".rstrip("0") if rest else str(whole)


class Term(Value):
    """A term of a request: a quantity of devices with one of several names.

    Attributes:
        names: Alternatives, in order of preference: resources, vendors or accelerator-type tags.
        units: Quantity in 1/10000 of a device: whole devices (a multiple of 10000) or a share of one (less).
        filters: Filters of devices, by name and value: ``(("mem", "40GiB"),)``. A filter whose name is a sign stands
            right behind the names of the term.
        linked: Whether the devices must be connected directly.
        mixed: Whether the devices may be of several vendors and types.
    """

    names: tuple[str, ...]
    units: int = UNITS_PER_DEVICE
    filters: tuple[tuple[str, str], ...] = ()
    linked: bool = False
    mixed: bool = False

    @property
    def count(self) -> int:
        """Number of devices: the whole devices, or one shared device."""
        return max(1, self.units // UNITS_PER_DEVICE)

    @property
    def fraction(self) -> bool:
        """Whether the term asks for a share of one device."""
        return self.units < UNITS_PER_DEVICE

    def __str__(self) -> str:
        signs = options = ""
        for name, value in self.filters:
            if name.isalpha():
                options += f",{name}={value}"
            else:
                signs += name + value
        options += ",linked" * self.linked + ",mixed" * self.mixed
        return f"{'|'.join(self.names)}{signs}:{format_units(self.units)}{options}"


class Request(Value):
    """Several terms, which are served together or not at all.

    Attributes:
        terms: The terms, at least one.
        else_cpu: Whether the request accepts the CPU if the terms can never be served.
    """

    terms: tuple[Term, ...]
    else_cpu: bool = False

    def __str__(self) -> str:
        text = " ".join(map(str, self.terms))
        return f"{text},else=cpu" if self.else_cpu else text
