"""Products, tags, validation, containers, and the installed package."""

from __future__ import annotations

import pytest
from anyaccel.plugin import Device, EnvContext, Fractional, Health, Term
from anyaccel.vendors.contract import reason_faults, tags_faults
from anyaccel_amd import plugin
from anyaccel_testing import context

PRODUCTS = plugin.anyaccel_products()
RAY = {
    0x66A1: "AMD-Instinct-MI50",
    0x738C: "AMD-Instinct-MI100",
    0x7408: "AMD-Instinct-MI250X",
    0x740C: "AMD-Instinct-MI250X-MI250",
    0x740F: "AMD-Instinct-MI210",
    0x74A0: "AMD-Instinct-MI300A",
    0x74A1: "AMD-Instinct-MI300X-OAM",
    0x74A2: "AMD-Instinct-MI308X-OAM",
    0x74A5: "AMD-Instinct-MI325X-OAM",
    0x74A9: "AMD-Instinct-MI300X-HF",
    0x75A0: "AMD-Instinct-MI350X-OAM",
    0x75A3: "AMD-Instinct-MI355X-OAM",
    0x6798: "AMD-Radeon-R9-200-HD-7900",
    0x6799: "AMD-Radeon-HD-7900",
    0x679A: "AMD-Radeon-HD-7900",
    0x679B: "AMD-Radeon-HD-7900",
}


def device(device_id, revision=None, **more):
    attributes = {"device_id": f"0x{device_id:04x}", **more.pop("attributes", {})}
    if revision is not None:
        attributes["revision"] = f"0x{revision:02x}"
    return Device(id="amd-0", index=0, model="", attributes=attributes, **more)


def tags(found):
    result = plugin.anyaccel_tags(found)
    assert list(tags_faults(result, {})) == []
    return result


@pytest.mark.parametrize(("device_id", "tag"), RAY.items())
def test_the_first_tag_is_rays(device_id, tag):
    assert tags(device(device_id))[0] == tag


def test_every_instance_type_is_of_a_known_product():
    named = {name: count for product in PRODUCTS for name, count in product.instance_types.items()}
    assert named == {"Standard_ND96is_MI300X_v5": 8, "Standard_ND96isr_MI300X_v5": 8}
    assert all(set(product.instance_types.values()) <= set(product.counts) for product in PRODUCTS)


@pytest.mark.parametrize(
    ("device_id", "parent"),
    [(0x74B5, 0x74A1), (0x74B9, 0x74A5), (0x74B6, 0x74A2), (0x74BC, 0x74A8), (0x74BD, 0x74A9), (0x75B0, 0x75A0)],
)
def test_a_virtual_function_goes_by_the_name_of_its_card(device_id, parent):
    assert tags(device(device_id)) == tags(device(parent))


@pytest.mark.parametrize(
    ("device_id", "revision", "tag"),
    [
        (0x66A1, 0x02, "AMD-Instinct-MI50"),
        (0x66A1, 0x06, "AMD-Radeon-Pro-VII"),
        (0x744C, 0xC8, "AMD-Radeon-RX-7900-XTX"),
        (0x744C, 0xCC, "AMD-Radeon-RX-7900-XT"),
        (0x744C, 0x00, "AMD-744c"),  # several products share the id
        (0x744C, None, "AMD-744c"),
        (0x7550, 0xC3, "AMD-Radeon-RX-9070"),
        (0x1586, 0xC1, "AMD-Radeon-8060S"),
        (0xFFFF, None, "AMD-ffff"),
        (0x00FF, None, "AMD-00ff"),
    ],
)
def test_the_revision_decides_where_an_id_stands_for_several(device_id, revision, tag):
    assert tags(device(device_id, revision))[0] == tag


@pytest.mark.parametrize(
    ("device_id", "revision", "expected"),
    [
        (0x67DF, 0xC7, ("AMD-Radeon-RX-480", "AMD-67df")),  # by libdrm's list
        (0x67DF, None, ("AMD-67df",)),  # by pci.ids: a name that stands for seven cards is no type
        (0x7310, 0x00, ("AMD-Radeon-Pro-W5700X", "AMD-7310")),
        (0x730F, None, ("AMD-Fiji", "AMD-730f")),  # by the driver's own table: a chip
        (0x6863, None, ("AMD-Radeon-Vega-Frontier-Edition", "AMD-6863")),
        (0x1900, None, ("AMD-HawkPoint-1", "AMD-1900")),
        (0x150E, 0xC5, ("AMD-Radeon-890M", "Radeon-890M")),  # another revision of a product
    ],
)
def test_what_is_no_product_goes_by_its_public_name(device_id, revision, expected):
    assert tags(device(device_id, revision)) == expected


def test_a_device_that_is_no_product_has_a_public_name_for_people(recorded):
    card = "/sys/bus/pci/devices/0000:03:00.0"
    for device_id, revision, model in (
        ("67df", "c7", "AMD Radeon RX 480"),
        # A list of seven cards is a name for people, and never a tag.
        ("67df", "00", "AMD Radeon RX 470/480/570/570X/580/580X/590"),
        ("730f", "00", "AMD Fiji chip"),
        ("7fff", "00", "AMD Radeon RX 10000"),  # by the machine's own list
        ("7ffe", "00", "AMD GPU 0x7ffe"),
    ):
        files = {f"{card}/device": f"0x{device_id}", f"{card}/revision": f"0x{revision}", "/sys/class/kfd": None}
        recording = recorded("rx6750xt-1gpu", files)
        recording["queries"] = {"pci.ids/1002:7fff": {"value": "Navi 50 [Radeon RX 10000]"}}
        found = plugin.anyaccel_detect(context(recording))
        assert found is not None
        assert found.devices[0].model == model


@pytest.mark.parametrize(
    ("changes", "queries", "model", "tags"),
    [
        # A revision that no list has: the chip, by the machine's own pci.ids.
        ({}, "Strix Halo [Radeon Graphics / Radeon 8050S Graphics / Radeon 8060S Graphics]", None, "AMD-Strix-Halo"),
        ({}, None, None, None),
        ({"product_name": "AMD Radeon 8060S\n"}, None, "AMD Radeon 8060S", "AMD-Radeon-8060S"),
        (
            {"product_name": "AMD Radeon Graphics\n"},
            "Strix Halo [Radeon 8060S]",
            "AMD Radeon 8060S",
            "AMD-Radeon-8060S",
        ),
    ],
)
def test_a_device_without_an_entry_has_a_type_that_can_be_asked_for(recorded, changes, queries, model, tags):
    card = "/sys/bus/pci/devices/0000:03:00.0"
    files = {f"{card}/device": "0x1586", f"{card}/revision": "0xfe", "/sys/class/kfd": None}
    files |= {f"{card}/{name}": text for name, text in changes.items()}
    recording = recorded("rx6750xt-1gpu", files)
    recording["queries"] = {"pci.ids/1002:1586": {"value": queries}} if queries else {}
    (found,) = plugin.anyaccel_detect(context(recording)).devices
    assert model in (None, found.model)
    assert [*plugin.anyaccel_tags(found)][: 1 + bool(tags)] == [*([tags] if tags else []), "AMD-1586"]


@pytest.mark.parametrize(
    ("answer", "model", "first"),
    [("AMD Radeon 8060S", "AMD Radeon 8060S", "AMD-Radeon-8060S"), ("AMD Radeon Graphics", None, "AMD-1586")],
)
def test_the_marketing_name_of_amdsmi_is_a_type_where_it_means_one_product(recorded, answer, model, first):
    card = "/sys/bus/pci/devices/0000:03:00.0"
    files = {f"{card}/device": "0x1586", f"{card}/revision": "0xfe", "/sys/class/kfd": None}
    recording = recorded("rx6750xt-1gpu", files)
    recording["queries"] = {"amdsmi/names": {"value": [{"bdf": "0000:03:00.0", "market_name": answer}]}}
    (found,) = plugin.anyaccel_detect(context(recording)).devices
    assert model in (None, found.model)
    assert plugin.anyaccel_tags(found)[0] == first


def test_names_that_programs_use_stay_usable():
    assert "AMD-Instinct-MI50" in tags(device(0x66A1, 0x06))  # what Ray calls a Radeon Pro VII
    assert "AMD-Instinct-MI308X" in tags(device(0x74A2))  # Ray's constant, which its own detection never gives
    assert "MI250X" in tags(device(0x740C, 0x01))


def test_a_partition_has_its_profile_and_a_whole_card_has_none():
    modes = {"gfx": "gfx942", "compute_mode": "cpx", "memory_mode": "nps4"}
    assert tags(device(0x74A1, attributes=modes, parent="amd-0"))[-2:] == ("gfx942", "cpx_nps4")
    assert tags(device(0x74A1, attributes=modes))[-1] == "gfx942"


def test_an_integrated_gpu_is_given_out_beside_a_card_by_name_alone(detected):
    card, inside = detected("rx7900xtx-beside-610m").devices
    assert plugin.anyaccel_validate(Term(names=("GPU",)), [card]) is None
    for name in ("GPU", "amd"):
        reason = plugin.anyaccel_validate(Term(names=(name,)), [inside])
        assert list(reason_faults(reason, {})) == []
        assert "ask for AMD-Radeon-610M" in str(reason)
    for name in ("radeon-610m", "AMD-Radeon-610M", "gfx1036"):
        assert plugin.anyaccel_validate(Term(names=(name,)), [inside]) is None
    (alone,) = detected("610m-alone").devices
    assert plugin.anyaccel_validate(Term(names=("GPU",)), [alone]) is None


def test_an_integrated_gpu_is_judged_like_any_other(detected, recorded):
    assert detected("610m-alone").devices[0].health is Health.HEALTHY
    found = plugin.anyaccel_detect(context(recorded("610m-alone", {"/sys/class/kfd": None})))
    assert found is not None
    (lost,) = found.devices
    assert (lost.health, lost.model) == (Health.UNHEALTHY, "AMD Radeon 610M")
    assert "does not offer it for computing" in lost.health_reason


def test_a_gpu_without_number_is_not_given_out(detected):
    devices = detected("mi300x-8gpu-driver-missing").devices
    reason = plugin.anyaccel_validate(Term(names=("GPU",)), devices[:1])
    assert str(reason).startswith("amd-0000:05:00.0 cannot be given to a process: no driver is bound to it")


def test_partitions_of_several_cards_may_work_together(detected):
    devices = detected("mi300x-8gpu-cpx").devices
    assert plugin.anyaccel_validate(Term(names=("GPU",), units=120_000), devices[:12]) is None


def test_a_fraction_is_shared_by_agreement_and_nothing_else_is_claimed(gpus):
    assert plugin.anyaccel_fractional(gpus[0]) is Fractional.SHARED
    assert plugin.anyaccel_validate(Term(names=("GPU",), units=5_000), gpus[:1]) is None
    assert plugin.anyaccel_env(gpus[:1], EnvContext(devices=tuple(gpus))).memory_by == ""


def test_a_container_gets_the_shared_node_once_and_no_mask(detected):
    devices = detected("mi308x-8gpu-cpx").devices
    edits = plugin.anyaccel_container([devices[4], devices[0]])
    assert edits.nodes == ("/dev/kfd", "/dev/dri/renderD136", "/dev/dri/renderD128")
    assert edits.env == {}
