"""Nearly every mistake of an author is found by a check, and none costs a neighbour more than the pages say."""

from __future__ import annotations

import json

import anyaccel
import pytest
from anyaccel_testing import CHECKS, State, run_checks
from careless import CORRECT, MISTAKES, NOT_FOUND, PRESENCE, SERIALS, machine, source
from lengths import length

HOOK_SECONDS = 3
NEEDS_EXPECTED = {"C07"}
"""The check that compares with ``expected.json``, which is not written for each mistake."""
SHARED_NODE = "a neighbour's node"
"""The one mistake that takes a device from the neighbour: a node that two vendors list belongs to neither."""


@pytest.fixture
def boards(tmp_path, install, acme):  # the neighbour is installed first
    """Install the plug-in with a mistake beside a correct neighbour, and return the directory of recordings."""

    def boards(text, presence=PRESENCE):
        install("volt", text).with_suffix(".presence.json").write_text(presence)
        for name, serials in (("boards", SERIALS), ("two", SERIALS[:2]), ("none", ())):
            (tmp_path / "recordings" / name).mkdir(parents=True)
            (tmp_path / "recordings" / name / "machine.json").write_text(json.dumps(machine(serials)))
        return tmp_path / "recordings"

    return boards


def list_failures(directory, only):
    results = run_checks("volt", directory, only=only, seconds=60, timeout=HOOK_SECONDS)
    return [result for result in results if result.state is State.FAILED]


def find_neighbour(directory):
    (found,) = [device for device in anyaccel.detect(str(directory / "boards")).devices if device.vendor == "acme"]
    return found


ALL_BUT_EXPECTED = [check.id for check in CHECKS if check.id not in NEEDS_EXPECTED]


def test_the_correct_plugin_passes(boards):
    directory = boards(CORRECT)
    assert list_failures(directory, ALL_BUT_EXPECTED) == []
    inventory = anyaccel.detect(str(directory / "boards"))
    assert [device.id for device in inventory.devices if device.vendor == "volt"] == [
        f"VOLT-{each}" for each in SERIALS
    ]


def test_most_mistakes_are_found():
    assert len(MISTAKES) >= 50
    assert [name for name, mistake in MISTAKES.items() if mistake.check == NOT_FOUND] == [
        "a file behind the back of ctx",
        "blanks that the runtime may not know",
    ]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_and_costs_no_neighbour(name, boards):
    mistake = MISTAKES[name]
    directory = boards(source(mistake.edits), mistake.presence)
    # At full length, what is not found is looked for by every check.
    failures = list_failures(directory, [mistake.check] if mistake.check else length(["C22"], ALL_BUT_EXPECTED))
    assert {failure.check for failure in failures} == ({mistake.check} if mistake.check else set())
    assert mistake.message in " ".join(failure.message for failure in failures) or not mistake.check
    # In one process with the mistake, as a scheduler has them, the neighbour's device is found and can be requested.
    neighbour = find_neighbour(directory)
    assert neighbour.usable is (name != SHARED_NODE), neighbour
    # Hooks of each vendor run in a process of its own, so the neighbour answers beside a death or a hang.
    seen, _ = anyaccel.stats(anyaccel.detect(str(directory / "boards")), timeout=2 if "hangs" in name else 10)
    assert seen[neighbour.id].memory_used_bytes == 1 << 30
    if neighbour.usable:
        scheduler = anyaccel.open_scheduler(anyaccel.detect(str(directory / "boards")))
        assert [device.id for device in scheduler.allocate("acme:1").devices] == [neighbour.id]
    else:
        assert "the plug-ins acme and volt both list device node /dev/acme0" in neighbour.health_reason
