"""SECURITY.md: each promise names the test that proves it, and that test is there."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
PROMISED = PAGE.partition("\n## What is promised\n")[2].partition("\n## ")[0]
ROWS = [
    line for line in PROMISED.splitlines() if line.startswith("|") and not line.startswith(("| promise |", "| ---"))
]
ROW = re.compile(r"\| (?P<promise>[^|]+\.) \| `(?P<path>[\w/]*tests/[\w/]+\.py)::(?P<name>test_\w+)` \|")


@cache
def functions(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_a_test():
    assert len(ROWS) > 20
    assert [row for row in ROWS if not ROW.fullmatch(row)] == []


def test_every_test_that_a_promise_names_is_there():
    named = [(match["path"], match["name"]) for row in ROWS if (match := ROW.fullmatch(row))]
    missing = [f"{path}::{name}" for path, name in named if not (ROOT / path).exists() or name not in functions(path)]
    assert missing == []
