"""What a type checker sees of the package is what it has."""

import ast
import importlib
from pathlib import Path

import anyaccel_cluster


def test_type_checkers_see_the_names_of_the_package_where_they_are():
    nodes = ast.walk(ast.parse(Path(anyaccel_cluster.__file__).with_suffix(".pyi").read_text()))
    seen = {each.name: node.module for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names}
    assert sorted(seen) == sorted(anyaccel_cluster.__all__)
    for name, module in seen.items():
        assert getattr(anyaccel_cluster, name) is getattr(importlib.import_module(module), name)
