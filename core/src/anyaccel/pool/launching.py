"""What a worker is told before user code runs in it."""

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
"""What a worker holds that asked for no device."""


USUAL: StartOptions = {"cap": True, "bind": None}
"""How workers are started unless a pool says otherwise."""


class Preparation(Value):
    """What the workers of a pool have in common.

    Attributes:
        start: How they are started with their devices.
        sandbox: Pickled call that confines the process further, or None.
        initializer: Pickled call that prepares it for the user's functions, or None.
        warmup: Pickled call for the first use of the devices, in workers that hold some, or None.
        plain: Whether they send, and their caller reads, plain data alone.
    """

    start: StartOptions = USUAL
    sandbox: bytes | None = None
    initializer: bytes | None = None
    warmup: bytes | None = None
    plain: bool = False

    @property
    def staged(self) -> bool:
        """Whether a worker may say that it could not be prepared, of which it says the end."""
        return bool(self.start.get("enforce") or self.sandbox or self.initializer or self.warmup)

    def setup(
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
        """Make the first message to a worker.

        Args:
            allocation: What it holds.
            inventory: The machine.
            lease: Identity of the lease that other processes see; empty when there is none.
            mark: What it and all that it starts are to carry.
            environ: The environment that it starts with.
            path: The module path that it starts with.
            ready: Whether it is to say when it is about to run code of the user.

        Returns:
            Its environment, which says what it holds, with what enforces that, and its cgroup; and the message.

        Raises:
            EnforcementError: When it must be confined, or held to memory, and the kernel cannot.
            EnvConflictError, PluginError: When the environment or the sandbox cannot be made.
            WorkerStartError: When there is no working directory.
        """
        launch = plan_launch(allocation, inventory, self.start, lease=lease, forked=True)
        try:
            directory = os.getcwd()
        except OSError as error:
            raise WorkerStartError(
                f"no worker can be started: the working directory has gone ({error.strerror})"
            ) from error
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
        """The warm-up, and what to call the devices in messages; None where there is nothing to warm up."""
        if self.warmup is None or not allocation.devices:
            return None
        return self.warmup, ", ".join(f"{device.name} ({device.id})" for device in allocation.devices)


def pickled_call(function: Callable[..., Any] | None, arguments: tuple[Any, ...] = ()) -> bytes | None:
    """Pickle a call for :class:`Preparation`."""
    return None if function is None else dumps_whole((function, arguments))


@contextlib.contextmanager
def outputs(log: str | None = None) -> Iterator[tuple[int, int]]:
    """Descriptors for the output of a worker: a file of its own, or wherever that of this process goes now.

    Raises:
        OSError: When the file cannot be made.
    """
    made = os.O_CREAT | os.O_APPEND if log else 0
    opened = os.open(log or os.devnull, os.O_WRONLY | os.O_CLOEXEC | made, 0o666)
    try:
        yield (opened, opened) if log else (1 if _is_open(1) else opened, 2 if _is_open(2) else opened)
    finally:
        os.close(opened)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
