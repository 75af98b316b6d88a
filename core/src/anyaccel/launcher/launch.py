"""One plan of a start: all that a process gets with its devices, and each way to start one by it.

An aspect of a start is an option of :class:`anyaccel.launcher.options.StartOptions` and a field here, whoever starts
what: :func:`anyaccel.run`, a hold, a pool, a sweep, the command line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from anyaccel.inventory.detect import survey
from anyaccel.launcher.caps import FRACTION_VARIABLE
from anyaccel.launcher.choosing import local_scheduler
from anyaccel.launcher.environment import WorkerEnvironment, tell_once, worker_environment
from anyaccel.launcher.inside import ProcessSetup
from anyaccel.linux.mark import Mark
from anyaccel.model import Allocation, Inventory, Request, Value, replace
from anyaccel.scheduler import parse_request
from anyaccel.vendors import DEADLINE_SECONDS
from anyaccel.vendors import close as close_vendors

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any, NoReturn, Unpack

    from anyaccel.launcher.options import StartOptions
    from anyaccel.probe.machine import Machine


class Launch(Value):
    """Everything that a launch needs.

    Attributes:
        inventory: What was found on the machine.
        environment: The environment of the worker; its allocation says what it holds, and on which processors it runs.
        inside: What it puts on itself beside these, or inherits: its sandbox among it.
        mark: The mark that it is to carry; empty where this process carries it, or there is none.
        fds: Descriptors that it inherits, which carry the lease.
    """

    inventory: Inventory
    environment: WorkerEnvironment
    inside: ProcessSetup = ProcessSetup()
    mark: Mark = ()
    fds: tuple[int, ...] = ()

    def popen(self, command: Sequence[str] | str, **options: Any) -> subprocess.Popen[Any]:
        """Start a command like :class:`subprocess.Popen`.

        Args:
            command: The command and its arguments; a string with ``shell=True``.
            options: As of :class:`subprocess.Popen`.

        Raises:
            EnforcementError: When it cannot be confined.
            OSError: When it cannot be started.
        """
        from anyaccel.launcher.start import start_marked

        options["pass_fds"] = (*self.fds, *options.get("pass_fds", ()))
        if options.get("env") is None:
            options["env"] = dict(self.environment.values)
        return self._inside.start(lambda: start_marked(command, self.mark, self.environment.group, **options))

    def spawn(self, command: Sequence[str], **attributes: Any) -> int:
        """Start a command like :func:`os.posix_spawnp`, and return its process id.

        Args:
            command: The command and its arguments.
            attributes: As of that.

        Raises:
            EnforcementError: When it cannot be confined.
            OSError: When it cannot be started.
        """
        from anyaccel.launcher.start import prelude

        environ = self.environment.values
        words = [*prelude(command[0], self.mark, self.environment.group, environ), *command]
        return self._inside.start(lambda: os.posix_spawnp(words[0], words, environ, **attributes))

    def become(self, command: Sequence[str]) -> NoReturn:
        """Become a command: terminal, signals, exit status and process id are its own from here on.

        Raises:
            EnforcementError: When it cannot be confined.
            CommandNotFoundError, CommandNotRunnableError: When it cannot be started.
        """
        from anyaccel.launcher.start import become, make_start_error, prelude

        close_vendors()  # nothing of ours is left beside the command
        self._inside.apply()
        environ = self.environment.values
        try:
            before = prelude(command[0], self.mark, self.environment.group, environ)
        except OSError as error:
            raise make_start_error(command[0], error) from error
        become([*before, *command], environ)

    def make_setup(self, environ: Mapping[str, str] | None = None) -> ProcessSetup:
        """Make what a process puts on itself that has been started already.

        Args:
            environ: The environment that the process has; that from which the plan was made when None.
        """
        made = self.environment
        changes, unset = made.set, tuple(made.unset)
        if environ is not None:
            changes = {name: value for name, value in made.values.items() if environ.get(name) != value}
            unset = tuple(name for name in environ if name not in made.values)
        return self._inside._replace(
            mark=self.mark,
            group=None if made.group is None else made.group.path,
            set=changes,
            unset=unset,
            cap=self.inside.cap and FRACTION_VARIABLE in made.values,
        )

    @property
    def _inside(self) -> ProcessSetup:
        """What concerns a process that gets mark, cgroup and environment by the way in which it is started."""
        return self.inside._replace(processors=self.environment.allocation.processors, cap=False)


def check_start(options: StartOptions, *, forked: bool = False) -> bool:
    """Make sure, before anything waits for devices, that the kernel can do what a start is asked for.

    Args:
        options: How a process is to be started.
        forked: As of :func:`plan_launch`.

    Returns:
        Whether the process will be confined.

    Raises:
        UsageError: When ``memory`` is no amount.
        EnforcementError: When the kernel cannot.
    """
    if (memory := options.get("memory")) is not None:
        from anyaccel.launcher import limits

        limits.amount(memory)
        limits.check(direct=forked)
    if not (enforce := options.get("enforce", False)):
        return False
    from anyaccel.launcher.sandbox import confines

    return confines(enforce)


def plan_launch(
    allocation: Allocation,
    inventory: Inventory,
    options: StartOptions,
    *,
    environ: Mapping[str, str] | None = None,
    lease: str = "",
    forked: bool = False,
    grouped: bool = True,
    told: bool = True,
) -> Launch:
    """Make the plan of a start.

    Args:
        allocation: What is held.
        inventory: The machine.
        options: How it is to be started.
        environ: The environment to start from; that of this process when None.
        lease: Identity of the lease that other processes see; empty when there is none.
        forked: Whether the process is forked by this one or its fork server, and cannot go through a program.
        grouped: Whether all that uses the devices is started by the plan, so that a cgroup may hold it to a share.
        told: Whether standard error says once what the worker is not kept from, except for what a sandbox leaves open.

    Raises:
        EnforcementError: When it must be confined, or held to memory, and the kernel cannot.
        EnvConflictError, PluginError: When the environment or the sandbox cannot be made.
    """
    sandbox, enforce = None, options.get("enforce", False)
    if enforce:
        from anyaccel.launcher.sandbox import sandbox_for, unconfined

        sandbox = sandbox_for(allocation, inventory, enforce=enforce)
        gaps = (unconfined(),) if sandbox is None else sandbox.gaps
        allocation = replace(allocation, confined=sandbox is not None, gaps=gaps)
    environment = worker_environment(
        allocation,
        inventory,
        environ=environ,
        unallocated=options.get("unallocated", "hide"),
        mask=options.get("mask", "id"),
        lease=lease,
        cap=options.get("cap", False),
        bind=options.get("bind", False),
    )
    if told:
        tell_once(gap for gap in environment.allocation.gaps if gap not in allocation.gaps)
    memory = options.get("memory")
    if memory is not None or (grouped and environment.regions):
        from anyaccel.launcher.limits import amount, limited

        environment = limited(environment, None if memory is None else amount(memory), direct=forked)
    own: dict[str, Any] = {name: value for name, value in options.items() if name in ProcessSetup._fields}
    return Launch(inventory=inventory, environment=environment, inside=ProcessSetup(sandbox=sandbox, **own))


def prepare(
    request: str | Sequence[str] | Request,
    *,
    inventory: Inventory | None = None,
    machine: str | Machine | None = None,
    declare: Mapping[str, int] | None = None,
    environ: Mapping[str, str] | None = None,
    timeout: float = DEADLINE_SECONDS,
    **options: Unpack[StartOptions],
) -> Launch:
    """Choose devices for a request and make the environment of its worker.

    Args:
        request: What the worker needs.
        inventory: The machine's inventory; detected when None, and then the next three count.
        machine: The machine; see :func:`anyaccel.detect`.
        declare: Devices to count by resource name; see :func:`anyaccel.declare`.
        timeout: Seconds that each vendor's detection may take.
        environ: The environment to start from; that of this process when None.
        options: How the worker is started. ``unallocated``: whether vendors of which nothing was asked for are hidden
            (``"hide"``), or left as they are (``"inherit"``). ``mask``: whether masks name devices by stable ``"id"``
            or by ``"index"``, where the vendor's runtime takes both. ``cap``: whether PyTorch and TensorFlow are
            capped at the worker's share of memory as well; see :func:`worker_environment`. ``bind``: whether the
            allocation says on which processors the worker should run. ``enforce`` and ``memory`` as of
            :func:`anyaccel.run`.

    Raises:
        RequestError, UnknownNameError: When the request is wrong.
        UnknownOptionError: When there is no such option.
        NeverFitsError, NotFreeError: When it cannot be served.
        EnvConflictError, PluginError: When the environment cannot be made.
        EnforcementError: When the worker must be confined, or held to memory, and the kernel cannot.

    Examples:
        >>> launch = anyaccel.prepare("GPU:1", machine="sim:H100:2", mask="index")
        >>> launch.environment.allocation.devices[0].index
        0
        >>> launch.environment.set["ANYACCEL_DEVICES"] == launch.inventory.devices[0].id
        True
    """
    from anyaccel.launcher.options import StartOptions, check_options

    check_options("prepare", options, StartOptions.__annotations__, prepare.__kwdefaults__)
    wanted = parse_request(request)
    inventory = survey(inventory, request=wanted, machine=machine, declare=declare, environ=environ, timeout=timeout)
    allocation = local_scheduler(inventory).allocate(wanted)
    return plan_launch(allocation, inventory, options, environ=environ, grouped=False, told=False)
