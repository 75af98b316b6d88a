"""The visibility variables, by the runtime's own rules."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import pytest
from anyaccel.plugin import Device, EnvContext, Share
from anyaccel.vendors.contract import env_faults, visible_faults
from anyaccel_amd import plugin
from hypothesis import given
from hypothesis import strategies as st

ALL = ["gpu0", "gpu1", "gpu2", "gpu3"]
HIP, CUDA, ROCR, OPENCL, *_ = plugin.anyaccel_info().env_vars


def seen(environ, devices):
    return plugin.anyaccel_visible(environ, devices)


def ids(text):
    return [f"gpu{number}" for number in text]


def apply(environ, edits):
    return {**{name: value for name, value in environ.items() if name not in edits.unset}, **edits.set}


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        ("", ""),
        ("-1", ""),
        ("0,2", "02"),
        ("2,0", "20"),
        (" 0 , 2 ", "02"),
        ("0x1", "1"),
        # Octal for 8, like C's strtol with base 0.
        ("010", ""),
        ("01", "1"),
        ("+1", "1"),
        ("0x", ""),
        ("08", ""),
        ("1 2", ""),
        ("0,9,1", "0"),
        ("0,-1,1", "0"),
        ("0,0,1", "0"),
        ("0,x,1", "0"),
        ("0,1,", "01"),
        ("0,1,2,3,,", "0123"),
        ("9,,1", ""),
        ("GPU-1901ead3a2ecd4a6", "0"),
        ("gpu-1901EAD3A2ECD4A6,1", "01"),
        ("GPU-5", "1"),
        ("GPU-", ""),
        # Two partitions share this id: the runtime below HIP takes neither, HIP the first.
        ("GPU-e3", ""),
        ("GPU-e3aa140f9a5f9e31", ""),
        ("GPU-XX", ""),
        ("GPU-1901ead3a2ecd4a60", ""),
        ("1901ead3-0000-1000-80d4-a2ecd4a60000", ""),
    ],
)
def test_rocr_follows_the_runtime(gpus, value, visible):
    assert seen({ROCR: value}, gpus) == ids(visible)


@pytest.mark.parametrize("value", ["0,,1", ",0", ",", " ", "0, ,1"])
def test_rocr_with_an_empty_entry_ends_every_program(gpus, value):
    with pytest.raises(ValueError, match=r"ROCR_VISIBLE_DEVICES must be .* ends the process on an empty entry"):
        seen({ROCR: value}, gpus)


@pytest.mark.parametrize("name", [HIP, CUDA])
@pytest.mark.parametrize(
    ("value", "visible"),
    [
        ("-1", ""),
        ("1", "1"),
        ("2,0", "20"),
        ("0,9,1", "0"),
        ("0, 1", "0"),
        ("01", ""),
        ("+1", ""),
        ("0x1", ""),
        ("0,", "0"),
        (",0", ""),
        (",", ""),
        (" ", ""),
        ("0,0,1", "01"),
        ("GPU-1901ead3a2ecd4a6", "0"),
        ("GPU-5,0", "10"),
        ("GPU-e3", "2"),
        ("GPU-", "0"),
        ("GPU-1901EAD3A2ECD4A6", ""),
        ("gpu-1901ead3a2ecd4a6", ""),
        (" GPU-1901ead3a2ecd4a6", ""),
        ("GPU-XX", ""),
        ("NoDevFiles", ""),
    ],
)
def test_hip_and_cuda_follow_hip(gpus, name, value, visible):
    assert seen({name: value}, gpus) == ids(visible)


def test_a_device_without_id_goes_by_its_placeholder_in_hip_alone():
    devices = [Device(id="a", index=0, model="", attributes={"unique_id": "1"}), Device(id="b", index=1, model="")]
    assert seen({HIP: "GPU-XX"}, devices) == ["b"]
    assert seen({ROCR: "GPU-XX"}, devices) == []


@pytest.mark.parametrize(
    ("environ", "visible"),
    [
        ({}, None),
        ({HIP: ""}, None),
        ({HIP: "", CUDA: ""}, None),
        ({CUDA: ""}, None),
        # HIP skips its own variable if empty, and reads CUDA's.
        ({HIP: "", CUDA: "1"}, "1"),
        ({HIP: "1", CUDA: "0"}, "1"),
        ({CUDA: "-1"}, ""),
        ({ROCR: "2,3"}, "23"),
        ({ROCR: "2,3", HIP: "0,1"}, "23"),
        ({ROCR: "2,3", HIP: "1"}, "3"),
        # The same numbers in both layers: HIP counts from 0 again, and has no 2.
        ({ROCR: "2,3", HIP: "2,3"}, ""),
        ({ROCR: "2", HIP: "0,1"}, "2"),
        ({ROCR: "3,1", CUDA: "1,0"}, "13"),
        ({ROCR: "2,3", HIP: ""}, "23"),
        ({ROCR: "", HIP: "0"}, ""),
        ({OPENCL: "1"}, None),
    ],
)
def test_layers_stack_as_the_runtime_stacks_them(gpus, environ, visible):
    assert seen(environ, gpus) == (None if visible is None else ids(visible))


def test_a_slurm_step_sees_its_gpus(detected):
    devices = detected("mi210-slurm-step").devices
    assert seen({ROCR: "2,3", OPENCL: "2,3"}, devices) == ["amd-0000:03:00.0", "amd-0000:26:00.0"]


def test_the_mask_is_written_for_hip_and_opencl_and_taken_from_below(gpus):
    edits = plugin.anyaccel_env([gpus[2], gpus[0]], EnvContext(devices=tuple(gpus), environ={CUDA: "5"}))
    assert edits.set == {HIP: "2,0", OPENCL: "2,0"}
    assert edits.unset == {ROCR, CUDA}
    assert edits.memory_by == edits.compute_by == ""


def test_frameworks_are_capped_at_a_share(gpus):
    device = replace(gpus[1], memory_bytes=48 << 30)
    share = Share(device=device, units=5_000, memory_bytes=24 << 30)
    edits = plugin.anyaccel_env([device], EnvContext(devices=tuple(gpus), shares={device.id: share}))
    assert edits.set == {
        HIP: "1",
        OPENCL: "1",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
        "CUPY_GPU_MEMORY_LIMIT": str(share.memory_bytes),
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
    assert (edits.limited_by, edits.memory_by, edits.compute_by) == (("JAX", "CuPy"), "", "")
    assert edits.memory_regions == {}, "these have no PCI address"


@pytest.mark.parametrize(
    ("units", "integrated", "named"), [(5_000, None, True), (5_000, True, False), (10_000, None, False)]
)
def test_the_kernel_is_told_what_it_calls_the_memory_of_a_share(gpus, units, integrated, named):
    device = replace(gpus[1], pci_bus_id="0000:03:00.0", attributes={"integrated": integrated})
    share = Share(device=device, units=units)
    edits = plugin.anyaccel_env([device], EnvContext(devices=tuple(gpus), shares={device.id: share}))
    assert edits.memory_regions == ({device.id: "drm/0000:03:00.0/vram"} if named else {})


def test_nothing_is_hidden_by_an_empty_text(gpus):
    edits = plugin.anyaccel_env([], EnvContext(devices=tuple(gpus)))
    assert edits.set == {HIP: "-1", OPENCL: "-1", ROCR: ""}
    assert seen(edits.set, gpus) == []


def test_a_rival_that_differs_is_taken_away(gpus):
    environ = {CUDA: "0,1"}
    edits = plugin.anyaccel_env([gpus[1]], EnvContext(devices=tuple(gpus), environ=environ))
    assert apply(environ, edits) == {HIP: "1", OPENCL: "1"}


def test_the_rival_belongs_to_the_other_vendor_where_its_devices_are(detected):
    found = detected("rx7900xtx-beside-cuda").devices
    for devices in ([], [found[0]]):
        edits = plugin.anyaccel_env(devices, EnvContext(devices=found, environ={CUDA: "-1"}))
        assert CUDA not in edits.set
        assert CUDA not in edits.unset
        assert seen(apply({CUDA: "-1"}, edits), found) == [device.id for device in devices]


def test_the_mask_below_hip_is_written_on_request(gpus):
    # Programs below HIP, such as OpenMP offloading, read ROCR_VISIBLE_DEVICES alone.
    environ = {"ANYACCEL_AMD_MASK": "rocr", CUDA: "0"}
    edits = plugin.anyaccel_env([gpus[3], gpus[1]], EnvContext(devices=tuple(gpus), environ=environ))
    assert edits.set == {ROCR: "3,1", HIP: "0,1", OPENCL: "0,1"}
    assert seen(apply(environ, edits), gpus) == ["gpu3", "gpu1"]


def test_an_unknown_way_to_mask_is_refused(gpus):
    with pytest.raises(ValueError, match=r"ANYACCEL_AMD_MASK must be 'hip' or 'rocr' \(got 'cuda'\); unset it"):
        plugin.anyaccel_env(gpus, EnvContext(devices=tuple(gpus), environ={"ANYACCEL_AMD_MASK": "cuda"}))


def test_a_device_without_number_cannot_be_masked_in(detected):
    devices = detected("mi300x-8gpu-driver-missing").devices
    with pytest.raises(ValueError, match="cannot be given to a process: no driver is bound to it"):
        plugin.anyaccel_env(devices[:1], EnvContext(devices=devices))


def test_every_subset_in_every_order_comes_back(gpus):
    ctx = EnvContext(devices=tuple(gpus))
    for count in range(len(gpus) + 1):
        for chosen in itertools.permutations(gpus, count):
            assert seen(plugin.anyaccel_env(chosen, ctx).set, gpus) == [device.id for device in chosen]


RIVALS = st.fixed_dictionaries(
    {},
    optional={
        HIP: st.sampled_from(["", "0", "7,6", "-1"]),
        CUDA: st.sampled_from(["", "0,1", "-1", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"]),
        ROCR: st.sampled_from(["", "2,3", "0,,1"]),
        OPENCL: st.sampled_from(["0", "2,3"]),
        "ANYACCEL_AMD_MASK": st.sampled_from(["hip", "rocr"]),
    },
)


@given(data=st.data(), environ=RIVALS)
def test_visible_is_the_inverse_of_env_whatever_the_parent_had(data, environ):
    devices = [
        Device(id=f"d{number}", index=number, model="", attributes={"unique_id": "e3aa140f9a5f9e31"})
        for number in range(data.draw(st.integers(1, 64)))
    ]
    chosen = data.draw(st.lists(st.sampled_from(devices), unique_by=lambda device: device.id))
    edits = plugin.anyaccel_env(chosen, EnvContext(devices=tuple(devices), environ=environ))
    assert list(env_faults(edits, {"info": plugin.anyaccel_info()})) == []
    assert seen(apply(environ, edits), devices) == [device.id for device in chosen]


@given(value=st.text(alphabet="0123456789,-+ xGPUe3a", max_size=12), name=st.sampled_from([HIP, CUDA, ROCR]))
def test_any_value_is_answered_or_refused_in_one_sentence(value, name):
    devices = [Device(id=f"d{n}", index=n, model="", attributes={"unique_id": f"e3{n:014x}"}) for n in range(5)]
    # The one case in which ROCm ends the process instead of hiding devices.
    if name == ROCR and value and not value.partition(",")[0].strip():
        with pytest.raises(ValueError, match="ends the process on an empty entry"):
            seen({name: value}, devices)
        return
    with contextlib.suppress(ValueError):
        visible = seen({name: value}, devices)
        assert visible is None or list(visible_faults(visible, {"devices": devices})) == []


@pytest.mark.parametrize("machine", ["mi210-8gpu-two-hives", "mi300x-8gpu-cpx", "mi300x-8gpu-two-lost", "mi300a-4gpu"])
def test_each_device_of_a_machine_can_be_masked_alone(detected, machine):
    devices = detected(machine).devices
    for device in devices:
        edits = plugin.anyaccel_env([device], EnvContext(devices=devices))
        assert seen(edits.set, devices) == [device.id]


def test_devices_without_number_do_not_shift_the_others(recorded):
    from anyaccel_testing import context

    changes = {"/sys/class/kfd/kfd/topology/nodes/5": None}
    found = plugin.anyaccel_detect(context(recorded("mi300x-8gpu", changes)))
    assert found is not None
    assert seen({HIP: "6"}, found.devices) == ["amd-0000:e5:00.0"]
    assert seen({HIP: "7"}, found.devices) == []
