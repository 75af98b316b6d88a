"""Functions run in processes that see exactly the devices they were given."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from anyaccel.errors import UsageError
from anyaccel.launcher.sandbox import Enforce
from anyaccel.model import Allocation
from anyaccel.probe.machine import Machine
from anyaccel.scheduler import RequestLike
from anyaccel.workers.engine import Engine, Setting, open_engine
from anyaccel.workers.launching import Preparation, call
from anyaccel.workers.logs import Logs
from anyaccel.workers.loop import loop
from anyaccel.workers.submitter import Submitter, check_seconds, make_options

CONFINING = ("anyaccel.launcher.sandbox", "anyaccel.launcher.landlock", "anyaccel.launcher.reach")
"""Modules by which a worker is confined: imported once for all."""


class Pool(Submitter):
    """An executor whose calls run in processes that see exactly the devices they were given.

    A call that holds devices has a process of its own by default, since vendors' runtimes give memory back only when
    their process ends. Calls without needs run on the CPU with all devices hidden, in processes that are used again.

    Args:
        needs: The devices that each call holds while it runs, such as ``"GPU:1"``; None for the CPU alone.
        engine: What decides where calls run: ``"local"`` for this machine, or ``"ray"`` for the nodes of a Ray cluster.
        address: Where the cluster is, as ``ray.init`` takes it; None for the one that is found, or made on this machine
            where there is none.
        max_workers: Processes at the same time; None for as many as there are devices, and processors for calls
            without needs.
        machine: The machine, where the engine is local; see :func:`anyaccel.detect`.
        declare: Devices to count by resource name whatever is found; see :func:`anyaccel.declare`.
        max_calls: Calls after which a process is replaced, 0 for never; None for 1 where devices are needed, and
            else 0.
        preload: Modules that are imported once for all workers, before they are forked.
        initializer: Called in each worker before its first call.
        initargs: Arguments of the initializer.
        unallocated: Whether vendors of which nothing was given are hidden, or left as the environment has them.
        mask: Whether masks name devices by stable id or by index, where the vendor's runtime takes both.
        timeout: Seconds that a call may run; None for no limit. Waiting for devices does not count.
        retries: Times that a call is run again when its worker or its machine has died. A call that raises, takes too
            long or is cancelled is not run again.
        grace: Seconds between asking a process to end and killing it.
        idle: Seconds after which a process that is kept for later calls gives its devices back.
        logs: Directory for the output of the calls, a file each; None to let it go where that of this process goes.
        enforce: Whether the kernel refuses workers, and all that they start, the device nodes of all other devices:
            True to insist, ``"try"`` to do without where the kernel cannot. What is not refused is said by
            ``future.allocation.gaps``, and inside of a call by ``anyaccel.current().gaps``.
        sandbox: Called in each worker right before any code of yours, to confine the process further; when it
            raises, none of your code runs.
        results: How what workers send is read: ``"plain"`` as data of plain types, none of which runs code here, or
            ``"pickle"`` as whatever they made it, which may run any. None for ``"plain"`` where ``enforce`` is given,
            and ``"pickle"`` else.
        shared: Whether every process on the machine knows what is held. When not, only pools of this process that are
            not shared either respect each other.

    Raises:
        UsageError: When an argument makes no sense.
        EnforcementError: When workers must be confined and the kernel cannot.
        MachineError: When ``machine`` names no machine.
        StateDirectoryError: When there is no directory for leases that can be trusted.
        NeverFitsError: When the machine can never serve ``needs``.
    """

    def __init__(
        self,
        needs: RequestLike | None = None,
        *,
        engine: str = "local",
        address: str | None = None,
        max_workers: int | None = None,
        machine: str | Machine | None = None,
        declare: Mapping[str, int] | None = None,
        max_calls: int | None = None,
        preload: Sequence[str] = (),
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
        unallocated: Literal["hide", "inherit"] = "hide",
        mask: Literal["id", "index"] = "id",
        timeout: float | None = None,
        retries: int = 0,
        grace: float = 10.0,
        idle: float = 10.0,
        logs: str | os.PathLike[str] | None = None,
        enforce: Enforce = False,
        sandbox: Callable[[], None] | None = None,
        results: Literal["plain", "pickle"] | None = None,
        shared: bool = True,
    ) -> None:
        if max_workers is not None and max_workers <= 0:
            raise ValueError(f"max_workers must be greater than 0 (got {max_workers!r:.60})")
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer must be a callable (got {initializer!r:.60})")
        if enforce not in (True, False, "try"):
            raise UsageError(f"enforce must be True, False or 'try' (got {enforce!r:.60})")
        if results not in ("plain", "pickle", None):
            raise UsageError(f"results must be 'plain', 'pickle' or None (got {results!r:.60})")
        check_seconds(grace=grace, idle=idle)
        options = make_options(needs, max_calls=max_calls, timeout=timeout, retries=retries)
        setting = Setting(
            preparation=Preparation(
                unallocated=unallocated,
                mask=mask,
                enforce=enforce,
                sandbox=call(sandbox),
                initializer=call(initializer, tuple(initargs)),
                plain=results == "plain" or (results is None and bool(enforce)),
            ),
            preload=((preload,) if isinstance(preload, str) else tuple(preload)) + (CONFINING if enforce else ()),
            max_workers=max_workers,
            grace=grace,
            idle=idle,
            logs=None if logs is None else Logs(os.fspath(logs)),
            shared=shared,
            machine=machine,
            declare=declare,
            address=address,
        )
        core = open_engine(engine, setting)
        super().__init__(core, options)
        if options.needs is not None:
            core.check(options.needs)
        _cores.add(core)
        atexit.unregister(_finish_all)
        atexit.register(_finish_all)  # before whatever the engine has registered: that may be what our calls need
        # A finalizer runs wherever garbage is collected, perhaps under one of our locks: it only leaves a note.
        weakref.finalize(self, _abandon, core).atexit = False

    @property
    def kept_aside(self) -> tuple[tuple[Allocation, str], ...]:
        """Devices that nobody gets although their holder has been ended, each with the reason.

        A process may be stuck in the kernel, or its memory on the device may not be free yet. They come back when that
        changes.
        """
        return self._core.kept_aside()

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: object) -> None:
        """Wait for all calls; after Ctrl-C, stop them, and kill them when it is pressed again."""
        try:
            if kind is not None and issubclass(kind, KeyboardInterrupt):
                self._core.stop(self._core.grace)
            self.shutdown(wait=True)
        except KeyboardInterrupt:
            self._core.stop(0)
            raise


_cores: weakref.WeakSet[Engine] = weakref.WeakSet()


def _abandon(core: Engine) -> None:
    if not core.foreign:
        loop().call_soon(lambda: core.shutdown(wait=False))


@atexit.register
def _finish_all() -> None:
    import sys

    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    try:
        for core in list(_cores):
            if interrupted:
                core.stop(core.grace)
            core.shutdown(wait=True)
    except KeyboardInterrupt:
        for core in list(_cores):
            core.stop(0)


def _disown_all() -> None:
    for core in list(_cores):
        core.foreign = True


os.register_at_fork(after_in_child=_disown_all)
