"""A damaged recording is one clear error in every command that is asked about it, and none waits for it."""

import json
import os

import pytest
from anyaccel.cli.parser import APART
from lengths import length
from our_commands import INSTALLED

SCHEMA = {"schema": "anyaccel.recording/1"}


def text(content):
    return lambda path: path.write_text(content)


DAMAGED = {
    "nested": (text("[" * 100_000), "cannot be read: "),
    "commands": (text(json.dumps({**SCHEMA, "commands": [{}]})), "recording.commands[0] must have the field 'argv'"),
    "entries": (
        text(json.dumps({**SCHEMA, "paths": {"/a": 1}})),
        "recording.paths['/a'] must be an object (got 1 that is a int)",
    ),
    "escaping": (text(json.dumps({**SCHEMA, "paths": {"/../a": {}}})), "a path must be absolute"),
    "encoding": (lambda path: path.write_bytes(b"\xff"), "cannot be read: 'utf-8' codec"),
    "FIFO": (os.mkfifo, "must be a regular file (its mode is p"),
    "directory": (os.mkdir, "must be a regular file (its mode is d"),
    "kernel's log": (lambda path: path.symlink_to("/proc/kmsg"), "must have from 1 to 33554432 bytes (got 0)"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "must be a regular file (its mode is c"),
}
ARGUMENTS = {
    "run": ("APU:1", "--", "true"),
    "sweep": ("APU:1", "--", "true"),
    "hold": ("APU:1",),
    "select": ("APU:1",),
    "why": ("APU:1",),
    "env": ("APU:1",),
    "export": ("env",),
    "kubernetes": ("status",),
    "ray": ("start", "--dry-run"),
    "record": ("{directory}/new",),
    "adopt": (str(os.getpid()),),
    "drain": ("acme/0",),
    "undrain": ("acme/0",),
    "reserve": ("APU", "--from", "now", "--to", "4h", "--for", "root"),
}
ELSEWHERE = APART | {"check", "top"}
"""Commands that look at no machine; ``check`` has recordings of its own, and ``top`` asks for a terminal first."""


def damaged(tmp_path, kind):
    make, message = DAMAGED[kind]
    machine = tmp_path / "machines" / "bad"
    machine.mkdir(parents=True)
    make(machine / "machine.json")
    return machine, message


def assert_refused(
    done, message, way_out="correct the file, or record the machine again, into a new directory: anyaccel record DIR"
):
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    said = done.stderr.splitlines()
    assert len(said) == 2
    assert message in said[0]
    assert said[1] == f"anyaccel: {way_out}"


def each_command():
    """Every command with every fault; where time matters, all faults with one command and one with each other."""
    kinds = list(DAMAGED)
    for number, command in enumerate(command for command in INSTALLED if command not in ELSEWHERE):
        few = [kinds[number % len(kinds)]]
        for kind in kinds if command == "status" else length(few, kinds):
            yield pytest.param(command, kind, id=f"{command}-{kind}")


@pytest.mark.parametrize(("command", "kind"), list(each_command()))
def test_every_command_refuses_it(command, kind, acme, anyaccel, tmp_path):
    machine, message = damaged(tmp_path, kind)
    arguments = [argument.format(directory=tmp_path) for argument in ARGUMENTS.get(command, ())]
    assert_refused(anyaccel("--machine", str(machine), command, *arguments), message)


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_check_blames_the_recording_and_not_the_plugin(kind, acme, anyaccel, tmp_path):
    machine, message = damaged(tmp_path, kind)
    assert_refused(anyaccel("check", "acme", "--recordings", str(machine.parent)), message)


@pytest.mark.parametrize("name", ["machine.json", "expected.json"])
@pytest.mark.parametrize("kind", DAMAGED)
def test_verify_refuses_either_file(kind, name, acme, anyaccel, tmp_path):
    machine, message = damaged(tmp_path, kind)
    if name == "machine.json":
        expected = {"schema": "anyaccel.expected/1", "vendors": {}, "visible": {}, "failed": {}}
        (machine / "expected.json").write_text(json.dumps(expected))
    else:
        (machine / "machine.json").rename(machine / name)
        (machine / "machine.json").write_text(json.dumps(SCHEMA))
        if kind in ("commands", "entries", "escaping"):
            message = 'must say "schema": "anyaccel.expected/1"'
    way_out = {}
    if name == "expected.json":
        way_out = {"way_out": "write a new one: anyaccel check VENDOR --recordings DIR --write-expected --force"}
    assert_refused(anyaccel("record", "--verify", str(machine)), message, **way_out)


def test_verify_says_how_to_get_an_inventory_that_is_missing(acme, anyaccel, tmp_path):
    (tmp_path / "machine.json").write_text(json.dumps(SCHEMA))
    done = anyaccel("record", "--verify", str(tmp_path))
    assert done.stderr.splitlines()[1] == (
        "anyaccel: write a new one: anyaccel check VENDOR --recordings DIR --write-expected"
    )
    done = anyaccel("check", "acme", "--recordings", str(tmp_path), "--write-expected")
    assert "expected.json: no trace of acme" in done.stdout
    assert anyaccel("record", "--verify", str(tmp_path)).returncode == 0


def test_json_has_one_document_with_the_way_out(acme, anyaccel, tmp_path):
    machine, message = damaged(tmp_path, "commands")
    done = anyaccel("--machine", str(machine), "doctor", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, done.stderr) == (2, "")
    assert (error["code"], error["hint"]) == (
        "machine",
        "correct the file, or record the machine again, into a new directory: anyaccel record DIR",
    )
    assert message in error["message"]


def test_a_new_recording_is_not_written_into_a_fifo(acme, anyaccel, tmp_path):
    os.mkfifo(tmp_path / "expected.json")
    done = anyaccel("record", str(tmp_path))
    assert done.returncode == 2
    assert "expected.json cannot be written: No such device or address" in done.stderr
