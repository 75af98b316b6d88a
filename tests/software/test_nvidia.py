"""NVIDIA's binding of NVML has every name that the plug-in uses, and the constants have the plug-in's values."""

from pathlib import Path

import pytest
from names import attributes

pynvml = pytest.importorskip("pynvml", reason="tox -e real-nvidia installs nvidia-ml-py")
from anyaccel_nvidia import nvml

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
    report("nvidia", "nvidia-ml-py", "names and constants", faults)
