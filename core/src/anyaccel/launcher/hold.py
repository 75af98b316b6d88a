"""Acquire devices: a machine-wide lease, and the environment of a worker with the devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic
from types import TracebackType

from anyaccel._interrupts import finish_step
from anyaccel._typing import TypeVar
from anyaccel.durations import read_seconds
from anyaccel.errors import (
    AnyaccelError,
    DeadlockError,
    DevicesBusyError,
    LimitError,
    NeverFitsError,
    NotFreeError,
    UsageError,
)
from anyaccel.inventory.detect import detect
from anyaccel.launcher.launch import AcquireOptions, Launch, check_options, check_start, plan_launch, remove_group
from anyaccel.launcher.open_lease import OpenLease, list_own_leases, plan_handover
from anyaccel.launcher.scope import LedgerRequest
from anyaccel.ledger import Acquisition, Lease, LeaseRecord, Ledger, find
from anyaccel.linux import mark as marks
from anyaccel.model import (
    NOTHING,
    Allocation,
    Device,
    Extent,
    Inventory,
    Request,
    Stats,
    format_memory_beside,
    replace,
    share_table,
)
from anyaccel.scheduler import ReasonCode, Scheduler, Verdict, asked_memory, parse_request
from anyaccel.text import printable
from anyaccel.vendors import KnownNames, validate

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any, Self, Unpack

AnyLease = TypeVar("AnyLease", bound=OpenLease)
T = TypeVar("T")
MarkMaker = Callable[[Collection[marks.Mark]], marks.Mark]
"""Returns the mark of a lease, given the marks that are taken; see :class:`anyaccel.ledger.Want`."""
FRESH_SECONDS = 2.0
"""Maximum age of an observation of use without a lease while a request waits."""


class DeviceLease(OpenLease):
    """Leased devices, until the release, or until the exit of the last process on the devices.

    Attributes:
        launch: The inventory, and the environment of a worker that sees exactly these devices.
    """

    def __init__(self, launch: Launch, lease: Lease | None, *, note: str = "", waited: float = 0.0) -> None:
        super().__init__(lease, launch.environment.allocation, note=note, waited=waited)
        self.launch = launch
        self._started: list[marks.Mark] = []  # the first is that of all commands, whichever thread starts them

    @property
    def id(self) -> str:
        """Identity of the lease, as in ``anyaccel status``, also after the release; empty for a fallback to the CPU."""
        return self.lease.id if self.lease else ""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, in the order in which a worker numbers them."""
        return self.allocation.devices

    @property
    def environ(self) -> Mapping[str, str]:
        """The whole environment of a worker with exactly the leased devices, for ``subprocess`` and similar modules.

        The values stay the same after the release.
        """
        return self.launch.environment.values

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors of the lease, for ``pass_fds``: a process with a copy keeps the devices if this process exits.

        :meth:`release` frees the devices despite such copies, unless :meth:`popen` was called before. Then the devices
        stay leased until the last process of these commands, and the last process with a copy, has exited. Empty for a
        fallback to the CPU, and after the release.
        """
        return self.lease.fds if self.lease else ()

    def popen(self, command: Sequence[str] | str, **options: Any) -> subprocess.Popen[Any]:
        """Start a command with exactly the leased devices, like :class:`subprocess.Popen`.

        The options ``bind``, ``memory`` and ``enforce`` of the lease apply to the command. The devices stay leased
        until the command and its descendants have exited, even if the lease is released or this process dies meanwhile.
        After the release, a command starts all the same, but nothing keeps the devices for it.

        Args:
            command: The command and its arguments; a string with ``shell=True``.
            options: Options of :class:`subprocess.Popen`. The default of ``env``, also for None, is :attr:`environ`;
                another ``env`` is used as given, without the masks of the lease. :attr:`fds` are added to ``pass_fds``.

        Raises:
            EnforcementError: If the command cannot be confined.
            OSError: If the command cannot be started. A failure that a wrapper finds later is an exit with status 126
                or 127 instead: see :meth:`anyaccel.launcher.launch.Launch.popen`.
        """
        if not self._started:
            # This process carries the mark of the lease itself: only a mark inside it tells the command apart.
            self._started.append(marks.draw(inside=self.mark) if self.mark and self._carried else self.mark)
        return replace(self.launch, mark=self._started[0], fds=self.fds).popen(command, **options)

    def release(self) -> None:
        """Write the journal entry if one was begun and a journal is kept, and release the devices; only once.

        Devices are left to commands of :meth:`popen` that still run, until their exit. Vendors undo the handover of
        devices without a holder; a failure is logged. The cgroup is removed if it is empty. In a forked child, no entry
        is written, and only the child's copy of the lease is closed: the parent keeps the devices, and writes the
        entry.

        Raises:
            LedgerError: If a command was started, and the ledger cannot be read; the devices are left to the command
                nevertheless.
        """
        finish_step(self._release)  # not in end_lease() alone: an interrupt on the way there would keep the devices

    def _release(self) -> None:
        """Release the devices and remove the cgroup; a second call does what an interrupt has left."""
        self.end_lease(self._started[0] if self._started else None)
        self.remove_group()

    def remove_group(self) -> None:
        """Remove the cgroup of the lease, unless a process still runs there; does nothing without a cgroup.

        Errors are ignored.
        """
        if self.launch.environment.group is not None:
            remove_group(self.launch.environment.group)

    def __enter__(self) -> Self:
        """Return the lease, to be released at the end of the statement.

        Raises:
            UsageError: If the lease was released.
        """
        if self._released:
            raise self._gone()
        return self

    def _gone(self) -> UsageError:
        """Make the error of a ``with`` statement on a released lease, whose body would run without the devices."""
        return UsageError(f"the lease of {self.allocation.request} was released", hint="acquire the devices anew")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _repr_html_(self) -> str:
        """Return an HTML table of the devices for a notebook.

        The caption has the request and its state: ``held as`` and the lease's id, or ``released``. The table is empty
        after the release. A fallback to the CPU has an empty table and is shown as ``held as nothing``, even after the
        release.
        """
        state = "released" if self._released else f"held as {self.id or 'nothing'}"
        return share_table(f"{self.allocation.request} {state}", () if self._released else self.allocation.shares)

    def __repr__(self) -> str:
        devices = ", ".join(device.id for device in self.devices) or "CPU"
        return f"<{type(self).__name__} {self.id or 'of nothing'}: {'released' if self._released else devices}>"

    @property
    def _released(self) -> bool:
        return self.lease is not None and self.lease.released


def acquire(request: str | Sequence[str] | Request, **options: Unpack[AcquireOptions]) -> DeviceLease:
    """Lease devices, and wait until enough are free.

    Requests for the same devices are served in order, whichever process of this machine they come from. If this process
    dies, its devices are free once all processes have exited that it started since the first call.
    :meth:`DeviceLease.release` frees them at once, except for commands of :meth:`DeviceLease.popen`. The environment of
    this process stays the same; this process and its later children get the mark of the lease, for good.

    Args:
        request: The request, such as ``"GPU:2"``.
        wait: Longest wait, in seconds or as a text such as ``"5m"``; 0 to take only what is free now, None for no
            limit.
        priority: A request of higher priority is served first; users agree on the values.
        note: The purpose, shown to other users.
        avoid_busy: Whether to leave out devices on which a process without a lease runs.
        time: Time limit, in seconds or as a text such as ``"1h30m"``, which other users see. A request with a time
            limit may start before requests that cannot start yet (backfill). The caller itself must end in time.
        on_wait: Called with the queue position and the leases in the way, when the wait begins and after each change.
            If None, the logger ``anyaccel.wait`` gets one sentence when the wait begins. It goes to standard error,
            unless the program configures :mod:`logging` otherwise.
        environ: The environment to start from; that of this process if None.
        options: ``inventory``, ``machine``, ``declare``, ``timeout``, ``unallocated``, ``mask``, ``cap`` and ``bind``
            as for :func:`anyaccel.prepare`; ``confined``: whether the caller confines the holder itself; ``memory``:
            the limit of host memory for commands of :meth:`DeviceLease.popen`, such as ``"8GiB"``; ``enforce``: whether
            such commands are confined to their devices, as for :func:`anyaccel.run`.

    Returns:
        The lease, for a ``with`` statement; without id and devices if the request fell back to the CPU.

    Raises:
        RequestError, UnknownNameError: If the request is invalid.
        UnknownOptionError, UsageError: If there is no such option, or its value is invalid.
        NeverFitsError: If this machine, or the user's limits on it, can never serve the request.
        NotFreeError: If the devices were not free in time; the error names the holders.
        DeadlockError: If ``wait`` is None, and only this process could release what the request needs, but has no
            other thread to do so; the error says where the devices were acquired.
        LedgerError: If leases cannot be kept on this machine, or the request was cancelled.
        EnvConflictError, PluginError: If the environment cannot be made, or a vendor cannot change the devices.
        EnforcementError: If the kernel cannot apply ``memory`` or ``enforce``.
        OSError, ValueError: If the kernel refuses the mark of the lease; the devices are released.

    Examples:
        >>> with anyaccel.acquire("GPU:1", machine="sim:H100:2", note="evaluation") as lease:
        ...     print(lease.devices[0].type, lease.popen(["true"]).wait())
        ...     print(anyaccel.why("GPU:2", machine="sim:H100:2").fits_now)
        H100 0
        False
    """
    check_options("acquire", options, AcquireOptions.__annotations__)
    pending = LeaseRequest(request, marks.draw_for_process, options)
    return pending.get(pending.plan_lease, keep)


async def acquire_async(request: str | Sequence[str] | Request, **options: Unpack[AcquireOptions]) -> DeviceLease:
    """Lease devices like :func:`acquire`, on the running event loop; cancel the task to stop waiting.

    Detection runs in a thread, and so do the vendors' changes of the devices; an attempt and the start plan block the
    loop. No DeadlockError is raised, since other tasks may release.

    Examples:
        >>> import asyncio
        >>> async def work():
        ...     with await anyaccel.acquire_async("GPU:1", machine="sim:H100:2") as lease:
        ...         return len(lease.devices)
        >>> asyncio.run(work())
        1
    """
    import asyncio

    check_options("acquire_async", options, AcquireOptions.__annotations__)
    pending = await asyncio.to_thread(LeaseRequest, request, marks.draw_for_process, options)
    return await pending.get_async(pending.plan_lease, keep)


def keep(lease: DeviceLease) -> DeviceLease:
    """Make this process the holder of a lease; return the lease.

    The process gets the mark for good, the journal entry begins, and the calling line is kept for messages about
    deadlocks. After a fallback to the CPU, nothing is done.

    Raises:
        OSError, ValueError: If the kernel refuses the mark; the caller ends the lease.
    """
    return lease.mark_process().begin_entry().note_line()


def take(
    request: str | Sequence[str] | Request,
    mark: MarkMaker,
    *,
    tell: Callable[[str], object] | None = None,
    grouped: bool = False,
    **options: Unpack[AcquireOptions],
) -> DeviceLease:
    """Lease devices like :func:`acquire`, for a process with a mark: this process does not become the holder.

    No journal entry is begun, and the lease does not count in the check for deadlocks. The vendors have changed the
    devices for the holder. The errors are those of :func:`acquire`, but for option names and the mark.

    Args:
        request: The request.
        mark: Makes the mark.
        tell: Called with a sentence about the wait, when it begins and after each change, unless there is ``on_wait``.
        grouped: Whether the plan of the lease starts every process on the devices, so that a cgroup can limit shares.
        options: Options of :func:`acquire`; the names are not checked, nor values such as that of ``unallocated``.
    """
    pending = LeaseRequest(request, mark, options, tell=tell, grouped=grouped)
    return pending.get(pending.plan_lease, lambda lease: lease)


async def take_async(
    request: str | Sequence[str] | Request,
    mark: MarkMaker,
    **options: Unpack[AcquireOptions],
) -> DeviceLease:
    """Lease devices like :func:`take` with ``grouped``, on the running event loop; detection runs in a thread.

    The vendors' changes of the devices run in a thread, too; an attempt and the start plan block the loop. No
    DeadlockError is raised. The wait is reported to ``on_wait``, or once to the logger.
    """
    import asyncio

    pending = await asyncio.to_thread(LeaseRequest, request, mark, options, grouped=True)
    return await pending.get_async(pending.plan_lease, lambda lease: lease)


def find_machine(options: AcquireOptions) -> tuple[Inventory, Mapping[str, str]]:
    """Return the inventory and the environment of the options of :func:`acquire`; detect the machine if needed.

    Raises:
        MachineError: If the machine cannot be detected.
    """
    given = options.get("environ")
    environ = os.environ if given is None else given
    names = "machine", "declare", "timeout"
    where: dict[str, Any] = {name: value for name, value in options.items() if name in names}
    return options.get("inventory") or detect(environ=environ, **where), environ


class LeaseRequest(LedgerRequest):
    """A request for a lease, from the check of the options to the lease.

    Making the object detects the machine, unless an inventory is given.

    Args:
        request: The request.
        mark: Makes the mark of the lease; None for a lease that no process carries.
        options: Options of :func:`acquire`.
        tell: As for :func:`take`.
        grouped: As for :func:`take`.

    Attributes:
        made: The lease, once there is one.
        began: Start of the wait, by the monotonic clock.
        on_cpu: Whether no device can ever serve the request, so that it falls back to the CPU.

    Raises:
        RequestError, UnknownNameError: If the request is invalid.
        NeverFitsError: If the machine can never serve the request.
        EnforcementError: If the kernel cannot apply ``memory`` or ``enforce``.
        StateDirectoryError: If leases cannot be kept on this machine.
        LedgerError: If a system call on the state directory fails.
        UsageError: If a duration is invalid, or the variable of the lease around this process.
        MachineError: If the machine cannot be detected.
    """

    def __init__(
        self,
        request: str | Sequence[str] | Request,
        mark: MarkMaker | None,
        options: AcquireOptions,
        *,
        tell: Callable[[str], object] | None = None,
        grouped: bool = False,
    ) -> None:
        request = parse_request(request)
        self._options, self._grouped, self._tell = options, grouped, tell
        self._confined = check_start(options) or options.get("confined", False)
        time, self.note = read_seconds("time", options.get("time"), positive=True), options.get("note", "")
        if time == float("inf"):
            raise UsageError("time must be finite (got inf)", hint="leave it out for no limit")
        inventory, environ = find_machine(options)
        super().__init__(inventory, request, environ, seconds=time, confined=self._confined, mark=mark)
        self._attempt: Acquisition | None = None
        self.made: OpenLease | None = None
        self.began = monotonic()
        self._terms: dict[str, Any] = {
            "wait": read_seconds("wait", options.get("wait")),
            "priority": options.get("priority", 0),
            "note": self.note,
            "on_wait": self._report_wait,
        }
        self.on_cpu = not self.choice.ever_fits
        if self.on_cpu:
            verdict = Scheduler(inventory, validate, KnownNames()).why(request)
            if not verdict.cpu:
                from anyaccel.launcher.verdicts import name_masks

                verdict = name_masks(verdict, inventory, environ)
                raise NeverFitsError(verdict.message, verdict=verdict, hint=verdict.hint)
            return
        self._state = find(environ)
        self._avoid_busy = options.get("avoid_busy", False)
        self._memory = max((asked_memory(term) for term in request.terms if term.filters), default=0)
        self._observed: tuple[float, Mapping[str, Stats]] = (float("-inf"), {})
        self._in_use: list[str] = []
        self._on_wait = options.get("on_wait")
        self._blocks = False

    def get(self, make: Callable[[Lease | None], AnyLease], finish: Callable[[AnyLease], T]) -> T:
        """Wait for the devices, have the vendors change these for the holder, and return the result of ``finish``.

        An error or an interrupt at any point leaves no device leased, unless ``finish`` has left the lease to others
        before. Errors of the ledger, of the vendors, of ``on_wait``, ``make`` and ``finish`` pass through.

        Args:
            make: Makes the open lease, such as :meth:`plan_lease`; called with None on the CPU, for a lease of nothing.
            finish: Called with the open lease, after the vendors' changes; its result goes to the caller.

        Raises:
            NeverFitsError: If the request is over a limit of the user.
            NotFreeError: If the devices were not free in time.
            DeadlockError: If the wait has no limit, and :meth:`_refuse_deadlock` raises it.
        """
        try:
            # Only a wait without limit can be a deadlock: another one ends by itself.
            self._blocks = not self.on_cpu and self._terms["wait"] is None
            made = self._open(make, None if self.on_cpu else self._begin().get())
            made.hand_over()
            return finish(made)
        except (DevicesBusyError, LimitError) as error:
            raise self._explain(error) from error
        except BaseException:
            finish_step(self._undo)
            raise

    async def get_async(self, make: Callable[[Lease | None], AnyLease], finish: Callable[[AnyLease], T]) -> T:
        """Wait like :meth:`get` on the running event loop; no deadlock is reported, since other tasks may release.

        The vendors make and undo their changes in a thread; ``make`` and ``finish`` run on the loop.
        """
        import asyncio

        try:
            made = self._open(make, None if self.on_cpu else await self._begin().get_async())
            if made.handover is not None:
                await asyncio.to_thread(made.hand_over)
            return finish(made)
        except (DevicesBusyError, LimitError) as error:
            raise self._explain(error) from error
        except BaseException:
            if self.made is not None and self.made.handover is not None:
                # Also for a cancelled task, whose thread goes on: the end of the lease waits for that.
                await asyncio.shield(asyncio.to_thread(self._undo))
            else:
                finish_step(self._undo)
            raise

    def _begin(self) -> Acquisition:
        """Start the acquisition, and keep it for :meth:`_undo`; nothing is acquired yet, and no line is entered.

        Raises:
            UsageError: As for :class:`anyaccel.ledger.Acquisition`.
        """
        self._attempt = Acquisition(self._state, self.want, self.choose, **self._terms)
        return self._attempt

    def _undo(self) -> None:
        """Release the lease after an error, or withdraw the request: the caller will never get the lease.

        Does nothing before the acquisition has begun. The errors are those of :meth:`DeviceLease.release`.
        """
        if self.made is not None:
            self.made.release()
        elif self._attempt is not None:  # an interrupt between the lease and its OpenLease
            self._attempt.undo()

    def _report_wait(self, place: int, records: tuple[LeaseRecord, ...]) -> None:
        """Report the wait: to ``on_wait``, else to ``tell``, else to the logger, after which reports stop.

        A wait of :meth:`get` without limit is checked for a deadlock before each report, so only once with the logger.
        Does nothing before the acquisition has begun. Exceptions of ``on_wait`` and ``tell`` pass through.

        Args:
            place: The queue position, 1 for the next.
            records: The leases in the way, by the ledger's names.

        Raises:
            DeadlockError, ConfigurationError, LedgerError: As for :meth:`_refuse_deadlock`.
        """
        if self._attempt is None:
            return
        if self._blocks:
            self._refuse_deadlock()
        holders = self.scope.select_records(records)
        if self._on_wait is not None:
            self._on_wait(place, holders)
            return
        from anyaccel.launcher.verdicts import describe_wait

        sentence = describe_wait(place, holders, self._attempt.limits)
        if self._tell is not None:
            self._tell(sentence)
        else:  # a program gets one sentence, not one for each change
            import logging

            self._attempt.on_wait = None
            logging.getLogger("anyaccel.wait").warning("anyaccel: %s", printable(sentence))

    def _refuse_deadlock(self) -> None:
        """Check that the request does not wait for leases of this process that no other thread could release.

        Leases of :meth:`OpenLease.note_line` in the same state directory count. Leases of other processes do not count,
        since they may end.

        Raises:
            DeadlockError: If this process has such leases and no other Python thread, not even a daemon, and the
                request does not fit beside them, or exceeds a limit of the user or group with them.
            ConfigurationError: If the machine's configuration is invalid or untrusted.
            LedgerError: If the ledger cannot be read.
        """
        own = {
            key: (lease, place)
            for key, (lease, place) in list_own_leases().items()
            if lease.path == self._state.path and not lease.released and lease.intact
        }
        if not own:
            return
        import threading

        # A daemon of a library counts, too: no call can tell what a thread will do.
        if any(thread is not threading.current_thread() for thread in threading.enumerate()):
            return
        taken: dict[str, Extent] = {}
        for lease, _ in own.values():
            for name, extent in lease.devices.items():
                taken[name] = taken.get(name, NOTHING).joined(extent)
        fits = self.choice.choose(self.scope.to_devices(taken)) is not None
        if fits and not Ledger(self._state).over_limits(self.want, self._terms["priority"], only=own):
            return
        verdict = self._judge()
        held = "; ".join(f"lease {key}, taken at {place}" for key, (_, place) in own.items())
        raise DeadlockError(
            f"{self.request} can be served only once this process gives back what it holds itself: {held}.",
            verdict=verdict,
            hint="release that first, or ask for all devices at once; with wait=SECONDS the call waits all the same,"
            " for a signal handler to release it",
        )

    def find_taken(self, taken: Mapping[str, Extent]) -> dict[str, Extent]:
        """Return the leased part of each device, and the whole of each unleased device that is in use, by id.

        With ``avoid_busy``, a process on a device is use. With a memory filter in the request, less free memory than
        the largest filter asks for is use; a process on a device with enough free memory is none. An observation, which
        starts processes, serves for ``FRESH_SECONDS``; a device that cannot be observed counts as free.

        Args:
            taken: The leased part of each device, by the ledger's names.
        """
        leased = super().find_taken(taken)
        if not (self._avoid_busy or self._memory):
            return leased
        # The ledger asks again after each change on the machine.
        if monotonic() - self._observed[0] > FRESH_SECONDS:
            from anyaccel.inventory.observe import stats

            observed, _ = stats(self.inventory, environ=self.environ)
            self._observed = monotonic(), observed
        in_use = [
            (device, use)
            for device in self.inventory.devices
            if device.id not in leased  # the holder's own use is no obstacle: the lease is
            and (use := self._describe_use(device, self._observed[1].get(device.id, Stats())))
        ]
        # A device of which a candidate is a part is in the way, too.
        concerned = {name for device in self.choice.candidates for name in (device.id, device.parent)}
        self._in_use = [use for device, use in in_use if device.id in concerned]
        return leased | {device.id: Extent(device.units) for device, _ in in_use}

    def _describe_use(self, device: Device, seen: Stats) -> str:
        """Return how a device is in use (with ``avoid_busy``), or its free memory if too little; empty if free."""
        if self._avoid_busy and seen.processes:
            return f"{device.name} is used without a lease, by process {seen.processes[0].pid}"
        if not self._memory or device.memory_bytes is None or seen.memory_used_bytes is None:
            return ""
        free = device.memory_bytes - seen.memory_used_bytes
        if free >= self._memory:
            return ""
        return f"{device.name} has {format_memory_beside(max(0, free), self._memory)} free"

    def make_allocation(self, lease: Lease | None) -> Allocation:
        """Make the allocation of the devices that :meth:`choose` chose last; without an id if ``lease`` is None.

        Without a choice, as on the CPU, it has no devices.
        """
        lease_id = lease.id if lease else ""
        return Allocation(id=lease_id, request=self.request, grants=self.grants, confined=self._confined)

    def plan_lease(self, lease: Lease | None) -> DeviceLease:
        """Plan the launch, and make the open lease; errors pass through.

        A limit of host memory makes a cgroup, and with ``grouped`` also shares whose memory the kernel can limit.
        """
        allocation = self.make_allocation(lease)
        terms: dict[str, Any] = {"environ": self.environ, "lease": allocation.id, "grouped": self._grouped}
        # After the choice of devices, since the environment depends on them: an error here releases the lease.
        launch = plan_launch(allocation, self.inventory, self._options, **terms)
        return DeviceLease(launch, lease, note=self.note, waited=monotonic() - self.began)

    def _open(self, make: Callable[[Lease | None], AnyLease], lease: Lease | None) -> AnyLease:
        """Make the open lease, kept for :meth:`_undo`, and plan the handover; no vendor changes a device yet."""
        made = make(lease)
        self.made = made
        if lease is not None:
            given = made.allocation
            made.handover = plan_handover(given.id, given.devices, self.inventory, self.environ)
        return made

    def _explain(self, error: DevicesBusyError | LimitError) -> AnyaccelError:
        """Make the error of a refused request.

        Returns:
            For a limit of the user, :class:`NeverFitsError`, else :class:`NotFreeError`, with the reasons of
            :func:`why`, judged anew: if the request fits by now, the message is that of ``error``.

        Raises:
            ConfigurationError: If the machine's configuration is invalid or untrusted.
            LedgerError: If the ledger cannot be read.
        """
        verdict = self._judge()
        # The request fits now if the devices are reserved for an earlier request, or were released in between.
        message = str(error) if verdict.fits_now else verdict.message
        if isinstance(error, LimitError):
            return NeverFitsError(message, verdict=verdict, hint=verdict.hint)
        if verdict.fits_now and self._in_use:  # which a verdict, without a look at the devices, does not know
            in_use = f"{self.request} is not free: {'; '.join(self._in_use)}."
            way_out = "a request that waits gets them in time; one without avoid_busy and memory filters gets them now"
            return NotFreeError(in_use, verdict=verdict, hint=way_out)
        told = verdict.fits_now or any(reason.code is ReasonCode.WAITING_BEHIND for reason in verdict.reasons)
        behind = f" {error.ahead} asked for them before." if error.ahead and not told else ""
        return NotFreeError(message + behind, verdict=verdict, hint=verdict.hint)

    def _judge(self) -> Verdict:
        """Judge the request at this moment by the ledger, as if it came now.

        The errors are those of :func:`anyaccel.launcher.verdicts.judge`.
        """
        from anyaccel.launcher.verdicts import judge

        return judge(self, Ledger(self._state), self._terms["priority"])
