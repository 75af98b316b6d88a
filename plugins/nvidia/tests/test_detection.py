"""Detection from files, without NVML, and cases that look alike."""

from pathlib import Path

import pytest
from anyaccel.plugin import Health
from anyaccel.probe.context import ProbeContext
from anyaccel.probe.host import HostFacts
from anyaccel_nvidia import plugin
from anyaccel_testing import context, load_recording

RECORDINGS = Path(__file__).parent.parent / "recordings"
UUID = "GPU-3291dfa4-fcc4-0110-615b-c894a0d7c689"


def card(address, driver="nvidia", class_code="0x030200"):
    base = f"/sys/bus/pci/devices/{address}"
    paths = {f"{base}/vendor": {"text": "0x10de"}, f"{base}/class": {"text": class_code}}
    paths[f"{base}/device"] = {"text": "0x27b8"}
    return paths | ({f"{base}/driver": {"link": f"../drivers/{driver}"}} if driver else {})


def information(address, text):
    return {f"/proc/driver/nvidia/gpus/{address}/information": {"text": text}}


def fault(kind, value=None):
    error = {"kind": kind, "message": kind} | ({"value": value} if value is not None else {})
    return {"nvml/system": {"error": error}}


NO_LIBRARY = fault("NVMLError_LibraryNotFound", 12)
NO_MODULE = fault("NVMLError_DriverNotLoaded", 9)
ONE = "0000:70:00.0"
NODE = {"/dev/nvidia0": {"char": [195, 0]}, "/dev/nvidiactl": {"char": [195, 255]}}


def one_gpu(**facts):
    """Answers of NVML on a machine with a single GPU."""
    names = ("memory", "compute_mode", "compute_capability", "fabric", "mig", "minor", "bus_id", "pci_device")
    known = {"index": 0, "uuid": UUID, "name": "NVIDIA L4", "mig_devices": [], **facts}
    system = {"driver": "550.54", "cuda": None, "count": 1}
    return {"nvml/system": {"value": system}, "nvml/device/0": {"value": dict.fromkeys(names) | known}}


def test_wsl_without_an_nvidia_gpu_is_absent(machine):
    assert plugin.anyaccel_detect(machine({"/dev/dxg": {"char": [10, 125]}}, NO_LIBRARY)) is None


@pytest.mark.parametrize(
    "path",
    [
        "/dev/dxg",
        "/dev/nvidiactl",
        "/dev/nvidia3",
        "/proc/driver/nvidia/version",
        "/etc/nv_tegra_release",
        "/sys/class/tegra-firmware/x",
    ],
)
def test_nvml_is_tried_at_any_sign_of_the_driver(machine, path):
    system = {"driver": "560.94", "cuda": None, "count": 0}
    detected = plugin.anyaccel_detect(machine({path: {"text": ""}}, {"nvml/system": {"value": system}}))
    assert detected.devices == ()
    assert detected.driver_version == "560.94"


def test_a_tegra_board_without_nvml_says_so(machine):
    detected = plugin.anyaccel_detect(machine({"/sys/devices/soc0/family": {"text": "Tegra\n"}}, NO_LIBRARY))
    assert detected.devices == ()
    assert "Tegra" in detected.notes[0]


def test_another_root_is_looked_at_by_its_files(tmp_path):
    for path, text in {
        f"sys/bus/pci/devices/{ONE}/vendor": "0x10de",
        f"sys/bus/pci/devices/{ONE}/class": "0x030200",
        f"sys/bus/pci/devices/{ONE}/device": "0x27b8",
        f"proc/driver/nvidia/gpus/{ONE}/information": f"GPU UUID: \t {UUID}\nDevice Minor: \t 0\n",
        "dev/nvidia0": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / f"sys/bus/pci/devices/{ONE}/driver").symlink_to("../drivers/nvidia")
    detected = plugin.anyaccel_detect(ProbeContext(HostFacts({}, str(tmp_path)), float("inf")))
    assert [device.id for device in detected.devices] == [UUID]
    assert "from outside" in detected.notes[0]


def test_a_gpu_of_another_driver_beside_nvmls_comes_last(machine):
    # The last GPU has NVIDIA's driver and no device node: it was given to another container.
    paths = card("0000:01:00.0", "vfio-pci") | card(ONE) | card("0000:90:00.0")  # the last: another container's
    devices = plugin.anyaccel_detect(machine(paths, one_gpu(bus_id=f"0000{ONE}"))).devices
    assert [(device.id, device.index) for device in devices] == [(UUID, 0), ("nvidia-0000:01:00.0", 1)]


@pytest.mark.parametrize("line", ["GPU Excluded: \t Yes", "GPU Blacklisted: Yes", "Blacklisted:\t Yes"])
def test_an_excluded_gpu_is_no_device_and_is_reported(machine, line):
    """Drivers before 470 say blacklisted."""
    ctx = machine(card(ONE) | NODE | information(ONE, f"GPU UUID: {UUID}\n{line}\n"), NO_LIBRARY)
    assert plugin.anyaccel_detect(ctx).devices == ()
    (finding,) = plugin.anyaccel_diagnose(ctx)
    assert "NVreg_ExcludedGpus" in finding.remedy
    assert UUID in finding.reason


def test_a_gpu_that_is_not_blacklisted_is_a_device(machine):
    ctx = machine(card(ONE) | NODE | information(ONE, f"GPU UUID: {UUID}\nBlacklisted:\t No\n"), NO_LIBRARY)
    assert len(plugin.anyaccel_detect(ctx).devices) == 1


def test_information_that_only_root_may_read_leaves_the_pci_address_as_identity(machine):
    paths = card(ONE) | NODE | {f"/proc/driver/nvidia/gpus/{ONE}/information": {"errno": "EACCES"}}
    (device,) = plugin.anyaccel_detect(machine(paths, NO_LIBRARY)).devices
    assert (device.id, device.nodes) == (f"nvidia-{ONE}", ())


def test_a_uuid_that_is_not_known_yet_is_no_uuid(machine):
    text = "GPU UUID: \t GPU-????????-????-????-????-????????????\nDevice Minor: \t 0\n"
    (device,) = plugin.anyaccel_detect(machine(card(ONE) | NODE | information(ONE, text), NO_LIBRARY)).devices
    assert device.id == f"nvidia-{ONE}"


def test_the_minor_number_is_read_and_not_assumed(machine):
    paths = card(ONE) | information(ONE, f"GPU UUID: {UUID}\nDevice Minor: 5\n") | {"/dev/nvidia5": {"char": [195, 5]}}
    (device,) = plugin.anyaccel_detect(machine(paths, NO_LIBRARY)).devices
    assert (device.index, device.nodes) == (0, ("/dev/nvidia5",))


def test_a_node_without_permission_makes_a_gpu_unhealthy(machine):
    node = {"/dev/nvidia0": {"char": [195, 0], "access": ""}}
    paths = card(ONE) | node | information(ONE, f"GPU UUID: {UUID}\nDevice Minor: 0\n")
    (device,) = plugin.anyaccel_detect(machine(paths, NO_LIBRARY)).devices
    assert device.health is Health.UNHEALTHY
    assert "/dev/nvidia0" in device.health_reason


def test_a_gpu_with_mig_instances_is_not_offered_whole_when_nvml_is_missing(machine):
    paths = card(ONE) | NODE | information(ONE, f"GPU UUID: {UUID}\nDevice Minor: 0\n")
    paths["/proc/driver/nvidia/capabilities/gpu0/mig/gi1/access"] = {"text": "DeviceFileMinor: 12\n"}
    (device,) = plugin.anyaccel_detect(machine(paths, NO_LIBRARY)).devices
    assert device.health is Health.UNHEALTHY
    assert "MIG" in device.health_reason


@pytest.mark.parametrize("text", ["GPU UUID: banana\n", f"GPU UUID: {UUID[:-1]}\n", "Device Minor: zero\n"])
def test_malformed_information_is_an_error_that_names_file_and_value(machine, text):
    with pytest.raises(ValueError, match=rf"/proc/driver/nvidia/gpus/{ONE}/information: .*\(got '"):
        plugin.anyaccel_detect(machine(card(ONE) | NODE | information(ONE, text), NO_LIBRARY))


def test_a_module_that_nvml_misses_while_it_is_there_is_an_error(machine):
    paths = card(ONE) | NODE | information(ONE, f"GPU UUID: {UUID}\nDevice Minor: 0\n")
    with pytest.raises(ValueError, match="modprobe nvidia"):
        plugin.anyaccel_detect(machine(paths, NO_MODULE))


def test_a_foreign_module_by_the_name_of_the_binding_is_an_error(machine):
    with pytest.raises(ValueError, match="AttributeError"):
        plugin.anyaccel_detect(machine(card(ONE) | NODE, fault("AttributeError")))


def test_a_lost_gpu_that_no_file_can_name_has_an_identity_of_its_own(machine):
    queries = {
        "nvml/system": {"value": {"driver": "550.54", "cuda": None, "count": 1}},
        "nvml/device/0": {"error": {"kind": "NVMLError_GpuIsLost", "message": "GPU is lost", "value": 15}},
    }
    detected = plugin.anyaccel_detect(machine(NODE, queries))
    (device,) = detected.devices
    assert detected.partial
    assert (device.id, device.health) == ("nvidia-unidentified-0", Health.UNHEALTHY)


def test_a_missing_topology_is_no_fault(machine):
    # NVML_ERROR_UNKNOWN from the topology alone (NVIDIA/go-gpuallocator#17).
    facts = dict.fromkeys(("memory", "compute_mode", "compute_capability", "fabric", "mig", "minor", "pci_device"))
    queries = {"nvml/system": {"value": {"driver": "550.54", "cuda": None, "count": 2}}}
    for index in range(2):
        own = {"index": index, "uuid": UUID[:-1] + str(index), "name": "NVIDIA L4", "bus_id": f"00000000:0{index}:00.0"}
        queries[f"nvml/device/{index}"] = {"value": {**facts, **own, "mig_devices": []}}
    queries["nvml/topology"] = {"error": {"kind": "NVMLError_Unknown", "message": "", "value": 999}}
    assert [device.links for device in plugin.anyaccel_detect(machine(NODE, queries)).devices] == [{}, {}]


def test_a_display_adapter_of_a_dgx_station_is_skipped(machine):
    assert plugin.anyaccel_detect(machine(NODE, one_gpu(name="NVIDIA DGX Display"))).devices == ()


@pytest.mark.parametrize(
    ("bus_id", "address"),
    [
        ("00000000:0C:00.0", "0000:0c:00.0"),
        ("0000:0C:00.0", "0000:0c:00.0"),
        # Domains behind Intel's VMD have five digits.
        ("00000008:01:00.0", "0008:01:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
    ],
)
def test_bus_ids_are_written_as_sysfs_writes_them(machine, bus_id, address):
    (device,) = plugin.anyaccel_detect(machine(NODE, one_gpu(bus_id=bus_id))).devices
    assert device.pci_bus_id == address


def test_a_domain_of_32_bits_is_the_kernels_of_16(machine):
    """Azure and Hyper-V (nvidia-docker#1316): NVML says 03F8CFDD, the kernel and the driver's files cfdd."""
    address = "cfdd:00:00.0"
    numa = {f"/sys/bus/pci/devices/{address}/numa_node": {"text": "1"}}
    paths = card(address) | numa | information(address, f"GPU UUID: {UUID}\nDevice Minor: 0\n") | NODE
    (device,) = plugin.anyaccel_detect(machine(paths, one_gpu(bus_id="03F8CFDD:00:00.0"))).devices
    assert (device.id, device.pci_bus_id, device.numa_node) == (UUID, address, 1)
    assert device.nodes == ("/dev/nvidia0",)


def test_a_wide_domain_that_the_kernel_has_is_kept(machine):
    """Intel's VMD begins at 10000; its lower 16 bits may be those of another card."""
    paths = card("10000:01:00.0") | card("0000:01:00.0", "vfio-pci") | NODE
    first, _ = plugin.anyaccel_detect(machine(paths, one_gpu(bus_id="00010000:01:00.0"))).devices
    assert first.pci_bus_id == "10000:01:00.0"


def test_a_malformed_bus_id_is_an_error(machine):
    with pytest.raises(ValueError, match=r"00000000:0C:00\.0 \(got 'PCI:1'\)"):
        plugin.anyaccel_detect(machine(NODE, one_gpu(bus_id="PCI:1")))


@pytest.mark.parametrize(
    ("ids", "model"),
    [
        ({"device": "0x1b06"}, "NVIDIA GeForce GTX 1080 Ti"),
        ({"device": "0x2684"}, "NVIDIA GeForce RTX 4090"),
        ({"device": "0x1e30"}, "Quadro RTX 6000"),
        ({"device": "0x1e30", "subsystem_vendor": "0x10de", "subsystem_device": "0x129e"}, "Quadro RTX 8000"),
        ({"device": "0xfff0"}, "NVIDIA GeForce RTX 9090"),
        ({"device": "0xfff1"}, "NVIDIA GB902GL"),
        ({"device": "0xfff2"}, "NVIDIA Device fff2"),
    ],
)
@pytest.mark.parametrize("name", [None, "NVIDIA Graphics Device", "nouveau"])
def test_a_card_without_a_name_is_named_by_its_pci_id(machine, ids, model, name):
    """By the list of NVIDIA's names first, and by the machine's own list of PCI ids."""
    listed = {"pci.ids/10de:fff0": {"value": "GB902 [GeForce RTX 9090]"}, "pci.ids/10de:fff1": {"value": "GB902GL"}}
    files = {f"/sys/bus/pci/devices/{ONE}/{file}": {"text": text} for file, text in ids.items()}
    paths = card(ONE, "nouveau" if name == "nouveau" else "nvidia") | NODE | files
    queries = NO_MODULE if name == "nouveau" else one_gpu(name=name, bus_id=f"0000{ONE}")
    (device,) = plugin.anyaccel_detect(machine(paths, queries | listed)).devices
    assert device.model == model


@pytest.mark.parametrize("path", ["/proc/driver/nvidia-caps/mig-minors", "/proc/driver/nvidia/version"])
def test_a_file_that_may_not_be_read_costs_its_own_fact_only(path):
    recording = load_recording(RECORDINGS / "h100-1gpu-mig")
    recording["paths"][path] = {"errno": "EACCES"}
    assert len(plugin.anyaccel_detect(context(recording)).devices) == 4
