import re
import shlex
from pathlib import Path

import pytest
from anyaccel.model import EnvEdits
from anyaccel_export.hyperqueue import export
from export_machines import device, machines, source
from hypothesis import given, settings
from lengths import length

ACME = (Path(__file__).parents[3] / "tests" / "vendors" / "acme.py").read_text()

# HyperQueue is distributed as a binary outside of PyPI, and its Python package starts workers without options. This is
# what its manual says of --resource: names of letters, digits and slashes that begin with a letter; values in brackets,
# quoted where they hold a bracket, a comma or a blank; groups are brackets within brackets.
RESOURCE = re.compile(r"--resource=([A-Za-z][A-Za-z0-9/]*)=(\[.*\])")
TOKEN = re.compile(r'"([^"]*)"|([^\[\],"\s]+)|([\[\],])')


def read(text):
    """The pools of a worker: groups of values by name."""
    program, *words = shlex.split(text)
    assert [program, *words[:2]] == ["hq", "worker", "start"]
    pools = {}
    for word in words[3:]:
        name, values = RESOURCE.fullmatch(word).groups()
        assert name not in pools
        pools[name] = groups(values)
    return pools


def groups(text):
    tokens = list(TOKEN.finditer(text))
    assert "".join(token[0] for token in tokens) == text
    values = [token[1] or token[2] for token in tokens]
    nested = tokens[1][0] == "["
    shape = "".join(token[3] or "v" for token in tokens)
    assert re.fullmatch(r"\[\[v(,v)*\](,\[v(,v)*\])+\]" if nested else r"\[v(,v)*\]", shape), shape
    found, current = [], []
    for token, value in zip(tokens, values, strict=True):
        if value is not None:
            current.append(value)
        elif token[0] == "]" and current:
            found.append(current)
            current = []
    everything = [value for group in found for value in group]
    assert len(everything) == len(set(everything)), "values of a pool are unique"
    return found


def test_one_pool_for_each_kind_of_a_vendor():
    exported = export(source(device(0), device(1), device(2, vendor="other_1", kind="tpu")))
    assert read(exported.text) == {"gpus/acme": [["acme-0", "acme-1"]], "tpus/other1": [["acme-2"]]}
    assert exported.notes == ()


def test_numa_nodes_are_groups():
    exported = export(source(device(0), device(1, numa_node=1), device(2, numa_node=None), device(3)))
    assert read(exported.text) == {"gpus/acme": [["acme-0", "acme-3"], ["acme-1"], ["acme-2"]]}
    [note] = exported.notes
    assert "NUMA nodes 0, 1, unknown: add --coupling" in note


@pytest.mark.parametrize(
    ("mask", "value"),
    [
        ({"ACME_VISIBLE": "acme-1"}, "acme-1"),
        ({"ACME_VISIBLE": "1"}, "1"),
        ({"ACME_VISIBLE": "1.0"}, "acme-1"),
        ({}, "acme-1"),
        ({"ACME_VISIBLE": "acme-1", "ACME_RANK": "1"}, "acme-1"),
        ({"ACME_VISIBLE": "1", "ANYACCEL_DEVICES": "acme-1"}, "1"),
        ({"ACME_VISIBLE": "1", "ACME_RANK": "acme-1"}, "1"),
    ],
)
def test_a_value_is_what_the_vendors_mask_calls_the_device(mask, value):
    """HyperQueue itself puts it into the mask of vendors that it knows."""
    exported = export(source(device(1), environments={"acme-1": EnvEdits(set=mask)}))
    assert read(exported.text) == {"gpus/acme": [[value]]}


def test_the_command_prints_indexes_where_the_mask_takes_nothing_else(anyaccel, install):
    install("acme", ACME.replace('if ctx.mask == "index" else device.id', "if True else ''"))
    done = anyaccel("--machine", "sim:Acme-One:2", "export", "hyperqueue")
    assert [value for group in read(done.stdout)["apus/acme"] for value in group] == ["0", "1"], done.stderr


def test_values_with_brackets_are_quoted():
    assert read(export(source(device(0, id="a[0]"))).text) == {"gpus/acme": [["a[0]"]]}


def test_without_devices_a_worker_has_none():
    assert export(source()).text == "hq worker start --detect-resources=cpus,mem\n"


@settings(max_examples=length(15, 40), deadline=None)
@given(machines())
def test_the_grammar_allows_whatever_plugins_may_report(devices):
    pools = read(export(source(*devices)).text)
    assert sum(len(group) for found in pools.values() for group in found) == len(devices)
