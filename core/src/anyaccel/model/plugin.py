"""What a plug-in says of its vendor."""

from __future__ import annotations

from collections.abc import Sequence

from anyaccel.model._value import Value, replace
from anyaccel.model.device import UNITS_PER_DEVICE, Device
from anyaccel.model.request import Term


class PluginInfo(Value):
    """The identity of a vendor plug-in, the same on every machine.

    Attributes:
        vendor: Key of the vendor, ``[a-z][a-z0-9_]{0,31}``, equal to the entry point's name.
        resource: Name under which schedulers count its devices: ``GPU``, ``TPU``, ``NPU`` ...
        kind: Kind of accelerator in lower case: ``gpu``, ``tpu``, ``npu`` ...
        env_vars: Every variable that the plug-in may set or unset. A hook that touches another one is refused.
            Empty when there is none; ``maskable`` says so then.
        borrowed: Those of them that are another vendor's own, or of no vendor in particular, and that this vendor's
            runtime obeys, too. One worker never gets devices of two vendors that obey one variable which one of them
            borrows: no value of it means devices of both.
        cleared: Those of them that are another vendor's, and that the plug-in only ever removes so that programs do
            not mistake them: its own runtime does not obey them. Where anybody else sets one, it stays.
        url: Where people find the plug-in's documentation.
        runtimes: How the file names of the vendor's runtime libraries begin, such as ``libacme.so``. A process that has
            loaded one of them has read the variables, and cannot be given other devices.
        counts: Numbers of devices that one job may have, in ascending order; empty for any. Placement keeps to them
            without asking; what depends on which devices they are is for ``anyaccel_validate`` to say.
        exclusive: Why a device has one holder only, in a clause, for whoever asks for a part of one; empty where
            devices can be shared, and where there is nothing to say.
        control_nodes: Device nodes that all of its devices use, such as ``/dev/acmectl``. Any other node that only one
            device lists is that device's own: where another vendor lists it as well, neither device is given out.
        maskable: Whether a variable keeps a process from devices. Where none does, say ``False``: each launch names the
            vendor, since its devices are open to all workers that are not confined.
        ray_switch: Variable by which people keep Ray from writing the mask, where Ray calls it otherwise than
            ``RAY_EXPERIMENTAL_NOSET_`` and the first of ``env_vars``.
    """

    vendor: str
    resource: str
    kind: str
    env_vars: tuple[str, ...]
    borrowed: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()
    url: str = ""
    runtimes: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    exclusive: str = ""
    control_nodes: tuple[str, ...] = ()
    maskable: bool = True
    ray_switch: str = ""

    def describe(self, device: Device) -> Device:
        """Return a device with the vendor, resource and kind, and without what no plug-in may say of it."""
        own = {"vendor": self.vendor, "resource": self.resource, "kind": self.kind}
        core = {"declared": False, "labels": {}, "units": UNITS_PER_DEVICE, "own_slots": (), "visible": True}
        return replace(device, **own, **core, order=0)

    def refusal(self, term: Term, devices: Sequence[Device]) -> str | None:
        """Say why one job cannot have so much of the vendor's devices; None when it can."""
        if self.exclusive and term.fraction:
            whole = f": {_listed(self.counts)}" if self.counts else ""
            return (
                f"one {self.resource} cannot be divided or shared: {self.exclusive}; ask for a whole number of devices"
                f"{whole}"
            )
        if self.counts and devices and len(devices) not in self.counts:
            return (
                f"one job can use {_listed(self.counts)} {self.resource}s of a machine (got {len(devices)});"
                " ask for one of these numbers"
            )
        return None


def _listed(numbers: Sequence[int]) -> str:
    """Write numbers for people: ``1, 2, 4 or 8``."""
    words = [str(number) for number in numbers]
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)
