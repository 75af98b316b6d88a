"""Inventories as detection gives them, and as badly as the contract with plug-ins allows."""

from anyaccel.model import (
    ContainerEdits,
    Device,
    EnvEdits,
    Fractional,
    Health,
    Inventory,
    Mount,
    VendorReport,
    VendorState,
)
from anyaccel_export.source import ExportSource
from hypothesis import strategies as st

GIB = 1 << 30
NODES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")
"""Device nodes that every machine has: what reads exports looks at them."""


def device(index=0, **changes):
    facts = {
        "id": f"acme-{index}",
        "index": index,
        "model": "Acme One",
        "memory_bytes": 16 * GIB,
        "numa_node": 0,
        "pci_bus_id": f"0000:{index:02x}:00.0",
        "nodes": (NODES[index % len(NODES)],),
        "health": Health.HEALTHY,
        "vendor": "acme",
        "resource": "GPU",
        "kind": "gpu",
        "tags": ("Acme-One",),
        "fractional": Fractional.SHARED,
        "order": index,
    }
    return Device(**(facts | changes))


def inventory(*devices, machine="host", env_vars=("ACME_VISIBLE",)):
    vendors = tuple(
        VendorReport(vendor=vendor, state=VendorState.OK, resource=resource, env_vars=env_vars)
        for vendor, resource in sorted({(found.vendor, found.resource) for found in devices})
    )
    return Inventory(machine=machine, devices=devices, vendors=vendors)


def source(*devices, shared_nodes=(), mounts=(), groups=(), node="node-1", **changes):
    """A source with the edits that a vendor would give: a mask, and a variable for its container runtime."""
    vendors = dict.fromkeys(found.vendor for found in devices if found.usable)
    usable = [found for found in devices if found.usable]
    together = {vendor: [found for found in usable if found.vendor == vendor] for vendor in vendors}

    def edits(chosen):
        ids = ",".join(found.id for found in chosen)
        own = tuple(dict.fromkeys(path for found in chosen for path in found.nodes))
        vendor = chosen[0].vendor.upper()
        env = {f"{vendor}_VISIBLE": ids, f"{vendor}_RUNTIME": ids, f"{vendor}_ALWAYS": "1"}
        return ContainerEdits(nodes=(*shared_nodes, *own), mounts=tuple(mounts), env=env, groups=tuple(groups))

    env_vars = tuple(f"{vendor.upper()}_VISIBLE" for vendor in vendors)
    facts = {
        "inventory": inventory(*devices, env_vars=env_vars),
        "node": node,
        "alone": {found.id: edits([found]) for found in usable},
        "together": {vendor: edits(chosen) for vendor, chosen in together.items()},
        "environments": {found.id: EnvEdits(set={f"{found.vendor.upper()}_VISIBLE": found.id}) for found in usable},
    }
    return ExportSource(**(facts | changes))


READ_ONLY = Mount(source="/etc", target="/host etc")
WRITABLE = Mount(source="/tmp", target="/scratch", read_only=False)

_words = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=" ,\"'"), min_size=1)
_names = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,63}", fullmatch=True)
_anything = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80)


@st.composite
def machines(draw):
    """Any devices that the contract with plug-ins allows."""
    ids = draw(st.lists(_words.filter(lambda word: len(word) <= 128), min_size=1, max_size=5, unique=True))
    vendors = draw(
        st.lists(st.from_regex(r"[a-z][a-z0-9_]{0,31}", fullmatch=True), min_size=1, max_size=2, unique=True)
    )
    resource = {vendor: draw(_names) for vendor in vendors}
    tag = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)
    return [
        device(
            index,
            id=found,
            model=draw(_anything),
            vendor=(vendor := draw(st.sampled_from(vendors))),
            resource=resource[vendor],
            kind=draw(_names).lower(),
            tags=tuple(draw(st.lists(tag, max_size=1))),
            numa_node=draw(st.sampled_from([None, 0, 1])),
            memory_bytes=draw(st.sampled_from([None, 1, 1 << 50])),
            parent=draw(st.one_of(st.none(), _anything.map("whole of {}".format))),
            links={peer: draw(st.integers(-3, 100)) for peer in ids if peer != found},
            nodes=tuple(draw(st.lists(st.sampled_from([*NODES, "/dev/with blank", "/dev/a,b[1]#"]), unique=True))),
            attributes=draw(
                st.dictionaries(_anything, st.one_of(_anything, st.booleans(), st.integers(), st.floats()), max_size=40)
            ),
        )
        for index, found in enumerate(ids)
    ]
