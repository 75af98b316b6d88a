"""Limit the host and device memory of a worker by a cgroup.

The rules are the kernel's, Documentation/admin-guide/cgroup-v2.rst: ``memory.max`` and ``memory.swap.max``
limit memory of the host, ``dmem.max`` memory of devices, with a line ``region bytes`` for each.
"""

from __future__ import annotations

import os

from anyaccel.errors import EnforcementError, UsageError
from anyaccel.launcher.environment import WorkerEnvironment, WorkerGroup, map_shares
from anyaccel.linux import cgroup
from anyaccel.linux.cgroup import UnavailableError
from anyaccel.model import Share, replace
from anyaccel.text import size

DMEM = "cgroup dmem"
"""Name of the enforcement of a share whose memory the cgroup controller ``dmem`` limits."""

_LEAST = 1 << 20


def parse_memory(memory: object) -> int:
    """Parse a limit of host memory, and return bytes.

    Args:
        memory: Bytes, or a text such as ``"8GiB"``.

    Raises:
        UsageError: If it is no amount, or less than 1 MiB, with which no program starts.
    """
    try:
        found: object = size(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise UsageError(f"memory {error}") from None
    # bool is an int: memory=True would be one byte.
    if isinstance(found, bool) or not isinstance(found, int) or found < _LEAST:
        raise UsageError(f"memory must be at least 1MiB, in bytes or as a text such as '8GiB' (got {memory!r:.60})")
    return found


def check_memory_limit(*, direct: bool = False) -> None:
    """Check that the kernel can limit the host memory of a worker.

    Args:
        direct: As for :func:`limit_memory`.

    Raises:
        EnforcementError: If the kernel cannot.
    """
    try:
        cgroup.find_place({"memory"}, None if direct else os.environ)
    except (OSError, UnavailableError) as error:
        raise _make_error(error) from error


def limit_memory(made: WorkerEnvironment, memory: int | None = None, *, direct: bool = False) -> WorkerEnvironment:
    """Make the cgroup of a worker before the start; without limits that the kernel permits, no group is made.

    The caller starts the worker in the group, and removes the group after the exit of the worker: see
    :func:`anyaccel.linux.cgroup.enter`, :func:`remove_group` and :func:`anyaccel.launcher.start.start_marked`.

    Args:
        made: The environment of the worker. Its ``regions`` are limited if the kernel permits. Otherwise its shares
            stay by agreement, and ``unlimited`` of the result says why.
        memory: Limit of host memory, in bytes, with swap forbidden; None for no limit.
        direct: Whether this process or its fork server forks the worker, so that no wrapper program can run first.

    Returns:
        The environment with the group, and with the limits in its allocation and the worker's variable. Without a
        group, the environment with ``unlimited`` alone changed.

    Raises:
        EnforcementError: If ``memory`` is given and the kernel cannot limit it.
    """
    host = {} if memory is None else {"memory.max": str(memory), cgroup.SWAP: "0"}
    most: dict[str, int] = {}
    for region, held in made.regions.values():
        most[region] = most.get(region, 0) + held
    devices = {"dmem.max": "\n".join(f"{region} {held}" for region, held in most.items())} if most else {}
    unlimited = ""
    # A kernel without the controller dmem can still limit host memory: the second attempt leaves devices out.
    for limits in filter(None, (host | devices, host) if devices else (host,)):
        try:
            path, before = cgroup.make(limits, None if direct else made.values)
        except (OSError, UnavailableError) as error:
            if limits is host:
                raise _make_error(error) from error
            unlimited = str(error)
        else:
            made = replace(made, unlimited=unlimited)
            return _add_group(made, WorkerGroup(path=path, before=before), memory, dmem=limits is not host)
    return replace(made, unlimited=unlimited)


def remove_group(group: WorkerGroup) -> str:
    """Remove an empty cgroup; with a process inside, the maker of the next cgroup does so later. Errors are ignored.

    Returns:
        A clause with the limit of host memory, if the kernel killed a process in the group because of the limit; else
        empty.
    """
    most = cgroup.remove(group.path)
    if most is None:
        return ""
    return f"it exceeded its limit of {most} bytes of host memory (memory=), and the kernel killed it"


def _make_error(error: OSError | UnavailableError) -> EnforcementError:
    """Make the error about a failed limit of host memory; the hint is an :class:`UnavailableError`'s, else general."""
    remedy = getattr(error, "remedy", "look at that directory's owner and at what the kernel's log (dmesg) says")
    return EnforcementError(f"the kernel cannot limit the host memory of a worker: {error}", hint=remedy)


def _add_group(made: WorkerEnvironment, group: WorkerGroup, memory: int | None, *, dmem: bool) -> WorkerEnvironment:
    """Return the environment with a group, and with the limits in the allocation and in its variable.

    Args:
        made: The environment.
        group: The group.
        memory: Limit of host memory in bytes; None for no limit.
        dmem: Whether the group limits device memory: it then enforces the shares of devices in ``regions``.
    """
    allocation = replace(made.allocation, host_memory_bytes=memory)
    if dmem:

        def held(share: Share) -> Share:
            here = share.device.id in made.regions and not share.whole
            return replace(share, memory_by=DMEM) if here else share

        allocation = map_shares(allocation, held)
    return replace(made.with_allocation(allocation), group=group)
