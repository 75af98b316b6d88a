"""Memory limits of frameworks, set by variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from anyaccel._typing import NamedTuple
from anyaccel.plugin import Device, EnvContext, EnvEdits, Share, replace

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


GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
"""TensorFlow allocates nearly all memory at start and has no variable for a cap: it is set to grow on demand.

PyTorch has a variable since 2.10 only, and earlier versions end at it: the core sets its cap at the import.
"""


def cap_frameworks(caps: Sequence[Cap], edits: EnvEdits, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
    """Limit frameworks to the share of a worker's only device. A tighter cap of the user stays.

    A worker with a whole device, or with several devices, gets no cap: a cap counts for each visible device.

    Args:
        caps: The caps of the frameworks.
        edits: The edits so far.
        devices: The worker's devices.
        ctx: Shares and environment; a cap in bytes needs the memory of the share.

    Returns:
        The edits with the caps, rival names unset, and the frameworks that obey the caps in this environment.
    """
    share = ctx.shares.get(devices[0].id) if len(devices) == 1 else None
    if share is None or share.whole or not caps:
        return edits
    values = {GROWTH: "true"}
    limited: list[str] = []
    unset: set[str] = set()
    for cap in caps:
        limit = _share_in_unit(cap.unit, devices[0], share)
        if limit is None:
            continue
        value = min([limit, *_user_caps(cap, devices[0], ctx.environ)])
        # Cut off after four digits, never rounded up: two rounded halves would be more than the device.
        values[cap.variable] = f"{int(value * 10_000) / 10_000:g}" if cap.unit == "fraction" else str(int(value))
        # A framework with both names set takes one of them or fails; only one is left.
        unset |= {cap.rival} - {""}
        if not cap.void or ctx.environ.get(cap.void[0], "").lower() not in cap.void[1:]:
            limited.append(cap.framework)
    return replace(edits, set={**edits.set, **values}, unset=edits.unset | unset, limited_by=tuple(limited))


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
