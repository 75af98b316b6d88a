"""On real hardware: the plug-in, the driver's own tools and CUDA agree."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

pytestmark = pytest.mark.real

ASK = """
import json, os, time

from anyaccel_nvidia import plugin
from anyaccel.model.value import encode
from anyaccel.probe.context import ProbeContext
from anyaccel.probe.host import HostFacts
environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
ctx = ProbeContext(HostFacts(environ), time.monotonic() + 60)
detected = plugin.anyaccel_detect(ctx)
stats = plugin.anyaccel_stats(detected.devices, ctx)
print(json.dumps({"detected": encode(detected), "stats": encode(stats)}))
"""

# With the driver alone: no framework has to be installed.
CUDA = """
import ctypes, json, sys

cuda = ctypes.CDLL("libcuda.so.1")
status = cuda.cuInit(0)
if status:
    sys.exit(f"cuInit returned {status}")
count, cores, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
uuid = (ctypes.c_ubyte * 16)()
for status in (
    cuda.cuDeviceGetCount(ctypes.byref(count)),
    cuda.cuDeviceGetUuid(uuid, 0),
    cuda.cuDeviceGetAttribute(ctypes.byref(cores), 16, 0),
    cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0),
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
):
    assert status == 0, status
seen = {"count": count.value, "uuid": bytes(uuid).hex(), "cores": cores.value, "free": free.value, "total": total.value}
print(json.dumps(seen), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def gpu():
    if not os.path.exists("/dev/nvidiactl"):
        pytest.skip("needs an NVIDIA GPU: there is no /dev/nvidiactl on this machine")


@pytest.fixture
def directory(monkeypatch):
    """A state directory for leases, with a place for an MPS daemon, both of the test's own."""
    # Paths of Unix sockets hold 107 characters; pytest's directories are longer.
    with tempfile.TemporaryDirectory(prefix="real-", dir="/tmp") as place:
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "ANYACCEL_MACHINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("ANYACCEL_STATE_DIR", f"{place}/state")
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", f"{place}/mps")
        yield place


def anyaccel(*arguments):
    command = [sys.executable, "-m", "anyaccel", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def start(*arguments):
    """Start ``anyaccel run`` with a program that uses CUDA until its input ends; return the process and what it saw."""
    command = [sys.executable, "-m", "anyaccel", "run", *arguments, "--", sys.executable, "-c", CUDA]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, json.loads(process.stdout.readline())


def find_device(uuid):
    devices = json.loads(anyaccel("--json").stdout)["devices"]
    (found,) = (each for each in devices if each["id"].removeprefix("GPU-").replace("-", "") == uuid)
    return found


def test_a_real_machine_is_described_as_nvidia_smi_describes_it():
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs nvidia-smi to compare with: it is not in PATH")
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True, timeout=120)
    answer = json.loads(asked.stdout)
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=60).stdout
    usable = [device for device in answer["detected"]["devices"] if device.get("health") == "healthy"]
    assert usable
    for device in usable:
        assert device["id"] in listed
        assert answer["stats"][device["id"]]["memory_used_bytes"] <= device["memory_bytes"]
    query = ["nvidia-smi", "--query-gpu=uuid,name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    rows = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    # A GPU with MIG on is in nvidia-smi's list, and not in ours.
    for uuid, name, mebibytes, driver in (row.split(", ") for row in rows):
        found = [device for device in usable if device["id"] == uuid]
        assert answer["detected"]["driver_version"] == driver
        if found:
            assert found[0]["model"] == name
            assert found[0]["memory_bytes"] == pytest.approx(int(mebibytes) << 20, rel=0.05)


@pytest.mark.usefixtures("directory")
def test_cuda_sees_exactly_the_gpu_of_the_lease():
    process, seen = start("GPU:1")
    with process:
        device = find_device(seen["uuid"])
        (holder,) = device["holders"]
        process.stdin.close()
    assert (process.returncode, seen["count"], device["free"]) == (0, 1, 0.0)
    assert [each["pid"] for each in device["processes"]] == [holder["pid"]], "CUDA's process carries the lease"


@pytest.mark.usefixtures("directory")
def test_cuda_sees_no_gpu_without_a_lease_of_one():
    done = anyaccel("run", "--declare", "LICENSE=1", "LICENSE:1", "--", sys.executable, "-c", CUDA)
    assert (done.returncode, done.stderr) == (1, "cuInit returned 100\n"), "CUDA_ERROR_NO_DEVICE"


@pytest.mark.usefixtures("directory")
def test_mps_limits_a_share_and_its_end_leaves_a_free_gpu():
    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("needs nvidia-cuda-mps-control, which comes with the driver: it is not in PATH")
    process, whole = start("GPU:1")
    with process:
        process.stdin.close()
    assert anyaccel("mps", "start").returncode == 0
    try:
        process, half = start("GPU:0.5")
        with process:
            used = find_device(half["uuid"])
            clients = json.loads(anyaccel("mps", "status", "--json").stdout)["clients"]
            process.stdin.close()
        assert process.returncode == 0
        assert half["cores"] <= whole["cores"] // 2 + 1
        assert half["free"] < whole["total"] * 0.51
        assert [each["pid"] for each in used["processes"]] == clients == [used["holders"][0]["pid"]]
        left = find_device(half["uuid"])
        assert (left["processes"], left["free"], left["holders"]) == ([], 1.0, []), "the server runs on"
    finally:
        assert anyaccel("mps", "stop").returncode == 0
    assert anyaccel("mps", "status").returncode == 1
    assert "mps_pipe" not in find_device(half["uuid"])["attributes"]
