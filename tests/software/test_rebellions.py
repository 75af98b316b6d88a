"""vllm-rbln reads the variables that the plug-in writes, as positions of the cards in /dev."""

import ast
import os
import random
from importlib.util import find_spec
from pathlib import Path

import anyaccel
import pytest

if find_spec("vllm_rbln") is None:
    pytest.skip("tox -e real-rebellions installs the source of vllm-rbln", allow_module_level=True)
from anyaccel_rebellions import plugin

VISIBLE, DEVICES = "RBLN_VISIBLE_DEVICES", "RBLN_DEVICES"
READERS = ("get_rbln_owned_card_indices", "get_rbln_visible_card_indices", "_rbln_present_card_indices")


def reader(folder, nodes):
    """Compile the functions of vllm-rbln that read the variable, on a directory with these nodes."""
    (package,) = find_spec("vllm_rbln").submodule_search_locations
    tree = ast.parse((Path(package) / "v1" / "worker" / "utils.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in READERS]
    assert len(tree.body) == len(READERS)
    for number in nodes:
        (folder / f"rbln{number}").touch()
    names = {"os": os, "RBLN_DEV_DIR": str(folder), "RBLN_SYSFS_CLASS_DIR": "/nowhere"}
    exec(compile(tree, "vllm_rbln", "exec"), names)
    return names[READERS[0]]


def test_the_platform_names_both_variables(report):
    (package,) = find_spec("vllm_rbln").submodule_search_locations
    source = (Path(package) / "platform" / "__init__.py").read_text()
    faults = {
        VISIBLE: [] if f'device_control_env_var: str = "{VISIBLE}"' in source else ["not the platform's variable"],
        DEVICES: [] if f'DEPRECATED_DEVICE_CONTROL_ENV_VAR = "{DEVICES}"' in source else ["not the older variable"],
    }
    assert {VISIBLE, DEVICES} <= set(plugin.anyaccel_info().env_vars)
    assert {name: fault for name, fault in faults.items() if fault} == {}


def test_positions_are_those_of_the_cards_that_are_here(tmp_path, monkeypatch, report):
    devices = anyaccel.detect("sim:RBLN-CA25:8").devices
    read = reader(tmp_path, [device.index for device in devices])
    draw = random.Random(1)
    faults = {}
    for _ in range(500):
        entries = draw.sample(range(len(devices)), k=draw.randint(1, len(devices)))
        value = ",".join(map(str, entries))
        monkeypatch.setenv(VISIBLE, value)
        ours = plugin.anyaccel_visible({VISIBLE: value}, devices)
        numbers = sorted(next(device.index for device in devices if device.id == id_) for id_ in ours)
        faults[value] = [] if numbers == read() else [numbers, read()]
    report("rebellions", "vllm-rbln", f"cards left by {VISIBLE}", faults, cases="values")
