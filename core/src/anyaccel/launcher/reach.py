"""All names in the file system that lead to a device, and the paths around them."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from typing import NamedTuple

from anyaccel.linux.landlock import Node, node_of

DEVICES = "/dev"

_IN_MEMORY = frozenset({"devpts", "devtmpfs", "hugetlbfs", "mqueue", "ramfs", "tmpfs"})
"""Types of file systems that can be searched in no time."""
_ON_DISK = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "squashfs", "xfs", "zfs"})
"""Types of file systems that hold too much to be searched, and answer when they are asked for one file."""


def names(paths: Collection[str], nodes: Collection[Node]) -> set[str]:
    """Every name that leads to some devices: their nodes, further nodes of the same devices, other mounts of both.

    Where a node is on a file system of its own, other names of the directory that it is mounted on are among them: for
    Landlock, what is allowed below such a name is allowed below the mount.

    Args:
        paths: Device nodes, or links to them; they need not be there.
        nodes: The devices behind those that are there.
    """
    found = {os.path.realpath(path) for path in paths} | set(same_devices(DEVICES, nodes))
    mounts = list(_mounts())
    aliases = {alias for path in found for alias in _other_mounts(path, mounts)}
    return found | aliases | {twin for path in found for twin in _twins(path, mounts)}


def same_devices(directory: str, nodes: Collection[Node]) -> Iterator[str]:
    """Nodes below a directory that are the same devices, also on file systems in memory that are mounted there.

    Others are not entered: one on a disk may be huge, and one of a network may never answer. See :func:`unseen`.
    """
    below = _mounts_below(directory)
    unasked = {mount.point for mount in below if mount.kind not in _IN_MEMORY | _ON_DISK}
    unentered = {mount.point for mount in below if mount.kind not in _IN_MEMORY or not mount.devices}
    pending = [directory]
    while pending:
        for path in _listed(pending.pop()):
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


def unseen() -> tuple[str, ...]:
    """Directories below that of the devices that are mounted there, might hold device nodes, and are not entered."""
    return tuple(
        mount.point
        for mount in _mounts_below(DEVICES)
        if mount.devices
        and mount.kind not in _IN_MEMORY
        and (mount.kind not in _ON_DISK or os.path.isdir(mount.point))  # else it may be a file, and may never answer
    )


def _mounts_below(directory: str) -> list[MountPoint]:
    """What is mounted below a directory; the last one of a place covers the others.

    Device nodes can be opened in it when they can in any mount of the same file system.
    """
    mounts = list(_mounts())
    devices = {mount.number for mount in mounts if mount.devices}
    found = {mount.point: mount for mount in mounts if _below(mount.point, directory)}
    return [mount._replace(devices=mount.number in devices) for mount in found.values()]


def _listed(directory: str) -> list[str]:
    """The paths of what is in a directory; none when it has gone, as those of devices that are unplugged do."""
    try:
        return [os.path.join(directory, name) for name in os.listdir(directory)]
    except (FileNotFoundError, NotADirectoryError):
        return []


class MountPoint(NamedTuple):
    """One mounted file system.

    Attributes:
        number: Its number.
        root: What of it is mounted.
        point: Where.
        kind: Its type.
        devices: Whether device nodes in it can be opened.
    """

    number: str
    root: str
    point: str
    kind: str
    devices: bool


def _mounts() -> Iterator[MountPoint]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            _, _, number, root, point, options, *_ = before.split(" ")
            kind, *_ = after.split(" ")
            yield MountPoint(number, _unescape(root), _unescape(point), kind, "nodev" not in options.split(","))


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _other_mounts(path: str, mounts: list[MountPoint]) -> Iterator[str]:
    """Names that one file has through other mounts of its file system."""
    holding = [mount for mount in mounts if _below(path, mount.point) is not None]
    if not holding:  # the root directory is no mount in a chroot
        return
    mount = max(reversed(holding), key=lambda mount: len(mount.point))  # the last one covers the others
    inside = os.path.normpath(f"{mount.root}/{_below(path, mount.point)}")
    for other in mounts:
        rest = _below(inside, other.root) if other.number == mount.number else None
        if rest is not None:
            yield os.path.normpath(f"{other.point}/{rest}")


def _twins(path: str, mounts: list[MountPoint]) -> Iterator[str]:
    """Other names of the directories that the file systems around a file are mounted on."""
    for point in {mount.point for mount in mounts if _below(path, mount.point)}:
        under = [mount for mount in mounts if _below(mount.point, point) is None]
        yield from (twin for twin in _other_mounts(point, under) if twin != point)


def _below(path: str, directory: str) -> str | None:
    """What follows a directory in a path; None when the path is elsewhere."""
    if path == directory:
        return ""
    prefix = directory.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) else None


def around(closed: Collection[str]) -> Iterator[str]:
    """The fewest paths that hold everything but the closed ones: whole directories where nothing in them is closed."""
    above = {parent for path in closed for parent in _parents(path)}
    pending = ["/"]
    while pending:
        directory = pending.pop()
        if directory not in above:
            yield directory
            continue
        for path in _listed(directory):
            if path in closed:
                continue
            if path in above and os.path.isdir(path):
                pending.append(path)
            else:
                yield path


def _parents(path: str) -> Iterator[str]:
    while path != "/":
        path = os.path.dirname(path)
        yield path
