"""The example is a whole plug-in in 100 lines, with public names only, and the tutorial tells exactly its code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import anyaccel.kit
import anyaccel.plugin
import anyaccel_testing
import pytest
from anyaccel.inventory.record import expect

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "anyaccel-lumen"
MODULE = EXAMPLE / "src" / "anyaccel_lumen" / "__init__.py"
TUTORIAL = ROOT / "docs" / "tutorial-plugin.md"
BLOCK = re.compile(r"^<!-- not run: part of (?P<path>\S+) -->\n```\w+\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
PUBLIC = {module.__name__: module.__all__ for module in (anyaccel.kit, anyaccel.plugin, anyaccel_testing)}


def test_it_has_at_most_100_lines():
    assert len(MODULE.read_text().splitlines()) <= 100
    assert [path.name for path in MODULE.parent.iterdir() if path.suffix == ".py"] == ["__init__.py"]


def test_only_public_names_are_used():
    for path in (MODULE, EXAMPLE / "tests" / "test_plugin.py"):
        tree = ast.parse(path.read_text())
        aliases = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                aliases |= {alias.asname: alias.name for alias in node.names if alias.name.startswith("anyaccel.")}
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "anyaccel":
                assert {alias.name for alias in node.names} <= set(PUBLIC[node.module])
        assert set(aliases.values()) <= set(PUBLIC)
        used = [
            (aliases[node.value.id], node.attr)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases
        ]
        assert [(module, name) for module, name in used if name not in PUBLIC[module]] == []


def test_the_tutorial_tells_exactly_this_code():
    told: dict[str, str] = {}
    for match in BLOCK.finditer(TUTORIAL.read_text()):
        told[match["path"]] = told.get(match["path"], "") + match["text"]
    assert set(told) == {
        "pyproject.toml",
        "src/anyaccel_lumen/__init__.py",
        "src/anyaccel_lumen/presence.json",
        "src/anyaccel_lumen/products.toml",
        "tests/test_plugin.py",
    }
    for path, text in told.items():
        assert text.split() == (EXAMPLE / path).read_text().split(), path


def test_every_line_of_the_code_stands_in_the_tutorial_as_it_is():
    """Beside the comparison above, which does not see how a line is indented."""
    lines = set(TUTORIAL.read_text().splitlines())
    assert [line for line in MODULE.read_text().splitlines() if line not in lines] == []


@pytest.mark.parametrize("name", sorted(path.name for path in (EXAMPLE / "recordings").iterdir()))
def test_a_recording_replays_to_its_expected_inventory(name, monkeypatch):
    import json

    monkeypatch.syspath_prepend(str(MODULE.parents[1]))
    monkeypatch.setenv("ANYACCEL_PLUGINS", "lumen=anyaccel_lumen:plugin")
    recording = EXAMPLE / "recordings" / name
    assert expect(str(recording))["vendors"] == {"lumen": json.loads((recording / "expected.json").read_text())}


def test_devices_are_counted_by_address_and_addresses_are_hexadecimal(monkeypatch):
    monkeypatch.syspath_prepend(str(MODULE.parents[1]))
    monkeypatch.setenv("ANYACCEL_PLUGINS", "lumen=anyaccel_lumen:plugin")
    devices = anyaccel.detect(str(EXAMPLE / "recordings" / "lm300-4card")).devices
    assert [(device.index, device.pci_bus_id, *device.nodes) for device in devices] == [
        (0, "0000:01:00.0", "/dev/lumen/2"),
        (1, "0000:09:00.0", "/dev/lumen/0"),
        (2, "0000:0a:00.0", "/dev/lumen/1"),
        (3, "0000:81:00.0", "/dev/lumen/3"),
    ]
