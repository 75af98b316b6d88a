"""Devices for this very process: held, and shown to it by its own environment before a framework is loaded."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence

from anyaccel.errors import AlreadyLoadedError, UsageError
from anyaccel.launcher.hold import Hold, Wish, keep
from anyaccel.launcher.inside import put
from anyaccel.linux import mark as marks
from anyaccel.linux.fork import tidy_in_child
from anyaccel.model import Inventory, Request
from anyaccel.scheduler import parse_request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Unpack

    from anyaccel.launcher.options import AcquireOptions

_beginning: list[object] = []
"""Who is about to use devices; the first may. Not a lock, which an interrupt could leave locked."""
_in_use: weakref.ref[Use] | None = None
_kept: Use | None = None
"""That of a statement of its own, which nobody else keeps."""


@tidy_in_child
def _forget() -> None:
    global _in_use, _kept
    _beginning.clear()
    _in_use, _kept = None, None


class Use(Hold):
    """Devices that this process holds and sees, until they are released or the process has ended.

    In a ``with`` statement they are released at its end. Once it was kept in a variable and nothing refers to it any
    more, the devices are given back, with a warning. The variables that were set get their former values then, as far
    as nobody has changed them since; a framework that was loaded meanwhile has read them already.
    """

    def __init__(self, hold: Hold) -> None:
        vars(self).update(vars(hold))
        environment = self.launch.environment
        former = {name: os.environ.get(name) for name in (*environment.set, *environment.unset)}
        self._former = former
        before = os.sched_getaffinity(0) if environment.allocation.processors else set()
        self._dropped = weakref.finalize(self, _give_back, hold, former, before, os.getpid(), dropped=True)
        self._dropped.atexit = False  # the process may use its devices until it is gone, which ends the lease

    def begin(self) -> None:
        """Show the devices to this process."""
        self.launch.settle().apply()

    def outer_environ(self) -> dict[str, str]:
        """Return the environment of this process without what this use has set: it sees the machine from outside."""
        outer = {**os.environ, **{name: value for name, value in self._former.items() if value is not None}}
        return {name: value for name, value in outer.items() if self._former.get(name, value) is not None}

    def release(self) -> None:
        """Give the devices back, and the variables their former values; does nothing the second time.

        Warns:
            RuntimeWarning: When a vendor's runtime is loaded by now: what it holds of the devices it keeps until this
                process has ended.
        """
        ending = self._dropped.peek()
        if ending is not None:
            _, function, arguments, _ = ending
            function(*arguments, dropped=False)  # after an interrupt, it can be done again
            self._dropped.detach()


def use(request: str | Sequence[str] | Request, **options: Unpack[AcquireOptions]) -> Use:
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
        The devices. As a statement of its own, ``anyaccel.use("GPU:1")``, it lasts until this process has ended, and
        the same statement once more does nothing. Who keeps what is returned may release it; when nothing refers to it
        any more, they are given back.

    Raises:
        UsageError: When this process uses devices already.
        UnknownOptionError: When there is no such option.
        AlreadyLoadedError: When the runtime of a vendor that is on the machine is loaded in this process.
        NeverFitsError, NotFreeError, DeadlockError, LedgerError: As of :func:`anyaccel.acquire`.

    Examples:
        >>> with anyaccel.use("GPU:2", machine="sim:H100:4") as devices:
        ...     len(devices.devices), len(anyaccel.current().devices)
        (2, 2)
    """
    global _in_use, _kept  # noqa: PLW0603 - a process has one environment
    from anyaccel.launcher.options import AcquireOptions, check_options

    check_options("use", options, AcquireOptions.__annotations__)
    for name in ("memory", "confined", "enforce", "environ"):
        if options.get(name) not in (None, False):
            raise UsageError(f"{name} is for what is about to be started, and this process has been started already")
    wanted = parse_request(request)
    alone = _stands_alone(sys._getframe(1))  # noqa: SLF001 - nothing else tells a statement from an expression
    me = object()
    try:
        _beginning.append(me)
        if _beginning[0] is not me:
            raise UsageError(
                "another thread of this process is about to use devices; ask for all at once, in one thread"
            )
        made = in_use()
        if made is None:
            made = _begin(wanted, options)
            _in_use = weakref.ref(made)
        elif not alone or made is not _kept or made.allocation.request != wanted:
            raise UsageError(
                f"this process uses {_names(made)} already",
                hint="release that first (in a notebook, %accel release), or ask for all at once, as in"
                " anyaccel.use('GPU:1 TPU:4')",
            )
        if alone:
            _kept = made
    finally:
        _beginning.remove(me)
    return made


def _begin(request: Request, options: AcquireOptions) -> Use:
    """Hold devices and show them to this process; nothing is left when that fails, or is interrupted."""
    made: Use | None = None
    with Wish(request, marks.of_process, options) as wish:
        refuse_if_loaded(wish.inventory)
        try:
            made = Use(keep(wish.get()))
            made.begin()
        except BaseException:
            if made is not None:
                made.release()
            raise
    return made


def in_use() -> Use | None:
    """What this process uses; None when it uses nothing."""
    used = _in_use() if _in_use is not None else None
    return used if used is not None and used._dropped.alive and not used._released else None  # noqa: SLF001 - ours


def _stands_alone(frame: FrameType) -> bool:
    """Whether nobody gets the value of the call that a frame makes: it is thrown away, or shown by an interpreter."""
    import dis

    following = next((each for each in dis.get_instructions(frame.f_code) if each.offset > frame.f_lasti), None)
    if following is None:
        return False
    return following.opname in ("POP_TOP", "PRINT_EXPR") or following.argrepr == "INTRINSIC_PRINT"


def _names(hold: Hold) -> str:
    return ", ".join(device.id for device in hold.devices) or "no devices"


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


def _give_back(
    hold: Hold, former: Mapping[str, str | None], before: Collection[int], pid: int, *, dropped: bool
) -> None:
    """End a use, in the process that began it."""
    if os.getpid() != pid:
        return
    put(before)
    environment = hold.launch.environment
    for name, value in former.items():
        if os.environ.get(name) != environment.set.get(name):
            continue  # somebody else has changed it since
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    held = {device.vendor for device in hold.devices}
    reports = (report for report in hold.launch.inventory.vendors if report.vendor in held)
    library = next(filter(None, (loaded(report.runtimes) for report in reports)), "")
    names = _names(hold)
    if dropped and library:
        warnings.warn(
            f"nothing refers to what anyaccel.use() returned any more; {os.path.basename(library)} is loaded and may"
            f" use {names} still, so that they stay held until this process has ended",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    hold.release()
    if dropped:
        warnings.warn(
            f"{names} were given back, since nothing refers to what anyaccel.use() returned any more; this process sees"
            " what it saw before. Keep it in a variable that lasts as long as they are needed, or call anyaccel.use()"
            " as a statement of its own, which holds them until the process has ended",
            RuntimeWarning,
            stacklevel=3,
        )
    elif library:
        warnings.warn(
            f"{names} were given back, and {os.path.basename(library)} is loaded in this process: what it holds of them"
            " it keeps until the process has ended",
            RuntimeWarning,
            stacklevel=3,
        )
