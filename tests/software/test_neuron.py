"""optimum-neuron counts cores of the range that doctor names, and takes a list with commas for one core."""

import ast
import os
from importlib.util import find_spec
from pathlib import Path

import anyaccel
import pytest
from anyaccel.model import EnvContext

if find_spec("optimum") is None or find_spec("optimum.neuron") is None:
    pytest.skip("tox -e real-neuron installs the source of optimum-neuron", allow_module_level=True)
from anyaccel_neuron import plugin

VARIABLE = "NEURON_RT_VISIBLE_CORES"


def counter(cores):
    """Compile the function that counts the visible cores, on a machine with so many."""
    folder = next(path for path in find_spec("optimum.neuron").submodule_search_locations)
    tree = ast.parse((Path(folder) / "utils" / "system.py").read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "get_available_cores"]
    names = {"os": os, "get_neuron_devices_count": lambda: cores, "cores_per_device": lambda: 1}
    exec(compile(tree, "optimum_neuron", "exec"), names)
    return names["get_available_cores"]


def test_cores_of_the_range_that_doctor_names_are_counted(monkeypatch, report):
    devices = anyaccel.detect("sim:Trainium1:8").devices
    count = counter(len(devices))
    faults = {}
    for start in range(len(devices)):
        for end in range(start + 1, len(devices) + 1):
            chosen = devices[start:end]
            written = plugin.anyaccel_env(chosen, EnvContext(devices=devices)).set[VARIABLE]
            monkeypatch.setenv(VARIABLE, written)
            assert count() == 1, "it reads commas now: write no other form for it, and take the warning out"
            ids = written.split(",")
            value = ids[0] if len(ids) == 1 else f"{ids[0]}-{ids[-1]}"
            monkeypatch.setenv(VARIABLE, value)
            faults[value] = [] if count() == len(chosen) else [count(), len(chosen)]
    report(
        "neuron",
        "optimum-neuron",
        f"cores counted from the range that doctor names for {VARIABLE}",
        faults,
        cases="values",
    )
