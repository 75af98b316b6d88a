"""Recovery of active leases that are missing in the active directory: their files are made again there.

Files are missing after a directory was deleted under the holders, and after the machine's directory has replaced the
directories of single users. A new file has the name of the lost file, so it lasts as long as the process in the name,
and a release removes it. Each further process that carries the lock of the lost file gets a file of its own, with that
process in the name: it may outlive the first.

Only processes that ``/proc`` shows can be found: processes of the same user, or of every user as root.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from anyaccel._typing import NamedTuple
from anyaccel.ledger.entries import HANDOVER, LeaseName, find_active, list_names, parse_lease, stat_of
from anyaccel.linux import has_lock, list_descriptors, process

_DELETED = " (deleted)"  # appended by /proc/PID/fd to the path of a file without a name


class _Carrier(NamedTuple):
    """A process that has the lock of a lease's file.

    Attributes:
        lease: The parsed name of the file.
        pid: The process.
        start: Start time of the process; 0 when unknown.
        path: Path by which the file can be opened, deleted or not.
    """

    lease: LeaseName
    pid: int
    start: int
    path: str


def recover(directory: int, paths: Iterable[str], former: Iterable[tuple[str, int]]) -> None:
    """Make the files of active leases again that are missing in the active directory; nothing is removed elsewhere.

    Deleted files are found only through visible processes that hold their locks. Leases of other versions are left out.

    Args:
        directory: Descriptor of the active directory.
        paths: Paths of directories from which files may have been deleted, also with the directory.
        former: Paths and descriptors of other directories: their present files of leases count as well as deleted ones.

    Raises:
        OSError: When a file cannot be made, a lock cannot be tested, or a directory cannot be read.
    """
    places: dict[tuple[str, int], bool] = {}
    for path in map(os.path.realpath, paths):
        for device in (os.fstat(directory).st_dev, *_device(os.path.dirname(path))):
            places[path, device] = False
    for path, source in former:
        places[os.path.realpath(path), os.fstat(source).st_dev] = True
        leases = list_names(source).leases
        active = find_active(source, leases)
        for lease in leases:
            known = lease.understood and lease.name in active
            if known and (found := stat_of(source, lease.name)):  # else the lease has just been released
                _make(directory, lease.name, found, found.st_uid)
    for carrier in _carriers(places):
        _make_for(directory, carrier)


def clear(directory: int) -> None:
    """Remove the ledger's files from a replaced directory; waiting requests start again in the active one.

    The beginning of a name decides: ``v``, ``t1.``, ``checked.``, ``handover.`` or a dot, so that any hidden file is
    removed, but no drain. Leases of other versions, which :func:`recover` leaves out, are lost. Files that cannot be
    removed stay.

    Args:
        directory: Descriptor of the directory; locked, so that no process publishes there meanwhile.

    Raises:
        OSError: When the directory cannot be read.
    """
    for name in os.listdir(directory):
        if name.startswith(("v", "t1.", ".", "checked.", HANDOVER)):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=directory)


def remove(path: str, name: str) -> None:
    """Remove the files of one device's lease: the file with this name, and the files of further processes.

    No such file is no error; nothing is removed for a name that is not a lease's.

    Args:
        path: The directory.
        name: Name of the lease's file.

    Raises:
        OSError: When there is no directory, or a file cannot be removed, also if another process has just removed it.
    """
    lease = parse_lease(name)
    for each in os.listdir(path):
        other = parse_lease(each)
        if lease and other and (other.device, other.boot, other.id) == (lease.device, lease.boot, lease.id):
            os.unlink(f"{path}/{each}")


def _device(path: str) -> Iterator[int]:
    """Yield the device number of a path's file system; nothing if the path cannot be read."""
    with contextlib.suppress(OSError):
        yield os.stat(path).st_dev


def _carriers(places: dict[tuple[str, int], bool]) -> Iterator[_Carrier]:
    """Find the visible processes that have exclusively locked leases' files of given directories.

    A process comes once for each descriptor with a lock; files of other versions are left out.

    Args:
        places: Directories and the device numbers of their file systems, each with whether to include files that still
            exist beside deleted ones. In another container the same path may lead to another file system.

    Raises:
        OSError: When this process has no descriptor left to look.
    """
    folders = {folder for folder, _ in places}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            descriptors = list_descriptors(pid)
        except process.UNSEEN:  # the process has ended, or belongs to another user
            continue
        for descriptor in descriptors:
            path = f"/proc/{pid}/fd/{descriptor}"
            try:
                target = os.readlink(path)
                folder, _, name = target.removesuffix(_DELETED).rpartition("/")
                there_too = places.get((folder, os.stat(path).st_dev)) if folder in folders else None
            except OSError:
                continue
            if there_too is None or not (there_too or target.endswith(_DELETED)):
                continue
            lease = parse_lease(name)
            if lease and lease.understood and has_lock(pid, descriptor):
                yield _Carrier(lease, int(pid), process.start_time(int(pid)) or 0, path)


def _make_for(directory: int, carrier: _Carrier) -> None:
    """Make the file of a lease again for a process with its lock, with that process in the name.

    The owner is the owner of the lost file or, for a process other than in the lost name, the user of that process. A
    process that has just ended gets no file.

    Raises:
        OSError: When the file cannot be made.
    """
    lease = carrier.lease
    try:
        found = os.stat(carrier.path)
        owner, name = found.st_uid, lease.name
        if (carrier.pid, carrier.start) != (lease.pid, lease.start):
            owner = os.stat(f"/proc/{carrier.pid}").st_uid
            name = name.replace(f".{lease.pid}.{lease.start}.", f".{carrier.pid}.{carrier.start}.", 1)
    except process.UNSEEN:  # the process has just ended
        return
    _make(directory, name, found, owner)


def _make(directory: int, name: str, found: os.stat_result, owner: int) -> None:
    """Make the file of a lease, unlocked, with the times of the lost file; an existing file stays as it is.

    The body, which is for display, is lost: a user could have replaced the lost file by one that other users may not
    read. An owner that cannot be set is ignored.

    Args:
        directory: Descriptor of the directory.
        name: Name of the file.
        found: State of the lost file.
        owner: User who may remove the file; set only by root.

    Raises:
        OSError: When the file cannot be made, or its times cannot be set; a file that was made stays.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o644, dir_fd=directory)
    except FileExistsError:
        return
    try:
        os.fchmod(fd, 0o644)
        if os.geteuid() == 0:
            with contextlib.suppress(OSError):  # in a user namespace the owner may have no number
                os.fchown(fd, owner, -1)
        os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))  # the start of the lease
    finally:
        os.close(fd)
