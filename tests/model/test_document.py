"""Inventories, requests and allocations as JSON, and back."""

import json
from pathlib import Path

import anyaccel
import pytest
from anyaccel.scheduler import Scheduler, parse_request
from hypothesis import given
from hypothesis import strategies as st
from small_machines import chips, gpus, machine

DEVICE = {"id": "d", "index": 0, "model": "m"}
VENDOR = {"schema": "anyaccel.inventory/1", "machine": "m", "devices": []}
SCHEMA = Path(__file__).parents[2] / "docs" / "reference" / "documents.schema.json"
"""Written by scripts/write_reference.py; a test of the pages compares it with the values."""
INVENTORY = machine(gpus(2, links=3, numa=1), chips(4))


def values():
    scheduler = Scheduler(INVENTORY)
    yield INVENTORY
    yield machine()
    yield from map(parse_request, ("GPU:0.5,mem=1GiB TPU:4", "A/0-1:2", "A|B:2,linked,mixed", "GPU,else=cpu"))
    yield scheduler.allocate("GPU:0.25 TPU:2")
    yield scheduler.allocate("GPU:1")


@pytest.mark.parametrize("value", list(values()), ids=lambda value: type(value).__name__)
def test_a_document_is_the_value_again(value):
    text = json.dumps(anyaccel.to_json(value), allow_nan=False)
    assert anyaccel.from_json(json.loads(text)) == value


@pytest.mark.usefixtures("acme")
def test_what_detection_finds_is_the_same_again():
    inventory = anyaccel.detect("sim:A1:2")
    assert anyaccel.from_json(json.loads(json.dumps(anyaccel.to_json(inventory)))) == inventory


@pytest.mark.parametrize("value", list(values()), ids=lambda value: type(value).__name__)
def test_a_document_satisfies_the_schema(value):
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, which is not installed here")
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    content = anyaccel.to_json(value)
    jsonschema.validate(content, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**content, "more": 1}, schema)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, r"must be one of anyaccel.inventory/1, .* \(got None"),
        ([], "must be one of"),
        ({"schema": ["x"]}, "must be one of"),
        ({"schema": "anyaccel.request/1"}, "Request must have the field 'terms'"),
        ({"schema": "anyaccel.request/1", "terms": [{"names": ["GPU"], "units": "many"}]}, "units must be int"),
        (
            {"schema": "anyaccel.request/1", "terms": [], "more": 1},
            "Request must have no field 'more': Request has terms,",
        ),
        (
            {"schema": "anyaccel.request/1", "terms": [{"names": [], "filters": [["mem"]]}]},
            r"filters\[0\] must be a list",
        ),
        (
            {"schema": "anyaccel.request/1", "terms": [{"name": ["GPU"]}, {"names": "GPU"}]},
            r"terms\[0\] must have no field 'name'.*; .*terms\[0\] must have the field 'names'; .*terms\[1\].names",
        ),
        (
            {"schema": "anyaccel.inventory/1", "machine": "m", "devices": [], "vendors": [{"vendor": "v"}]},
            r"vendors\[0\] must have the field 'state'",
        ),
        (
            {**VENDOR, "vendors": [{"vendor": "v", "state": "failed", "problem": {"vendor": "v", "kind": "x"}}]},
            r"problem must have the field 'reason'",
        ),
        ({**VENDOR, "devices": [DEVICE, DEVICE]}, r"Device.id must be unique in an inventory \(got 'd' 2 times\)"),
        ({**VENDOR, "devices": [{**DEVICE, "slots": 3, "units": -1}]}, r"units of 'd' must be .*; Device.slots of 'd'"),
        ({**VENDOR, "devices": [{**DEVICE, "slots": 4, "own_slots": [4]}]}, r"own_slots of 'd' must be some of its 4"),
    ],
)
def test_what_is_none_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        anyaccel.from_json(content)


@pytest.mark.parametrize("value", [None, "sim:H100:2", INVENTORY.devices[0]])
def test_there_is_no_document_of_anything_else(value):
    with pytest.raises(TypeError, match="a document holds an Inventory, a Request or an Allocation"):
        anyaccel.to_json(value)


def changed(chance, content):
    """Make a document with a different, missing or additional part."""
    if not isinstance(content, (dict, list)) or not content or chance.random() < 0.2:
        return chance.choice([None, 0, -1, 1 << 70, 0.5, True, "", "x", "\ud800", [], {}, [[]], {"x": []}, [content]])
    twin = content.copy()
    place = chance.choice([*content] if isinstance(content, dict) else range(len(content)))
    twin[place] = changed(chance, content[place])
    if isinstance(content, dict) and chance.random() < 0.3:
        twin.pop(place)
    return twin


@given(st.sampled_from(list(values())), st.randoms(use_true_random=False))
def test_what_is_made_of_any_document_is_a_value_or_an_error_that_says_what_is_wrong(value, chance):
    content = changed(chance, json.loads(json.dumps(anyaccel.to_json(value))))
    try:
        found = anyaccel.from_json(content)
    except ValueError as error:
        said = str(error)
    else:
        said = "it must be the same again"
        assert anyaccel.from_json(json.loads(json.dumps(anyaccel.to_json(found)))) == found
    assert " must " in said
