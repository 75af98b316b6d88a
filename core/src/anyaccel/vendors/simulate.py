"""Make up the devices of a machine from the products that a plug-in knows."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from anyaccel.model import Detected, Device, Health, Product

NUMA_NODES = 2


def matching(name: str, products: Iterable[Product]) -> list[Product]:
    """The products that go by a name, compared without case; those whose own name it is come before aliases."""
    wanted = name.casefold()
    found = [product for product in products if product.name.casefold() == wanted]
    return found or [product for product in products if wanted in map(str.casefold, product.aliases)]


def simulate(vendor: str, wanted: Sequence[tuple[Product, int]]) -> Detected:
    """Make up devices, the same ones each time.

    Devices of one product are linked to each other in groups as large as the largest machine of that product.

    Args:
        vendor: Key of the vendor.
        wanted: Products with the number of devices of each, in the order of the devices' indexes.
    """
    devices: list[Device] = []
    total = sum(count for _, count in wanted)
    for product, count in wanted:
        first = len(devices)
        ids = [_device_id(vendor, product, first + position) for position in range(count)]
        size = max(product.counts, default=1)
        for position, device_id in enumerate(ids):
            index = first + position
            start = position - position % size
            peers = (peer for peer in ids[start : start + size] if peer != device_id)
            devices.append(
                Device(
                    id=device_id,
                    index=index,
                    model=product.model,
                    memory_bytes=product.memory_bytes,
                    pci_bus_id=_pci_address(vendor, index),
                    numa_node=index * NUMA_NODES // total,
                    links=dict.fromkeys(peers, product.link) if product.link else {},
                    nodes=tuple(template.format(index=index) for template in product.node_templates),
                    health=Health.HEALTHY,
                    attributes=product.attributes,
                )
            )
    return Detected(devices=tuple(devices))


def _device_id(vendor: str, product: Product, index: int) -> str:
    import uuid

    made_up = uuid.uuid5(uuid.NAMESPACE_OID, f"{vendor}/{product.name}/{index}")
    return product.id_template.format(uuid=made_up, index=index, pci=_pci_address(vendor, index))


def _pci_address(vendor: str, index: int) -> str:
    """An address that no other vendor's simulated device has: the domain stands for the vendor."""
    domain = zlib.crc32(vendor.encode()) & 0xFFFF
    slot, bus = divmod(index, 256)
    function, slot = divmod(slot, 32)
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function % 8}"
