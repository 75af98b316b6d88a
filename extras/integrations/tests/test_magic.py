"""What the line of a notebook does, as far as that needs no kernel."""

from __future__ import annotations

import os

import anyaccel
import pytest
from anyaccel.errors import UsageError


class Shell:
    """What an extension needs of IPython's shell."""

    def __init__(self):
        self.magics = {}

    def register_magic_function(self, function, magic_kind):
        self.magics[function.__name__] = function


@pytest.fixture
def accel(acme, monkeypatch):
    """The magic, on a machine with two devices; what it holds is given back."""
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")
    shell = Shell()
    anyaccel.load_ipython_extension(shell)
    yield shell.magics["accel"]
    shell.magics["accel"]("release")


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("APU:1 --nte x", "; did you mean --note?", "see '%accel --help'"),
        ("APU:1 --wait", "argument --wait: expected one argument", "see '%accel --help'"),
        ("APU:1 --wait 5:00", "argument --wait: must be a duration such as 90s", "see '%accel --help'"),
        ("APU:1 --wait 5s --no-wait", "not allowed with argument", "see '%accel --help'"),
        ("--note only", "options stand beside a request (got '--note only')", "see '%accel --help'"),
        ("release APU:1", "'release' stands alone (got 'release APU:1')", "see '%accel --help'"),
        ("status --note x", "'status' stands alone", "see '%accel --help'"),
        ("APU:1 --note 'open", "the line cannot be split into words: No closing quotation", "quote it as in a shell"),
    ],
)
def test_a_line_that_is_wrong_gets_one_message(accel, capsys, line, message, hint):
    with pytest.raises(UsageError) as caught:
        accel(line)
    assert message in str(caught.value)
    assert caught.value.hint == hint
    assert capsys.readouterr() == ("", "")
    assert "ACME_VISIBLE" not in os.environ


def test_an_error_shows_itself_without_a_traceback(accel):
    """IPython asks for that by this method."""
    with pytest.raises(anyaccel.NeverFitsError) as caught:
        accel("APU:9")
    lines = caught.value._render_traceback_()
    assert lines[0] == f"anyaccel: {caught.value}"
    assert lines[1:] == [f"anyaccel: {caught.value.hint}"] * bool(caught.value.hint)


def test_help_is_no_request(accel, capsys):
    assert accel("--help") is None
    printed = capsys.readouterr().out
    for option in ("--note TEXT", "--wait DURATION", "%accel release"):
        assert option in printed
    accel("APU:9 -h")
    assert capsys.readouterr().out == printed


def test_alone_it_shows_the_devices_and_who_holds_them(accel):
    assert repr(accel("")).splitlines()[-1] == "2 devices, 2 free on sim:A1:2"
    with anyaccel.acquire("APU:0.5", note="a <b>training"):
        shown = accel("status")
        lines = repr(shown).splitlines()
        assert " ".join(lines[0].split()) == "DEVICE TYPE MEM/GiB LOAD STATE USER SHARE PROGRAM HELD UNTIL NOTE ID"
        assert sum("a <b>training" in line for line in lines) == 1
        assert lines[-1] == "2 devices, 1.5 free on sim:A1:2"
        html = shown._repr_html_()
        assert html.count("<tr>") == 3
        assert "a &lt;b&gt;training" in html
        assert "<caption>2 devices, 1.5 free on sim:A1:2</caption>" in html


def test_what_is_held_is_shown_with_the_rest_of_the_machine(accel):
    held = accel("APU:1 --note mine")
    assert held.note == "mine"
    lines = repr(accel("")).splitlines()
    assert lines[-1] == f"2 devices, 1 free on sim:A1:2; this kernel holds {held.devices[0].name}"
    assert [line.split()[0] for line in lines[1:-1]] == ["acme/0", "acme/1"]
    assert "hidden" not in "".join(lines)
    accel("release")
    assert repr(accel("")).splitlines()[-1] == "2 devices, 2 free on sim:A1:2"


def test_a_machine_without_devices_is_no_empty_table(accel, record, monkeypatch):
    monkeypatch.setenv("ANYACCEL_MACHINE", record())
    assert accel("")._repr_html_() == ""
    assert repr(accel("")) == "No accelerators were found: see 'anyaccel doctor'"
