"""Recorded machines in an author's own tests."""

from pathlib import Path

import pytest
from anyaccel.errors import MachineError
from anyaccel.plugin import Detected, Device, Fractional, hookimpl
from anyaccel_testing import context, describe, load_recording


class Plain:
    """Hooks with only the arguments of interest in their signatures."""

    @hookimpl
    def anyaccel_detect(self):
        return Detected(devices=(Device(id="x-1", index=0, model="X"),))

    @hookimpl
    def anyaccel_tags(self):
        return ["X"]

    @hookimpl
    def anyaccel_fractional(self):
        return Fractional.SHARED


def test_a_plugin_is_described_whose_hooks_leave_out_arguments(record):
    device = {"id": "x-1", "index": 0, "model": "X", "tags": ["X"], "fractional": "shared"}
    assert describe(Plain(), context(load_recording(record()))) == {"devices": [device]}


def test_a_recording_is_named_by_text_or_path(record):
    directory = record({})
    assert load_recording(directory) == load_recording(Path(directory))
    with pytest.raises(MachineError, match=r"machine\.json cannot be read"):
        load_recording(f"{directory}/none")
