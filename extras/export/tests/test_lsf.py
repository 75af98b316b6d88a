"""LSF cannot be had without a licence: the sections are read by the grammar of its configuration reference.

A section has a line of keywords and lines of values, with parentheses around what holds blanks or is empty. Names do
not begin with a digit, have at most 39 characters, and none of ``: . ( ) [ + - * / ! & | < > @ =``. A host's
quantity is ``VALUE@[HOST]``.
"""

import re

import pytest
from anyaccel_export.lsf import resource_map, resources
from export_machines import device, machines, source
from hypothesis import given, settings
from lengths import length

NAME = re.compile(r"(?!\d|inf|nan)[^:.()\[+\-*/!&|<>@=\s\"#$\\]{1,39}", re.IGNORECASE)
RESERVED = """cpu cpuf io logins ls idle maxmem maxswp maxtmp type model status it mem ncpus nprocs ncores nthreads
define_ncpus_cores define_ncpus_procs define_ncpus_threads ndisks pg r15m r15s r1m swap swp tmp ut"""
VALUE = re.compile(r"\([^()]*\)|[^\s()]+")
LOCATION = re.compile(r"\((\w+)@\[node-1\]\)")


def read(text, section):
    """The rows of a section, by name of the resource."""
    first, keywords, *lines, last = text.splitlines()
    assert (first, last) == (f"Begin {section}", f"End {section}")
    rows = {}
    for line in lines:
        values = VALUE.findall(line)
        assert len(values) == len(keywords.split())
        row = dict(zip(keywords.split(), values, strict=True))
        name = row["RESOURCENAME"]
        assert NAME.fullmatch(name)
        assert name not in RESERVED.split()
        assert name not in rows
        rows[name] = row
    return rows


def test_a_host_has_a_quantity_and_a_type_of_each_resource():
    devices = (device(0, tags=("H100",)), device(1, tags=("H100",)), device(2, resource="TPU", tags=("v5e",)))
    rows = read(resource_map(source(*devices)).text, "ResourceMap")
    assert {name: row["LOCATION"] for name, row in rows.items()} == {
        "accel_gpu": "(2@[node-1])",
        "acceltype_gpu": "(h100@[node-1])",
        "accel_tpu": "(1@[node-1])",
        "acceltype_tpu": "(v5e@[node-1])",
    }


def test_quantities_are_consumable_and_types_are_text():
    rows = read(resources(source(device(0))).text, "Resource")
    assert (rows["accel_gpu"]["TYPE"], rows["accel_gpu"]["CONSUMABLE"]) == ("Numeric", "Y")
    assert rows["acceltype_gpu"]["TYPE"] == "String"


def test_no_single_type_is_promised_where_there_are_several():
    devices = (device(0), device(1, tags=("Acme-Two",)))
    assert "(mixed@[node-1])" in resource_map(source(*devices)).text


@pytest.mark.parametrize("write", [resource_map, resources])
def test_without_devices_there_is_no_section(write):
    assert write(source()).text == ""


@settings(max_examples=length(20, 60), deadline=None)
@given(machines())
def test_the_grammar_allows_whatever_plugins_may_report(devices):
    exported = source(*devices)
    mapped = read(resource_map(exported).text, "ResourceMap")
    assert set(mapped) == set(read(resources(exported).text, "Resource"))
    values = {name: LOCATION.fullmatch(row["LOCATION"])[1] for name, row in mapped.items()}
    assert sum(int(value) for name, value in values.items() if name.startswith("accel_")) == len(devices)
