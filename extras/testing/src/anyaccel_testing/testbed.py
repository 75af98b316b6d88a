"""A recording as the machine: its files and device nodes in a mount namespace, for the vendor's own software.

A replay answers only programs that ask through anyaccel. In a testbed the kernel answers: the vendor's real tool or
library opens ``/sys/class/...`` and reads the recorded text, and ``anyaccel`` detects live. So both can be compared
without a device. Every file lies on a tmpfs of the namespace; files of the host are never written.

An installed tool runs unchanged. In place of a missing tool, a script prints the recorded output.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import stat
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.errors import AnyaccelError
from anyaccel.linux import call
from anyaccel.probe import FILE_NAME, load

if TYPE_CHECKING:
    import subprocess

# From linux/sched.h, sys/mount.h, linux/capability.h and linux/prctl.h.
NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000
NO_SUID, NO_DEVICES, BIND, RECURSIVE, PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
DETACH = 0x2
CAPABILITY_VERSION = 0x20080522
OVERRIDE_PERMISSIONS = (1, 2)
DROP_FROM_BOUNDS = 24

HOST_PARTS = ("/sys/devices/system", "/sys/fs/cgroup", "/dev/pts", "/dev/shm")  # noqa: S108 - the host's own
"""Directories of the host that stay, except where the recording has paths of its own: processors, terminals, memory."""
HOST_NODES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))
STREAMS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
STAGE = "/dev/.anyaccel"
"""Directory of the testbed for files of other directories, and for the recorded tools."""
LINKS = 40
REMEDY = (
    "run as root (in a container: with --cap-add SYS_ADMIN), or allow user namespaces (sysctl user.max_user_namespaces)"
)


class TestbedError(AnyaccelError):
    """Raised when a testbed cannot be made here: there is neither root nor a user namespace."""

    __test__ = False
    code = "testbed"


def run_in_testbed(recording: str | Path, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command on the machine of a recording, and return its status and output.

    Args:
        recording: Directory with a ``machine.json``.
        argv: The command. Recorded variables are added to its environment, except ``PATH``.
        options: Further arguments of :func:`subprocess.run`, such as ``env`` or ``timeout``.

    Raises:
        TestbedError: When a testbed cannot be made here.
        MachineError: When the recording is missing or damaged.
    """
    import subprocess

    load(os.path.join(recording, FILE_NAME))
    command = [sys.executable, "-m", "anyaccel", "testbed", "--json", os.fspath(recording), "--", *argv]
    options = {"capture_output": True, "text": True, **options}
    done = subprocess.run(command, check=False, **options)
    with contextlib.suppress(ValueError, TypeError, KeyError):  # usually the output of the command, in any form
        error = json.loads(done.stdout)["error"]
        if error["code"] == TestbedError.code:
            raise TestbedError(error["message"], hint=REMEDY)
    return done


def enter_testbed(recording: Mapping[str, Any]) -> list[str]:
    """Move this process into a new mount namespace with the files of a recording. There is no way back.

    The process loses the right to override permissions, so that a file closed to the recorded user is closed here too.
    Recorded variables are set in ``os.environ``, and the recorded tools are added behind its ``PATH``.

    Args:
        recording: The content of a ``machine.json``.

    Returns:
        The gaps: recorded paths that the testbed lacks or shows otherwise, each with the reason.

    Raises:
        TestbedError: When the kernel gives no mount namespace, or the working directory has been removed.
    """
    paths: dict[str, dict[str, Any]] = recording.get("paths", {})
    try:
        directory = os.getcwd()
    except OSError as error:
        reason = f"a testbed needs its working directory, which has gone ({error.strerror})"
        raise TestbedError(reason, hint="go to another directory") from error
    try:
        _unshare()
        _change_root([part for part in HOST_PARTS if not any(_is_below(path, part) for path in paths)])
    except OSError as error:
        reason = f"a testbed needs a mount namespace, and the kernel refuses one ({error.strerror})"
        raise TestbedError(reason, hint=REMEDY) from error
    os.chdir(directory)  # the same path on the new root
    gaps = _Writer(paths).write(recording.get("commands", []))
    variables = {name: text for name, text in recording.get("environ", {}).items() if name != "PATH"}
    os.environ.update(variables, PATH=f"{os.environ.get('PATH', os.defpath)}:{STAGE}/tools")
    _drop_override()
    return gaps


def _change_root(kept: Sequence[str]) -> None:
    """Make a root with the directories of this host, an empty ``/sys`` and ``/dev``, and parts of the host's in these.

    A new root, since nothing can be mounted at a missing path, such as ``/.dockerenv`` of a recorded container.
    """
    # Held by descriptor, since the first mount covers some of them.
    held = {path: os.open(path, os.O_PATH) for path in (*filter(os.path.exists, kept), *HOST_NODES)}
    root = "/sys"  # a directory that every host has, and that is covered anyway
    _mount("none", root, "tmpfs", NO_DEVICES | NO_SUID, "mode=0755")
    for entry in os.scandir("/"):
        new = f"{root}{entry.path}"
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), new)
        elif entry.is_dir():  # no files: /.dockerenv of this host would become a fact of the recorded machine
            os.mkdir(new)
            if entry.name not in ("sys", "dev"):
                _mount(entry.path, new, flags=BIND | RECURSIVE)
    for name in ("sys", "dev"):
        # 'nodev': a recorded node is there to be looked at. Opening it must not reach a device of this host.
        _mount("none", f"{root}/{name}", "tmpfs", NO_DEVICES | NO_SUID, "mode=0755")
    for path, descriptor in held.items():
        new = f"{root}{path}"
        if path in HOST_NODES:
            Path(new).touch()
        else:
            os.makedirs(new)
        _mount(f"/proc/self/fd/{descriptor}", new, flags=BIND | RECURSIVE)
        os.close(descriptor)
    for name, target in STREAMS.items():
        os.symlink(target, f"{root}/dev/{name}")
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)  # the old root, which the call has put on top of the new one


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory}/")


def _mount(source: str, target: str, kind: str = "none", flags: int = 0, data: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind.encode(), flags, data.encode() or None, subject=target)


def _unshare() -> None:
    """Enter a mount namespace of this process alone, with root's rights or in a user namespace."""
    user, group = os.geteuid(), os.getegid()
    try:
        call("unshare", NEW_MOUNTS)
    except PermissionError:
        call("unshare", NEW_MOUNTS | NEW_USER)
        # The user stays who they are: a state directory of another owner would be refused.
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", file).write_text(text)
    # systemd mounts '/' shared: without this, the host would see every mount of the testbed.
    _mount("none", "/", flags=PRIVATE | RECURSIVE)


class _Writer:
    """Writes files and tools of a recording to the new mounts.

    Attributes:
        gaps: Paths that differ from the recording, with the reason.
    """

    def __init__(self, paths: Mapping[str, Mapping[str, Any]]) -> None:
        self.gaps: list[str] = []
        self._paths = paths
        self._stages: dict[str, str] = {}
        """By path of the host that gets other content, the path on the stage with the content."""

    def write(self, commands: Sequence[Mapping[str, Any]]) -> list[str]:
        """Write everything, and return the gaps."""
        # Links first: later paths may lead through them.
        for path, entry in sorted(self._paths.items(), key=lambda item: "link" not in item[1]):
            where = self._place(path)
            if where is None:
                self.gaps.append(f"{path}: this kernel has no directory for it")
                continue
            try:
                os.makedirs(os.path.dirname(where), exist_ok=True)
                self._write(path, where, entry)
            except OSError as error:
                self.gaps.append(f"{path}: {error.strerror}")
        self._complete_sysfs()
        for program, answers in _group_by_program(commands).items():
            self._write_tool(program, answers)
        for path, stage in sorted(self._stages.items()):
            try:
                if _is_below(path, "/proc"):  # procfs refuses to be part of an overlay
                    _mount(stage, path, flags=BIND)
                else:  # the recorded files lie over the host's; nothing can be written to either
                    _mount("overlay", path, "overlay", data=f"lowerdir={stage}:{path}")
            except OSError as error:
                self.gaps.append(f"{path}: nothing can be laid over it ({error.strerror})")
        return self.gaps

    def _complete_sysfs(self) -> None:
        """Make directories that every kernel has, and that vendors' software requires."""
        # A link of sysfs always leads somewhere: furiosa-smi takes a card for lost if its 'driver' does not.
        for path, entry in self._paths.items():
            place = self._follow(path)
            if "link" in entry and _is_below(path, "/sys") and _is_below(place, "/sys"):
                with contextlib.suppress(OSError):  # a loop, or below a file
                    os.makedirs(place, exist_ok=True)
        if os.path.isdir("/sys/bus/pci"):  # every kernel with a PCI bus has it, often empty; tt-umd requires it
            os.makedirs("/sys/bus/pci/slots", exist_ok=True)

    def _write_tool(self, program: str, answers: Sequence[Mapping[str, Any]]) -> None:
        """Write a script that prints the recorded output of a tool."""
        where = self._place(program) if program.startswith("/") else f"{STAGE}/tools/{program}"
        if where is None or ("/" in program and not program.startswith("/")):
            self.gaps.append(f"{program}: this kernel has no directory for it")
            return
        os.makedirs(os.path.dirname(where), exist_ok=True)
        Path(where).write_text(_make_script(program, answers), encoding="utf-8")
        os.chmod(where, 0o755)  # noqa: S103 - other users run it too

    def _write(self, path: str, where: str, entry: Mapping[str, Any]) -> None:
        if "link" in entry:
            os.symlink(entry["link"], where)
        elif "dir" in entry:
            os.makedirs(where, exist_ok=True)
        elif "char" in entry or "block" in entry:
            self._make_node(path, where, entry)
        elif not os.path.isdir(where):  # an entry without content may name a directory that has entries of its own
            Path(where).write_text(entry.get("text", ""), encoding="utf-8")
            if "errno" in entry:
                os.chmod(where, 0)
                if entry["errno"] != "EACCES":
                    self.gaps.append(f"{path}: opening it fails with EACCES instead of {entry['errno']}")

    def _make_node(self, path: str, where: str, entry: Mapping[str, Any]) -> None:
        kind, numbers = (stat.S_IFCHR, entry["char"]) if "char" in entry else (stat.S_IFBLK, entry["block"])
        access = entry.get("access", "rw")
        mode = 0o444 * ("r" in access) | 0o222 * ("w" in access)
        try:
            os.mknod(where, kind | mode, os.makedev(*numbers))
        except PermissionError:  # a user namespace may make no nodes: /dev/null stands for each
            Path(where).touch()
            _mount("/dev/null", where, flags=BIND)
            self.gaps.append(f"{path}: it has the numbers of /dev/null, since only root can make nodes")
            return
        os.chmod(where, mode)  # mknod has applied the umask
        if "group" in entry:
            os.chown(where, -1, entry["group"])

    def _place(self, path: str) -> str | None:
        """Return the path at which a recorded one is written; None if the kernel has no place for it.

        Links are followed within the recording, never by the kernel, so a hostile link cannot lead out of the tmpfs.
        """
        directory, _, name = path.rpartition("/")
        place = f"{self._follow(directory)}/{name}"
        above = place if os.path.isfile(place) and _is_below(place, "/proc") else os.path.dirname(place)
        while not os.path.exists(above):
            above = os.path.dirname(above)
        if above == "/" or above.startswith(("/sys", "/dev")):
            return place  # on a tmpfs of the testbed already
        if above == "/proc":
            return None
        stage = self._stages.setdefault(above, f"{STAGE}/{len(self._stages)}")
        return stage + place[len(above) :]

    def _follow(self, path: str, depth: int = LINKS) -> str:
        found = ""
        for part in path.split("/")[1:]:
            found = f"{found}/{part}"
            link = self._paths.get(found, {}).get("link")
            if link is not None and depth:
                found = self._follow(os.path.normpath(os.path.join(os.path.dirname(found), link)), depth - 1)
        return found


def _group_by_program(commands: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Group recorded commands by their program, in the order of the recording.

    ``env NAME=VALUE program`` counts as ``program``: the host's own ``env`` starts it.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for command in commands:
        argv = command["argv"]
        at = next((at for at, word in enumerate(argv) if at and "=" not in word), 0) if argv[0] == "env" else 0
        found.setdefault(argv[at], []).append({**command, "argv": argv[at:]})
    return found


def _make_script(program: str, answers: Sequence[Mapping[str, Any]]) -> str:
    """Make a shell script that answers like a recorded tool. A shell starts ten times faster than Python."""
    lines = ["#!/bin/sh"]
    for answer in answers:
        words = [f'[ "$#" = {len(answer["argv"]) - 1} ]']
        words += [f'[ "${{{at}}}" = {shlex.quote(word)} ]' for at, word in enumerate(answer["argv"]) if at]
        status = answer.get("returncode", 0)
        lines += [f"if {' && '.join(words)}; then"]
        if answer.get("timeout"):
            lines += ["exec sleep infinity"]
        for text, stream in ((answer.get("stdout"), ""), (answer.get("stderr"), " >&2")):
            lines += [f"printf %s {shlex.quote(text)}{stream}"] if text else []
        lines += [f"kill -{-status} $$" if status < 0 else f"exit {status}", "fi"]
    message = f"{program}: the recording has no answer to these arguments"
    return "\n".join([*lines, f"echo {shlex.quote(message)} >&2", "exit 127", ""])


def _drop_override() -> None:
    """Give up root's right to open every file, here and in programs that are started."""
    with open("/proc/self/status", encoding="ascii") as file:
        sets = dict(line.rstrip().split(":\t") for line in file if line.startswith("Cap"))
    lost = sum(1 << capability for capability in OVERRIDE_PERMISSIONS)
    words: list[int] = []
    for half in (0, 32):
        words += [(int(sets[name], 16) & ~lost) >> half & 0xFFFFFFFF for name in ("CapEff", "CapPrm", "CapInh")]
    for capability in OVERRIDE_PERMISSIONS:
        with contextlib.suppress(OSError):  # a user without the right to change the bounds has none of these either
            call("prctl", DROP_FROM_BOUNDS, capability, 0, 0, 0)
    call("capset", struct.pack("=Ii", CAPABILITY_VERSION, 0), struct.pack("=6I", *words))
