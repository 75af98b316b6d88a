"""Caps that frameworks put on their own memory, told to them by variables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from anyaccel.plugin import Device, EnvEdits, Share

Unit = Literal["fraction", "bytes", "MiB"]
"""What the value of a variable counts; a fraction is one of the device's memory, between 0 and 1."""


class Cap(NamedTuple):
    """A variable by which a framework takes at most so much memory of each device that it sees.

    It binds that framework only: what else runs in the process is free. So it is no enforcement.

    Attributes:
        framework: Name of the framework for people.
        variable: The variable.
        unit: What its value counts.
        rival: Another name of the variable, which must not stand beside it; empty when there is none.
        void: A variable and its values, in lower case, with which the framework ignores the cap; empty when there is
            none.
    """

    framework: str
    variable: str
    unit: Unit
    rival: str = ""
    void: tuple[str, ...] = ()

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that :func:`capped` may touch."""
        return (self.variable, self.rival) if self.rival else (self.variable,)


def capped(caps: Iterable[Cap], device: Device, share: Share, environ: Mapping[str, str]) -> EnvEdits:
    """Cap frameworks at a share of a device, the only one that they will see. A tighter cap of the user's stays.

    Args:
        caps: What to set.
        device: The device.
        share: The share; a cap in bytes needs its memory.
        environ: The environment of the user.

    Returns:
        The variables, those that must not stand beside them, and the frameworks that obey them in this environment.
    """
    values: dict[str, str] = {}
    limited: list[str] = []
    unset: set[str] = set()
    for cap in caps:
        most = _most(cap.unit, device, share)
        if most is None:
            continue
        value = min([most, *_given(cap, device, environ)])
        values[cap.variable] = f"{int(value * 10_000) / 10_000:g}" if cap.unit == "fraction" else str(int(value))
        unset |= {cap.rival} - {""}
        if not cap.void or environ.get(cap.void[0], "").lower() not in cap.void[1:]:
            limited.append(cap.framework)
    return EnvEdits(set=values, unset=frozenset(unset), limited_by=tuple(limited))


def _most(unit: Unit, device: Device, share: Share) -> float | None:
    """The share in a unit; None where it cannot be told, or would be 0, which means no cap."""
    memory, total = share.memory_bytes, device.memory_bytes
    if unit == "fraction":
        return memory / total if memory and total else share.units / 10_000
    if not memory:
        return None
    return memory if unit == "bytes" else memory >> 20 or None


def _given(cap: Cap, device: Device, environ: Mapping[str, str]) -> Iterator[float]:
    """What the user's variables allow, in the unit of the cap; nothing where they hold no cap."""
    for name in cap.variables:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+|[0-9]+\.)\s*(%?)\s*", environ.get(name, ""))
        value = float(match[1]) if match else 0.0
        if match and match[2]:  # of all memory, where the unit is bytes
            value = value / 100 * (device.memory_bytes or 0)
        if value > 0 and (cap.unit != "fraction" or value <= 1):
            yield value
