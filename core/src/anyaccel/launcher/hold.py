"""Hold devices, so that no other process on this machine gets them, with the environment that shows exactly these."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self

from anyaccel.errors import DevicesBusyError, NeverFitsError, NotFreeError
from anyaccel.inventory.current import LEASE_VARIABLE, current
from anyaccel.inventory.machine import HOST
from anyaccel.launcher.busy import Foreign
from anyaccel.launcher.environment import worker_environment
from anyaccel.launcher.launch import KnownNames, Launch, open_scheduler, survey, validate
from anyaccel.ledger import Lease, LeaseRecord, Ledger, OnWait, Want
from anyaccel.model import UNITS_PER_DEVICE, Allocation, Device, Grant, Inventory, Request
from anyaccel.scheduler import Choice, Verdict, parse_request

SYSFS_PCI = "/sys/bus/pci/devices"


class Hold:
    """Devices that are held until they are given back, or until the last process that carries the lease has ended.

    Attributes:
        launch: The inventory, and the environment of a worker that sees exactly these devices.
        lease: The lease; None when nothing is held, since the request fell back to the CPU.
    """

    def __init__(self, launch: Launch, lease: Lease | None) -> None:
        self.launch = launch
        self.lease = lease

    @property
    def id(self) -> str:
        """Identity of the lease, as ``anyaccel status`` shows it; empty when nothing is held."""
        return self.lease.id if self.lease else ""

    @property
    def allocation(self) -> Allocation:
        """What is held."""
        return self.launch.environment.allocation

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, in the order in which a worker numbers them."""
        return self.allocation.devices

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment of a worker that sees exactly these devices; for ``subprocess`` and its like."""
        return self.launch.environment.values

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that carry the lease, for ``pass_fds``: then it lasts as long as the worker, whatever we do."""
        return self.lease.fds if self.lease else ()

    def release(self) -> None:
        """Give the devices back; does nothing the second time."""
        if self.lease:
            self.lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Hold {self.id or 'of nothing'}: {', '.join(device.id for device in self.devices) or 'CPU'}>"


def acquire(
    request: str | Sequence[str] | Request,
    *,
    wait: float | None = None,
    priority: int = 0,
    note: str = "",
    avoid_busy: bool = False,
    on_wait: OnWait | None = None,
    environ: Mapping[str, str] | None = None,
    **options: Any,
) -> Hold:
    """Hold devices, when it is our turn.

    Whoever asks later for the same devices, in any process of this machine, is served later.

    Args:
        request: What is wanted.
        wait: Seconds to wait; 0 to take what is free now or nothing, None to wait for as long as it takes.
        priority: The higher, the earlier; by agreement among users.
        note: What it is for, for people to read.
        avoid_busy: Whether devices that somebody uses without a lease are left alone.
        on_wait: Called with the place in line and with who holds the devices, when the wait begins and on change.
        environ: The environment to start from; that of this process when None.
        options: ``inventory``, ``machine``, ``declare``, ``timeout``, ``unallocated`` and ``mask`` as
            :func:`anyaccel.prepare` takes them, and ``confined``: whether the holder will be confined.

    Returns:
        The hold, to be released: use it in a ``with`` statement.

    Raises:
        RequestError, UnknownNameError: When the request is wrong.
        NeverFitsError: When this machine can never serve it.
        NotFreeError: When the devices were not free in time; says who holds them.
        LedgerError: When leases cannot be kept on this machine.
    """
    wish = _Wish(request, environ, avoid_busy=avoid_busy, **options)
    if wish.nothing:
        return wish.hold(None)
    terms: dict[str, Any] = {"wait": wait, "priority": priority, "note": note, "on_wait": wish.telling(on_wait)}
    try:
        return wish.hold(wish.ledger.acquire(wish.want, wish.choose, **terms))
    except DevicesBusyError as error:
        raise wish.not_free(error) from error


async def acquire_async(
    request: str | Sequence[str] | Request,
    *,
    wait: float | None = None,
    priority: int = 0,
    note: str = "",
    avoid_busy: bool = False,
    on_wait: OnWait | None = None,
    environ: Mapping[str, str] | None = None,
    **options: Any,
) -> Hold:
    """Hold devices like :func:`acquire`, on the running event loop; cancel the task to stop waiting.

    Detection, which takes a moment, runs in a thread.
    """
    import asyncio

    wish = await asyncio.to_thread(_Wish, request, environ, avoid_busy=avoid_busy, **options)
    if wish.nothing:
        return wish.hold(None)
    terms: dict[str, Any] = {"wait": wait, "priority": priority, "note": note, "on_wait": wish.telling(on_wait)}
    try:
        return wish.hold(await wish.ledger.acquire_async(wish.want, wish.choose, **terms))
    except DevicesBusyError as error:
        raise wish.not_free(error) from error


@dataclass(frozen=True, slots=True)
class Scope:
    """Under which names the ledger counts the devices of a machine.

    A host's devices go by their ids. Those of another machine, recorded or simulated, have names of their own. Inside
    a worker that holds a lease, what it holds is a machine of its own, whose devices are what it holds of them.
    """

    prefix: str
    units: Mapping[str, int]

    @classmethod
    def of(cls, inventory: Inventory, environ: Mapping[str, str]) -> Scope:
        """The scope of the process that has this environment."""
        prefix = "" if inventory.machine == HOST else f"{zlib.crc32(inventory.machine.encode()):08x}|"
        held = current(environ)
        if held is not None and held.id == environ.get(LEASE_VARIABLE):
            prefix += f"{held.id}|"
        return cls(prefix, {device.id: device.units for device in inventory.devices})

    @property
    def nested(self) -> bool:
        """Whether the devices are not those of this host as everybody sees them."""
        return bool(self.prefix)

    def key(self, device_id: str) -> str:
        """Name of a device in the ledger."""
        return self.prefix + device_id

    def to_ledger(self, grants: Iterable[Grant]) -> dict[str, int]:
        """What grants take, by name in the ledger: parts of what is ours, rounded up, so that shares never overlap."""
        units: dict[str, int] = {}
        for grant in grants:
            for share in grant.shares:
                units[share.device.id] = units.get(share.device.id, 0) + share.units
        return {self.key(each): -(-part * UNITS_PER_DEVICE // self.units[each]) for each, part in units.items()}

    def taken(self, taken: Mapping[str, int]) -> dict[str, int]:
        """Units that others hold of our devices, by device id, given what the ledger counts."""
        found = {}
        for key, units in taken.items():
            device_id = key[len(self.prefix) :]
            if key.startswith(self.prefix) and device_id in self.units:
                found[device_id] = -(-units * self.units[device_id] // UNITS_PER_DEVICE)
        return found

    def ours(self, records: Iterable[LeaseRecord]) -> tuple[LeaseRecord, ...]:
        """The leases of our devices, with the devices' own ids and units."""
        return tuple(
            replace(record, device=device_id, units=-(-record.units * self.units[device_id] // UNITS_PER_DEVICE))
            for record in records
            if record.device.startswith(self.prefix) and (device_id := record.device[len(self.prefix) :]) in self.units
        )


class _Wish:
    """One request on its way to a hold."""

    def __init__(
        self,
        request: str | Sequence[str] | Request,
        environ: Mapping[str, str] | None,
        *,
        avoid_busy: bool,
        confined: bool = False,
        unallocated: Literal["hide", "inherit"] = "hide",
        mask: Literal["id", "index"] = "id",
        **where: Any,
    ) -> None:
        self.request = parse_request(request)
        self.environ = os.environ if environ is None else environ
        self._confined = confined
        self.inventory = survey(environ=self.environ, **where)
        self._options: dict[str, Any] = {"environ": environ, "unallocated": unallocated, "mask": mask}
        self._grants: tuple[Grant, ...] = ()
        self._choice = Choice(self.inventory, self.request, validate, KnownNames())
        self.nothing = False
        if self._choice.choose({}) is None:
            self._give_up()
            return
        self.ledger = Ledger.open(self.environ)
        self._scope = Scope.of(self.inventory, self.environ)
        self._foreign = Foreign(self.inventory, self.request, self.environ, avoid_busy=avoid_busy)
        candidates = self._choice.candidates
        self.want = Want(
            candidates=frozenset(self._scope.key(device.id) for device in candidates),
            witnesses={} if self._scope.nested else witnesses(self.inventory, candidates),
            request=str(self.request),
            confined=confined,
        )

    def choose(self, taken: Mapping[str, int]) -> dict[str, int] | None:
        """Choose devices, by the ledger's names, among what is left."""
        leased = self._scope.taken(taken)
        grants = self._choice.choose(leased | self._foreign.taken(leased))
        if grants is None:
            return None
        self._grants = grants
        return self._scope.to_ledger(grants)

    def telling(self, on_wait: OnWait | None) -> OnWait | None:
        """The same with devices by their own ids."""
        return on_wait and (lambda place, records: on_wait(place, self._scope.ours(records)))

    def hold(self, lease: Lease | None) -> Hold:
        """Make the hold; gives the lease back when the environment cannot be made."""
        try:
            lease_id = lease.id if lease else ""
            allocation = Allocation(id=lease_id, request=self.request, grants=self._grants, confined=self._confined)
            environment = worker_environment(allocation, self.inventory, lease=lease_id, **self._options)
        except BaseException:
            if lease:
                lease.release()
            raise
        return Hold(Launch(inventory=self.inventory, environment=environment), lease)

    def not_free(self, error: DevicesBusyError) -> NotFreeError:
        """Say who has what was wanted."""
        verdict = _verdict(self.inventory, self.request, self.ledger, self.environ)
        behind = f" {error.ahead} asked for them before." if error.ahead else ""
        return NotFreeError(verdict.message + behind, verdict=verdict, hint=verdict.hint)

    def _give_up(self) -> None:
        verdict = open_scheduler(self.inventory).why(self.request)
        if not verdict.cpu:
            raise NeverFitsError(verdict.message, verdict=verdict, hint=verdict.hint)
        self.nothing = True


def why(
    request: str | Sequence[str] | Request,
    *,
    inventory: Inventory | None = None,
    environ: Mapping[str, str] | None = None,
    **where: Any,
) -> Verdict:
    """Say whether a request fits this machine, and now, given what every process on it holds; why not, and what would.

    Args:
        request: The request.
        inventory: The machine's inventory; detected when None.
        environ: Our environment; that of this process when None.
        where: ``machine``, ``declare`` and ``timeout`` as :func:`anyaccel.detect` takes them.

    Raises:
        RequestError, UnknownNameError: When the request is wrong.
        StateDirectoryError: When the ledger cannot be read.
    """
    environ = os.environ if environ is None else environ
    inventory = survey(inventory, environ=environ, **where)
    return _verdict(inventory, parse_request(request), Ledger.open(environ), environ)


def leases(inventory: Inventory, environ: Mapping[str, str] | None = None) -> tuple[LeaseRecord, ...]:
    """The leases of a machine's devices: one record for each device of each lease.

    Raises:
        StateDirectoryError: When the ledger cannot be read.
    """
    environ = os.environ if environ is None else environ
    return Scope.of(inventory, environ).ours(Ledger.open(environ).leases())


def _verdict(inventory: Inventory, request: Request, ledger: Ledger, environ: Mapping[str, str]) -> Verdict:
    scheduler = open_scheduler(inventory)
    by_lease: dict[str, list[LeaseRecord]] = {}
    for record in Scope.of(inventory, environ).ours(ledger.leases()):
        by_lease.setdefault(record.id or f"unknown-{len(by_lease)}", []).append(record)
    for lease, records in by_lease.items():
        units = {record.device: record.units for record in records}
        scheduler.occupy(units, holder=lease, note=holder(records[0]))
    return scheduler.why(request)


def holder(record: LeaseRecord) -> str:
    """Name who holds a device, since when and what for, for people."""
    words = record.note or record.request or record.command
    since = f", for {written(time.time() - record.since)}" if record.since is not None else ""
    return f"{record.user}, process {record.pid or 'unknown'}{since}" + (f", {words}" if words else "")


def written(seconds: float) -> str:
    """Write seconds for people, in the two largest units: ``2h14m``, ``8m05s``, ``12s``."""
    whole = max(0, int(seconds))
    for size, name, smaller, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{name}{whole % size // smaller:02d}{below}"
    return f"{whole}s"


def witnesses(inventory: Inventory, devices: Sequence[Device]) -> dict[str, tuple[str, ...]]:
    """Inodes of this host that stand for a device: its directory in sysfs, where no other device has the same one."""
    shared = [device.pci_bus_id for device in inventory.devices]
    return {
        device.id: (f"{SYSFS_PCI}/{device.pci_bus_id}",)
        for device in devices
        if device.pci_bus_id and device.parent is None and shared.count(device.pci_bus_id) == 1
    }
