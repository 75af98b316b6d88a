"""ResourceSlices of machines, against the rules of the API server."""

import json
import re
from pathlib import Path

import anyaccel
import pytest
import slice_rules
from anyaccel.plugin import replace
from anyaccel_export.slices import Features, Obstacle, device_names, make_slices
from anyaccel_kubernetes.node import Node

ROOT = Path(__file__).parents[3]
RECORDING = ROOT / "plugins/neuron/recordings/trn2-3xlarge-lnc1-no-tools"


def checked(inventory, **options):
    slices = make_slices(inventory, "n1", **options)
    slice_rules.check_all(slices)
    return {device["name"]: device for each in slices for device in each["spec"].get("devices", ())}


def test_standard_attributes_and_ours():
    inventory = anyaccel.detect("sim:H100:2")
    device = inventory.devices[0]
    entry = checked(inventory, roots={device.id: "pci0000:00"})[device_names(inventory)[device.id]]
    attributes = entry["attributes"]
    assert attributes["type"] == {"string": "H100"}
    assert attributes["resource.kubernetes.io/pcieRoot"] == {"string": "pci0000:00"}
    assert attributes["resource.kubernetes.io/pciBusID"] == {"string": device.pci_bus_id}
    assert attributes["resource.kubernetes.io/numaNode"] == {"int": device.numa_node}
    assert entry["capacity"] == {"memory": {"value": str(device.memory_bytes)}}


def test_a_device_that_cannot_be_given_out_has_a_taint_or_is_left_out():
    inventory = anyaccel.detect("sim:H100:2")
    held = inventory.devices[0]
    name = device_names(inventory)[held.id]
    with_reason = {held.id: Obstacle(kind="held", reason="ada: training")}
    (taint,) = checked(inventory, obstacles=with_reason)[name]["taints"]
    assert taint == {"key": "anyaccel.dev/held", "value": "ada-training", "effect": "NoSchedule"}
    assert name not in checked(inventory, obstacles=with_reason, features=Features(taints=False))


def divided(inventory, whole, count):
    """The machine with parts of a device."""
    parts = tuple(
        replace(whole, id=f"{whole.id}-part{number}", parent=whole.id, index=len(inventory.devices) + number, links={})
        for number in range(count)
    )
    return replace(inventory, devices=(*inventory.devices, *parts)), parts


def test_a_device_and_its_parts_exclude_each_other_at_any_depth():
    inventory = anyaccel.detect("sim:H100:2")
    whole, other = inventory.devices
    inventory, (first, second, _) = divided(inventory, whole, 3)
    inventory, (inner, *_) = divided(inventory, first, 2)
    names = device_names(inventory)
    checked(inventory)
    slices = make_slices(inventory, "n1")

    def allows(*chosen):
        return slice_rules.allows(slices, [names[device.id] for device in chosen])

    assert allows(whole, other)
    assert allows(first, second, other)
    assert allows(inner, second)
    for pair in ((whole, first), (whole, inner), (first, inner)):
        assert not allows(*pair)
    without = checked(inventory, features=Features(counters=False))
    assert names[second.id] in without
    assert not {names[whole.id], names[first.id]} & set(without)


def test_a_device_with_more_parts_than_counters_is_left_out():
    inventory, parts = divided(anyaccel.detect("sim:H100:1"), anyaccel.detect("sim:H100:1").devices[0], 33)
    assert set(checked(inventory)) == {device_names(inventory)[part.id] for part in parts}


def test_shares_consume_memory_or_slots():
    inventory = anyaccel.detect("sim:H100:1")
    (entry,) = checked(inventory, features=Features(shares=True)).values()
    assert entry["allowMultipleAllocations"] is True
    memory = entry["capacity"]["memory"]
    assert memory["requestPolicy"]["default"] == memory["value"]  # without a capacity a request gets all
    slotted = replace(
        inventory, devices=(replace(inventory.devices[0], slots=8, fractional=anyaccel.Fractional.PARTITIONED),)
    )
    (entry,) = checked(slotted, features=Features(shares=True)).values()
    assert entry["capacity"]["slots"]["requestPolicy"] == {"default": "8", "validRange": {"min": "1", "step": "1"}}
    assert entry["capacity"]["memory"]["requestPolicy"]["default"] == "0"


def test_names_are_stable_labels():
    inventory = anyaccel.detect("sim:H100:8")
    names = device_names(inventory)
    assert len(set(names.values())) == 8
    assert all(re.fullmatch(slice_rules.LABEL, name) for name in names.values())
    fewer = replace(inventory, devices=inventory.devices[3:])
    assert device_names(fewer) == {device.id: names[device.id] for device in fewer.devices}


def test_a_device_whose_parts_a_person_holds_under_another_division_has_an_obstacle(tmp_path, monkeypatch):
    """A person's setting divides the chips of a node into other devices than the agent's."""
    monkeypatch.setenv("ANYACCEL_STATE_DIR", str(tmp_path / "state"))
    machine = tmp_path / "machine"
    machine.mkdir()
    recorded = json.loads((RECORDING / "machine.json").read_text())
    (machine / "machine.json").write_text(json.dumps(recorded))
    fine = anyaccel.detect(str(machine))
    (machine / "machine.json").write_text(
        json.dumps({**recorded, "environ": {**recorded.get("environ", {}), "NEURON_LOGICAL_NC_CONFIG": "2"}})
    )
    coarse = anyaccel.detect(str(machine))
    assert len(fine.devices) == 2 * len(coarse.devices)
    with anyaccel.acquire(anyaccel.request_devices([coarse.devices[1]]), inventory=coarse, unallocated="inherit"):
        (machine / "machine.json").write_text(json.dumps(recorded))
        node = Node(str(machine))
        held = {device.id for device in node.inventory.devices if device.id in node.obstacles()}
        node.stop()
    assert held == {fine.devices[2].id, fine.devices[3].id}


@pytest.mark.parametrize("machine", ["host", None])
def test_pcie_roots_are_those_of_this_host(install, monkeypatch, machine):
    monkeypatch.delenv("ANYACCEL_MACHINE", raising=False)
    functions = sorted(Path("/sys/bus/pci/devices").glob("*"))
    if not functions:
        pytest.skip("needs a PCI function on this host")
    text = (ROOT / "tests/vendors/divided.py").read_text()
    install("divided", text.replace("parent=parent,", f'parent=parent, pci_bus_id="{functions[0].name}",'))
    node = Node(machine)
    node.stop()
    (*_, root) = (part for part in functions[0].resolve().parts if part.startswith("pci"))
    assert set(node.roots().values()) == {root}
    assert len(node.roots()) == 3


def test_a_simulated_machine_has_no_pcie_roots_of_this_host(monkeypatch):
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:H100:1")
    node = Node(None)
    node.stop()
    assert node.roots() == {}
