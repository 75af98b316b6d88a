"""The start plan of a process with devices, the options of it, and the ways to start a process by it.

An aspect of a start is an option of :class:`StartOptions` and a field of :class:`Launch`. All starts use the plan:
those of :func:`anyaccel.run`, of a lease, of a pool, of a sweep and of the command line. Type checkers read the options
from ``**options: Unpack[...]``; :func:`check_options` refuses unknown options at run time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from anyaccel._typing import TypedDict
from anyaccel.durations import Duration
from anyaccel.errors import EnforcementError, UnknownOptionError, UsageError
from anyaccel.inventory.detect import detect
from anyaccel.launcher.environment import (
    MEMORY_VARIABLES,
    WorkerEnvironment,
    map_shares,
    warn_once,
    worker_environment,
)
from anyaccel.launcher.inside import ProcessSetup
from anyaccel.linux import Mark, signal
from anyaccel.model import Allocation, Inventory, Request, Share, Value, replace
from anyaccel.scheduler import Scheduler, parse_request
from anyaccel.text import shown, size, suggest
from anyaccel.vendors import DEADLINE_SECONDS, KnownNames, validate
from anyaccel.vendors import close as close_vendors

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Collection, Iterable
    from typing import IO, Any, Literal, NoReturn, Unpack

    from anyaccel.launcher.environment import Bind
    from anyaccel.launcher.sandbox import Enforce, Sandbox
    from anyaccel.ledger import OnWait
    from anyaccel.linux import UnavailableError, WorkerGroup
    from anyaccel.probe import Machine

    Stream = int | IO[Any] | None


DMEM = "cgroup dmem"
"""Name of the enforcement of a share whose memory the cgroup controller ``dmem`` limits."""
_VALUES: Mapping[str, tuple[object, ...]] = {
    "unallocated": ("hide", "inherit"),
    "mask": ("id", "index"),
    "enforce": (True, False, "try"),
}
_LEAST_MEMORY = 1 << 20


class StartOptions(TypedDict, total=False):
    """Options of the start of a process with devices; each is an aspect of :class:`Launch`.

    Attributes:
        unallocated: Whether vendors outside the allocation are hidden, or keep the variables of the environment.
        mask: Whether masks name devices by stable id or by index, if the vendor's runtime accepts both.
        cap: Whether PyTorch and TensorFlow are also capped at the share of memory.
        bind: Whether the process runs on the processors nearest to its devices, if the machine names them; None for
            whole devices only.
        memory: Limit of host memory for the process and its descendants, without swap: bytes, or a text such as
            ``"8GiB"``.
        enforce: Whether the kernel denies the process the device nodes of all other devices: True to insist, ``"try"``
            to go without if the kernel cannot.
    """

    unallocated: Literal["hide", "inherit"]
    mask: Literal["id", "index"]
    cap: bool
    bind: Bind
    memory: int | str | None
    enforce: Enforce


class TakeOptions(StartOptions, total=False):
    """Options of a request for devices and of the start; see :func:`anyaccel.acquire`."""

    inventory: Inventory | None
    machine: str | Machine | None
    declare: Mapping[str, int] | None
    environ: Mapping[str, str] | None
    wait: Duration | None
    priority: int
    note: str
    avoid_busy: bool
    time: Duration | None
    on_wait: OnWait | None


class AcquireOptions(TakeOptions, total=False):
    """Options of :func:`anyaccel.acquire`."""

    timeout: Duration
    confined: bool


class RunOptions(TakeOptions, total=False):
    """Options of :func:`anyaccel.run`, with the time limit and the options of :func:`subprocess.run`."""

    grace: Duration
    signal: str | None
    input: Any
    capture_output: bool
    timeout: Duration | None
    check: bool
    bufsize: int
    executable: str | bytes | os.PathLike[Any] | None
    stdin: Stream
    stdout: Stream
    stderr: Stream
    preexec_fn: Callable[[], object] | None
    close_fds: bool
    shell: bool
    cwd: str | bytes | os.PathLike[Any] | None
    universal_newlines: bool | None
    text: bool | None
    encoding: str | None
    errors: str | None
    restore_signals: bool
    start_new_session: bool
    pass_fds: Collection[int]
    user: str | int | None
    group: str | int | None
    extra_groups: Iterable[str | int] | None
    umask: int
    pipesize: int
    process_group: int | None


def check_options(function: str, given: Mapping[str, object], *known: Iterable[str] | None) -> None:
    """Check the names of a function's options, and the values of ``unallocated``, ``mask``, ``enforce`` and ``memory``.

    Args:
        function: Name of the function, for the message.
        given: The options.
        known: Names of the options of the function, such as the keys of :class:`StartOptions`; None for no names.

    Raises:
        UnknownOptionError: If the function has no such option.
        UsageError: If a value is invalid.
    """
    names = [name for each in known for name in each or ()]  # __kwdefaults__ is None without keyword arguments
    for name in given:
        if name not in names:
            way_out = suggest(name, names, f"its options are {', '.join(names)}", most=1)
            raise UnknownOptionError(f"{function}() has no option {shown(name)}", hint=way_out)
    for name, values in _VALUES.items():
        if name in given and given[name] not in values:
            raise UsageError(f"{name} must be one of {', '.join(map(repr, values))} (got {shown(given[name])})")
    memory = given.get("memory")
    if memory is not None:
        parse_memory(memory)


def parse_memory(memory: object) -> int:
    """Parse a limit of host memory, and return bytes.

    Args:
        memory: Bytes as an int, or a text such as ``"8GiB"`` or ``"1.5GB"``, which is rounded up to whole bytes.

    Raises:
        UsageError: If the value has another type, such as float or bool; if the text is no amount; or if the amount is
            less than 1 MiB, with which no program starts.
    """
    try:
        found: object = size(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise UsageError(f"memory {error}") from None
    # bool is an int: memory=True would be one byte.
    if isinstance(found, bool) or not isinstance(found, int) or found < _LEAST_MEMORY:
        raise UsageError(f"memory must be at least 1MiB, in bytes or as a text such as '8GiB' (got {memory!r:.60})")
    return found


class Launch(Value):
    """The start plan of a process.

    Attributes:
        inventory: The machine.
        environment: The environment of the worker; its allocation names the devices and processors of the worker.
        cap: Whether frameworks are capped at a share of memory.
        sandbox: The device nodes that the process may not open; None for no confinement.
        mark: The mark of the process; empty for none, or if this process carries the mark.
        fds: Descriptors of the lease, which the process inherits.
    """

    inventory: Inventory
    environment: WorkerEnvironment
    cap: bool = False
    sandbox: Sandbox | None = None
    mark: Mark = ()
    fds: tuple[int, ...] = ()

    def popen(self, command: Sequence[str] | str, **options: Any) -> subprocess.Popen[Any]:
        """Start a command like :class:`subprocess.Popen`, by this plan.

        The command gets mark, cgroup, processors and sandbox of the plan, and inherits the descriptors of the lease.
        With a mark or cgroup, a wrapper becomes the command. If that fails after all, as with an unknown file format,
        the wrapper prints a message, and exits with status 126 or 127.

        Args:
            command: The command and its arguments; a string with ``shell=True``.
            options: Options of :class:`subprocess.Popen`. The default of ``env`` is the environment of the plan;
                another ``env`` is used as given. The descriptors of the lease are added to ``pass_fds``.

        Raises:
            EnforcementError: If the process cannot be confined.
            OSError: If the command cannot be started.
        """
        from anyaccel.launcher.start import start_marked

        # The lease lasts as long as its descriptors are open, even if this process is killed.
        options["pass_fds"] = (*self.fds, *options.get("pass_fds", ()))
        if options.get("env") is None:
            options["env"] = dict(self.environment.values)
        return self._inside.start(
            lambda: start_marked(command, self.mark, self.environment.group, **options), lambda child: child.kill()
        )

    def spawn(self, command: Sequence[str], **attributes: Any) -> int:
        """Start a command like :func:`os.posix_spawnp`, by this plan, and return the process id.

        The command gets environment, mark, cgroup, processors and sandbox of the plan; ``fds`` are not passed on. A
        wrapper may fail as for :meth:`popen`.

        Args:
            command: The command and its arguments.
            attributes: Keyword arguments of :func:`os.posix_spawnp`, such as ``setsid``.

        Raises:
            EnforcementError: If the process cannot be confined.
            OSError: If the command cannot be started.
        """
        from anyaccel.launcher.start import make_wrapper

        environ = self.environment.values
        words = [*make_wrapper(command[0], self.mark, self.environment.group, environ), *command]
        return self._inside.start(
            lambda: os.posix_spawnp(words[0], words, environ, **attributes),
            lambda child: os.kill(child, signal.SIGKILL),
        )

    def become(self, command: Sequence[str]) -> NoReturn:
        """Replace this process by a command, by this plan, with the same terminal, signals and process id.

        Ends the vendors' processes first. The command inherits ``fds`` only after a call of
        :meth:`anyaccel.ledger.Lease.inherit`. If the command cannot be started, processors and sandbox stay on this
        process, and SIGPIPE and SIGXFSZ may have their default action.

        Raises:
            EnforcementError: If the process cannot be confined.
            CommandNotFoundError, CommandNotRunnableError: If the command cannot be started.
            ValueError: In another thread than the main one.
        """
        from anyaccel.launcher.start import become, make_start_error, make_wrapper

        close_vendors()  # else processes of the vendors would live on as children of the command
        self._inside.apply()
        environ = self.environment.values
        try:
            before = make_wrapper(command[0], self.mark, self.environment.group, environ)
        except OSError as error:
            raise make_start_error(command[0], error) from error
        become([*before, *command], environ)

    def make_setup(self, environ: Mapping[str, str] | None = None) -> ProcessSetup:
        """Make the steps by which a running process follows this plan, with mark, cgroup and changed variables.

        Variables that are not in the environment of the plan are unset. Frameworks are capped only in a worker with a
        part of a device.

        Args:
            environ: The environment of the process; the one from which the plan was made if None.
        """
        made = self.environment
        changes, unset = made.set, tuple(made.unset)
        if environ is not None:
            changes = {name: value for name, value in made.values.items() if environ.get(name) != value}
            # The process may have changed its environment since the plan was made, as a fork server's worker has.
            unset = tuple(name for name in environ if name not in made.values)
        return self._inside._replace(
            mark=self.mark,
            group=None if made.group is None else made.group.path,
            set=changes,
            unset=unset,
            cap=self.cap and any(name.startswith(MEMORY_VARIABLES) for name in made.set),
        )

    @property
    def _inside(self) -> ProcessSetup:
        """The steps with processors and sandbox alone; mark, cgroup and variables come with the start."""
        return ProcessSetup(processors=self.environment.allocation.processors, sandbox=self.sandbox)


def check_start(options: StartOptions, *, forked: bool = False) -> bool:
    """Check the options of a start against the kernel, before the wait for devices begins.

    The amount of ``memory`` is not checked.

    Args:
        options: The options.
        forked: As for :func:`plan_launch`.

    Returns:
        Whether the process will be confined: False without ``enforce``, and with ``"try"`` if the kernel cannot.

    Raises:
        EnforcementError: If the kernel cannot limit ``memory``, or cannot confine a process with ``enforce`` True.
    """
    if options.get("memory") is not None:
        from anyaccel.linux import cgroup

        try:
            cgroup.find_place({"memory"}, None if forked else os.environ)
        except (OSError, cgroup.UnavailableError) as error:
            raise _make_error(error) from error
    if not (enforce := options.get("enforce", False)):
        return False
    from anyaccel.launcher.sandbox import check_enforce

    return check_enforce(enforce)


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
    """Make a start plan, and the cgroup of a worker with limits, which the caller removes after the exit.

    The vendors' plug-ins are asked. A cgroup is made for ``memory``, and with ``grouped`` for shares whose memory the
    kernel can limit; other shares stay by agreement.

    Args:
        allocation: The devices.
        inventory: The machine.
        options: The options of the start.
        environ: The environment to start from; that of this process if None.
        lease: Identity of the lease that other processes see; empty for none.
        forked: Whether this process or its fork server forks the worker, so that no wrapper program can run first.
        grouped: Whether the plan starts every process on the devices, so that a cgroup can limit a share.
        told: Whether to warn on standard error, once for each text in this process, about devices that the worker's
            variables do not hide; gaps of ``enforce`` are only in the plan.

    Raises:
        EnforcementError: If the kernel cannot apply ``enforce`` or ``memory``.
        EnvConflictError, PluginError: If the environment or the sandbox cannot be made.
        UsageError: If ``memory`` is invalid.
    """
    sandbox, enforce = None, options.get("enforce", False)
    if enforce:
        from anyaccel.launcher.sandbox import find_obstacle, make_sandbox

        sandbox = make_sandbox(allocation, inventory, enforce=enforce)
        if sandbox is None:
            gaps: tuple[str, ...] = (f"the worker is not confined to its devices: {find_obstacle()}",)
        else:
            gaps = sandbox.gaps
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
        warn_once(gap for gap in environment.allocation.gaps if gap not in allocation.gaps)
    memory = options.get("memory")
    if memory is not None or (grouped and environment.regions):
        environment = limit_memory(environment, None if memory is None else parse_memory(memory), direct=forked)
    return Launch(inventory=inventory, environment=environment, cap=options.get("cap", False), sandbox=sandbox)


def prepare(
    request: str | Sequence[str] | Request,
    *,
    inventory: Inventory | None = None,
    machine: str | Machine | None = None,
    declare: Mapping[str, int] | None = None,
    environ: Mapping[str, str] | None = None,
    timeout: Duration = DEADLINE_SECONDS,
    **options: Unpack[StartOptions],
) -> Launch:
    """Choose devices for a request, and make the start plan of the worker.

    Nothing is leased, and leases do not count as taken. With ``memory``, a cgroup is made, which the caller removes.

    Args:
        request: The request.
        inventory: The machine's inventory; detected if None. Only the detection uses the next three.
        machine: The machine; see :func:`anyaccel.detect`.
        declare: Devices to count by resource name; see :func:`anyaccel.declare`.
        timeout: Time that each vendor's detection may take.
        environ: The environment to start from; that of this process if None.
        options: Options of the start. ``unallocated``: whether vendors outside the request are hidden (``"hide"``), or
            keep the variables of the environment (``"inherit"``). ``mask``: whether masks name devices by stable
            ``"id"`` or by ``"index"``, if the vendor's runtime accepts both. ``cap``: whether PyTorch and TensorFlow
            are also capped at the worker's share of memory; see :func:`worker_environment`. ``bind``: whether the
            allocation names the processors nearest to the devices. ``enforce`` and ``memory`` as for
            :func:`anyaccel.run`.

    Raises:
        RequestError, UnknownNameError: If the request is invalid.
        UnknownOptionError, UsageError: If there is no such option, or its value is invalid.
        NeverFitsError, NotFreeError: If the request cannot be served.
        EnvConflictError, PluginError: If the environment cannot be made.
        EnforcementError: If the kernel cannot apply ``enforce`` or ``memory``.

    Examples:
        >>> launch = anyaccel.prepare("GPU:1", machine="sim:H100:2", mask="index")
        >>> launch.environment.allocation.devices[0].index
        0
        >>> launch.environment.set["ANYACCEL_DEVICES"] == launch.inventory.devices[0].id
        True
    """
    check_options("prepare", options, StartOptions.__annotations__, prepare.__kwdefaults__)
    wanted = parse_request(request)
    inventory = inventory or detect(machine, declare=declare, environ=environ, timeout=timeout)
    allocation = Scheduler(inventory, validate, KnownNames()).allocate(wanted)
    return plan_launch(allocation, inventory, options, environ=environ, grouped=False, told=False)


def limit_memory(made: WorkerEnvironment, memory: int | None = None, *, direct: bool = False) -> WorkerEnvironment:
    """Make the cgroup of a worker before the start; without limits that the kernel permits, no group is made.

    Empty groups of ended launchers are removed.

    The caller starts the worker in the group, and removes the group after the exit of the worker: see
    :func:`anyaccel.linux.cgroup.enter`, :func:`remove_group` and :func:`anyaccel.launcher.start.start_marked`. The
    rules are the kernel's, Documentation/admin-guide/cgroup-v2.rst: ``memory.max`` and ``memory.swap.max`` limit memory
    of the host, ``dmem.max`` memory of devices, with a line ``region bytes`` for each.

    Args:
        made: The environment of the worker. Its ``regions`` are limited if the kernel permits. Otherwise its shares
            stay by agreement, and ``unlimited`` of the result says why.
        memory: Limit of host memory, in bytes, with swap forbidden; None for no limit.
        direct: Whether this process or its fork server forks the worker, so that no wrapper program can run first.

    Returns:
        The environment with the group, and with the limits in its allocation and the worker's variable. Without a
        group, the environment with ``unlimited`` alone changed.

    Raises:
        EnforcementError: If ``memory`` is given and the kernel cannot limit it.
    """
    from anyaccel.linux import cgroup

    host = {} if memory is None else {"memory.max": str(memory), cgroup.SWAP: "0"}
    most: dict[str, int] = {}
    for region, held in made.regions.values():
        most[region] = most.get(region, 0) + held
    devices = {"dmem.max": "\n".join(f"{region} {held}" for region, held in most.items())} if most else {}
    through = None if direct else made.values
    group, unlimited = None, ""
    if devices:
        try:
            group = cgroup.make(host | devices, through)
        except (OSError, cgroup.UnavailableError) as error:  # a kernel without dmem can still limit host memory
            unlimited = str(error)
    limited = made.regions if group is not None else {}
    if host and group is None:
        try:
            group = cgroup.make(host, through)
        except (OSError, cgroup.UnavailableError) as error:
            raise _make_error(error) from error
    if group is None:
        return replace(made, unlimited=unlimited)

    def name(share: Share) -> Share:
        return replace(share, memory_by=DMEM) if share.device.id in limited and not share.whole else share

    allocation = map_shares(replace(made.allocation, host_memory_bytes=memory), name)
    return replace(made.with_allocation(allocation), group=group, unlimited=unlimited)


def remove_group(group: WorkerGroup) -> str:
    """Remove an empty cgroup; errors are ignored.

    A cgroup with a process inside stays. It is removed when a cgroup is made beside it, once it is empty and the
    process that made it has ended.

    Returns:
        A clause with the limit of host memory, if the kernel killed a process in the group because of the limit; else
        empty.
    """
    from anyaccel.linux import cgroup

    most = cgroup.remove(group.path)
    if most is None:
        return ""
    return f"it exceeded its limit of {most} bytes of host memory (memory=), and the kernel killed it"


def _make_error(error: OSError | UnavailableError) -> EnforcementError:
    """Make the error about a failed limit of host memory; the hint is an :class:`UnavailableError`'s, else general."""
    remedy = getattr(error, "remedy", "look at that directory's owner and at what the kernel's log (dmesg) says")
    return EnforcementError(f"the kernel cannot limit the host memory of a worker: {error}", hint=remedy)
