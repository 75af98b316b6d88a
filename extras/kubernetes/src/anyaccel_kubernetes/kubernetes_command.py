"""Give the devices of this node to Kubernetes: anyaccel kubernetes dra, device-plugin, classes or status."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable

import anyaccel
from anyaccel.cli import output, survey, whole
from anyaccel.errors import UsageError
from anyaccel.vendors import known
from anyaccel_export.slices import device_classes
from anyaccel_export.text import to_yaml

from anyaccel_kubernetes.node import KEY

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from anyaccel.cli import Parser

KUBELET = "/var/lib/kubelet"
EXAMPLES = (
    ("anyaccel kubernetes dra --node n1", "the driver for dynamic resource allocation, from Kubernetes 1.34 on"),
    ("anyaccel kubernetes device-plugin", "for older clusters"),
    ("anyaccel kubernetes classes", "a DeviceClass for each accelerator type, for kubectl apply"),
    ("anyaccel kubernetes status", "pods with devices of this node"),
)


def add_arguments(parser: Parser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("agent", choices=("dra", "device-plugin", "classes", "status"), help="what to run")
    parser.add_argument("--node", metavar="NAME", default="", help="dra: name of the node (default: $NODE_NAME)")
    parser.add_argument("--server", metavar="URL", default="", help="dra: the API server (default: the pod's cluster)")
    parser.add_argument("--token-file", metavar="FILE", default="", help="dra: bearer token, read for each request")
    parser.add_argument("--ca-file", metavar="FILE", default="", help="dra: certificates of the API server")
    parser.add_argument("--client-cert", metavar="FILE", default="", help="dra: client certificate with its key")
    parser.add_argument(
        "--cdi", metavar="FOLDER", default="/var/run/cdi", help="dra: folder of CDI files (default: /var/run/cdi)"
    )
    parser.add_argument(
        "--kubelet", metavar="FOLDER", default=KUBELET, help=f"folder of the kubelet (default: {KUBELET})"
    )
    parser.add_argument(
        "--shares", metavar="COUNT", type=whole(0, 1000), default=0,
        help="device-plugin: cut each device that can be shared; dra: above 0, allow shares by capacity",
    )  # fmt: skip
    parser.add_argument(
        "--by",
        choices=("vendor", "type"),
        default="vendor",
        help="device-plugin: what resources are named by (default: vendor)",
    )
    parser.add_argument("--dev", metavar="FOLDER", default="", help="where the nodes of a simulated machine are")
    parser.add_argument(
        "--every",
        metavar="SECONDS",
        type=whole(1, 3600),
        default=10,
        help="seconds between two detections (default: 10)",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.agent == "status":
        return _status(args)
    if args.agent == "classes":
        return _classes(args)
    from anyaccel_kubernetes.node import Node

    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
    if args.agent == "device-plugin":
        from anyaccel_kubernetes.deviceplugin import PREFIX, DevicePlugin

        node = Node(args.machine, every=args.every, prefix=PREFIX)
        plugin = DevicePlugin(node, root=args.kubelet, shares=args.shares, by=args.by, dev=args.dev)
        return _run(node.stop, plugin.run)
    from anyaccel_kubernetes.api import ApiServer
    from anyaccel_kubernetes.claims import Claims
    from anyaccel_kubernetes.dra import Driver

    name = args.node or os.environ.get("NODE_NAME", "")
    if not name:
        raise UsageError("the name of the node in the cluster is unknown", hint="add --node NAME")
    api = ApiServer(args.server, token_file=args.token_file, ca_file=args.ca_file, client_cert=args.client_cert)
    node = Node(args.machine, every=args.every, prefix=f"{KEY}/claim/")
    claims = Claims(node, name, args.cdi, dev=args.dev)
    return _run(node.stop, Driver(node, api, name, claims, root=args.kubelet, shares=args.shares > 0).run)


def _run(stop: Callable[[], None], run: Callable[[], None]) -> int:
    """Run an agent until SIGTERM or SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())
    run()
    return 0


def _classes(args: argparse.Namespace) -> int:
    """Print the DeviceClasses of all products of the installed plug-ins."""
    found, problems = known()
    products = [(each.info.resource, product) for each in found for product in each.products]
    types = {name: resource for resource, product in products for name in (product.name, *product.parts)}
    classes = device_classes(types)
    for problem in problems:
        output.say(str(problem))
    if args.json:
        output.print_json("kubernetes_classes/1", {"classes": classes})
    else:
        output.print_document("---\n".join(map(to_yaml, classes)))
    return 0


def _status(args: argparse.Namespace) -> int:
    """Print the devices of this node that pods hold."""
    inventory = survey(args)
    names = {device.id: device.name for device in inventory.devices}
    found = [
        {"device": record.device, "pod": record.note, "key": record.key, "lease": record.id, "reason": record.reason,
         "share": record.units / 10000}
        for record in anyaccel.leases(inventory)
        if record.key.startswith(f"{KEY}/") and not record.through
    ]  # fmt: skip
    if args.json:
        output.print_json("kubernetes/1", {"pods": found})
        return 0
    if not found:
        output.say("no pod holds a device of this node")
        return 0
    for each in sorted(found, key=lambda each: str(each["device"])):
        output.print_line(f"{names[str(each['device'])]}  {each['share']:g}  {each['pod']}  {each['lease']}")
    return 0
