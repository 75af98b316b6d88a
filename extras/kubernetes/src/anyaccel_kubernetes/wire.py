"""The kubelet's protocols, declared on import: no generated code, so any protobuf from 4 on serves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc  # type: ignore[import-untyped] # pyright: ignore[reportMissingTypeStubs]
from google.protobuf import (  # type: ignore[import-untyped] # pyright: ignore[reportMissingModuleSource]
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)

_SCALARS = {"string": 9, "bool": 8, "int32": 5, "int64": 3}
"""Numbers of scalar types in descriptors."""
_MESSAGE = 11
_FIELD = re.compile(r"(\w+)=(\d+):([*{]?)(\w+)\}?")
# Not the default pool: another library of the process may have declared the same packages.
_pool = descriptor_pool.DescriptorPool()


def _declare(package: str, text: str) -> Any:
    """Declare the messages of a package.

    Args:
        package: Name of the package.
        text: A message per line: its name, then ``FIELD=NUMBER:TYPE`` for each field. ``*TYPE`` is repeated, and
            ``{TYPE}`` a map from strings.

    Returns:
        The classes of the messages, by name.
    """
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for line in text.split("\n"):
        name, *fields = line.split() or [""]
        if not name:
            continue
        message = file.message_type.add(name=name)
        for field in fields:
            label, number, kind, of = _FIELD.findall(field)[0]
            added = message.field.add(name=label, number=int(number), label=3 if kind else 1)
            if kind == "{":
                entry = message.nested_type.add(name=label.title().replace("_", "") + "Entry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, label=1, type=_SCALARS["string"])
                _set_type(entry.field.add(name="value", number=2, label=1), package, of)
                of = f"{name}.{entry.name}"
            _set_type(added, package, of)
    _pool.Add(file)
    found = {each.name: _pool.FindMessageTypeByName(f"{package}.{each.name}") for each in file.message_type}
    return SimpleNamespace(**{name: message_factory.GetMessageClass(each) for name, each in found.items()})


def _set_type(field: Any, package: str, of: str) -> None:
    """Set the type of a field: a scalar, or a message of the package."""
    if of in _SCALARS:
        field.type = _SCALARS[of]
    else:
        field.type, field.type_name = _MESSAGE, f".{package}.{of}"


registration = _declare(
    "pluginregistration",
    """
    PluginInfo type=1:string name=2:string endpoint=3:string supported_versions=4:*string
    RegistrationStatus plugin_registered=1:bool error=2:string
    RegistrationStatusResponse
    InfoRequest
    """,
)
"""The registration of plug-ins with the kubelet, by a socket in ``plugins_registry``."""

DRA = "k8s.io.kubelet.pkg.apis.dra.v1"
dra = _declare(
    DRA,
    """
    Claim namespace=1:string uid=2:string name=3:string
    NodePrepareResourcesRequest claims=1:*Claim
    Device request_names=1:*string pool_name=2:string device_name=3:string cdi_device_ids=4:*string
    NodePrepareResourceResponse devices=1:*Device error=2:string
    NodePrepareResourcesResponse claims=1:{NodePrepareResourceResponse}
    NodeUnprepareResourcesRequest claims=1:*Claim
    NodeUnprepareResourceResponse error=1:string
    NodeUnprepareResourcesResponse claims=1:{NodeUnprepareResourceResponse}
    """,
)
"""The protocol of drivers for dynamic resource allocation."""

health = _declare(
    "v1alpha1",
    """
    DeviceIdentifier pool_name=1:string device_name=2:string
    DeviceHealth device=1:DeviceIdentifier health=2:int32 last_updated_time=3:int64 \
 health_check_timeout_seconds=4:int64 message=5:string
    NodeWatchResourcesRequest
    NodeWatchResourcesResponse devices=1:*DeviceHealth
    """,
)
"""Health of a driver's devices; ``health`` is 1 for healthy and 2 for unhealthy."""

plugin = _declare(
    "v1beta1",
    """
    Empty
    DevicePluginOptions pre_start_required=1:bool get_preferred_allocation_available=2:bool
    RegisterRequest version=1:string endpoint=2:string resource_name=3:string options=4:DevicePluginOptions
    NUMANode ID=1:int64
    TopologyInfo nodes=1:*NUMANode
    Device ID=1:string health=2:string topology=3:TopologyInfo
    ListAndWatchResponse devices=1:*Device
    ContainerPreferredAllocationRequest available_deviceIDs=1:*string must_include_deviceIDs=2:*string \
 allocation_size=3:int32
    PreferredAllocationRequest container_requests=1:*ContainerPreferredAllocationRequest
    ContainerPreferredAllocationResponse deviceIDs=1:*string
    PreferredAllocationResponse container_responses=1:*ContainerPreferredAllocationResponse
    ContainerAllocateRequest devices_ids=1:*string
    AllocateRequest container_requests=1:*ContainerAllocateRequest
    Mount container_path=1:string host_path=2:string read_only=3:bool
    DeviceSpec container_path=1:string host_path=2:string permissions=3:string
    CDIDevice name=1:string
    ContainerAllocateResponse envs=1:{string} mounts=2:*Mount devices=3:*DeviceSpec annotations=4:{string} \
 cdi_devices=5:*CDIDevice
    AllocateResponse container_responses=1:*ContainerAllocateResponse
    """,
)
"""The protocol of device plugins."""

pods = _declare(
    "v1_pod_resources",
    """
    ListPodResourcesRequest
    ContainerDevices resource_name=1:string device_ids=2:*string
    ContainerResources name=1:string devices=2:*ContainerDevices
    PodResources name=1:string namespace=2:string containers=3:*ContainerResources
    ListPodResourcesResponse pod_resources=1:*PodResources
    """,
)
"""The kubelet's list of pods with devices. Names of packages are not sent, so this one may differ."""

Method = tuple[Callable[[Any, Any], Any], Any, Any]
"""Implementation, class of the request, class of the answer."""


def service(name: str, methods: Mapping[str, Method], streams: Mapping[str, Method] | None = None) -> Any:
    """Return a handler of a service.

    Args:
        name: Full name of the service.
        methods: Methods by name.
        streams: Methods with a stream of answers, by name.
    """
    table = {}
    for found, make in (
        (methods, grpc.unary_unary_rpc_method_handler),
        (streams or {}, grpc.unary_stream_rpc_method_handler),
    ):
        for method, (function, request, answer) in found.items():
            table[method] = make(function, request.FromString, answer.SerializeToString)
    return grpc.method_handlers_generic_handler(name, table)


def serve(path: str, services: Iterator[Any] | list[Any], threads: int = 8) -> Any:
    """Start a server of services at a socket; return the server, to be stopped."""
    # Each open stream of health or devices takes a thread.
    server = grpc.server(ThreadPoolExecutor(threads, thread_name_prefix="anyaccel-grpc"))
    server.add_generic_rpc_handlers(tuple(services))
    server.add_insecure_port(f"unix://{path}")
    server.start()
    return server


def connect(path: str) -> Any:
    """Return a channel to a socket; the authority is plain, since servers refuse a path there."""
    return grpc.insecure_channel(f"unix://{path}", options=[("grpc.default_authority", "localhost")])


def call(path: str, method: str, request: Any, answer: Any, timeout: float = 5.0) -> Any:
    """Call a method of a server at a socket.

    Args:
        path: The socket.
        method: ``/SERVICE/METHOD``.
        request: The request.
        answer: Class of the answer.
        timeout: Seconds for the call.

    Raises:
        grpc.RpcError: If the server cannot be reached, or reports an error.
    """
    with connect(path) as channel:
        stub = channel.unary_unary(method, type(request).SerializeToString, answer.FromString)
        return stub(request, timeout=timeout)
