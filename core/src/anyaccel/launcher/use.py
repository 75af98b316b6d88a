"""Lease devices for this process, and show exactly these devices to frameworks loaded later."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Sequence

from anyaccel._interrupts import finish_step
from anyaccel.errors import AlreadyLoadedError, UsageError
from anyaccel.launcher.hold import DeviceLease, LeaseRequest, keep
from anyaccel.launcher.inside import bind_thread
from anyaccel.launcher.launch import AcquireOptions, check_options
from anyaccel.linux import list_mapped, tidy_in_child
from anyaccel.linux import mark as marks
from anyaccel.model import Inventory, Request
from anyaccel.scheduler import parse_request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self, Unpack

_calls: list[object] = []
"""Calls of :func:`use` in progress; only the first may go on. A lock could stay locked after an interrupt."""
_active: ProcessLease | None = None
"""The lease of this process, from :func:`use` to its release."""


@tidy_in_child
def _drop_in_child() -> None:
    """Clear the lease and the calls in a forked child: the parent has both."""
    global _active  # noqa: PLW0603 - a process has one environment
    _calls.clear()
    _active = None


class ProcessLease(DeviceLease):
    """Devices leased and visible to this process until its exit.

    The end of a ``with`` statement, or :meth:`release`, frees the devices before. Each variable then gets its former
    value, unless the program has changed the variable. A framework that was loaded in between keeps what it has read.
    """

    def __init__(self, hold: DeviceLease) -> None:
        vars(self).update(vars(hold))  # the same lease, as another class: a copy would release it twice
        environment = self.launch.environment
        self._former = {name: os.environ.get(name) for name in (*environment.set, *environment.unset)}
        self._processors = os.sched_getaffinity(0) if environment.allocation.processors else set()
        self._repeated = self._in_scope = False

    def outer_environ(self) -> dict[str, str]:
        """Return a copy of the environment of this process, with the variables of the lease as before the lease.

        A variable that the program has changed since keeps its present value.
        """
        outer = {**os.environ, **self._find_unchanged()}
        return {name: value for name, value in outer.items() if value is not None}

    def _find_unchanged(self) -> dict[str, str | None]:
        """Return the former values of the variables that still have the lease's value; None for an unset variable."""
        own = self.launch.environment.set
        return {name: former for name, former in self._former.items() if os.environ.get(name) == own.get(name)}

    def repeat(self, request: Request) -> None:
        """Record another call of :func:`use` with the same request; from then on, no ``with`` statement can begin.

        Raises:
            UsageError: If the request differs, or if a ``with`` statement has begun with the lease.
        """
        if self._in_scope or self.allocation.request != request:
            raise self._refusal()
        self._repeated = True

    def release(self) -> None:
        """Release the devices as :class:`DeviceLease` does; restore the variables and the calling thread's processors.

        Does nothing the second time, or in a forked child. A variable that the program has changed stays, and so does
        the mark.

        Warns:
            RuntimeWarning: If a vendor's runtime is loaded: it keeps its part of the devices until this process exits.
        """
        if _active is not self:
            return
        finish_step(self._stop_using)
        held = {device.vendor for device in self.devices}
        reports = (report for report in self.launch.inventory.vendors if report.vendor in held)
        if library := next(filter(None, (find_loaded(report.runtimes) for report in reports)), ""):
            warnings.warn(
                f"{self._names} were released, but {os.path.basename(library)} is loaded in this process and keeps its"
                " part of them until the process exits",
                RuntimeWarning,
                stacklevel=2,
            )

    def _stop_using(self) -> None:
        """Restore variables and processors, and release the devices; a second call does what an interrupt has left."""
        global _active  # noqa: PLW0603 - a process has one environment
        bind_thread(self._processors)
        for name, value in self._find_unchanged().items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        super().release()
        _active = None  # last

    def __enter__(self) -> Self:
        """Return the lease, to be released at the end of the statement; until then, :func:`use` refuses every call.

        Raises:
            UsageError: If several calls of :func:`use` returned the lease, or it was released.
        """
        if _active is not self:
            raise self._gone()
        if self._repeated:  # other code relies on the lease until the process exits
            raise self._refusal()
        self._in_scope = True
        return self

    def _refusal(self) -> UsageError:
        """Make the error that this process uses the devices of the lease already, with the ways out."""
        return UsageError(
            f"this process uses {self._names} already",
            hint="release that first, by release() of what anyaccel.use() returned, or ask for all at once, as in"
            " anyaccel.use('GPU:1 TPU:4')",
        )

    @property
    def _names(self) -> str:
        """The ids of the devices for messages, separated by commas; ``no devices`` for none."""
        return ", ".join(device.id for device in self.devices) or "no devices"


def use(request: str | Sequence[str] | Request, **options: Unpack[AcquireOptions]) -> ProcessLease:
    """Lease devices for this process, and set the environment so that frameworks see exactly these devices.

    Call it before a framework is imported: a vendor's runtime reads its variables once. :func:`anyaccel.current` then
    describes the devices, and child processes see and hold the same devices.

    Args:
        request: The request; several terms are one request, such as ``"GPU:1 TPU:4"``.
        inventory: The machine's inventory; detected if None, by means of the next three.
        machine: The machine; see :func:`anyaccel.detect`.
        declare: Devices to count by resource name; see :func:`anyaccel.declare`.
        timeout: Time that each vendor's detection may take.
        options: ``wait``, ``priority``, ``note``, ``avoid_busy``, ``on_wait``, ``unallocated``, ``mask``, ``time``,
            ``cap`` and ``bind`` as for :func:`anyaccel.acquire`. ``bind`` binds the calling thread, and the threads and
            processes that it starts later.

    Returns:
        The lease, which lasts until this process exits. A second call with the same request returns the same lease, and
        ignores the values of other options. A ``with`` statement releases the devices at its end,
        :meth:`ProcessLease.release` at once.

    Raises:
        UsageError: If this process uses other devices already, or these devices in a ``with`` statement; if another
            call of this function is in progress; or if an option is invalid, or applies only to a process before its
            start.
        UnknownOptionError: If there is no such option.
        AlreadyLoadedError: If the runtime of a vendor on the machine is loaded in this process.
        RequestError, UnknownNameError: If the request is invalid.
        NeverFitsError, NotFreeError, DeadlockError, LedgerError, EnvConflictError, PluginError, OSError, ValueError: As
            for :func:`anyaccel.acquire`.

    Examples:
        >>> with anyaccel.use("GPU:2", machine="sim:H100:4") as devices:
        ...     len(devices.devices), len(anyaccel.current().devices)
        (2, 2)
    """
    check_options("use", options, AcquireOptions.__annotations__)
    for name in ("memory", "confined", "enforce", "environ"):
        if options.get(name) not in (None, False):
            raise UsageError(f"{name} applies to a process that is about to start; this process runs already")
    wanted = parse_request(request)
    made: ProcessLease | None = None
    me = object()
    try:
        _calls.append(me)
        if _calls[0] is not me:
            raise UsageError(  # noqa: TRY301
                "another thread of this process is about to use devices", hint="ask for all at once, in one thread"
            )
        used = _active
        if used is None:
            pending = LeaseRequest(wanted, marks.draw_for_process, options)
            refuse_if_loaded(pending.inventory)  # before the wait: a late error would waste it
            used = made = pending.get(pending.plan_lease, _begin)
        else:
            used.repeat(wanted)
        _calls.remove(me)
    except BaseException:
        if made is not None:
            made.release()
        if me in _calls:
            _calls.remove(me)
        raise
    return used  # no bytecode between the last call and here lets an interrupt in


def _begin(hold: DeviceLease) -> ProcessLease:
    """Make this process the holder of a lease, set its environment to the devices, and apply cap and binding.

    From then on, :func:`get_process_lease` returns the lease. After an error, the lease is released, and variables and
    binding are restored; the mark stays on the process.
    """
    global _active  # noqa: PLW0603 - a process has one environment
    made = ProcessLease(keep(hold))
    try:
        _active = made
        made.launch.make_setup().apply()
    except BaseException:
        made.release()
        raise
    return made


def get_process_lease() -> ProcessLease | None:
    """Return the lease of this process from :func:`use`; None before, after its release, and in a forked child."""
    return _active


def refuse_if_loaded(inventory: Inventory) -> None:
    """Check that no runtime of a vendor on the machine is loaded in this process: a runtime reads its variables once.

    Vendors of simulated devices count, too.

    Raises:
        AlreadyLoadedError: If the runtime of a vendor on the machine is loaded.
    """
    present = {device.vendor for device in inventory.devices}
    for report in inventory.vendors:
        library = find_loaded(report.runtimes) if report.vendor in present else ""
        if library:
            masks = [*report.hidden.set] if report.hidden is not None else []
            raise AlreadyLoadedError(
                f"{os.path.basename(library)} of {report.vendor} is loaded in this process already, and reads "
                f"{', '.join(masks or report.env_vars)} once: it would not see which devices this process was given",
                hint="call anyaccel.use() before a framework is imported; in a notebook, restart the kernel first",
            )


def find_loaded(libraries: Collection[str]) -> str:
    """Return the path of the first shared library mapped into this process whose name is wanted; empty for none.

    Args:
        libraries: Beginnings of the file names, such as ``libacme.so``.

    Raises:
        OSError: If the list of mapped files cannot be read; not without ``libraries``.
    """
    beginnings = tuple(libraries)
    mapped = list_mapped() if beginnings else ()
    return next((path for path in mapped if os.path.basename(path).startswith(beginnings)), "")
