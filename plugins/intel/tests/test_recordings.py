"""Every recorded machine, through every pure hook."""

from __future__ import annotations

import json
import re
from itertools import chain, combinations
from pathlib import Path

import anyaccel_intel as plugin
import pytest
from anyaccel.plugin import EnvContext, Fractional, Health, ProbeContext
from anyaccel.probe.host import HostFacts
from anyaccel.testing import context, describe, load_recording


def test_detection_gives_what_is_written_beside_the_recording(recording):
    expected = json.loads((recording / "expected.json").read_text())
    assert describe(plugin, context(load_recording(recording))) == expected


def test_ids_and_indexes_are_unique_and_tags_are_well_formed(recording):
    found = plugin.anyaccel_detect(context(load_recording(recording)))
    devices = found.devices if found else ()
    assert len({device.id for device in devices}) == len(devices)
    assert len({device.index for device in devices}) == len(devices)
    for device in devices:
        assert re.fullmatch(r"intel-[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](-tile[0-9])?", device.id)
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+", tag) for tag in plugin.anyaccel_tags(device))
        assert (device.health is Health.UNHEALTHY) == bool(device.health_reason)
        assert device.memory_bytes != 0
        assert plugin.anyaccel_fractional(device) is Fractional.SHARED


def test_every_subset_of_a_recorded_machine_comes_back_from_its_environment(recording):
    content = load_recording(recording)
    found = plugin.anyaccel_detect(context(content))
    devices = found.devices if found else ()
    for chosen in chain.from_iterable(combinations(devices, count) for count in range(len(devices) + 1)):
        ctx = EnvContext(devices=devices, environ=content["environ"])
        edits = plugin.anyaccel_env(chosen, ctx)
        assert {*edits.set, *edits.unset} <= set(plugin.anyaccel_info().env_vars)
        merged = {**content["environ"], **edits.set}
        assert plugin.anyaccel_visible(merged, devices) == [
            device.id for device in sorted(chosen, key=lambda device: device.index)
        ]


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
