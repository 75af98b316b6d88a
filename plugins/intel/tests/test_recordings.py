"""Recorded machines as real files and links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from anyaccel.plugin import ProbeContext
from anyaccel.probe.host import HostFacts
from anyaccel_intel import plugin


@pytest.mark.parametrize(
    "name", ["max1550-2card-xelink", "flex140-uhd770", "panther-lake-b390-7vf", "b580-old-kernel", "flex170-sriov-4vf"]
)
def test_real_files_and_links_give_the_same_devices_as_the_recording(name, materialized, devices):
    root = materialized(name)
    found = plugin.anyaccel_detect(ProbeContext(HostFacts({}, root=str(root)), deadline=float("inf")))

    def essence(device):
        return device.id, device.index, device.model, device.memory_bytes, device.parent, device.numa_node

    assert found is not None
    assert [essence(device) for device in found.devices] == [essence(device) for device in devices(name)]


def test_every_test_that_the_readme_names_exists():
    home = Path(__file__).parents[1]
    named = set(re.findall(r"`(test_\w+)`", (home / "README.md").read_text()))
    defined = {name for path in home.glob("tests/*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert named
    assert named <= defined
