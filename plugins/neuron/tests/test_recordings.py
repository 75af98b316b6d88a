"""Recorded machines: detection answers what somebody checked against the vendor's documents."""

import json
from pathlib import Path

import pytest
from anyaccel.plugin import Health
from anyaccel.testing import context, describe, load_recording
from anyaccel_neuron import plugin

RECORDINGS = sorted((Path(__file__).parent.parent / "recordings").iterdir(), key=lambda path: path.name)
BY_NAME = {path.name: path for path in RECORDINGS}


def detect(name, **options):
    return plugin.anyaccel_detect(context(load_recording(BY_NAME[name]), **options))


def chips(devices):
    """Cores of each chip, by the chip's id."""
    found = {}
    for device in devices:
        found.setdefault(device.parent, []).append(device.index)
    return found


def neighbors(devices, chip):
    """Indexes of the chips that a chip is linked to."""
    index_of = {device.id: device.attributes["device_index"] for device in devices}
    return {
        index_of[other]
        for device in devices
        if device.attributes["device_index"] == chip
        for other in device.links
        if index_of[other] != chip
    }


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_a_recording_gives_the_expected_inventory(path):
    expected = json.loads((path / "expected.json").read_text())
    assert describe(plugin, context(load_recording(path))) == expected


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_ids_and_indexes_are_unique_and_links_are_mutual(path):
    found = plugin.anyaccel_detect(context(load_recording(path)))
    devices = {device.id: device for device in (found.devices if found else ())}
    assert len(devices) == len(found.devices if found else ())
    assert len({device.index for device in devices.values()}) == len(devices)
    for device in devices.values():
        assert device.id not in device.links
        assert all(devices[other].links[device.id] == strength for other, strength in device.links.items())


# Name, chips, cores, cores of the first chip, model, memory of a core in GiB.
SHAPES = [
    ("inf1-xlarge-banner", 1, 4, 4, "Inferentia", 2),
    ("inf1-6xlarge", 4, 16, 4, "Inferentia", 2),
    ("inf2-xlarge", 1, 2, 2, "Inferentia2", 16),
    ("inf2-xlarge-tool-hangs", 1, 2, 2, "Inferentia2", 16),
    ("inf2-24xlarge-container-1-of-6", 1, 2, 2, "Inferentia2", 16),
    ("inf2-48xlarge-no-tools", 12, 24, 2, "Inferentia2", 16),
    ("inf2-48xlarge-no-tools-nonroot", 12, 24, 2, "Inferentia2", 16),
    ("trn1-2xlarge", 1, 2, 2, "Trainium1", 16),
    ("trn1-32xlarge", 16, 32, 2, "Trainium1", 16),
    ("trn1-32xlarge-faults", 16, 32, 2, "Trainium1", 16),
    ("trn1-32xlarge-driver-missing", 16, 32, 2, "Trainium1", 16),
    ("trn2-3xlarge", 1, 4, 4, "Trainium2", 24),
    ("trn2-3xlarge-lnc1-no-tools", 1, 8, 8, "Trainium2", 12),
    ("trn2n-48xlarge", 16, 64, 4, "Trainium2", 24),
    ("trn2-48xlarge-container-1-of-16", 1, 4, 4, "Trainium2", 24),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0])
def test_chips_and_cores_are_both_counted(shape):
    name, chip_count, core_count, first, model, gib = shape
    devices = detect(name).devices
    by_chip = chips(devices)
    assert (len(by_chip), len(devices)) == (chip_count, core_count)
    assert len(next(iter(by_chip.values()))) == first
    assert sorted(device.index for device in devices) == list(range(core_count))
    assert {device.model for device in devices} == {model}
    assert {device.memory_bytes for device in devices} == {gib << 30}


TORUS = {0: {1, 3, 4, 12}, 1: {0, 2, 5, 13}, 4: {0, 5, 7, 8}, 15: {3, 11, 12, 14}}
LINKS = [
    ("trn1-32xlarge", TORUS),
    ("trn2n-48xlarge", TORUS),
    ("inf2-48xlarge-no-tools", {0: {1, 11}, 5: {4, 6}, 11: {10, 0}}),
    ("inf1-6xlarge", {0: {1}, 1: {0, 2}, 3: {2}}),
    ("inf2-48xlarge-no-tools-nonroot", {0: set(), 5: set()}),
    ("trn2-48xlarge-container-1-of-16", {0: set()}),
    ("trn1-2xlarge", {0: set()}),
]


@pytest.mark.parametrize(("name", "expected"), LINKS)
def test_chips_are_linked_as_the_vendor_draws_them(name, expected):
    devices = detect(name).devices
    assert {chip: neighbors(devices, chip) for chip in expected} == expected


def test_cores_of_one_chip_are_closer_than_those_of_a_neighbor():
    devices = {device.index: device for device in detect("trn1-32xlarge").devices}
    assert devices[0].links[devices[1].id] > devices[0].links[devices[2].id] > 0
    assert devices[31].id not in devices[4].links


def test_chips_keep_the_drivers_order_and_not_that_of_the_pci_bus():
    devices = detect("trn1-32xlarge").devices
    assert [device.pci_bus_id for device in devices[:6:2]] == ["0000:10:1c.0", "0000:10:1d.0", "0000:a0:1c.0"]


def test_a_serial_number_is_the_identity_where_the_driver_shows_one():
    first = detect("trn1-2xlarge").devices[0]
    assert (first.id, first.parent) == ("neuron-9ff5434815c8bd80-nc0", "neuron-9ff5434815c8bd80")


def test_a_blank_serial_number_leaves_the_pci_address_written_in_full():
    assert detect("trn2-48xlarge-container-1-of-16").devices[0].parent == "neuron-0000:e1:00.0"
    assert detect("trn2n-48xlarge").devices[0].parent == "neuron-0000:cc:00.0"


def test_numa_nodes_come_from_the_tool_and_minus_one_is_unknown():
    devices = detect("trn2n-48xlarge").devices
    assert [devices[chip * 4].numa_node for chip in (0, 3, 4, 11, 12, 15)] == [1, 1, 0, 0, 1, 1]
    assert detect("trn1-2xlarge").devices[0].numa_node is None


def test_a_driver_that_was_not_built_leaves_the_chips_listed_and_unfit():
    found = detect("trn1-32xlarge-driver-missing")
    assert {device.health for device in found.devices} == {Health.UNHEALTHY}
    assert "aws-neuronx-dkms" in found.devices[0].health_reason
    assert found.devices[0].nodes == ()


def test_a_bad_chip_hides_no_other():
    found = detect("trn1-32xlarge-faults")
    bad = {
        device.attributes["device_index"]: device.health_reason
        for device in found.devices
        if device.health is Health.UNHEALTHY
    }
    assert set(bad) == {4, 7, 15}
    assert "sram_ecc_uncorrected is 3" in bad[4]
    assert "nc_count" in bad[7]
    assert "did not take it" in bad[15]
    assert found.partial
    assert sum(device.usable for device in found.devices) == 26


def test_a_container_without_a_chip_has_the_driver_and_no_device():
    found = detect("trn1-32xlarge-container-0-of-16")
    assert (found.devices, found.driver_version) == ((), "2.24.7.0")
    assert "--device=/dev/neuron0" in found.notes[0]


def test_other_functions_of_amazon_are_no_accelerators():
    assert detect("m5-large") is None


def test_a_tpu_library_on_a_trainium_host_changes_nothing():
    environ = {"TPU_LIBRARY_PATH": "/opt/venv/lib/python3.11/site-packages/libneuronxla/libtpu.so"}
    assert detect("trn1-2xlarge", environ=environ) == detect("trn1-2xlarge", environ={})
