"""Flux's bindings on PyPI need its library, which is on neither PyPI nor Debian.

The entry is read as TOML, and by the rules of flux-config-resource(5).
``hosts`` is a hostlist, ``gpus`` a set of ids such as ``0-3,7`` in rising order, ``properties`` a list of words.
"""

import re
import tomllib

from anyaccel_export.flux import export
from export_machines import device, machines, source
from hypothesis import given, settings
from lengths import length


def read(text):
    entries = tomllib.loads(text).get("resource", {}).get("config", [])
    assert len(entries) <= 1
    for entry in entries:
        assert set(entry) == {"hosts", "gpus", "properties"}
        assert entry["hosts"] == "node-1"
        assert all(re.fullmatch(r"[a-z0-9_.-]+", word) for word in entry["properties"])
    return entries[0] if entries else None


def ids(text):
    assert re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text)
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    assert found == sorted(set(found))
    return found


def test_an_entry_for_the_gpus():
    exported = export(source(*(device(index, tags=("H100",)) for index in (0, 1, 3))))
    assert exported.text == '[[resource.config]]\nhosts = "node-1"\ngpus = "0-1,3"\nproperties = ["h100"]\n'
    [note] = exported.notes
    assert "Another entry must give node-1 its cores" in note


def test_other_devices_are_left_out_and_told():
    exported = export(source(device(0), device(1, resource="TPU")))
    assert read(exported.text)["gpus"] == "0"
    assert exported.notes[0] == "TPU is left out, because Flux counts no other devices than GPUs."
    assert export(source(device(1, resource="TPU"))).text == ""


def test_equal_indexes_of_two_vendors_are_positions():
    exported = export(source(device(0), device(0, id="other-0", vendor="other", model="Other", tags=())))
    assert read(exported.text) == {"hosts": "node-1", "gpus": "0-1", "properties": ["mixed"]}
    assert "positions in the list" in exported.notes[0]


@settings(max_examples=length(20, 60), deadline=None)
@given(machines())
def test_the_rules_allow_whatever_plugins_may_report(devices):
    gpus = [found for found in devices if found.resource.lower() == "gpu"]
    entry = read(export(source(*devices)).text)
    assert len(ids(entry["gpus"])) == len(gpus) if gpus else entry is None
