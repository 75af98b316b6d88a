"""Make up devices of a machine from the products of a plug-in."""

from __future__ import annotations

from binascii import crc32
from collections.abc import Iterable, Iterator, Sequence

from anyaccel.model import Detected, Device, Health, Product, Value

NUMA_NODES = 2
OBJECTS = bytes.fromhex("6ba7b8129dad11d180b400c04fd430c8")
"""``uuid.NAMESPACE_OID``."""


def match_products(name: str, products: Iterable[Product]) -> list[Product]:
    """Return the products with a name, without regard to case; products by their own name come before aliases."""
    wanted = name.casefold()
    found = [product for product in products if product.name.casefold() == wanted]
    return found or [product for product in products if wanted in map(str.casefold, product.aliases)]


class Cards(Value):
    """Several devices of one product, each whole or divided.

    Attributes:
        product: The product.
        number: Number of devices.
        part: Product into which each device is divided; None for whole devices.
    """

    product: Product
    number: int
    part: Product | None = None

    @property
    def devices(self) -> int:
        """Number of listed devices, or of parts."""
        return self.number * (self.product.parts[self.part.name] if self.part else 1)


def find_cards(name: str, count: int, products: Iterable[Product]) -> Cards | None:
    """Parse ``PRODUCT``, or ``PRODUCT/PART`` for divided devices; None when no product has the name."""
    known = tuple(products)
    whole, divided, wanted = name.partition("/")
    for product in match_products(whole, known):
        if not divided:
            return Cards(product=product, number=count)
        for part in product.parts:
            if part.casefold() == wanted.casefold():
                return Cards(product=product, number=count, part=match_products(part, known)[0])
    return None


def simulate(vendor: str, wanted: Sequence[Cards]) -> Detected:
    """Make up devices, in the same way each time.

    Devices of one product are linked in groups as large as the largest machine of the product. A divided device is not
    listed; its parts name it as their parent.

    Args:
        vendor: Key of the vendor.
        wanted: The products, in the order of the devices' indexes.
    """
    total = sum(cards.devices for cards in wanted)
    devices: list[Device] = []
    for cards in wanted:
        devices += _cards(vendor, cards, first=len(devices), total=total)
    return Detected(devices=tuple(devices))


def _cards(vendor: str, cards: Cards, *, first: int, total: int) -> Iterator[Device]:
    """Make up devices of one product. Parts have the PCI address of their device, and no links."""
    product, made = cards.product, cards.part or cards.product
    linked = max(product.counts, default=1) if product.link and not cards.part else 1
    parts = product.parts[made.name] if cards.part else 1
    ids = [_device_id(vendor, made, first + number) for number in range(cards.devices)]
    for number, device_id in enumerate(ids):
        index, whole, group = first + number, first + number - number % parts, number - number % linked
        yield Device(
            id=device_id,
            index=index,
            model=made.model,
            memory_bytes=made.memory_bytes,
            pci_bus_id=_pci_address(vendor, whole),
            numa_node=index * NUMA_NODES // total,  # the first half of the devices at node 0
            parent=_device_id(vendor, product, total + whole) if cards.part else None,  # an index that no device has
            links={peer: product.link for peer in ids[group : group + linked] if peer != device_id},
            nodes=tuple(template.format(index=index) for template in made.node_templates),
            health=Health.HEALTHY,
            attributes=made.attributes,
            slots=made.slots,
        )


def _device_id(vendor: str, product: Product, index: int) -> str:
    made_up = _made_up(f"{vendor}/{product.name}/{index}")
    return product.id_template.format(uuid=made_up, index=index, pci=_pci_address(vendor, index))


def _made_up(name: str) -> str:
    """Return the UUID that ``uuid.uuid5`` would make of a name.

    The import of :mod:`uuid` takes 8 ms, with OpenSSL: as long as all the rest of a simulation.
    """
    try:
        sha1 = __import__("_sha1").sha1
    except ImportError:  # a Python whose only hashes are those of OpenSSL
        from hashlib import sha1

    digest = bytearray(sha1(OBJECTS + name.encode()).digest()[:16])  # noqa: S324 - it hides nothing
    digest[6] = digest[6] & 0x0F | 0x50  # version 5
    digest[8] = digest[8] & 0x3F | 0x80
    text = digest.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _pci_address(vendor: str, index: int) -> str:
    """Return an address of which the domain stands for the vendor, so that no two vendors use the same."""
    domain = crc32(vendor.encode()) & 0xFFFF  # not hash(), which differs in each process
    slot, bus = divmod(index, 256)
    function, slot = divmod(slot, 32)
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function % 8}"
