"""CUDA_VISIBLE_DEVICES, written and read, and shares."""

import ast
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from anyaccel.plugin import Device, EnvContext, Fractional, Share, Term
from anyaccel_nvidia import plugin
from hypothesis import given
from hypothesis import strategies as st

FULL = "GPU-8c7c9c30-f12f-20bf-e14e-d3c4c965af32"
OTHERS = (
    "GPU-7f57f032-34ab-a064-c37c-7a4f75601cc5",
    "GPU-7e3f822b-8c5f-95a5-b379-8dfdeefd7758",
    "GPU-3291dfa4-fcc4-0110-615b-c894a0d7c689",
)
IDS = (FULL, *OTHERS)
FOUR = tuple(
    Device(id=uuid, index=n, model="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30) for n, uuid in enumerate(IDS)
)

VECTORS = {
    "": [],
    "-1": [],
    "0,2,-1,1": [0, 2],
    "0,7,1": [0],
    "0,0": [],
    # A repetition behind a bad entry voids the list, too: PyTorch answers no GPU.
    "1,4,1": [],
    "0,9,9": [],
    "1,x,1": [1],
    f"{OTHERS[0]},GPU-ffffffff-0000-0000-0000-000000000000,{OTHERS[0]}": [],
    "0,1,2,3,0": [],
    " 0 , 1 ": [0, 1],
    "1gpu2,2ampere": [1, 2],
    "1.5": [1],
    "0x1": [0],
    "0;1": [0],
    "0 1": [0],
    "+1": [1],
    "0,,1": [0],
    ",0": [],
    "0,": [0],
    "all": [],
    "none": [],
    "void": [],
    "NoDevFiles": [],
    "3,1,2": [3, 1, 2],
    FULL: [0],
    FULL.lower(): [],
    "GPU-8": [0],
    "GPU-7": [],
    "GPU-7f,GPU-3": [1, 3],
    "GPU-": [],
    "gpu": [],
    f"{FULL},GPU-7,GPU-3": [0],
    f"0,{FULL}": [0],
    f"{FULL},0": [0],
    f"{FULL},{FULL}": [],
    f"{FULL},GPU-8": [],
    f"{OTHERS[2]}, {FULL}": [3, 0],
    "GPU-ffffffff-0000-0000-0000-000000000000": [],
    "MIG-377e0049-554c-540b-93c6-d0976f8426cb": [],
}


@pytest.mark.parametrize(("value", "indexes"), VECTORS.items())
@pytest.mark.filterwarnings("ignore:CUDA_VISIBLE_DEVICES:UserWarning")
def test_a_mask_is_read_as_cuda_reads_it(value, indexes):
    assert plugin.anyaccel_visible({"CUDA_VISIBLE_DEVICES": value}, FOUR) == [IDS[index] for index in indexes]


def test_an_unset_mask_hides_nothing_and_the_containers_variable_is_no_mask():
    assert plugin.anyaccel_visible({}, FOUR) is None
    assert plugin.anyaccel_visible({"NVIDIA_VISIBLE_DEVICES": "none"}, FOUR) is None


def test_numbers_are_nvmls_and_not_positions_in_our_list():
    """Minor numbers and gaps must not matter (microsoft/pai#1667)."""
    # Reversed, so that a position taken for NVML's number names another GPU.
    moved = [replace(device, attributes={"nvml_index": 3 - n}) for n, device in enumerate(FOUR)]
    assert plugin.anyaccel_visible({"CUDA_VISIBLE_DEVICES": "0"}, moved) == [IDS[3]]


@pytest.mark.parametrize(
    ("value", "first"),
    [
        ("MIG-377e0049-554c-540b-93c6-d0976f8426cb", 0),
        ("MIG-f39aa248-6f1b-5769-b119-8d650bb34b27,MIG-377e0049-554c-540b-93c6-d0976f8426cb", 1),
        ("MIG-GPU-7f57f032-34ab-a064-c37c-7a4f75601cc5/9/0", 1),
        ("MIG-f39", 1),
        ("0", 0),
        ("0,1", 0),
        ("1,0", 2),
        ("1", 2),
        ("GPU-8c7c9c30-f12f-20bf-e14e-d3c4c965af32", 2),
        ("GPU-7f57f032-34ab-a064-c37c-7a4f75601cc5", None),
        ("MIG-377e0049-554c-540b-93c6-d0976f8426cb,MIG-377e0049-554c-540b-93c6-d0976f8426cb", None),
        ("MIG-GPU-7f57f032-34ab-a064-c37c-7a4f75601cc5/1/0", None),
    ],
)
@pytest.mark.filterwarnings("ignore:CUDA_VISIBLE_DEVICES:UserWarning")
def test_one_process_sees_one_mig_device(devices_of, value, first):
    devices = devices_of("a100-2gpu-mig-mixed")
    expected = [] if first is None else [devices[first].id]
    assert plugin.anyaccel_visible({"CUDA_VISIBLE_DEVICES": value}, devices) == expected


@pytest.mark.filterwarnings("ignore:CUDA_VISIBLE_DEVICES:UserWarning")
def test_an_index_of_a_gpu_with_mig_and_no_mig_device_names_nothing(devices_of):
    assert plugin.anyaccel_visible({"CUDA_VISIBLE_DEVICES": "0"}, devices_of("a100-1gpu-mig-empty")) == []


def test_indexes_on_a_mixed_machine_need_the_order_variable(devices_of):
    devices = devices_of("mixed-3gpu-modes")
    with pytest.raises(ValueError, match=r"fastest first.*CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        plugin.anyaccel_visible({"CUDA_VISIBLE_DEVICES": "1"}, devices)
    ordered = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert plugin.anyaccel_visible(ordered, devices) == [devices[1].id]
    assert set(plugin.anyaccel_visible({"CUDA_VISIBLE_DEVICES": "2,0,1"}, devices)) == {d.id for d in devices}
    assert plugin.anyaccel_visible({"CUDA_VISIBLE_DEVICES": ""}, devices) == []
    assert plugin.anyaccel_visible({"CUDA_VISIBLE_DEVICES": devices[2].id}, devices) == [devices[2].id]


@pytest.mark.filterwarnings("ignore:CUDA_VISIBLE_DEVICES:UserWarning")
def test_a_gpu_of_another_driver_has_no_cuda_index(machine):
    paths = {
        f"/sys/bus/pci/devices/0000:01:00.0/{name}": {"text": text}
        for name, text in {"vendor": "0x10de", "class": "0x030000", "device": "0x2684"}.items()
    }
    ctx = machine(paths, {"nvml/system": {"error": {"kind": "NVMLError_DriverNotLoaded", "message": "", "value": 9}}})
    devices = plugin.anyaccel_detect(ctx).devices
    assert len(devices) == 1
    assert plugin.anyaccel_visible({"CUDA_VISIBLE_DEVICES": "0"}, devices) == []
    assert "no driver is bound to it" in plugin.anyaccel_validate(Term(names=("GPU",)), devices)
    with pytest.raises(ValueError, match="modprobe nvidia"):
        plugin.anyaccel_env(devices, EnvContext(devices=devices))


@given(st.permutations(range(4)), st.integers(1, 4), st.sampled_from(["id", "index"]))
def test_a_worker_sees_exactly_its_gpus_in_order(order, size, mask):
    chosen = [FOUR[index] for index in order[:size]]
    edits = plugin.anyaccel_env(chosen, EnvContext(devices=FOUR, mask=mask))
    assert plugin.anyaccel_visible(edits.set, FOUR) == [device.id for device in chosen]
    assert edits.set["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert set(edits.set) | edits.unset <= set(plugin.anyaccel_info().env_vars)


@pytest.mark.parametrize("mask", ["id", "index"])
def test_no_device_is_an_explicit_empty_mask(mask):
    edits = plugin.anyaccel_env((), EnvContext(devices=FOUR, mask=mask))
    assert edits.set == {"CUDA_VISIBLE_DEVICES": ""}
    assert plugin.anyaccel_visible(edits.set, FOUR) == []


def test_masks_are_absolute_whatever_the_launcher_inherited():
    ctx = EnvContext(devices=FOUR, environ={"CUDA_VISIBLE_DEVICES": "2,3"}, mask="index")
    assert plugin.anyaccel_env(FOUR[3:], ctx).set["CUDA_VISIBLE_DEVICES"] == "3"


def test_ids_are_written_in_full_and_indexes_are_nvmls():
    ctx = EnvContext(devices=FOUR)
    assert plugin.anyaccel_env(FOUR[:2], ctx).set["CUDA_VISIBLE_DEVICES"] == f"{IDS[0]},{IDS[1]}"
    moved = [replace(device, attributes={"nvml_index": 7 - n}) for n, device in enumerate(FOUR)]
    edits = plugin.anyaccel_env(moved[:2], EnvContext(devices=tuple(moved), mask="index"))
    assert edits.set == {"CUDA_VISIBLE_DEVICES": "7,6", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_a_device_without_uuid_is_masked_by_index(devices_of):
    devices = devices_of("jetson-orin")
    assert plugin.anyaccel_env(devices, EnvContext(devices=devices)).set["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_mig_device_is_masked_by_its_full_id_alone(devices_of):
    devices = devices_of("h100-1gpu-mig")
    for mask in ("id", "index"):
        ctx = EnvContext(devices=devices, mask=mask)
        assert plugin.anyaccel_env(devices[1:2], ctx).set["CUDA_VISIBLE_DEVICES"] == devices[1].id


def test_mig_devices_are_never_given_together(devices_of):
    devices = devices_of("a100-2gpu-mig-mixed")
    term = Term(names=("GPU",), units=20_000)
    # Two MIG devices, and a MIG device beside a whole GPU.
    for pair in (devices[:2], devices[1:]):
        assert "1 MIG device per worker" in plugin.anyaccel_validate(term, pair)
        with pytest.raises(ValueError, match="one process sees one MIG device"):
            plugin.anyaccel_env(pair, EnvContext(devices=devices))
    assert plugin.anyaccel_validate(term, FOUR[:2]) is None


def share(device, units, memory_bytes=None):
    return {device.id: Share(device=device, units=units, memory_bytes=memory_bytes)}


def test_a_share_by_agreement_caps_the_frameworks_that_take_everything():
    edits = plugin.anyaccel_env(FOUR[:1], EnvContext(devices=FOUR, shares=share(FOUR[0], 2_500, 20 << 30)))
    assert edits.set == {
        "CUDA_VISIBLE_DEVICES": IDS[0],
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.25",
        "CUPY_GPU_MEMORY_LIMIT": str(20 << 30),
        "FLAGS_gpu_memory_limit_mb": "20480",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
    assert edits.limited_by == ("JAX", "CuPy", "PaddlePaddle"), "growth is no limit"
    assert edits.unset == {"XLA_CLIENT_MEM_FRACTION"}, "JAX refuses to start with both"
    assert edits.memory_by == edits.compute_by == ""


@pytest.mark.parametrize("allocator", ["platform", "Platform", "cuda_async", "vmm"])
def test_a_cap_that_a_framework_ignores_is_not_told_as_one(allocator):
    ctx = EnvContext(
        devices=FOUR,
        shares=share(FOUR[0], 2_500, 20 << 30),
        environ={"XLA_PYTHON_CLIENT_ALLOCATOR": allocator, "CUPY_GPU_MEMORY_LIMIT": "10%"},
    )
    edits = plugin.anyaccel_env(FOUR[:1], ctx)
    assert edits.limited_by == ("CuPy", "PaddlePaddle")
    assert edits.set["CUPY_GPU_MEMORY_LIMIT"] == str(8 << 30), "the tighter one of the user, of all memory"


def test_a_share_beside_another_gpu_is_not_capped():
    """A cap limits a program on each of its GPUs."""
    edits = plugin.anyaccel_env(FOUR[:2], EnvContext(devices=FOUR, shares=share(FOUR[0], 2_500, 20 << 30)))
    assert set(edits.set) == {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
    assert edits.limited_by == ()


def test_jax_reads_the_cap():
    """The real jaxlib reads its options without a GPU."""
    pytest.importorskip("jaxlib", reason="JAX is not installed")
    edits = plugin.anyaccel_env(FOUR[:1], EnvContext(devices=FOUR, shares=share(FOUR[0], 2_500, 20 << 30)))
    source = "from jaxlib import xla_client; print(xla_client.generate_pjrt_gpu_plugin_options())"
    environ = {**os.environ, **edits.set, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    for name in edits.unset:
        environ.pop(name, None)
    done = subprocess.run([sys.executable, "-c", source], env=environ, capture_output=True, text=True, check=True)
    options = ast.literal_eval(done.stdout)
    assert (options["memory_fraction"], options["preallocate"]) == (0.25, False)


def test_a_whole_gpu_is_not_capped():
    edits = plugin.anyaccel_env(FOUR[:1], EnvContext(devices=FOUR, shares=share(FOUR[0], 10_000, 80 << 30)))
    assert set(edits.set) == {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}


@pytest.mark.parametrize(
    ("environ", "value"),
    [
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".2"}, "0.2"),
        ({"XLA_CLIENT_MEM_FRACTION": "0.1"}, "0.1"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}, "0.3333"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "much"}, "0.3333"),
    ],
)
def test_a_tighter_cap_of_the_user_stays(environ, value):
    device = replace(FOUR[0], memory_bytes=None)
    ctx = EnvContext(devices=(device,), shares=share(device, 3_333), environ=environ)
    assert plugin.anyaccel_env([device], ctx).set["XLA_PYTHON_CLIENT_MEM_FRACTION"] == value


def served(device):
    return replace(device, attributes={"mps_pipe": "/run/mps", "mps_protocol": 2, "compute_mode": "exclusive_process"})


@pytest.mark.parametrize(
    ("units", "inherited", "threads"), [(2_500, None, "25"), (3_333, None, "33"), (5_000, "50", "25"), (100, None, "1")]
)
def test_an_mps_daemon_holds_a_worker_to_its_share(units, inherited, threads):
    device = served(FOUR[1])
    environ = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": inherited} if inherited else {}
    ctx = EnvContext(devices=(device,), shares=share(device, units, 20 << 30), environ=environ, mask="index")
    edits = plugin.anyaccel_env([device], ctx)
    assert edits.memory_by == edits.compute_by == "CUDA MPS"
    assert edits.set["CUDA_MPS_PIPE_DIRECTORY"] == "/run/mps"
    assert edits.set["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == threads
    assert edits.set["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=20480M"
    assert edits.set["CUDA_VISIBLE_DEVICES"] == IDS[1], "the daemon may have renumbered the indexes"


@pytest.mark.parametrize(
    ("environ", "limit"),
    [
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=5G", "CUDA_VISIBLE_DEVICES": IDS[1]}, "0=5120M"),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=30G", "CUDA_VISIBLE_DEVICES": IDS[1]}, "0=20480M"),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0=5G, {IDS[1]}=512M"}, "0=512M"),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=5G,1=6G"}, "0=6144M"),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=5G"}, "0=20480M"),
        ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "1=0G,=,1=5,1=9T,\n"}, "0=20480M"),
    ],
)
def test_a_tighter_limit_under_mps_stays(environ, limit):
    device = served(replace(FOUR[1], index=1))
    ctx = EnvContext(devices=(device,), shares=share(device, 2_500, 20 << 30), environ=environ)
    assert plugin.anyaccel_env([device], ctx).set["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == limit


def test_an_exclusive_gpu_is_given_whole_only():
    alone = replace(FOUR[0], attributes={"compute_mode": "exclusive_process"})
    half = Term(names=("GPU",), units=5_000)
    assert plugin.anyaccel_fractional(alone) is Fractional.NO
    assert "EXCLUSIVE_PROCESS" in plugin.anyaccel_validate(half, [alone])
    assert plugin.anyaccel_validate(Term(names=("GPU",)), [alone]) is None
    assert plugin.anyaccel_fractional(served(FOUR[0])) is Fractional.SHARED
    assert plugin.anyaccel_validate(half, [served(FOUR[0])]) is None
    assert plugin.anyaccel_validate(half, FOUR[:1]) is None


def test_a_prohibited_gpu_admits_no_process(devices_of):
    device = devices_of("mixed-3gpu-modes")[1]
    assert not device.usable
    assert plugin.anyaccel_fractional(device) is Fractional.NO
    assert "PROHIBITED" in plugin.anyaccel_validate(Term(names=("GPU",), units=5_000), [device])


def test_an_mps_share_is_at_least_a_percent():
    assert "0.01" in plugin.anyaccel_validate(Term(names=("GPU",), units=99), [served(FOUR[0])])
    assert plugin.anyaccel_validate(Term(names=("GPU",), units=99), FOUR[:1]) is None


@pytest.mark.parametrize(
    ("value", "ids", "message"),
    [
        ("0,0", 0, "names a GPU twice, which hides every GPU"),
        ("0,1,", 2, "leaves 2 of its 3 entries visible: CUDA stops at the first one that it does not know"),
        ("1,9,0", 1, "leaves 1 of its 3 entries visible"),
        ("all", 0, "that word belongs to NVIDIA_VISIBLE_DEVICES"),
    ],
)
def test_what_cuda_takes_without_a_word_gets_a_warning(value, ids, message):
    with pytest.warns(UserWarning, match=message):
        assert len(plugin.anyaccel_visible({"CUDA_VISIBLE_DEVICES": value}, FOUR)) == ids


@pytest.mark.parametrize("value", ["", " ", "-1", "NoDevFiles"])
def test_what_hides_every_gpu_on_purpose_gets_none(value):
    assert plugin.anyaccel_visible({"CUDA_VISIBLE_DEVICES": value}, FOUR) == []
