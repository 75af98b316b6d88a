"""Confine a worker to the leased devices: the kernel denies access to other device nodes.

A mask is a variable that a vendor's runtime may ignore. A sandbox holds in any case: it cannot be removed, and all
descendants of the worker are in it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Literal

from anyaccel._typing import NamedTuple, TypeVar
from anyaccel.errors import EnforcementError, PluginError
from anyaccel.linux import Node, landlock, list_descriptors, node_of
from anyaccel.model import Allocation, Device, Inventory, Value, VendorReport, VendorState, replace

Enforce = bool | Literal["try"]
"""True to confine a worker, False not to, ``"try"`` to do so if the kernel can."""

T = TypeVar("T")

DEVICES = "/dev"

_IN_MEMORY = frozenset({"devpts", "devtmpfs", "hugetlbfs", "mqueue", "ramfs", "tmpfs"})
"""Types of file systems that are quick to search."""

_WAY_OUT = "do without, or enforce='try' to confine workers only where that is possible"


class Sandbox(Value):
    """Device nodes forbidden to a worker. ``encode`` and ``decode`` of the model carry a sandbox to the worker.

    Attributes:
        closed: Device nodes that the worker may not open.
        kept: Device nodes that the worker may open, also by other names.
        gaps: Sentences about devices that stay open in spite of the sandbox.
    """

    closed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()

    def apply(self) -> None:
        """Confine this process and later children for good. Call this method last before the worker's own code.

        The process can make no device nodes either.

        Raises:
            EnforcementError: If the process has several threads, or has one of the devices open, if a closed path is no
                device node, if the kernel refuses, or after another error of the system. The process may then have lost
                the right to gain privileges, and nothing else.
        """
        try:
            threads = len(os.listdir("/proc/self/task"))
        except OSError as error:
            raise _make_error(str(error)) from error
        if threads > 1:
            raise EnforcementError(
                f"a process must have one thread to be confined (this one has {threads}), since the others would not"
                " be; confine it before it starts threads"
            )
        self._restrict(check_open=True)

    def start(self, function: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
        """Start a confined process by a function; the caller stays unconfined.

        The function runs in a thread of its own, which is confined and then ends. Do not tie the life of the process to
        its parent by a parent-death signal: the parent is that thread. Devices that the caller has open are not
        refused: an inherited descriptor stays usable.

        Args:
            function: The function, such as ``lambda: subprocess.Popen(...)``.
            undo: Called with the result after an interrupt of the caller, who does not get it; the interrupt goes on
                then.

        Returns:
            The result of the function.

        Raises:
            EnforcementError: If the kernel refuses, a closed path is no device node, or after another error of the
                system; then the function is not called. Exceptions of the function pass through.
        """
        import threading

        results: list[T] = []
        errors: list[BaseException] = []

        def confined() -> None:
            try:
                self._restrict(check_open=False)
                results.append(function())
            except BaseException as error:  # noqa: BLE001 - it is raised below, in the caller's thread
                errors.append(error)

        thread = threading.Thread(target=confined, name="anyaccel-apart")
        try:
            thread.start()
            thread.join()
        except BaseException:
            # An interrupt. The function has begun, and an interrupted join() would return at once (bpo-45274).
            while thread.ident is not None and not (results or errors):
                time.sleep(0.001)
            for made in results:
                undo(made)
            raise
        if errors:
            raise errors[0]
        return results[0]

    def _restrict(self, *, check_open: bool) -> None:
        """Confine the calling thread and its later children for good.

        A closed node is closed by each name of its device that :func:`find_names` finds, unless a kept node is the same
        device. Closed paths that do not exist yet are closed, too, and so is each file that is made later in a
        directory above a closed path, but not in directories beside it. The thread can make no device nodes any more,
        and set-user-id bits have no effect.

        Args:
            check_open: Whether to refuse if this process has a closed device open.

        Raises:
            EnforcementError: If the kernel refuses, if a closed path is no device node, because of an open device, or
                after any other error of the system.
        """
        reason = landlock.unavailable()  # the process may run under another kernel policy than its parent
        if reason:
            raise _make_error(reason)
        try:
            kept = {_stat_device(path) for path in self.kept} - {None}
            closed = {path: node for path in self.closed if (node := _stat_device(path, only=True)) not in kept}
            nodes = {node: path for path, node in closed.items() if node is not None}
            if check_open:
                _refuse_open(nodes)
            landlock.restrict(list_paths_around(find_names(closed, nodes)), nodes.keys())
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise _make_error("it is inside 16 sandboxes already, the maximum") from error
            raise _make_error(str(error)) from error


def make_sandbox(allocation: Allocation, inventory: Inventory, *, enforce: Enforce = True) -> Sandbox | None:
    """Make the sandbox of a worker, without confining a process.

    Devices of vendors outside the inventory are detected, and plug-ins are asked for the nodes of each device; neither
    is done if the result is None.

    Args:
        allocation: The devices of the worker.
        inventory: The inventory from which the allocation was made.
        enforce: True to insist, ``"try"`` to go without if the kernel cannot (:func:`find_obstacle`), False for none.

    Returns:
        The sandbox, whose ``gaps`` also name directories that are not searched, and accesses that this kernel cannot
        refuse; None with False, or if the kernel cannot confine the worker.

    Raises:
        EnforcementError: If the kernel cannot confine the worker, and ``enforce`` is True.
        PluginError: If the plug-in of a device of the worker cannot name the nodes that the device needs.
        OSError: If the table of mounts cannot be read.
    """
    if not check_enforce(enforce):
        return None
    from anyaccel.inventory.find import detect_excluded

    sandbox = plan_sandbox(allocation, inventory, detect_excluded(inventory))
    unsearched = "device nodes in {} may be open to the worker: it is mounted from elsewhere, and not searched"
    gaps = (*map(unsearched.format, find_unsearched()), *filter(None, (landlock.gap(),)))
    return replace(sandbox, gaps=(*sandbox.gaps, *gaps))


def check_enforce(enforce: Enforce) -> bool:
    """Return whether workers with this option will be confined.

    Raises:
        EnforcementError: If the kernel cannot confine them, and ``enforce`` is True.
    """
    if not enforce:
        return False
    reason = find_obstacle()
    if reason and enforce != "try":
        raise _make_error(reason)
    return not reason


def find_obstacle() -> str:
    """Return the reason why workers cannot be confined on this machine; empty if possible."""
    return landlock.unavailable()


def plan_sandbox(allocation: Allocation, inventory: Inventory, left_out: Inventory | None = None) -> Sandbox:
    """Decide which device nodes a worker may not open; asks the plug-ins, and changes nothing.

    Nodes of the worker's devices stay open, and nodes that all devices of their vendors share. All other nodes of the
    detected devices are closed, also those that the devices of another vendor share. If the plug-in of another device
    cannot name shared nodes, only the listed nodes are closed, and ``gaps`` says so. ``gaps`` also warns of other
    devices without a node to close, and of vendors whose devices could not all be detected. Declared devices are
    ignored.

    Args:
        allocation: The devices of the worker.
        inventory: The inventory from which the allocation was made.
        left_out: The inventory of excluded vendors; see :func:`anyaccel.inventory.find.detect_excluded`.

    Raises:
        PluginError: If the plug-in of a device of the worker cannot name the nodes that the device needs.
    """
    held = {device.id for device in allocation.devices}
    detected = [device for device in inventory.devices if not device.declared]
    others = [device for device in detected if device.id not in held] + list(left_out.devices if left_out else ())
    kept: dict[str, None] = {}
    for own in dict.fromkeys(device.vendor for device in detected if device.id in held):
        kept |= dict.fromkeys(_find_needed([device for device in inventory.of_vendor(own) if device.id in held]))
    closed: dict[str, None] = {}
    gaps: dict[str, None] = {}
    for device in others:
        try:
            needed = _find_needed([device])
        except PluginError as error:
            needed, reason = device.nodes, error.problem.reason
            gaps[f"nodes that devices of {device.vendor} share may be open to the worker: {reason}"] = None
        closed |= dict.fromkeys(node for node in needed if node not in kept)
        if all(node in kept for node in needed):  # also if it has no nodes
            gaps[_warn_inseparable(f"{device.name} ({device.id})", needed)] = None
    reports = (*inventory.vendors, *(left_out.vendors if left_out else ()))
    gaps |= dict.fromkeys(_warn_unknown(reports))
    return Sandbox(closed=tuple(closed), kept=tuple(kept), gaps=tuple(gaps))


def _find_needed(devices: Sequence[Device]) -> tuple[str, ...]:
    """Return every node needed by devices: their listed nodes, then those that the plug-in names for a container.

    Args:
        devices: The devices, at least one, all of one vendor.

    Raises:
        PluginError: If the plug-in is not installed, or cannot name the shared nodes.
    """
    from anyaccel.vendors.process import vendor_process

    shared = vendor_process(devices[0].vendor).container(devices).nodes
    return tuple(dict.fromkeys((*(node for device in devices for node in device.nodes), *shared)))


def _warn_unknown(reports: Sequence[VendorReport]) -> Iterator[str]:
    """Yield a warning for each vendor whose detection failed, or that has devices which could not be read."""
    for report in reports:
        if report.state is VendorState.FAILED:
            why = f": {report.problem.reason.rstrip('.')}" if report.problem else ""
            yield f"the detection of {report.vendor} failed, so that its device nodes are open to the worker{why}"
        elif report.partial:
            yield f"devices of {report.vendor} that could not be read may be open to the worker"


def _warn_inseparable(name: str, nodes: Collection[str]) -> str:
    """Return the warning about another device whose nodes are all open to the worker, or without a node."""
    if nodes:
        return f"{name} is open to the worker: each of its device nodes is needed by a device that the worker holds"
    return f"{name} may be open to the worker: its plug-in names no device node"


def _make_error(reason: str) -> EnforcementError:
    """Make the error about a worker that cannot be confined, with the way out."""
    return EnforcementError(f"the worker cannot be confined to its devices: {reason}; {_WAY_OUT}")


def _stat_device(path: str, *, only: bool = False) -> Node | None:
    """Return the device of a node, or of the target of a link; None if the path does not exist, or is no device node.

    Args:
        path: The node.
        only: Whether another file is an error.

    Raises:
        EnforcementError: With ``only``, if the path exists and is no device node.
        OSError: If the path cannot be inspected.
    """
    try:
        node = node_of(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    if node is None and only:
        raise EnforcementError(
            f"{path} must be a device node, since closing it would close other files, too; its plug-in must not list it"
        )
    return node


def _refuse_open(closed: Mapping[Node, str]) -> None:
    """Check that this process has none of the devices open: no sandbox closes a descriptor.

    Args:
        closed: A path of each device.

    Raises:
        EnforcementError: If one is open.
    """
    # A descriptor stays usable in a sandbox, and child processes inherit it.
    for descriptor in list_descriptors():
        try:
            node = node_of(os.fstat(descriptor))
        except OSError:  # the descriptor of the listing itself
            continue
        if node is not None and node in closed:
            raise EnforcementError(
                f"{closed[node]} is open already, as descriptor {descriptor}; close it before the worker is confined"
            )


def find_names(paths: Collection[str], nodes: Collection[Node]) -> set[str]:
    """Return every path to devices, without links: their nodes, other nodes of the same devices, other mounts of both.

    Other nodes are found only where :func:`find_nodes` searches ``/dev``. If a node is on a file system of its own,
    other names of the mount point are included: Landlock permits access below the mount if it permits access below such
    a name.

    Args:
        paths: Device nodes, or links, of which only the target is returned; they need not exist.
        nodes: The devices of the nodes that exist.

    Raises:
        PermissionError: If ``/dev`` cannot be listed.
    """
    found = {os.path.realpath(path) for path in paths} | set(find_nodes(DEVICES, nodes))
    mounts = list(_read_mounts())
    return found | {name for path in found for name in _find_other_names(path, mounts)}


def find_nodes(directory: str, nodes: Collection[Node]) -> Iterator[str]:
    """Yield nodes of devices below a directory, also on file systems in memory mounted below; links are not followed.

    Other mounts are not searched, since a disk may be huge: see :func:`find_unsearched`. File systems mounted without
    device nodes are not searched either. A directory below that this process may not list is passed over, and a missing
    ``directory`` has no nodes.

    Raises:
        PermissionError: If ``directory`` itself cannot be listed.
        OSError: If the table of mounts cannot be read.
    """
    below = _list_mounts_below(directory)
    unentered = {mount.point for mount in below if mount.kind not in _IN_MEMORY or not mount.devices}
    pending = [directory]
    while pending:
        for path in _list_directory(pending.pop()):
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

    A mount on a single file is no such point.

    Raises:
        OSError: If the table of mounts cannot be read.
    """
    return tuple(
        mount.point
        for mount in _list_mounts_below(DEVICES)
        if mount.devices and mount.kind not in _IN_MEMORY and os.path.isdir(mount.point)
    )


def _list_mounts_below(directory: str) -> list[MountPoint]:
    """Return the mounts below a directory, its own left out, with absolute paths; at each point, only the last mount.

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
    """Yield the mounts that this process sees, in the order of mounting.

    Raises:
        OSError: If the table cannot be read, as without ``/proc``.
    """
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            _, _, number, root, point, options, *_ = before.split(" ")
            kind, *_ = after.split(" ")
            yield MountPoint(number, _unescape(root), _unescape(point), kind, "nodev" not in options.split(","))


def _unescape(text: str) -> str:
    """Decode the octal escapes of ``/proc/self/mountinfo``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _find_other_names(path: str, mounts: Sequence[MountPoint]) -> Iterator[str]:
    """Yield the other names of a file, and of the directories on which the mounts above it stand, without its own.

    Another mount of a file system shows the file under another name. The directory on which a mount stands belongs to
    the file system around the mount, which may be mounted elsewhere, too. The file cannot be reached by that name of
    the directory, but Landlock permits access below the mount if it permits access below the name.

    Args:
        path: Absolute path of the file, which need not exist.
        mounts: The table of mounts. Without one that holds the file, as in a chroot, nothing is yielded.
    """
    while holding := [mount for mount in mounts if _relative(path, mount.point) is not None]:
        # The last mount at a point covers the others.
        mount = max(reversed(holding), key=lambda mount: len(mount.point))
        inside = os.path.normpath(f"{mount.root}/{_relative(path, mount.point)}")
        for other in mounts:
            rest = _relative(inside, other.root) if other.number == mount.number else None
            if rest is not None and (name := os.path.normpath(f"{other.point}/{rest}")) != path:
                yield name
        path, mounts = mount.point, [each for each in mounts if _relative(each.point, mount.point) is None]


def _relative(path: str, directory: str) -> str | None:
    """Return the rest of a path below a directory, empty for the directory itself; None if the path is elsewhere."""
    if path == directory:
        return ""
    prefix = directory.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) else None


def list_paths_around(closed: Collection[str]) -> Iterator[str]:
    """Yield the fewest paths that cover every present file except the closed files.

    These are whole directories without a closed file, and the other entries of the directories above closed files, with
    links as entries; just ``/`` if no file is closed. A file that is made later in a directory above a closed file is
    not covered.

    Args:
        closed: Absolute paths without links.

    Raises:
        PermissionError: If a directory above a closed file cannot be listed.
    """
    above = {str(parent) for path in closed for parent in PurePosixPath(path).parents}
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
