"""FuriosaAI's furiosa-smi reads the recorded driver as the plug-in does: health, cores, identity, NUMA node."""

import anyaccel
import pytest
from anyaccel.model import Health

pytest.importorskip("furiosa_smi_py", reason="tox -e real-furiosa installs furiosa-smi")

# Liveness alone is asked of a dead card: everything else raises there.
PROGRAM = """
import json
import furiosa_smi
found = {}
for device in furiosa_smi.list_devices():
    facts = [device.liveness(), device.core_num(), device.serial(), device.numa_node(), device.dev_node_index()]
    found[str(device.bdf())] = facts
print(json.dumps(found))
"""
BINDING = """
import json
import furiosa_smi_py
furiosa_smi_py.init()
alive = []
for device in furiosa_smi_py.list_devices():
    try:
        alive.append(bool(device.liveness()))
    except RuntimeError:
        alive.append(False)
print(json.dumps(alive))
"""
ABOUT_LIFE = ("state", "alive")


@pytest.fixture
def ours(recordings):
    """Inventories of machines on which the driver has a directory for cards; furiosa-smi does not know other cards."""
    found = {}
    for path in recordings("furiosa").values():
        devices = [device for device in anyaccel.detect(str(path)).devices if device.model != "Warboy" and device.nodes]
        if devices:
            found[path] = devices
    assert found
    return found


def differences(device, facts):
    alive, cores, serial, numa_node, number = facts
    dead = device.health is Health.UNHEALTHY and any(word in device.health_reason for word in ABOUT_LIFE)
    told = {"alive": alive, "serial": serial, "NUMA node": numa_node, "number": number, "cores": cores}
    said = {
        "alive": not dead,
        "serial": device.id.removeprefix("furiosa-"),
        "NUMA node": device.numa_node,
        "number": device.index,
        "cores": cores
        if device.health is Health.UNHEALTHY
        else device.slots,  # a container may have some cores of a card
    }
    return {name: (said[name], value) for name, value in told.items() if said[name] != value}


def test_health_identity_and_cores_are_what_furiosa_smi_finds(ours, ask, report):
    agreeing = {}
    for path, devices in ours.items():
        theirs = ask(path, PROGRAM)
        by_address = {device.pci_bus_id: device for device in devices}
        faults = {
            address: differences(by_address[address], facts)
            for address, facts in theirs.items()
            if address in by_address
        }
        # A card of the host whose nodes are not in the container is unknown to furiosa-smi, and unusable to us.
        usable = {address for address, device in by_address.items() if device.health is not Health.UNHEALTHY}
        missing = dict.fromkeys(usable - theirs.keys(), "furiosa-smi does not list it")
        missing |= dict.fromkeys(theirs.keys() - by_address.keys(), "anyaccel does not list it")
        agreeing[path.name] = {address: fault for address, fault in (faults | missing).items() if fault}
    report("furiosa", "furiosa-smi", "liveness, cores, serial number, NUMA node, number of the node", agreeing)


def test_the_binding_of_before_takes_the_same_cards_for_alive(ours, ask, report):
    agreeing = {}
    for path, devices in ours.items():
        # Of a dead card the binding tells nothing else, so the cards are counted.
        dead = sum(any(word in device.health_reason for word in ABOUT_LIFE) for device in devices)
        lost = ask(path, BINDING).count(False)
        agreeing[path.name] = [] if lost == dead else [lost, dead]
    report("furiosa", "furiosa-smi-py", "liveness", agreeing)
