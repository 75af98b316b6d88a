"""Find every name of a device in the file system, and the paths around these names."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from typing import NamedTuple

from anyaccel.linux.landlock import Node, node_of

DEVICES = "/dev"

_IN_MEMORY = frozenset({"devpts", "devtmpfs", "hugetlbfs", "mqueue", "ramfs", "tmpfs"})
"""Types of file systems that are quick to search."""
_ON_DISK = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "squashfs", "xfs", "zfs"})
"""Types of file systems that are too large to search, and on which stat() of one file does not block."""


def find_names(paths: Collection[str], nodes: Collection[Node]) -> set[str]:
    """Return every name of devices: their nodes, other nodes of the same devices, and other mounts of both.

    If a node is on a file system of its own, other names of the mount point are included: Landlock permits access below
    the mount if it permits access below such a name.

    Args:
        paths: Device nodes, or links to them; they need not exist.
        nodes: The devices of the nodes that exist.
    """
    found = {os.path.realpath(path) for path in paths} | set(find_nodes(DEVICES, nodes))
    mounts = list(_read_mounts())
    aliases = {alias for path in found for alias in _find_aliases(path, mounts)}
    return found | aliases | {twin for path in found for twin in _find_twins(path, mounts)}


def find_nodes(directory: str, nodes: Collection[Node]) -> Iterator[str]:
    """Yield nodes of devices below a directory, also on mounted file systems in memory; links are not followed.

    Other file systems are not searched: a disk may be huge, and a network may never answer. See
    :func:`find_unsearched`. File systems mounted without device nodes are not searched either. A directory below that
    this process may not list is passed over.

    Raises:
        PermissionError: If ``directory`` itself cannot be listed.
    """
    below = _mounts_relative(directory)
    unasked = {mount.point for mount in below if mount.kind not in _IN_MEMORY | _ON_DISK}
    unentered = {mount.point for mount in below if mount.kind not in _IN_MEMORY or not mount.devices}
    pending = [directory]
    while pending:
        for path in _list_directory(pending.pop()):
            if path in unasked:
                continue
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue
            if node_of(status) in nodes:
                yield path
            elif stat.S_ISDIR(status.st_mode) and path not in unentered and os.access(path, os.R_OK | os.X_OK):
                pending.append(path)


def find_unsearched() -> tuple[str, ...]:
    """Return the mount points below ``/dev`` that :func:`find_nodes` leaves out although device nodes may work there.

    A mount of a disk on a single file is no such point.
    """
    return tuple(
        mount.point
        for mount in _mounts_relative(DEVICES)
        if mount.devices
        and mount.kind not in _IN_MEMORY
        and (
            mount.kind not in _ON_DISK or os.path.isdir(mount.point)
        )  # a mount on a file is no directory; a network's stat() may block
    )


def _mounts_relative(directory: str) -> list[MountPoint]:
    """Return the mounts below a directory, its own left out; at each mount point, only the last mount.

    ``devices`` is True if any mount of the same file system permits device nodes.
    """
    mounts = list(_read_mounts())
    devices = {mount.number for mount in mounts if mount.devices}
    found = {mount.point: mount for mount in mounts if _relative(mount.point, directory)}
    return [mount._replace(devices=mount.number in devices) for mount in found.values()]


def _list_directory(directory: str) -> list[str]:
    """Return the paths in a directory; none for a file, or a vanished directory, such as that of an unplugged device.

    Raises:
        PermissionError: If the directory cannot be listed.
    """
    try:
        return [os.path.join(directory, name) for name in os.listdir(directory)]
    except (FileNotFoundError, NotADirectoryError):
        return []


class MountPoint(NamedTuple):
    """A line of ``/proc/self/mountinfo``.

    Attributes:
        number: Device number of the file system.
        root: The directory of the file system that is mounted.
        point: The mount point.
        kind: Type of the file system.
        devices: Whether device nodes on it can be opened.
    """

    number: str
    root: str
    point: str
    kind: str
    devices: bool


def _read_mounts() -> Iterator[MountPoint]:
    """Yield the mounts that this process sees, in the order of mounting."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            _, _, number, root, point, options, *_ = before.split(" ")
            kind, *_ = after.split(" ")
            yield MountPoint(number, _unescape(root), _unescape(point), kind, "nodev" not in options.split(","))


def _unescape(text: str) -> str:
    """Decode the octal escapes of ``/proc/self/mountinfo``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _find_aliases(path: str, mounts: list[MountPoint]) -> Iterator[str]:
    """Yield the names of a file through each mount of its file system, its own name included.

    Nothing if no mount holds the file, as in a chroot. The file need not exist.
    """
    holding = [mount for mount in mounts if _relative(path, mount.point) is not None]
    if not holding:  # in a chroot, the root directory need not be a mount
        return
    mount = max(reversed(holding), key=lambda mount: len(mount.point))  # the last mount at a point covers the others
    inside = os.path.normpath(f"{mount.root}/{_relative(path, mount.point)}")
    for other in mounts:
        rest = _relative(inside, other.root) if other.number == mount.number else None
        if rest is not None:
            yield os.path.normpath(f"{other.point}/{rest}")


def _find_twins(path: str, mounts: list[MountPoint]) -> Iterator[str]:
    """Yield the other names of the mount points above a file, through mounts outside of each mount point."""
    for point in {mount.point for mount in mounts if _relative(path, mount.point)}:
        under = [mount for mount in mounts if _relative(mount.point, point) is None]
        yield from (twin for twin in _find_aliases(point, under) if twin != point)


def _relative(path: str, directory: str) -> str | None:
    """Return the rest of a path below a directory, empty for the directory itself; None if the path is elsewhere."""
    if path == directory:
        return ""
    prefix = directory.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) else None


def list_paths_around(closed: Collection[str]) -> Iterator[str]:
    """Yield the fewest paths that cover every file except the closed files.

    These are whole directories without a closed file, and the other entries of the directories above closed files; just
    ``/`` if no file is closed.

    Args:
        closed: Absolute paths without links.

    Raises:
        PermissionError: If a directory above a closed file cannot be listed.
    """
    above = {parent for path in closed for parent in _parents(path)}
    pending = ["/"]
    while pending:
        directory = pending.pop()
        if directory not in above:
            yield directory
            continue
        for path in _list_directory(directory):
            if path in closed:
                continue
            if path in above and os.path.isdir(path):
                pending.append(path)
            else:
                yield path


def _parents(path: str) -> Iterator[str]:
    """Yield the directories above an absolute path, nearest first, up to the root."""
    while path != "/":
        path = os.path.dirname(path)
        yield path
