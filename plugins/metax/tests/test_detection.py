"""Detection, health and statistics on recorded machines."""

from __future__ import annotations

import pytest
from anyaccel.kit import FaultError
from anyaccel.model import Device, Health, Term
from anyaccel_metax import plugin
from recorded import Recorded

MACHINES = Recorded(plugin, __file__)
replay, detect, stats = MACHINES.replay, MACHINES.detect, MACHINES.stats


def test_a_machine_of_two_groups_of_four() -> None:
    devices = detect("c500-8gpu").devices

    assert [(device.index, device.model, device.memory_bytes) for device in devices] == [
        (index, "MXC500", 64 << 30) for index in range(8)
    ]
    assert devices[0].nodes == ("/dev/dri/renderD129", "/dev/dri/card1", "/dev/mxcd")  # the card is not the index
    assert [sorted(device.links) for device in devices] == [
        sorted(peer.id for peer in devices if peer is not device and peer.index // 4 == device.index // 4)
        for device in devices
    ]


def test_one_card_needs_no_tool() -> None:
    (device,) = detect("c500-1gpu").devices

    assert (device.id, device.index, device.health) == ("metax-0000:08:00.0", 0, Health.UNKNOWN)
    assert plugin.validate(plugin_term(), [device]) is None


def plugin_term() -> Term:
    return Term(names=("GPU",))


def test_both_spellings_of_a_name_are_one_product() -> None:
    assert {plugin.anyaccel_tags(Device(id="x", index=0, model=name))[0] for name in ("MXC500", "MetaX C500")} == {
        "MXC500"
    }
    assert {plugin.anyaccel_tags(device)[0] for device in detect("n260-2gpu-new-table").devices} == {"MXN260"}
    assert [product.name for product in plugin.anyaccel_products()] == ["MXC500", "MXC550", "MXC600-A", "MXN260"]


def test_cards_behind_a_lost_one_are_not_given_out() -> None:
    devices = detect("c550-4gpu-one-lost").devices

    assert [(device.index, device.health.name) for device in devices] == [
        (0, "HEALTHY"),
        (1, "UNHEALTHY"),
        (2, "UNHEALTHY"),
        (3, "UNHEALTHY"),
    ]
    assert devices[1].health_reason == "mx-smi does not show it"
    assert "GPU#1 before it is not available" in devices[2].health_reason
    assert "GPU#1 before it" in (plugin.validate(plugin_term(), devices[2:3]) or "")


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("c500-4gpu-mx-smi-hangs", "mx-smi did not end within"),
        ("c500-2gpu-mx-smi-garbage", "mx-smi must answer a table of devices (got 'Segmentation fault"),
    ],
)
def test_without_the_order_no_card_is_given_out(name: str, note: str) -> None:
    detected = detect(name)

    assert note in " ".join(detected.notes)
    assert {device.health_reason for device in detected.devices} == {
        "its number is unknown, so no process can be confined to it"
    }
    with pytest.raises(FaultError, match="mx-smi"):
        stats(name)


def test_a_node_that_may_not_be_opened_is_named() -> None:
    assert [device.health_reason for device in detect("c500-2gpu-no-permission").devices] == [
        "you may not open /dev/mxcd"
    ] * 2


def test_the_vendor_id_alone_proves_nothing() -> None:
    assert plugin.anyaccel_detect(replay("another-device-of-that-id")) is None


@pytest.mark.parametrize(("name", "mebibytes", "watts"), [("c500-8gpu", 861, 48.0), ("n260-2gpu-new-table", 667, 48.0)])
def test_the_table_is_read_in_its_layouts(name: str, mebibytes: int, watts: float) -> None:
    last = list(stats(name).values())[3 if name == "c500-8gpu" else 1]

    assert (last.memory_used_bytes, last.power_watts) == (mebibytes << 20, watts)
    assert last.utilization is not None
    assert last.processes is None  # unknown, not an empty list


def test_a_card_that_the_table_leaves_out_is_found_missing() -> None:
    findings = plugin.anyaccel_diagnose(replay("c550-4gpu-one-lost"))

    assert "mx-smi does not show metax-0000:09:00.0, of 4 devices" in [finding.reason for finding in findings]
