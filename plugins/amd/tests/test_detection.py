"""Detection on recorded and made-up machines."""

from __future__ import annotations

import json
import time
from typing import Any

import anyaccel
import pytest
from anyaccel.plugin import Detected, Health, ProbeContext
from anyaccel.probe.recording import RecordedFacts
from anyaccel_amd import plugin
from anyaccel_testing import context

NODES = "/sys/class/kfd/kfd/topology/nodes"
PCI = "/sys/bus/pci/devices"
BUSES = ["05", "27", "47", "65", "85", "a7", "c7", "e5"]


def detect(recording) -> Detected:
    found = plugin.anyaccel_detect(context(recording))
    assert found is not None
    return found


def reasons(found):
    return {device.id: device.health_reason for device in found.devices if device.health is Health.UNHEALTHY}


def test_the_order_is_that_of_kfd_and_not_of_pci(detected):
    buses = [device.pci_bus_id[5:7] for device in detected("mi210-8gpu-two-hives").devices]
    assert buses == ["63", "43", "03", "26", "e3", "c3", "83", "a3"]
    # What a library that sorts by PCI address calls 0 to 7: the map that people had to find out by hand.
    assert [sorted(buses).index(bus) for bus in buses] == [3, 2, 0, 1, 7, 6, 4, 5]


def test_xgmi_joins_four_and_four(detected):
    devices = detected("mi210-8gpu-two-hives").devices
    hives = [{device.id for device in devices[:4]}, {device.id for device in devices[4:]}]
    for position, device in enumerate(devices):
        assert {device.id, *device.links} == hives[position // 4]


def test_a_partition_is_nearer_to_its_own_card_than_to_another(detected):
    devices = {device.id: device for device in detected("mi308x-8gpu-cpx").devices}
    links = devices["amd-0000:0a:00.0/0"].links
    own = {links[f"amd-0000:0a:00.0/{number}"] for number in (1, 2, 3)}
    other = {value for name, value in links.items() if ":0a:" not in name}
    assert min(own) > max(other) > 0


def test_63_of_64_partitions_are_found_with_unequal_counts(detected):
    devices = detected("mi300x-8gpu-cpx").devices
    per_card = [sum(d.parent == f"amd-0000:{bus}:00.0" for d in devices) for bus in BUSES]
    assert per_card == [8, 8, 8, 8, 8, 8, 8, 7]
    assert [device.index for device in devices] == list(range(63))


def test_partitions_that_share_a_unique_id_have_ids_of_their_own(detected):
    devices = detected("mi300x-8gpu-cpx").devices
    assert {device.attributes["unique_id"] for device in devices[:8]} == {"e3aa140f9a5f9e31"}
    assert len({device.id for device in devices}) == 63


def test_render_minors_are_read_and_not_computed(detected):
    minors = [device.attributes["render_minor"] for device in detected("mi308x-8gpu-cpx").devices]
    assert minors[:8] == [128, 129, 130, 131, 136, 137, 138, 139]
    assert detected("mi308x-8gpu-cpx").devices[4].nodes == ("/dev/kfd", "/dev/dri/renderD136")


def test_cards_at_one_place_of_two_domains_stay_apart(detected):
    devices = detected("mi300x-dpx-two-domains").devices
    assert [device.id for device in devices] == [f"amd-000{domain}:00:04.0/{n}" for domain in (1, 3) for n in (0, 1)]
    assert {(d.memory_bytes, d.attributes["compute_units"]) for d in devices} == {(103070826496, 152)}


def test_the_mode_is_that_of_the_card_for_each_of_its_partitions(detected):
    for device in detected("mi300x-8gpu-cpx").devices:
        assert (device.attributes["compute_mode"], device.attributes["memory_mode"]) == ("cpx", "nps1")


def test_an_apu_with_cpu_cores_in_its_node_is_a_gpu(detected):
    assert [device.id for device in detected("mi300a-4gpu").devices] == [f"amd-000{n}:01:00.0" for n in range(4)]


def test_64_bit_ids_stay_whole(detected):
    devices = detected("mi210-8gpu-two-hives").devices
    assert devices[6].attributes["unique_id"] == f"{17888023871577450191:016x}"
    assert devices[0].attributes["unique_id"] == "1901ead3a2ecd4a6"
    assert devices[4].attributes["hive_id"] == f"{18091350218769748594:016x}"


def test_a_container_sees_what_its_cgroup_lets_it_read(detected):
    found = detected("mi210-container-2of8")
    assert [(device.index, device.pci_bus_id) for device in found.devices] == [(0, "0000:03:00.0"), (1, "0000:c3:00.0")]
    assert "6 GPU nodes of the host are closed to this container" in found.notes[0]
    assert reasons(found) == {}


def test_a_partition_that_is_alone_in_a_container_keeps_its_id(recorded):
    denied = {f"{NODES}/{node}/properties": {"errno": "EPERM"} for node in range(2, 65) if node != 5}
    (device,) = detect(recorded("mi300x-8gpu-cpx", denied)).devices
    assert (device.id, device.index, device.parent) == ("amd-0000:05:00.0/3", 0, "amd-0000:05:00.0")


def test_nodes_beyond_all_permission_are_not_failures(recorded):
    denied = {f"{NODES}/{node}/properties": {"errno": "EPERM"} for node in range(2, 10)}
    found = detect(recorded("mi210-8gpu-two-hives", denied))
    assert found.devices == ()
    assert found.notes[0].startswith("8 GPU nodes")


def test_no_permission_is_told_with_the_way_out(detected):
    found = detected("mi210-no-permission")
    assert len(reasons(found)) == 8
    assert "you may not open /dev/kfd" in reasons(found)["amd-0000:63:00.0"]
    assert "usermod -aG render" in found.devices[0].health_remedy


@pytest.mark.parametrize(
    ("path", "entry", "words"),
    [
        ("/dev/kfd", None, "its device node /dev/kfd is missing"),
        ("/dev/kfd", {"char": [234, 0], "access": "r"}, "you may not open /dev/kfd"),
        ("/dev/dri/renderD136", None, "its device node /dev/dri/renderD136 is missing"),
        ("/dev/dri/renderD136", {"char": [226, 136], "access": ""}, "you may not open /dev/dri/renderD136"),
        (f"{PCI}/0000:27:00.0/mem_info_vram_used", {"errno": "EIO"}, "does not answer the driver"),
    ],
)
def test_a_device_that_cannot_be_opened_is_listed_with_the_reason(recorded, path, entry, words):
    found = detect(recorded("mi300x-8gpu", {path: entry}))
    assert len(found.devices) == 8
    assert words in reasons(found)["amd-0000:27:00.0"]
    assert len(reasons(found)) == (8 if path == "/dev/kfd" else 1)


def test_a_file_that_the_driver_does_not_support_is_no_illness(recorded):
    # Some cards have the file and do not support reading it.
    found = detect(recorded("mi300x-8gpu", {f"{PCI}/0000:27:00.0/mem_info_vram_used": {"errno": "EOPNOTSUPP"}}))
    assert reasons(found) == {}


def test_lost_gpus_do_not_hide_the_others(detected):
    found = detected("mi300x-8gpu-two-lost")
    assert [device.id for device in found.devices if device.health is Health.HEALTHY] == [
        f"amd-0000:{bus}:00.0" for bus in ("05", "27", "65", "85", "c7", "e5")
    ]
    assert found.partial
    assert found.devices[5].id == "amd-kfd-node-7"
    assert "Input/output error" in found.devices[5].health_reason


def test_a_cpu_node_that_cannot_be_read_is_not_a_gpu(recorded):
    # Node 1 is the second CPU: its gpu_id is 0.
    found = detect(recorded("mi300x-8gpu", {f"{NODES}/1/properties": {"errno": "EIO"}}))
    assert len(found.devices) == 8
    assert not found.partial


def test_a_gpu_that_kfd_lost_is_listed(recorded):
    found = detect(recorded("mi300x-8gpu", {f"{NODES}/5": None}))
    assert [device.index for device in found.devices] == list(range(8))
    assert found.devices[7].id == "amd-0000:65:00.0"
    assert "does not offer it for computing" in reasons(found)["amd-0000:65:00.0"]


def test_a_gpu_without_driver_is_listed_and_one_of_a_virtual_machine_is_not(detected):
    missing = detected("mi300x-8gpu-driver-missing")
    assert set(reasons(missing).values()) == {"no driver is bound to it"}
    given_away = detected("mi300x-8gpu-vfio")
    assert given_away.devices == ()
    assert "vfio-pci" in given_away.notes[0]


def test_a_virtual_function_on_its_host_is_left_to_the_guest(recorded):
    vf = "0000:05:02.0"
    extra = {f"{PCI}/{vf}/{name}": text for name, text in (("vendor", "0x1002"), ("class", "0x120000"))}
    extra |= {f"{PCI}/{vf}/device": "0x74b5", f"{PCI}/{vf}/physfn": {"link": "../0000:05:00.0"}}
    assert len(detect(recorded("mi300x-8gpu", extra)).devices) == 8


def test_a_function_that_pci_has_is_a_card_and_no_partition(recorded):
    extra: dict[str, Any] = {
        f"{PCI}/0000:03:00.1/{name}": text for name, text in (("vendor", "0x1002"), ("class", "0x030000"))
    }
    extra[f"{PCI}/0000:03:00.1/device"] = "0x73df"
    # Location 769 is function 1 of slot 0, which would be partition 1 if PCI had no such function.
    extra[f"{NODES}/1/properties"] = "simd_count 80\nlocation_id 769\ndrm_render_minor 128\ndevice_id 29663\n"
    extra[f"{PCI}/0000:03:00.1/driver"] = {"link": "../../../bus/pci/drivers/amdgpu"}
    assert detect(recorded("rx6750xt-1gpu", extra)).devices[0].id == "amd-0000:03:00.1"


def test_a_partition_without_a_mode_to_be_seen_is_a_partition(recorded):
    changes = {f"{NODES}/{node}/properties": {"errno": "EPERM"} for node in range(2, 65) if node != 5}
    # Old drivers lack the files for modes; the address of the node still tells.
    changes |= {f"{PCI}/0000:05:00.0/current_{kind}_partition": None for kind in ("compute", "memory")}
    (device,) = detect(recorded("mi300x-8gpu-cpx", changes)).devices
    assert (device.id, device.parent) == ("amd-0000:05:00.0/3", "amd-0000:05:00.0")


@pytest.mark.parametrize(
    ("location", "domain", "address"),
    [(6400, None, "0000:19:00.0"), (0xFF << 8 | 0x1F << 3, 0xFFFF, "ffff:ff:1f.0"), (37632, 0, "0000:93:00.0")],
)
def test_a_place_is_read_as_the_kernel_packs_it(recorded, location, domain, address):
    text = f"simd_count 4\ndrm_render_minor 128\nlocation_id {location}\n"
    text += f"domain {domain}\n" if domain is not None else ""
    assert detect(recorded("mi25-1gpu", {f"{NODES}/1/properties": text})).devices[0].pci_bus_id == address


@pytest.mark.parametrize(
    ("version", "gfx"),
    [(90402, "gfx942"), (90010, "gfx90a"), (110000, "gfx1100"), (90500, "gfx950"), (100301, "gfx1031")],
)
def test_a_gfx_name_ends_in_a_hexadecimal_step(recorded, version, gfx):
    text = f"simd_count 4\ndrm_render_minor 128\nlocation_id 6400\ngfx_target_version {version}\n"
    (device,) = detect(recorded("mi25-1gpu", {f"{NODES}/1/properties": text})).devices
    assert device.attributes["gfx"] == gfx


def test_partition_numbers_in_the_upper_bits_are_understood(recorded):
    changes = {
        f"{NODES}/{node}/properties": f"simd_count 152\nlocation_id {(node - 2) << 28 | 1280}\ndomain 0\n"
        f"drm_render_minor {126 + node}\ndevice_id 29857\n"
        for node in range(2, 10)
    }
    found = detect(recorded("mi300x-8gpu-cpx", changes))
    assert [device.id for device in found.devices[:8]] == [f"amd-0000:05:00.0/{number}" for number in range(8)]


def test_partitions_at_one_address_are_told_apart_by_their_render_nodes(recorded):
    # Both nodes at the same location; only the render minors differ.
    twin = "simd_count 608\nlocation_id 32\ndomain 1\ndrm_render_minor 129\ndevice_id 29857\n"
    found = detect(recorded("mi300x-dpx-two-domains", {f"{NODES}/2/properties": twin}))
    assert [device.id for device in found.devices][:2] == ["amd-0001:00:04.0/0", "amd-0001:00:04.0/1"]


def test_two_nodes_that_are_the_same_device_are_refused(recorded):
    same = recorded("mi25-1gpu")["paths"][f"{NODES}/1/properties"]["text"]
    with pytest.raises(
        ValueError, match=r"must not share a PCI address and a render node \(got 0000:19:00\.0 and minor"
    ):
        detect(recorded("mi25-1gpu", {f"{NODES}/2/properties": same}))


@pytest.mark.parametrize("line", ["simd_count", "simd_count many", "simd_count -4", "simd_count 4 5", "simd_count ²"])
def test_a_line_that_the_kernel_does_not_write_is_refused(recorded, line):
    path = f"{NODES}/1/properties"
    with pytest.raises(ValueError, match="must hold lines of a key and a decimal number") as error:
        detect(recorded("mi25-1gpu", {path: f"cpu_cores_count 0\n{line}\n"}))
    assert path in str(error.value)
    assert repr(line) in str(error.value)


def test_a_gpu_without_a_place_is_refused(recorded):
    with pytest.raises(ValueError, match="must have a line 'location_id'"):
        detect(recorded("mi25-1gpu", {f"{NODES}/1/properties": "simd_count 256\n"}))


def test_missing_values_are_none_and_never_zero(recorded):
    text = "simd_count 256\nlocation_id 6400\ndrm_render_minor 128\n"
    # A container without PCI in sysfs, on an old kernel.
    gone = {f"{PCI}/0000:19:00.0": None, f"{NODES}/1/gpu_id": {"errno": "EACCES"}, f"{NODES}/1/name": None}
    (device,) = detect(recorded("mi25-1gpu", {**gone, f"{NODES}/1/properties": text})).devices
    assert (device.memory_bytes, device.numa_node, device.parent) == (None, None, None)
    assert set(device.attributes) == {"card", "compute_units", "kfd_node", "render_minor"}
    assert plugin.anyaccel_tags(device) == ("AMD-GPU",)


def test_memory_banks_that_are_not_video_memory_do_not_count(recorded):
    banks = {
        f"{NODES}/1/mem_banks/0/properties": "heap_type 0\nsize_in_bytes 1000\n",
        f"{NODES}/1/mem_banks/1/properties": "heap_type 1\nsize_in_bytes 300\n",
        f"{NODES}/1/mem_banks/2/properties": "heap_type 2\nsize_in_bytes 40\n",
    }
    assert detect(recorded("mi25-1gpu", banks)).devices[0].memory_bytes == 340


def test_a_card_has_no_partition_memory_from_the_whole_cards_file(recorded):
    # Half the card's memory would be as wrong: memory modes divide it differently.
    whole = {f"{PCI}/0000:05:00.0/mem_info_vram_total": "206141652992\n"}
    assert detect(recorded("mi300x-8gpu-cpx", whole)).devices[0].memory_bytes is None


def test_a_hive_without_links_counts_as_connected(recorded):
    changes = {f"{NODES}/{node}/io_links": None for node in range(2, 10)}
    devices = detect(recorded("mi300x-8gpu", changes)).devices
    assert devices[0].links == {device.id: 1 for device in devices[1:]}


def test_pcie_links_count_for_nothing(recorded):
    text = "type 2\nnode_from 2\nnode_to 6\nweight 52\n"
    devices = detect(recorded("mi210-8gpu-two-hives", {f"{NODES}/2/io_links/4/properties": text})).devices
    assert devices[4].id not in devices[0].links


def xgmi(node_to, weight, bandwidths):
    least, most = bandwidths
    return f"type 11\nnode_to {node_to}\nweight {weight}\nmin_bandwidth {least}\nmax_bandwidth {most}\n"


def test_two_gpus_with_more_links_between_them_are_nearer(recorded):
    """The pairs of an MI250X: 4 links within a package, 1 or 2 to neighbors, a detour to the rest."""
    links = {3: (15, (50000, 200000)), 4: (15, (50000, 100000)), 5: (15, (50000, 50000)), 6: (30, (0, 0))}
    changes = {f"{NODES}/2/io_links/{n}/properties": xgmi(n, *link) for n, link in links.items()}
    changes |= {f"{NODES}/2/io_links/{n}": None for n in (0, 1, 2, 7)}
    devices = detect(recorded("mi210-8gpu-two-hives", changes)).devices
    assert [devices[0].links[device.id] for device in devices[1:5]] == [4 * 985, 2 * 985, 985, 970]


def test_a_job_of_two_gets_the_halves_of_a_package(recorded, tmp_path):
    """Nodes 2 and 5, 3 and 4 are packages; any two of the four are a hop apart."""
    halves = {2: 5, 5: 2, 3: 4, 4: 3}
    recording = recorded("mi210-8gpu-two-hives", {f"{NODES}/{node}/io_links": None for node in range(2, 10)})
    for node, half in halves.items():
        for other in {*halves} - {node}:
            link = xgmi(other, 15, (50000, 200000 if other == half else 50000))
            recording["paths"][f"{NODES}/{node}/io_links/{other}/properties"] = {"text": link}
    (tmp_path / "machine.json").write_text(json.dumps(recording))
    made = anyaccel.prepare("GPU:2", machine=str(tmp_path), environ={}).environment
    assert made.set["HIP_VISIBLE_DEVICES"] == "0,3"


def test_several_lines_for_one_pair_are_several_links(recorded):
    changes = {f"{NODES}/2/io_links/{n}/properties": xgmi(3, 15, (0, 0)) for n in (8, 9)}
    devices = detect(recorded("mi210-8gpu-two-hives", changes)).devices
    assert devices[0].links[devices[1].id] == 3 * 985
    assert devices[0].links[devices[2].id] == 985


def test_an_integrated_gpu_is_secondary_only_beside_a_card(detected):
    assert [d.attributes.get("secondary", False) for d in detected("rx7900xtx-beside-610m").devices] == [False, True]
    assert "secondary" not in detected("610m-alone").devices[0].attributes


def test_an_absent_vendor_is_none_and_a_driver_without_gpu_is_not(detected, recorded):
    assert plugin.anyaccel_detect(context(recorded("no-amd"))) is None
    assert detected("driver-without-gpu") == Detected()
    assert (
        plugin.anyaccel_detect(context({"schema": "anyaccel.recording/1", "paths": {"/dev/dxg": {"char": [10, 127]}}}))
        is None
    )


def test_the_library_of_a_vendor_says_nothing_about_devices(recorded):
    """A ROCm library does not make a GPU (pytorch/pytorch#133259)."""
    assert plugin.anyaccel_detect(context(recorded("no-amd", {"/opt/rocm/lib/libamd_smi.so": ""}))) is None


class Repartitioned(RecordedFacts):
    """A machine whose topology changes during the reading."""

    def __init__(self, recording, changes):
        super().__init__(recording)
        self.left = changes

    def read(self, path):
        if path.endswith("/generation_id"):
            self.left -= 1
            return str(max(0, self.left))
        return super().read(path)


def test_a_topology_that_changes_once_is_read_again(recorded):
    ctx = ProbeContext(Repartitioned(recorded("mi300x-8gpu"), 2), time.monotonic() + 10)
    found = plugin.anyaccel_detect(ctx)
    assert found is not None
    assert len(found.devices) == 8


def test_a_topology_that_never_rests_is_an_error(recorded):
    ctx = ProbeContext(Repartitioned(recorded("mi300x-8gpu"), 99), time.monotonic() + 10)
    with pytest.raises(RuntimeError, match="must stay the same while the GPUs are listed"):
        plugin.anyaccel_detect(ctx)


def test_detection_reads_a_real_directory_tree(tree, recorded):
    files = {}
    for path, entry in recorded("mi300x-8gpu")["paths"].items():
        if "text" in entry or "link" in entry:
            files[path] = entry.get("text", f"-> {entry.get('link')}")
    found = plugin.anyaccel_detect(tree(files))
    assert found is not None
    assert [str(device.pci_bus_id)[5:7] for device in found.devices] == BUSES
    assert found.devices[0].numa_node == 0
    # Device nodes cannot be made without root: their absence is what the tree shows.
    assert "device node /dev/kfd is missing" in found.devices[0].health_reason


def test_another_vendors_gpus_in_kfd_are_left_to_that_vendor(recorded):
    recording = recorded("mi210-8gpu-two-hives")
    for path, entry in recording["paths"].items():
        if path.endswith("/properties"):
            entry["text"] = entry["text"].replace("vendor_id 4098", "vendor_id 7572")
        elif path.endswith("/vendor"):
            entry["text"] = entry["text"].replace("0x1002", "0x1d94")
    recording["paths"].pop("/sys/module/amdgpu/version", None)
    found = plugin.anyaccel_detect(context(recording))
    assert found is None or not found.devices
