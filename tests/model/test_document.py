"""Inventories, requests and allocations as JSON, and back."""

import json

import anyaccel
import pytest
from anyaccel.model import document
from anyaccel.scheduler import Scheduler, parse_request
from small_machines import chips, gpus, machine

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
    content = anyaccel.to_json(value)
    jsonschema.validate(content, document.schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**content, "more": 1}, document.schema())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, r"must be one of anyaccel.inventory/1, .* \(got None"),
        ([], "must be one of"),
        ({"schema": ["x"]}, "must be one of"),
        ({"schema": "anyaccel.request/1"}, "Request"),
        ({"schema": "anyaccel.request/1", "terms": [{"names": ["GPU"], "units": "many"}]}, "units must be int"),
        ({"schema": "anyaccel.request/1", "terms": [], "more": 1}, "Request"),
    ],
)
def test_what_is_none_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        anyaccel.from_json(content)
