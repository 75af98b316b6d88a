"""Control groups (cgroup v2) that hold processes to limits: find a place for a group, make the group, enter it.

The rules are the kernel's, Documentation/admin-guide/cgroup-v2.rst. A group may be made below one that this user may
write and that has the controllers; a group with processes of its own gives its controllers to none below it ("No
Internal Process Constraint"). A process may move if its user may write both groups and their nearest common ancestor
("Delegation Containment"). A process outside of the groups of its user's systemd, as after a login by SSH, first moves
there by ``systemd-run --user --scope``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Mapping

from anyaccel.linux.process import exists

ROOT = "/sys/fs/cgroup"
OWN = "/proc/self/cgroup"
MADE = re.compile(r"anyaccel-([0-9]+)-[0-9a-f]+")
"""Name of a group that a launcher has made, with the process id of the launcher."""
SWAP = "memory.swap.max"

_ROUNDING = 1 << 16
"""Bytes by which the kernel may round a limit down: the largest page size."""
_BINDING = ("memory.max", "memory.high", SWAP, "dmem.max", "cpu.max", "cpuset.cpus", "cpuset.mems")
"""Limits that no process escapes by moving. ``pids.max`` is not among them: systemd sets it on each scope."""
_SCOPE = "systemd-run --user --scope --quiet --collect --"


class WorkerGroup:
    """A group, made or to be made below.

    Attributes:
        path: Directory of the group.
        before: A command that first moves a process to where it may enter, with the process's own command behind it;
            empty if none is needed.
    """

    def __init__(self, path: str, before: tuple[str, ...] = ()) -> None:
        self.path, self.before = path, before


class UnavailableError(Exception):
    """Raised when no group can be made.

    Attributes:
        reason: Why no group can be made.
        remedy: What to do.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def find_place(controllers: Collection[str], through: Mapping[str, str] | None) -> WorkerGroup:
    """Find the nearest group below which this process may make groups with the given controllers.

    A worker never leaves a group that sets a limit.

    Args:
        controllers: Names of the controllers.
        through: The environment for ``systemd-run``, which may move the worker; None to do without.

    Returns:
        The group above.

    Raises:
        UnavailableError: When there is no such group.
        OSError: When the kernel's files cannot be read.
    """
    own, home = _own(), _home()
    names = " and ".join(sorted(controllers))
    binding = ""
    for group in _chain(own):
        if _usable(group, controllers):
            return WorkerGroup(_path(group))
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
            return WorkerGroup(_path(home), (program, *_SCOPE.split()[1:]))
        reason = f"this process is in the cgroup {own}, out of which its user may move nothing"
        raise UnavailableError(reason, f"start your program with '{_SCOPE} PROGRAM'")
    reason = f"no cgroup that this user may write, from {own} upwards, has the controller {names} for others"
    raise UnavailableError(
        reason, f"have it delegated ('systemctl edit user@.service': Delegate={names}), or do without"
    )


def enter(path: str) -> None:
    """Move this process into a group, together with its future children.

    Raises:
        OSError: When the kernel refuses.
    """
    own = str(os.getpid())
    _write(f"{path}/cgroup.procs", own)
    # Read back: only a process in the group is held to its limits.
    if own not in _read(f"{path}/cgroup.procs").split():
        raise OSError(f"this process was written into {path} and is not in it")


def make(lines: Mapping[str, str], through: Mapping[str, str] | None) -> WorkerGroup:
    """Make an empty group with limits, and read the limits back; also remove empty groups of ended launchers.

    The group above may give the needed controllers to its groups for the first time.

    Args:
        lines: The limits by the names of their files.
        through: See :func:`find_place`.

    Returns:
        The new group.

    Raises:
        UnavailableError: When there is no place for the group.
        OSError: When the kernel refuses a limit; then no group is left.
    """
    controllers = {name.partition(".")[0] for name in lines}
    above = find_place(controllers, through)
    directory = above.path
    if missing := controllers - {*_read(f"{directory}/cgroup.subtree_control").split()}:
        _write(f"{directory}/cgroup.subtree_control", " ".join(f"+{each}" for each in sorted(missing)))
    _tidy(directory)
    path = f"{directory}/anyaccel-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        os.mkdir(path, 0o755)
        for name, text in lines.items():
            _limit(f"{path}/{name}", text)
    except BaseException:
        with contextlib.suppress(OSError):
            os.rmdir(path)
        raise
    return WorkerGroup(path, above.before)


def remove(path: str) -> int | None:
    """Remove an empty group; a group in use is removed by a later :func:`make` beside it. Errors are ignored.

    Returns:
        The limit in bytes if the kernel killed a process of the group for exceeding the limit; else None.
    """
    most = None
    with contextlib.suppress(OSError, ValueError):
        events = _values(_read(f"{path}/memory.events"))
        if events.get("oom") and events.get("oom_kill"):  # not only where the whole machine had none left
            most = int(_read(f"{path}/memory.max"))
    with contextlib.suppress(OSError):
        os.rmdir(path)
    return most


def device_regions() -> set[str]:
    """Return the names of the regions of device memory that the controller ``dmem`` counts; none without it."""
    try:
        return {line.rpartition(" ")[0] for line in _read(f"{ROOT}/dmem.capacity").splitlines()}
    except OSError:
        return set()


def controls_above_home() -> list[str]:
    """Return the files by which root gives controllers to the user's systemd, outermost first; none without systemd."""
    home = _home()
    if not os.path.isdir(_path(home)):
        return []
    return [f"{_path(group)}/cgroup.subtree_control" for group in reversed(_chain(home)[1:])]


def _limit(path: str, text: str) -> None:
    """Write limits into a file of a group, and read them back; a kernel without swap needs no limit of swap.

    Raises:
        OSError: When the kernel refuses a limit, or does not keep it.
    """
    try:
        _write(path, text)
    except OSError:
        if path.endswith(SWAP) and not os.path.exists(path):  # a kernel without swap needs no limit of it
            return
        raise
    kept = _values(_read(path))
    for name, wanted in _values(text).items():
        if not wanted - _ROUNDING < kept.get(name, -1) <= wanted:
            raise OSError(f"{path} does not keep the limit {name} {wanted}".replace("  ", " "))


def _values(text: str) -> dict[str, int]:
    """Parse the numbers in a file, by the text before each; other lines, such as a limit of ``max``, are left out."""
    parts = (line.rpartition(" ") for line in text.splitlines())
    return {name.strip(): int(value) for name, _, value in parts if value.isdecimal()}


def _tidy(directory: str) -> None:
    """Remove empty groups of launchers that have ended; the kernel refuses to remove a group in use."""
    for name in os.listdir(directory):
        match = MADE.fullmatch(name)
        if match and not exists(int(match[1])):
            with contextlib.suppress(OSError):
                os.rmdir(f"{directory}/{name}")


def _own() -> str:
    """Return the group of this process.

    Raises:
        UnavailableError: When cgroup v2 is not mounted, or this process is in a group outside of the mount.
    """
    if not os.path.exists(f"{ROOT}/cgroup.controllers"):
        raise UnavailableError(
            f"there is no cgroup v2 at {ROOT}", "boot with systemd.unified_cgroup_hierarchy=1, or do without"
        )
    lines = _read(OWN).splitlines()
    # "/../" stands for a group outside of our cgroup namespace.
    own = next((line[len("0::") :] for line in lines if line.startswith("0::/")), "/..")
    if "/../" in f"{own}/":
        raise UnavailableError(f"the cgroup of this process is not below {ROOT}", "mount it there, or do without")
    return own


def _path(group: str) -> str:
    """Return the directory of a group."""
    return f"{ROOT}{group.rstrip('/')}"


def _chain(group: str) -> list[str]:
    """Return a group and the groups above, nearest first."""
    found = [group]
    while found[-1] != "/":
        found.append(found[-1].rpartition("/")[0] or "/")
    return found


def _home() -> str:
    """Return the group of the user's own systemd."""
    user = os.geteuid()
    return f"/user.slice/user-{user}.slice/user@{user}.service"


def _usable(group: str, controllers: Collection[str]) -> bool:
    """Return whether this user may make groups with the given controllers below a group; False for a missing group.

    A group with processes of its own can give no further controllers to groups below. The root group, which has no
    ``cgroup.type``, can.
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
    """Yield the files that set a limit on a group; an unreadable file is passed over."""
    for group in groups:
        for name in _BINDING:
            path = f"{_path(group)}/{name}"
            with contextlib.suppress(OSError):
                if any(line.strip() and "max" not in line.split() for line in _read(path).splitlines()):
                    yield path


def _systemd_run(environ: Mapping[str, str]) -> str | None:
    """Return the path of ``systemd-run``; None if missing, or if the user's systemd cannot be reached.

    Args:
        environ: The environment, whose ``XDG_RUNTIME_DIR`` leads to the user's systemd.
    """
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
