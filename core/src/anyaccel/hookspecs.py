"""The contract between anyaccel and a vendor's plug-in, API 2.

Hooks run in a process of the vendor's own: schedulers, workers and commands never import a plug-in. The process lives
on after detection and answers later calls, so a plug-in may keep data in memory. The process may end and start again at
any time, and its child processes end with it. ``anyaccel plugins VENDOR`` shows its printed output. Every call has a
deadline: the caller's for detection, observation and diagnosis, 10 s by default; 5 s for a pure hook, and less for a
hook that only hides devices.

Hooks with a ``ctx: ProbeContext`` see the machine through the context alone. All other hooks are pure functions.
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
    from anyaccel.probe import ProbeContext

hookspec = pluggy.HookspecMarker("anyaccel")
hookimpl = pluggy.HookimplMarker("anyaccel")


@hookspec(firstresult=True)
def anyaccel_info() -> PluginInfo:  # type: ignore[empty-body]
    """Return the identity of the plug-in.

    Called: once in each process, right after the plug-in was imported. Required. Pure.
    On error: the plug-in is reported as failed and left out.
    """


@hookspec(firstresult=True)
def anyaccel_detect(ctx: ProbeContext) -> Detected | None:
    """Find this vendor's devices on the machine of ``ctx``.

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
    """Return whether several holders may share a device.

    Called: for each detected device, after detection. Required. Pure.
    On error: the vendor is reported as failed.
    """


@hookspec(firstresult=True)
def anyaccel_tags(device: Device) -> Sequence[str]:  # type: ignore[empty-body]
    """Return the accelerator types of a device, most canonical first; requests ask by these names.

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
    """Return which devices an environment leaves visible: the inverse of ``anyaccel_env``.

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
    """Return the reason why the hardware cannot serve this term with exactly these devices.

    Called: once for each set of devices that placement considers; answers are kept. Sets of another size than
    ``PluginInfo.counts`` allows are refused without a call, so leave the hook out where numbers say it all. Optional.
    Pure.

    Returns:
        One sentence with the rule and the allowed quantities; None when the hardware can serve the term.
    Default: None.
    On error: the request is refused.
    """


@hookspec(firstresult=True)
def anyaccel_stats(devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:  # type: ignore[empty-body]
    """Return the present state of devices: load, memory, health.

    Called: by ``anyaccel status``, ``top``, ``metrics`` and :func:`anyaccel.stats`. Optional.

    Returns:
        Stats by device id. An unknown quantity is None; a device may be missing.
    Default: no stats.
    On error: no stats, and the problem is reported.
    """


@hookspec(firstresult=True)
def anyaccel_container(devices: Sequence[Device]) -> ContainerEdits:  # type: ignore[empty-body]
    """Return the edits by which exactly these devices work in a container or a sandbox.

    Called: on export and before a confined launch. Optional. Pure.
    Default: the device nodes of the devices.
    """


@hookspec(firstresult=True)
def anyaccel_handover(devices: Sequence[Device], ctx: ProbeContext, given: bool) -> None:
    """Change devices for their holder, or undo that: memory, a power cap, a partition, a control daemon.

    Called: on this host alone, with the rights of the caller, in a process that runs nothing else. First with ``given``
    false, to put the devices into their idle state, then with ``given`` true, before the holder starts; and with
    ``given`` false after the last holder of a share has ended. The state before a call is unknown: a holder may have
    been killed, and a call may have been interrupted and is repeated. So each call must set the whole state, and must
    not rely on an earlier call. Act through ``ctx.run`` and ``ctx.write``. Start a daemon through the machine's service
    manager: child processes end with the call. Optional.
    Default: nothing is changed.
    On error: before the start, the launch is refused and the change is undone. After the end, a warning is logged, and
    ``anyaccel doctor`` names the device until the next holder's first call succeeds.
    """


@hookspec(firstresult=True)
def anyaccel_diagnose(ctx: ProbeContext) -> Sequence[Finding]:  # type: ignore[empty-body]
    """Find faults of this vendor's installation: driver, permissions, rival variables, orphaned memory.

    Called: by ``anyaccel doctor``. Optional.

    Returns:
        Findings, each with one way out.
    Default: nothing is found.
    """


@hookspec(firstresult=True)
def anyaccel_products() -> Sequence[Product]:  # type: ignore[empty-body]
    """List the known products.

    Called: for simulation, completion and documentation. Optional. Pure.
    Default: no product is known.
    """


HOOKS = tuple(name for name in globals() if name.startswith("anyaccel_"))
"""Names of all hooks."""
