import os
import subprocess

import pytest
from anyaccel.errors import UsageError
from anyaccel.model import EnvEdits
from anyaccel.shell import shell_quote, statements

NASTY = r"""a b'c"d$HOME `id` $(id) # é \end"""
EDITS = EnvEdits(set={"ACME_VISIBLE": "acme-0", "NASTY": NASTY, "ANYACCEL_A": "1"}, unset=frozenset({"GONE", "AWAY"}))
READ = 'printf "%s|%s|%s|%s" "$ACME_VISIBLE" "$NASTY" "${GONE-none}" "${AWAY-none}"'
EXPECTED = f"acme-0|{NASTY}|none|none"


def shell(script):
    environ = {**os.environ, "GONE": "1", "AWAY": "1"}
    return subprocess.run(["sh", "-c", script], env=environ, capture_output=True, text=True, check=True).stdout


def test_a_shell_that_reads_the_lines_has_the_variables():
    assert shell(f"{statements(EDITS.set, EDITS.unset)}{READ}") == EXPECTED


@pytest.mark.parametrize("value", ["a\nb", "a\x1b[31m", "\u202e", "\u2028", "\udcff"])
def test_a_value_that_no_shell_could_read_is_refused(value):
    with pytest.raises(UsageError, match=r"a shell command takes printable text only \(got 'a?.*'\)"):
        statements({"NASTY": value}, ())


@pytest.mark.parametrize("text", ["$(id) `id` 'x' \"y\" \\ # ; & |", "", "-n", "~", "!x", "*"])
def test_a_shell_gets_what_was_quoted(text):
    done = subprocess.run(["sh", "-c", f"printf %s {shell_quote(text)}"], capture_output=True, text=True, check=True)
    assert done.stdout == text


@pytest.mark.parametrize("text", ["a\nb", "\x1b", "\u202e", "\udcff", "\u2028"])
def test_a_shell_gets_nothing_that_cannot_be_seen(text):
    with pytest.raises(UsageError, match="printable text only"):
        shell_quote(text)
