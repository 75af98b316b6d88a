"""What the plug-ins say of their presence, held against every recorded machine; and a machine that has nothing."""

import json
import sys
from functools import cache
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.model import VendorState
from anyaccel.probe.recording import RecordedFacts, load
from anyaccel.vendors.discovery import Source, installed
from anyaccel.vendors.presence import Presence, read_presence, read_presences, select_present

PLUGINS = Path(__file__).parents[2] / "plugins"
RECORDINGS = sorted(PLUGINS.glob("*/recordings/*/machine.json"))
UNLISTED = """
from anyaccel.plugin import *
@hookimpl
def anyaccel_info(): return PluginInfo(vendor="unlisted", resource="XYZ", kind="xyz", env_vars=("XYZ_VISIBLE",))
@hookimpl
def anyaccel_detect(ctx): return None
@hookimpl
def anyaccel_fractional(device): return Fractional.NO
@hookimpl
def anyaccel_tags(device): return ("Secret-1",)
@hookimpl
def anyaccel_env(devices, ctx): return EnvEdits(set={"XYZ_VISIBLE": ",".join(d.id for d in devices)})
@hookimpl
def anyaccel_products(): return (Product(name="Secret-1", model="Secret-1"),)
"""
"""A plug-in without data beside it."""
NETWORK_CARD = {
    f"/sys/bus/pci/devices/0000:00:04.0/{name}": {"text": text}
    for name, text in {"vendor": "0x1af4\n", "device": "0x1041\n", "class": "0x020000\n"}.items()
}


@cache
def said_by_all():
    return read_presences(installed()[0])


@pytest.mark.parametrize("owner", sorted({path.parts[-4] for path in RECORDINGS}))
def test_a_vendor_that_is_on_a_recorded_machine_is_asked(owner):
    for path in (path for path in RECORDINGS if path.parts[-4] == owner):
        expected = json.loads(path.with_name("expected.json").read_text())
        vendors = {owner: expected} if expected is None else expected.get("vendors", {owner: expected})
        facts = RecordedFacts(load(str(path)))
        asked = select_present(said_by_all(), facts, facts.environ)
        missed = {vendor for vendor, found in vendors.items() if found is not None} - asked.keys()
        assert missed & said_by_all().keys() == set(), path


def test_every_plugin_says_by_what_it_is_recognised_and_for_which_resource():
    for source in installed()[0]:
        said = read_presence(source)
        assert said is not None, source.vendor
        (resource,) = {
            report.resource for report in aa.detect(everybody=True).vendors if report.vendor == source.vendor
        }
        assert said.resource == resource


def test_no_vendor_is_asked_on_a_machine_that_has_nothing(tmp_path):
    recording = {"schema": "anyaccel.recording/1", "paths": NETWORK_CARD}
    (tmp_path / "machine.json").write_text(json.dumps(recording))
    inventory = aa.detect(str(tmp_path))
    assert {report.state for report in inventory.vendors} == {VendorState.NOT_ASKED}
    asked = aa.detect(str(tmp_path), everybody=True)
    assert {report.state for report in asked.vendors} == {VendorState.ABSENT}


def test_everybody_is_asked_where_the_bus_cannot_be_listed(tmp_path):
    (tmp_path / "machine.json").write_text(json.dumps({"schema": "anyaccel.recording/1"}))
    assert VendorState.NOT_ASKED not in {report.state for report in aa.detect(str(tmp_path)).vendors}


@pytest.mark.parametrize("machine", ["sim:h100:2", "sim:MI300X:1,H100:1", "sim:H100/H100-MIG-1g.10gb:1"])
def test_a_simulation_asks_the_vendors_that_may_know_its_products(machine):
    states = {report.vendor: report.state for report in aa.detect(machine).vendors}
    served = {"nvidia", "amd"} if "MI300X" in machine else {"nvidia"}
    assert {vendor for vendor, state in states.items() if state is not VendorState.NOT_ASKED} == served
    assert VendorState.NOT_ASKED not in {report.state for report in aa.detect(machine, everybody=True).vendors}


def test_a_product_that_no_vendor_lists_is_asked_for_everywhere(install):
    install("unlisted", UNLISTED)
    assert [device.model for device in aa.detect("sim:Secret-1:2").devices] == ["Secret-1"] * 2
    with pytest.raises(aa.MachineError, match="did you mean Secret-1"):
        aa.detect("sim:Secret-2")


class Finder:
    """Counts what it is asked for, and finds nothing."""

    def __init__(self):
        self.asked = []

    def find_spec(self, name, path, target=None):
        self.asked.append(name)


def test_what_an_absent_vendor_says_is_read_without_a_finder(monkeypatch):
    finder = Finder()
    monkeypatch.setattr("sys.meta_path", [finder, *sys.meta_path])
    sources = [
        Source(vendor=path.parts[-2][9:], target=path.parts[-2]) for path in PLUGINS.glob("*/src/*/presence.json")
    ]
    assert select_present(read_presences(sources), RecordedFacts({"paths": NETWORK_CARD}), {}) == {}
    assert len(sources) > 10
    assert finder.asked == []


def test_a_directory_without_the_file_hides_no_package_behind_it(tmp_path, monkeypatch):
    (tmp_path / "first/anyaccel_acme/recordings").mkdir(parents=True)
    package = tmp_path / "second/anyaccel_acme"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "presence.json").write_text('{"paths": ["/dev/acme*"]}')
    monkeypatch.setattr("sys.path", [str(tmp_path / "first"), str(tmp_path / "second"), *sys.path])
    said = read_presences([Source(vendor="acme", target="anyaccel_acme:plugin")])
    assert select_present(said, RecordedFacts({"paths": NETWORK_CARD}), {}) == {}


def test_a_sign_of_presence_may_be_below_the_users_home():
    """A runtime without a kernel driver is often installed for a user alone."""
    signs = {"acme": Presence(paths=("~/.acme/runtime*",))}
    installed_for_ada = {"/home/ada/.acme/runtime-2": {"dir": True}, **NETWORK_CARD}
    facts = RecordedFacts({"schema": "anyaccel.recording/1", "paths": installed_for_ada})
    assert select_present(signs, facts, {"HOME": "/home/ada"}) == signs
    for environ in ({"HOME": "/home/bob"}, {"HOME": "home/ada"}, {}):
        assert select_present(signs, facts, environ) == {}
