"""On which nodes the calls of a gang may run: each on its own, and all in one slice where there are slices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anyaccel.engines.ray.labels import among, satisfies
from anyaccel.engines.ray.plan import Plan, has
from anyaccel.engines.ray.slices import slice_label
from anyaccel.errors import NeverFitsError
from anyaccel.model import Request, Value
from anyaccel.scheduler import Verdict

if TYPE_CHECKING:
    from anyaccel.engines.ray.cluster import Nodes

_NODE = "ray.io/node-id"
Node = Mapping[str, Any]
"""As ``ray.nodes()`` tells it."""


class Spread(Value):
    """What to ask Ray to reserve.

    Attributes:
        bundle: Quantities on each node.
        hosts: How many nodes.
        selector: Values that labels of each must have.
        kind: Of the devices that slices are made of; empty where there are none.
        workers: By node id, the number of each node in its slice.
    """

    bundle: Mapping[str, float]
    hosts: int
    selector: Mapping[str, str]
    kind: str
    workers: Mapping[str, int]

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of Ray's placement group."""
        together = {slice_label(self.kind, "slice_name"): "STRICT_PACK"} if self.kind else {}
        return {
            "bundles": [dict(self.bundle)] * self.hosts,
            "bundle_label_selector": [dict(self.selector)] * self.hosts,
            "topology_strategy": {_NODE: "STRICT_SPREAD", **together},
        }

    def by_rank(self, nodes: Mapping[int, str]) -> Sequence[int]:
        """Places in what Ray has reserved, by rank: that is the number in the slice.

        Args:
            nodes: The node of each place.
        """
        return sorted(nodes, key=lambda index: (self.workers.get(nodes[index], index), index))


def spread(cluster: Nodes, plan: Plan, request: Request | None, hosts: int) -> Spread:
    """Find nodes for a gang.

    Args:
        cluster: The cluster.
        plan: What each call asks for.
        request: What the user has asked for.
        hosts: How many nodes.

    Raises:
        NeverFitsError: When there are not so many, and none can come.
    """
    resources = dict(plan.resources) or {"CPU": 1.0}
    selector = dict(plan.selector)
    nodes = [
        node
        for node in cluster.ray.nodes()
        if node["Alive"] and has(node["Resources"], resources) and satisfies(node["Labels"], selector)
    ]
    kind, slices = _slices(nodes, {each.kind for each in cluster.devices if each.resource in resources})
    whole = sorted(name for name, own in slices.items() if len(own) == hosts)
    label = slice_label(kind, "slice_name")
    alone = sum(label not in node["Labels"] for node in nodes)
    if whole:
        selector[label] = among(whole)
    elif alone < hosts and not cluster.grows:
        raise _never(request, hosts, alone, slices)
    elif slices and alone >= hosts:
        selector[label] = f"!in({','.join(sorted(slices))})"
    return Spread(
        bundle=resources,
        hosts=hosts,
        selector=selector,
        kind=kind if whole else "",
        workers={node["NodeID"]: _number(node, kind) for node in nodes} if whole else {},
    )


def _slices(nodes: Iterable[Node], kinds: Iterable[str]) -> tuple[str, dict[str, list[Node]]]:
    """The nodes of each slice, and the kind of the devices that it is made of."""
    nodes = list(nodes)
    for kind in sorted(kinds):
        found: dict[str, list[Node]] = {}
        for node in nodes:
            if name := node["Labels"].get(slice_label(kind, "slice_name")):
                found.setdefault(name, []).append(node)
        if found:
            return kind, found
    return "", {}


def _number(node: Node, kind: str) -> int:
    text = node["Labels"].get(slice_label(kind, "worker_id"), "")
    return int(text) if text.isdecimal() else 0


def _never(request: Request | None, hosts: int, alone: int, slices: Mapping[str, Sequence[Node]]) -> NeverFitsError:
    wanted = request if request is not None else Request(terms=())
    there = [str(alone), *(f"{len(own)} in slice {name}" for name, own in sorted(slices.items()))]
    needs = f"that can serve {request}" if request is not None else "with a processor"
    whole = "; a slice is of use only as a whole" if slices else ""
    return NeverFitsError(
        f"a gang of {hosts} needs as many nodes {needs}, and the cluster has {' and '.join(there)}{whole}",
        verdict=Verdict(request=wanted, fits_now=False, ever_fits=False),
    )
