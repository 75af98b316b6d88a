"""Memory limits of frameworks, set by variables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from anyaccel.plugin import Device, EnvEdits, Share

Unit = Literal["fraction", "bytes", "MiB"]
"""Unit of a variable's value; ``fraction`` is a fraction of the device's memory, between 0 and 1."""


class Cap(NamedTuple):
    """A variable that limits how much memory a framework takes of each visible device.

    The limit binds that framework only; other software in the process is free to take more. So a cap is not
    enforcement.

    Attributes:
        framework: Name of the framework, for messages.
        variable: The variable.
        unit: Unit of the value.
        rival: Second name of the same setting, which must not be set beside ``variable``; empty if there is none.
        void: A variable, then its values in lower case with which the framework ignores the cap; empty if the framework
            always obeys.
    """

    framework: str
    variable: str
    unit: Unit
    rival: str = ""
    void: tuple[str, ...] = ()

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables for :func:`cap_frameworks` to set or unset."""
        return (self.variable, self.rival) if self.rival else (self.variable,)


def cap_frameworks(caps: Iterable[Cap], device: Device, share: Share, environ: Mapping[str, str]) -> EnvEdits:
    """Limit frameworks to a share of a device, the only visible one. A tighter cap of the user stays.

    Args:
        caps: The caps of the vendor's frameworks.
        device: The device.
        share: The share; a cap in bytes needs its memory.
        environ: The environment of the user.

    Returns:
        The variables to set, the rival names to unset, and the frameworks that obey the caps in this environment.
    """
    values: dict[str, str] = {}
    limited: list[str] = []
    unset: set[str] = set()
    for cap in caps:
        limit = _share_in_unit(cap.unit, device, share)
        if limit is None:
            continue
        value = min([limit, *_user_caps(cap, device, environ)])
        # Cut off after four digits, never rounded up: two rounded halves would be more than the device.
        values[cap.variable] = f"{int(value * 10_000) / 10_000:g}" if cap.unit == "fraction" else str(int(value))
        # A framework with both names set takes one of them or fails; only one is left.
        unset |= {cap.rival} - {""}
        if not cap.void or environ.get(cap.void[0], "").lower() not in cap.void[1:]:
            limited.append(cap.framework)
    return EnvEdits(set=values, unset=frozenset(unset), limited_by=tuple(limited))


def _share_in_unit(unit: Unit, device: Device, share: Share) -> float | None:
    """Convert a share to a unit; None if unknown, or if the result is 0, which frameworks read as no cap."""
    memory, total = share.memory_bytes, device.memory_bytes
    if unit == "fraction":
        return memory / total if memory and total else share.units / 10_000
    if not memory:
        return None
    return memory if unit == "bytes" else memory >> 20 or None


def _user_caps(cap: Cap, device: Device, environ: Mapping[str, str]) -> Iterator[float]:
    """Yield the caps that the user's variables set, in the unit of ``cap``."""
    for name in cap.variables:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+|[0-9]+\.)\s*(%?)\s*", environ.get(name, ""))
        value = float(match[1]) if match else 0.0
        if match and match[2]:  # of all memory, where the unit is bytes
            value = value / 100 * (device.memory_bytes or 0)
        if value > 0 and (cap.unit != "fraction" or value <= 1):
            yield value
