"""All names that the author of a plug-in imports, in one module.

A plug-in is a module, or an object of a class, whose functions are named as the hooks and marked with ``@hookimpl``.
Most are an object of a subclass of ``anyaccel.kit.Vendor``, which brings the hooks; ``anyaccel new VENDOR`` writes
such a project. A hook may leave out arguments that it does not need.

What an author needs, in the order in which a plug-in is written:

1. Who it is: ``anyaccel_info() -> PluginInfo``.
2. What is on the machine: ``anyaccel_detect(ctx: ProbeContext) -> Detected | None``, a ``Device`` for each one, with
   its ``Health``; None where there is no trace of the vendor. ``ctx`` alone shows the machine: ``ctx.pci()`` returns
   each ``PciFunction``, ``ctx.node()`` a ``DeviceNode``, ``ctx.run()`` a ``CommandResult`` or raises
   ``CommandTimeoutError``, ``ctx.query()`` returns what a library answers or raises ``QueryError``.
3. What it is called: ``anyaccel_tags(device) -> Sequence[str]``.
4. Whether several may share it: ``anyaccel_fractional(device) -> Fractional``.
5. What a worker's environment must say: ``anyaccel_env(devices, ctx: EnvContext) -> EnvEdits``. ``ctx.shares`` has a
   ``Share`` for each device; ``AGREEMENT`` is what enforces one that nothing enforces.

These five are required. The others, each for what it adds:

6. Which devices an environment leaves: ``anyaccel_visible(environ, devices)`` returns ids, or a ``VisiblePart``.
7. What the hardware refuses: ``anyaccel_validate(request: Term, devices) -> str | None``.
8. What can be simulated: ``anyaccel_products() -> Sequence[Product]``.
9. What is shown live: ``anyaccel_stats(devices, ctx) -> Mapping[str, Stats]``, with a ``DeviceProcess`` for each user.
10. What is wrong, and the way out: ``anyaccel_diagnose(ctx) -> Sequence[Finding]``, each of a ``Severity``.
11. What a container needs: ``anyaccel_container(devices) -> ContainerEdits``, with a ``Mount`` for each file.
12. What changes devices for a holder, and undoes that: ``anyaccel_handover(devices, ctx, given)``, which acts by
    ``ctx.run()`` and ``ctx.write()``.

``replace(value, field=...)`` gives a changed copy of a value. ``anyaccel_testing`` has the suite that checks all this.
"""

from anyaccel.errors import CommandTimeoutError, QueryError
from anyaccel.hookspecs import hookimpl
from anyaccel.model import (
    AGREEMENT,
    ContainerEdits,
    Detected,
    Device,
    DeviceProcess,
    EnvContext,
    EnvEdits,
    Finding,
    Fractional,
    Health,
    Mount,
    PluginInfo,
    Product,
    Severity,
    Share,
    Stats,
    Term,
    VisiblePart,
    replace,
)
from anyaccel.probe import CommandResult, DeviceNode, PciFunction, ProbeContext

__all__ = [
    "AGREEMENT",
    "CommandResult",
    "CommandTimeoutError",
    "ContainerEdits",
    "Detected",
    "Device",
    "DeviceNode",
    "DeviceProcess",
    "EnvContext",
    "EnvEdits",
    "Finding",
    "Fractional",
    "Health",
    "Mount",
    "PciFunction",
    "PluginInfo",
    "ProbeContext",
    "Product",
    "QueryError",
    "Severity",
    "Share",
    "Stats",
    "Term",
    "VisiblePart",
    "hookimpl",
    "replace",
]
