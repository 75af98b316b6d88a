"""Groups of processes (cgroup v2) that the kernel holds to limits: finding a place for one, making it, entering it.

The rules are the kernel's, Documentation/admin-guide/cgroup-v2.rst. A group may be made below one that this user may
write and that has the controllers; a group with processes of its own gives its controllers to none below it ("No
Internal Process Constraint"). A process moves where its user may write both groups and the nearest one that they are in
("Delegation Containment"). A process outside of what its user's systemd manages, as after a login by SSH, is brought
there by ``systemd-run --user --scope`` first.
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
"""Name of a group that a launcher of ours has made, with its process id."""
SWAP = "memory.swap.max"

_ROUNDING = 1 << 16
"""The kernel rounds down to pages, of which the largest has so many bytes."""
_BINDING = ("memory.max", "memory.high", SWAP, "dmem.max", "cpu.max", "cpuset.cpus", "cpuset.mems")
"""Limits out of which no process is taken. Not ``pids.max``: systemd gives each scope one of its own."""
_SCOPE = "systemd-run --user --scope --quiet --collect --"


Place = tuple[str, tuple[str, ...]]
"""Directory of a group, and the program, with its arguments, that brings a process to where it may enter: none where it
may enter already."""


class UnavailableError(Exception):
    """Raised when no group can be made.

    Attributes:
        reason: Why.
        remedy: The way out.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def find_place(controllers: Collection[str], through: Mapping[str, str] | None) -> Place:
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
            return _path(group), ()
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
            return _path(home), (program, *_SCOPE.split()[1:])
        reason = f"this process is in the cgroup {own}, out of which its user may move nothing"
        raise UnavailableError(reason, f"start your program with '{_SCOPE} PROGRAM'")
    reason = f"no cgroup that this user may write, from {own} upwards, has the controller {names} for others"
    raise UnavailableError(
        reason, f"have it delegated ('systemctl edit user@.service': Delegate={names}), or do without"
    )


def enter(path: str) -> None:
    """Put this process into a group, with all that it starts from here on.

    Raises:
        OSError: When the kernel refuses.
    """
    own = str(os.getpid())
    _write(f"{path}/cgroup.procs", own)
    if own not in _read(f"{path}/cgroup.procs").split():
        raise OSError(f"this process was written into {path} and is not in it")


def make(lines: Mapping[str, str], through: Mapping[str, str] | None) -> Place:
    """Make a group with some limits, and read them back.

    Args:
        lines: The limits by the names of their files.
        through: As of :func:`find_place`.

    Raises:
        UnavailableError: When there is no place for it.
        OSError: When the kernel refuses a limit.
    """
    controllers = {name.partition(".")[0] for name in lines}
    directory, before = find_place(controllers, through)
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
    return path, before


def remove(path: str) -> int | None:
    """Remove a group that nothing runs in any more; else the next one that is made beside it has it removed.

    Returns:
        Bytes of the host's memory for which the kernel has killed something in it; None where it did not.
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
    """Return what the kernel calls the memory of devices that it counts."""
    try:
        return {line.rpartition(" ")[0] for line in _read(f"{ROOT}/dmem.capacity").splitlines()}
    except OSError:
        return set()


def controls_above_home() -> list[str]:
    """Return the files by which root gives a controller to the user's own systemd, outermost first; none without it."""
    home = _home()
    if not os.path.isdir(_path(home)):
        return []
    return [f"{_path(group)}/cgroup.subtree_control" for group in reversed(_chain(home)[1:])]


def _limit(path: str, text: str) -> None:
    """Write limits into a file of a group, one to a line, and make sure that the kernel keeps to them."""
    try:
        _write(path, text)
    except OSError:
        if path.endswith(SWAP) and not os.path.exists(path):
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
