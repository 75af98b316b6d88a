"""The setup of a worker: the message before any user code."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from anyaccel.errors import WorkerStartError
from anyaccel.launcher.environment import WorkerEnvironment
from anyaccel.launcher.launch import plan_launch
from anyaccel.launcher.options import StartOptions
from anyaccel.linux.mark import Mark
from anyaccel.model import Allocation, Inventory, Request, Value, replace
from anyaccel.pool.payload import PROTOCOL, Pickled, dumps_whole

CPU = Allocation(id="cpu", request=Request(terms=()), grants=())
"""The allocation of a worker without devices."""

USUAL: StartOptions = {"cap": True, "bind": None}
"""Defaults of the options with which workers are started."""


class Preparation(Value):
    """The preparation of the workers of a pool before their first call.

    Attributes:
        start: Options with which they are started on their devices.
        sandbox: Pickled call that confines the process further, or None.
        initializer: Pickled call of the user's initializer, or None.
        warmup: Pickled call for the first use of the devices, for workers with devices, or None.
        plain: Whether answers are plain data.
    """

    start: StartOptions = USUAL
    sandbox: bytes | None = None
    initializer: bytes | None = None
    warmup: bytes | None = None
    plain: bool = False

    @property
    def staged(self) -> bool:
        """Whether a worker reports the end of its preparation, because enforcement, a sandbox or user code may fail."""
        return bool(self.start.get("enforce") or self.sandbox or self.initializer or self.warmup)

    def make_setup(
        self,
        allocation: Allocation,
        inventory: Inventory,
        *,
        lease: str,
        mark: Mark,
        environ: Mapping[str, str],
        path: list[str],
        ready: bool,
    ) -> tuple[WorkerEnvironment, Pickled]:
        """Make the first message to a worker, and the worker's cgroup if a limit needs one; the caller removes that.

        Args:
            allocation: Its devices.
            inventory: The machine.
            lease: Id of the lease that other processes see; empty if there is none.
            mark: The mark that the worker sets on itself.
            environ: The environment that it was forked with.
            path: The module path that it was forked with; if that of this process differs now, the message has the
                latter.
            ready: Whether it sends READY before it runs user code.

        Returns:
            The worker's environment, with the allocation as it is enforced and the cgroup; and the message.

        Raises:
            EnforcementError: When the worker must be confined or held to memory, and the kernel cannot.
            EnvConflictError, PluginError: When the environment or the sandbox cannot be made.
            UsageError: When the memory limit is invalid.
            WorkerStartError: When the working directory does not exist any more.
        """
        try:
            directory = os.getcwd()
        except OSError as error:
            raise WorkerStartError(
                f"no worker can be started: the working directory has gone ({error.strerror})"
            ) from error
        # After the check: an error between the plan and the start would leave the plan's cgroup.
        launch = plan_launch(allocation, inventory, self.start, lease=lease, forked=True)
        inside = replace(launch, mark=mark).make_setup(environ)
        message = {
            "inside": inside._replace(directory=directory, path=None if sys.path == path else list(sys.path)),
            "ready": ready,
            "staged": self.staged,
            "plain": self.plain,
            "sandbox": self.sandbox,
            "initializer": self.initializer,
            "warmup": self._warmup_on(allocation),
        }
        return launch.environment, Pickled(pickle.dumps(message, PROTOCOL), [])

    def _warmup_on(self, allocation: Allocation) -> tuple[bytes, str] | None:
        """Return the warm-up and the names of the devices in messages; None without a warm-up or without devices."""
        if self.warmup is None or not allocation.devices:
            return None
        return self.warmup, ", ".join(f"{device.name} ({device.id})" for device in allocation.devices)


def pickled_call(function: Callable[..., Any] | None, arguments: tuple[Any, ...] = ()) -> bytes | None:
    """Pickle a function with its arguments for :class:`Preparation`; return None if the function is None.

    Raises:
        Exception: When the function or an argument cannot be pickled.
    """
    return None if function is None else dumps_whole((function, arguments))


@contextlib.contextmanager
def open_outputs(log: str | None = None) -> Iterator[tuple[int, int]]:
    """Open descriptors for a worker's standard output and error, as a context: a log file, or those of this process.

    The log file is made if needed, and appended to. An output that this process has closed becomes ``/dev/null``.
    Opened descriptors are closed when the context ends.

    Raises:
        OSError: When the file cannot be opened.
    """
    made = os.O_CREAT | os.O_APPEND if log else 0
    # A program may have closed its own output, as daemons do: then the worker's is discarded.
    opened = os.open(log or os.devnull, os.O_WRONLY | os.O_CLOEXEC | made, 0o666)
    try:
        yield (opened, opened) if log else (1 if _is_open(1) else opened, 2 if _is_open(2) else opened)
    finally:
        os.close(opened)


def _is_open(descriptor: int) -> bool:
    """Return whether this process has a descriptor of this number."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
