"""Confine a worker to its own devices: the kernel refuses it the device nodes of all others.

Masks are requests that a vendor's runtime honors. A sandbox holds whatever the worker does with them: it cannot be
lifted, and all that the worker starts is in it too.
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
"""Whether a worker must be confined, need not be, or is confined where the kernel can."""

T = TypeVar("T")

_WAY_OUT = "do without, or enforce='try' to confine workers only where that is possible"


class Sandbox(Value):
    """What one worker may not open. A plain value: ``encode`` and ``decode`` of the model carry it to the worker.

    Attributes:
        closed: Device nodes that the worker must not open.
        kept: Device nodes that it must be able to open, whatever else leads to the same device.
        gaps: What the sandbox cannot keep the worker from, one sentence each; empty when nothing is left open.
    """

    closed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()

    def apply(self) -> None:
        """Confine this process for good, with all that it starts. Call it last before the worker's own code.

        Raises:
            EnforcementError: When the process has further threads, holds one of the devices open already, or the
                kernel refuses. It may then have lost the right to gain privileges, and nothing else.
        """
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            raise EnforcementError(
                f"a process must have one thread to be confined (this one has {threads}), since the others would not"
                " be; confine it before it starts threads"
            )
        self._restrict(check_open=True)

    def start(self, function: Callable[[], T]) -> T:
        """Call a function that starts a process, so that the process is confined and the caller is not.

        The function runs in a thread of its own, which is confined and ends after it. Do not tie the life of what it
        starts to its parent by a parent-death signal: that is the thread.

        Args:
            function: Such as ``lambda: subprocess.Popen(...)``.

        Returns:
            What the function returned.

        Raises:
            EnforcementError: When the kernel refuses; whatever the function raises is raised too.
        """

        def confined() -> T:
            self._restrict(check_open=False)
            return function()

        return call_in_thread(confined)

    def _restrict(self, *, check_open: bool) -> None:
        from anyaccel.launcher import reach
        from anyaccel.linux import landlock

        reason = landlock.unavailable()
        if reason:
            raise _cannot(reason)
        try:
            kept = {_device(path) for path in self.kept} - {None}
            closed = {path: node for path in self.closed if (node := _device(path, only=True)) not in kept}
            nodes = {node: path for path, node in closed.items() if node is not None}
            if check_open:
                _refuse_open(nodes)
            landlock.restrict(reach.around(reach.names(closed, nodes)), nodes.keys())
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise _cannot("it is inside of 16 sandboxes already, which is the most") from error
            raise _cannot(str(error)) from error


def sandbox_for(allocation: Allocation, inventory: Inventory, *, enforce: Enforce = True) -> Sandbox | None:
    """Make the sandbox of a worker, where one is wanted.

    Args:
        allocation: What the worker holds.
        inventory: The machine's inventory that the allocation was made from.
        enforce: True to insist, ``"try"`` to do without where the kernel cannot (:func:`find_obstacle` says why),
            False to do without.

    Returns:
        The sandbox; None when the worker is not to be confined.

    Raises:
        EnforcementError: When it must be confined and the kernel cannot.
        PluginError: When the plug-in of a device that is held cannot say which nodes it needs.
    """
    if not confines(enforce):
        return None
    from anyaccel.inventory.left_out import left_out
    from anyaccel.launcher import reach
    from anyaccel.linux import landlock

    sandbox = plan(allocation, inventory, left_out(inventory))
    gaps = (*map(_unseen, reach.unseen()), *filter(None, (landlock.gap(),)))
    return replace(sandbox, gaps=(*sandbox.gaps, *gaps))


def confines(enforce: Enforce) -> bool:
    """Whether workers of which this is asked will be confined.

    Raises:
        EnforcementError: When they must be and the kernel cannot.
    """
    if not enforce:
        return False
    reason = find_obstacle()
    if reason and enforce != "try":
        raise _cannot(reason)
    return not reason


def find_obstacle() -> str:
    """Say why workers cannot be confined on this machine; an empty string when they can."""
    import sys

    if sys.platform != "linux":
        return "Landlock is a part of Linux"
    from anyaccel.linux import landlock

    return landlock.unavailable()


def unconfined() -> str:
    """Say that a worker is not confined, since the kernel cannot."""
    return f"the worker is not confined to its devices: {find_obstacle()}"


def plan(allocation: Allocation, inventory: Inventory, left_out: Inventory | None = None) -> Sandbox:
    """Decide which device nodes a worker must not open. Touches nothing.

    Nodes of its own devices stay open, and those that their vendor's devices share. Nodes of all other devices are
    closed, also those that the devices of a vendor share of which the worker holds none.

    Args:
        allocation: What the worker holds.
        inventory: The machine's inventory that the allocation was made from.
        left_out: The inventory of excluded vendors; see :mod:`anyaccel.inventory.left_out`.

    Raises:
        PluginError: When the plug-in of a device that is held cannot say which nodes it needs.
    """
    held = {device.id for device in allocation.devices}
    detected = [device for device in inventory.devices if not device.declared]
    others = [device for device in detected if device.id not in held] + list(left_out.devices if left_out else ())
    kept: dict[str, None] = {}
    for own in dict.fromkeys(device.vendor for device in detected if device.id in held):
        kept |= dict.fromkeys(_needed([device for device in inventory.of_vendor(own) if device.id in held]))
    nodes: dict[str, tuple[str, ...]] = {}
    gaps: dict[str, None] = {}
    for device in others:
        try:
            nodes[device.id] = _needed([device])
        except PluginError as error:
            nodes[device.id] = device.nodes
            gaps[_unshared(device.vendor, error.problem.reason)] = None
    named = [(_name(device), nodes[device.id]) for device in others]
    closed = tuple(dict.fromkeys(node for _, needed in named for node in needed if node not in kept))
    for name, needed in named:
        if all(node in kept for node in needed):
            gaps[_inseparable(name, needed)] = None
    reports = (*inventory.vendors, *(left_out.vendors if left_out else ()))
    gaps |= dict.fromkeys(_unknown(reports))
    return Sandbox(closed=closed, kept=tuple(kept), gaps=tuple(gaps))


def _needed(devices: Sequence[Device]) -> tuple[str, ...]:
    """Every node without which some devices of one vendor do not work."""
    from anyaccel.vendors.process import vendor_process

    shared = vendor_process(devices[0].vendor).container(devices).nodes
    return tuple(dict.fromkeys((*(node for device in devices for node in device.nodes), *shared)))


def _unknown(reports: Sequence[VendorReport]) -> Iterator[str]:
    """Say of which vendors some devices are not known."""
    for report in reports:
        if report.state is VendorState.FAILED:
            yield _failed(report.vendor, report.problem.reason if report.problem else "")
        elif report.partial:
            yield f"devices of {report.vendor} that could not be read may be open to the worker"


def _name(device: Device) -> str:
    return f"{device.name} ({device.id})"


def _unshared(vendor: str, reason: str) -> str:
    return f"nodes that devices of {vendor} share may be open to the worker: {reason}"


def _failed(vendor: str, reason: str) -> str:
    why = f": {reason.rstrip('.')}" if reason else ""
    return f"the detection of {vendor} failed, so that its device nodes are open to the worker{why}"


def _unseen(directory: str) -> str:
    return f"device nodes in {directory} may be open to the worker: it is mounted from elsewhere, and not searched"


def _inseparable(name: str, nodes: Collection[str]) -> str:
    if nodes:
        return f"{name} is open to the worker: each of its device nodes is needed by a device that the worker holds"
    return f"{name} may be open to the worker: its plug-in names no device node"


def _cannot(reason: str) -> EnforcementError:
    return EnforcementError(f"the worker cannot be confined to its devices: {reason}; {_WAY_OUT}")


def _device(path: str, *, only: bool = False) -> Node | None:
    """The device behind a node; None when it is not there."""
    from anyaccel.linux.landlock import node_of

    try:
        node = node_of(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    if node is None and only:
        raise EnforcementError(
            f"{path} must be a device node, since closing it would close other things too; the plug-in that names it as"
            " a node is at fault"
        )
    return node


def _refuse_open(closed: Mapping[Node, str]) -> None:
    """Refuse to go on with a device that is open already: no sandbox takes that back."""
    from anyaccel.linux.landlock import node_of

    for descriptor in list_descriptors():
        try:
            node = node_of(os.fstat(descriptor))
        except OSError:  # the descriptor of the listing itself
            continue
        if node is not None and node in closed:
            raise EnforcementError(
                f"{closed[node]} is open already, as descriptor {descriptor}; close it before the worker is confined"
            )
