"""Hold a worker to memory, of the host and of its devices, by a cgroup of its own.

The rules are the kernel's, Documentation/admin-guide/cgroup-v2.rst: ``memory.max`` and ``memory.swap.max`` hold the
memory of the host, ``dmem.max`` that of a device, one line ``region bytes`` each.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from anyaccel.errors import AnyaccelError, EnforcementError, UsageError
from anyaccel.launcher.environment import Group, WorkerEnvironment, amended
from anyaccel.launcher.launch import prepare
from anyaccel.linux import cgroup
from anyaccel.linux.cgroup import UnavailableError
from anyaccel.model import Finding, Grant, Inventory, Severity, replace
from anyaccel.probe import HOST
from anyaccel.text import listed, size

DMEM = "cgroup dmem"
"""What holds the memory of a share that has a limit of the controller ``dmem``."""

_LEAST = 1 << 20


def amount(memory: int | str) -> int:
    """Read how much of the host's memory somebody may use, in bytes.

    Raises:
        UsageError: When it is no amount, or less than 1 MiB, with which no program starts.
    """
    try:
        found: object = size(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise UsageError(f"memory {error}") from None
    if isinstance(found, bool) or not isinstance(found, int) or found < _LEAST:
        raise UsageError(f"memory must be at least 1MiB, in bytes or as a text such as '8GiB' (got {memory!r:.60})")
    return found


def check(*, direct: bool = False) -> None:
    """Make sure, before anybody waits for devices, that the kernel can hold a worker to memory of the host.

    Args:
        direct: As of :func:`limited`.

    Raises:
        EnforcementError: When it cannot.
    """
    try:
        cgroup.find_place({"memory"}, None if direct else os.environ)
    except (OSError, UnavailableError) as error:
        raise _cannot(error) from error


def limited(made: WorkerEnvironment, memory: int | None = None, *, direct: bool = False) -> WorkerEnvironment:
    """Make the group of a worker that is about to be started.

    Whoever starts it puts it there first, and removes the group when it is gone: see
    :func:`anyaccel.linux.cgroup.enter`, :func:`remove` and :func:`anyaccel.launcher.start.start_marked`.

    Args:
        made: The environment of the worker. Its ``regions`` are limited where the kernel lets us, else its shares stay
            by agreement, and ``unlimited`` of the result says why.
        memory: Bytes of the host's memory that the kernel is to leave it.
        direct: Whether the worker is forked by this process or by its fork server, and cannot go through a program.

    Returns:
        The environment, with the group, and with what it holds the worker to.

    Raises:
        EnforcementError: When ``memory`` is given and cannot be held.
    """
    if memory is None and not made.regions:
        return made
    host = {} if memory is None else {"memory.max": str(memory), cgroup.SWAP: "0"}
    through = None if direct else made.values
    unlimited = ""
    if made.regions:
        most: dict[str, int] = {}
        for region, held in made.regions.values():
            most[region] = most.get(region, 0) + held
        devices = {"dmem.max": "\n".join(f"{region} {held}" for region, held in most.items())}
        try:
            path, before = cgroup.make(host | devices, through)
        except (OSError, UnavailableError) as error:
            unlimited = str(error)
        else:
            return _said(made, Group(path=path, before=before), memory, dmem=True)
    if not host:
        return replace(made, unlimited=unlimited)
    try:
        path, before = cgroup.make(host, through)
    except (OSError, UnavailableError) as error:
        raise _cannot(error) from error
    return _said(replace(made, unlimited=unlimited), Group(path=path, before=before), memory, dmem=False)


def remove(group: Group) -> str:
    """Remove a group that nothing runs in any more; else whoever makes the next one beside it does.

    Returns:
        Why the kernel has killed something in it; empty where it did not.
    """
    most = cgroup.remove(group.path)
    if most is None:
        return ""
    return f"it took more than its {most} bytes of the host's memory (memory=), for which the kernel killed it"


def diagnose(inventory: Inventory) -> Iterator[Finding]:
    """Say where the kernel could hold shares to memory of devices and this user is not let. Changes nothing.

    Args:
        inventory: The machine.
    """
    if inventory.machine != HOST or not (shared := _countable(inventory)):
        return
    try:
        cgroup.find_place({"dmem"}, os.environ)
    except (OSError, UnavailableError) as error:
        reason = (
            f"the kernel can hold shares of {listed(shared)} to their memory, and this user may not let it: {error}"
        )
        yield Finding(severity=Severity.WARN, reason=reason, remedy=_delegation() or getattr(error, "remedy", ""))


def _countable(inventory: Inventory) -> list[str]:
    """Devices whose memory the kernel counts, and whose plug-in says what it calls that."""
    regions = cgroup.device_regions()
    found = []
    for device in inventory.devices if regions else ():
        with contextlib.suppress(AnyaccelError):  # no shares of it are given out
            made = prepare(f"{device.name}:0.5", inventory=inventory).environment
            if any(region in regions for region, _ in made.regions.values()):
                found.append(device.name)
    return found


def _delegation() -> str:
    """The command with which root gives the controller to the user's own systemd; empty where there is none."""
    above = cgroup.controls_above_home()
    return f"once per boot: echo +dmem | sudo tee {' '.join(above)}" if above else ""


def _cannot(error: OSError | UnavailableError) -> EnforcementError:
    remedy = getattr(error, "remedy", "look at that directory's owner and at what the kernel's log (dmesg) says")
    return EnforcementError(f"the kernel cannot hold a worker to memory of the host: {error}", hint=remedy)


def _said(made: WorkerEnvironment, group: Group, memory: int | None, *, dmem: bool) -> WorkerEnvironment:
    """Say what a group holds a worker to."""
    allocation = replace(made.allocation, host_memory_bytes=memory)
    if dmem:
        grants = []
        for grant in allocation.grants:
            shares = (
                replace(share, memory_by=DMEM) if share.device.id in made.regions and not share.whole else share
                for share in grant.shares
            )
            grants.append(Grant(term=grant.term, shares=tuple(shares)))
        allocation = replace(allocation, grants=tuple(grants))
    return replace(amended(made, allocation), group=group)
