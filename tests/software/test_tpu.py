"""tpu-info finds the same chips of the same type behind the same nodes."""

import json
from collections import Counter

import anyaccel
import pytest

pytest.importorskip("tpu_info", reason="tox -e real-tpu installs tpu-info")

# Chips by type and, where VFIO gives the nodes, their nodes in tpu-info's order.
PROGRAM = """
import json
from tpu_info import device
kind, count = device.get_local_chips()
chips = device.get_chips()
nodes = [chip.cores[min(chip.cores)].vfio_path for chip in chips]
print(json.dumps([kind and kind.value.name, count, kind and kind.value.devices_per_chip, len(chips), nodes]))
"""
PCI = "/sys/bus/pci/devices/"


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
