"""Whether locks on a file system can be relied on: not over a network, and not before a second process was refused."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
from functools import lru_cache

from anyaccel.errors import StateDirectoryError
from anyaccel.ledger.names import boot, hidden_name
from anyaccel.linux.process import UNSEEN
from anyaccel.linux.users import outside

_MAKING = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NETWORK = re.compile(
    "9p|acfs|afs|beegfs|ceph|cifs|coda|cvfs|davfs|drvfs|fhgfs|glusterfs|gpfs|ibrix|lustre|ncpfs|nfs|nfs4|orangefs|"
    "panfs|prl_fs|pvfs2|scoutfs|smb2|smb3|smbfs|snfs|vboxsf|virtiofs|vmhgfs|wekafs"
)
_LOCAL_FUSE = ("fuseblk", "fuse.fuse-overlayfs")
_TRY_TO_LOCK = """
import fcntl, os, sys
try:
    fcntl.flock(os.open(sys.stdin.buffer.read(), os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("refused")
else:
    print("granted")
"""


def refuse_network(descriptor: int, path: str) -> None:
    """Make sure that a directory is on a file system of this machine.

    FUSE counts as a network: what is behind it decides, and cannot be seen.

    Raises:
        StateDirectoryError: When it is on a network's.
    """
    name = file_system(descriptor)
    if _NETWORK.fullmatch(name) or (name.startswith("fuse") and name not in _LOCAL_FUSE):
        raise StateDirectoryError(
            f"the state directory {path} is on a network file system ({name}), where locks of other "
            f"machines' processes look like ours or are not seen",
            hint="set ANYACCEL_STATE_DIR to a directory on this machine, best on tmpfs",
        )


def mount(descriptor: int) -> str:
    """Number of the mount that a descriptor came through; empty when unknown."""
    with contextlib.suppress(*UNSEEN), open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as info:
        return next((line.split()[1] for line in info if line.startswith("mnt_id:")), "")
    return ""


def file_system(descriptor: int) -> str:
    """Type of a file system, by the mount that a descriptor came through; empty when unknown."""
    wanted = mount(descriptor)
    with contextlib.suppress(*UNSEEN), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
        for line in table:
            if line.split(" ", 1)[0] == wanted:
                return line.partition(" - ")[2].split(" ", 1)[0]
    return ""


def tested(descriptor: int, user: int) -> bool:
    """Whether a directory has been tested in this boot by a user, or by root for one."""
    try:
        return os.stat(_marker(user), dir_fd=descriptor, follow_symlinks=False).st_uid in (0, user)
    except FileNotFoundError:
        return False


def test_lock(descriptor: int, path: str) -> bool:
    """Make sure that a second process does not get a lock that this one holds.

    Returns:
        Whether it was tested; not where nothing can be written: whoever wants a lease there is told why.

    Raises:
        StateDirectoryError: When it gets it.
    """
    name = hidden_name()
    try:
        file = os.open(name, _MAKING, 0o600, dir_fd=descriptor)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        answer = _ask_second_process(f"{path}/{name}")
    except OSError as error:
        answer = f"failed: {error.strerror}"
    finally:
        os.unlink(name, dir_fd=descriptor)
        os.close(file)
    if answer != "refused":
        raise StateDirectoryError(
            f"the state directory {path} does not keep locks: a second process that wanted a lock which this one "
            f"holds was not refused (it {answer})",
            hint="set ANYACCEL_STATE_DIR to a directory on tmpfs",
        )
    return True


def note_test(descriptor: int) -> None:
    """Note that a directory has been tested, so that :func:`tested` is true until the next boot."""
    with contextlib.suppress(OSError):
        os.close(os.open(_marker(os.geteuid()), _MAKING, 0o644, dir_fd=descriptor))


@lru_cache(maxsize=16)
def _marker(user: int) -> str:
    return f"checked.{boot()}.{outside(user)}"


def _ask_second_process(path: str) -> str:
    import subprocess

    command = [sys.executable or "python3", "-I", "-S", "-c", _TRY_TO_LOCK]
    # The path through a pipe: a command line can be read by everybody.
    done = subprocess.run(command, input=os.fsencode(path), capture_output=True, check=False, timeout=60)
    lines = done.stderr.decode(errors="replace").strip().splitlines() or ["said nothing"]
    return done.stdout.decode(errors="replace").strip() or f"failed: {lines[-1]}"
