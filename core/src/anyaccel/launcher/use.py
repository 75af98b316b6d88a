"""Devices for this very process: held, and shown to it by its own environment before a framework is loaded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Sequence

from anyaccel.errors import AlreadyLoadedError, UsageError
from anyaccel.launcher.hold import DeviceLease, LeaseRequest, keep
from anyaccel.launcher.inside import put
from anyaccel.linux import mark as marks
from anyaccel.linux.fork import tidy_in_child
from anyaccel.model import Inventory, Request
from anyaccel.scheduler import parse_request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self, Unpack

    from anyaccel.launcher.options import AcquireOptions

_beginning: list[object] = []
"""Calls that are about to use devices; the first may. Not a lock, which an interrupt could leave locked."""
_in_use: ProcessLease | None = None
"""What this process uses, kept here until it is released or the process has ended."""


@tidy_in_child
def _forget() -> None:
    global _in_use  # noqa: PLW0603 - a process has one environment
    _beginning.clear()
    _in_use = None


class ProcessLease(DeviceLease):
    """Devices that this process holds and sees until the process has ended.

    In a ``with`` statement they are released at its end, and :meth:`release` gives them back at once. The variables
    that were set get their former values then, as far as they were not changed meanwhile; a framework that was loaded
    meanwhile has read them already.
    """

    def __init__(self, hold: DeviceLease) -> None:
        vars(self).update(vars(hold))
        environment = self.launch.environment
        self._former = {name: os.environ.get(name) for name in (*environment.set, *environment.unset)}
        self._processors = os.sched_getaffinity(0) if environment.allocation.processors else set()
        self._asked_again = self._in_scope = False

    def outer_environ(self) -> dict[str, str]:
        """Return the environment of this process without what this use has set: it sees the machine from outside."""
        outer = {**os.environ, **{name: value for name, value in self._former.items() if value is not None}}
        return {name: value for name, value in outer.items() if self._former.get(name, value) is not None}

    def ask_again(self, request: Request) -> None:
        """Take note that the same was asked for once more, which changes nothing.

        Raises:
            UsageError: When it is not the same, or lasts for a ``with`` statement of other code alone.
        """
        if self._in_scope or self.allocation.request != request:
            raise self._refusal()
        self._asked_again = True

    def release(self) -> None:
        """Give the devices back, and the variables their former values; does nothing the second time, or in a fork.

        Warns:
            RuntimeWarning: When a vendor's runtime is loaded by now: what it holds of the devices it keeps until this
                process has ended.
        """
        global _in_use  # noqa: PLW0603 - a process has one environment
        if _in_use is not self:
            return
        put(self._processors)
        for name, value in self._former.items():
            if os.environ.get(name) != self.launch.environment.set.get(name):
                continue  # the program has changed it since
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        super().release()
        _in_use = None  # last: after an interrupt, all of it can be done again
        held = {device.vendor for device in self.devices}
        reports = (report for report in self.launch.inventory.vendors if report.vendor in held)
        if library := next(filter(None, (loaded(report.runtimes) for report in reports)), ""):
            warnings.warn(
                f"{self._names} were given back, and {os.path.basename(library)} is loaded in this process: what it"
                " holds of them it keeps until the process has ended",
                RuntimeWarning,
                stacklevel=2,
            )

    def __enter__(self) -> Self:
        if self._asked_again:  # other code counts on it until the process has ended
            raise self._refusal()
        self._in_scope = True
        return self

    def _refusal(self) -> UsageError:
        return UsageError(
            f"this process uses {self._names} already",
            hint="release that first (in a notebook, %accel release), or ask for all at once, as in"
            " anyaccel.use('GPU:1 TPU:4')",
        )

    @property
    def _names(self) -> str:
        return ", ".join(device.id for device in self.devices) or "no devices"


def use(request: str | Sequence[str] | Request, **options: Unpack[AcquireOptions]) -> ProcessLease:
    """Hold devices for this process, and set its own environment so that frameworks see exactly these.

    Call it before a framework is imported: a vendor's runtime reads its variables once. Inside,
    :func:`anyaccel.current` says what is held, and what this process starts sees and holds the same devices.

    Args:
        request: What is wanted; several terms are one request, such as ``"GPU:1 TPU:4"``.
        inventory: The machine's inventory; detected when None, and then the next three count.
        machine: The machine; see :func:`anyaccel.detect`.
        declare: Devices to count by resource name; see :func:`anyaccel.declare`.
        timeout: Seconds that each vendor's detection may take.
        options: ``wait``, ``priority``, ``note``, ``avoid_busy``, ``on_wait``, ``unallocated``, ``mask``, ``time``,
            ``cap`` and ``bind`` as of :func:`anyaccel.acquire`. ``bind`` binds the thread that calls this, and what it
            starts from then on, other threads among it.

    Returns:
        The devices, until this process has ended. The same request once more changes nothing, and returns the same. A
        ``with`` statement releases them at its end, and :meth:`ProcessLease.release` at once.

    Raises:
        UsageError: When this process uses other devices already, or uses these in a ``with`` statement.
        UnknownOptionError: When there is no such option.
        AlreadyLoadedError: When the runtime of a vendor that is on the machine is loaded in this process.
        NeverFitsError, NotFreeError, DeadlockError, LedgerError: As of :func:`anyaccel.acquire`.

    Examples:
        >>> with anyaccel.use("GPU:2", machine="sim:H100:4") as devices:
        ...     len(devices.devices), len(anyaccel.current().devices)
        (2, 2)
    """
    from anyaccel.launcher.options import AcquireOptions, check_options

    check_options("use", options, AcquireOptions.__annotations__)
    for name in ("memory", "confined", "enforce", "environ"):
        if options.get(name) not in (None, False):
            raise UsageError(f"{name} is for what is about to be started, and this process has been started already")
    wanted = parse_request(request)
    made: ProcessLease | None = None
    me = object()
    try:
        _beginning.append(me)
        if _beginning[0] is not me:
            raise UsageError(  # noqa: TRY301
                "another thread of this process is about to use devices; ask for all at once, in one thread"
            )
        used = _in_use
        if used is None:
            pending = LeaseRequest(wanted, marks.draw_for_process, options)
            refuse_if_loaded(pending.inventory)
            used = made = pending.get(_begin)
        else:
            used.ask_again(wanted)
        _beginning.remove(me)
    except BaseException:
        if made is not None:
            made.release()
        if me in _beginning:
            _beginning.remove(me)
        raise
    return used  # nothing comes between the last call and here, an interrupt neither


def _begin(hold: DeviceLease) -> ProcessLease:
    """Show what is held to this process."""
    global _in_use  # noqa: PLW0603 - a process has one environment
    made = ProcessLease(keep(hold))
    try:
        _in_use = made
        made.launch.make_setup().apply()
    except BaseException:
        made.release()
        raise
    return made


def get_process_lease() -> ProcessLease | None:
    """What this process uses; None when it uses nothing."""
    return _in_use


def refuse_if_loaded(inventory: Inventory) -> None:
    """Make sure that this process can still be shown which of a machine's devices it is given.

    Raises:
        AlreadyLoadedError: When the runtime of a vendor that is on the machine is loaded in this process.
    """
    present = {device.vendor for device in inventory.devices}
    for report in inventory.vendors:
        library = loaded(report.runtimes) if report.vendor in present else ""
        if library:
            masks = [*report.hidden.set] if report.hidden is not None else []
            raise AlreadyLoadedError(
                f"{os.path.basename(library)} of {report.vendor} is loaded in this process already, and reads "
                f"{', '.join(masks or report.env_vars)} once: it would not see which devices this process was given",
                hint="call anyaccel.use() before a framework is imported; in a notebook, restart the kernel first",
            )


def loaded(libraries: Collection[str]) -> str:
    """Path of the first of some shared libraries that is mapped into this process; empty when none is.

    Args:
        libraries: How their file names begin, such as ``libacme.so``.
    """
    if not libraries:
        return ""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        paths = dict.fromkeys(line.partition("/")[2].rstrip("\n") for line in file if "/" in line)
    beginnings = tuple(libraries)
    return next((f"/{path}" for path in paths if os.path.basename(path).startswith(beginnings)), "")
