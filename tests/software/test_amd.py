"""amdsmi has every name that the plug-in uses. Its source is read, and not imported: that needs ROCm's library."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from binding_names import attributes

if find_spec("amdsmi") is None:
    pytest.skip("tox -e real-amd installs amdsmi", allow_module_level=True)
from anyaccel_amd import smi_child

KEYS = {
    "market_name",
    "vram_used",
    "current_partition_id",
    "gfx_activity",
    "current_socket_power",
    "average_socket_power",
}


def test_every_name_exists(report):
    (folder,) = find_spec("amdsmi").submodule_search_locations
    tree = ast.parse((Path(folder) / "amdsmi_interface.py").read_text())
    theirs = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    # What the package offers, and what its dictionaries are keyed by.
    offered = ast.parse((Path(folder) / "__init__.py").read_text())
    theirs &= {alias.name for node in ast.walk(offered) if isinstance(node, ast.ImportFrom) for alias in node.names}
    keys = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    source = Path(smi_child.__file__).read_text()
    names = {*attributes(source, "smi"), *attributes(source, "amdsmi")}
    assert len(names) > 10
    assert all(f'"{key}"' in source for key in KEYS)
    faults = {name: [] if name in theirs else ["missing"] for name in names}
    faults |= {key: [] if key in keys else ["no such key"] for key in KEYS}
    report("amd", "amdsmi", "functions, classes and keys", faults, cases="names")
