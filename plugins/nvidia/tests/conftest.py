"""Machines for the tests: recorded, made-up, and a real binding on a real shared library."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from anyaccel.model.value import decode
from anyaccel.plugin import Detected, Device, Health
from anyaccel_nvidia import plugin
from anyaccel_testing import context, load_recording

HERE = Path(__file__).parent
RECORDINGS = HERE.parent / "recordings"
PROBE = HERE / "fake_nvml" / "probe.py"


@pytest.fixture
def recorded():
    """Show the machine of a recording: ``recorded(name)`` is a context."""

    def show(name, environ=None):
        return context(load_recording(RECORDINGS / name), environ=environ)

    return show


@pytest.fixture
def machine():
    """Show a machine of paths and queries written down in the test."""

    def show(paths=None, queries=None, environ=None):
        recording = {"schema": "anyaccel.recording/1", "paths": paths or {}, "queries": queries or {}}
        return context({**recording, "environ": environ or {}})

    return show


@pytest.fixture
def devices_of(recorded):
    """Detect the devices of a recording."""

    def detect(name, environ=None):
        return plugin.anyaccel_detect(recorded(name, environ)).devices

    return detect


@pytest.fixture
def gpus():
    """Make GPUs of one model: ``gpus(4)``, in the order of NVML."""

    def make(count, model="NVIDIA H100 80GB HBM3", **changes):
        return tuple(
            Device(
                id=f"GPU-{index + 7:x}{'0' * 7}-0000-0000-0000-{index:012x}",
                index=index,
                model=model,
                memory_bytes=80 << 30,
                health=Health.HEALTHY,
                **changes,
            )
            for index in range(count)
        )

    return make


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """Build three stand-ins for libnvidia-ml.so.1: current, old, and a stub of the CUDA toolkit."""
    built = {}
    for kind, options in {"current": [], "old": ["-DOLD"], "stub": ["-DSTUB"]}.items():
        built[kind] = tmp_path_factory.mktemp(kind)
        target = built[kind] / "libnvidia-ml.so.1"
        command = ["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *options, "-o", target]
        subprocess.run([*command, HERE / "fake_nvml" / "fake_nvml.c"], check=True)
    built["unversioned"] = tmp_path_factory.mktemp("unversioned")
    # Some images carry the stub under the unversioned name alone.
    (built["unversioned"] / "libnvidia-ml.so").write_bytes((built["stub"] / "libnvidia-ml.so.1").read_bytes())
    return built


class Live:
    """A child process in which NVIDIA's own binding loads a stand-in library."""

    def __init__(self, libraries, directory):
        self.libraries = libraries
        self.root = directory / "root"
        self.root.mkdir()
        self.config = directory / "config"
        self.log = directory / "log"

    def card(self, address, driver="nvidia", minor=None, information=""):
        """Put a GPU on the PCI bus, with its device node."""
        sysfs = self.root / "sys/bus/pci/devices" / address
        sysfs.mkdir(parents=True)
        for name, text in {"vendor": "0x10de", "class": "0x030200", "device": "0x2330", "numa_node": "1"}.items():
            (sysfs / name).write_text(text + "\n")
        (sysfs / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
        (self.root / "dev").mkdir(exist_ok=True)
        if minor is not None:
            (self.root / f"dev/nvidia{minor}").touch()
        if information:
            procfs = self.root / "proc/driver/nvidia/gpus" / address
            procfs.mkdir(parents=True)
            (procfs / "information").write_text(information)

    def start(self, answers, *arguments, library="current"):
        self.config.write_text("".join(f"{key} {value}\n" for key, value in answers.items()))
        environ = {**os.environ, "LD_LIBRARY_PATH": str(self.libraries[library])}
        environ |= {"FAKE_NVML": str(self.config), "FAKE_NVML_LOG": str(self.log)}
        # The developer's own mask must not reach the stand-in.
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY"):
            environ.pop(name, None)
        command = [sys.executable, PROBE, self.root, *arguments]
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)

    def run(self, answers, *arguments, library="current"):
        """Return the answers of ``detect``, ``stats`` and ``diagnose``, with the recording made meanwhile."""
        process = self.start(answers, *arguments, library=library)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        answer = json.loads(output)
        if answer.get("detected"):
            answer["detected"] = decode(Detected, answer["detected"])
        return answer


@pytest.fixture
def live(libraries, tmp_path):
    return Live(libraries, tmp_path)
