"""A driver for dynamic resource allocation: ResourceSlices, claims, health, and the registration with the kubelet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from anyaccel.errors import AnyaccelError
from anyaccel_export.slices import DRIVER, Features, device_names, make_slices

from anyaccel_kubernetes import wire
from anyaccel_kubernetes.api import CONFLICT, NOT_FOUND, ApiError, ApiServer
from anyaccel_kubernetes.claims import Claims, parse_claim
from anyaccel_kubernetes.node import Node, broken, log

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
RENEW_SECONDS = 20.0
"""Time between two renewals: the first one after a claim was prepared finds the control groups of its pods."""
RESYNC_SECONDS = 60.0
_HEALTHY, _UNHEALTHY = 1, 2
_HEALTH_SECONDS = 60


class Publisher:
    """Keeps the ResourceSlices of this node as the node is.

    Args:
        node: The node.
        api: The API server.
        name: Name of the node in the cluster.
        shares: Whether devices that can be shared may be allocated in parts.
    """

    def __init__(self, node: Node, api: ApiServer, name: str, *, shares: bool) -> None:
        self._node, self._api, self._name = node, api, name
        self._features = Features(shares=shares)
        self._selector = {"fieldSelector": f"spec.driver={DRIVER},spec.nodeName={name}"}
        self._written: dict[str, str] = {}  # versions of the slices as this process wrote them

    def publish(self) -> None:
        """Write the slices if the cluster has others: changed ones, missing ones, and none too many.

        Raises:
            ApiError: If the API server refuses, or cannot be reached. A conflict is resolved at the next call.
        """
        found = {each["metadata"]["name"]: each for each in self._list()}
        generation = max((each["spec"]["pool"]["generation"] for each in found.values()), default=0)
        wanted = self._make(generation)
        # The generation is that of the cluster: a driver that starts anew changes nothing by that alone.
        if {each["metadata"]["name"]: each["spec"] for each in wanted} == {n: e["spec"] for n, e in found.items()}:
            self._remember(found.values())
            return
        written = [self._write(each, found.get(each["metadata"]["name"])) for each in self._make(generation + 1)]
        # Last: until then the former generation of the pool is complete or the new one is not used.
        for name in found.keys() - {each["metadata"]["name"] for each in wanted}:
            self._api.ask("DELETE", f"{SLICES}/{name}")
        self._remember(written)
        kept = _features(written, self._features, self._make(generation + 1))
        if kept != self._features:  # the API server drops what the cluster lacks
            log.warning("the cluster lacks features: %s", kept)
            self._features = kept
            self.publish()

    def _list(self) -> list[dict[str, Any]]:
        query = self._selector["fieldSelector"].replace("=", "%3D").replace(",", "%2C")
        return list(self._api.ask("GET", f"{SLICES}?fieldSelector={query}").get("items") or ())

    def _make(self, generation: int) -> list[dict[str, Any]]:
        node = self._node
        return make_slices(
            node.inventory, self._name, generation=generation, obstacles=node.obstacles(), facts=node.facts(),
            roots=node.roots(), features=self._features,
        )  # fmt: skip

    def _write(self, wanted: dict[str, Any], found: dict[str, Any] | None) -> dict[str, Any]:
        """Create or replace a slice; return the object that the API server stored."""
        if found is None:
            return self._api.ask("POST", SLICES, wanted)
        meta = {"name": wanted["metadata"]["name"], "resourceVersion": found["metadata"]["resourceVersion"]}
        return self._api.ask("PUT", f"{SLICES}/{meta['name']}", {**wanted, "metadata": meta})

    def _remember(self, found: Any) -> None:
        self._written = {each["metadata"]["name"]: each["metadata"]["resourceVersion"] for each in found}

    def follow(self, foreign: threading.Event) -> None:
        """Watch the slices until the node stops; set the event when another client has changed or removed one.

        The watch may break at any time: then all slices are compared once more.
        """
        while not self._node.has_stopped():
            try:
                version = self._api.ask("GET", f"{SLICES}?limit=1").get("metadata", {}).get("resourceVersion", "")
                foreign.set()  # what came before this watch
                for event in self._api.watch(SLICES, {**self._selector, "resourceVersion": version}):
                    meta = event["object"]["metadata"]
                    known = self._written.get(meta["name"])
                    if event["type"] == "DELETED" or known != meta["resourceVersion"]:
                        foreign.set()
                    if self._node.has_stopped():
                        return
            except (ApiError, KeyError) as error:
                log.warning("watch of slices: %s", error)
                self._node.sleep(1.0)


def _features(written: list[dict[str, Any]], had: Features, sent: list[dict[str, Any]]) -> Features:
    """Return the features whose fields the API server has kept."""

    def kept(field: str) -> bool:
        pairs = zip(sent, written, strict=True)
        return all(
            field in after or field not in before
            for ours, theirs in pairs
            for before, after in zip(ours["spec"].get("devices", ()), theirs["spec"].get("devices") or (), strict=False)
        )

    return Features(
        taints=had.taints and kept("taints"),
        counters=had.counters and kept("consumesCounters"),
        shares=had.shares and kept("allowMultipleAllocations"),
    )


class Driver:
    """The driver of this node: servers for the kubelet, and threads for slices and renewals.

    Args:
        node: The node.
        api: The API server.
        name: Name of the node in the cluster.
        claims: The claims of the node.
        root: Folder of the kubelet.
        shares: Whether devices that can be shared may be allocated in parts.
    """

    def __init__(
        self, node: Node, api: ApiServer, name: str, claims: Claims, *, root: str, shares: bool = False
    ) -> None:
        self._node, self._api, self._name, self._claims = node, api, name, claims
        self._root = Path(root)
        self._publisher = Publisher(node, api, name, shares=shares)
        self._servers: list[Any] = []
        self._foreign = threading.Event()
        self.registered = threading.Event()

    def run(self) -> None:
        """Serve until the node stops."""
        self._claims.adopt()
        self._serve()
        self._node.start()
        threads = [
            threading.Thread(target=target, name=f"anyaccel-{target.__name__}", daemon=True)
            for target in (self._publish, self._renew, self._watch)
        ]
        for thread in threads:
            thread.start()
        try:
            self._node.join()
        finally:
            for server in self._servers:
                server.stop(0).wait()
            self._registration_socket.unlink(missing_ok=True)

    @property
    def _registration_socket(self) -> Path:
        return self._root / "plugins_registry" / f"{DRIVER}-reg.sock"

    def _serve(self) -> None:
        """Start the servers; the socket of the registration comes last, since the kubelet calls at once."""
        endpoint = self._root / "plugins" / DRIVER / "dra.sock"
        endpoint.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        api, health, registration = wire.dra, wire.health, wire.registration
        services = [
            wire.service(
                f"{wire.DRA}.DRAPlugin",
                {
                    "NodePrepareResources": (
                        self._prepare, api.NodePrepareResourcesRequest, api.NodePrepareResourcesResponse
                    ),
                    "NodeUnprepareResources": (
                        self._unprepare, api.NodeUnprepareResourcesRequest, api.NodeUnprepareResourcesResponse
                    ),
                },
            ),
            wire.service(
                "v1alpha1.DRAResourceHealth",
                {},
                {
                    "NodeWatchResources": (
                        self._watch_health, health.NodeWatchResourcesRequest, health.NodeWatchResourcesResponse
                    )
                },
            ),
        ]  # fmt: skip
        info = registration.PluginInfo(
            type="DRAPlugin", name=DRIVER, endpoint=str(endpoint),
            supported_versions=["v1.DRAPlugin", "v1alpha1.DRAResourceHealth"],
        )  # fmt: skip
        registrar = wire.service(
            "pluginregistration.Registration",
            {
                "GetInfo": (lambda *_: info, registration.InfoRequest, registration.PluginInfo),
                "NotifyRegistrationStatus": (
                    self._note_registration, registration.RegistrationStatus, registration.RegistrationStatusResponse
                ),
            },
        )  # fmt: skip
        self._registration_socket.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        for path, served in ((endpoint, services), (self._registration_socket, [registrar])):
            path.unlink(missing_ok=True)  # of a driver that was killed
            self._servers.append(wire.serve(str(path), served, threads=16))

    def _note_registration(self, request: Any, _: Any) -> Any:
        if request.plugin_registered:
            log.info("the kubelet has registered the driver")
            self.registered.set()
        else:
            log.warning("the kubelet refuses the driver: %s", request.error)
        return wire.registration.RegistrationStatusResponse()

    def _prepare(self, request: Any, _: Any) -> Any:
        return self._serve_claims("prepared", self._prepare_claim, request, wire.dra.NodePrepareResourcesResponse())

    def _unprepare(self, request: Any, _: Any) -> Any:
        def unprepare(asked: Any, _: Any) -> None:
            self._claims.unprepare(asked.uid)

        return self._serve_claims("unprepared", unprepare, request, wire.dra.NodeUnprepareResourcesResponse())

    @staticmethod
    def _serve_claims(done: str, serve: Callable[[Any, Any], None], request: Any, answer: Any) -> Any:
        """Serve the claims of a request, each for itself: an error of one fails no other."""
        for asked in request.claims:
            own = answer.claims[asked.uid]
            try:
                serve(asked, own)
                log.info("%s claim %s/%s", done, asked.namespace, asked.name)
            except Exception as error:  # noqa: BLE001 -- the kubelet shows the message at the pod, and tries again
                log.warning("claim %s/%s: %s", asked.namespace, asked.name, error)
                own.error = str(error) or type(error).__name__
        return answer

    def _prepare_claim(self, asked: Any, answer: Any) -> None:
        path = f"/apis/resource.k8s.io/v1/namespaces/{asked.namespace}/resourceclaims/{asked.name}"
        claim = parse_claim(self._api.ask("GET", path), asked.uid, self._name)
        answer.devices.extend(
            wire.dra.Device(
                request_names=[each["request"]], pool_name=each["pool"], device_name=each["device"],
                cdi_device_ids=[cdi],
            )
            for each, cdi in self._claims.prepare(claim)
        )  # fmt: skip

    def _watch_health(self, _: Any, context: Any) -> Iterator[Any]:
        """Yield the health of all devices at once, then after each change, and often enough to stay known."""
        api = wire.health
        while context.is_active() and not self._node.has_stopped():
            generation = self._node.generation  # before the look: a change during it ends the wait below
            names, lost = device_names(self._node.inventory), self._claims.lost
            devices = []
            for device in self._node.inventory.devices:
                reason = lost.get(device.id) or broken(device)
                devices.append(
                    api.DeviceHealth(
                        device=api.DeviceIdentifier(pool_name=self._name, device_name=names[device.id]),
                        health=_UNHEALTHY if reason else _HEALTHY, message=reason,
                        last_updated_time=int(time.time()), health_check_timeout_seconds=_HEALTH_SECONDS,
                    )
                )  # fmt: skip
            yield api.NodeWatchResourcesResponse(devices=devices)
            again = time.monotonic() + _HEALTH_SECONDS / 3
            while context.is_active() and time.monotonic() < again and not self._node.has_stopped():
                if self._node.wait(generation, 1.0) != generation:
                    break

    def _publish(self) -> None:
        """Publish the slices at each change of the node or by another client, and again after a failure."""
        seen, pause = -1, 0.5
        while not self._node.has_stopped():
            try:
                generation = self._node.generation
                self._foreign.clear()  # before the look: what comes during it counts for the next
                self._publisher.publish()
                seen, pause = generation, 0.5
            except AnyaccelError as error:
                conflict = isinstance(error, ApiError) and error.status in (CONFLICT, NOT_FOUND)
                log.log(20 if conflict else 40, "slices: %s", error)
                self._node.sleep(0.05 if conflict else pause)
                pause = min(30.0, pause * 2)
                continue
            started = time.monotonic()
            while not self._node.has_stopped() and time.monotonic() - started < RESYNC_SECONDS:
                if self._foreign.is_set() or self._node.wait(seen, 0.5) != seen:
                    break

    def _renew(self) -> None:
        while not self._node.has_stopped():
            if self._node.sleep(RENEW_SECONDS):
                return
            try:
                self._claims.renew()
            except (AnyaccelError, OSError) as error:
                log.warning("leases: %s", error)

    def _watch(self) -> None:
        self._publisher.follow(self._foreign)
