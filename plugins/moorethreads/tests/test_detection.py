"""Detection, health and statistics on recorded machines."""

from __future__ import annotations

import pytest
from anyaccel.kit import FaultError
from anyaccel.model import Health, Term
from anyaccel_moorethreads import plugin
from anyaccel_testing import context
from recorded import Recorded

MACHINES = Recorded(plugin, __file__)
load, replay, detect, stats = MACHINES.load, MACHINES.replay, MACHINES.detect, MACHINES.stats


def test_the_sound_of_a_card_is_no_gpu() -> None:
    devices = detect("s5000-8gpu").devices

    assert [(device.index, device.model, device.memory_bytes) for device in devices] == [
        (index, "MTT S5000", 80 << 30) for index in range(8)
    ]
    assert devices[1].nodes == ("/dev/mtgpu.1", "/dev/dri/renderD130", "/dev/dri/card2")
    assert {plugin.anyaccel_tags(device)[0] for device in devices} == {"MTT-S5000"}
    assert devices[0].health is Health.UNKNOWN  # nothing says that it works


def test_the_number_is_the_tools() -> None:
    assert [(device.pci_bus_id, device.nodes[0]) for device in detect("s5000-4gpu-other-order").devices] == [
        ("0000:2b:00.0", "/dev/mtgpu.3"),
        ("0000:2a:00.0", "/dev/mtgpu.2"),
        ("0000:3b:00.0", "/dev/mtgpu.1"),
        ("0000:3a:00.0", "/dev/mtgpu.0"),
    ]


def test_without_the_tool_nodes_and_addresses_have_to_agree() -> None:
    agree, differ = detect("s4000-2gpu-container"), detect("s4000-2gpu-order-unknown")

    assert [(device.index, device.model, device.health) for device in agree.devices] == [
        (0, "MTT S4000", Health.UNKNOWN),
        (1, "MTT S4000", Health.UNKNOWN),
    ]
    assert {device.health for device in differ.devices} == {Health.UNHEALTHY}
    assert agree.notes == differ.notes == ("mthreads-gmi is not here to tell the order or the product of the GPUs",)


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("s5000-2gpu-gmi-hangs", "mthreads-gmi did not end within"),
        ("s5000-2gpu-gmi-garbage", "(got 'Failed to initialize MTML: driver/library mismatch')"),
    ],
)
def test_a_tool_that_fails_costs_the_order(name: str, note: str) -> None:
    detected = detect(name)

    assert note in " ".join(detected.notes)
    for device in detected.devices:
        assert "its number is unknown" in (plugin.validate(Term(names=("GPU",)), [device]) or "")
    with pytest.raises(FaultError, match="mthreads-gmi"):
        stats(name)


def test_an_old_node_and_an_old_table_are_read() -> None:
    (device,) = detect("s30-1gpu-old-node").devices
    (one,) = stats("s30-1gpu-old-node").values()

    assert (device.nodes[0], device.memory_bytes) == ("/dev/mtgpu0", 4 << 30)
    assert (one.memory_used_bytes, one.temperature_celsius) == (509 << 20, 52.0)


def test_a_card_that_frameworks_crash_on_is_found() -> None:
    (finding,) = plugin.anyaccel_diagnose(replay("s30-1gpu-old-node"))

    assert "on which torch_musa crashes" in finding.reason


def test_a_card_that_the_tool_leaves_out_is_lost() -> None:
    lost = detect("s5000-4gpu-one-lost").devices[-1]

    assert (lost.pci_bus_id, lost.health_reason) == ("0000:3a:00.0", "mthreads-gmi does not show it")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("s80-1gpu-no-driver", "no driver is bound to it"),
        ("s80-1gpu-no-permission", "you may not open /dev/mtgpu.0"),
    ],
)
def test_what_files_show_needs_no_tool(name: str, reason: str) -> None:
    (device,) = detect(name).devices

    assert (device.model, device.health_reason) == ("MTT S80", reason)
    assert detect(name).notes == ()


def test_a_card_that_a_virtual_machine_has_is_not_given_out() -> None:
    recording = load("s4000-2gpu-container")
    driver = "/sys/bus/pci/devices/0000:2a:00.0/driver"
    recording["paths"][driver]["link"] = "../../../../bus/pci/drivers/vfio-pci"

    detected = plugin.anyaccel_detect(context(recording))

    assert detected is not None
    assert "'vfio-pci', which keeps it for another use" in detected.devices[0].health_reason


def test_memory_in_use_comes_from_the_driver_where_the_tool_is_missing() -> None:
    assert [one.memory_used_bytes for one in stats("s4000-2gpu-container").values()] == [500 << 20, 501 << 20]
    one = stats("s5000-8gpu")["moorethreads-0000:2b:00.0"]
    assert (one.memory_used_bytes, one.utilization, one.temperature_celsius) == (66642 << 20, 0.01, 53.0)
    assert one.processes is None  # unknown, not an empty list


def test_names_that_another_vendor_uses_too_are_left_to_it() -> None:
    products = {product.name: product.aliases for product in plugin.anyaccel_products()}

    assert products["MTT-S60"] == products["MTT-S90"] == ()
    assert products["MTT-S4000"] == ("S4000",)
    assert all(name.startswith("MTT-") for name in products)
