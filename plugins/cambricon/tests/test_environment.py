"""Masks, written and read as in torch_mlu, and containers."""

from __future__ import annotations

import pytest
from anyaccel.model import Device, EnvContext
from anyaccel_cambricon import plugin
from hypothesis import given
from hypothesis import strategies as st

MASK, FIRST = "MLU_VISIBLE_DEVICES", "CN_VISIBLE_DEVICES"
DEVICES = tuple(
    Device(
        id=f"cambricon-0000:{0x18 + n:02x}:00.0",
        index=n,
        model="MLU590-M9",
        nodes=(f"/dev/cambricon_dev{n}", f"/dev/cambricon_ipcm{n}"),
    )
    for n in range(12)
)
UUID = "0d9c2f70-1111-2222-3333-0123456789ab"


def seen_by_torch(environ: dict[str, str], count: int) -> list[int]:
    """Return the numbers left by ``_parse_visible_devices`` and ``_device_count_cndev`` of torch_mlu."""
    value = environ.get(FIRST, environ.get(MASK))
    if value is None:
        return list(range(count))
    found: list[int] = []
    for entry in value.split(","):
        number = int(entry) if entry.strip().isdigit() else -1
        if number in found:
            return []
        if number < 0:
            break
        found.append(number)
    return found[: next((place for place, number in enumerate(found) if number >= count), None)]


def apply(devices, environ=None) -> dict[str, str]:
    edits = plugin.anyaccel_env(devices, EnvContext(devices=DEVICES))
    return {name: value for name, value in {**(environ or {}), **edits.set}.items() if name not in edits.unset}


@given(st.lists(st.sampled_from(DEVICES), unique_by=lambda device: device.id), st.sampled_from(["", "3", "0,0"]))
def test_a_worker_sees_its_cards_in_order_whatever_it_inherited(devices, inherited: str) -> None:
    environ = apply(devices, {FIRST: inherited, MASK: inherited, "CUDA_VISIBLE_DEVICES": "7"})

    assert environ[MASK] == ",".join(str(device.index) for device in devices)
    assert seen_by_torch(environ, 12) == [device.index for device in devices]
    assert plugin.anyaccel_visible(environ, DEVICES) == [device.id for device in devices]


@pytest.mark.parametrize(
    ("environ", "numbers"),
    [
        ({}, None),
        ({MASK: ""}, []),
        ({MASK: "2,0"}, [2, 0]),
        ({MASK: " 2 , 11"}, [2, 11]),
        ({MASK: "1,1"}, []),
        ({MASK: "1,,2"}, [1]),
        ({MASK: "1,-1,2"}, [1]),
        ({MASK: "1,12,2"}, [1]),
        ({MASK: "all"}, []),
        ({FIRST: "4", MASK: "1"}, [4]),
        ({FIRST: "", MASK: "1"}, []),
        ({"MLU_VISIBLE_DEVICE": "1"}, None),  # a mistake of some scripts: nothing reads it
    ],
)
def test_a_mask_means_what_it_means_to_torch(environ: dict[str, str], numbers: list[int] | None) -> None:
    assert plugin.anyaccel_visible(environ, DEVICES) == (None if numbers is None else [DEVICES[n].id for n in numbers])
    assert seen_by_torch(environ, 12) == (list(range(12)) if numbers is None else numbers)


@pytest.mark.parametrize("variable", [MASK, FIRST])
def test_a_list_of_uuids_is_refused_since_no_file_tells_them(variable: str) -> None:
    with pytest.raises(ValueError, match=f"{variable} must be card numbers such as '0,1', not UUIDs"):
        plugin.anyaccel_visible({variable: UUID}, DEVICES)


def test_a_container_gets_nodes_and_card_numbers() -> None:
    edits = plugin.anyaccel_container(DEVICES[10:11])

    assert edits.nodes == ("/dev/cambricon_ctl", "/dev/cambricon_dev10", "/dev/cambricon_ipcm10")
    assert edits.env == {"CAMBRICON_VISIBLE_DEVICES": "10"}
    assert (plugin.anyaccel_container(()).nodes, plugin.anyaccel_container(()).env) == ((), {})
