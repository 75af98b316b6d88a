"""tpu-info and JAX find the same chips of the same type, tpu-info behind the same nodes."""

import json
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import anyaccel
import pytest

if find_spec("tpu_info") is None and find_spec("libtpu") is None:
    pytest.skip("tox -e real-tpu installs tpu-info and JAX, tox -e real-libtpu libtpu", allow_module_level=True)

# Chips by type and, where VFIO gives the nodes, their nodes in tpu-info's order.
PROGRAM = """
import json
from tpu_info import device
kind, count = device.get_local_chips()
chips = device.get_chips()
nodes = [chip.cores[min(chip.cores)].vfio_path for chip in chips]
print(json.dumps([kind and kind.value.name, count, kind and kind.value.devices_per_chip, len(chips), nodes]))
"""
# JAX looks for chips before it loads libtpu. Its file is loaded alone, since importing JAX needs its compiled half.
JAX = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("hardware_utils", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
count, version = module.num_available_tpu_chips_and_device_id()
print(json.dumps([count, version and version.name]))
"""
PCI = "/sys/bus/pci/devices/"
FUNCTIONS = {"tpu7x": 2}
"""Functions of a chip, which JAX counts, where it has more than one."""
NAMES_OF_JAX = {"7x": "tpu7x", "v2": "v3"}
"""Types that JAX names otherwise: v2 and v3 have one PCI id, and JAX does not tell them apart."""


@pytest.fixture
def whole(tmp_path):
    """Copy a recording with what every kernel shows of a PCI function, and no plug-in asks for."""

    def whole(path):
        recording = json.loads((path / "machine.json").read_text())
        functions = {each.removeprefix(PCI).partition("/")[0] for each in recording["paths"] if each.startswith(PCI)}
        for function in functions:
            for name in ("vendor", "device", "subsystem_device"):
                recording["paths"].setdefault(f"{PCI}{function}/{name}", {"text": "0x0000\n"})
        (tmp_path / path.name).mkdir()
        (tmp_path / path.name / "machine.json").write_text(json.dumps(recording))
        return tmp_path / path.name

    return whole


def test_chips_types_and_nodes_are_those_of_tpu_info(recordings, ask, whole, report):
    if find_spec("tpu_info") is None:
        pytest.skip("tox -e real-tpu installs tpu-info")
    agreeing = {}
    for name, path in recordings("tpu").items():
        ours = [device for device in anyaccel.detect(str(path)).devices if device.vendor == "tpu" and device.pci_bus_id]
        if not ours or PCI not in (path / "machine.json").read_text():  # tpu-info looks for chips on PCI alone
            continue
        kind, functions, per_chip, chips, nodes = ask(whole(path), PROGRAM)
        # tpu7x shows two functions of each chip, which tpu-info counts; what is given out is the chip.
        count = chips if per_chip == 2 and nodes else functions
        said = {device.model.removeprefix("TPU").strip().removeprefix("v") for device in ours}
        faults = (
            [] if (said, len(ours)) == ({str(kind).removeprefix("v").removeprefix("TPU")}, count) else [kind, count]
        )
        mine = [device.nodes[0] for device in ours if device.nodes and "vfio" in device.nodes[0]]
        if nodes and mine and nodes != mine:
            faults += [nodes, mine]
        agreeing[name] = faults
    assert Counter(map(bool, agreeing.values()))[False] > 5
    report("tpu", "tpu-info", "number and type of chips, order of the VFIO nodes", agreeing)


def test_jax_counts_the_same_chips_of_the_same_type(recordings, ask, whole, report):
    if find_spec("jax") is None:
        pytest.skip("tox -e real-tpu installs jax")
    (folder,) = find_spec("jax").submodule_search_locations
    agreeing = {}
    for name, path in recordings("tpu").items():
        ours = [device for device in anyaccel.detect(str(path)).devices if device.vendor == "tpu" and device.pci_bus_id]
        if not ours or PCI not in (path / "machine.json").read_text():
            continue
        count, version = ask(whole(path), JAX, f"{folder}/_src/hardware_utils.py")
        models = {device.model.removeprefix("TPU").strip() for device in ours}
        types = {NAMES_OF_JAX.get(model, model) for model in models}
        chips = count // FUNCTIONS.get(version, 1)
        agreeing[name] = [] if (types, len(ours)) == ({version}, chips) else [version, count, sorted(types), len(ours)]
    assert Counter(map(bool, agreeing.values()))[False] > 5
    report("tpu", "jax", "number and type of chips on PCI", agreeing)


def test_libtpu_knows_each_variable_of_the_plugin(report):
    if find_spec("libtpu") is None:
        pytest.skip("tox -e real-libtpu installs libtpu")
    (folder,) = find_spec("libtpu").submodule_search_locations
    data = (Path(folder) / "libtpu.so").read_bytes()
    from anyaccel_tpu import plugin

    variables = plugin.anyaccel_info().env_vars
    known = {name.decode() for name in re.findall(rb"(?<![A-Z_])[A-Z]+(?:_[A-Z]+)+(?![A-Z_])", data)}
    faults = {name: [] if name in known else ["not in the library"] for name in variables}
    report("tpu", "libtpu", "variables", faults, cases="names")
