"""Text of others is text: every command prints it, on a terminal and elsewhere, and none of it does anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from importlib import import_module

import anyaccel as aa
import pytest
from anyaccel.cli.commands import COMMANDS
from anyaccel.cli.parser import APART
from anyaccel.ledger import Ledger
from lengths import length
from our_commands import INSTALLED
from terminals import assert_plain, run_on_terminal

STEERING = "be\nanyaccel: forged\r\x1b]0;title\x07\x1b[2J\x9b31m\t\x7f\u202etxt\u2066\u2028\u200b\udcff end"
MARKUP = "lr [/data] see [docs] [bold red]x[/] :warning: 0000:cd:00.0 [link=a] \\[x"
CODE = '"; touch pwned; $(touch pwned) `touch pwned` # """ \'; touch pwned; ${x} %s {0}'
HOSTILE = f"{MARKUP} {CODE} {STEERING}"

PLUGIN = """
from anyaccel.plugin import *
TEXT = {text!r}

@hookimpl
def anyaccel_info():
    return PluginInfo(vendor="acme", resource="APU", kind="apu", env_vars=("ACME_VISIBLE",), url=TEXT)

@hookimpl
def anyaccel_detect(ctx):
    healths = (Health.HEALTHY, Health.HEALTHY, Health.HEALTHY, Health.UNHEALTHY)
    devices = tuple(
        Device(
            id=f"acme-[/]:cd:-{{index}}", index=index, model=TEXT, memory_bytes=1 << 34, parent="acme-[/]",
            health=health, health_reason=TEXT, attributes={{"fact": TEXT, TEXT: TEXT}},
            nodes=(f"/dev/acme[{{index}}]",),
        )
        for index, health in enumerate(healths)
    )
    return Detected(devices=devices, driver_version=TEXT, notes=(TEXT, "x; " + TEXT))

@hookimpl
def anyaccel_fractional(device):
    return Fractional.SHARED

@hookimpl
def anyaccel_tags(device):
    return ()

@hookimpl
def anyaccel_env(devices):
    return EnvEdits(set={{"ACME_VISIBLE": ",".join(device.id for device in devices)}})

@hookimpl
def anyaccel_validate(request, devices):
    return TEXT if len(devices) == 3 else None

@hookimpl
def anyaccel_stats(devices, ctx):
    return {{device.id: Stats(health=Health.UNHEALTHY, health_reason=TEXT) for device in devices[2:]}}

@hookimpl
def anyaccel_diagnose(ctx):
    return [Finding(severity=Severity.WARN, reason=TEXT, remedy=TEXT), Finding(severity=Severity.FAIL, reason=TEXT)]
"""
RAISING = """
from anyaccel.plugin import *
TEXT = {text!r}

@hookimpl
def anyaccel_info():
    return PluginInfo(vendor="bad", resource="BAD", kind="bad", env_vars=())

@hookimpl
def anyaccel_detect(ctx):
    print(TEXT)
    raise ValueError(TEXT)

@hookimpl
def anyaccel_fractional(device):
    return Fractional.SHARED

@hookimpl
def anyaccel_tags(device):
    return ()

@hookimpl
def anyaccel_env(devices):
    return EnvEdits()
"""

NODE = ("--node", "n1")


def targets():
    """The targets of ``export``, where it is installed."""
    return import_module("anyaccel_export.targets").TARGETS if "export" in INSTALLED else ()


LINES = {
    "status": [()],
    "top": [("--watch", "{text}"), ("--json",)],
    "run": [
        ("APU:1", "--note", "{text}", "--wait", "1s", "--", "true"),
        ("APU:9,else=cpu", "--", "{text}"),
        ("APU:3", "--no-wait", "--", "x"),
    ],
    "sweep": [
        ("APU:1", "--out", "{directory}/r", "--note", "{text}", "--wait", "1s", "--", "true"),
        ("APU:9,else=cpu", "--out", "{directory}/s", "--each", "a={text}", "--", "x(a)", "{text}"),
        ("APU:9,else=cpu", "--dry-run", "--from", "{text}", "--", "(b)"),
    ],
    "jobs": [(), ("--runs",), ("{text}",)],
    "logs": [("{text}",)],
    "cancel": [("{text}",)],
    "wait": [("{text}",)],
    "redo": [("{text}",)],
    "drain": [("{text}",)],
    "undrain": [("{text}",)],
    "reserve": [("{text}",)],
    "hold": [("APU:1", "--note", "{text}", "--wait", "1s"), ("APU:9,else=cpu",), ("{text}",)],
    "adopt": [("1", "--note", "{text}"), ("{text}",)],
    "release": [("{text}",)],
    "queue": [()],
    "select": [("APU:0.1",), ("{text}:1",)],
    "why": [("APU:3",), ("APU:4",), ("{text}",)],
    "env": [("APU:0.1",)],
    "plugins": [(), ("acme",), ("{text}",)],
    "doctor": [()],
    "check": [("{text}",), ("acme", "--recordings", "{text}")],
    "testbed": [("{text}", "--", "true"), ("{text}",)],
    "new": [("acme", "--directory", "{directory}/{text}/new"), ("{text}",)],
    "record": [("{directory}/{text}/recorded",), ("--verify", "{text}")],
    "kubernetes": [("status",), ("{text}",)],
    "export": [(target, *NODE) for target in targets()] + [("docker", "--out", "{directory}/no/{text}"), ("{text}",)],
    "report": [(), ("--csv",), ("--plot", "{directory}/no/{text}")],
    "metrics": [(), ("--serve", "{text}")],
    "config": [(), ("--template", "machine"), ("{text}",)],
    "setup": [("--dry-run",), ("--dry-run", "--root", "{directory}/{text}")],
    "completion": [("bash",), ("{text}",)],
    "help": [("run",), ("{text}",)],
    "ray": [("start", "--dry-run"), ("start", "--dry-run", "--labels", "{text}"), ("{text}",)],
}
"""What every command is called with: a new one must be told here."""
NO_MACHINE = (*APART, "check")
"""Commands that take no ``--machine``."""


def test_every_command_is_tried():
    assert set(LINES) == set(COMMANDS)


@pytest.fixture
def hostile(install, record, tmp_path):
    """A machine of which every text is hostile: plug-in, recording, holders, waiters."""

    def hostile(text, *, raising=False):
        install("acme", PLUGIN.format(text=text))
        if raising:
            install("bad", RAISING.format(text=text))
        return record(name=text.replace("/", "|"))

    return hostile


@pytest.fixture
def taken(monkeypatch):
    """Let devices be held and waited for, with hostile notes and requests."""
    ends = []

    def taken(machine, text):
        monkeypatch.setattr(sys, "argv", [text])
        hold = aa.acquire("APU:2", machine=machine, note=text, wait=0)
        share = aa.acquire("APU:0.5", machine=machine, note=text, wait=0)
        waiting = threading.Event()
        waiter = threading.Thread(
            target=lambda: aa.acquire("APU:2", machine=machine, note=text, on_wait=lambda *_: waiting.set()).release()
        )
        waiter.start()
        ends.extend([hold.release, share.release, waiter.join])
        assert waiting.wait(60)

    yield taken
    for end in ends:
        end()


def lines(command, text, directory):
    """What a command is called with, filled in; where time matters, the first and one with a hostile text."""
    known = LINES[command]
    hostile = [line for line in known if any("{text}" in argument for argument in line)]
    for arguments in length(dict.fromkeys((known[0], *([] if known[0] in hostile else hostile[-1:]))), known):
        yield [argument.format(text=text, directory=directory) for argument in arguments]


def fill(text):
    """A text in which braces stand for themselves."""
    return text.replace("{", "(").replace("}", ")")


@pytest.mark.parametrize("command", INSTALLED)
def test_nothing_in_a_text_reaches_the_terminal(command, hostile, taken, tmp_path):
    text = HOSTILE
    machine = hostile(text)
    taken(machine, text)
    place = tmp_path / "here"
    place.mkdir()
    for arguments in lines(command, fill(text), str(place)):
        before = () if command in NO_MACHINE else ("--machine", machine)
        argv = [sys.executable, "-m", "anyaccel", *before, command, *arguments]
        status, data = run_on_terminal(argv, cwd=place)
        shown = assert_plain(data)
        assert status in (0, 1, 2, 3, 4, 126, 127), shown
        assert "forged" not in [line[:16].removeprefix("anyaccel: ") for line in shown.splitlines()]
        assert not (place / "pwned").exists()


@pytest.mark.parametrize("command", ["status", "queue", "why", "doctor", "plugins"])
def test_a_text_is_printed_as_it_is(command, hostile, taken):
    machine = hostile(MARKUP)
    taken(machine, MARKUP)
    where = () if command == "queue" else ("--machine", machine)
    arguments = {"why": ("APU:3",), "plugins": ("acme",)}.get(command, ())
    _, data = run_on_terminal([sys.executable, "-m", "anyaccel", *where, command, *arguments], columns=1000)
    shown = assert_plain(data)
    if command != "plugins":
        assert MARKUP in shown
    if command == "status":
        assert "acme-[/]:cd:-0" in shown


@pytest.mark.parametrize("command", ["status", "run", "select", "env", "plugins", "doctor"])
def test_the_words_of_a_plugin_that_fails_are_text(command, hostile, tmp_path):
    machine = hostile(STEERING, raising=True)
    arguments = next(lines(command, "x", str(tmp_path)))
    argv = [sys.executable, "-m", "anyaccel", "--machine", machine, command, *arguments]
    argv += ["bad"] * (command == "plugins")
    # As in a locale of a language: there, printing half of a character fails.
    environ = {"PYTHONIOENCODING": "utf-8:strict"}
    _, data = run_on_terminal(argv, cwd=tmp_path, columns=1000, env=environ)
    shown = assert_plain(data)
    assert "ValueError: be anyaccel: forged" in shown
    assert all(not line.startswith(("be", "anyaccel: forged")) for line in shown.splitlines())


@pytest.mark.parametrize("command", ["status", "queue", "why", "plugins", "doctor", "record"])
def test_json_keeps_every_character(command, hostile, taken, anyaccel, tmp_path):
    machine = hostile(STEERING)
    taken(machine, STEERING)
    where = () if command == "queue" else ("--machine", machine)
    arguments = {"why": ("APU:3",), "plugins": ("acme",), "record": (str(tmp_path / "r"),)}.get(command, ())
    done = anyaccel(*where, command, *arguments, "--json", env={"PYTHONIOENCODING": "ascii"})
    assert done.stdout.isascii()
    found = json.loads(done.stdout)
    if command == "status":
        assert found["devices"][0]["model"] == STEERING
        assert found["machine"] == machine


def test_a_shell_is_told_nothing_that_it_could_not_read(hostile, anyaccel):
    machine = hostile(STEERING)
    done = anyaccel("--machine", machine, "env", "APU:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "anyaccel: a shell command takes printable text only" in done.stderr
    assert json.loads(anyaccel("--machine", machine, "env", "APU:1", "--json").stdout)["set"]["ANYACCEL_MACHINE"]
    held = anyaccel("--machine", machine, "hold", "APU:1")
    assert held.returncode == 0
    assert "\n# set ANYACCEL_MACHINE yourself: a shell command takes printable text only" in held.stderr
    anyaccel("release", held.stdout.strip())


@pytest.mark.parametrize("columns", [80, 200])
def test_a_simple_table_folds_its_last_column_and_has_one_heading(columns, anyaccel):
    argv = [sys.executable, "-m", "anyaccel", "setup", "--dry-run", "--root", "/nonexistent"]
    _, data = run_on_terminal(argv, columns=columns)
    shown = assert_plain(data).splitlines()
    assert max(map(len, shown)) <= columns
    whole = anyaccel("setup", "--dry-run", "--root", "/nonexistent").stdout.splitlines()
    assert shown[0].split() == whole[0].split()
    if columns == 200:
        assert [line.split() for line in shown] == [line.split() for line in whole]
    else:
        assert len(shown) > len(whole)
        assert sorted(" ".join(shown).split()) == sorted(" ".join(whole).split())


@pytest.mark.parametrize(
    ("variables", "bold"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": ""}, True)]
)
def test_bold_is_for_terminals_that_want_it(variables, bold, hostile):
    machine = hostile("x")
    _, data = run_on_terminal([sys.executable, "-m", "anyaccel", "--machine", machine], env=variables)
    assert (b"\x1b" in data) is bold


def test_wide_characters_take_two_columns(hostile, anyaccel):
    text = "\u65e5\u672c e\u0301"
    done = anyaccel("--machine", hostile(text), env={"PYTHONIOENCODING": "utf-8"})
    heading, row = done.stdout.splitlines()[:2]
    # The column behind it begins 2 columns further to the left in characters, and one further for what is combined.
    assert row.index("-/16.0") + len("-/16.0") == heading.index("MEM/GiB") + len("MEM/GiB") - 2 + 1


PRINTS_OTHERS = [command for command in ("status", "jobs", "queue", "why", "plugins", "doctor") if command in INSTALLED]
"""Commands that print texts of plug-ins, holders and waiters."""
ASCII = {"PYTHONIOENCODING": "ascii"}
LATIN = {"PYTHONIOENCODING": "latin-1"}
C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        *((command, ASCII) for command in length(PRINTS_OTHERS, INSTALLED)),
        *(("status", LATIN), ("queue", LATIN), ("status", C), ("doctor", C)),
    ],
)
def test_what_an_encoding_lacks_is_replaced(command, variables, hostile, taken, tmp_path):
    text = "\u65e5\u672c \u2013 \xe9"
    machine = hostile(text)
    taken(machine, text)
    for arguments in list(lines(command, text, str(tmp_path)))[: length(1, 3)]:
        where = () if command in NO_MACHINE else ("--machine", machine)
        argv = [sys.executable, "-m", "anyaccel", *where, command, *arguments]
        status, data = run_on_terminal(argv, cwd=tmp_path, env=variables)
        assert_plain(data, "latin-1")
        assert status in (0, 1, 2, 3, 4, 126, 127)


def test_a_script_is_not_printed_with_other_characters(hostile, anyaccel):
    machine = hostile("caf\xe9")
    done = anyaccel("--machine", machine, "env", "APU:1", env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "standard output is ascii, which has no '\\xe9'" in done.stderr
    assert "PYTHONIOENCODING=utf-8" in done.stderr


STREAMS = {
    "closed output": ">&-",
    "closed errors": "2>&-",
    "all closed": "<&- >&- 2>&-",
    "full output": ">/dev/full",
    "full errors": "2>/dev/full",
    "gone reader": "| true",
    "gone reader of both": "2>&1 | true",
}
TOLD = ("status", "--version", "--help", "why", "env")
"""Commands that print something in any case."""


def streams():
    """Every stream with some commands, and two with every other; in short, every one with one, and few with others."""
    names = list(STREAMS)
    for number, command in enumerate([*INSTALLED, "--help", "--version"]):
        few = [] if number % 3 else [names[number // 3 % len(names)]]
        two = [names[number % len(names)], names[(number + 3) % len(names)]]
        for name in names if command in length(["status"], TOLD) else length(few, two):
            yield pytest.param(command, STREAMS[name], id=f"{command}-{name}")


@pytest.mark.parametrize(("command", "redirection"), list(streams()))
def test_streams_that_cannot_be_written_are_told_in_one_message(command, redirection, acme, tmp_path):
    arguments = next(lines(command, "x", str(tmp_path)), []) if command in LINES else []
    where = () if command in (*NO_MACHINE, "--version") else ("--machine", "sim:A1:4")
    words = [sys.executable, "-m", "anyaccel", *where, command, *arguments]
    script = f'("$@"; echo $? >"$STATUS") {redirection}'
    environ = {**os.environ, "STATUS": str(tmp_path / "status")}
    done = subprocess.run(
        ["bash", "-c", script, "x", *words], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    ledger = Ledger.open()
    for lease in {lease.id for lease in ledger.leases() if lease.id}:  # of a hold that could print it
        ledger.end_lease(lease, force=True)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    status = (tmp_path / "status").read_text().strip()
    assert status in ("0", "1", "2", "3")
    if redirection in (">&-", ">/dev/full") and command in TOLD:
        assert status == "1"
        assert "anyaccel: standard output cannot be written: " in done.stderr
        assert ("free some space" in done.stderr) == (redirection == ">/dev/full")


@pytest.mark.parametrize("command", ["status", "plugins", "completion zsh"])
def test_a_document_that_cannot_be_written_is_told_on_standard_error(command):
    words = [sys.executable, "-m", "anyaccel", *command.split(), "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "anyaccel: standard output cannot be written: No space left on device" in done.stderr


@pytest.mark.parametrize("columns", ["9" * 5000, "\u0664\u0660", "-5", "abc", ""])
def test_a_width_that_is_no_number_is_that_of_the_terminal(columns, anyaccel):
    shown = [anyaccel("--machine", "sim:H100:2", env={"COLUMNS": each}).stdout for each in (columns, "80")]
    assert shown[0] == shown[1]


def test_no_file_of_ours_becomes_the_output_of_a_command(acme, tmp_path):
    """A closed standard output has a free number, which a lease's file must not get."""
    look = "readlink /proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2 >&8; echo done >&8"
    script = f'"$@" -- sh -c "{look}" 8>{tmp_path}/seen <&- >&- 2>&-'
    words = [sys.executable, "-m", "anyaccel", "--machine", "sim:A1:1", "run", "APU:1"]
    done = subprocess.run(["bash", "-c", script, "x", *words], timeout=60, check=False)
    seen = (tmp_path / "seen").read_text()
    assert done.returncode == 0
    assert "leases" not in seen
    assert seen.endswith("done\n")
