"""Masks and bounds: written for each legal set of chips, and read back."""

from dataclasses import replace
from itertools import combinations

import anyaccel
import pytest
from anyaccel.model import Inventory
from anyaccel.plugin import EnvContext, Term
from anyaccel_tpu import plugin
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lengths import length

HOSTS = [
    ("TPU-V2", 4),
    ("TPU-V4", 4),
    ("TPU-V5LITEPOD", 1),
    ("TPU-V5LITEPOD", 8),
    ("TPU-V5P", 2),
    ("TPU-V5P", 4),
    ("TPU-V6E", 8),
    ("TPU-V7X", 4),
]
GKE = {
    "TPU_ACCELERATOR_TYPE": "v6e-16",
    "TPU_TOPOLOGY": "4x4",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "job-0-0.svc,job-0-1.svc,job-0-2.svc,job-0-3.svc",
    "TPU_HOST_BOUNDS": "2,2,1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "TPU_SKIP_MDS_QUERY": "true",
    "TPU_RUNTIME_METRICS_PORTS": "8431,8432,8433,8434",
}


def _pick(devices, indexes):
    return [devices[index] for index in indexes]


def _apply(environ, edits):
    return {name: value for name, value in {**environ, **edits.set}.items() if name not in edits.unset}


def _validate(devices):
    return plugin.anyaccel_validate(Term(names=("TPU",), units=10_000 * len(devices)), devices)


@pytest.mark.parametrize(
    ("host", "indexes", "mask", "bounds"),
    [
        (("TPU-V4", 4), [0], "0", "1,1,1"),
        (("TPU-V4", 4), [3], "3", "1,1,1"),
        (("TPU-V4", 4), [0, 1], "0,1", "1,2,1"),
        (("TPU-V4", 4), [2, 3], "2,3", "1,2,1"),
        (("TPU-V5P", 2), [1], "1", "1,1,1"),
        (("TPU-V6E", 8), [7], "7", "1,1,1"),
        (("TPU-V6E", 8), [0, 1, 2, 3], "0,1,2,3", "1,4,1"),
        (("TPU-V6E", 8), [4, 5, 6, 7], "4,5,6,7", "1,4,1"),
        # tpu7x: numbers count chips, although JAX shows two devices per chip.
        (("TPU-V7X", 4), [2, 3], "2,3", "1,2,1"),
    ],
)
def test_a_part_of_a_host_gets_mask_and_bounds_under_both_names(chips, host, indexes, mask, bounds):
    devices = chips(*host)
    edits = plugin.anyaccel_env(_pick(devices, indexes), EnvContext(devices=devices))
    port = str(8471 + indexes[0])
    assert edits.set == {
        "TPU_VISIBLE_CHIPS": mask,
        "TPU_VISIBLE_DEVICES": mask,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
        "TPU_CHIPS_PER_HOST_BOUNDS": bounds,
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_HOST_BOUNDS": "1,1,1",
        "CLOUD_TPU_TASK_ID": "0",
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_PROCESS_PORT": port,
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_RUNTIME_METRICS_PORTS": str(8431 + indexes[0]),
    }
    assert edits.memory_by == edits.compute_by == ""


@pytest.mark.parametrize(
    ("tag", "total", "indexes", "words"),
    [
        ("TPU-V4", 4, [0, 1, 2], "one job can use 1, 2, 4 or 8 TPUs of a machine (got 3)"),
        ("TPU-V6E", 8, [0, 1, 2, 3, 4], "(got 5)"),
        ("TPU-V6E", 8, [0, 1, 2, 3, 4, 5], "(got 6)"),
        ("TPU-V6E", 8, [0, 1, 2, 3, 4, 5, 6], "(got 7)"),
        ("TPU-V6E", 8, [0, 1], "a process takes 1, 4 or 8 chips of a TPU host with 8, not 2"),
        ("TPU-V4", 4, [1, 2], "2 chips of a TPU host with 4 must be 0,1 or 2,3 (got 1,2)"),
        ("TPU-V4", 4, [0, 3], "2 chips of a TPU host with 4 must be 0,1 or 2,3 (got 0,3)"),
        ("TPU-V6E", 8, [0, 2, 4, 6], "4 chips of a TPU host with 8 must be 0,1,2,3 or 4,5,6,7 (got 0,2,4,6)"),
        ("TPU-V6E", 8, [2, 3, 4, 5], "must be 0,1,2,3 or 4,5,6,7"),
        ("TPU-V4", 3, [0, 1], "a process takes 1 chip of a TPU host with 3, not 2"),
        ("TPU-V4", 3, [0, 1, 2], "(got 3)"),
    ],
)
def test_other_sets_are_refused_with_the_rule(chips, tag, total, indexes, words):
    devices = chips(tag, total)
    picked = _pick(devices, indexes)
    assert words in _validate(picked)
    with pytest.raises(ValueError, match="TPU"):
        plugin.anyaccel_env(picked, EnvContext(devices=devices))


@pytest.mark.parametrize(("tag", "total", "count"), [("TPU-V4", 4, 7), ("TPU-V6E", 8, 11)])
def test_number_of_legal_sets(chips, tag, total, count):
    devices = chips(tag, total)
    legal = [
        picked for size in range(1, total + 1) for picked in combinations(devices, size) if _validate(picked) is None
    ]
    assert len(legal) == count


@pytest.mark.parametrize(("tag", "total"), HOSTS)
def test_all_chips_remove_what_restricts(chips, tag, total):
    devices = chips(tag, total)
    environ = {"TPU_VISIBLE_CHIPS": "0", "TPU_VISIBLE_DEVICES": "0", "TPU_VISIBLE_DEVICE_PATHS": "/dev/accel0"}
    edits = plugin.anyaccel_env(devices, EnvContext(devices=devices, environ=environ))
    assert edits.set == {}
    assert _apply(environ, edits) == {}


@pytest.mark.parametrize("bounds", ["1,1,1", "1,2,1"])
def test_all_chips_after_a_part_leave_nothing_of_the_part(chips, bounds):
    devices = chips("TPU-V4", 4)
    part = plugin.anyaccel_env(devices[:1], EnvContext(devices=devices))
    environ = {"PATH": "/bin", **part.set, "TPU_CHIPS_PER_HOST_BOUNDS": bounds}
    edits = plugin.anyaccel_env(devices, EnvContext(devices=devices, environ=environ))
    assert _apply(environ, edits) == {"PATH": "/bin"}


def test_all_chips_keep_what_gke_says_about_the_slice(chips):
    devices = chips("TPU-V6E", 4)
    edits = plugin.anyaccel_env(devices, EnvContext(devices=devices, environ=GKE))
    assert _apply(GKE, edits) == GKE


def test_four_chip_bounds_restrict_a_host_of_eight(chips):
    devices = chips("TPU-V5LITEPOD", 8)
    # The bounds of a half, left over from an earlier worker in the same process.
    environ = {"TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}
    edits = plugin.anyaccel_env(devices, EnvContext(devices=devices, environ=environ))
    assert _apply(environ, edits) == {}


def test_a_part_of_one_host_of_a_slice_leaves_the_slice(detected):
    devices = detected("v6e-16-gke-worker-0")
    # Variables of a multislice job, which a part of a host cannot be in.
    environ = {**GKE, "MEGASCALE_COORDINATOR_ADDRESS": "job-0-0.svc", "HOST_BOUNDS": "2,2,1"}
    edits = plugin.anyaccel_env(devices[:2], EnvContext(devices=devices, environ=environ))
    after = _apply(environ, edits)
    assert after["TPU_SKIP_MDS_QUERY"] == "1"
    assert after["TPU_WORKER_HOSTNAMES"] == "localhost"
    assert not {"MEGASCALE_COORDINATOR_ADDRESS", "HOST_BOUNDS"} & after.keys()
    for name in ("TPU_HOST_BOUNDS", "TPU_PROCESS_BOUNDS"):
        assert after[name] == "1,1,1"


def test_disjoint_parts_share_no_port(chips):
    devices = chips("TPU-V6E", 8)
    ports = set()
    for device in devices:
        edits = plugin.anyaccel_env([device], EnvContext(devices=devices))
        ports |= {edits.set["TPU_PROCESS_PORT"], edits.set["TPU_RUNTIME_METRICS_PORTS"]}
    # Two ports per chip; 8081 and 8482 belong to JAX.
    assert len(ports) == 16
    assert not ports & {"8081", "8482"}


def test_no_chips_hide_all(chips):
    devices = chips("TPU-V4", 4)
    edits = plugin.anyaccel_env([], EnvContext(devices=devices))
    assert edits.set == {"TPU_VISIBLE_CHIPS": "", "TPU_VISIBLE_DEVICES": ""}
    assert plugin.anyaccel_visible(edits.set, devices) == []


@pytest.mark.parametrize("tag", ["TPU8i", "TPU8t"])
def test_a_generation_without_published_bounds_goes_as_a_whole_host(tree, tag):
    for index in range(4):
        tree.pci(f"0000:00:0{index + 4}.0", "0x0083" if tag == "TPU8i" else "0x007c")
        tree.node(f"/dev/accel{index}")
    devices = tree.detect().devices
    assert _validate(devices) is None
    assert _validate(devices[:1]) == f"the bounds of {tag} are not published: take all 4 chips of the host"


def test_fractions_are_refused_with_the_reason(chips):
    # A chip has no partitions, so half a chip is refused.
    reason = plugin.anyaccel_validate(Term(names=("TPU",), units=5000), chips("TPU-V4", 4)[:1])
    assert "a chip is opened by one process at a time" in reason
    assert "1, 2, 4 or 8" in reason
    assert not plugin.anyaccel_fractional(chips("TPU-V4", 4)[0])


@pytest.mark.parametrize(
    ("environ", "indexes"),
    [
        ({}, None),
        ({"TPU_VISIBLE_CHIPS": ""}, []),
        ({"TPU_VISIBLE_DEVICES": " "}, []),
        ({"TPU_VISIBLE_CHIPS": "2"}, [2]),
        ({"TPU_VISIBLE_DEVICES": "2"}, [2]),
        ({"TPU_VISIBLE_CHIPS": "1", "TPU_VISIBLE_DEVICES": "2"}, [1]),
        # An empty newer name does not hide: the older name counts.
        ({"TPU_VISIBLE_CHIPS": "", "TPU_VISIBLE_DEVICES": "2"}, [2]),
        ({"TPU_VISIBLE_CHIPS": " 0 , 1 "}, [0, 1]),
        ({"TPU_VISIBLE_CHIPS": "3,2"}, [2, 3]),
        ({"TPU_VISIBLE_CHIPS": "1,1"}, [1]),
        ({"TPU_VISIBLE_CHIPS": "1,9"}, [1]),
        ({"TPU_VISIBLE_CHIPS": "0", "TPU_VISIBLE_DEVICE_PATHS": "/dev/accel3, /dev/accel1"}, [1, 3]),
        ({"TPU_VISIBLE_DEVICE_PATHS": ""}, None),
        ({"TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1"}, None),
    ],
)
def test_visible_reads_masks_as_the_runtime_does(chips, environ, indexes):
    devices = chips("TPU-V4", 4)
    expected = None if indexes is None else [devices[index].id for index in indexes]
    assert plugin.anyaccel_visible(environ, devices) == expected


@pytest.mark.parametrize("value", ["all", "0,,1", "0,", "-1", "0-3", "0.5", "²", "/dev/accel0"])
def test_visible_refuses_what_is_no_list_of_numbers(chips, value):
    with pytest.raises(ValueError, match="TPU_VISIBLE_CHIPS must be chip numbers"):
        plugin.anyaccel_visible({"TPU_VISIBLE_CHIPS": value}, chips("TPU-V4", 4))


@pytest.mark.parametrize(("tag", "total"), HOSTS)
def test_reading_back_gives_exactly_the_chips_for_every_subset(chips, tag, total):
    devices = chips(tag, total)
    for size in range(total + 1):
        for picked in combinations(devices, size):
            if _validate(picked) is None:
                _reads_back(devices, picked, {})


def _reads_back(devices, picked, environ):
    edits = plugin.anyaccel_env(picked, EnvContext(devices=devices, environ=environ))
    assert {*edits.set, *edits.unset} <= set(plugin.anyaccel_info().env_vars)
    assert not set(edits.set) & edits.unset
    seen = plugin.anyaccel_visible(_apply(environ, edits), devices)
    assert [device.id for device in devices if seen is None or device.id in seen] == [device.id for device in picked]


_VALUES = st.sampled_from(["", "0", "1,2", "1,1,1", "2,2,1", "/dev/accel0", "localhost", "8471", "junk", "true"])


@settings(
    max_examples=length(20, 60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    host=st.sampled_from(HOSTS),
    bits=st.integers(min_value=0, max_value=255),
    environ=st.dictionaries(st.sampled_from(plugin.anyaccel_info().env_vars), _VALUES),
    backwards=st.booleans(),
)
def test_reading_back_works_on_top_of_any_environment(chips, host, bits, environ, backwards):
    devices = chips(*host)
    picked = [device for device in devices if bits >> device.index & 1]
    if _validate(picked) is not None:
        return
    edits = plugin.anyaccel_env(picked[::-1] if backwards else picked, EnvContext(devices=devices))
    assert edits == plugin.anyaccel_env(picked, EnvContext(devices=devices))
    _reads_back(devices, picked, environ)


def _scheduler(devices):
    """The core's scheduler over these chips, with this plug-in's rules."""
    named = tuple(
        replace(
            device,
            vendor="tpu",
            resource="TPU",
            kind="tpu",
            tags=tuple(plugin.anyaccel_tags(device)),
            order=device.index,
        )
        for device in devices
    )
    return anyaccel.Scheduler(Inventory(machine="test", devices=named), plugin.anyaccel_validate)


@pytest.mark.parametrize(
    ("name", "requests", "expected"),
    [
        ("v3-8", ["TPU:1", "TPU:2", "TPU:1"], [[0], [2, 3], [1]]),
        ("v3-8", ["TPU:2", "TPU:2"], [[0, 1], [2, 3]]),
        # Chip 2 is gone, so 2,3 is no pair any more.
        ("v4-8-node-gone", ["TPU:2", "TPU:1"], [[0, 1], [3]]),
        ("v5litepod-8", ["TPU:1", "TPU:4", "TPU:1"], [[0], [4, 5, 6, 7], [1]]),
        ("v5litepod-8", ["TPU:8"], [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_placement_finds_the_legal_rectangles(detected, name, requests, expected):
    scheduler = _scheduler(detected(name))
    assert [[device.index for device in scheduler.allocate(text).devices] for text in requests] == expected


def test_placement_never_splits_a_rectangle(detected):
    verdict = _scheduler(detected("v4-8-node-gone")).why("TPU:3")
    assert not verdict.ever_fits
    assert str(verdict.nearest) == "TPU:2"
