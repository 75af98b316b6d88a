"""Leases on behalf of processes that another program starts, such as a container runtime."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from anyaccel.errors import LeaseNotFoundError, UsageError
from anyaccel.launcher.hold import DeviceLease, LeaseRequest, find_machine
from anyaccel.launcher.launch import AcquireOptions, check_options
from anyaccel.launcher.open_lease import Handover, plan_handover
from anyaccel.launcher.verdicts import leases
from anyaccel.ledger import LeaseRecord, Ledger, Tenure, make_tenure
from anyaccel.linux import group_inode
from anyaccel.model import Device, Inventory, Request, Share, replace
from anyaccel.scheduler import share

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Unpack

    from anyaccel.ledger import Lease

    _Where = tuple[Inventory, Mapping[str, str]]
    """The machine of a lease, and the environment of its program."""


class LeaseOnBehalf:
    """A lease that no process holds: it outlives the program that took it.

    The lease is active until the time of the acquisition or last renewal is over, and beyond that while one of its
    control groups has processes. :meth:`release` ends it at once.

    Attributes:
        id: Identity of the lease, as in ``anyaccel status``.
        key: Identity of the use, given by the program.
        shares: The leased shares of devices.
    """

    def __init__(self, lease_id: str, key: str, shares: Sequence[Share], where: _Where) -> None:
        self.id, self.key, self.shares = lease_id, key, tuple(shares)
        self._inventory, self._environ = where

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the shares."""
        return tuple(share.device for share in self.shares)

    def renew(self, seconds: float, groups: Iterable[str] = (), *, note: str | None = None) -> None:
        """Keep the lease for a time from now on, even if more time was left; the control groups are replaced, too.

        Args:
            seconds: Seconds until the lease ends, unless renewed or kept by a control group.
            groups: Paths of the control groups (cgroup v2) below the root of the hierarchy, in place of the former
                ones: without paths, no group is left. Missing groups are left out.
            note: The purpose, shown to other users; None leaves it as it is.

        Raises:
            LeaseNotFoundError: If the lease has ended, or may have counted as ended during the call, which then removes
                the lease's files. Also after a fallback to the CPU.
            LeasePermissionError: If the lease belongs to another user, also for root.
            LedgerError: If the ledger cannot be read or written, or stays locked.
            UsageError: If a value is out of range.
        """
        Ledger.open(self._environ).renew(self.id, _make_tenure(self.key, seconds, groups), note=note)

    def release(self) -> None:
        """End the lease, even if processes still use the devices; a lease that has ended is no error.

        Vendors that have changed the devices for the holder undo the change, also after an error, unless the devices
        are in an active lease; a failure is logged as a warning.

        Raises:
            LeasePermissionError: If the lease belongs to another user, also for root.
            LedgerError: If the ledger cannot be read or written. Also if the lease has ended, but a process keeps the
                lock on a device itself.
            OSError: If the lease has ended, but no descriptor is free to unlock a device itself.
            UsageError: If the variable of the lease around this process is invalid; the lease goes on.
        """
        handover = self.plan_handover()  # before the end: an error here must not keep the vendors from undoing
        try:
            Ledger.open(self._environ).drop_lease(self.id)
        except LeaseNotFoundError:
            return
        finally:
            # Also after an error: the lease may have ended all the same. Devices of an active lease are left out.
            if handover is not None:
                handover.take_back()

    def plan_handover(self) -> Handover | None:
        """Return the handover of the devices by the vendors that change them; None for none.

        Raises:
            LedgerError: If the ledger cannot be opened.
            UsageError: If the variable of the lease around this process is invalid.
        """
        return plan_handover(self.id, self.devices, self._inventory, self._environ)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.key}: {', '.join(device.id for device in self.devices)}>"


def acquire_on_behalf(
    request: str | Sequence[str] | Request,
    key: str,
    *,
    seconds: float,
    groups: Iterable[str] = (),
    **options: Unpack[AcquireOptions],
) -> LeaseOnBehalf:
    """Lease devices for processes that another program starts; this process may end, and the lease goes on.

    A program that is killed at any moment asks again with the same key, and gets the lease that it has: no device is
    held twice, and none is lost.

    Args:
        request: The request; :func:`anyaccel.request_devices` makes one for given devices.
        key: Identity of the use, such as the identity of a pod: an active lease of this user with this key is returned
            without a comparison with the request, and not renewed; only an interrupted handover is completed.
        seconds: Seconds from the acquisition until the lease ends, unless :meth:`LeaseOnBehalf.renew` postpones the
            end.
        groups: Paths of control groups (cgroup v2) below the root of the hierarchy: after ``seconds``, the lease lasts
            while a group has processes. Missing groups are left out.
        options: As for :func:`anyaccel.acquire`, without ``memory`` and ``enforce``; ``wait`` is 0 by default.

    Returns:
        The lease. If the request fell back to the CPU, the lease has no id and no devices, and is not kept.

    Raises:
        RequestError, UnknownNameError: If the request is invalid.
        UnknownOptionError, UsageError: If there is no such option, its value is invalid, or only a process that this
            one starts could be held to it; if ``key``, ``seconds`` or the number of groups is out of range.
        NeverFitsError, NotFreeError: If the devices are not available, or not in time.
        DeadlockError: As for :func:`anyaccel.acquire`.
        LedgerError: If leases cannot be kept on this machine, or the request was cancelled. Also if the ledger cannot
            be read once this process has left the lease to the others: then the lease goes on, and the next call with
            the key returns it.
        EnvConflictError, PluginError: If the environment cannot be made, or a vendor cannot change the devices.

    Examples:
        >>> lease = anyaccel.acquire_on_behalf("GPU:1", "pod 7", seconds=600, machine="sim:H100:2")
        >>> anyaccel.acquire_on_behalf("GPU:1", "pod 7", seconds=600, machine="sim:H100:2").id == lease.id
        True
        >>> lease.renew(600)
        >>> lease.release()
    """
    check_options("acquire_on_behalf", options, AcquireOptions.__annotations__)
    for name in ("memory", "enforce"):
        if options.get(name) not in (None, False):
            raise UsageError(
                f"{name} applies to processes that are started here, and another program starts those of this lease",
                hint="have that program limit and confine them, and give confined=True if it does",
            )
    paths = tuple(groups)
    _make_tenure(key, seconds, paths)  # before the request waits
    options.setdefault("wait", 0)
    inventory, environ = find_machine(options)
    for lease in find_on_behalf(inventory, environ):
        if lease.key == key:
            if (handover := lease.plan_handover()) is not None:
                handover.give()  # completes that of a taker which was killed before
            return lease
    options["inventory"] = inventory
    asked = LeaseRequest(request, None, options)
    asked.want = replace(asked.want, tenure=lambda: _make_tenure(key, seconds, paths))

    def leave(lease: DeviceLease) -> LeaseOnBehalf:
        held: Lease | None = lease.lease
        if held is not None:
            held.leave_to(())
        # Plain shares, as :func:`find_on_behalf` returns them: limits are set where the processes start.
        shares = [share(each.device, each.units, each.slots) for each in lease.allocation.shares]
        return LeaseOnBehalf(lease.id, key, shares, (inventory, environ))

    return asked.get(asked.plan_lease, leave)


def find_on_behalf(inventory: Inventory, environ: Mapping[str, str] | None = None) -> tuple[LeaseOnBehalf, ...]:
    """Return the active leases of this user on behalf of other processes, with devices of a machine.

    Shares of unlisted devices are left out, and so are leases without a listed device. Without a state directory, the
    result is empty.

    Args:
        inventory: The machine.
        environ: The environment, which may name the state directory; that of this process if None.

    Raises:
        LedgerError: If the ledger cannot be read.
        UsageError: If the variable of the lease around this process is invalid.
    """
    environ = os.environ if environ is None else environ
    devices = {device.id: device for device in inventory.devices}
    found: dict[str, list[LeaseRecord]] = {}
    for record in leases(inventory, environ):
        if record.key and record.uid == os.geteuid() and not record.through and record.device in devices:
            found.setdefault(record.id, []).append(record)
    return tuple(
        LeaseOnBehalf(
            lease_id,
            records[0].key,
            [share(devices[each.device], each.units, each.slots) for each in records],
            (inventory, environ),
        )
        for lease_id, records in found.items()
    )


def _make_tenure(key: str, seconds: float, groups: Iterable[str]) -> Tenure:
    """Make a tenure that begins now, with the control groups that exist.

    Raises:
        UsageError: If a value is out of range; missing groups do not count.
    """
    found = ((path, inode) for path in groups if (inode := group_inode(path)) is not None)
    return make_tenure(key, seconds, tuple(found))
