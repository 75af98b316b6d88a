"""Detection, health and statistics on recorded machines."""

from __future__ import annotations

import pytest
from anyaccel.kit import FaultError
from anyaccel.model import Device, Health, Term
from anyaccel_iluvatar import plugin
from recorded import Recorded

MACHINES = Recorded(plugin, __file__)
replay, detect, stats = MACHINES.replay, MACHINES.detect, MACHINES.stats
GPU = Term(names=("GPU",))


def test_each_chip_of_a_board_is_a_gpu() -> None:
    devices = detect("bi-v150-4chip").devices

    assert [(device.index, device.memory_bytes, device.nodes) for device in devices] == [
        (index, 32 << 30, (f"/dev/iluvatar{index}", "/dev/itrctl")) for index in range(4)
    ]
    assert {plugin.anyaccel_tags(device)[0] for device in devices} == {"BI-V150"}
    assert devices[0].attributes["uuid"] == "GPU-00000000-0000-0000-0000-000000000001"
    assert devices[0].health is Health.UNKNOWN  # nothing says that it works
    assert all(not device.links for device in devices)


def test_the_number_is_the_tools_and_a_node_that_nothing_tells_is_not_guessed() -> None:
    detected = detect("bi-v150-4chip-other-order")

    assert [(device.pci_bus_id, device.index) for device in detected.devices] == [
        ("0000:b1:00.0", 0),
        ("0000:b4:00.0", 1),
        ("0000:8a:00.0", 2),
        ("0000:8d:00.0", 3),
    ]
    assert all(not device.nodes for device in detected.devices)
    assert detected.notes == (
        "which node in /dev is whose is not told, so that containers get none and --enforce opens none",
    )


def test_the_only_gpu_has_the_only_node_whatever_its_number() -> None:
    (device,) = detect("mr-v100-1gpu-iluvatar3").devices

    assert (device.index, device.model, device.nodes) == (0, "Iluvatar MR-V100", ("/dev/iluvatar3", "/dev/itrctl"))


def test_a_product_that_no_pci_id_tells_is_named_by_the_tool() -> None:
    (device,) = detect("bi-v100-1gpu-unknown-id").devices

    assert (device.model, device.memory_bytes, plugin.anyaccel_tags(device)[0]) == (
        "Iluvatar BI-V100",
        32 << 30,
        "BI-V100",
    )


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("bi-v150-2chip-ixsmi-hangs", "ixsmi did not end within"),
        ("bi-v150-4chip-ixsmi-without-library", "libixml.so: cannot open shared object file"),
    ],
)
def test_without_the_order_no_gpu_is_given_out(name: str, note: str) -> None:
    detected = detect(name)

    assert note in " ".join(detected.notes)
    for device in detected.devices:
        assert device.health is Health.UNHEALTHY
        assert "its number is unknown" in (plugin.validate(GPU, [device]) or "")
    with pytest.raises(FaultError, match="ixsmi"):
        stats(name)


def test_a_chip_that_the_tool_leaves_out_is_lost() -> None:
    lost = detect("bi-v150-4chip-one-lost").devices[-1]

    assert (lost.pci_bus_id, lost.health_reason) == ("0000:b1:00.0", "ixsmi does not show it")
    findings = plugin.anyaccel_diagnose(replay("bi-v150-4chip-one-lost"))
    assert "ixsmi does not show iluvatar-0000:b1:00.0, of 4 devices" in [finding.reason for finding in findings]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bi-v150-2chip-no-driver", "no driver is bound to it"),
        ("mr-v100-1gpu-no-permission", "you may not open /dev/itrctl"),
    ],
)
def test_what_files_show_needs_no_tool(name: str, reason: str) -> None:
    detected = detect(name)

    assert {device.health_reason for device in detected.devices} == {reason}
    assert detected.notes == ()


def test_either_name_of_the_power_is_asked_for() -> None:
    new, old = stats("bi-v150-4chip"), stats("bi-v150-4chip-other-order")

    assert [one.power_watts for one in new.values()] == [None, 61.0, 62.0, 63.0]
    assert new["iluvatar-0000:8d:00.0"].memory_used_bytes == 115 << 20
    assert old["iluvatar-0000:8d:00.0"].power_watts == 61.0
    assert new["iluvatar-0000:8d:00.0"].processes is None  # unknown, not an empty list


def test_no_name_means_another_vendors_product() -> None:
    assert [product.name for product in plugin.anyaccel_products()] == ["BI-V100", "BI-V150", "MR-V100", "MR-V50"]
    assert plugin.anyaccel_tags(Device(id="x", index=0, model="Tesla V100"))[0] == "Tesla-V100"
