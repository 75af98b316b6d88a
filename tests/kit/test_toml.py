"""The fast reader of catalogs agrees with :mod:`tomllib`, on valid and invalid documents."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
from anyaccel.kit.catalog import read_toml
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
CATALOGS = sorted([*ROOT.glob("plugins/*/src/*/*.toml"), *ROOT.glob("examples/*/src/*/*.toml")])
SNIPPETS = [
    "",
    "# nothing",
    "a = 1",
    "a = 1 # one\n\n  b = true\t\nc = false",
    "a = 0x1F\nb = 0\nc = [0x10, 0xff]",
    "a = 01",
    "a = 1_000\nb = +1\nc = -0\nd = 1.5\ne = 1e3\nf = inf\ng = 1979-05-27\nh = 0o7",
    "a = ''\nb = \"\"",
    'a = \'C:\\x\'\nb = "\\u00e9"\nc = "\u00e9"',
    "a = '''\nlines\nof 'text' and ''two'' '''\nb = 1",
    "a = '''one line'''",
    "a = '''\n''''\nb = '''\n'''''",
    'a = """\ntext"""',
    'a = "b" "c"',
    "a = [\n  1, # one\n  2,\n]\nb = []\nc = [[1], ['x', \"y\"]]",
    "a = [1 2]",
    "a = [1,,2]",
    "a = [01]\n",
    "a = [null]\nb = NaN",
    'a = [{ b = 1 }, { "c d" = [2] }]',
    "a = {}",
    'a = { "" = 1 }',
    '"" = 1',
    "a = { b = 1, c = { d = 'e' } } # f",
    "a = { b = 1, }",
    "a = { b = 1,\n c = 2 }",
    "a.b = 1",
    "'a' = 1",
    '"a.b" = 1\n"a.b" = 2',
    'a = 1\n"a" = 2',
    "a = 1 b = 2",
    "a = tru\nb = truer",
    "[a]\nb = 1\n[c]\nb = 2",
    "[a]\n[a]",
    "[a.b]\nc = 1\n[a.d]\n[a]\ne = 2",
    "[a]\nb = 1\n[a.b]",
    "[a]\nb = 1\n[a.c]\nd = 2",
    "[a.b.c]\nd = 1",
    "[[a]]\nb = 1\n[a.c]\nd = 1\n[[a]]\n[a.c]\nd = 2",
    "[[a]]\n[a]",
    "[a]\n[[a]]",
    "a = [{}]\n[[a]]",
    "a = 1\n[[a]]",
    "[[a.b]]\nc = 1",
    "[ a ]\nb = 1",
    "[a] b = 1",
    "[a",
    "a = 1\r\nb = 2\r\n",
    "a = 1\rb = 2",
    'a = "\t"\nb = "\x00"',
    "\ufeffa = 1",
    "a =\n1",
    "= 1",
    "a",
    'a = "unfinished\nb = 1',
    "a = '''\nunfinished 'text' of more words than could be split in every way that there is, in any time",
]


def outcome(read, text):
    try:
        return json.dumps(read(text), default=repr, sort_keys=True)  # where true is not 1
    except tomllib.TOMLDecodeError as error:
        return str(error)


@pytest.mark.parametrize("text", SNIPPETS)
def test_it_reads_what_tomllib_reads(text):
    assert outcome(read_toml, text) == outcome(tomllib.loads, text)


PIECES = [
    "[",
    "]",
    "[[",
    "]]",
    "{",
    "}",
    ",",
    ".",
    "=",
    " ",
    "\n",
    "#",
    "'",
    "'''",
    '"',
    "\\",
    "a",
    "b",
    "0x1",
    "12",
    "true",
]


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_whatever_is_written_is_read_as_tomllib_reads_it(text):
    assert outcome(read_toml, text) == outcome(tomllib.loads, text)


@pytest.mark.parametrize("path", CATALOGS, ids=lambda path: f"{path.parts[-2]}-{path.stem}")
def test_every_catalog_is_read_without_tomllib(path, monkeypatch):
    text = path.read_text(encoding="utf-8")
    expected = tomllib.loads(text)
    monkeypatch.setitem(sys.modules, "tomllib", None)

    assert read_toml(text) == expected
