"""Hold devices, so that no other process on this machine gets them, with the environment that shows exactly these."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic
from types import TracebackType
from typing import TypeVar

from anyaccel.errors import DeadlockError, DevicesBusyError, LimitError, NeverFitsError, NotFreeError
from anyaccel.inventory.detect import survey
from anyaccel.launcher.busy import Foreign
from anyaccel.launcher.choosing import choice_of, local_scheduler
from anyaccel.launcher.launch import Launch, check_start, plan_launch
from anyaccel.launcher.scope import Scope
from anyaccel.launcher.usage import OpenLease
from anyaccel.launcher.verdicts import beyond_limits, verdict_of
from anyaccel.launcher.waits import describe_wait, log_wait, note_own, other_threads, own_leases
from anyaccel.ledger import Lease, LeaseRecord, Ledger
from anyaccel.linux import mark as marks
from anyaccel.model import NOTHING, Allocation, Device, Extent, Grant, Request, replace
from anyaccel.model.allocation import share_table
from anyaccel.model.verdict import ReasonCode
from anyaccel.scheduler import Choice, Verdict, parse_request

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any, Self, Unpack

    from anyaccel.launcher.options import AcquireOptions
    from anyaccel.ledger.acquisition import Acquisition

T = TypeVar("T")


class DeviceLease(OpenLease):
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
        self.end_lease(self._started)
        self.remove_group()

    def remove_group(self) -> None:
        """Remove the cgroup of what was started with the devices, if nothing runs in it any more."""
        if self.launch.environment.group is not None:
            from anyaccel.launcher.limits import remove_group

            remove_group(self.launch.environment.group)

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


def acquire(request: str | Sequence[str] | Request, **options: Unpack[AcquireOptions]) -> DeviceLease:
    """Hold devices, when it is our turn.

    Whoever asks later for the same devices, in any process of this machine, is served later. When this process dies,
    the devices are given out again once all that it has started since the first call has ended.
    :meth:`DeviceLease.release` gives them back at once, except for what :meth:`DeviceLease.popen` started.

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
            ``memory``: how much of the host's memory the kernel leaves what :meth:`DeviceLease.popen` starts, such as
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
    return _make_request("acquire", request, options).get(keep)


async def acquire_async(request: str | Sequence[str] | Request, **options: Unpack[AcquireOptions]) -> DeviceLease:
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

    pending = await asyncio.to_thread(_make_request, "acquire_async", request, options)
    return await pending.get_async(keep)


def _make_request(function: str, request: str | Sequence[str] | Request, options: AcquireOptions) -> LeaseRequest:
    """Make the request for devices of this very process, once its options are checked."""
    from anyaccel.launcher.options import AcquireOptions, check_options

    check_options(function, options, AcquireOptions.__annotations__)
    return LeaseRequest(request, marks.draw_for_process, options)


def keep(hold: DeviceLease) -> DeviceLease:
    """Keep a hold for this very process."""
    note_own(hold.mark_process().begin_entry().lease)
    return hold


def take(
    request: str | Sequence[str] | Request,
    mark: Callable[[Collection[marks.Mark]], marks.Mark],
    *,
    tell: Callable[[str], object] | None = None,
    grouped: bool = False,
    **options: Unpack[AcquireOptions],
) -> DeviceLease:
    """Hold devices like :func:`acquire`, for something that will carry a mark.

    Args:
        request: What is wanted.
        mark: Gives the mark; see :class:`anyaccel.ledger.Want`.
        tell: Called with a sentence about the wait, when it begins and on change, where there is no ``on_wait``.
        grouped: Whether all that is going to use the devices will be started by the plan of the hold, so that a cgroup
            may hold it to a share.
        options: As of :func:`acquire`; their names are not checked.
    """
    return LeaseRequest(request, mark, options, tell=tell, grouped=grouped).get(lambda hold: hold)


async def take_async(
    request: str | Sequence[str] | Request,
    mark: Callable[[Collection[marks.Mark]], marks.Mark],
    **options: Unpack[AcquireOptions],
) -> DeviceLease:
    """Hold devices like :func:`take`, on the running event loop, for what is all started by the plan of the hold."""
    import asyncio

    pending = await asyncio.to_thread(LeaseRequest, request, mark, options, grouped=True)
    return await pending.get_async(lambda hold: hold)


class LeaseRequest:
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
        self._made: DeviceLease | None = None
        self._choice = choice or choice_of(self.inventory, self.request)
        self.nothing = not self._choice.ever_fits
        if self.nothing:
            verdict = local_scheduler(self.inventory).why(self.request)
            if not verdict.cpu:
                raise NeverFitsError(verdict.message, verdict=verdict, hint=verdict.hint)
            return
        self.ledger = Ledger.open(self.environ)
        self.scope = Scope.make(self.inventory, self.environ)
        avoid_busy = options.get("avoid_busy", False)
        self._foreign = Foreign(self.inventory, self.request, self.environ, avoid_busy=avoid_busy)
        want = self.scope.want_of(self._choice, self.inventory)
        self.want = replace(want, seconds=time, confined=self._confined, mark=mark)
        self._terms: dict[str, Any] = {"wait": options.get("wait"), "priority": options.get("priority", 0)}
        self._terms |= {"note": self._note, "on_wait": self._waits}
        self._on_wait = options.get("on_wait")
        self._blocks = False
        self._began = monotonic()

    def get(self, use: Callable[[DeviceLease], T]) -> T:
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

    async def get_async(self, use: Callable[[DeviceLease], T]) -> T:
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

    def _hold(self, lease: Lease | None) -> DeviceLease:
        """Make the hold."""
        allocation = self.allocation(lease)
        terms: dict[str, Any] = {"environ": self.environ, "lease": allocation.id, "grouped": self._grouped}
        launch = plan_launch(allocation, self.inventory, self._options, **terms)
        waited = monotonic() - self._began if lease else 0.0
        self._made = DeviceLease(launch, lease, note=self._note if lease else "", waited=waited)
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
        return verdict_of(self.inventory, self.request, self.ledger, self.environ, **terms)
