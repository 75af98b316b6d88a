"""Independent programs read the vendors' tools and files as the plug-ins do.

Some vendors publish no software that runs without their driver. Monitors and schedulers of others do run: they read the
same outputs of the vendor's tool, and name the same PCI vendor, variables and device nodes.
"""

import importlib
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from anyaccel.kit import FaultError
from anyaccel_testing import context, load_recording

if find_spec("nputop") is None:
    pytest.skip("tox -e real-readers installs the programs", allow_module_level=True)

MIB = 1 << 20
VENDORS = {
    "amd": ("amd", "amd.com"),
    "ascend": ("ascend", "huawei.com"),
    "cambricon": ("cambricon", "cambricon.com"),
    "hygon": ("hygon", "hygon.com"),
    "iluvatar": ("iluvatar", "iluvatar.ai"),
    "metax": ("metax", "metax-tech.com"),
    "moorethreads": ("mthreads", "mthreads.com"),
    "nvidia": ("nvidia", "nvidia.com"),
}
"""By vendor, the names of its module and of its resource in gpustack-runtime."""
UNKNOWN_VARIABLES = {"moorethreads": {"CUDA_VISIBLE_DEVICES"}, "ascend": {"NPU_VISIBLE_DEVICES"}}
"""Variables that gpustack-runtime sets as well, and that no runtime of the vendor is known to read."""
UNUSED_NODES = {"amd": {"/dev/dri/card"}}
"""Nodes for displays, which gpustack-runtime gives a container beside the render nodes, and computing does not need."""


@pytest.fixture
def machines(recordings):
    """Yield the name, the devices and the stats of each recording with an output of a command that ends so."""

    def machines(vendor, *command):
        module = importlib.import_module(f"anyaccel_{vendor}")
        plugin = getattr(module, "plugin", module)
        for name, path in recordings(vendor).items():
            recording = load_recording(path)
            outputs = [
                entry.get("stdout", "")
                for entry in recording.get("commands", [])
                if tuple(entry["argv"][-len(command) :]) == command and entry.get("returncode", 0) == 0
            ]
            detected = plugin.anyaccel_detect(context(recording))
            if detected is None or not detected.devices or not outputs:
                continue
            try:
                stats = plugin.anyaccel_stats(detected.devices, context(recording))
            except FaultError:
                continue  # the tool of this machine prints garbage
            yield name, outputs[0], detected.devices, stats

    return machines


def compare_npus(rows, devices, stats):
    """Return the rows of npu-smi that no device on their address agrees with: memory, temperature and health."""
    faults = []
    for address, health, used, total, temperature in rows:
        # Bad health is worse than 'Warning'. A sound card may still be unusable for us, as one that is divided is.
        bad = health not in {"OK", "Warning"}
        here = [device for device in devices if device.pci_bus_id in {address.lower(), None}]
        like = [
            device
            for device in here
            if device.memory_bytes in {total, None}
            and (device.health.value == "unhealthy" if bad else True)
            and (seen := stats.get(device.id)) is not None
            # A divided card is not measured: its parts hold the memory.
            and (seen.temperature_celsius in {temperature, None})
            and (seen.memory_used_bytes in {used, None})
        ]
        # A card without a function on the bus is a note, and no device.
        if here and not like:
            faults.append([address, health, used, total, temperature])
    return faults


def test_nputop_reads_the_table_of_npu_smi_alike(machines, report):
    from nputop.api import libascend

    agreeing = {}
    for name, output, devices, stats in machines("ascend", "npu-smi", "info"):
        libascend._update_cache(output)
        rows = [
            (
                "" if row["bus_id"] == "NA" else row["bus_id"],
                row["health"],
                row["hbm_used"],
                row["hbm_total"],
                row["temp"],
            )
            for row in libascend._CACHE.values()
        ]
        if rows:
            agreeing[name] = compare_npus(rows, devices, stats)
    assert len(agreeing) > 10
    report("ascend", "ascend-nputop", "address, memory, temperature, health of npu-smi's table", agreeing, own=False)


def test_ascendtop_reads_the_table_of_npu_smi_alike(machines, report):
    from ascendtop import parse_npu_smi_info

    agreeing = {}
    for name, output, devices, stats in machines("ascend", "npu-smi", "info"):
        rows, _ = parse_npu_smi_info(output)  # it knows the layout with one chip per card alone
        if rows:
            told = [(r.bus_id, r.health, r.memory_used_mb * MIB, r.memory_total_mb * MIB, r.temp_c) for r in rows]
            agreeing[name] = compare_npus(told, devices, stats)
    assert len(agreeing) > 5
    report("ascend", "ascendtop", "address, memory, temperature, health of npu-smi's table", agreeing, own=False)


def test_mxtop_reads_the_list_of_mx_smi_alike(machines, report):
    from mxtop.backends.mxsmi import parse_list_output

    agreeing = {}
    for name, output, devices, _ in machines("metax", "-L"):
        # The row of a lost card has no address, and a sentence in place of it.
        theirs = {(row.index, row.name, row.bdf) for row in parse_list_output(output).values() if row.bdf}
        ours = {(device.index, device.model, device.pci_bus_id) for device in devices}
        if theirs:  # the tool of one recording prints garbage
            agreeing[name] = [] if theirs <= ours else [str(sorted(theirs)), str(sorted(ours))]
    assert len(agreeing) > 3
    report("metax", "metax-mxtop", "number, name and address of mx-smi's list", agreeing, own=False)


def test_backend_ai_reads_the_answer_of_rbln_smi_alike(machines, report):
    folder = next(iter(find_spec("ai.backend.accelerator.rebellions").submodule_search_locations))
    spec = importlib.util.spec_from_file_location("atom_api", Path(folder) / "common" / "atom_api.py")
    api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(api)
    agreeing = {}
    for name, output, devices, _ in machines("rebellions", "-g", "-j"):
        try:
            rows = api.ATOMStat.from_json(output).devices
        except (ValueError, KeyError):
            continue  # the tool of one recording prints a table
        theirs = {(row.pci.bus_id, row.name, f"/dev/{row.device}") for row in rows}
        ours = {(device.pci_bus_id, device.model, device.nodes[0]) for device in devices if device.nodes}
        agreeing[name] = [] if theirs <= ours else [str(sorted(theirs)), str(sorted(ours))]
    assert len(agreeing) > 1
    report(
        "rebellions",
        "backend-ai-accelerator-rebellions",
        "address, name and node of rbln-smi's cards",
        agreeing,
        own=False,
    )


@pytest.mark.parametrize("vendor", VENDORS)
def test_gpustack_names_the_same_pci_vendor_variables_and_nodes(vendor, recordings, report):
    # Its source is read: importing it loads clients of containers and of Kubernetes.
    folder = Path(next(iter(find_spec("gpustack_runtime").submodule_search_locations)))
    module, resource = VENDORS[vendor]
    plugin = importlib.import_module(f"anyaccel_{vendor}")
    plugin = getattr(plugin, "plugin", plugin)
    faults = {}
    (pci,) = re.findall(r'get_pci_devices\(vendor="0x(\w{4})"\)', (folder / "detector" / f"{module}.py").read_text())
    presence = json.loads((Path(plugin_folder(vendor)) / "presence.json").read_text())
    known = {sign["vendor"] for sign in presence["pci"]}
    faults[f"PCI vendor {pci}"] = [] if pci in known else [str(known)]
    source = (folder / "envs.py").read_text()
    _, _, behind = source.partition('"GPUSTACK_RUNTIME_DEPLOY_RESOURCE_KEY_MAP_BACKEND_VISIBLE_DEVICES": lambda')
    (variables,) = re.findall(rf'"{re.escape(resource)}/devices=([\w,]+);', behind)[:1]
    own = set(plugin.anyaccel_info().env_vars)
    for variable in set(variables.split(",")) - UNKNOWN_VARIABLES.get(vendor, set()):
        faults[variable] = [] if variable in own else [str(sorted(own))]
    cdi = folder / "deployer" / "cdi" / f"{module}.py"
    said = re.findall(r'path=f?"(/dev/[\w/]+?)(?:\{|")', cdi.read_text()) if cdi.exists() else []
    nodes = {
        node
        for path in recordings(vendor).values()
        for node in json.loads((path / "machine.json").read_text()).get("paths", {})
        if node.startswith("/dev/")
    }
    for begin in set(said) - UNUSED_NODES.get(vendor, set()):
        faults[f"nodes {begin}"] = [] if any(node.startswith(begin) for node in nodes) else [str(sorted(nodes)[:9])]
    report(vendor, "gpustack-runtime", "PCI vendor, variables, forms of device nodes", faults, cases="names", own=False)


def plugin_folder(vendor):
    return next(iter(find_spec(f"anyaccel_{vendor}").submodule_search_locations))
