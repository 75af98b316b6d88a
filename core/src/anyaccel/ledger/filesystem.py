"""Whether locks on a file system can be relied on: not over a network, and not before a second process was refused."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys

from anyaccel.errors import StateDirectoryError
from anyaccel.ledger.names import boot, hidden_name

_NETWORK = re.compile(
    "9p|acfs|afs|beegfs|ceph|cifs|coda|cvfs|davfs|drvfs|fhgfs|glusterfs|gpfs|ibrix|lustre|ncpfs|nfs|nfs4|orangefs|"
    "panfs|prl_fs|pvfs2|scoutfs|smb2|smb3|smbfs|snfs|vboxsf|virtiofs|vmhgfs|wekafs"
)
_LOCAL_FUSE = ("fuseblk", "fuse.fuse-overlayfs")
_TRY_TO_LOCK = """
import fcntl, os, sys
try:
    fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("refused")
else:
    print("granted")
"""


def network_type(descriptor: int) -> str:
    """Type of the file system that an open directory is on if it is a network's; empty otherwise.

    FUSE counts as a network: what is behind it decides, and cannot be seen.
    """
    name = _type(descriptor)
    fuse = name.startswith("fuse") and name not in _LOCAL_FUSE
    return name if _NETWORK.fullmatch(name) or fuse else ""


def file_system(descriptor: int) -> str:
    """Type of the file system that an open directory is on; empty when unknown."""
    return _type(descriptor)


def _type(descriptor: int) -> str:
    """Type of a file system, by the mount that a descriptor came through; empty when unknown."""
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as info:
            mount = next((line.split()[1] for line in info if line.startswith("mnt_id:")), "")
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
            for line in table:
                if line.split(" ", 1)[0] == mount:
                    return line.partition(" - ")[2].split(" ", 1)[0]
    except OSError:
        pass
    return ""


def test_lock(descriptor: int, path: str) -> None:
    """Once per boot and user, make sure that a second process does not get a lock that this one holds.

    Raises:
        StateDirectoryError: When it does.
    """
    marker = f"checked.{boot()}.{os.geteuid()}"
    with contextlib.suppress(FileNotFoundError):
        if os.stat(marker, dir_fd=descriptor, follow_symlinks=False).st_uid in (0, os.geteuid()):
            return
    name = hidden_name()
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(name, flags, 0o600, dir_fd=descriptor)
    except OSError:
        return  # nobody can take a lease here; whoever tries is told why
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
    with contextlib.suppress(OSError):
        os.close(os.open(marker, flags, 0o644, dir_fd=descriptor))


def _ask_second_process(path: str) -> str:
    command = [sys.executable or "python3", "-I", "-S", "-c", _TRY_TO_LOCK, path]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60)
    lines = done.stderr.strip().splitlines() or ["said nothing"]
    return done.stdout.strip() or f"failed: {lines[-1]}"
