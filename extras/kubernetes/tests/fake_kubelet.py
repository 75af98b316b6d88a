"""A kubelet as plug-ins see it, over real sockets: written from its published protocols."""

import os
import threading
from pathlib import Path

import grpc
from anyaccel_kubernetes import wire

PATIENCE = 60.0


class FakeKubelet:
    """Device manager, watcher of plug-ins, and pod-resources of a node.

    Attributes:
        devices: Units of each resource as last told: health and NUMA nodes by id.
        pods: Pods in the answer of pod-resources: name to resource and units.
    """

    def __init__(self, root):
        self.root, self.devices, self.endpoints, self.pods = Path(root), {}, {}, {}
        self.changed = threading.Condition()
        self._channels, self._server = [], None
        for folder in ("device-plugins", "pod-resources", "plugins_registry", "plugins"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)

    def start(self):
        for old in (self.root / "device-plugins").glob("*.sock"):  # as the real one does
            old.unlink()
        (self.root / "pod-resources/kubelet.sock").unlink(missing_ok=True)
        api, pods = wire.plugin, wire.pods
        services = [
            wire.service("v1beta1.Registration", {"Register": (self._register, api.RegisterRequest, api.Empty)}),
            wire.service(
                "v1.PodResourcesLister",
                {"List": (self._list, pods.ListPodResourcesRequest, pods.ListPodResourcesResponse)},
            ),
        ]
        self._server = grpc.server(__import__("concurrent.futures").futures.ThreadPoolExecutor(8))
        self._server.add_generic_rpc_handlers(tuple(services))
        self._server.add_insecure_port(f"unix://{self.root}/pod-resources/kubelet.sock")
        self._server.add_insecure_port(f"unix://{self.root}/device-plugins/kubelet.sock")
        self._server.start()

    def stop(self):
        if self._server is None:
            return
        self._server.stop(0).wait()
        for channel in self._channels:
            channel.close()
        self._server, self._channels, self.devices, self.endpoints = None, [], {}, {}
        for folder in ("device-plugins", "pod-resources"):
            (self.root / folder / "kubelet.sock").unlink(missing_ok=True)

    def _register(self, request, context):
        if request.version != "v1beta1":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "version")
        self.endpoints[request.resource_name] = f"{self.root}/device-plugins/{request.endpoint}"
        threading.Thread(target=self._listen, args=(request.resource_name,), daemon=True).start()
        return wire.plugin.Empty()

    def _list(self, _request, _context):
        api = wire.pods
        return api.ListPodResourcesResponse(
            pod_resources=[
                api.PodResources(
                    name=name,
                    namespace="default",
                    containers=[
                        api.ContainerResources(
                            name="main", devices=[api.ContainerDevices(resource_name=resource, device_ids=units)]
                        )
                    ],
                )
                for name, (resource, units) in list(self.pods.items())
            ]
        )

    def _listen(self, name):
        api = wire.plugin
        channel = wire.connect(self.endpoints[name])
        self._channels.append(channel)
        stub = channel.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch", api.Empty.SerializeToString, api.ListAndWatchResponse.FromString
        )
        try:
            for answer in stub(api.Empty(), wait_for_ready=True):
                with self.changed:
                    self.devices[name] = {
                        each.ID: (each.health, [node.ID for node in each.topology.nodes]) for each in answer.devices
                    }
                    self.changed.notify_all()
        except (grpc.RpcError, ValueError):  # the plug-in has ended, or this kubelet has
            return

    def until(self, holds):
        """Wait until something holds of the told devices."""
        with self.changed:
            assert self.changed.wait_for(lambda: holds(self.devices), PATIENCE), self.devices

    def prefer(self, name, available, must, size):
        api = wire.plugin
        request = api.PreferredAllocationRequest(
            container_requests=[
                api.ContainerPreferredAllocationRequest(
                    available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
                )
            ]
        )
        method = "/v1beta1.DevicePlugin/GetPreferredAllocation"
        answer = wire.call(self.endpoints[name], method, request, api.PreferredAllocationResponse, PATIENCE)
        return list(answer.container_responses[0].deviceIDs)

    def allocate(self, name, units):
        api = wire.plugin
        request = api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(devices_ids=units)])
        method = "/v1beta1.DevicePlugin/Allocate"
        return wire.call(self.endpoints[name], method, request, api.AllocateResponse, PATIENCE).container_responses[0]

    # Dynamic resource allocation

    def register_driver(self):
        """Register a driver as the watcher of plug-ins does; return the version of the protocol."""
        api = wire.registration
        path = str(self.root / "plugins_registry/anyaccel.dev-reg.sock")
        info = wire.call(path, "/pluginregistration.Registration/GetInfo", api.InfoRequest(), api.PluginInfo, PATIENCE)
        assert (info.type, info.name) == ("DRAPlugin", "anyaccel.dev")
        assert os.path.exists(info.endpoint)
        assert "v1.DRAPlugin" in info.supported_versions
        wire.call(
            path,
            "/pluginregistration.Registration/NotifyRegistrationStatus",
            api.RegistrationStatus(plugin_registered=True),
            api.RegistrationStatusResponse,
            PATIENCE,
        )
        self.endpoint = info.endpoint
        return info

    def _claims(self, method, claims):
        api = wire.dra
        request = getattr(api, f"Node{method}ResourcesRequest")(
            claims=[api.Claim(namespace="default", name=name, uid=uid) for name, uid in claims.items()]
        )
        path = f"/{wire.DRA}.DRAPlugin/Node{method}Resources"
        return wire.call(self.endpoint, path, request, getattr(api, f"Node{method}ResourcesResponse"), PATIENCE).claims

    def prepare(self, name, uid):
        """Prepare a claim; return its CDI devices by device. Raises RuntimeError with the driver's message."""
        answer = self._claims("Prepare", {name: uid})[uid]
        if answer.error:
            raise RuntimeError(answer.error)
        return {each.device_name: list(each.cdi_device_ids) for each in answer.devices}

    def unprepare(self, name, uid):
        answer = self._claims("Unprepare", {name: uid})[uid]
        if answer.error:
            raise RuntimeError(answer.error)

    def health(self, holds):
        """Wait until something holds of the health of the devices, by name: the state, and its reason."""
        api = wire.health
        with wire.connect(self.endpoint) as channel:
            stub = channel.unary_stream(
                "/v1alpha1.DRAResourceHealth/NodeWatchResources",
                api.NodeWatchResourcesRequest.SerializeToString,
                api.NodeWatchResourcesResponse.FromString,
            )
            stream = stub(api.NodeWatchResourcesRequest(), timeout=PATIENCE)
            for answer in stream:
                found = {each.device.device_name: (each.health, each.message) for each in answer.devices}
                if holds(found):
                    stream.cancel()
                    return found
        raise AssertionError("the stream has ended")
