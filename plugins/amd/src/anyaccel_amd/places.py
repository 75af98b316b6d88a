"""Which card a KFD node is, or which partition of which card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anyaccel.plugin import PciFunction, ProbeContext

from anyaccel_amd import health, kfd


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a KFD node sits.

    Attributes:
        node: The node.
        card: PCI address of its card.
        partition: Number of the partition within the card.
        partitioned: Whether the card is divided, also when only one partition is to be seen.
    """

    node: kfd.Node
    card: str
    partition: int
    partitioned: bool

    @property
    def id(self) -> str:
        """The PCI address, since a card's ``unique_id`` may be shared by all its partitions, and is often missing."""
        return f"amd-{self.card}/{self.partition}" if self.partitioned else f"amd-{self.card}"


def places(ctx: ProbeContext, nodes: Sequence[kfd.Node], functions: Mapping[str, PciFunction]) -> list[Place]:
    """Tell cards from partitions.

    Raises:
        ValueError: When two nodes claim to be the same device.
    """
    found = [_place(node, functions) for node in nodes]
    per_card = Counter(card for card, _ in found)
    taken: dict[str, dict[int, kfd.Node]] = {}
    found_places = []
    for node, (card, number) in zip(nodes, found, strict=True):
        rivals = taken.setdefault(card, {})
        partition = _next_number(node, rivals, card) if number in rivals else number
        rivals[partition] = node
        divided = per_card[card] > 1 or partition > 0 or mode(ctx, card, "compute") not in ("", "spx")
        found_places.append(Place(node=node, card=card, partition=partition, partitioned=divided))
    return found_places


def _place(node: kfd.Node, functions: Mapping[str, PciFunction]) -> tuple[str, int]:
    """The card's address and the number of the partition, which hides in bits that PCI does not have."""
    domain, bus, slot = node.card
    address = f"{domain:04x}:{bus:02x}:{slot:02x}"
    if node.partition:
        return f"{address}.{node.function}", node.partition
    if f"{address}.{node.function}" not in functions:
        return f"{address}.0", node.function
    return f"{address}.{node.function}", 0


def _next_number(node: kfd.Node, rivals: Mapping[int, kfd.Node], card: str) -> int:
    """Number a partition whose address does not: a render node of its own proves that it is another device."""
    minor = node.properties.get("drm_render_minor", 0)
    twin = next((r for r in rivals.values() if r.properties.get("drm_render_minor", 0) == minor), None)
    if twin is not None:
        raise ValueError(
            f"{kfd.NODES}: two GPUs must not share a PCI address and a render node (got {card} and minor {minor} for"
            f" nodes {twin.number} and {node.number}); reload the driver, or report the kernel's version"
        )
    return max(rivals) + 1


def mode(ctx: ProbeContext, card: str, kind: str) -> str:
    """Partition mode of a card, such as ``cpx`` or ``nps4``; only the first partition's directory has it."""
    try:
        return (ctx.read(f"{health.PCI}/{card}/current_{kind}_partition") or "").strip().lower()
    except OSError:
        return ""
