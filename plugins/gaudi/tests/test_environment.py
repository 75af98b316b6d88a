"""Masks, written and read, against a model of the vendor's runtime acquiring a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from anyaccel.model import Device, EnvContext
from anyaccel_gaudi import plugin
from hypothesis import given
from hypothesis import strategies as st

MODULES = "HABANA_VISIBLE_MODULES"
OWN = "HLS_MODULE_ID"
MINOR_OF_MODULE = {0: 0, 4: 1, 1: 2, 5: 3, 2: 4, 6: 5, 3: 6, 7: 7}  # huggingface/optimum-habana#1089
DEVICES = tuple(
    Device(
        id=f"gaudi-0000:{0x19 + module:02x}:00.0",
        index=module,
        model="HL-225",
        nodes=(f"/dev/accel/accel{MINOR_OF_MODULE[module]}",),
        attributes={"accel": MINOR_OF_MODULE[module], "generation": "GAUDI2"},
    )
    for module in range(8)
)
NAMELESS = Device(id="gaudi-0000:40:00.0", index=8, model="HL-225", attributes={"module_unknown": True})

subsets = st.lists(st.sampled_from(DEVICES), unique_by=lambda device: device.id)


def ids(modules: Sequence[int]) -> list[str]:
    return [DEVICES[module].id for module in modules]


def apply(devices: Sequence[Device], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    edits = plugin.anyaccel_env(devices, EnvContext(devices=DEVICES))
    assert {*edits.set, *edits.unset} == {MODULES, OWN}
    return {name: value for name, value in {**(environ or {}), **edits.set}.items() if name not in edits.unset}


def acquired(environ: Mapping[str, str], free: Sequence[int], rank: int = 0, ranks: int = 1) -> int | None:
    """Return the module acquired by a process, by the rules of HabanaAI/gaudi-pytorch-bridge; None on failure."""
    module = environ.get(OWN)
    if module is None and ranks > 1:
        listed = environ.get(MODULES)
        module = listed.split(",")[rank] if listed is not None else str(rank)
    if module is not None and int(module) in free:
        return int(module)
    if module is not None and MODULES in environ:
        return None
    return min(free, default=None)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ([5], {MODULES: "5", OWN: "5"}),
        ([0], {MODULES: "0", OWN: "0"}),
        ([2, 3], {MODULES: "2,3"}),
        ([5, 4, 7, 6], {MODULES: "5,4,7,6"}),
        (range(8), {MODULES: "0,1,2,3,4,5,6,7"}),
        ([], {MODULES: "999", OWN: "999"}),
    ],
)
def test_the_mask_names_modules_in_the_order_given(modules: Sequence[int], expected: dict[str, str]) -> None:
    assert expected == apply([DEVICES[module] for module in modules])


@given(subsets, st.dictionaries(st.sampled_from([MODULES, OWN]), st.sampled_from(["", "all", "0", "3,4", "7"])))
def test_a_mask_replaces_whatever_the_launcher_inherited(devices: list[Device], inherited: dict[str, str]) -> None:
    assert plugin.anyaccel_visible(apply(devices, inherited), DEVICES) == [device.id for device in devices]


@given(subsets, st.data())
def test_each_rank_acquires_its_own_device_of_the_mask(devices: list[Device], data: st.DataObject) -> None:
    environ = apply(devices)
    mine = [device.index for device in devices]
    others = data.draw(st.lists(st.sampled_from([m for m in range(8) if m not in mine] or [None]), unique=True))
    free = [*mine, *(module for module in others if module is not None)]

    # Each rank of a job starts with the same environment.
    got = [acquired(environ, free, rank, len(devices)) for rank in range(len(devices))]

    assert got == mine


def test_a_process_alone_does_not_stray_to_a_device_that_is_free() -> None:
    listed = {MODULES: "5"}
    assert acquired(listed, free=[0, 5]) == 0  # the list alone is no mask for a job of one process

    assert acquired(apply([DEVICES[5]]), free=[0, 5]) == 5
    assert acquired(apply([DEVICES[5]]), free=[0]) is None


def test_with_the_empty_mask_no_process_acquires_a_device() -> None:
    assert acquired(apply([]), free=range(8)) is None
    assert acquired(apply([]), free=range(8), rank=0, ranks=2) is None


def test_no_value_of_the_container_runtime_is_written_for_a_process() -> None:
    assert "HABANA_VISIBLE_DEVICES" not in plugin.anyaccel_info().env_vars


def test_a_device_without_a_module_id_or_given_twice_cannot_be_masked() -> None:
    with pytest.raises(ValueError, match=r"gaudi-0000:40:00\.0 cannot be given to a process: its module id is unknown"):
        apply([NAMELESS])
    with pytest.raises(ValueError, match="each device once"):
        apply([DEVICES[0], DEVICES[0]])


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"HABANA_VISIBLE_DEVICES": "3"}, None),  # on a host it does nothing (HabanaAI/Model-References#25)
        ({"HABANA_VISIBLE_DEVICES": "none"}, None),
        ({MODULES: "3"}, [3]),
        ({MODULES: "3,1"}, [3, 1]),
        ({MODULES: " 3 , 1"}, [3, 1]),
        ({MODULES: "03"}, [3]),
        ({MODULES: "1,1,0"}, [1, 0]),
        ({MODULES: "9,2"}, [2]),
        ({MODULES: "-1"}, []),
        # The mask for "no device".
        ({MODULES: "999"}, []),
        ({OWN: "6"}, [6]),
        ({OWN: "42"}, []),
        ({MODULES: "4,5,6,7", OWN: "6"}, [6]),
        ({MODULES: "2,3", "HABANA_VISIBLE_DEVICES": "4,6"}, [2, 3]),
    ],
)
def test_an_environment_leaves_visible_what_the_runtime_would_take(
    environ: dict[str, str], expected: list[int] | None
) -> None:
    assert plugin.anyaccel_visible(environ, DEVICES) == (None if expected is None else ids(expected))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({MODULES: ""}, f"{MODULES} must be module ids such as '0,1' (got '')"),
        ({MODULES: "all"}, "(got 'all'); unset it to see every HPU"),
        ({MODULES: "0,"}, "(got '0,')"),
        ({MODULES: "0;1"}, "(got '0;1')"),
        ({MODULES: "0x1"}, "(got '0x1')"),
        ({MODULES: "1_0"}, "(got '1_0')"),
        ({OWN: ""}, f"{OWN} must be one module id"),
        ({OWN: "0,1"}, f"{OWN} must be one module id (got '0,1')"),
        ({MODULES: "0,1", OWN: "3"}, f"{OWN} must be one of {MODULES} (got '3' and '0,1'); unset {OWN}"),
    ],
)
def test_a_value_that_the_runtime_refuses_is_an_error_that_says_so(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        plugin.anyaccel_visible(environ, DEVICES)

    assert message in str(caught.value)


def test_a_device_without_a_module_id_is_visible_through_no_mask() -> None:
    assert plugin.anyaccel_visible({MODULES: "8"}, [*DEVICES, NAMELESS]) == []


@pytest.mark.parametrize(
    ("modules", "env"),
    [
        ([], {"HABANA_VISIBLE_DEVICES": "none"}),
        ([5], {"HABANA_VISIBLE_DEVICES": "3"}),
        ([2, 3], {"HABANA_VISIBLE_DEVICES": "4,6", MODULES: "2,3"}),
    ],
)
def test_a_container_gets_node_numbers_outside_and_module_ids_inside(modules: list[int], env: dict[str, str]) -> None:
    edits = plugin.anyaccel_container([DEVICES[module] for module in modules])

    assert edits.env == env
    assert edits.nodes == tuple(f"/dev/accel/accel{MINOR_OF_MODULE[module]}" for module in modules)
    assert edits.mounts == ()


def test_a_container_gets_the_network_addresses_where_the_machine_has_them() -> None:
    device = Device(id="gaudi-x", index=0, model="HL-225", attributes={"gaudinet": "/etc/habanalabs/gaudinet.json"})

    (mount,) = plugin.anyaccel_container([device]).mounts

    assert (mount.source, mount.target, mount.read_only) == (*["/etc/habanalabs/gaudinet.json"] * 2, True)
