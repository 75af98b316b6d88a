"""A device plugin for clusters before dynamic resource allocation: a resource per vendor or type, of counted units."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyaccel
import grpc  # type: ignore[import-untyped] # pyright: ignore[reportMissingTypeStubs]
from anyaccel.errors import AnyaccelError
from anyaccel.model import Device, Fractional, parts_of
from anyaccel_export.slices import DRIVER
from anyaccel_export.text import slug

from anyaccel_kubernetes import wire
from anyaccel_kubernetes.claims import edits_for
from anyaccel_kubernetes.node import KEY, Node, log

PREFIX = f"{KEY}/device/"
"""Beginning of the keys of leases; the unit follows."""
KEPT_SECONDS = 86400.0
"""A lease goes on for so long without the agent: pod-resources names no control groups that could keep it."""
STARTING_SECONDS = 60.0
"""Time from an allocation until the kubelet lists the pod."""
_SHARE = "::"
_RENEW_SECONDS = 3600.0
_LOOK_SECONDS = 1.0
_ALL = 0.9999
"""Sum of shares from which on a device is whole: shares are rounded to 1/10000."""


class Unit(NamedTuple):
    """A counted unit of a resource: a device, or a share named ``ID::NUMBER``.

    Attributes:
        name: The id in the protocol.
        device: The device.
        share: The fraction of the device; None for all of it.
    """

    name: str
    device: Device
    share: float | None


class Units:
    """The units of a node, by resource.

    Args:
        node: The node.
        shares: Shares into which each device that can be shared is cut; 0 for none.
        by: ``vendor`` or ``type``: what a resource is named by.
    """

    def __init__(self, node: Node, *, shares: int, by: str) -> None:
        self._node, self._count, self._by = node, shares, by

    def resources(self) -> dict[str, list[Unit]]:
        """Return the units by name of the resource, such as ``nvidia``, or ``nvidia.shared`` for shares."""
        found: dict[str, list[Unit]] = {}
        visible = [device for device in self._node.inventory.devices if device.visible]
        # The kubelet counts units apart from each other, so of a device and its parts only the parts are units.
        divided = parts_of(visible)
        for device in visible:
            if device.id in divided:
                continue
            name = slug(
                (device.type if self._by == "type" else device.vendor).lower(), "a-z0-9-"
            )  # as the classes are named
            if self._count > 1 and device.fractional is not Fractional.NO:
                units = found.setdefault(f"{name}.shared", [])
                units += [
                    Unit(f"{device.id}{_SHARE}{number}", device, 1 / self._count) for number in range(self._count)
                ]
            else:
                found.setdefault(name, []).append(Unit(device.id, device, None))
        return found

    def find(self, names: Sequence[str]) -> list[Unit]:
        """Return units by name.

        Raises:
            AnyaccelError: If a unit is not there.
        """
        known = {unit.name: unit for units in self.resources().values() for unit in units}
        if missing := next((name for name in names if name not in known), None):
            raise AnyaccelError(f"device {missing!r:.120} is gone", hint="'anyaccel status' lists those of the node")
        return [known[name] for name in names]


class Leases:
    """The leases of the units that the kubelet has given to pods. Methods are thread-safe."""

    def __init__(self, node: Node, units: Units) -> None:
        self._node, self._units = node, units
        self._lock = threading.Lock()
        self._granted: dict[str, float] = {}  # by unit: when the kubelet asked for it
        self._renewed: dict[str, tuple[float, str]] = {}

    def grant(self, units: Sequence[Unit]) -> None:
        """Lease all units of a starting container, or raise and lease no unit.

        Raises:
            AnyaccelError: If a device is in use.
        """
        with self._lock:
            taken = []
            try:
                for unit in units:
                    before = self._granted.get(unit.name)
                    lease = self._acquire(unit, "a pod that starts")
                    self._granted[unit.name] = time.monotonic()
                    if before is None:
                        taken.append((unit, lease))
            except AnyaccelError:
                for unit, lease in taken:
                    lease.release()
                    self._granted.pop(unit.name, None)
                raise

    def follow(self, pods: dict[str, str]) -> None:
        """Release the leases of ended pods, and lease the units of running pods without a lease.

        Args:
            pods: Names of pods by unit, as the kubelet lists them.
        """
        with self._lock:
            now = time.monotonic()
            leases = {
                lease.key.removeprefix(PREFIX): lease
                for lease in anyaccel.find_on_behalf(self._node.inventory, self._node.environ)
                if lease.key.startswith(PREFIX)
            }
            # The kubelet lists a pod some time after it has asked for its devices.
            self._granted = {name: at for name, at in self._granted.items() if now - at < STARTING_SECONDS}
            for name, lease in leases.items():
                if name not in pods and name not in self._granted:
                    log.info("released %s", name)
                    lease.release()
                    self._renewed.pop(name, None)
            for name, pod in pods.items():
                try:
                    self._keep(name, pod, leases.get(name), now)
                except AnyaccelError as error:
                    log.warning("%s is used by pod %s without a lease: %s", name, pod, error)

    def _keep(self, name: str, pod: str, lease: anyaccel.LeaseOnBehalf | None, now: float) -> None:
        """Renew the lease of a unit, with the pod's name; acquire a lost lease anew."""
        if lease is None:
            self._acquire(self._units.find([name])[0], f"pod {pod}")
        else:
            renewed, known = self._renewed.get(name, (0.0, ""))
            if known == pod and now - renewed < _RENEW_SECONDS:
                return
            lease.renew(KEPT_SECONDS, note=f"pod {pod}")
        self._renewed[name] = now, pod

    def _acquire(self, unit: Unit, note: str) -> anyaccel.LeaseOnBehalf:
        shares = {} if unit.share is None else {unit.device.id: unit.share}
        return anyaccel.acquire_on_behalf(
            anyaccel.request_devices([unit.device], shares), PREFIX + unit.name, seconds=KEPT_SECONDS, note=note,
            inventory=self._node.inventory, environ=self._node.environ, unallocated="inherit",
        )  # fmt: skip


class Resource:
    """A gRPC server of the units of one resource, at a socket in the kubelet's folder."""

    def __init__(self, name: str, node: Node, units: Units, leases: Leases, *, root: Path, dev: str) -> None:
        self.name = f"{DRIVER}/{name}"
        self._short, self._node, self._units, self._leases = name, node, units, leases
        self._root, self._dev = root, dev
        # A hash: with the name of a long type, the path would exceed the 107 characters of a socket.
        self.socket = root / f"anyaccel-{hashlib.sha256(name.encode()).hexdigest()[:12]}.sock"
        self._server: Any = None

    def serve(self) -> None:
        """Start the server, and register with the kubelet.

        Raises:
            grpc.RpcError: If the kubelet does not take the registration.
        """
        self.stop()
        api = wire.plugin
        options = api.DevicePluginOptions(get_preferred_allocation_available=True)
        methods: dict[str, wire.Method] = {
            "GetDevicePluginOptions": (lambda *_: options, api.Empty, api.DevicePluginOptions),
            "GetPreferredAllocation": (
                self._prefer, api.PreferredAllocationRequest, api.PreferredAllocationResponse
            ),
            "Allocate": (self._allocate, api.AllocateRequest, api.AllocateResponse),
        }  # fmt: skip
        streams = {"ListAndWatch": (self._watch, api.Empty, api.ListAndWatchResponse)}
        self._server = wire.serve(str(self.socket), [wire.service("v1beta1.DevicePlugin", methods, streams)])
        request = api.RegisterRequest(
            version="v1beta1", endpoint=self.socket.name, resource_name=self.name, options=options
        )
        wire.call(str(self._root / "kubelet.sock"), "/v1beta1.Registration/Register", request, api.Empty)
        log.info("registered %s", self.name)

    @property
    def serving(self) -> bool:
        """Whether the server runs with its socket in place: a starting kubelet empties the folder."""
        return self._server is not None and self.socket.exists()

    def stop(self) -> None:
        """Stop the server, and remove the socket."""
        server, self._server = self._server, None
        if server is not None:
            server.stop(0).wait()
        self.socket.unlink(missing_ok=True)

    def _own(self) -> list[Unit]:
        return self._units.resources().get(self._short, [])

    def _watch(self, _: Any, context: Any) -> Iterator[Any]:
        """Yield the units with their health, at once and after each change."""
        # A stream of a former server must end, or it would keep a thread of the pool.
        server, seen = self._server, -1
        while context.is_active() and not self._node.has_stopped() and self._server is server:
            now = self._node.wait(seen, 1.0)
            if now != seen:
                seen = now
                obstacles = self._node.obstacles()
                yield wire.plugin.ListAndWatchResponse(
                    devices=[self._describe(unit, unit.device.id in obstacles) for unit in self._own()]
                )

    @staticmethod
    def _describe(unit: Unit, withheld: bool) -> Any:
        api, node = wire.plugin, unit.device.numa_node
        topology = None if node is None else api.TopologyInfo(nodes=[api.NUMANode(ID=node)])
        return api.Device(ID=unit.name, health="Unhealthy" if withheld else "Healthy", topology=topology)

    def _prefer(self, request: Any, _: Any) -> Any:
        api = wire.plugin
        return api.PreferredAllocationResponse(
            container_responses=[
                api.ContainerPreferredAllocationResponse(
                    deviceIDs=self.prefer(each.available_deviceIDs, each.must_include_deviceIDs, each.allocation_size)
                )
                for each in request.container_requests
            ]
        )

    def prefer(self, available: Sequence[str], including: Sequence[str], count: int) -> list[str]:
        """Choose units: the best-connected devices; of shares those of as many devices as there are.

        Args:
            available: Names of the units to choose from.
            including: Names of those that must be among them.
            count: Number of units.
        """
        units = self._units.find(list(dict.fromkeys((*including, *available))))
        by_device: dict[str, list[str]] = {}
        for unit in units:  # the ones that must be included come first
            by_device.setdefault(unit.device.id, []).append(unit.name)
        devices = {unit.device.id: unit.device for unit in units}
        must = list(dict.fromkeys(unit.device.id for unit in units[: len(including)]))
        order = tuple(sorted(devices.values(), key=lambda device: device.index))
        chosen = anyaccel.choose_devices(order, max(len(must), min(count, len(order))), must)
        found = list(including)
        while len(found) < count and any(by_device[device.id] for device in chosen):
            for device in chosen:
                left = [name for name in by_device[device.id] if name not in found]
                by_device[device.id] = left[1:]
                if left and len(found) < count:
                    found.append(left[0])
        return found

    def _allocate(self, request: Any, context: Any) -> Any:
        api, answer = wire.plugin, wire.plugin.AllocateResponse()
        for each in request.container_requests:
            try:
                units = self._units.find(each.devices_ids)
                self._leases.grant(units)
                edits = edits_for(self._node, _sum_shares(units))
            except AnyaccelError as error:  # the kubelet rejects the pod with the message
                log.warning("%s: %s", self.name, error)
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
                raise
            answer.container_responses.append(
                api.ContainerAllocateResponse(
                    envs=edits.env,
                    mounts=[
                        api.Mount(container_path=mount.target, host_path=mount.source, read_only=mount.read_only)
                        for mount in edits.mounts
                    ],
                    devices=[
                        api.DeviceSpec(container_path=node, host_path=self._dev + node, permissions="rw")
                        for node in edits.nodes
                    ],
                )
            )
            log.info("allocated %s", " ".join(each.devices_ids))
        return answer


def _sum_shares(units: Sequence[Unit]) -> list[tuple[Device, float | None]]:
    """Return the devices of units with the sums of the shares; None for a whole device."""
    found: dict[str, tuple[Device, float | None]] = {}
    for unit in units:
        before = found.get(unit.device.id, (unit.device, 0.0))[1]
        share = None if unit.share is None or before is None else before + unit.share
        found[unit.device.id] = unit.device, None if share is None or share > _ALL else share
    return list(found.values())


class DevicePlugin:
    """The device plugin of this node.

    Args:
        node: The node.
        root: Folder of the kubelet.
        shares: Shares into which each device that can be shared is cut; 0 for none.
        by: ``vendor`` or ``type``: what a resource is named by.
        dev: Prefix of device nodes on the host, for simulated machines.
    """

    def __init__(self, node: Node, *, root: str, shares: int = 0, by: str = "vendor", dev: str = "") -> None:
        self._node, self._root, self._dev = node, Path(root), dev
        self._units = Units(node, shares=shares, by=by)
        self._leases = Leases(node, self._units)
        self._resources: dict[str, Resource] = {}

    def run(self) -> None:
        """Serve until the node stops: register with each new kubelet, and follow the pods."""
        self._node.start()
        folder, known = self._root / "device-plugins", None
        try:
            while not self._node.has_stopped():
                try:
                    found = os.stat(folder / "kubelet.sock")
                    kubelet = found.st_ino, found.st_ctime_ns  # another inode: the kubelet has started anew
                except OSError:
                    kubelet = None
                if kubelet:
                    self._register(folder, anew=kubelet != known)
                    self._follow_pods()
                known = kubelet
                self._node.sleep(_LOOK_SECONDS)
        finally:
            for resource in self._resources.values():
                resource.stop()

    def _register(self, folder: Path, *, anew: bool) -> None:
        """Register the resources without a server; after a restart of the kubelet, every resource."""
        for name in self._units.resources():
            resource = self._resources.get(name)
            if resource is None:
                resource = self._resources[name] = Resource(
                    name, self._node, self._units, self._leases, root=folder, dev=self._dev
                )
            if anew or not resource.serving:
                try:
                    resource.serve()
                except (grpc.RpcError, RuntimeError, OSError) as error:  # a kubelet that starts cancels calls
                    log.warning("%s: the kubelet does not take it yet: %s", resource.name, _told(error))
                    resource.stop()

    def _follow_pods(self) -> None:
        try:
            pods = list_pods(str(self._root))
        except grpc.RpcError as error:
            log.warning("pods: %s", _told(error))
            return
        try:
            self._leases.follow(pods)
        except AnyaccelError as error:
            log.warning("leases: %s", error)


def list_pods(root: str) -> dict[str, str]:
    """Return the pods that hold our units: ``namespace/name`` by unit, as the kubelet says.

    Raises:
        grpc.RpcError: If the kubelet cannot be asked.
    """
    api = wire.pods
    answer = wire.call(
        f"{root}/pod-resources/kubelet.sock", "/v1.PodResourcesLister/List", api.ListPodResourcesRequest(),
        api.ListPodResourcesResponse,
    )  # fmt: skip
    return {
        unit: f"{pod.namespace}/{pod.name}"
        for pod in answer.pod_resources
        for container in pod.containers
        for part in container.devices
        if part.resource_name.startswith(f"{DRIVER}/")
        for unit in part.device_ids
    }


def _told(error: Exception) -> str:
    """Return the details of an error of gRPC, or its text."""
    details = getattr(error, "details", None)
    return str(details() if callable(details) else error)
