"""Chips, nodes and logical cores beyond the recorded machines."""

import os
from pathlib import Path

import pytest
from anyaccel.plugin import Health
from anyaccel_neuron import plugin
from anyaccel_testing import context, load_recording

RECORDINGS = Path(__file__).parent.parent / "recordings"
PRODUCT_NAME = "/sys/devices/virtual/dmi/id/product_name"


def recorded(paths):
    facts = {"schema": "anyaccel.recording/1", "paths": paths, "commands": [], "environ": {}}
    return plugin.anyaccel_detect(context(facts))


def test_a_driver_without_a_device_is_here_and_empty(machine):
    machine.write("/sys/module/neuron/version", "2.24.7.0\n")
    found = plugin.anyaccel_detect(machine.context())
    assert (found.devices, found.driver_version) == ((), "2.24.7.0")


def test_only_character_devices_with_a_number_are_chips(machine):
    machine.chip(0)
    # A file, a directory, a name without a number, and a number with a suffix.
    machine.write("/dev/neuron1", "")
    machine.write("/dev/neuron2/file", "")
    machine.write("/dev/neuronx", "")
    (machine.tree / "dev/neuron3x").symlink_to("/dev/null")
    assert {device.parent for device in machine.devices()} == {"neuron-device0"}


def test_a_node_with_another_name_is_matched_by_its_numbers(machine):
    """A container may show chip 1 of the host as its chip 0; sysfs shows the host's."""
    machine.chip(0, "Inferentia2", node="/elsewhere/0")
    entry = machine.chip(1, "Inferentia2", node="/dev/neuron0")
    machine.write(f"{entry}/info/serial_number", "00112233445566aa\n")
    assert [(device.id, device.index) for device in machine.devices()] == [
        ("neuron-00112233445566aa-nc0", 0),
        ("neuron-00112233445566aa-nc1", 1),
    ]


def linked(devices):
    """Pairs of indexes of chips whose cores are linked."""
    chips = {device.id: device.attributes["device_index"] for device in devices}
    pairs = {(chips[device.id], chips[other]) for device in devices for other in device.links}
    assert all((two, one) in pairs for one, two in pairs)
    return {(one, two) for one, two in pairs if one < two}


def test_links_in_a_container_go_by_the_hosts_numbers(machine):
    """The host's chips 1, 2 and 3 of a ring are 0, 1 and 2 here; chip 0 of the host is not here."""
    for host in range(4):
        node = f"/dev/neuron{host - 1}" if host else "/elsewhere/0"
        entry = machine.chip(host, "Inferentia2", node=node)
        machine.write(f"{entry}/connected_devices", f"{(host - 1) % 4}, {(host + 1) % 4}\n")
    assert linked(machine.devices()) == {(0, 1), (1, 2)}


def test_links_to_chips_that_are_not_here_are_not_guessed_without_the_hosts_numbers(machine):
    for index, others in enumerate(([1, 5], [0, 6])):
        entry = machine.chip(index, "Inferentia2")
        (machine.tree / f"{entry}/dev".lstrip("/")).unlink()
        machine.write(f"{entry}/connected_devices", ", ".join(map(str, others)))
    assert linked(machine.devices()) == set()


def test_chips_of_the_third_generation_are_linked_all_to_all(machine):
    for index in range(4):
        entry = machine.chip(index, "Trainium3")
        machine.write(f"{entry}/connected_devices", "1, 3\n")
    devices = machine.devices()
    # Four chips of four double cores.
    assert all(len(device.links) == len(devices) - 1 == 15 for device in devices)


@pytest.mark.parametrize(
    ("environ", "file", "lnc"),
    [
        ({}, None, 2),
        ({}, "NEURON_LOGICAL_NC_CONFIG=1\n", 1),
        ({"NEURON_LOGICAL_NC_CONFIG": "2"}, "NEURON_LOGICAL_NC_CONFIG=1\n", 2),
        ({"NEURON_RT_VIRTUAL_CORE_SIZE": "1"}, None, 1),
        ({"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_RT_VIRTUAL_CORE_SIZE": "2"}, None, 1),
    ],
)
def test_logical_cores_without_the_tool_follow_environment_file_and_default(new_machine, environ, file, lnc):
    machine = new_machine("one", **environ)
    machine.chip(0, "Trainium2")
    if file:
        machine.write("/opt/aws/neuron/logical_nc_config", file)
    devices = machine.devices()
    assert len(devices) == 8 // lnc
    assert {device.attributes["lnc"] for device in devices} == {lnc}
    assert plugin.anyaccel_tags(devices[0])[-1] == f"trainium2-lnc{lnc}"


def test_the_tool_wins_over_the_environment_on_logical_cores(new_machine):
    machine = new_machine("one", NEURON_LOGICAL_NC_CONFIG="1")
    machine.chip(0, "Trainium2")
    machine.lists({"neuron_device": 0, "nc_count": 4, "logical_neuroncore_config": 2, "neuroncore_ids": [0, 1, 2, 3]})
    assert len(machine.devices()) == 4


def test_chips_without_logical_cores_ignore_the_variable(new_machine):
    machine = new_machine("one", NEURON_LOGICAL_NC_CONFIG="2")
    machine.chip(0, "Inferentia2")
    assert len(machine.devices()) == 2


@pytest.mark.parametrize("value", ["3", "one", "-1"])
def test_a_malformed_size_of_logical_cores_is_an_error(new_machine, value):
    machine = new_machine("one", NEURON_LOGICAL_NC_CONFIG=value)
    machine.chip(0, "Trainium2")
    with pytest.raises(ValueError, match=r"NEURON_LOGICAL_NC_CONFIG.*1 or 2"):
        machine.devices()


def test_ids_of_the_tool_are_taken_as_they_are(machine):
    """Where a container keeps the host's names the ids are those of the host."""
    machine.chip(2)
    machine.lists({"neuron_device": 2, "nc_count": 2, "neuroncore_ids": [26, 27]})
    assert [device.index for device in machine.devices()] == [26, 27]


def test_ids_that_are_counted_never_meet_those_of_the_tool(machine):
    machine.chip(0)
    machine.chip(1)
    machine.lists({"neuron_device": 0, "nc_count": 2, "neuroncore_ids": [2, 3]})
    assert [device.index for device in machine.devices()] == [2, 3, 4, 5]


def test_chips_without_a_node_are_not_ours_whatever_the_tool_lists(machine):
    machine.chip(0)
    machine.lists(*({"neuron_device": index, "nc_count": 2} for index in range(16)))
    assert [device.index for device in machine.devices()] == [0, 1]


def test_a_chip_that_the_tool_leaves_out_is_described_by_sysfs(machine):
    machine.chip(0)
    machine.chip(1)
    machine.lists({"neuron_device": 0, "nc_count": 2})
    assert [(device.index, device.usable) for device in machine.devices()] == [(n, True) for n in range(4)]


def test_a_chip_that_nothing_describes_is_listed_unfit_beside_the_others(machine):
    for index in range(2):
        machine.chip(index, "Trainium9")
    machine.lists({"neuron_device": 0, "nc_count": 2})
    found = plugin.anyaccel_detect(machine.context())
    assert [(device.index, device.usable) for device in found.devices] == [(0, True), (1, True), (2, False), (3, False)]
    assert "how many cores" in found.devices[2].health_reason
    assert found.partial


@pytest.mark.parametrize(
    ("device", "model"),
    [
        (0x7064, "Inferentia"),
        (0x7067, "Inferentia"),
        (0x7164, "Trainium1"),
        (0x7264, "Inferentia2"),
        (0x7364, "Trainium2"),
        (0x7564, "Trainium3"),
        (0x7565, "Trainium3"),
    ],
)
def test_the_pci_id_names_the_chip_where_sysfs_does_not(machine, device, model):
    machine.chip(0, "")
    machine.function("0000:00:1e.0", device)
    assert {(core.model, core.parent) for core in machine.devices()} == {(model, "neuron-0000:00:1e.0")}


def test_the_firmware_names_the_chip_where_neither_sysfs_nor_pci_does(machine):
    machine.chip(0, "")
    machine.write(PRODUCT_NAME, "trn1n.32xlarge\n")
    assert [core.model for core in machine.devices()] == ["Trainium1", "Trainium1"]


def test_a_node_that_this_user_may_not_open_is_unfit_with_the_way_out():
    paths = {
        "/dev/neuron0": {"char": [243, 0], "access": ""},
        "/dev/neuron1": {"char": [243, 1], "access": "rw"},
        PRODUCT_NAME: {"text": "inf2.24xlarge\n"},
    }
    found = recorded(paths)
    assert [device.health for device in found.devices] == [Health.UNHEALTHY] * 2 + [Health.UNKNOWN] * 2
    assert "sudo chmod 0666 /dev/neuron0" in found.devices[0].health_remedy
    assert found.partial


@pytest.mark.parametrize(
    ("loaded", "driver", "reason", "remedy"),
    [
        (False, "", "is not loaded", "aws-neuronx-dkms"),
        (True, "vfio-pci", "vfio-pci", "bind it to neuron-driver"),
        (False, "vfio-pci", "vfio-pci", "bind it to neuron-driver"),
    ],
)
def test_a_chip_that_the_driver_does_not_serve_is_unfit_with_the_way_out(machine, loaded, driver, reason, remedy):
    if loaded:
        machine.write("/sys/module/neuron/version", "2.24.7.0\n")
    machine.function("0000:00:1e.0", 0x7164, driver)
    devices = machine.devices()
    assert len(devices) == 2
    assert {device.health for device in devices} == {Health.UNHEALTHY}
    assert reason in devices[0].health_reason
    assert remedy in devices[0].health_remedy


def test_bindings_that_sysfs_does_not_show_are_no_fault(machine):
    """Some sandboxes show the bus without the links to drivers."""
    machine.chip(0)
    for slot in range(4):
        machine.function(f"0000:00:1{slot}.0", 0x7164)
    assert [device.usable for device in machine.devices()] == [True, True]


def test_serial_numbers_that_several_chips_share_are_no_identity(machine):
    for index in range(2):
        machine.write(f"{machine.chip(index)}/info/serial_number", "ffffffffffffffff")
    assert len({device.parent for device in machine.devices()}) == 2


@pytest.mark.parametrize("serial", ["", "\n", "0000000000000000", "not a serial, at all", "\u00e9" * 16])
def test_a_serial_number_that_is_none_is_no_identity(machine, serial):
    machine.write(f"{machine.chip(0)}/info/serial_number", serial)
    assert machine.devices()[0].parent == "neuron-device0"


def test_the_power_record_with_its_time_stamp_is_no_part_of_the_inventory(machine):
    entry = machine.chip(0)
    machine.write(f"{entry}/stats/power/utilization", "POWER_STATUS_VALID,1789180860,0.00,0.00,0.00")
    before = machine.devices()
    machine.write(f"{entry}/stats/power/utilization", "POWER_STATUS_VALID,1789180920,0.00,9.00,1.00")
    assert machine.devices() == before


def test_detection_writes_nothing(machine):
    entry = machine.chip(0)
    machine.write(f"{entry}/reset", "1\n")
    before = {path: os.stat(path).st_mtime_ns for path in machine.tree.rglob("*")}
    machine.devices()
    assert {path: os.stat(path).st_mtime_ns for path in machine.tree.rglob("*")} == before


def test_a_tpu_library_on_a_trainium_host_changes_nothing():
    recording = load_recording(RECORDINGS / "trn1-2xlarge")
    library = {"TPU_LIBRARY_PATH": "/opt/venv/lib/python3.11/site-packages/libneuronxla/libtpu.so"}
    found = [plugin.anyaccel_detect(context(recording, environ=environ)) for environ in ({}, library)]
    assert found[0] == found[1]
