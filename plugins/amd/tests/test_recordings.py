"""Every recorded machine gives the inventory that was checked by eye against its source."""

from __future__ import annotations

import json
from pathlib import Path

import anyaccel_amd
import pytest
from anyaccel.model.wire import decode
from anyaccel.plugin import Detected, Health
from anyaccel.testing import context, describe, load_recording
from anyaccel.vendors.contract import detected_faults, tags_faults

RECORDINGS = sorted((Path(__file__).parent.parent / "recordings").iterdir())


@pytest.mark.parametrize("directory", RECORDINGS, ids=lambda directory: directory.name)
def test_a_recording_gives_its_expected_inventory(directory):
    assert describe(anyaccel_amd, context(load_recording(directory))) == json.loads(
        (directory / "expected.json").read_text()
    )


@pytest.mark.parametrize("directory", RECORDINGS, ids=lambda directory: directory.name)
def test_a_recording_keeps_the_contract(directory):
    found = anyaccel_amd.anyaccel_detect(context(load_recording(directory)))
    if found is None:
        return
    assert list(detected_faults(found)) == []
    ids = {device.id for device in found.devices}
    for device in found.devices:
        assert list(tags_faults(anyaccel_amd.anyaccel_tags(device))) == []
        assert set(device.links) <= ids - {device.id}
        assert all(value > 0 for value in device.links.values())
        assert bool(device.health_reason) == (device.health is Health.UNHEALTHY)


@pytest.mark.parametrize("directory", RECORDINGS, ids=lambda directory: directory.name)
def test_every_recording_says_what_it_reproduces(directory):
    assert load_recording(directory)["comment"].endswith(".")
    expected = json.loads((directory / "expected.json").read_text())
    if expected is not None:
        decode(Detected, expected)
