"""Two users with logical cores of different sizes never get the same physical core."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lengths import length

RECORDING = Path(__file__).parent.parent / "recordings" / "trn2-3xlarge-lnc1-no-tools" / "machine.json"
PHYSICAL_CORES = 8
EACH = length(20, 60)
"""How often each user takes cores."""

# Takes cores again and again. What it holds it tells from the environment that the runtime would see, and claims by
# files, one for each physical core: a file that is there already is a core that was given twice.
HOLDER = """
import os, random, sys, time
from dataclasses import replace
import anyaccel

recording, claims, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
inventory = replace(anyaccel.detect(recording), machine="host")
everything = len(inventory.devices)
given = []
for _ in range(rounds):
    with anyaccel.acquire(f"neuron_cores:{random.choice((1, 2, everything))}", inventory=inventory, wait=60) as held:
        size = int(held.environ["NEURON_LOGICAL_NC_CONFIG"])
        cores = map(int, held.environ["NEURON_RT_VISIBLE_CORES"].split(","))
        mine = [f"{claims}/{core * size + part}" for core in cores for part in range(size)]
        for claim in mine:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
        time.sleep(0.002)
        for claim in mine:
            os.unlink(claim)
        given += mine
print(size, len(given))
"""


def recorded(where, size):
    """The machine for a user with logical cores of a size; the machine-wide file says 1."""
    facts = json.loads(RECORDING.read_text())
    facts["environ"] = {"NEURON_LOGICAL_NC_CONFIG": str(size)}
    where.mkdir()
    (where / "machine.json").write_text(json.dumps(facts))
    return str(where)


@pytest.fixture
def claims(tmp_path):
    path = tmp_path / "claims"
    path.mkdir()
    return path


def test_no_physical_core_is_given_to_two_users_at_once(tmp_path, claims, monkeypatch):
    monkeypatch.setenv("ANYACCEL_STATE_DIR", str(tmp_path / "leases"))
    machines = {size: recorded(tmp_path / f"size-{size}", size) for size in (1, 2)}
    commands = [
        [sys.executable, "-c", HOLDER, machines[size], str(claims), str(EACH)] for size in (1, 2) for _ in range(2)
    ]
    holders = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    printed = [holder.communicate(timeout=100) for holder in holders]
    assert [holder.returncode for holder in holders] == [0] * 4, "\n".join(error for _, error in printed)
    found = [tuple(map(int, output.split())) for output, _ in printed]
    assert [size for size, _ in found] == [1, 1, 2, 2]
    assert all(given >= EACH for _, given in found)
    assert list(claims.iterdir()) == []


def parts(machine):
    return [device.occupies for device in machine.devices()]


@pytest.mark.parametrize("variable", ["NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"])
@pytest.mark.parametrize("serial", ["", "00112233445566aa"])
def test_the_parts_of_all_cores_are_those_of_the_chip_whatever_the_size(new_machine, variable, serial):
    by_size, ids = {}, {}
    for size in (1, 2):
        machine = new_machine(str(size), **{variable: str(size)})
        machine.write(f"{machine.chip(0, 'Trainium2')}/info/serial_number", serial)
        by_size[size] = parts(machine)
        ids[size] = {device.id for device in machine.devices()}
    assert [len(each) for each in by_size[1]] == [1] * PHYSICAL_CORES
    assert [len(each) for each in by_size[2]] == [2] * (PHYSICAL_CORES // 2)
    assert sum(by_size[1], ()) == sum(by_size[2], ())
    assert ids[1].isdisjoint(ids[2])


def test_a_part_is_the_same_whether_or_not_a_users_tool_answers(new_machine):
    """A user's neuron-ls counts double cores; another user has no tool and asks for single cores."""
    one, other = new_machine("one"), new_machine("other", NEURON_LOGICAL_NC_CONFIG="1")
    for machine in (one, other):
        machine.chip(0, "Trainium2")
    one.lists({"neuron_device": 0, "bdf": "0000:33:00.0", "nc_count": 4, "logical_neuroncore_config": 2})
    assert [len(each) for each in parts(one)] == [2] * (PHYSICAL_CORES // 2)
    assert sum(parts(one), ()) == sum(parts(other), ())


def test_a_part_goes_by_the_number_of_the_node_and_not_by_its_name(new_machine):
    """A container may call the node of any chip /dev/neuron0."""
    host, container = new_machine("host"), new_machine("container")
    host.chip(0)
    host.chip(1)
    container.write("/sys/module/neuron/version", "2.24.7.0\n")
    container.chip(1, node="/dev/neuron0")
    assert parts(container) == parts(host)[2:]
