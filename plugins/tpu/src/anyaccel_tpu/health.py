"""What can be known about TPU chips from outside the process that holds them, and what is wrong with them here.

Memory in use, load, temperature and power are known to libtpu inside the running workload alone, behind a gRPC
service of its own; without it they are unknown, and unknown they stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from anyaccel.plugin import (
    Detected,
    Device,
    DeviceProcess,
    Finding,
    Health,
    ProbeContext,
    QueryError,
    Severity,
    Stats,
)

from anyaccel_tpu import detection
from anyaccel_tpu.environment import CHIP_BOUNDS, MASKS, PATHS, PROCESS_BOUNDS
from anyaccel_tpu.products import by_key

HOLDERS = "proc/holders"
LOCK_FILE = "/tmp/libtpu_lockfile"  # noqa: S108 - the name is libtpu's
_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
_FIRST_PID_NAMESPACE = "pid:[4026531836]"


def stats(devices: Sequence[Device], ctx: ProbeContext) -> dict[str, Stats]:
    """Say who holds each chip and whether its nodes are still there (they go after a driver restart: jax#13260).

    A chip counts as held by nobody only where every process of the machine could be looked at.
    """
    answer = _holders(ctx, devices)
    found = {}
    for device in devices:
        gone = [path for path in device.nodes if ctx.node(path) is None]
        found[device.id] = Stats(
            health=Health.UNHEALTHY if gone or device.health is Health.UNHEALTHY else device.health,
            health_reason=f"{' and '.join(gone)} is gone; restart the TPU VM" if gone else device.health_reason,
            processes=_processes(device, answer),
        )
    return found


def scan(nodes: frozenset[str], proc: str = "/proc") -> dict[str, Any]:
    """Look for processes that have a node open, as Google's ``tpu-info`` does.

    Args:
        nodes: Paths of device nodes.
        proc: Where the process file system is mounted.

    Returns:
        ``holders``: process ids by node; ``complete``: whether every process of the machine could be looked at.
    """
    import os

    holders: dict[str, list[int]] = {}
    try:
        complete = os.readlink(f"{proc}/self/ns/pid") == _FIRST_PID_NAMESPACE
    except OSError:
        complete = False
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdecimal()):
        try:
            targets = {os.readlink(f"{proc}/{pid}/fd/{number}") for number in os.listdir(f"{proc}/{pid}/fd")}
        except PermissionError:
            complete = False
            continue
        except OSError:  # it ended, or closed a file, while we looked
            targets = set(_slowly(f"{proc}/{pid}/fd"))
        for node in sorted(targets & nodes):
            holders.setdefault(node, []).append(pid)
    return {"holders": holders, "complete": complete}


def _slowly(directory: str) -> Iterator[str]:
    """The targets of those open files that are still open."""
    import os

    try:
        numbers = os.listdir(directory)
    except OSError:
        return
    for number in numbers:
        try:
            yield os.readlink(f"{directory}/{number}")
        except OSError:
            continue


def _holders(ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Any]:
    nodes = frozenset(path for device in devices for path in device.nodes)
    try:
        answer: Mapping[str, Any] = ctx.query(HOLDERS, lambda: scan(nodes))
    except QueryError:
        return {"holders": {}, "complete": False}
    return answer


def _processes(device: Device, answer: Mapping[str, Any]) -> tuple[DeviceProcess, ...] | None:
    pids = sorted({pid for path in device.nodes for pid in answer["holders"].get(path, ())})
    if not device.nodes or not (pids or answer["complete"]):
        return None
    return tuple(DeviceProcess(pid=pid) for pid in pids)


def diagnose(ctx: ProbeContext) -> list[Finding]:
    """Look for what keeps TPU chips from working here."""
    detected = detection.detect(ctx)
    if detected is None:
        return []
    return [
        *_chips(detected),
        *_variables(ctx.environ),
        *_bounds(ctx.environ, len(detected.devices)),
        *_slice(ctx.environ, detected),
        *_lock(ctx, detected.devices),
        *_pages(ctx, detected.devices),
    ]


def _chips(detected: Detected) -> Iterator[Finding]:
    for device in detected.devices:
        if device.health is Health.UNHEALTHY:
            message, _, fix = device.health_reason.partition("; ")
            yield Finding(severity=Severity.FAIL, reason=f"{device.id}: {message}", remedy=fix)
    for note in detected.notes:
        message, _, fix = note.partition("; ")
        yield Finding(severity=Severity.WARN, reason=message, remedy=fix)


def _variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    for newer, older in (MASKS, CHIP_BOUNDS, PROCESS_BOUNDS):
        if environ.get(newer) and environ.get(older) and environ[newer] != environ[older]:
            yield Finding(
                severity=Severity.WARN,
                reason=f"{newer}={environ[newer]} and {older}={environ[older]} name one setting and differ",
                remedy=f"unset {older}",
            )
    if environ.get(PATHS) and any(environ.get(name) for name in MASKS):
        yield Finding(
            severity=Severity.WARN,
            reason=f"{PATHS} is set beside {MASKS[0]} and wins over it",
            remedy=f"unset {PATHS}",
        )


def _bounds(environ: Mapping[str, str], count: int) -> Iterator[Finding]:
    for name in CHIP_BOUNDS:
        parts = [part.strip() for part in environ.get(name, "").split(",")]
        if all(part.isdecimal() for part in parts) and prod(map(int, parts)) > count:
            yield Finding(
                severity=Severity.WARN,
                reason=f"{name}={environ[name]} announces more chips than the {count} of this host",
                remedy=f"replace the host if a chip is missing, else unset {name}",
            )


def _slice(environ: Mapping[str, str], detected: Detected) -> Iterator[Finding]:
    names = [name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip()]
    hosts = detected.devices[0].attributes.get("slice_hosts") if detected.devices else None
    if names and isinstance(hosts, int) and len(names) != hosts and names != ["localhost"]:
        yield Finding(
            severity=Severity.WARN,
            reason=f"the slice has {hosts} hosts and TPU_WORKER_HOSTNAMES names {len(names)}",
            remedy="start one worker on every host of the slice, all together",
        )


def _lock(ctx: ProbeContext, devices: Sequence[Device]) -> Iterator[Finding]:
    """A lock file without a holder keeps the next process out (jax#10192); with one, it does its work."""
    if not ctx.exists(LOCK_FILE):
        return
    answer = _holders(ctx, devices)
    if answer["holders"]:
        return
    fix = f"rm {LOCK_FILE}"
    if not answer["complete"]:
        nodes = " ".join(path for device in devices for path in device.nodes)
        fix = f"if 'sudo fuser -v {nodes}' shows no holder: {fix}"
    yield Finding(severity=Severity.WARN, reason=f"{LOCK_FILE} was left behind and no process holds a chip", remedy=fix)


def _pages(ctx: ProbeContext, devices: Sequence[Device]) -> Iterator[Finding]:
    generation = by_key(devices[0].attributes.get("generation")) if devices else None
    setting = ctx.read(_HUGE_PAGES)
    if generation is not None and generation.vfio and setting is not None and "[always]" not in setting:
        yield Finding(
            severity=Severity.WARN,
            reason=f"transparent huge pages are not always on, which makes {generation.model} start slowly",
            remedy=f"echo always | sudo tee {_HUGE_PAGES}",
        )
