"""NVIDIA's own binding of NVML, NVML itself without a driver, and the MPS daemon, which starts without a GPU."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from binding_names import attributes

if "ANYACCEL_TEST_NVIDIA" not in os.environ or find_spec("pynvml") is None:
    pytest.skip("tox -e real-nvidia installs nvidia-ml-py and Debian's packages", allow_module_level=True)
import pynvml
from anyaccel_nvidia import nvml

DEBIAN = os.environ["ANYACCEL_TEST_NVIDIA"]  # read once: tests run without variables of ours
RELEASE = "535.261.03-1"
CONSTANTS = {
    "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION": nvml._RECOVERY_ACTION,
    "NVML_CLOCK_SM": nvml._CLOCKS[0],
    "NVML_CLOCK_MEM": nvml._CLOCKS[1],
    "NVML_MEMORY_ERROR_TYPE_CORRECTED": nvml._ECC[0][0],
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": nvml._ECC[1][0],
    "NVML_VOLATILE_ECC": nvml._ECC[0][1],
}


def test_every_name_and_constant_exists(report):
    source = Path(nvml.__file__).read_text()
    names = {*attributes(source, "nvml"), *attributes(source, "pynvml")}
    assert len(names) > 20
    faults = {name: [] if hasattr(pynvml, name) else ["missing"] for name in names}
    for name, value in CONSTANTS.items():
        theirs = getattr(pynvml, name)
        faults[name] = [] if theirs == value else [theirs, value]
    report("nvidia", "nvidia-ml-py", "functions and constants", faults, cases="names")


@pytest.fixture
def debian(tmp_path, monkeypatch):
    """Put Debian's libraries and programs on the paths, and give the MPS daemon directories of the test's own."""
    root = Path(DEBIAN) / "root" / "usr"
    monkeypatch.setenv("PATH", f"{root / 'bin'}:{root / 'sbin'}:{os.environ['PATH']}")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(root / "lib" / "x86_64-linux-gnu" / "nvidia" / "current"))
    for name in ("pipe", "log"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(f"CUDA_MPS_{name.upper()}_DIRECTORY", str(tmp_path / name))
    return tmp_path


def test_the_mps_daemon_of_nvidia_is_started_asked_and_ended(debian, anyaccel, report):
    faults = {}
    try:
        for name, status, wanted in (
            ("start", 0, "protocol 2, clients: none"),
            ("status", 0, "clients: none"),
            ("stop", 0, "has been ended"),
            ("status of what is left", 1, "no MPS daemon listens"),
            ("start again", 0, "protocol 2, clients: none"),
        ):
            done = anyaccel("mps", name.split()[0], timeout=120)
            told = done.stdout + done.stderr
            faults[name] = [] if done.returncode == status and wanted in told else [done.returncode, told]
    finally:
        anyaccel("mps", "stop", timeout=120)
    report("nvidia", "nvidia-cuda-mps", "mps start, status, stop", faults, RELEASE, cases="commands")


def test_nvml_without_a_driver_is_told_with_a_remedy(debian, recordings, accel_testbed, report):
    faults = {}
    for name in ("h100-8gpu-nvswitch", "a100-1gpu-mig-empty"):
        done = accel_testbed(
            recordings("nvidia")[name], sys.executable, "-m", "anyaccel", "status", "--json", "--no-stats"
        )
        (vendor,) = [each for each in json.loads(done.stdout)["vendors"] if each["vendor"] == "nvidia"]
        told = json.dumps([vendor["problem"], vendor["notes"], vendor["reason"]])
        devices = [each for each in json.loads(done.stdout)["devices"] if each["vendor"] == "nvidia"]
        # The library is there and says that no driver is: no device may look healthy.
        healthy = [each["id"] for each in devices if each["health"] != "unhealthy"]
        faults[name] = [] if not healthy and ("driver" in told.lower() or devices) else [told, healthy]
    report("nvidia", "libnvidia-ml1", "devices without a driver", faults, RELEASE)
