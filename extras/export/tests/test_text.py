import json
import os
import re
import shlex
import subprocess

import pytest
import yaml
from anyaccel.errors import UsageError
from anyaccel.model import EnvEdits
from anyaccel.text import printable
from anyaccel_export.text import assignments, comment, quote, shell_join, slug, to_yaml, unique_names
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import length

scalars = st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.integers(), st.booleans())
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),
    ),
    max_leaves=20,
)


@settings(max_examples=length(20, 60), deadline=None)
@given(st.one_of(st.lists(values, min_size=1), st.dictionaries(st.text("aNo0.:/ -#é\n"), values, min_size=1)))
def test_a_reader_of_yaml_reads_what_was_written(value):
    assert yaml.safe_load(to_yaml(value)) == value


@given(st.text())
def test_a_reader_of_json_reads_what_was_quoted(text):
    quoted = quote(text)
    if all(ord(char) <= 0xFFFF or char.isprintable() for char in text):  # JSON has no \U
        assert json.loads(quoted) == text
    assert quoted.isprintable()


@given(st.lists(st.text(min_size=1, max_size=200), unique=True, max_size=8))
def test_names_are_unique_short_and_of_allowed_characters(ids):
    names = unique_names(ids, allowed="a-z0-9-", most=63)
    assert list(names) == ids
    assert len({*names.values()}) == len(ids)
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name) for name in names.values())


def test_a_name_does_not_depend_on_what_else_is_there():
    alone = unique_names(["GPU-1"], allowed="a-z0-9-", most=63)
    beside = unique_names(["tpu:0", "GPU-1"], allowed="a-z0-9-", most=63)
    assert alone["GPU-1"] == beside["GPU-1"] == "gpu-1"
    alike = unique_names(["GPU:1", "GPU-1"], allowed="a-z0-9-", most=63)
    assert len({*alike.values()}) == 2
    assert all(re.fullmatch(r"gpu-1-[0-9a-f]{8}", name) for name in alike.values())


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("NVIDIA H100 80GB", {}, "nvidia-h100-80gb"),
        ("neuron_cores", {"allowed": "a-z0-9_", "fill": "_"}, "neuron_cores"),
        ("TPU-V4", {"allowed": "A-Za-z0-9._-"}, "TPU-V4"),
        ("--", {}, "x"),
    ],
)
def test_slugs(text, options, expected):
    assert slug(text, **options) == expected


NASTY = r"""a b'c"d$HOME `id` $(id) # é \end"""
EDITS = EnvEdits(set={"ACME_VISIBLE": "acme-0", "NASTY": NASTY, "ANYACCEL_A": "1"}, unset=frozenset({"GONE", "AWAY"}))
READ = 'printf "%s|%s|%s|%s" "$ACME_VISIBLE" "$NASTY" "${GONE-none}" "${AWAY-none}"'


def test_env_with_the_assignments_starts_a_process_that_has_them():
    script, environ = f"env {assignments(EDITS)} sh -c '{READ}'", {**os.environ, "GONE": "1", "AWAY": "1"}
    done = subprocess.run(["sh", "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == f"acme-0|{NASTY}|none|none"


@pytest.mark.parametrize("value", ["a\nb", "a\x1b[31m", "\u202e", "\u2028", "\udcff"])
def test_a_value_that_no_shell_could_read_is_refused(value):
    with pytest.raises(UsageError, match="printable text only"):
        assignments(EnvEdits(set={"NASTY": value}))


def test_what_people_look_for_comes_first():
    assert assignments(EDITS).startswith("--unset=AWAY --unset=GONE ACME_VISIBLE=acme-0 ")
    assert assignments(EDITS).endswith(" ANYACCEL_A=1")


@given(st.lists(st.text().map(printable).filter(lambda word: "\0" not in word), min_size=1))
def test_a_shell_reads_the_words_that_were_joined(words):
    assert shlex.split(shell_join(words)) == words


@given(st.text(st.characters()))  # lone surrogates among them
def test_a_comment_is_one_short_line_of_ascii(text):
    line = comment(text)
    assert line.isascii()
    assert line.isprintable()
    assert len(line) <= 200
    assert "\\" not in line
