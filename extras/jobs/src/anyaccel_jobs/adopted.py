"""A process that runs already, and the devices that it has open."""

from __future__ import annotations

import os
from collections import Counter

from anyaccel.errors import LeasePermissionError, UsageError
from anyaccel.linux import list_hardware, open_devices, process, users
from anyaccel.model import Device, Inventory
from anyaccel.probe import HOST
from anyaccel.text import listed


class AdoptedProcess:
    """A process of this user, kept apart from a later process with the same id.

    Args:
        pid: Process id.

    Attributes:
        pid: Process id.
        pidfd: Descriptor that becomes readable when the process has exited; open until the caller closes it.
        name: Name of the program.

    Raises:
        UsageError: If there is no such process, ``/proc`` hides the process, or its descriptor cannot be opened.
        LeasePermissionError: If the process belongs to another user, also for root.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            # First: from here on, a process that gets the id later cannot be mistaken for this one.
            self.pidfd = os.pidfd_open(pid)
            try:
                self.name = _read_own_name(pid)
            except BaseException:
                os.close(self.pidfd)
                raise
        except OSError as error:
            raise UsageError(f"no process has the id {pid}", hint="'ps -u $USER' shows your processes") from error

    def find_devices(self, inventory: Inventory) -> tuple[Device, ...]:
        """Return the devices whose nodes the process has open.

        A node that several devices share counts only for a device without a node of its own.

        Args:
            inventory: The inventory of this host.

        Raises:
            UsageError: If the process has no listed device open, has exited, or hides its open files also from its own
                user, as ``ssh-agent``; or if the inventory is not of this host.
        """
        if inventory.machine != HOST:
            raise UsageError(f"processes run on this host, not on {inventory.machine}", hint="leave --machine out")
        try:
            opened = open_devices(self.pid)
        except OSError as error:  # the kernel also refuses if the process is not dumpable, as ssh-agent
            raise UsageError(
                f"process {self.pid} ({self.name}) does not show its open files: {error.strerror}",
                hint="it has exited, or hides them from its own user; start such a program by 'anyaccel run'",
            ) from error
        numbers = {device.id: _stat_nodes(device) for device in inventory.devices}
        uses = Counter(number for each in numbers.values() for number in each)
        found = []
        for device in inventory.devices:
            own = {number for number in numbers[device.id] if uses[number] == 1} or numbers[device.id]
            if not own.isdisjoint(opened):
                found.append(device)
        if found:
            return tuple(found)
        subject = f"process {self.pid} ({self.name}) has no device open"
        if not (others := list_hardware(opened)):
            raise UsageError(subject, hint="adopt it once its framework has opened the devices")
        raise UsageError(
            f"{subject}: {listed(others)} belongs to no listed device",
            hint="'anyaccel' lists the devices of this machine",
        )


def _read_own_name(pid: int) -> str:
    """Return the name of the program of a process, which must belong to this user.

    Raises:
        LeasePermissionError: If the process belongs to another user, also for root, or has exited after its name was
            read.
        OSError: If the process has exited, or is hidden.
    """
    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        name = file.read().strip()
    owner = process.user(pid)
    if owner != os.getuid():
        whose = "another user" if owner is None else users.user_name(owner)
        raise LeasePermissionError(
            f"process {pid} belongs to {whose}", hint="its own user can adopt it, or run it with 'anyaccel run'"
        )
    return name


def _stat_nodes(device: Device) -> set[int]:
    """Return the device numbers of a device's nodes; a node that is missing or unreadable is left out."""
    numbers = set()
    for node in device.nodes:
        try:
            numbers.add(os.stat(node).st_rdev)
        except OSError:
            continue
    return numbers
