"""Hold a worker to memory, of the host and of its devices, by a cgroup of its own.

The rules are the kernel's, Documentation/admin-guide/cgroup-v2.rst: ``memory.max`` and ``memory.swap.max`` hold the
memory of the host, ``dmem.max`` that of a device, one line ``region bytes`` each.
"""

from __future__ import annotations

import os

from anyaccel.errors import EnforcementError, UsageError
from anyaccel.launcher.environment import WorkerEnvironment, WorkerGroup, amended, with_shares
from anyaccel.linux import cgroup
from anyaccel.linux.cgroup import UnavailableError
from anyaccel.model import Share, replace
from anyaccel.text import size

DMEM = "cgroup dmem"
"""What holds the memory of a share that has a limit of the controller ``dmem``."""

_LEAST = 1 << 20


def amount(memory: object) -> int:
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
    :func:`anyaccel.linux.cgroup.enter`, :func:`remove_group` and :func:`anyaccel.launcher.start.start_marked`.

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
    host = {} if memory is None else {"memory.max": str(memory), cgroup.SWAP: "0"}
    most: dict[str, int] = {}
    for region, held in made.regions.values():
        most[region] = most.get(region, 0) + held
    devices = {"dmem.max": "\n".join(f"{region} {held}" for region, held in most.items())} if most else {}
    unlimited = ""
    for limits in filter(None, (host | devices, host) if devices else (host,)):
        try:
            path, before = cgroup.make(limits, None if direct else made.values)
        except (OSError, UnavailableError) as error:
            if limits is host:
                raise _cannot(error) from error
            unlimited = str(error)
        else:
            made = replace(made, unlimited=unlimited)
            return _said(made, WorkerGroup(path=path, before=before), memory, dmem=limits is not host)
    return replace(made, unlimited=unlimited)


def remove_group(group: WorkerGroup) -> str:
    """Remove a group that nothing runs in any more; else whoever makes the next one beside it does.

    Returns:
        Why the kernel has killed something in it; empty where it did not.
    """
    most = cgroup.remove(group.path)
    if most is None:
        return ""
    return f"it took more than its {most} bytes of the host's memory (memory=), for which the kernel killed it"


def _cannot(error: OSError | UnavailableError) -> EnforcementError:
    remedy = getattr(error, "remedy", "look at that directory's owner and at what the kernel's log (dmesg) says")
    return EnforcementError(f"the kernel cannot hold a worker to memory of the host: {error}", hint=remedy)


def _said(made: WorkerEnvironment, group: WorkerGroup, memory: int | None, *, dmem: bool) -> WorkerEnvironment:
    """Say what a group holds a worker to."""
    allocation = replace(made.allocation, host_memory_bytes=memory)
    if dmem:

        def held(share: Share) -> Share:
            here = share.device.id in made.regions and not share.whole
            return replace(share, memory_by=DMEM) if here else share

        allocation = with_shares(allocation, held)
    return replace(amended(made, allocation), group=group)
