"""torch-npu reads ASCEND_RT_VISIBLE_DEVICES as the plug-in does. Its source is compiled: an import needs torch."""

import ast
import os
import random
from importlib.util import find_spec
from pathlib import Path

import anyaccel
import pytest

if find_spec("torch_npu") is None:
    pytest.skip("tox -e real-ascend installs the source of torch-npu", allow_module_level=True)
from anyaccel_ascend import plugin

VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"
COUNT = 8
VALUES = 20_000
PIECES = (*map(str, range(COUNT + 3)), ",", ",", ",", "", " ", "-", "a", "00", "01", ";", ".", "0x1")


def functions():
    """Compile the two functions that turn the variable into a count of devices."""
    (folder,) = find_spec("torch_npu").submodule_search_locations
    tree = ast.parse((Path(folder) / "npu" / "__init__.py").read_text())
    wanted = {"_parse_visible_devices", "_device_count_ascend_hal"}
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    assert {node.name for node in tree.body} == wanted
    for node in tree.body:
        node.returns = None
        for inner in ast.walk(node):  # annotations name what is not imported here
            if isinstance(inner, ast.AnnAssign):
                inner.annotation = ast.Constant(value="")
    names = {"os": os, "cast": lambda _, value: value, "_raw_device_count_ascend_hal": lambda: COUNT}
    exec(compile(ast.unparse(tree), "torch_npu", "exec"), names)
    return names["_parse_visible_devices"], names["_device_count_ascend_hal"]


def test_a_value_shows_the_devices_that_torch_npu_counts(monkeypatch, report):
    parse, count = functions()
    devices = anyaccel.detect(f"sim:Ascend910B4:{COUNT}").devices
    draw = random.Random(1)
    faults = {}
    for _ in range(VALUES):
        value = "".join(draw.choices(PIECES, k=draw.randint(0, 7)))
        monkeypatch.setenv(VARIABLE, value)
        theirs = parse()[: count()]
        try:
            ours = plugin.anyaccel_visible({VARIABLE: value}, devices)
        except ValueError:
            ours = []
        numbers = [next(device.index for device in devices if device.id == id_) for id_ in ours]
        faults[value] = [] if numbers == theirs else [numbers, theirs]
    report("ascend", "torch-npu", f"devices left by {VARIABLE}", faults, cases="values")
