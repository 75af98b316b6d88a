"""Counting chips, on real directory trees."""

import pytest
from anyaccel.plugin import Health

GIB = 1 << 30


def _healths(found):
    return [device.health for device in found.devices]


@pytest.mark.parametrize(
    ("device", "subsystem", "model", "memory"),
    [
        ("0x0027", "0x004e", "TPU v2", 16),
        ("0x0027", "0x004f", "TPU v3", 32),
        ("0x0027", "0x0001", "TPU v2 or v3", None),
        ("0x0027", None, "TPU v2 or v3", None),
        ("0x005e", None, "TPU v4", 32),
        ("0x0063", None, "TPU v5e", 16),
        ("0x0062", None, "TPU v5p", 95),
        ("0x006f", None, "TPU v6e", 32),
        ("0x0076", None, "TPU7x", 192),
        ("0x0083", None, "TPU8i", None),
        ("0x007c", None, "TPU8t", None),
    ],
)
def test_generation_and_memory_follow_the_pci_id(tree, device, subsystem, model, memory):
    tree.pci("0000:00:04.0", device, subsystem=subsystem)
    tree.node("/dev/accel0")
    (chip,) = tree.detect().devices
    assert (chip.model, chip.memory_bytes) == (model, memory and memory * GIB)
    assert chip.id == "tpu-0000:00:04.0"


@pytest.mark.parametrize("device", ["0x0042", "0x0084", "0x0056", "0x1234"])
def test_googles_vendor_id_alone_is_no_tpu(tree, device):
    tree.pci("0000:00:04.0", device, group="3")
    tree.node("/dev/accel0", "/dev/vfio/3", "/dev/vfio/vfio")
    assert tree.detect() is None


def test_a_tpus_device_id_of_another_vendor_is_no_tpu(tree):
    tree.pci("0000:00:04.0", "0x005e", vendor="0x1d0f")
    tree.node("/dev/accel0")
    assert tree.detect() is None


@pytest.mark.parametrize("second", ["0x0076", "0x0077"])
def test_tpu7x_is_one_chip_per_slot_whatever_its_second_function_reads(tree, second):
    for slot in range(4):
        tree.pci(f"0000:00:0{slot + 4}.0", "0x0076", group=str(10 + 2 * slot))
        # The second function may have an id of its own.
        tree.pci(f"0000:00:0{slot + 4}.1", second, group=str(11 + 2 * slot))
        tree.node(f"/dev/vfio/{10 + 2 * slot}", f"/dev/vfio/{11 + 2 * slot}")
    tree.node("/dev/vfio/vfio")
    found = tree.detect()
    assert [device.nodes for device in found.devices] == [
        (f"/dev/vfio/{10 + 2 * slot}", f"/dev/vfio/{11 + 2 * slot}") for slot in range(4)
    ]
    assert _healths(found) == [Health.HEALTHY] * 4


def test_tpu7x_with_one_of_two_groups_missing_is_unhealthy_and_names_it(tree):
    tree.pci("0000:00:04.0", "0x0076", group="0", driver="vfio-pci")
    tree.pci("0000:00:04.1", "0x0076", group="1", driver="vfio-pci")
    tree.node("/dev/vfio/0", "/dev/vfio/vfio")
    (chip,) = tree.detect().devices
    assert chip.health is Health.UNHEALTHY
    assert chip.health_reason == "its device node /dev/vfio/1 is missing"


def test_chips_are_numbered_by_group_not_by_address(tree):
    for address, number in (
        ("0000:00:04.0", "11"),
        ("0000:00:05.0", "2"),
        ("0000:00:06.0", "9"),
        ("0000:00:07.0", "10"),
    ):
        tree.pci(address, "0x006f", group=number)
        tree.node(f"/dev/vfio/{number}")
    tree.node("/dev/vfio/vfio")
    assert [device.nodes[0] for device in tree.detect().devices] == [f"/dev/vfio/{n}" for n in (2, 9, 10, 11)]


def test_both_families_of_nodes_are_looked_at(tree):
    tree.pci("0000:00:04.0", "0x0063", group="5")
    tree.node("/dev/accel0")
    (chip,) = tree.detect().devices
    assert (chip.nodes, chip.health) == (("/dev/accel0",), Health.HEALTHY)


def test_a_directory_under_the_name_of_a_node_is_no_node(tree):
    tree.pci("0000:00:04.0", "0x005e")
    # A directory of another driver, by the name of a node.
    tree.text("/dev/accel0/accel0", "")
    (chip,) = tree.detect().devices
    assert (chip.nodes, chip.health) == ((), Health.UNHEALTHY)


def test_one_missing_node_does_not_hide_the_other_chips(tree):
    for index in range(4):
        tree.pci(f"0000:00:0{index + 4}.0", "0x005e", driver="tpu")
    tree.node("/dev/accel0", "/dev/accel1", "/dev/accel3")
    found = tree.detect()
    assert _healths(found) == [Health.HEALTHY, Health.HEALTHY, Health.UNHEALTHY, Health.HEALTHY]
    assert found.devices[2].health_reason == "its device node /dev/accel2 is missing"
    assert found.devices[2].health_remedy == "pass it to this container, or restart the TPU VM"


def test_a_chip_without_driver_says_which_software_version_to_use(tree):
    tree.pci("0000:00:04.0", "0x006f")
    (chip,) = tree.detect().devices
    assert chip.health is Health.UNHEALTHY
    assert "no driver is bound to 0000:00:04.0" in chip.health_reason
    assert "v2-alpha-tpuv6e" in chip.health_remedy


def test_groups_without_the_vfio_node_cannot_be_opened(tree):
    tree.pci("0000:00:04.0", "0x006f", group="0", driver="vfio-pci")
    tree.node("/dev/vfio/0")
    (chip,) = tree.detect().devices
    assert chip.health_reason == "its device node /dev/vfio/vfio is missing"


def test_a_pci_device_id_that_is_no_number_fails_and_says_so(tree):
    tree.pci("0000:00:04.0", "garbage")
    with pytest.raises(ValueError, match=r"0000:00:04.0/device must hold a PCI id such as 0x1234 \(got 'garbage"):
        tree.detect()


def test_hidden_pci_groups_count_by_vendor_and_device(tree):
    tree.group("0", "0000:00:04.0", "0x006f")
    tree.group("1", "0000:00:05.0", "0x0042")
    # A network card whose device id is that of a TPU.
    tree.group("96", "0000:01:00.0", "0x006f", vendor="0x15b3")
    # Group 7 is empty, and /dev/vfio/devices is no group.
    tree.node("/dev/vfio/0", "/dev/vfio/1", "/dev/vfio/7", "/dev/vfio/96", "/dev/vfio/vfio", "/dev/vfio/devices")
    (chip,) = tree.detect().devices
    assert (chip.id, chip.nodes) == ("tpu-0000:00:04.0", ("/dev/vfio/0",))


def test_hidden_pci_tpu7x_groups_of_one_slot_are_one_chip(tree):
    for slot in range(4):
        tree.group(str(2 * slot), f"0000:00:0{slot + 4}.0", "0x0076")
        tree.group(str(2 * slot + 1), f"0000:00:0{slot + 4}.1", "0x0077")
        tree.node(f"/dev/vfio/{2 * slot}", f"/dev/vfio/{2 * slot + 1}")
    tree.node("/dev/vfio/vfio")
    assert [device.nodes for device in tree.detect().devices] == [
        (f"/dev/vfio/{2 * slot}", f"/dev/vfio/{2 * slot + 1}") for slot in range(4)
    ]


def test_accel_nodes_alone_are_no_tpu(tree):
    tree.node("/dev/accel0", "/dev/accel1")
    assert tree.detect() is None


def test_accel_nodes_count_where_google_names_the_generation(tree):
    # Ten comes after two, and a name without a number is no chip.
    tree.node("/dev/accel0", "/dev/accel1", "/dev/accel2", "/dev/accel10", "/dev/accel_x")
    found = tree.detect({"TPU_ACCELERATOR_TYPE": "v4-8", "TPU_SKIP_MDS_QUERY": "1"})
    assert [device.nodes[0] for device in found.devices] == [f"/dev/accel{n}" for n in (0, 1, 2, 10)]
    assert [device.index for device in found.devices] == [0, 1, 2, 3]
    assert _healths(found) == [Health.UNKNOWN] * 4


def test_a_type_without_any_chip_is_reported_and_is_no_inventory(tree):
    found = tree.detect({"TPU_ACCELERATOR_TYPE": "v6e-4", "TPU_SKIP_MDS_QUERY": "1"})
    assert found.devices == ()
    assert "v6e-4" in found.notes[0]


def test_a_type_on_a_machine_whose_pci_shows_no_tpu_is_ignored(tree):
    tree.pci("0000:00:04.0", "0x1234", vendor="0x8086")
    # Images for TPUs set these variables, also on machines without one.
    assert tree.detect({"TPU_ACCELERATOR_TYPE": "v6e-4", "TPU_LIBRARY_PATH": "/x", "PJRT_DEVICE": "TPU"}) is None


def test_pci_is_believed_against_the_accelerator_type(tree):
    tree.pci("0000:00:04.0", "0x006f")
    tree.node("/dev/accel0")
    found = tree.detect({"TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_SKIP_MDS_QUERY": "1"})
    assert found.devices[0].model == "TPU v6e"
    # A variable of another machine, copied with a job's environment.
    assert "PCI was believed" in found.notes[0]


def test_the_accelerator_type_decides_between_v2_and_v3(tree):
    tree.pci("0000:00:04.0", "0x0027")
    tree.node("/dev/accel0")
    found = tree.detect({"TPU_ACCELERATOR_TYPE": "v2-8", "TPU_SKIP_MDS_QUERY": "1"})
    assert found.devices[0].memory_bytes == 16 * GIB


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TPU_ACCELERATOR_TYPE", "h100", "a TPU accelerator type must be"),
        ("TPU_TOPOLOGY", "2-2", "a TPU topology must be like 4x4"),
        ("TPU_WORKER_ID", "first", "a TPU worker id must be a whole number (got 'first')"),
    ],
)
def test_a_malformed_slice_fact_is_left_out_with_a_note(tree, variable, value, words):
    tree.pci("0000:00:04.0", "0x006f")
    tree.node("/dev/accel0")
    found = tree.detect({variable: value, "TPU_SKIP_MDS_QUERY": "1"})
    assert len(found.devices) == 1
    assert set(found.devices[0].attributes) == {"generation"}
    assert words in found.notes[0]
    assert "the environment" in found.notes[0]


def test_hosts_of_v6e_8_follow_the_chips_of_this_host(tree):
    for index in range(4):
        tree.pci(f"0000:00:0{index + 4}.0", "0x006f")
        tree.node(f"/dev/accel{index}")
    found = tree.detect({"TPU_ACCELERATOR_TYPE": "v6e-8", "TPU_SKIP_MDS_QUERY": "1"})
    assert found.devices[0].attributes["slice_hosts"] == 2


def test_links_prefer_pairs_then_quads_then_the_rest(detected):
    devices = detected("v5litepod-8")
    strengths = [devices[0].links[other.id] for other in devices[1:]]
    # The neighbor of a pair, the rest of the quad, the other quad.
    assert strengths == [3, 2, 2, 1, 1, 1, 1]
    for one in devices:
        for other in devices:
            assert one is other or one.links[other.id] == other.links[one.id] > 0
