"""Hold devices, so that no other process on this machine gets them, with the environment that shows exactly these."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from time import monotonic
from types import TracebackType
from typing import TypeVar

from anyaccel.errors import AnyaccelError, DeadlockError, DevicesBusyError, LimitError, NeverFitsError, NotFreeError
from anyaccel.inventory.contested import families, places
from anyaccel.inventory.current import LEASE_VARIABLE, current
from anyaccel.inventory.detect import survey
from anyaccel.launcher.busy import Foreign
from anyaccel.launcher.choosing import choice_of, local_scheduler, remembered
from anyaccel.launcher.environment import worker_environment
from anyaccel.launcher.launch import Launch, check_start, plan_launch
from anyaccel.launcher.usage import OpenLease
from anyaccel.launcher.waits import describe_wait, holder, log_wait, note_own, other_threads, own_leases
from anyaccel.ledger import Lease, LeaseRecord, Ledger, Want
from anyaccel.ledger.device_locks import DeviceLock
from anyaccel.ledger.names import device_name, vendor_and_id
from anyaccel.ledger.turns import rules
from anyaccel.linux import mark as marks
from anyaccel.model import (
    ANY_SLOTS,
    DIVIDED,
    NOTHING,
    UNITS_PER_DEVICE,
    Allocation,
    Device,
    Extent,
    Grant,
    Inventory,
    Request,
    Value,
    parts_of,
    replace,
    slot_mask,
)
from anyaccel.model.allocation import share_table
from anyaccel.model.verdict import ReasonCode
from anyaccel.policy import Need
from anyaccel.probe import HOST
from anyaccel.scheduler import Choice, Reason, Verdict, parse_request
from anyaccel.scheduler.choice import extent_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any, Self, Unpack

    from anyaccel.launcher.options import AcquireOptions
    from anyaccel.ledger.acquisition import Acquisition
    from anyaccel.policy import OverLimit

T = TypeVar("T")


class Hold(OpenLease):
    """Devices that are held until they are given back, or until the last process that was started with them has ended.

    Attributes:
        launch: The inventory, and the environment of a worker that sees exactly these devices.
    """

    def __init__(self, launch: Launch, lease: Lease | None, *, note: str = "", waited: float = 0.0) -> None:
        super().__init__(lease, launch.environment.allocation, note=note, waited=waited)
        self.launch = launch
        self._started: marks.Mark | None = None

    @property
    def id(self) -> str:
        """Identity of the lease, as ``anyaccel status`` shows it; empty when nothing is held."""
        return self.lease.id if self.lease else ""

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

    def popen(self, command: Sequence[str] | str, **options: Any) -> subprocess.Popen[Any]:
        """Start a command that sees exactly these devices, like :class:`subprocess.Popen`.

        It runs near them where they were taken with ``bind``, and within ``memory`` where that was given. They go back
        once the command has ended with all that it started, also when they are released before or this process dies.

        Args:
            command: The command and its arguments; a string with ``shell=True``.
            options: As of :class:`subprocess.Popen`. ``env`` is the environment of a worker with these devices unless
                it is given.

        Raises:
            OSError: When the command cannot be started.
        """
        if self._started is None:
            mark = self.lease.mark if self.lease else ()
            self._started = marks.draw(inside=mark) if mark and self._carried else mark
        return replace(self.launch, mark=self._started, fds=self.fds).popen(command, **options)

    def release(self) -> None:
        """Give the devices back, those of :meth:`popen` once that has ended; does nothing the second time."""
        self.give_back(self._started)
        self.unlimit()

    def unlimit(self) -> None:
        """Remove the cgroup of what was started with the devices, if nothing runs in it any more."""
        if self.launch.environment.group is not None:
            from anyaccel.launcher.limits import remove

            remove(self.launch.environment.group)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _repr_html_(self) -> str:
        """Show the devices in a notebook."""
        state = "released" if self._released else f"held as {self.id or 'nothing'}"
        return share_table(f"{self.allocation.request} {state}", () if self._released else self.allocation.shares)

    def __repr__(self) -> str:
        devices = ", ".join(device.id for device in self.devices) or "CPU"
        return f"<{type(self).__name__} {self.id or 'of nothing'}: {'released' if self._released else devices}>"

    @property
    def _released(self) -> bool:
        return self.lease is not None and self.lease.released


def acquire(request: str | Sequence[str] | Request, **options: Unpack[AcquireOptions]) -> Hold:
    """Hold devices, when it is our turn.

    Whoever asks later for the same devices, in any process of this machine, is served later. When this process dies,
    the devices are given out again once all that it has started since the first call has ended. :meth:`Hold.release`
    gives them back at once, except for what :meth:`Hold.popen` started.

    Args:
        request: What is wanted.
        wait: Seconds to wait; 0 to take what is free now or nothing, None to wait for as long as it takes.
        priority: The higher, the earlier; by agreement among users.
        note: What it is for, for people to read.
        avoid_busy: Whether devices that somebody uses without a lease are left alone.
        time: Seconds for which the devices are held at most: the lease says until when. Who is known to end in time may
            pass those who cannot start yet. Ending in time is up to you.
        on_wait: Called with the place in line and with the leases that are in the way, when the wait begins and on
            change. When None, one sentence goes to the logger ``anyaccel.wait`` when the wait begins: it is shown on
            standard error, unless the program configures :mod:`logging` otherwise.
        environ: The environment to start from; that of this process when None.
        options: ``inventory``, ``machine``, ``declare``, ``timeout``, ``unallocated``, ``mask``, ``cap`` and
            ``bind`` as :func:`anyaccel.prepare` takes them; ``confined``: whether the holder will be confined;
            ``memory``: how much of the host's memory the kernel leaves what :meth:`Hold.popen` starts, such as
            ``"8GiB"``; and ``enforce``: whether it is confined to its devices, as of :func:`anyaccel.run`.

    Returns:
        The hold, to be released; use it in a ``with`` statement.

    Raises:
        RequestError, UnknownNameError: When the request is wrong.
        UnknownOptionError: When there is no such option.
        NeverFitsError: When this machine can never serve it, or its configuration does not give this user so much.
        NotFreeError: When the devices were not free in time; says who holds them.
        DeadlockError: When ``wait`` is None, and the request can be served only once this process itself gives back
            what it holds, which has no other thread that could do so; says where the devices were taken.
        LedgerError: When leases cannot be kept on this machine.
        EnforcementError: When the kernel cannot hold it to ``memory``, or confine it.

    Examples:
        >>> with anyaccel.acquire("GPU:1", machine="sim:H100:2", note="evaluation") as hold:
        ...     print(hold.devices[0].type, hold.popen(["true"]).wait())
        ...     print(anyaccel.why("GPU:2", machine="sim:H100:2").fits_now)
        H100 0
        False
    """
    return _wish_of_process("acquire", request, options).get(keep)


async def acquire_async(request: str | Sequence[str] | Request, **options: Unpack[AcquireOptions]) -> Hold:
    """Hold devices like :func:`acquire`, on the running event loop; cancel the task to stop waiting.

    Detection, which takes a moment, runs in a thread.

    Examples:
        >>> import asyncio
        >>> async def work():
        ...     with await anyaccel.acquire_async("GPU:1", machine="sim:H100:2") as lease:
        ...         return len(lease.devices)
        >>> asyncio.run(work())
        1
    """
    import asyncio

    wish = await asyncio.to_thread(_wish_of_process, "acquire_async", request, options)
    return await wish.get_async(keep)


def _wish_of_process(function: str, request: str | Sequence[str] | Request, options: AcquireOptions) -> Wish:
    """Make the wish of devices for this very process, once its options are checked."""
    from anyaccel.launcher.options import AcquireOptions, check_options

    check_options(function, options, AcquireOptions.__annotations__)
    return Wish(request, marks.of_process, options)


def keep(hold: Hold) -> Hold:
    """Keep a hold for this very process."""
    note_own(hold.carried().noted().lease)
    return hold


def take(
    request: str | Sequence[str] | Request,
    mark: Callable[[Collection[marks.Mark]], marks.Mark],
    *,
    tell: Callable[[str], object] | None = None,
    grouped: bool = False,
    **options: Unpack[AcquireOptions],
) -> Hold:
    """Hold devices like :func:`acquire`, for something that will carry a mark.

    Args:
        request: What is wanted.
        mark: Gives the mark; see :class:`anyaccel.ledger.Want`.
        tell: Called with a sentence about the wait, when it begins and on change, where there is no ``on_wait``.
        grouped: Whether all that is going to use the devices will be started by the plan of the hold, so that a cgroup
            may hold it to a share.
        options: As of :func:`acquire`; their names are not checked.
    """
    return Wish(request, mark, options, tell=tell, grouped=grouped).get(lambda hold: hold)


async def take_async(
    request: str | Sequence[str] | Request,
    mark: Callable[[Collection[marks.Mark]], marks.Mark],
    **options: Unpack[AcquireOptions],
) -> Hold:
    """Hold devices like :func:`take`, on the running event loop, for what is all started by the plan of the hold."""
    import asyncio

    wish = await asyncio.to_thread(Wish, request, mark, options, grouped=True)
    return await wish.get_async(lambda hold: hold)


class Scope(Value):
    """Under which names the ledger counts the devices of a machine.

    A host's devices go by their vendors and ids, as :func:`anyaccel.ledger.names.device_name` writes them. Those of
    another machine, recorded or simulated, have names of their own. Inside a worker that holds a lease, what it holds
    is a machine of its own, whose devices are what it holds of them. A device that says which physical parts it
    occupies goes by these: others may see the same parts as other devices.

    Attributes:
        prefix: What all ids and parts begin with.
        units: Units that are all of a device in this scope, by device id.
        names: The names of each device, by device id.
        ids: The device that goes by a name; the inverse.
        parts: The devices that are parts of others, by the id of these.
        wholes: Names of the devices that a device is a part of, listed or not, by its id. A device that says which
            physical parts it occupies excludes by these all that do so, too.
    """

    prefix: str
    units: Mapping[str, int]
    names: Mapping[str, tuple[str, ...]]
    ids: Mapping[str, str]
    parts: Mapping[str, frozenset[str]]
    wholes: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, inventory: Inventory, environ: Mapping[str, str]) -> Scope:
        """The scope of the process that has this environment."""
        held = current(environ)
        leased = held.id if held is not None and held.id == environ.get(LEASE_VARIABLE) else ""
        return remembered(inventory, f"scope {leased}", lambda: cls._of(inventory, leased))

    @classmethod
    def _of(cls, inventory: Inventory, leased: str) -> Scope:
        """The scope of a process that holds a lease, if it does."""
        prefix = "" if inventory.machine == HOST else f"{zlib.crc32(os.fsencode(inventory.machine)):08x}|"
        if leased:
            prefix += f"{leased}|"
        names = {device.id: _names(device, prefix) for device in inventory.devices}
        ids = {name: device_id for device_id, own in names.items() for name in own}
        units = {
            device.id: UNITS_PER_DEVICE if device.slots > 1 and not leased else device.units
            for device in inventory.devices
        }
        wholes = {}
        devices = {device.id: device for device in inventory.devices}
        for device in inventory.devices:
            keys = [
                key
                for whole in _wholes(device, devices)
                if not device.occupies or (whole in devices and not devices[whole].occupies)
                for key in names.get(whole, (device_name(device.vendor, whole, prefix),))
            ]
            if keys:
                wholes[device.id] = tuple(keys)
        parts = parts_of(inventory.devices)
        return cls(prefix=prefix, units=units, names=names, ids=ids, parts=parts, wholes=wholes)

    def keys(self, device_ids: Iterable[str]) -> frozenset[str]:
        """Names of devices in the ledger."""
        return frozenset().union(*map(self.names.__getitem__, device_ids))

    def with_parts(self, device_ids: Iterable[str]) -> frozenset[str]:
        """Devices and their parts: two such sets meet where a device of one excludes one of the other."""
        ids = frozenset(device_ids)
        return ids.union(*(self.parts[each] for each in ids if each in self.parts)) if self.parts else ids

    def excluded_by(self, device_ids: Iterable[str]) -> frozenset[str]:
        """Devices, their parts, and those that they are parts of."""
        ids = self.with_parts(device_ids)
        return ids.union(whole for whole, parts in self.parts.items() if not ids.isdisjoint(parts))

    def want(self, candidates: Collection[str], needs: Iterable[Need] = (), **more: Any) -> Want:
        """What to ask the ledger for.

        Args:
            candidates: Ids of the devices that could serve.
            needs: How much is needed of which of them, by id.
            more: The other attributes of :class:`~anyaccel.ledger.Want`.
        """
        more["needs"] = tuple(replace(need, among=self.keys(map(str, need.among))) for need in needs)
        wholes = frozenset(key for each in candidates for key in self.wholes.get(each, ()))
        return Want(candidates=self.keys(self.with_parts(candidates)), wholes=wholes, **more)

    def want_of(self, choice: Choice, inventory: Inventory) -> Want:
        """Return what every request with this choice among the devices of a machine asks the ledger for."""

        def make() -> Want:
            candidates = [device.id for device in choice.candidates]
            locks = self.device_locks(inventory, choice.candidates)
            return self.want(candidates, choice.needs, device_locks=locks, request=str(choice.request))

        return remembered(inventory, (choice, self.prefix), make)

    def to_ledger(self, grants: Iterable[Grant]) -> dict[str, Extent]:
        """What grants take, by name in the ledger: parts of what is ours, rounded up, so that shares never overlap.

        What is held of a device that is no longer listed is of a whole one.
        """
        held: dict[str, Extent] = {}
        lost: dict[str, Device] = {}
        for grant in grants:
            for share in grant.shares:
                held[share.device.id] = held.get(share.device.id, NOTHING).joined(extent_of(share))
                if share.device.id not in self.names:
                    lost[share.device.id] = share.device
        found: dict[str, Extent] = {}
        for each in held if self.wholes else ():
            found |= dict.fromkeys(self.wholes.get(each, ()), DIVIDED)
        for each, extent in held.items():
            part = Extent(-(-extent.units * UNITS_PER_DEVICE // self.units.get(each, UNITS_PER_DEVICE)), extent.slots)
            found |= dict.fromkeys(_names(lost[each], self.prefix) if each in lost else self.names[each], part)
        return found

    def taken(self, taken: Mapping[str, Extent]) -> dict[str, Extent]:
        """What others hold of our devices, by device id, given what the ledger counts: of the part most taken.

        A device is taken as well where somebody who sees other devices than we do holds a part of it, or all of which
        it is a part.
        """
        found: dict[str, Extent] = {}
        divided = set()
        for name, extent in taken.items():
            if (device_id := self.ids.get(name)) is None:
                continue
            if extent.units:
                known = found.get(device_id, NOTHING)
                units = max(known.units, self._ours(device_id, extent.units))
                found[device_id] = Extent(units, known.slots | extent.slots)
            elif extent.divided:
                divided.add(device_id)
        for device_id, wholes in self.wholes.items():
            if any(name not in self.ids and taken.get(name, NOTHING).units for name in wholes):
                found[device_id] = Extent()
        for device_id in divided:
            if self.parts.get(device_id, frozenset()).isdisjoint(found):
                found[device_id] = Extent()
        return found

    def device_locks(self, inventory: Inventory, devices: Sequence[Device]) -> dict[str, tuple[DeviceLock, ...]]:
        """Inodes of this host to lock, by name of a device: of its physical parts, and of the device itself.

        What stands for a device is the directory of its PCI function, so that users whose plug-ins know the function,
        or a node of it, lock the same. Which vendors list it makes no difference. The lock is shared where the device
        is a part of what the directory stands for: it has a parent or says which parts it occupies, or another device
        of its vendor is at the same place. A part locks its parent's as well, as far as that is listed.

        Devices that are not those of this host as every user sees them have none.
        """
        if self.prefix:
            return {}
        concerned = {device.id for device in devices} | {device.parent for device in devices}
        found: dict[str, tuple[DeviceLock, ...]] = {}
        for vendor in {device.vendor for device in devices}:
            for device, paths, shared in _places(inventory, vendor):
                if device.id in concerned:
                    whole = tuple(DeviceLock(path, shared=shared) for path in paths)
                    found |= {
                        name: (DeviceLock(name), *whole) if name in device.occupies else whole
                        for name in self.names[device.id]
                    }
        return {name: locks for name, locks in found.items() if locks}

    def _ours(self, device_id: str, units: int) -> int:
        """Units of a device of which the ledger counts parts of what is ours."""
        return -(-units * self.units[device_id] // UNITS_PER_DEVICE)

    def ours(self, records: Iterable[LeaseRecord]) -> tuple[LeaseRecord, ...]:
        """The leases of our devices, with the devices' own ids and units; several parts of a device are one record.

        Who holds a device holds all of its parts, and all that it is a part of: these records say so (``through``).
        """
        found: dict[tuple[str, str], LeaseRecord] = {}
        further: list[tuple[str, LeaseRecord]] = []
        for record in records:
            device_id = self.ids.get(record.device)
            if device_id is not None and record.units:
                ours = replace(record, device=device_id, units=self._ours(device_id, record.units))
                found.setdefault((record.id or record.device, device_id), ours)
            elif device_id is not None:
                further.append((device_id, record))
            if record.units:
                whole = replace(record, through=device_id or vendor_and_id(record.device)[1].removeprefix(self.prefix))
                further += [(part, whole) for part, names in self.wholes.items() if record.device in names]
        for device_id, record in further:
            held = (part for part in sorted(self.parts.get(device_id, ())) if (record.id, part) in found)
            through = record.through or next(held, "")
            units = self._ours(device_id, UNITS_PER_DEVICE)
            other = replace(record, device=device_id, units=units, slots=(), through=through)
            found.setdefault((record.id or record.device, device_id), other)
        return tuple(found.values())


def _names(device: Device, prefix: str) -> tuple[str, ...]:
    """The names of a device in the ledger, given what all of its machine begin with."""
    return tuple(prefix + part for part in device.occupies) or (device_name(device.vendor, device.id, prefix),)


def _places(inventory: Inventory, vendor: str) -> Iterator[tuple[Device, tuple[str, ...], bool]]:
    """The devices of a vendor, with what stands for each in sysfs, and whether others are there, too."""
    report = inventory.report(vendor)
    own = [device for device in inventory.of_vendor(vendor) if not device.declared]
    nodes = {
        device.id: family.nodes
        for family in families(own, report.control_nodes if report else ())
        for device in family.devices
    }
    found = [(device, places(device, nodes[device.id])) for device in own]
    users = Counter(path for device, paths in found if device.parent is None for path in paths)
    for device, paths in found:
        part = device.parent is not None or bool(device.occupies)
        yield device, paths, part or any(users[path] > 1 for path in paths)


def _wholes(device: Device, devices: Mapping[str, Device]) -> list[str]:
    """The devices that a device is a part of, nearest first; the last may not be listed."""
    found: list[str] = []
    above = device.parent
    while above is not None and above not in found:
        found.append(above)
        above = devices[above].parent if above in devices else None
    return found


class Wish:
    """One request on its way to devices.

    Attributes:
        request: The request.
        inventory: The machine.
        nothing: Whether no device can ever serve it, and it takes the CPU instead; then there is none of the following.
        ledger: The machine's leases.
        want: What to ask the ledger for.
        scope: Under which names the ledger counts the devices.
    """

    def __init__(
        self,
        request: str | Sequence[str] | Request,
        mark: Callable[[Collection[marks.Mark]], marks.Mark],
        options: AcquireOptions,
        *,
        tell: Callable[[str], object] | None = None,
        grouped: bool = False,
        choice: Choice | None = None,
    ) -> None:
        self.request = parse_request(request)
        self._options, self._grouped, self._tell = options, grouped, tell
        environ = options.get("environ")
        self.environ = os.environ if environ is None else environ
        self._confined = check_start(options) or options.get("confined", False)
        time, self._note = options.get("time"), options.get("note", "")
        if time is not None and not 0 < time < float("inf"):
            raise ValueError(f"time must be seconds, more than 0, or None (got {time!r})")
        names = "machine", "declare", "timeout"
        where: dict[str, Any] = {name: value for name, value in options.items() if name in names}
        self.inventory = survey(options.get("inventory"), environ=self.environ, request=self.request, **where)
        self._grants: tuple[Grant, ...] = ()
        self._attempt: Acquisition | None = None
        self._made: Hold | None = None
        self._choice = choice or choice_of(self.inventory, self.request)
        self.nothing = not self._choice.ever_fits
        if self.nothing:
            verdict = local_scheduler(self.inventory).why(self.request)
            if not verdict.cpu:
                raise NeverFitsError(verdict.message, verdict=verdict, hint=verdict.hint)
            return
        self.ledger = Ledger.open(self.environ)
        self.scope = Scope.of(self.inventory, self.environ)
        avoid_busy = options.get("avoid_busy", False)
        self._foreign = Foreign(self.inventory, self.request, self.environ, avoid_busy=avoid_busy)
        want = self.scope.want_of(self._choice, self.inventory)
        self.want = replace(want, seconds=time, confined=self._confined, mark=mark)
        self._terms: dict[str, Any] = {"wait": options.get("wait"), "priority": options.get("priority", 0)}
        self._terms |= {"note": self._note, "on_wait": self._waits}
        self._on_wait = options.get("on_wait")
        self._blocks = False
        self._began = monotonic()

    def get(self, use: Callable[[Hold], T]) -> T:
        """Hold the devices, when it is our turn; an error or an interrupt at any place leaves none held.

        Args:
            use: Makes of the hold what is returned.

        Raises:
            NeverFitsError, NotFreeError, DeadlockError: When the devices are not to be had, or not in time.
        """
        try:
            self._blocks = not self.nothing and self._terms["wait"] is None
            return use(self._hold(None if self.nothing else self._ask().get()))
        except (DevicesBusyError, LimitError) as error:
            raise self._refusal(error) from error
        except BaseException:
            self._undo()
            raise

    async def get_async(self, use: Callable[[Hold], T]) -> T:
        """The same on the running event loop, where anything may give devices back meanwhile."""
        try:
            return use(self._hold(None if self.nothing else await self._ask().get_async()))
        except (DevicesBusyError, LimitError) as error:
            raise self._refusal(error) from error
        except BaseException:
            self._undo()
            raise

    def _ask(self) -> Acquisition:
        self._attempt = self.ledger.begin(self.want, self.choose, **self._terms)
        return self._attempt

    def _undo(self) -> None:
        """Give back what cannot be handed to the caller any more."""
        if self._made is not None:
            self._made.release()
        elif self._attempt is not None:
            self._attempt.undo()

    def _waits(self, place: int, records: tuple[LeaseRecord, ...]) -> None:
        """Say that the request waits and what for, unless it would do so for ever."""
        if self._attempt is None:
            return
        if self._blocks:
            self._refuse_deadlock()
        holders = self.scope.ours(records)
        if self._on_wait is not None:
            self._on_wait(place, holders)
            return
        sentence = describe_wait(place, holders, self._attempt.limits, self.inventory)
        if self._tell is not None:
            self._tell(sentence)
        else:  # once
            self._attempt.on_wait = None
            log_wait(sentence)

    def _refuse_deadlock(self) -> None:
        """Raise when the request can be served only once this process gives back, and nothing in it can do so."""
        own = own_leases(self.ledger.path)
        if not own or other_threads():
            return
        taken: dict[str, Extent] = {}
        for lease, _ in own.values():
            for name, extent in lease.devices.items():
                taken[name] = taken.get(name, NOTHING).joined(extent)
        if self._choice.choose(self.scope.taken(taken)) is not None and not self._limited_by(own):
            return
        verdict = self._verdict()
        held = "; ".join(f"lease {key}, taken at {place}" for key, (_, place) in own.items())
        raise DeadlockError(
            f"{self.request} can be served only once this process gives back what it holds itself: {held}.",
            verdict=verdict,
            hint="release that first, or ask for all devices at once; with wait=SECONDS the call waits all the same,"
            " for a signal handler to release it",
        )

    def _limited_by(self, own: Collection[str]) -> bool:
        """Whether some leases alone, by their ids, take the user to a limit that is in the way of the request."""
        return bool(self.ledger.over_limits(self.want, self._terms["priority"], only=own))

    def choose(self, taken: Mapping[str, Extent]) -> dict[str, Extent] | None:
        """Choose devices, by the ledger's names, among what is left."""
        leased = self.scope.taken(taken)
        grants = self._choice.choose(leased | self._foreign.taken(leased))
        if grants is None:
            return None
        self._grants = grants
        return self.scope.to_ledger(grants)

    def allocation(self, lease: Lease | None) -> Allocation:
        """What was chosen at last, and is held with a lease."""
        lease_id = lease.id if lease else ""
        return Allocation(id=lease_id, request=self.request, grants=self._grants, confined=self._confined)

    def _hold(self, lease: Lease | None) -> Hold:
        """Make the hold."""
        allocation = self.allocation(lease)
        terms: dict[str, Any] = {"environ": self.environ, "lease": allocation.id, "grouped": self._grouped}
        launch = plan_launch(allocation, self.inventory, self._options, **terms)
        waited = monotonic() - self._began if lease else 0.0
        self._made = Hold(launch, lease, note=self._note if lease else "", waited=waited)
        return self._made

    def _refusal(self, error: DevicesBusyError | LimitError) -> NotFreeError | NeverFitsError:
        """Say what is in the way of the request, in the words of :func:`why`."""
        if isinstance(error, LimitError):
            return beyond_limits(self.request, error)
        verdict = self._verdict()
        told = any(reason.code is ReasonCode.WAITING_BEHIND for reason in verdict.reasons)
        behind = f" {error.ahead} asked for them before." if error.ahead and not told else ""
        # They fit where they are free for a request that came first, or were given back since.
        message = str(error) if verdict.fits_now else verdict.message + behind
        return NotFreeError(message, verdict=verdict, hint=verdict.hint)

    def _verdict(self) -> Verdict:
        terms = {"time": self.want.seconds, "priority": self._terms["priority"]}
        return _verdict(self.inventory, self.request, self.ledger, self.environ, **terms)


def why(
    request: str | Sequence[str] | Request,
    *,
    time: float | None = None,
    priority: int = 0,
    inventory: Inventory | None = None,
    environ: Mapping[str, str] | None = None,
    **where: Any,
) -> Verdict:
    """Say whether :func:`acquire` would get devices now: by what others hold, who waits, and this user's limits.

    Args:
        request: The request.
        time: Seconds for which it would hold them at most; None when it would not say.
        priority: The higher, the earlier.
        inventory: The machine's inventory; detected when None.
        environ: Our environment; that of this process when None.
        where: ``machine``, ``declare`` and ``timeout`` as :func:`anyaccel.detect` takes them.

    Returns:
        Whether it would, else why not and what would.

    Raises:
        RequestError, UnknownNameError: When the request is wrong.
        ConfigurationError: When the machine's configuration cannot be trusted or understood.
        StateDirectoryError: When the ledger cannot be read.

    Examples:
        >>> verdict = anyaccel.why("GPU:3", machine="sim:H100:2")
        >>> verdict.fits_now, verdict.ever_fits, str(verdict.nearest)
        (False, False, 'GPU:2')
        >>> print(verdict.message)
        GPU:3 can never fit: this machine has 2 GPU (2 H100).
    """
    environ = os.environ if environ is None else environ
    inventory = survey(inventory, environ=environ, **where)
    request, ledger = parse_request(request), Ledger.open(environ)
    verdict = _verdict(inventory, request, ledger, environ, time=time, priority=priority)
    return replace(verdict, gaps=_gaps(request, inventory, environ)) if verdict.ever_fits else verdict


def over_limits(request: Request, *, time: float | None, priority: int, inventory: Inventory) -> tuple[OverLimit, ...]:
    """Return the limits of this user that are in the way of a request, whoever holds the devices.

    Args:
        request: The request; it fits the machine.
        time: Seconds for which it would hold them at most; None when it would not say.
        priority: The higher, the earlier.
        inventory: The machine's inventory.

    Raises:
        ConfigurationError: When the machine's configuration cannot be trusted or understood.
        StateDirectoryError: When the ledger cannot be read.
    """
    if rules().plain:
        return ()
    return Ledger.open().over_limits(_wanted(inventory, request, os.environ, time), priority)


def within_limits(verdict: Verdict, limits: Sequence[OverLimit]) -> Verdict:
    """A verdict with what the limits of this user, as far as they are in the way, make of it."""
    if not limits or not verdict.ever_fits:
        return verdict
    lasting = [each for each in limits if each.lasting]
    told = lasting or limits
    reasons = tuple(Reason(code=ReasonCode.LIMIT, message=each.message()) for each in told)
    ways_out = tuple(each.remedy for each in told)
    return replace(
        verdict,
        fits_now=False,
        ever_fits=not lasting,
        reasons=reasons if lasting else (*reasons, *verdict.reasons),
        ways_out=ways_out if lasting else (*ways_out, *verdict.ways_out),
        nearest=None,
        nearest_now=None,
    )


def beyond_limits(request: Request, error: LimitError) -> NeverFitsError:
    """Make the error of a request that the ledger refused, since its user may never have so much."""
    reasons = tuple(Reason(code=ReasonCode.LIMIT, message=each) for each in error.reasons)
    ways_out = tuple(error.hint.splitlines())
    verdict = Verdict(request=request, fits_now=False, ever_fits=False, reasons=reasons, ways_out=ways_out)
    return NeverFitsError(verdict.message, verdict=verdict, hint=verdict.hint)


def starts(
    request: Request,
    *,
    time: float | None = None,
    inventory: Inventory,
) -> float | None:
    """Say when a request that came now would start if everything lasts as long as it may.

    Args:
        request: The request; it fits the machine.
        time: Seconds for which it would hold the devices at most; None when it would not say.
        inventory: The machine's inventory.

    Returns:
        Seconds since 1970; None when that is not known, since something says no end.

    Raises:
        StateDirectoryError: When the ledger cannot be read.
    """
    return Ledger.open().starts(_wanted(inventory, request, os.environ, time))


def _wanted(inventory: Inventory, request: Request, environ: Mapping[str, str], time: float | None) -> Want:
    """Build what a request that came now would ask the ledger for."""
    want = Scope.of(inventory, environ).want_of(choice_of(inventory, request), inventory)
    return replace(want, seconds=time)


def leases(inventory: Inventory, environ: Mapping[str, str] | None = None) -> tuple[LeaseRecord, ...]:
    """The leases of a machine's devices: one record for each device of each lease.

    Raises:
        StateDirectoryError: When the ledger cannot be read.

    Examples:
        >>> inventory = anyaccel.detect("sim:H100:2")
        >>> with anyaccel.acquire("GPU:0.5", inventory=inventory, note="evaluation"):
        ...     [(record.units, record.note) for record in anyaccel.leases(inventory)]
        [(5000, 'evaluation')]
    """
    environ = os.environ if environ is None else environ
    return Scope.of(inventory, environ).ours(Ledger.open(environ).leases())


def _gaps(request: Request, inventory: Inventory, environ: Mapping[str, str]) -> tuple[str, ...]:
    """What a worker would not be kept from that is given what a request wants; empty where no worker can be started."""
    with contextlib.suppress(AnyaccelError):
        allocation = local_scheduler(inventory).allocate(request)
        return worker_environment(allocation, inventory, environ=environ).allocation.gaps
    return ()


def _verdict(
    inventory: Inventory,
    request: Request,
    ledger: Ledger,
    environ: Mapping[str, str],
    *,
    time: float | None,
    priority: int,
) -> Verdict:
    """Say whether a request that came now would be served."""
    verdict = fits_beside(Held.of(inventory, ledger, environ), inventory, request)
    if not verdict.ever_fits:
        return verdict
    want = _wanted(inventory, request, environ, time)
    verdict = within_limits(verdict, ledger.over_limits(want, priority))
    if not verdict.fits_now or not (ahead := ledger.ahead(want, priority)):
        return verdict
    message = f"{ahead} earlier request{'s wait' if ahead > 1 else ' waits'} for the same devices"
    reasons = (Reason(code=ReasonCode.WAITING_BEHIND, message=message),)
    return replace(verdict, fits_now=False, reasons=reasons, ways_out=("'anyaccel queue' shows who waits",))


def fits_beside(held: Held, inventory: Inventory, request: Request) -> Verdict:
    """Say whether a request fits a machine beside what is held of it, whoever asks and waits."""
    scheduler = local_scheduler(inventory)
    for lease, devices in held.devices.items():
        scheduler.occupy(devices, holder=lease, note=held.holders[lease])
    return held.with_ways_out(scheduler.why(request))


class Held(Value):
    """What every process on a machine holds of its devices.

    Attributes:
        records: The leases; one record for each device of each.
        devices: How much of each device each lease holds, by the id of the lease, then of the device.
        holders: Who that is, for people, likewise.
    """

    records: tuple[LeaseRecord, ...]
    devices: Mapping[str, Mapping[str, Extent]]
    holders: Mapping[str, str]

    @classmethod
    def of(cls, inventory: Inventory, ledger: Ledger, environ: Mapping[str, str]) -> Held:
        """Look at the leases of a machine's devices.

        Raises:
            StateDirectoryError: When the ledger cannot be read.
        """
        by_lease: dict[str, list[LeaseRecord]] = {}
        records = Scope.of(inventory, environ).ours(ledger.leases())
        for record in records:
            by_lease.setdefault(record.id or f"unknown-{len(by_lease)}", []).append(record)
        listed = {device.id for device in inventory.devices}
        devices = {
            lease: {
                record.device: Extent(record.units, slot_mask(record.slots) if record.slots else ANY_SLOTS)
                for record in own
                if record.through not in listed
            }
            for lease, own in by_lease.items()
        }
        return cls(records=records, devices=devices, holders={lease: holder(own[0]) for lease, own in by_lease.items()})

    def with_ways_out(self, verdict: Verdict) -> Verdict:
        """A verdict with what can be done about the leases that are in the way."""
        if verdict.fits_now:
            return verdict
        blocking = {device for reason in verdict.reasons for device in reason.devices}
        ways = (record.hint for record in self.records if record.device in blocking)
        return replace(verdict, ways_out=tuple(dict.fromkeys(filter(None, (*verdict.ways_out, *ways)))))
