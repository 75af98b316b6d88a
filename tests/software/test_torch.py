"""PyTorch reads CUDA_VISIBLE_DEVICES as the plug-in of NVIDIA does."""

import random
from importlib.util import find_spec

import anyaccel
import pytest

if find_spec("torch") is None:
    pytest.skip("tox -e real-torch installs torch for CPUs", allow_module_level=True)
from anyaccel_nvidia import plugin
from torch import cuda

VARIABLE = "CUDA_VISIBLE_DEVICES"
COUNT = 4
PIECES = (*map(str, range(COUNT + 2)), ",", ",", ",", ",", "-1", " ", "00", "+1", "junk")
VALUES = 5_000


def count(value, monkeypatch):
    """Return the numbers of the devices that PyTorch shows, as its ``_device_count_nvml`` trims what it has parsed."""
    monkeypatch.setenv(VARIABLE, value)
    visible = cuda._parse_visible_devices()
    return visible[: next((at for at, number in enumerate(visible) if not 0 <= number < COUNT), len(visible))]


@pytest.mark.filterwarnings("ignore")  # the plug-in tells people about values that hide every device
def test_a_value_shows_the_devices_that_torch_counts(monkeypatch, report):
    devices = anyaccel.detect(f"sim:H100:{COUNT}").devices
    draw = random.Random(1)
    faults = {}
    for _ in range(VALUES):
        value = "".join(draw.choices(PIECES, k=draw.randint(0, 6)))
        try:
            ours = plugin.anyaccel_visible({VARIABLE: value, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, devices)
        except ValueError:
            ours = []
        numbers = [next(device.index for device in devices if device.id == id_) for id_ in ours]
        theirs = count(value, monkeypatch)
        faults[value] = [] if numbers == theirs else [numbers, theirs]
    report("nvidia", "torch", f"devices left by {VARIABLE}", faults, cases="values")
