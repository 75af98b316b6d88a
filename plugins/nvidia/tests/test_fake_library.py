"""NVIDIA's own binding, a real shared library, a real child process: only the hardware is missing."""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import tempfile
import time

import pytest
from anyaccel.plugin import Fractional, Health
from anyaccel_nvidia import plugin
from anyaccel_testing import context

GIB = 1 << 30


def uuid(index):
    return f"GPU-{index:08x}-1111-2222-3333-444444444444"


def gpu(index, **changes):
    answers = {
        "uuid": uuid(index),
        "name": "NVIDIA H100 80GB HBM3",
        "bus": f"00000000:{index + 1:02X}:00.0",
        "pci": "0x233010de",
        "minor": index,
        "memory": f"{80 * GIB}/{2 * GIB}",
        "mode": 0,
        "cc": "9 0",
        "mig": "0 0",
        "rows": "0 0 0 0",
        "persistence": 1,
        "util": 25,
        "temp": 41,
        "power": 69850,
        "procs": f"4242:{2 * GIB} 4343:0",
        **changes,
    }
    return {f"gpu.{index}.{key}": value for key, value in answers.items() if value is not None}


def system(count, **changes):
    return {"driver": "590.48.01", "cuda": 13010, "count": count, **changes}


def address(index):
    return f"0000:{index + 1:02x}:00.0"


def test_one_gpu_with_all_its_facts(live):
    live.card(address(0), minor=0)
    measured = {"clock.1": 1980, "clock.2": 2619, "ecc.0.0": 5, "ecc.1.0": 1, "ecc.0.1": 77}
    answer = live.run(system(1) | gpu(0, fabric="3 7", **measured))
    (device,) = answer["detected"].devices
    assert answer["detected"].driver_version == "590.48.01"
    assert (device.id, device.index, device.model) == (uuid(0), 0, "NVIDIA H100 80GB HBM3")
    assert (device.memory_bytes, device.pci_bus_id, device.numa_node) == (80 * GIB, address(0), 1)
    assert (device.health, device.nodes) == (Health.HEALTHY, ("/dev/nvidia0",))
    assert device.attributes == {
        "nvml_index": 0,
        "pci_device": "2330",
        "compute_capability": "9.0",
        "cuda_version": "13.1",
        "fabric_cluster": "ab" * 16,
        "fabric_clique": 7,
    }
    assert answer["stats"][uuid(0)] == {
        "memory_used_bytes": 2 * GIB,
        "utilization": 0.25,
        "temperature_celsius": 41,
        "power_watts": 69.85,
        "clock_hz": 1_980_000_000,
        "memory_clock_hz": 2_619_000_000,
        "ecc_errors_corrected": 5,
        "ecc_errors_uncorrected": 1,
        "health": "healthy",
        "processes": [{"pid": 4242, "memory_bytes": 2 * GIB}, {"pid": 4343, "memory_bytes": 0}],
    }
    assert live.log.read_text().count("init") == 1, "init once per process, and never a shutdown"


def test_a_recording_made_on_the_way_replays_the_same(live):
    live.card(address(0), minor=0)
    live.card(address(1), minor=1)
    answer = live.run(system(2) | gpu(0) | gpu(1, handle="!15"))
    replayed = context(answer["recording"])
    assert plugin.anyaccel_detect(replayed) == answer["detected"]


def test_eight_gpus_behind_switches_and_bridges(live):
    answers = system(8)
    for index in range(8):
        live.card(address(index), minor=index)
        answers |= gpu(index) | {f"gpu.{index}.link.{link}": "switch" for link in range(18 if index < 6 else 0)}
    # GPUs 6 and 7 have two direct links to each other, and none to a switch.
    answers |= {"gpu.6.link.0": "00000000:08:00.0", "gpu.6.link.1": "off", "gpu.6.link.2": "00000000:08:00.0"}
    answers |= {"gpu.7.link.0": "00000000:07:00.0", "gpu.7.link.1": "00000000:07:00.0"}
    answers |= {f"ancestor.{one}.{other}": 50 for one in range(8) for other in range(one + 1, 8)}
    answers["ancestor.0.1"] = 10
    devices = live.run(answers)["detected"].devices
    assert [device.index for device in devices] == list(range(8))
    assert devices[0].links == {uuid(1): 1850, **{uuid(other): 1800 for other in range(2, 6)}}
    assert devices[6].links == {uuid(7): 200}
    assert devices[7].links == {uuid(6): 200}


def test_mig_devices_replace_their_gpu(live):
    live.card(address(0), minor=0)
    live.card(address(1), minor=1)
    live.card(address(2), minor=2)
    measured = {"clock.1": 1980, "ecc.0.0": 5}
    answers = (
        system(3) | gpu(0, mig="1 1", slots=7, util=None, procs=None, **measured) | gpu(1) | gpu(2, mig="1 0", slots=7)
    )
    for slot, (profile, instance) in {0: ("2g.20gb", 3), 3: ("1g.10gb", 9)}.items():  # slots are sparse
        answers |= {
            f"gpu.0.{slot}.uuid": f"MIG-{slot:08x}-1111-2222-3333-444444444444",
            f"gpu.0.{slot}.name": f"NVIDIA H100 80GB HBM3 MIG {profile}",
            f"gpu.0.{slot}.gi": instance,
            f"gpu.0.{slot}.ci": 0,
            f"gpu.0.{slot}.memory": f"{10 * GIB}/{GIB}",
            f"gpu.0.{slot}.procs": f"77:{GIB}",
        }
    answers["gpu.0.5.handle"] = "!4"  # another container's
    answer = live.run(answers)
    devices, notes = answer["detected"].devices, answer["detected"].notes
    assert [(device.id[:12], device.index, device.parent) for device in devices] == [
        ("MIG-00000000", 0, uuid(0)),
        ("MIG-00000003", 1, uuid(0)),
        (uuid(1)[:12], 2, None),
    ]
    assert devices[1].attributes["mig_profile"] == "1g.10gb"
    assert devices[1].attributes["nvml_index"] == 0
    assert "no MIG device" in " ".join(notes)
    assert "changes its MIG mode" in " ".join(notes)
    stats = answer["stats"][devices[0].id]
    assert stats["processes"] == [{"pid": 77, "memory_bytes": GIB}]
    assert stats["temperature_celsius"] == 41, "the GPU's"
    assert stats["clock_hz"] == 1_980_000_000, "likewise"
    assert not {"power_watts", "utilization", "ecc_errors_corrected"} & set(stats), "a MIG device has none of its own"


def test_a_lost_gpu_hides_no_other(live):
    for index in range(3):
        # NVML can not identify a lost GPU; the driver's files still can.
        information = f"GPU UUID: \t {uuid(index)}\nModel: \t NVIDIA H100 80GB HBM3\nDevice Minor: \t {index}\n"
        live.card(address(index), minor=index, information=information)
    answer = live.run(system(3) | gpu(0) | gpu(1, handle="!15") | gpu(2))
    first, lost, last = answer["detected"].devices
    assert answer["detected"].partial
    assert (first.health, last.health) == (Health.HEALTHY, Health.HEALTHY)
    assert (lost.id, lost.index, lost.health) == (uuid(1), 1, Health.UNHEALTHY)
    assert "fallen off the bus" in lost.health_reason
    assert "XID 79" in lost.health_reason
    assert lost.memory_bytes is None
    assert set(answer["stats"]) == {uuid(0), uuid(1), uuid(2)}
    assert answer["stats"][uuid(1)]["health"] == "unhealthy"


def test_a_gpu_lost_in_the_middle_of_the_questions_is_unhealthy(live):
    live.card(address(0), minor=0)
    (device,) = live.run(system(1) | gpu(0, memory="!15"))["detected"].devices
    assert device.health is Health.UNHEALTHY
    assert device.id == f"nvidia-{address(0)}"


def test_a_gpu_without_permission_is_listed_with_the_way_out(live):
    live.card(address(0), minor=0)
    live.card(address(1), minor=1)
    devices = live.run(system(2) | gpu(0) | gpu(1, handle="!4"))["detected"].devices
    assert devices[1].health is Health.UNHEALTHY
    assert "may not use it" in devices[1].health_reason


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (4, "/dev/nvidiactl"),
        (18, "reboot"),
        (999, "daemon-reload"),
        (17, "NVMLError_OperatingSystem"),
    ],
)
def test_a_driver_that_does_not_answer_is_an_error_and_not_a_machine_without_gpus(live, code, words):
    live.card(address(0), minor=0)
    # 4 no permission, 18 library mismatch, 999 lost devices of a cgroup, 17 for any other.
    answer = live.run({"init": f"!{code}"})
    assert "detected" not in answer
    assert words in answer["error"]
    assert answer["findings"] == [], "the core reports what detection raised"


def test_a_stub_library_is_an_error(live):
    live.card(address(0), minor=0)
    assert "stub" in live.run({}, library="stub")["error"]


def test_a_library_without_version_is_never_loaded(live):
    """The CUDA toolkit ships stubs as libnvidia-ml.so (ollama/ollama#2120)."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnvidia-ml.so.1")
        pytest.skip("needs a machine without NVIDIA's driver: libnvidia-ml.so.1 is here")
    live.card(address(0), minor=0)
    detected = live.run({}, library="unversioned")["detected"]
    assert detected.devices[0].id == f"nvidia-{address(0)}"
    assert "libnvidia-ml.so.1 is not here" in detected.notes[0]


def test_an_old_driver_answers_by_old_functions(live):
    live.card(address(0), minor=0)
    # Functions for MIG and row remapping do not exist in an old library.
    answer = live.run(system(1) | gpu(0, mig=None, rows=None), library="old")
    assert answer["detected"].devices[0].memory_bytes == 80 * GIB
    stats = answer["stats"][uuid(0)]
    assert stats["memory_used_bytes"] == 2 * GIB + (1 << 20), "version 1 counts what is reserved as used"
    assert [process["pid"] for process in stats["processes"]] == [4242, 4343]


def test_what_a_gpu_does_not_offer_is_unknown_and_not_zero(live):
    live.card(address(0), minor=0)
    nothing = dict.fromkeys(("memory", "mode", "cc", "mig", "rows", "persistence", "util", "temp", "power", "procs"))
    nothing["ecc.0.0"] = "!22"  # a virtual GPU
    answer = live.run(system(1, cuda="!3") | gpu(0, name="NVIDIA GB10", **nothing))
    (device,) = answer["detected"].devices
    assert device.memory_bytes is None
    assert answer["stats"][uuid(0)] == {"health": "healthy"}


def test_a_gpu_without_a_name_is_named_by_its_pci_id(live):
    live.card(address(0), minor=0)
    (device,) = live.run(system(1) | gpu(0, name=None))["detected"].devices
    assert (device.model, device.health) == ("NVIDIA H100 80GB HBM3", Health.HEALTHY)


def test_failed_row_remapping_and_recovery_actions_make_a_gpu_unhealthy(live):
    for index in range(4):
        live.card(address(index), minor=index)
    # Recovery actions 2 (reboot) and 3 (drain); the last GPU has a remapping that waits for a reset.
    answers = system(4) | gpu(0, rows="0 1 0 1") | gpu(1, recovery=2) | gpu(2, recovery=3) | gpu(3, rows="0 1 1 0")
    answer = live.run(answers)
    states = [device.health for device in answer["detected"].devices]
    assert states == [Health.UNHEALTHY, Health.UNHEALTHY, Health.HEALTHY, Health.HEALTHY]
    assert "replaced" in answer["detected"].devices[0].health_remedy
    assert "reboot" in answer["detected"].devices[1].health_remedy
    assert len(answer["detected"].notes) == 1
    assert "takes effect at its next reset" in answer["detected"].notes[0]


def test_the_server_of_an_mps_daemon_is_no_user_of_the_device(live, tmp_path):
    """NVML lists it beside its clients, and after the last of them, for as long as the daemon runs."""
    live.card(address(0), minor=0)
    program = shutil.copy(shutil.which("sleep"), tmp_path / "nvidia-cuda-mps-server")
    with subprocess.Popen([program, "600"]) as server:
        try:
            answers = system(1) | gpu(0, procs=f"{server.pid}:{GIB} 4242:{GIB}")
            assert live.run(answers)["stats"][uuid(0)]["processes"] == [{"pid": 4242, "memory_bytes": GIB}]
        finally:
            server.kill()


def test_an_mps_daemon_makes_an_exclusive_gpu_shareable(live, monkeypatch):
    live.card(address(0), minor=0)
    answers = system(1) | gpu(0, mode=3)
    (alone,) = live.run(answers)["detected"].devices
    assert plugin.anyaccel_fractional(alone) is Fractional.NO
    # Paths of Unix sockets hold 107 characters; pytest's directories are longer.
    with tempfile.TemporaryDirectory(prefix="mps-", dir="/tmp") as runtime, socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        seen = live.root / runtime[1:] / "nvidia-mps/control"
        seen.parent.mkdir(parents=True)
        seen.touch()
        os.mkdir(f"{runtime}/nvidia-mps")
        listening.bind(f"{runtime}/nvidia-mps/control")
        listening.listen()
        (served,) = live.run(answers)["detected"].devices
    assert served.attributes["mps_pipe"] == f"{runtime}/nvidia-mps"
    assert plugin.anyaccel_fractional(served) is Fractional.SHARED


def test_no_library_is_touched_where_no_nvidia_gpu_can_be(live):
    answer = live.run(system(1) | gpu(0))
    assert answer["detected"] is None
    assert answer["pynvml"] is False
    assert not live.log.exists()


def test_nvml_is_initialized_once_in_each_process(live):
    answer = live.run(system(1) | gpu(0), "fork")
    assert live.log.read_text().split() == [word for pid in answer["pids"] for word in ("init", str(pid))]


def test_a_hanging_driver_holds_up_its_own_process_only(live):
    live.card(address(0), minor=0)
    process = live.start({"hang": 600})
    # The library writes its log before it hangs, so the log proves that the process is inside.
    deadline = time.monotonic() + 100
    while not live.log.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert live.log.exists()
    assert process.poll() is None
    process.kill()
    assert process.wait(timeout=60) != 0
    process.stdout.close()
