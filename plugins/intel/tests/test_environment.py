"""Environments of workers and containers, written and read back."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from anyaccel.plugin import Device, EnvContext, Share, Term
from anyaccel_intel import plugin, selector
from anyaccel_testing import context, load_recording
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import length

MASK, HIERARCHY, ORDER, SELECTOR = plugin.anyaccel_info().env_vars


def env(chosen, devices, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    return dict(plugin.anyaccel_env(chosen, EnvContext(devices=devices, environ=environ or {})).set)


def test_mask_counts_tiles_and_says_so(devices):
    found = devices("max1550-4card")
    assert env(found[2:4], found) == {MASK: "2,3", HIERARCHY: "FLAT", ORDER: "0"}


def test_mask_counts_cards_where_cards_are_devices(devices):
    found = devices("max1550-2card-xelink-composite")
    assert env(found[1:], found) == {MASK: "1", HIERARCHY: "COMPOSITE", ORDER: "0"}


def test_combined_hierarchy_of_the_launcher_is_kept(devices):
    found = devices("max1550-4card")
    assert env(found[:1], found, {HIERARCHY: "COMBINED"})[HIERARCHY] == "COMBINED"


def test_hierarchy_is_left_alone_where_no_card_has_tiles(devices):
    found = devices("flex140-uhd770")
    assert env(found[:1], found, {HIERARCHY: "COMPOSITE"}) == {MASK: "0", ORDER: "0"}


def test_order_by_pci_address_is_set_where_numbers_count_on_it(devices):
    found = devices("two-a770-uhd770-pci-order")
    assert env(found[1:2], found) == {MASK: "1", ORDER: "1"}


def test_no_device_is_a_mask_that_names_none_because_an_empty_one_shows_all(devices):
    found = devices("two-a770-uhd770")
    edits = env((), found)
    assert edits[MASK] == "9999"
    assert plugin.anyaccel_visible(edits, found) == []
    assert plugin.anyaccel_visible({MASK: ""}, found) is None


def test_mask_is_absolute_and_does_not_count_within_the_mask_of_the_launcher(devices):
    outer = {MASK: "1,2"}
    found = devices("flex170-sriov-4vf", environ=outer)
    assert plugin.anyaccel_visible(outer, found) == [found[1].id, found[2].id]
    assert env(found[2:3], found, outer)[MASK] == "2"


@pytest.mark.parametrize(
    ("inherited", "expected"),
    [
        (None, None),
        ("level_zero:*", None),
        ("*:gpu", None),
        ("opencl:gpu;level_zero:gpu", None),
        ("level_zero:0,1", None),
        # The numbers of the launcher mean nothing behind the worker's mask.
        ("level_zero:2,3", "level_zero:0,1"),
        ("level_zero:0", "level_zero:0,1"),
        ("level_zero:0;opencl:cpu", "level_zero:0,1;opencl:cpu"),
        ("opencl:cpu", "level_zero:0,1;opencl:cpu"),
        ("*:cpu", "level_zero:0,1"),
        ("!level_zero:0", "level_zero:0,1"),
        ("level_zero:gpu:0", "level_zero:0,1"),
        ("", "level_zero:0,1"),
    ],
)
def test_inherited_selector_stays_unless_it_would_hide_what_the_mask_shows(inherited, expected, devices):
    found = devices("max1550-4card")
    edits = env(found[2:4], found, {SELECTOR: inherited} if inherited is not None else {})
    assert edits.get(SELECTOR) == expected


def test_inherited_selector_stays_where_nothing_is_given(devices):
    found = devices("max1550-4card")
    assert SELECTOR not in env((), found, {SELECTOR: "opencl:cpu"})


def test_selector_counts_what_the_mask_has_left(devices):
    found = devices("max1550-4card")
    both = {MASK: "2,3", SELECTOR: "level_zero:2,3"}
    assert plugin.anyaccel_visible(both, found) == []
    assert plugin.anyaccel_visible({MASK: "2,3", SELECTOR: "level_zero:1"}, found) == [found[3].id]


def test_selector_alone_picks_tiles_of_cards(devices):
    found = devices("max1550-2card-xelink")
    # Tile 1 of the first card, and the whole second card.
    chosen = {HIERARCHY: "COMPOSITE", SELECTOR: "level_zero:0.1,1"}
    assert plugin.anyaccel_visible(chosen, found) == [found[1].id, found[2].id, found[3].id]


def test_discarding_one_device_hides_all_unless_the_loader_is_told_otherwise(devices):
    found = devices("max1550-4card")
    # The loader drops the whole backend if a term discards by number.
    discarding = {SELECTOR: "!level_zero:0"}
    assert plugin.anyaccel_visible(discarding, found) == []
    spared = plugin.anyaccel_visible({**discarding, "UR_LOADER_PRELOAD_FILTER": "0"}, found)
    assert spared == [device.id for device in found[1:]]


def test_opencl_only_leaves_no_level_zero_device(devices):
    assert plugin.anyaccel_visible({SELECTOR: "opencl:gpu"}, devices("flex140-uhd770")) == []


def test_selector_that_the_runtime_refuses_hides_every_device(devices):
    with pytest.raises(ValueError, match="one colon"):
        plugin.anyaccel_visible({SELECTOR: "level_zero:gpu:0"}, devices("flex140-uhd770"))


def test_shares_are_by_agreement_and_switch_nothing_on(devices):
    found = devices("flex140-uhd770")
    share = Share(device=found[0], units=5000, memory_bytes=1 << 30)
    edits = plugin.anyaccel_env(found[:1], EnvContext(devices=found, shares={found[0].id: share}))
    assert edits.memory_by == edits.compute_by == ""
    assert edits.set == {MASK: "0", ORDER: "0"}


def test_mask_by_id_is_a_mask_by_number_since_the_driver_knows_numbers_only(devices):
    found = devices("flex140-uhd770")
    assert plugin.anyaccel_env(found[1:], EnvContext(devices=found, mask="index")) == plugin.anyaccel_env(
        found[1:], EnvContext(devices=found, mask="id")
    )


def test_integrated_and_discrete_gpus_are_not_given_together(devices):
    found = devices("two-a770-uhd770-pci-order")
    assert "Intel-iGPU" in (plugin.anyaccel_validate(Term(names=("GPU",), units=30000), found) or "")
    assert plugin.anyaccel_validate(Term(names=("GPU",), units=20000), found[1:]) is None
    assert plugin.anyaccel_validate(Term(names=("GPU",), units=5000), found[:1]) is None


def test_container_counts_its_own_cards_from_0_and_gets_the_folder_of_links(devices):
    found = devices("flex170-sriov-4vf")
    edits = plugin.anyaccel_container(found[2:4])
    assert edits.nodes == ("/dev/dri/renderD130", "/dev/dri/card2", "/dev/dri/renderD131", "/dev/dri/card3")
    assert [(mount.source, mount.read_only) for mount in edits.mounts] == [("/dev/dri/by-path", True)]
    assert edits.env == {MASK: "0,1", ORDER: "0"}


def test_container_with_one_tile_masks_the_other(devices):
    found = devices("max1550-4card")
    # Tile 1 of one card, and tile 0 of the next: inside, the two cards have tiles 0 to 3.
    edits = plugin.anyaccel_container((found[3], found[4]))
    assert edits.nodes == ("/dev/dri/renderD129", "/dev/dri/card1", "/dev/dri/renderD130", "/dev/dri/card2")
    assert edits.env == {MASK: "1,2", HIERARCHY: "FLAT", ORDER: "0"}


def test_container_without_devices_sees_none():
    edits = plugin.anyaccel_container(())
    assert (edits.nodes, edits.mounts) == ((), ())
    assert edits.env[MASK] == "9999"


def _machines() -> list[tuple[Device, ...]]:
    from pathlib import Path

    recordings = Path(__file__).parents[1] / "recordings"
    names = ("max1550-4card", "max1550-2card-xelink-composite", "two-a770-uhd770-pci-order", "flex170-sriov-4vf")
    found = [plugin.anyaccel_detect(context(load_recording(recordings / name))) for name in names]
    return [each.devices for each in found if each is not None]


SELECTORS = ["level_zero:*", "level_zero:1", "*:gpu", "opencl:cpu", "!level_zero:0", "level_zero:0;opencl:*", "gpu", ""]
ENVIRONS = st.fixed_dictionaries(
    {},
    optional={
        MASK: st.sampled_from(["", "default", "0", "1,0", "0.1", "9999"]),
        HIERARCHY: st.sampled_from(["FLAT", "COMPOSITE", "COMBINED", "other"]),
        ORDER: st.sampled_from(["0", "1", ""]),
        SELECTOR: st.sampled_from(SELECTORS),
        "UR_LOADER_PRELOAD_FILTER": st.sampled_from(["0", "1"]),
    },
)


@settings(max_examples=length(25, 150), deadline=None)
@given(data=st.data(), found=st.sampled_from(_machines()), environ=ENVIRONS)
def test_any_subset_comes_back_from_any_environment(data, found, environ):
    chosen = data.draw(st.lists(st.sampled_from(found), unique_by=lambda device: device.id))
    edits = plugin.anyaccel_env(tuple(chosen), EnvContext(devices=found, environ=environ))
    # A discard would hide a whole backend, and a blank is kept as part of a name.
    assert not set("! ").intersection(edits.set.get(SELECTOR, ""))
    assert "-" not in edits.set[MASK]
    merged = {name: value for name, value in environ.items() if name not in edits.unset} | dict(edits.set)
    assert plugin.anyaccel_visible(merged, found) == [
        device.id for device in sorted(chosen, key=lambda device: device.index)
    ]


@settings(max_examples=length(25, 150), deadline=None)
@given(found=st.sampled_from(_machines()), environ=ENVIRONS)
def test_what_an_environment_leaves_visible_is_a_subset_or_a_refusal(found, environ):
    try:
        left = plugin.anyaccel_visible(environ, found)
    except ValueError as error:
        assert SELECTOR in str(error)  # noqa: PT017 - either outcome is right
        return
    assert left is None or set(left) <= {device.id for device in found}


@settings(max_examples=length(25, 200), deadline=None)
@given(st.text(alphabet="!*:;,.0123 abcglopuvz_enrt", max_size=24))
def test_any_text_is_a_selector_or_a_refusal(text):
    try:
        left = selector.admitted(text, [2, 1, 0], environ={})
    except ValueError as error:
        assert repr(text) in str(error)  # noqa: PT017 - either outcome is right
        return
    assert all(0 <= position < 3 for position, _ in left)


@pytest.mark.parametrize(
    ("recording", "index", "region"),
    [("max1550-4card", 3, "vram1"), ("max1550-2card-xelink-composite", 1, None), ("flex140-uhd770", 0, "vram0")],
)
def test_the_kernel_is_told_what_it_calls_the_memory_of_a_share(devices, recording, index, region):
    found = devices(recording)
    device = found[index]
    for units in (5_000, 10_000):
        ctx = EnvContext(devices=tuple(found), shares={device.id: Share(device=device, units=units)})
        regions = plugin.anyaccel_env([device], ctx).memory_regions
        wanted = {device.id: f"drm/{device.pci_bus_id}/{region}"} if region and units < 10_000 else {}
        assert regions == wanted
