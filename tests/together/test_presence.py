"""What the plug-ins say of their presence, held against every recorded machine; and a machine that has nothing."""

import json
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.model import VendorState
from anyaccel.probe.loading import load
from anyaccel.probe.recording import RecordedFacts
from anyaccel.vendors.discovery import installed
from anyaccel.vendors.presence import possible, presence

PLUGINS = Path(__file__).parents[2] / "plugins"
RECORDINGS = sorted(PLUGINS.glob("*/recordings/*/machine.json"))
NETWORK_CARD = {
    f"/sys/bus/pci/devices/0000:00:04.0/{name}": {"text": text}
    for name, text in {"vendor": "0x1af4\n", "device": "0x1041\n", "class": "0x020000\n"}.items()
}


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: f"{path.parts[-4]}-{path.parts[-2]}")
def test_a_vendor_that_is_on_a_recorded_machine_is_asked(path):
    expected = json.loads(path.with_name("expected.json").read_text())
    vendors = {path.parts[-4]: expected} if expected is None else expected.get("vendors", {path.parts[-4]: expected})
    facts = RecordedFacts(load(str(path)))
    asked = possible(installed()[0], facts, facts.environ)
    missed = {vendor for vendor, found in vendors.items() if found is not None} - asked.keys()
    assert missed & {source.vendor for source in installed()[0]} == set()


def test_every_plugin_says_by_what_it_is_recognised_and_for_which_resource():
    for source in installed()[0]:
        said = presence(source)
        assert said is not None, source.vendor
        (resource,) = {
            report.resource for report in aa.detect(everybody=True).vendors if report.vendor == source.vendor
        }
        assert said.resource == resource


def test_nobody_is_asked_on_a_machine_that_has_nothing(tmp_path):
    recording = {"schema": "anyaccel.recording/1", "paths": NETWORK_CARD}
    (tmp_path / "machine.json").write_text(json.dumps(recording))
    inventory = aa.detect(str(tmp_path))
    assert {report.state for report in inventory.vendors} == {VendorState.NOT_ASKED}
    asked = aa.detect(str(tmp_path), everybody=True)
    assert {report.state for report in asked.vendors} == {VendorState.ABSENT}


def test_everybody_is_asked_where_the_bus_cannot_be_listed(tmp_path):
    (tmp_path / "machine.json").write_text(json.dumps({"schema": "anyaccel.recording/1"}))
    assert VendorState.NOT_ASKED not in {report.state for report in aa.detect(str(tmp_path)).vendors}
