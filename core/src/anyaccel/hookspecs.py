"""The contract between anyaccel and a vendor's plug-in, API 2.

Every hook is called for one vendor at a time, in a process of that vendor's own: the process that schedules, its
workers and its commands never import a plug-in. The process lives on after detection and answers later calls, so a
plug-in may keep what it has read; it may be ended and started again at any time, and what it leaves behind ends with
it. What it prints is kept for ``anyaccel plugins VENDOR``. Every call has a deadline: detection, observation and
diagnosis that of the caller, 10 s by default; a pure hook 5 s, and less where it only hides devices.

Hooks that touch the machine see it through their context alone. All others are pure functions of their arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pluggy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.model import (
        ContainerEdits,
        Detected,
        Device,
        EnvContext,
        EnvEdits,
        Finding,
        Fractional,
        PluginInfo,
        Product,
        Stats,
        Term,
        VisiblePart,
    )
    from anyaccel.probe.context import ProbeContext

hookspec = pluggy.HookspecMarker("anyaccel")
hookimpl = pluggy.HookimplMarker("anyaccel")


@hookspec(firstresult=True)
def anyaccel_info() -> PluginInfo:  # type: ignore[empty-body]
    """Say who you are.

    Called: once in each process, right after the plug-in was imported. Required. Pure.
    On error: the plug-in is reported as failed and left out.
    """


@hookspec(firstresult=True)
def anyaccel_detect(ctx: ProbeContext) -> Detected | None:
    """Find this vendor's devices on the machine that ``ctx`` shows.

    Called: first of all hooks that touch the machine. Required. Import the vendor's library only once files or PCI ids
    show that its hardware may be here, and reach it through ``ctx.query`` alone. Report a device that is there but
    cannot be used as unhealthy, with the reason; a queried value that is unknown is None.

    Returns:
        The devices; ``Detected()`` without devices when the driver is here and no device is; None when this vendor
        is not on this machine.
    On error: the vendor is reported as failed, with the reason; other vendors are unaffected.
    """


@hookspec(firstresult=True)
def anyaccel_fractional(device: Device) -> Fractional:  # type: ignore[empty-body]
    """Say whether several holders may share this device.

    Called: for each detected device, after detection. Required. Pure.
    On error: the vendor is reported as failed.
    """


@hookspec(firstresult=True)
def anyaccel_tags(device: Device) -> Sequence[str]:  # type: ignore[empty-body]
    """Name the accelerator types by which this device can be asked for, most canonical first.

    Called: for each detected device, after detection. Required. Pure. A tag matches ``[A-Za-z0-9._-]+``.
    On error: the vendor is reported as failed.
    """


@hookspec(firstresult=True)
def anyaccel_env(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:  # type: ignore[empty-body]
    """Make a worker see exactly ``devices``, in this order.

    Called: after detection for no devices, and before each launch that gives some. Required. Pure, and total over all
    subsets of the vendor's devices that ``PluginInfo.counts`` and ``anyaccel_validate`` accept; the empty one hides
    every device. Only variables in ``PluginInfo.env_vars`` may be touched. Write absolute values: a worker's mask
    replaces the launcher's. Unset only what would harm the worker: where another vendor whose devices the worker has
    sets it, the launch is refused.
    On error: for no devices, the vendor is reported as failed. For some, the launch is refused, since a missing mask
    is a hole in the isolation.
    """


@hookspec(firstresult=True)
def anyaccel_visible(environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str | VisiblePart] | None:
    """Say which of ``devices`` an environment leaves visible: the inverse of ``anyaccel_env``.

    Called: after detection. Optional. Pure.

    Returns:
        Ids of the visible devices, in the order in which the runtime numbers them; for a device of which some slots
        only are visible, ``VisiblePart(id=..., slots=...)``. None when nothing is hidden.
    Default: nothing is hidden.
    On error: raise ValueError with one sentence for a value that the runtime would not understand; every device of
    the vendor then counts as hidden.
    """


@hookspec(firstresult=True)
def anyaccel_validate(request: Term, devices: Sequence[Device]) -> str | None:
    """Say why the hardware cannot serve this term with exactly these devices.

    Called: once for each set of devices that placement considers; answers are kept. Sets of another size than
    ``PluginInfo.counts`` allows are refused without a call, so leave the hook out where numbers say it all. Optional.
    Pure.

    Returns:
        One sentence that states the rule and the quantities allowed, or None when the set is fine.
    Default: every set is fine.
    On error: the request is refused.
    """


@hookspec(firstresult=True)
def anyaccel_stats(devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:  # type: ignore[empty-body]
    """Observe the devices now.

    Called: whenever somebody looks. Optional.

    Returns:
        Stats by device id. What the vendor cannot tell is None; a device may be left out.
    Default: nothing is known.
    On error: nothing is known, and the problem is reported.
    """


@hookspec(firstresult=True)
def anyaccel_container(devices: Sequence[Device]) -> ContainerEdits:  # type: ignore[empty-body]
    """Say what a container or a sandbox needs so that exactly these devices work inside.

    Called: on export and before a confined launch. Optional. Pure.
    Default: the device nodes of the devices.
    """


@hookspec(firstresult=True)
def anyaccel_diagnose(ctx: ProbeContext) -> Sequence[Finding]:  # type: ignore[empty-body]
    """Look for what is wrong with this vendor here: driver, permissions, rival variables, orphaned memory.

    Called: by ``anyaccel doctor``. Optional.

    Returns:
        Findings, each with one way out.
    Default: nothing is found.
    """


@hookspec(firstresult=True)
def anyaccel_products() -> Sequence[Product]:  # type: ignore[empty-body]
    """List the products that this plug-in knows.

    Called: for simulation, completion and documentation. Optional. Pure.
    Default: no product is known.
    """


HOOKS = tuple(name for name in globals() if name.startswith("anyaccel_"))
"""Names of all hooks."""
