"""Tags, simulated machines, and the numbers of devices valid for a job."""

from __future__ import annotations

import pytest
from anyaccel.model import Device, Term
from anyaccel_gaudi import plugin

PRODUCTS = plugin.anyaccel_products()
HPU = Term(names=("HPU",))


def test_names_are_those_that_ray_uses() -> None:
    info = plugin.anyaccel_info()

    assert (info.vendor, info.resource, info.kind) == ("gaudi", "HPU", "hpu")  # upper case: HabanaAI/vllm-fork#297
    assert [product.name for product in PRODUCTS] == ["Intel-GAUDI", "Intel-GAUDI2", "Intel-GAUDI3"]


@pytest.mark.parametrize(
    ("model", "tag"),
    [
        ("HL-200", "Intel-GAUDI"),
        ("HL-205", "Intel-GAUDI"),
        ("HL-225", "Intel-GAUDI2"),
        ("HL-225B", "Intel-GAUDI2"),
        ("HL-325L", "Intel-GAUDI3"),
        ("HL-388", "Intel-GAUDI3"),
        ("HL-1000", "HL-1000"),
        ("something new", "something-new"),
    ],
)
def test_a_model_name_tells_the_generation_where_the_pci_id_does_not(model: str, tag: str) -> None:
    assert plugin.anyaccel_tags(Device(id="x", index=0, model=model))[0] == tag


@pytest.mark.parametrize(
    ("pci_id", "generation", "gibibytes"),
    [
        (0x1000, "GAUDI", 32),
        (0x1011, "GAUDI", 32),
        (0x1020, "GAUDI2", 96),
        (0x1060, "GAUDI3", 128),
        (0x1062, "GAUDI3", 128),
        (0x1063, "GAUDI3", 128),
    ],
)
def test_a_pci_id_tells_generation_and_memory(pci_id: int, generation: str, gibibytes: int) -> None:
    entry = plugin.catalog.by_pci(pci_id)

    assert entry is not None
    assert (entry.key, entry.memory_bytes >> 30) == (generation, gibibytes)


def test_cloud_instances_name_known_products() -> None:
    assert PRODUCTS[0].instance_types["dl1.24xlarge"] == 8
    assert all(count in product.counts for product in PRODUCTS for count in product.instance_types.values())
    known = {name for product in PRODUCTS for name in product.instance_types}
    assert "dl2q.24xlarge" not in known  # another vendor's chips, in spite of the name


@pytest.mark.parametrize("count", range(1, 9))
def test_one_job_has_one_two_four_or_eight_devices(count: int, simulate) -> None:
    reason = plugin.validate(Term(names=("HPU",), units=count * 10_000), simulate(PRODUCTS[1], count))

    if count in (1, 2, 4, 8):
        assert reason is None
    else:
        assert reason == f"one job can use 1, 2, 4 or 8 HPUs of a machine (got {count}); ask for one of these numbers"


def test_a_fraction_is_refused_with_the_drivers_reason(simulate) -> None:
    reason = plugin.validate(Term(names=("HPU",), units=5_000), simulate(PRODUCTS[1], 1))

    assert reason is not None
    assert "EBUSY" in reason
    assert "1, 2, 4 or 8" in reason


def test_a_device_whose_module_is_unknown_is_refused() -> None:
    device = Device(id="gaudi-0000:19:00.0", index=8, model="HL-225", attributes={"module_unknown": True})

    assert "its module id is unknown" in (plugin.validate(HPU, [device]) or "")
