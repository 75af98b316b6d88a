"""Confine a worker to the leased devices: the kernel denies access to other device nodes.

A mask is a variable that a vendor's runtime may ignore. A sandbox holds in any case: it cannot be removed, and all
descendants of the worker are in it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from anyaccel.errors import EnforcementError, PluginError
from anyaccel.linux.descriptors import list_descriptors
from anyaccel.linux.process import call_in_thread
from anyaccel.model import Allocation, Device, Inventory, Value, VendorReport, VendorState, replace

if TYPE_CHECKING:
    from anyaccel.linux.landlock import Node

Enforce = bool | Literal["try"]
"""True to confine a worker, False not to, ``"try"`` to do so if the kernel can."""

T = TypeVar("T")

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
                device node, or if the kernel refuses. The process may then have lost the right to gain privileges, and
                nothing else.
        """
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            raise EnforcementError(
                f"a process must have one thread to be confined (this one has {threads}), since the others would not"
                " be; confine it before it starts threads"
            )
        self._restrict(check_open=True)

    def start(self, function: Callable[[], T]) -> T:
        """Start a confined process by a function; the caller stays unconfined.

        The function runs in a thread of its own, which is confined and then ends. Do not tie the life of the process to
        its parent by a parent-death signal: the parent is that thread. Devices that the caller has open are not
        refused: an inherited descriptor stays usable.

        Args:
            function: The function, such as ``lambda: subprocess.Popen(...)``.

        Returns:
            The result of the function.

        Raises:
            EnforcementError: If the kernel refuses, or a closed path is no device node; then the function is not
                called. Exceptions of the function pass through.
        """

        def confined() -> T:
            self._restrict(check_open=False)
            return function()

        return call_in_thread(confined)

    def _restrict(self, *, check_open: bool) -> None:
        """Confine the calling thread and its later children for good.

        A closed node is closed by every name of its device, unless a kept node is the same device. Paths that do not
        exist yet are closed, too.

        Args:
            check_open: Whether to refuse if this process has a closed device open.

        Raises:
            EnforcementError: If the kernel refuses, if a closed path is no device node, because of an open device, or
                after any other error of the system.
        """
        from anyaccel.launcher import reach
        from anyaccel.linux import landlock

        reason = landlock.unavailable()  # the process may run under another kernel policy than its parent
        if reason:
            raise _make_error(reason)
        try:
            kept = {_stat_device(path) for path in self.kept} - {None}
            closed = {path: node for path in self.closed if (node := _stat_device(path, only=True)) not in kept}
            nodes = {node: path for path, node in closed.items() if node is not None}
            if check_open:
                _refuse_open(nodes)
            landlock.restrict(reach.list_paths_around(reach.find_names(closed, nodes)), nodes.keys())
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise _make_error("it is inside 16 sandboxes already, the maximum") from error
            raise _make_error(str(error)) from error


def make_sandbox(allocation: Allocation, inventory: Inventory, *, enforce: Enforce = True) -> Sandbox | None:
    """Make the sandbox of a worker, without confining a process. Plug-ins are asked, also those of excluded vendors.

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
    """
    if not check_enforce(enforce):
        return None
    from anyaccel.inventory.left_out import left_out
    from anyaccel.launcher import reach
    from anyaccel.linux import landlock

    sandbox = plan_sandbox(allocation, inventory, left_out(inventory))
    gaps = (*map(_warn_unsearched, reach.find_unsearched()), *filter(None, (landlock.gap(),)))
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
    from anyaccel.linux import landlock

    return landlock.unavailable()


def describe_obstacle() -> str:
    """Return a warning about an unconfined worker, with the reason of :func:`find_obstacle`, which must have one."""
    return f"the worker is not confined to its devices: {find_obstacle()}"


def plan_sandbox(allocation: Allocation, inventory: Inventory, left_out: Inventory | None = None) -> Sandbox:
    """Decide which device nodes a worker may not open; asks the plug-ins, and changes nothing.

    Nodes of the worker's devices stay open, and nodes that all devices of their vendors share. All other nodes are
    closed, also those that the devices of another vendor share. If the plug-in of another device cannot name shared
    nodes, only the listed nodes are closed, and ``gaps`` says so. ``gaps`` also warns of other devices without a node
    to close, and of vendors whose devices could not all be detected. Declared devices are ignored.

    Args:
        allocation: The devices of the worker.
        inventory: The inventory from which the allocation was made.
        left_out: The inventory of excluded vendors; see :mod:`anyaccel.inventory.left_out`.

    Raises:
        PluginError: If the plug-in of a device of the worker cannot name the nodes that the device needs.
    """
    held = {device.id for device in allocation.devices}
    detected = [device for device in inventory.devices if not device.declared]
    others = [device for device in detected if device.id not in held] + list(left_out.devices if left_out else ())
    kept: dict[str, None] = {}
    for own in dict.fromkeys(device.vendor for device in detected if device.id in held):
        kept |= dict.fromkeys(_find_needed([device for device in inventory.of_vendor(own) if device.id in held]))
    nodes: dict[str, tuple[str, ...]] = {}
    gaps: dict[str, None] = {}
    for device in others:
        try:
            nodes[device.id] = _find_needed([device])
        except PluginError as error:
            nodes[device.id] = device.nodes
            gaps[_warn_shared(device.vendor, error.problem.reason)] = None
    named = [(_name(device), nodes[device.id]) for device in others]
    closed = tuple(dict.fromkeys(node for _, needed in named for node in needed if node not in kept))
    for name, needed in named:
        if all(node in kept for node in needed):  # also if it has no nodes
            gaps[_warn_inseparable(name, needed)] = None
    reports = (*inventory.vendors, *(left_out.vendors if left_out else ()))
    gaps |= dict.fromkeys(_warn_unknown(reports))
    return Sandbox(closed=closed, kept=tuple(kept), gaps=tuple(gaps))


def _find_needed(devices: Sequence[Device]) -> tuple[str, ...]:
    """Return every node needed by devices: their listed nodes, then those that the plug-in names for a container.

    Args:
        devices: The devices, at least one, all of one vendor.

    Raises:
        PluginError: If the plug-in cannot name the shared nodes.
    """
    from anyaccel.vendors.process import vendor_process

    shared = vendor_process(devices[0].vendor).container(devices).nodes
    return tuple(dict.fromkeys((*(node for device in devices for node in device.nodes), *shared)))


def _warn_unknown(reports: Sequence[VendorReport]) -> Iterator[str]:
    """Yield a warning for each vendor whose detection failed, or that has devices which could not be read."""
    for report in reports:
        if report.state is VendorState.FAILED:
            yield _warn_failed(report.vendor, report.problem.reason if report.problem else "")
        elif report.partial:
            yield f"devices of {report.vendor} that could not be read may be open to the worker"


def _name(device: Device) -> str:
    return f"{device.name} ({device.id})"


def _warn_shared(vendor: str, reason: str) -> str:
    return f"nodes that devices of {vendor} share may be open to the worker: {reason}"


def _warn_failed(vendor: str, reason: str) -> str:
    """Return the warning about a vendor whose detection failed, with the reason, if known."""
    why = f": {reason.rstrip('.')}" if reason else ""
    return f"the detection of {vendor} failed, so that its device nodes are open to the worker{why}"


def _warn_unsearched(directory: str) -> str:
    return f"device nodes in {directory} may be open to the worker: it is mounted from elsewhere, and not searched"


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
    from anyaccel.linux.landlock import node_of

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
    from anyaccel.linux.landlock import node_of

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
