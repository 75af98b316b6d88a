"""Whether devices are clean again after a worker's end, so that its successor finds them as it should.

A process is gone before its device memory is: drivers tear contexts down later, and now and then never. Where a vendor
can tell, its word decides when a device is free again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from anyaccel.inventory.machine import HOST
from anyaccel.inventory.observe import stats
from anyaccel.model import Device, Health, Inventory, Problem, Share, Stats

SLACK_SHARE = 0.01
"""Part of a device's memory by which its use may have grown, since drivers keep some for themselves."""
SLACK_BYTES = 64 << 20
"""The least that counts as grown."""
LOOK_SECONDS = 5.0
"""Time that each vendor may take to observe its devices once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dirty:
    """A device that a worker left in a state in which nobody else should get it.

    Attributes:
        device: The device.
        reason: What is wrong with it, in one sentence.
        fix: What to do about it.
    """

    device: Device
    reason: str
    fix: str


def take_baseline(
    shares: Sequence[Share],
    *,
    machine: str = HOST,
    timeout: float = LOOK_SECONDS,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Stats]:
    """Observe what a worker is about to get.

    Args:
        shares: What it will hold.
        machine: The machine, as its inventory names it.
        timeout: Seconds that each vendor may take.
        environ: The environment that the plug-ins see; that of this process when None.

    Returns:
        Stats by device id, without devices of which their vendor cannot tell whether they are in use.
    """
    found, _ = _observe(shares, machine, timeout, environ)
    return {
        device_id: seen
        for device_id, seen in found.items()
        if seen.memory_used_bytes is not None or seen.processes is not None
    }


def wait_until_clean(
    shares: Sequence[Share],
    baseline: Mapping[str, Stats],
    *,
    machine: str = HOST,
    pids: Collection[int] = (),
    seconds: float = 30.0,
    poll: float = 0.5,
    timeout: float = LOOK_SECONDS,
    environ: Mapping[str, str] | None = None,
) -> list[Dirty]:
    """Wait until the devices that a worker held are as it got them. Call it once its processes are gone.

    Args:
        shares: What it held.
        baseline: What :func:`take_baseline` found before it started. A device that is not in it is clean at once: its
            vendor cannot tell.
        machine: The machine, as its inventory names it.
        pids: Processes of the worker, as this process numbers them.
        seconds: How long to wait; with 0 there is one look.
        poll: Seconds between two looks.
        timeout: Seconds that each vendor may take for one look. The last one may end that much later than ``seconds``.
        environ: The environment that the plug-ins see; that of this process when None.

    Returns:
        Devices that are still not clean; they should be set aside, with the reason.
    """
    deadline = time.monotonic() + seconds
    left = [share for share in shares if share.device.id in baseline]
    while left:
        seen, problems = _observe(left, machine, timeout, environ)
        failed = {problem.vendor: problem for problem in problems}
        dirty = {
            share.device.id: found
            for share in left
            if (found := _judge(share, baseline, seen, failed.get(share.device.vendor), pids))
        }
        left = [share for share in left if share.device.id in dirty]
        if time.monotonic() + poll > deadline:
            return list(dirty.values())
        if left:
            time.sleep(poll)
    return []


def dirt(share: Share, before: Stats, now: Stats, pids: Collection[int] = ()) -> Dirty | None:
    """Decide whether a device is as its worker got it.

    Three things can be wrong with it: a process of the worker still uses it, memory is in use that no process accounts
    for, or it is broken. What others use counts against nobody; where a device is shared and its vendor does not list
    processes, its memory says nothing.

    Args:
        share: What the worker held.
        before: What its vendor told before the worker started.
        now: What it tells after its end.
        pids: Processes of the worker.

    Returns:
        What is wrong, or None when the device is clean.
    """
    device = share.device
    if now.health is Health.UNHEALTHY:
        reason, _, way_out = (now.health_reason or "it is broken; the vendor gives no reason").partition("; ")
        return Dirty(device=device, reason=reason, fix=way_out or _RESET)
    users = [process.pid for process in now.processes or () if process.pid in pids]
    if users:
        listed = " and ".join(str(pid) for pid in users)
        many = len(users) > 1
        reason = f"process{'es' * many} {listed} of the worker still use{'s' * (not many)} it"
        fix = f"end {'them' if many else 'it'} (kill -9 {' '.join(map(str, users))}); {_RESET}"
        return Dirty(device=device, reason=reason, fix=fix)
    grown = _growth(share, before, now)
    slack = max(SLACK_BYTES, int((device.memory_bytes or 0) * SLACK_SHARE))
    if grown is None or grown <= slack:
        return None
    reason = f"{grown / 2**30:.1f} GiB more are in use than before the worker, and no process accounts for them"
    return Dirty(device=device, reason=reason, fix=_RESET)


_RESET = "when no process is left that uses the device, reset it with the vendor's tool; see 'anyaccel doctor'"


def _judge(
    share: Share,
    baseline: Mapping[str, Stats],
    seen: Mapping[str, Stats],
    problem: Problem | None,
    pids: Collection[int],
) -> Dirty | None:
    device = share.device
    if device.id in seen:
        return dirt(share, baseline[device.id], seen[device.id], pids)
    if problem is not None:
        return Dirty(device=device, reason=f"nobody can tell: {problem.reason}", fix=problem.next_step)
    return Dirty(device=device, reason="its vendor tells nothing of it any more", fix="see 'anyaccel doctor'")


def _growth(share: Share, before: Stats, now: Stats) -> int | None:
    """Bytes that are in use without an owner, and were not before; None when that is not known."""
    if share.device.attributes.get("unified_memory"):  # it is the host's memory, which everybody uses
        return None
    unowned = _unowned(now, share)
    if unowned is None or before.memory_used_bytes is None:
        return None
    known_before = _unowned(before, share)
    return unowned - (before.memory_used_bytes if known_before is None else known_before)


def _unowned(seen: Stats, share: Share) -> int | None:
    """Bytes that no listed process holds; without a list, all of a device that nobody else holds."""
    if seen.memory_used_bytes is None:
        return None
    if seen.processes is None:
        return seen.memory_used_bytes if share.whole else None
    held = [process.memory_bytes for process in seen.processes]
    return None if None in held else max(0, seen.memory_used_bytes - sum(filter(None, held)))


def _observe(
    shares: Sequence[Share], machine: str, timeout: float, environ: Mapping[str, str] | None
) -> tuple[dict[str, Stats], tuple[Problem, ...]]:
    devices = tuple(share.device for share in shares)
    return stats(Inventory(machine=machine, devices=devices), timeout=timeout, environ=environ)
