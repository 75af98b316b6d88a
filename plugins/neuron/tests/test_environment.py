"""Masks, their inverse, and the sets of cores valid for the runtime."""

import pytest
from anyaccel.model import Share
from anyaccel.plugin import Device, EnvContext, Fractional, Term
from anyaccel_neuron import plugin
from hypothesis import given
from hypothesis import strategies as st

WHOLE = 10_000


def cores(family, count, *, per_chip, lnc=1, start=0):
    attributes = {"device_name": family, "lnc": lnc, "cores_per_device": per_chip}
    return tuple(
        Device(id=f"neuron-test-{index}", index=index, model=family, attributes=attributes)
        for index in range(start, start + count)
    )


INF1 = cores("Inferentia", 64, per_chip=4)
TRN1 = cores("Trainium1", 32, per_chip=2)
TRN2 = cores("Trainium2", 64, per_chip=4, lnc=2)


def env(devices, everything=TRN1):
    return plugin.anyaccel_env(devices, EnvContext(devices=everything))


def visible(value, devices=TRN1, **others):
    ids = plugin.anyaccel_visible({"NEURON_RT_VISIBLE_CORES": value, **others}, devices)
    return None if ids is None else [int(name.rpartition("-")[2]) for name in ids]


def test_a_mask_is_a_list_of_increasing_ids_and_the_rival_variable_is_removed():
    edits = env(TRN1[4:8])
    assert edits.set == {"NEURON_RT_VISIBLE_CORES": "4,5,6,7"}
    assert edits.unset == {"NEURON_RT_NUM_CORES"}
    assert edits.memory_by == edits.compute_by == ""


def test_one_core_gets_a_mask_too():
    assert env(TRN1[:1]).set == {"NEURON_RT_VISIBLE_CORES": "0"}


def test_ids_grow_by_number_whatever_the_order_given():
    assert env(TRN1[11:8:-1]).set == {"NEURON_RT_VISIBLE_CORES": "9,10,11"}


def test_no_core_is_a_core_that_is_not_there_since_no_value_means_all():
    edits = env(())
    assert edits.set["NEURON_RT_VISIBLE_CORES"] not in ("", "0", "-1")
    assert int(edits.set["NEURON_RT_VISIBLE_CORES"]) > 1000
    assert edits.unset == {"NEURON_RT_NUM_CORES"}
    assert plugin.anyaccel_visible(edits.set, TRN1) == []


def test_the_size_of_logical_cores_is_set_beside_the_mask_on_chips_that_know_it():
    edits = env(TRN2[:4], TRN2)
    assert edits.set == {"NEURON_RT_VISIBLE_CORES": "0,1,2,3", "NEURON_LOGICAL_NC_CONFIG": "2"}
    assert edits.unset == {"NEURON_RT_NUM_CORES", "NEURON_RT_VIRTUAL_CORE_SIZE"}


def test_only_owned_variables_are_touched():
    owned = set(plugin.anyaccel_info().env_vars)
    for devices in ((), TRN1[:2], TRN2[:2]):
        edits = env(devices)
        assert {*edits.set, *edits.unset} <= owned


def test_a_set_that_the_runtime_refuses_gets_no_mask():
    with pytest.raises(ValueError, match=r"one contiguous.*got 3,5,6"):
        env((TRN1[3], TRN1[5], TRN1[6]))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", [0]),
        ("0,1", [0, 1]),
        ("0-3", [0, 1, 2, 3]),
        ("3-5,6", [3, 4, 5, 6]),
        ("0-2,3", [0, 1, 2, 3]),
        (" 4 , 5-6 ", [4, 5, 6]),
        ("31", [31]),
        ("7-7", [7]),
        ("", []),
        (" ", []),
        ("65535", []),
    ],
)
def test_a_mask_is_read_as_the_runtime_reads_it(value, expected):
    assert visible(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        *("3,5,6", "1,0", "0,0,1", "0-3,2", "3-1", "0,,1", "0,", "-1", "NoDevFiles", "neuron-test-0", "0x1", "\u0661"),
        *("32", "30-33", "0-99999", "9" * 30),  # no such core
    ],
)
def test_a_mask_that_the_runtime_refuses_is_named(value):
    with pytest.raises(ValueError, match=r"NEURON_RT_VISIBLE_CORES must be ids of cores.*contiguous, increasing"):
        visible(value)


def test_without_variables_nothing_is_hidden():
    assert plugin.anyaccel_visible({}, TRN1) is None


@pytest.mark.parametrize(
    ("value", "count"), [("0", None), ("", None), ("1", 1), ("4", 4), ("32", 32), ("1,1,2", 4), (" 2 ", 2)]
)
def test_a_number_of_cores_narrows_to_as_many(value, count):
    ids = plugin.anyaccel_visible({"NEURON_RT_NUM_CORES": value}, TRN1)
    assert ids == (None if count is None else [device.id for device in TRN1[:count]])


@pytest.mark.parametrize("value", ["33", "-1", "all", "1.5", "1,"])
def test_a_number_of_cores_that_cannot_be_had_is_named(value):
    with pytest.raises(ValueError, match="NEURON_RT_NUM_CORES"):
        plugin.anyaccel_visible({"NEURON_RT_NUM_CORES": value}, TRN1)


def test_the_list_wins_over_the_number():
    assert visible("4,5,6,7", NEURON_RT_NUM_CORES="2") == [4, 5, 6, 7]


machines = st.sampled_from([INF1, TRN1, TRN2, cores("Trainium2", 8, per_chip=8, lnc=1), ()])


@given(machines, st.integers(0, 63), st.integers(0, 64), st.randoms())
def test_what_a_mask_shows_is_what_was_given(devices, start, count, random):
    given_devices = list(devices[start : start + count])
    random.shuffle(given_devices)
    edits = env(given_devices, devices)
    environ = {"NEURON_RT_NUM_CORES": "1", **edits.set}
    for name in edits.unset:
        environ.pop(name, None)
    ids = [device.id for device in sorted(given_devices, key=lambda device: device.index)]
    assert list(plugin.anyaccel_visible(environ, devices)) == ids


@given(st.sampled_from([INF1, TRN1, TRN2]), st.sets(st.integers(0, 31), min_size=1, max_size=9))
def test_every_accepted_set_has_a_mask_and_every_refused_one_a_reason(devices, indexes):
    chosen = [devices[index] for index in indexes]
    reason = plugin.anyaccel_validate(Term(names=("neuron_cores",), units=len(chosen) * WHOLE), chosen)
    if reason is None:
        shown = plugin.anyaccel_visible(env(chosen, devices).set, devices)
        assert set(shown) == {device.id for device in chosen}
    else:
        assert "got" in reason


@given(st.text("0123456789,- ", max_size=12))
def test_any_value_is_read_or_refused_with_its_name(value):
    try:
        ids, said = visible(value), "NEURON_RT_VISIBLE_CORES"
    except ValueError as error:
        ids, said = [], str(error)
    assert "NEURON_RT_VISIBLE_CORES" in said
    assert ids == sorted(set(ids))


def validate(devices, units=None):
    count = len(devices) * WHOLE if units is None else units
    return plugin.anyaccel_validate(Term(names=("neuron_cores",), units=count), devices)


@pytest.mark.parametrize(
    ("devices", "accepted"),
    [
        (TRN1[:1], True),
        (TRN1[1:2], True),
        (TRN1[:2], True),
        (TRN1[1:3], False),  # half of two chips
        (TRN1[:3], False),  # optimum-neuron#619
        (TRN1[:4], True),
        (TRN1[2:6], False),
        (TRN1[:6], False),
        (TRN1[8:16], True),
        (TRN1[4:12], False),
        (TRN1[:16], True),
        (TRN1, True),
        (TRN1[:24], False),
        (TRN2[:3], True),  # within one chip
        (TRN2[4:8], True),
        (TRN2[2:6], False),
        (TRN2[8:16], True),  # two chips
        (TRN2[16:32], True),  # a row of the torus
        (TRN2[4:20], False),
        (TRN2, True),
        (INF1[:5], True),
        (INF1[51:53], True),  # the vendor's example: it needs the chips 12 and 13
        ((INF1[3], INF1[5], INF1[6]), False),
        ((TRN1[1], TRN1[0]), True),
    ],
)
def test_runs_of_cores_are_accepted_as_the_chips_take_them(devices, accepted):
    assert (validate(devices) is None) is accepted


def test_a_refusal_says_the_rule():
    assert "power of two" in validate(TRN1[:6])
    assert "multiple of 4" in validate(TRN1[2:6])
    assert "one contiguous" in validate((TRN1[0], TRN1[2]))


def test_a_share_of_a_core_is_refused_with_the_vendors_reason():
    assert plugin.anyaccel_fractional(TRN1[0]) is Fractional.NO
    assert "programs are compiled for whole cores" in validate(TRN1[:1], units=5_000)


def test_two_workers_get_disjoint_masks():
    masks = [set(env(TRN1[start : start + 8]).set["NEURON_RT_VISIBLE_CORES"].split(",")) for start in (0, 8)]
    assert not masks[0] & masks[1]


def test_a_whole_share_changes_nothing():
    shares = {TRN1[0].id: Share(device=TRN1[0])}
    ctx = EnvContext(devices=TRN1, shares=shares, mask="index")
    assert plugin.anyaccel_env(TRN1[:1], ctx) == env(TRN1[:1])


def test_a_container_gets_the_nodes_of_the_chips_that_hold_the_cores():
    assert plugin.anyaccel_container(INF1[51:53]).nodes == ("/dev/neuron12", "/dev/neuron13")
    assert plugin.anyaccel_container(TRN2[:4]).nodes == ("/dev/neuron0",)
    assert plugin.anyaccel_container(()).nodes == ()
