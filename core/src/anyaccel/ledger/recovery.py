"""Leases that are in force, but not in the directory that is in force: their files are made again there.

That is so after a directory was deleted under its holders, and after another one took its place: the machine's for
those of single users. A file that is made again has the name of the one that it stands for, so it lasts as long as the
process that the name says, and whoever gives the lease back removes it. Each further process that carries the lock
of the lost file gets a name of its own, with that process in it: it may outlive the first.

What can be seen is what ``/proc`` shows: the processes of our own user, and those of all users as root.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from anyaccel.ledger.listing import read, states
from anyaccel.ledger.lockfile import BODY_LIMIT, Life, read_body
from anyaccel.ledger.names import LeaseName, parse_lease
from anyaccel.linux import process
from anyaccel.linux.descriptors import has_lock, list_descriptors

_DELETED = " (deleted)"


class _Carrier(NamedTuple):
    """A process that has the lock of a lease's file.

    Attributes:
        lease: What the file's name says.
        pid: The process.
        start: Its start time; 0 when unknown.
        path: Where the file can be opened, whether it is deleted or not.
    """

    lease: LeaseName
    pid: int
    start: int
    path: str


def recover(directory: int, paths: Iterable[str], former: Iterable[tuple[str, int]]) -> None:
    """Make the files of leases again that are in force elsewhere.

    Args:
        directory: Descriptor of the directory in force.
        paths: Where leases may have been kept in directories that were deleted.
        former: Paths and descriptors of other directories that leases are kept in.

    Raises:
        OSError: When a file cannot be made.
    """
    places: dict[tuple[str, int], bool] = {}
    for path in map(os.path.realpath, paths):
        for device in (os.fstat(directory).st_dev, *_device(os.path.dirname(path))):
            places[path, device] = False
    for path, source in former:
        places[os.path.realpath(path), os.fstat(source).st_dev] = True
        leases = read(source).leases
        found_states = states(source, leases)
        for lease in leases:
            if lease.understood and found_states[lease.name].life is not Life.OVER:
                with contextlib.suppress(FileNotFoundError):  # it has just been given back
                    found = os.stat(lease.name, dir_fd=source, follow_symlinks=False)
                    _make(directory, lease.name, found, found.st_uid, read_body(source, lease.name))
    for carrier in _carriers(places):
        _make_for(directory, carrier)


def clear(directory: int) -> None:
    """Remove all that is ours by its name from a directory that is in force no more: whoever waits there starts anew.

    Args:
        directory: Its descriptor; locked, so that nobody publishes there meanwhile.
    """
    for name in os.listdir(directory):
        if name.startswith(("v", "t1.", ".", "checked.")):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=directory)


def remove(path: str, name: str) -> None:
    """Remove all files of one device's lease from a directory: the one of this name, and those of other processes.

    Args:
        path: The directory.
        name: Name of the lease's file.

    Raises:
        OSError: When there is no directory, or a file cannot be removed.
    """
    lease = parse_lease(name)
    for each in os.listdir(path):
        other = parse_lease(each)
        if lease and other and (other.device, other.boot, other.id) == (lease.device, lease.boot, lease.id):
            os.unlink(f"{path}/{each}")


def _device(path: str) -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield os.stat(path).st_dev


def _carriers(places: dict[tuple[str, int], bool]) -> Iterator[_Carrier]:
    """Who has locked leases' files that were in some directories.

    Args:
        places: The directories and their file systems, and whether to look for files that still are there, too. In
            another container the same path may lead to another file system.
    """
    folders = {folder for folder, _ in places}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            descriptors = list_descriptors(pid)
        except process.UNSEEN:  # it has ended, or is another user's
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
    lease, body = carrier.lease, b""
    try:
        found = os.stat(carrier.path)
        owner, name = found.st_uid, lease.name
        if (carrier.pid, carrier.start) != (lease.pid, lease.start):
            owner = os.stat(f"/proc/{carrier.pid}").st_uid
            name = name.replace(f".{lease.pid}.{lease.start}.", f".{carrier.pid}.{carrier.start}.", 1)
    except process.UNSEEN:  # it has just ended
        return
    if os.geteuid() != 0 and stat.S_ISREG(found.st_mode):
        with contextlib.suppress(OSError), open(carrier.path, "rb", opener=_without_blocking) as file:
            body = file.read(BODY_LIMIT)
    _make(directory, name, found, owner, body)


def _make(directory: int, name: str, found: os.stat_result, owner: int, body: bytes) -> None:
    """Make one file.

    Args:
        directory: Descriptor of the directory.
        name: Its name.
        found: State of the file that it stands for.
        owner: Who may remove it.
        body: The words in it. Root leaves them out: a user could have put another file in the place of the one that
            was looked at, which not everybody may read.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o644, dir_fd=directory)
    except FileExistsError:
        return
    try:
        os.fchmod(fd, 0o644)
        if os.geteuid() == 0:
            with contextlib.suppress(OSError):  # in a user namespace, where the owner may have no number
                os.fchown(fd, owner, -1)
        else:
            with contextlib.suppress(OSError):  # no room for words
                os.write(fd, body)
        os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))  # which says since when it is held
    finally:
        os.close(fd)


def _without_blocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
