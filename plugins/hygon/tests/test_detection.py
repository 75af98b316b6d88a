"""Detection, health and statistics on recorded machines."""

from __future__ import annotations

import pytest
from anyaccel.kit import FaultError
from anyaccel.model import Device, Health, Term
from anyaccel_hygon import plugin
from recorded import Recorded

MACHINES = Recorded(plugin, __file__)
replay, detect, stats = MACHINES.replay, MACHINES.detect, MACHINES.stats


def test_the_tool_names_what_several_products_with_one_id_are() -> None:
    devices = detect("k100ai-4dcu").devices

    assert [(device.index, device.model, device.memory_bytes) for device in devices] == [
        (index, "K100_AI", 65520 << 20) for index in range(4)
    ]
    assert devices[0].nodes == ("/dev/dri/renderD129", "/dev/dri/card1", "/dev/kfd", "/dev/mkfd")
    assert devices[0].attributes["serial"] == "T6T8290017030300"
    assert devices[0].attributes["unique_id"] == "1000000000000001"
    assert {plugin.anyaccel_tags(device)[0] for device in devices} == {"K100_AI"}


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("bw-1dcu-no-hy-smi", "hy-smi is not here to tell which one it is"),
        ("k100ai-2dcu-hy-smi-hangs", "hy-smi did not end within"),
        ("k100ai-2dcu-hy-smi-garbage", "hy-smi must answer an object for each card"),
    ],
)
def test_without_the_tool_a_dcu_has_no_product_and_works(name: str, note: str) -> None:
    detected = detect(name)

    assert note in " ".join(detected.notes)
    for device in detected.devices:
        assert device.health is Health.HEALTHY
        assert plugin.anyaccel_tags(device)[0] in ("Hygon-6210", "Hygon-6320")
        assert device.memory_bytes == 65520 << 20


def test_the_index_is_the_position_in_kfd() -> None:
    devices = detect("z100-2dcu-other-order").devices

    assert [(device.pci_bus_id, device.index, device.model) for device in devices] == [
        ("0000:34:00.0", 0, "Z100"),
        ("0000:33:00.0", 1, "Z100"),
    ]


def test_a_numa_node_of_0_everywhere_is_not_believed() -> None:
    assert {device.numa_node for device in detect("k100ai-4dcu").devices} == {None}
    assert {device.numa_node for device in detect("z100-2dcu-other-order").devices} == {1}
    assert {device.numa_node for device in detect("bw-1dcu-no-hy-smi").devices} == {0}


def test_a_card_that_kfd_dropped_is_not_given_out() -> None:
    detected = detect("k100ai-4dcu-one-lost")
    lost = detected.devices[-1]

    assert [device.index for device in detected.devices] == [0, 1, 2, 3]
    assert (lost.pci_bus_id, lost.health) == ("0000:9f:00.0", Health.UNHEALTHY)
    assert "Input/output error" in lost.health_reason
    assert lost.id in (plugin.validate(Term(names=("GPU",)), [lost]) or "")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("k100ai-2dcu-no-driver", "no driver is bound to it"),
        ("k100ai-2dcu-no-permission", "you may not open /dev/kfd"),
    ],
)
def test_what_files_show_needs_no_tool(name: str, reason: str) -> None:
    assert {device.health_reason for device in detect(name).devices} == {reason}
    assert detect(name).notes == ()


def test_a_processor_of_the_vendor_is_no_dcu() -> None:
    assert plugin.anyaccel_detect(replay("processor-without-dcu")) is None


def test_both_spellings_of_the_load_are_read() -> None:
    first = stats("k100ai-4dcu")["hygon-0000:34:00.0"]
    older = stats("z100-2dcu-other-order")["hygon-0000:34:00.0"]

    assert (first.utilization, first.power_watts, first.temperature_celsius) == (0.1, 96.0, 41.0)
    assert first.memory_used_bytes == 20_000_000
    assert older.utilization == 0.1
    assert first.processes is None  # unknown, not an empty list


def test_without_the_tool_memory_in_use_alone_is_known() -> None:
    (one,) = stats("bw-1dcu-no-hy-smi").values()

    assert (one.memory_used_bytes, one.utilization, one.power_watts) == (10_000_000, None, None)
    with pytest.raises(FaultError, match="hy-smi did not end within"):
        stats("k100ai-2dcu-hy-smi-hangs")


def test_names_of_products() -> None:
    assert {"Z100", "Z100L", "K100", "K100_AI", "BW200"} <= {each.name for each in plugin.anyaccel_products()}
    assert plugin.anyaccel_tags(Device(id="x", index=0, model="K100-AI Liquid"))[0] == "K100_AI"
