"""Shares of a GPU as sets of its compute units, on request."""

import json
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.plugin import EnvContext, Share, VisiblePart, replace
from anyaccel_amd import plugin, units

RECORDINGS = Path(__file__).parent.parent / "recordings"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Eight MI300X, detected in an environment with the request."""
    monkeypatch.setenv("ANYACCEL_PLUGINS", "amd")

    def machine(environ):
        recording = json.loads((RECORDINGS / "mi300x-8gpu" / "machine.json").read_text())
        (tmp_path / "machine.json").write_text(json.dumps({**recording, "environ": environ}))
        return aa.detect(str(tmp_path))

    return machine


def test_two_halves_get_different_compute_units(machine):
    scheduler = aa.open_scheduler(inventory := machine({units.WISH: "1"}))
    halves = [aa.worker_environment(scheduler.allocate("amd/3:0.5"), inventory) for _ in range(2)]
    assert [half.set[units.MASK] for half in halves] == [
        "3:0-37,38-75,76-113,114-151",
        "3:152-189,190-227,228-265,266-303",
    ]
    for half in halves:
        (share,) = half.allocation.shares
        assert (share.memory_by, share.compute_by) == ("by agreement", "CU mask")


def test_a_share_is_rounded_up_to_a_slot_and_a_whole_gpu_has_no_mask(machine):
    inventory = machine({units.WISH: "1"})
    made = aa.prepare("amd/0:0.1", inventory=inventory).environment
    assert (made.allocation.shares[0].units, made.set[units.MASK]) == (1250, "0:0-37")
    assert units.MASK not in aa.prepare("amd/0", inventory=inventory).environment.set


def test_a_mask_that_does_not_hold_all_shares_is_not_told_of_any(machine):
    """The units of the second GPU are unknown, so only the first has slots."""
    first, other = machine({units.WISH: "1"}).devices[:2]
    other = replace(other, slots=1, attributes={**other.attributes, "compute_units": None})
    shares = {first.id: Share(device=first, units=5000, slots=(0, 1, 2, 3)), other.id: Share(device=other, units=5000)}
    edits = plugin.anyaccel_env([first, other], EnvContext(devices=(first, other), shares=shares))
    assert (units.MASK in edits.set, edits.compute_by) == (True, "")


def test_numbers_count_from_0_where_the_runtime_below_is_masked(machine):
    environ = {"ANYACCEL_AMD_MASK": "rocr"}
    made = aa.prepare("amd/3:0.25", inventory=machine({units.WISH: "1"}), environ=environ).environment
    assert (made.set["ROCR_VISIBLE_DEVICES"], made.set[units.MASK]) == ("3", "0:0-37,38-75")


def test_a_worker_sees_its_own_slots(machine):
    inventory = machine({units.WISH: "1"})
    for way in ({}, {"ANYACCEL_AMD_MASK": "rocr"}):
        made = aa.prepare("amd/3:0.25", inventory=inventory, environ=way).environment
        (part,) = plugin.anyaccel_visible(made.set, inventory.devices)
        assert part == VisiblePart(id=inventory.devices[3].id, slots=(0, 1))


@pytest.mark.parametrize("mask", ["0:0x3F", "0:3-5", "0:0-37,99-100", "nonsense", "0:1:2", "", "0:304-341"])
def test_a_foreign_mask_names_no_slots(machine, mask):
    devices = machine({units.WISH: "1"}).devices
    found = plugin.anyaccel_visible({units.MASK: mask}, devices)
    assert found == [device.id for device in devices]


def test_nothing_changes_where_it_is_not_wanted(machine):
    inventory = machine({})
    made = aa.prepare("amd/0:0.1", inventory=inventory).environment
    assert {device.slots for device in inventory.devices} == {1}
    assert (made.allocation.shares[0].units, units.MASK in made.set) == (1000, False)


@pytest.mark.parametrize(("count", "slots"), [(304, 8), (96, 8), (104, 4), (60, 5), (36, 2), (3, 1), (0, 1), (None, 1)])
def test_slots_are_pairs_of_units_of_one_size(count, slots):
    assert units.slots(count, {units.WISH: "1"}) == slots
    assert units.slots(count, {units.WISH: "0"}) == 1
