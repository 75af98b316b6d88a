"""Hold a worker to memory, of the host and of its devices, by a cgroup of its own.

The rules are the kernel's, Documentation/admin-guide/cgroup-v2.rst: ``memory.max`` and ``memory.swap.max`` hold the
memory of the host, ``dmem.max`` that of a device, one line ``region bytes`` each. A group may be made below one that
this user may write and that has the controllers; a group with processes of its own gives its controllers to none below
it ("No Internal Process Constraint"). A process moves where its user may write both groups and the nearest one that
they are in ("Delegation Containment"). A process outside of what its user's systemd manages, as after a login by SSH,
is brought there by ``systemd-run --user --scope`` first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping

from anyaccel.errors import AnyaccelError, EnforcementError, UsageError
from anyaccel.inventory.memory import MADE
from anyaccel.launcher.choosing import local_scheduler
from anyaccel.launcher.environment import Group, WorkerEnvironment, amended, worker_environment
from anyaccel.ledger.process import exists
from anyaccel.model import Finding, Grant, Inventory, Severity, replace
from anyaccel.probe import HOST
from anyaccel.text import listed, size

ROOT = "/sys/fs/cgroup"
OWN = "/proc/self/cgroup"
DMEM = "cgroup dmem"
"""What holds the memory of a share that has a limit of the controller ``dmem``."""

_LEAST = 1 << 20
_SWAP = "memory.swap.max"
_ROUNDING = 1 << 16
"""The kernel rounds down to pages, of which the largest has so many bytes."""
_BINDING = ("memory.max", "memory.high", _SWAP, "dmem.max", "cpu.max", "cpuset.cpus", "cpuset.mems")
"""Limits that nobody is taken away from. Not ``pids.max``: systemd gives each scope one of its own."""
_SCOPE = "systemd-run --user --scope --quiet --collect --"


class UnavailableError(Exception):
    """Raised when no group can be made.

    Attributes:
        reason: Why.
        remedy: The way out.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def amount(memory: object) -> int:
    """Read how much of the host's memory somebody may use, in bytes.

    Raises:
        UsageError: When it is no amount, or less than 1 MiB, with which no program starts.
    """
    try:
        found: object = size(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise UsageError(f"memory {error}") from None
    if isinstance(found, bool) or not isinstance(found, int) or found < _LEAST:
        raise UsageError(f"memory must be at least 1MiB, in bytes or as a text such as '8GiB' (got {memory!r:.60})")
    return found


def check(*, direct: bool = False) -> None:
    """Make sure, before anybody waits for devices, that the kernel can hold a worker to memory of the host.

    Args:
        direct: As of :func:`limited`.

    Raises:
        EnforcementError: When it cannot.
    """
    try:
        place({"memory"}, None if direct else os.environ)
    except (OSError, UnavailableError) as error:
        raise _cannot(error) from error


def limited(made: WorkerEnvironment, memory: int | None = None, *, direct: bool = False) -> WorkerEnvironment:
    """Make the group of a worker that is about to be started.

    Whoever starts it puts it there first, and removes the group when it is gone: see :func:`enter`, :func:`remove` and
    :func:`anyaccel.launcher.start.start_marked`.

    Args:
        made: The environment of the worker. Its ``regions`` are limited where the kernel lets us, else its shares stay
            by agreement, and ``unlimited`` of the result says why.
        memory: Bytes of the host's memory that the kernel is to leave it.
        direct: Whether the worker is forked by this process or by its fork server, and cannot go through a program.

    Returns:
        The environment, with the group, and with what it holds the worker to.

    Raises:
        EnforcementError: When ``memory`` is given and cannot be held.
    """
    if memory is None and not made.regions:
        return made
    host = {} if memory is None else {"memory.max": str(memory), _SWAP: "0"}
    through = None if direct else made.values
    unlimited = ""
    if made.regions:
        most: dict[str, int] = {}
        for region, held in made.regions.values():
            most[region] = most.get(region, 0) + held
        devices = {"dmem.max": "\n".join(f"{region} {held}" for region, held in most.items())}
        try:
            group = _make(host | devices, through)
        except (OSError, UnavailableError) as error:
            unlimited = str(error)
        else:
            return _said(made, group, memory, dmem=True)
    if not host:
        return replace(made, unlimited=unlimited)
    try:
        group = _make(host, through)
    except (OSError, UnavailableError) as error:
        raise _cannot(error) from error
    return _said(replace(made, unlimited=unlimited), group, memory, dmem=False)


def enter(path: str) -> None:
    """Put this process into a group, with all that it starts from here on.

    Raises:
        OSError: When the kernel refuses.
    """
    own = str(os.getpid())
    _write(f"{path}/cgroup.procs", own)
    if own not in _read(f"{path}/cgroup.procs").split():
        raise OSError(f"this process was written into {path} and is not in it")


def remove(group: Group) -> str:
    """Remove a group that nothing runs in any more; else whoever makes the next one beside it does.

    Returns:
        Why the kernel has killed something in it; empty where it did not.
    """
    killed = ""
    with contextlib.suppress(OSError, ValueError):
        events = _values(_read(f"{group.path}/memory.events"))
        if events.get("oom") and events.get("oom_kill"):  # not only where the whole machine had none left
            most = int(_read(f"{group.path}/memory.max"))
            killed = (
                f"it took more than its {most} bytes of the host's memory (memory=), for which the kernel killed it"
            )
    with contextlib.suppress(OSError):
        os.rmdir(group.path)
    return killed


def place(controllers: Collection[str], through: Mapping[str, str] | None) -> Group:
    """Find the nearest group in which groups with some controllers may be made for workers of this process.

    Limits only ever become narrower: no worker is taken out of a group that limits something.

    Args:
        controllers: Their names.
        through: The environment in which a program may bring the worker there; None where none may.

    Raises:
        UnavailableError: When there is none.
    """
    own, home = _own(), _home()
    names = " and ".join(sorted(controllers))
    binding = ""
    for group in _chain(own):
        if _usable(group, controllers):
            return Group(path=_path(group))
        if binding := next(_limits_of([group]), ""):
            break
    at_home = home not in _chain(own) and _usable(home, controllers)
    if at_home:
        left = [group for group in _chain(own) if not f"{home}/".startswith(f"{group.rstrip('/')}/")]
        binding = next(_limits_of(left), "")
    if binding:
        reason = f"{binding} limits this process already, and a group outside of that would not be limited by it"
        raise UnavailableError(reason, "start it where nothing is limited, or do without")
    if at_home:
        if program := _systemd_run(through or {}):
            return Group(path=_path(home), before=(program, *_SCOPE.split()[1:]))
        reason = f"this process is in the cgroup {own}, out of which its user may move nothing"
        raise UnavailableError(reason, f"start your program with '{_SCOPE} PROGRAM'")
    reason = f"no cgroup that this user may write, from {own} upwards, has the controller {names} for others"
    raise UnavailableError(
        reason, f"have it delegated ('systemctl edit user@.service': Delegate={names}), or do without"
    )


def diagnose(inventory: Inventory) -> Iterator[Finding]:
    """Say where the kernel could hold shares to memory of devices and this user is not let. Changes nothing.

    Args:
        inventory: The machine.
    """
    if inventory.machine != HOST or not (shared := _countable(inventory)):
        return
    try:
        place({"dmem"}, os.environ)
    except (OSError, UnavailableError) as error:
        reason = (
            f"the kernel can hold shares of {listed(shared)} to their memory, and this user may not let it: {error}"
        )
        yield Finding(severity=Severity.WARN, reason=reason, remedy=_delegation() or getattr(error, "remedy", ""))


def _countable(inventory: Inventory) -> list[str]:
    """Devices whose memory the kernel counts, and whose plug-in says what it calls that."""
    try:
        regions = {line.rpartition(" ")[0] for line in _read(f"{ROOT}/dmem.capacity").splitlines()}
    except OSError:
        return []
    found = []
    for device in inventory.devices if regions else ():
        with contextlib.suppress(AnyaccelError):  # no shares of it are given out
            half = local_scheduler(inventory).allocate(f"{device.name}:0.5")
            made = worker_environment(half, inventory)
            if any(region in regions for region, _ in made.regions.values()):
                found.append(device.name)
    return found


def _delegation() -> str:
    """The command with which root gives the controller to the user's own systemd; empty where there is none."""
    home = _home()
    if not os.path.isdir(f"{ROOT}{home}"):
        return ""
    above = [f"{_path(group)}/cgroup.subtree_control" for group in reversed(_chain(home)[1:])]
    return f"once per boot: echo +dmem | sudo tee {' '.join(above)}"


def _cannot(error: OSError | UnavailableError) -> EnforcementError:
    remedy = getattr(error, "remedy", "look at that directory's owner and at what the kernel's log (dmesg) says")
    return EnforcementError(f"the kernel cannot hold a worker to memory of the host: {error}", hint=remedy)


def _said(made: WorkerEnvironment, group: Group, memory: int | None, *, dmem: bool) -> WorkerEnvironment:
    """Say what a group holds a worker to."""
    allocation = replace(made.allocation, host_memory_bytes=memory)
    if dmem:
        grants = []
        for grant in allocation.grants:
            shares = (
                replace(share, memory_by=DMEM) if share.device.id in made.regions and not share.whole else share
                for share in grant.shares
            )
            grants.append(Grant(term=grant.term, shares=tuple(shares)))
        allocation = replace(allocation, grants=tuple(grants))
    return replace(amended(made, allocation), group=group)


def _make(lines: Mapping[str, str], through: Mapping[str, str] | None) -> Group:
    """Make a group with some limits, and read them back.

    Raises:
        UnavailableError: When there is no place for it.
        OSError: When the kernel refuses a limit.
    """
    controllers = {name.partition(".")[0] for name in lines}
    found = place(controllers, through)
    directory = found.path
    if missing := controllers - {*_read(f"{directory}/cgroup.subtree_control").split()}:
        _write(f"{directory}/cgroup.subtree_control", " ".join(f"+{each}" for each in sorted(missing)))
    _tidy(directory)
    path = f"{directory}/anyaccel-{os.getpid()}-{os.urandom(4).hex()}"
    os.mkdir(path, 0o755)
    try:
        for name, text in lines.items():
            _limit(f"{path}/{name}", text)
    except BaseException:
        with contextlib.suppress(OSError):
            os.rmdir(path)
        raise
    return Group(path=path, before=found.before)


def _limit(path: str, text: str) -> None:
    """Write limits into a file of a group, one to a line, and make sure that the kernel keeps to them."""
    try:
        _write(path, text)
    except OSError:
        if path.endswith(_SWAP) and not os.path.exists(path):
            return  # the kernel was built, or started, without swap
        raise
    kept = _values(_read(path))
    for name, wanted in _values(text).items():
        if not wanted - _ROUNDING < kept.get(name, -1) <= wanted:
            raise OSError(f"{path} does not keep the limit {name} {wanted}".replace("  ", " "))


def _values(text: str) -> dict[str, int]:
    """The limits in a file, by what stands before them; those that limit nothing are left out."""
    parts = (line.rpartition(" ") for line in text.splitlines())
    return {name.strip(): int(value) for name, _, value in parts if value.isdecimal()}


def _tidy(directory: str) -> None:
    """Remove groups whose makers have ended, and in which nothing runs; the kernel refuses the others."""
    for name in os.listdir(directory):
        match = MADE.fullmatch(name)
        if match and not exists(int(match[1])):
            with contextlib.suppress(OSError):
                os.rmdir(f"{directory}/{name}")


def _own() -> str:
    """The group of this process.

    Raises:
        UnavailableError: When groups are not those of cgroup v2, or ours is not below what is mounted.
    """
    if not os.path.exists(f"{ROOT}/cgroup.controllers"):
        raise UnavailableError(
            f"there is no cgroup v2 at {ROOT}", "boot with systemd.unified_cgroup_hierarchy=1, or do without"
        )
    lines = _read(OWN).splitlines()
    own = next((line[len("0::") :] for line in lines if line.startswith("0::/")), "/..")
    if "/../" in f"{own}/":
        raise UnavailableError(f"the cgroup of this process is not below {ROOT}", "mount it there, or do without")
    return own


def _path(group: str) -> str:
    """The directory of a group."""
    return f"{ROOT}{group.rstrip('/')}"


def _chain(group: str) -> list[str]:
    """A group and those that it is in, nearest first."""
    found = [group]
    while found[-1] != "/":
        found.append(found[-1].rpartition("/")[0] or "/")
    return found


def _home() -> str:
    """The group that the user's own systemd manages."""
    user = os.geteuid()
    return f"/user.slice/user-{user}.slice/user@{user}.service"


def _usable(group: str, controllers: Collection[str]) -> bool:
    """Whether groups with some controllers can be made below a group.

    It gives no further controller to these while it has processes of its own; the root of all groups, which has no
    ``cgroup.type``, may.
    """
    path = _path(group)
    if not all(os.access(each, os.W_OK) for each in (path, f"{path}/cgroup.procs", f"{path}/cgroup.subtree_control")):
        return False
    try:
        if not {*_read(f"{path}/cgroup.controllers").split()}.issuperset(controllers):
            return False
        if {*_read(f"{path}/cgroup.subtree_control").split()}.issuperset(controllers):
            return True
        return not os.path.exists(f"{path}/cgroup.type") or not _read(f"{path}/cgroup.procs").strip()
    except OSError:
        return False


def _limits_of(groups: Collection[str]) -> Iterator[str]:
    """Files of groups that limit something."""
    for group in groups:
        for name in _BINDING:
            path = f"{_path(group)}/{name}"
            with contextlib.suppress(OSError):
                if any(line.strip() and "max" not in line.split() for line in _read(path).splitlines()):
                    yield path


def _systemd_run(environ: Mapping[str, str]) -> str | None:
    """The program, where the user's systemd can be reached in an environment."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if not runtime or not any(os.path.exists(f"{runtime}/{socket}") for socket in ("bus", "systemd/private")):
        return None
    import shutil

    return shutil.which("systemd-run", path=environ.get("PATH"))


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
