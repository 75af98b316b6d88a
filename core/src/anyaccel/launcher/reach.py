"""All names in the file system that lead to a device, and the paths around them."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator

from anyaccel.launcher.landlock import Node, node_of

DEVICES = "/dev"


def names(paths: Collection[str], nodes: Collection[Node]) -> set[str]:
    """Every name that leads to some devices: their nodes, further nodes of the same devices, other mounts of both.

    Args:
        paths: Device nodes, or links to them; they need not be there.
        nodes: The devices behind those that are there.
    """
    found = {os.path.realpath(path) for path in paths} | set(same_devices(DEVICES, nodes))
    mounts = list(_mounts())
    return found | {alias for path in found for alias in _other_mounts(path, mounts)}


def same_devices(directory: str, nodes: Collection[Node]) -> Iterator[str]:
    """Nodes below a directory, on its own file system, that are the same devices."""
    home = os.stat(directory).st_dev
    pending = [directory]
    while pending:
        for path in _listed(pending.pop()):
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue
            if node_of(status) in nodes:
                yield path
            elif stat.S_ISDIR(status.st_mode) and status.st_dev == home and os.access(path, os.R_OK | os.X_OK):
                pending.append(path)


def _listed(directory: str) -> list[str]:
    """The paths of what is in a directory; none when it has gone, as those of devices that are unplugged do."""
    try:
        return [os.path.join(directory, name) for name in os.listdir(directory)]
    except (FileNotFoundError, NotADirectoryError):
        return []


Mount = tuple[str, str, str]
"""One mounted file system: its number, what of it is mounted, and where."""


def _mounts() -> Iterator[Mount]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, _, number, root, point, *_ = line.split(" ")
            yield number, _unescape(root), _unescape(point)


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _other_mounts(path: str, mounts: list[Mount]) -> Iterator[str]:
    """Names that one file has through other mounts of its file system."""
    holding = [mount for mount in mounts if _below(path, mount[2]) is not None]
    if not holding:  # the root directory is no mount in a chroot
        return
    number, root, point = max(reversed(holding), key=lambda mount: len(mount[2]))  # the last one covers the others
    inside = os.path.normpath(f"{root}/{_below(path, point)}")
    for other, other_root, other_point in mounts:
        rest = _below(inside, other_root) if other == number else None
        if rest is not None:
            yield os.path.normpath(f"{other_point}/{rest}")


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
