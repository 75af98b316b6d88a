"""Devices of the node with health, and the obstacles that withhold devices from pods."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import anyaccel
from anyaccel.errors import AnyaccelError
from anyaccel.ledger import BLOCKED, LeaseRecord
from anyaccel.model import Device, Health
from anyaccel.probe import HOST
from anyaccel.scheduler import facts
from anyaccel_export.slices import Obstacle

log = logging.getLogger("anyaccel.kubernetes")
KEY = "kubernetes"
"""First part of the keys of leases on behalf of pods."""
EVERY_SECONDS = 10.0
LOOK_SECONDS = 1.0
_CGROUPS = ("/kubepods.slice", "/kubepods", "/kubelet.slice", "/kubelet")
"""Where kubelets keep the control groups of pods: systemd's way, cgroupfs, and the same inside of kind."""
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_POD = re.compile(r"(?:.*-)?pod(?P<uid>[0-9a-f_-]+)(?:\.slice)?")


class Node:
    """The devices and leases of this machine, followed in threads.

    Args:
        machine: The machine, as for :func:`anyaccel.detect`.
        every: Seconds between two detections.
        prefix: Beginning of the keys of the caller's own leases, which withhold nothing.

    Attributes:
        inventory: The machine now.
        generation: Number of changes so far.
        changed: Notified on each change of devices or obstacles.
    """

    def __init__(self, machine: str | None, *, every: float = EVERY_SECONDS, prefix: str = KEY) -> None:
        # Masks of the agent's own environment must not hide devices of the node.
        self.environ = {name: value for name, value in os.environ.items() if name.startswith("ANYACCEL_")}
        self.environ |= {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        self._every, self._prefix = every, prefix
        self.inventory = anyaccel.detect(machine, environ=self.environ)
        self.changed = threading.Condition()
        self.generation = 0
        self._obstacles: dict[str, Obstacle] = {}
        self._seen: object = None
        self._stopped = threading.Event()
        self._watch = anyaccel.watch(machine, since=self.inventory, every=every, environ=self.environ)
        self._threads: list[threading.Thread] = []
        self.look()

    def start(self) -> None:
        """Follow the devices and the leases until :meth:`stop`."""
        for target in (self._follow_devices, self._follow_leases):
            self._threads.append(threading.Thread(target=target, name=f"anyaccel-{target.__name__}", daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """Stop following, and wake the threads that wait for a change."""
        self._stopped.set()
        self._watch.close()
        with self.changed:
            self.changed.notify_all()

    def has_stopped(self) -> bool:
        """Return whether :meth:`stop` was called."""
        return self._stopped.is_set()

    def join(self) -> None:
        """Wait until :meth:`stop` is called."""
        self._stopped.wait()

    def sleep(self, seconds: float) -> bool:
        """Wait for some seconds; return True as soon as :meth:`stop` is called."""
        return self._stopped.wait(seconds)

    def _follow_devices(self) -> None:
        while not self.has_stopped():
            try:
                for change in self._watch:
                    log.info("devices: %s", change)
                    self.inventory = change.inventory
                    self.look()
            except AnyaccelError as error:
                log.warning("devices: %s", error)
                self._stopped.wait(self._every)

    def _follow_leases(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            try:
                self.look()
            except AnyaccelError as error:
                log.warning("leases: %s", error)

    def look(self) -> None:
        """Read the leases, and notify if a device or an obstacle has changed."""
        obstacles = dict(self._find_obstacles())
        seen = self.inventory.devices, {each: (found.kind, found.reason) for each, found in obstacles.items()}
        with self.changed:  # not while reading: that takes milliseconds, and streams wait for the condition
            self._obstacles = obstacles
            if seen != self._seen:
                self._seen = seen
                self.generation += 1
                self.changed.notify_all()

    def _find_obstacles(self) -> Iterator[tuple[str, Obstacle]]:
        """Yield devices in use by others than our pods, then unhealthy ones: the last reason of a device counts."""
        for record in anyaccel.leases(self.inventory, self.environ):
            # A lease of the other agent counts: a pod of the device plugin is a stranger to the driver.
            if not record.key.startswith(self._prefix):
                kind = record.state if record.state in BLOCKED else "held"
                yield record.device, Obstacle(kind=kind, reason=_describe(record))
        for device in self.inventory.devices:
            if reason := broken(device):
                yield device.id, Obstacle(kind="unhealthy", reason=reason)

    def obstacles(self) -> Mapping[str, Obstacle]:
        """Return the obstacles by device id."""
        return self._obstacles

    def wait(self, seen: int, timeout: float) -> int:
        """Wait for a change after ``seen``, or for some seconds; return the number of changes."""
        with self.changed:
            self.changed.wait_for(lambda: self.generation != seen or self.has_stopped(), timeout)
            return self.generation

    def facts(self) -> dict[str, dict[str, str]]:
        """Return the facts of filters by device id, such as the driver's version."""
        return {device.id: dict(facts(device, self.inventory, typed=False)) for device in self.inventory.devices}

    def roots(self) -> dict[str, str]:
        """Return the PCIe roots by device id; devices of other machines and without PCI address are left out."""
        found = {}
        for device in self.inventory.devices if self.inventory.machine == HOST else ():
            link = Path(f"/sys/bus/pci/devices/{device.pci_bus_id}")
            for part in link.resolve().parts if device.pci_bus_id else ():
                if _ROOT.fullmatch(part):
                    found[device.id] = part
        return found


def broken(device: Device) -> str:
    """Return why a device does not work, and the remedy; empty if it works."""
    if device.health is not Health.UNHEALTHY:
        return ""
    return "; ".join(filter(None, (device.health_reason, device.health_remedy))) or "unhealthy"


def _describe(record: LeaseRecord) -> str:
    """Describe the holder of a device, without anything that changes while the device is held."""
    if record.state in BLOCKED:
        return record.reason
    return f"{record.user}: {record.note or record.request or record.command}"


def pod_groups(uids: Collection[str], root: str) -> tuple[str, ...]:
    """Return the control groups of pods, by path below the root of the hierarchy.

    Args:
        uids: Identities of the pods.
        root: Where cgroup v2 is mounted.
    """
    wanted = {uid.replace("-", "_") for uid in uids} | set(uids)
    found = []
    for top in _CGROUPS if wanted else ():
        for path, names, _ in os.walk(f"{root}{top}"):
            for name in list(names):
                match = _POD.fullmatch(name)
                if match:
                    names.remove(name)  # containers
                    if match["uid"] in wanted:
                        found.append(f"{path}/{name}".removeprefix(root))
    return tuple(found)
