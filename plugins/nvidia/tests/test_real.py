"""On real hardware: the plug-in and the driver's own tools agree."""

import os
import shutil
import subprocess
import sys

import pytest

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


@pytest.mark.real
def test_a_real_machine_is_described_as_nvidia_smi_describes_it():
    import json

    if not os.path.exists("/dev/nvidiactl"):
        pytest.skip("needs an NVIDIA GPU: there is no /dev/nvidiactl on this machine")
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
