"""Recorded machines, and what must be found on them."""

import json

import anyaccel_tpu
import pytest
from anyaccel.plugin import ProbeContext
from anyaccel.probe.recording import RecordedFacts, Recorder
from anyaccel.testing import context, describe, load_recording


def test_recording_gives_what_is_expected(recording, expected):
    assert describe(anyaccel_tpu, context(load_recording(recording))) == expected


def test_recording_of_a_recording_gives_the_same(recording, expected):
    first = context(load_recording(recording))
    recorder = Recorder(RecordedFacts(load_recording(recording)))
    assert describe(anyaccel_tpu, ProbeContext(recorder, first.deadline)) == expected
    again = json.loads(json.dumps(recorder.recording()))
    assert describe(anyaccel_tpu, context(again)) == expected


@pytest.mark.parametrize(
    ("name", "count", "tag", "hosts"),
    [
        ("v2-8-metadata-silent", 4, "TPU-V2", None),
        ("v3-8", 4, "TPU-V3", 1),
        ("v4-256-worker-0", 4, "TPU-V4", 32),
        ("v4-16-tpu-env-alone", 4, "TPU-V4", 2),
        ("v4-8-gvisor", 4, "TPU-V4", 1),
        ("v5litepod-8", 8, "TPU-V5LITEPOD", 1),
        ("v6e-1-colab", 1, "TPU-V6E", 1),
        ("v6e-1-compute-engine", 1, "TPU-V6E", 1),
        ("v6e-16-gke-worker-0", 4, "TPU-V6E", 4),
        ("v6e-4-pod-pci-hidden", 4, "TPU-V6E", None),
        ("v6e-8-no-driver", 8, "TPU-V6E", 1),
        ("tpu7x-16-gke-worker-1", 4, "TPU-V7X", 2),
    ],
)
def test_chips_generation_and_hosts_of_each_machine(detected, name, count, tag, hosts):
    devices = detected(name)
    assert [device.index for device in devices] == list(range(count))
    assert {anyaccel_tpu.anyaccel_tags(device)[0] for device in devices} == {tag}
    assert {device.attributes.get("slice_hosts") for device in devices} == {hosts}


@pytest.mark.parametrize("name", ["not-tpu-bluefield", "not-tpu-gpu-vm", "not-tpu-trainium"])
def test_what_is_no_tpu_is_absent(recorded, name):
    assert anyaccel_tpu.anyaccel_detect(recorded(name)) is None
    assert anyaccel_tpu.anyaccel_diagnose(recorded(name)) == []


def test_a_machine_with_nothing_is_absent():
    empty = context({"schema": "anyaccel.recording/1"})
    assert anyaccel_tpu.anyaccel_detect(empty) is None
