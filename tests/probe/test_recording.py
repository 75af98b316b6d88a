"""A recording from any source is read whole, or refused in one message with the fault."""

import contextlib
import json
import os
import socket
import threading

import pytest
from anyaccel.errors import MachineError
from anyaccel.probe import recording
from anyaccel.probe.recording import RecordedFacts, Recorder, load, read_json
from hypothesis import given
from hypothesis import strategies as st

SCHEMA = {"schema": "anyaccel.recording/1"}


def written(tmp_path, content):
    path = tmp_path / "machine.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def with_part(name, content):
    return json.dumps({**SCHEMA, name: content})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"must have from 1 to 33554432 bytes \(got 0\)"),
        ("{", "cannot be read: Expecting property name"),
        ("[" * 100_000, "cannot be read: "),
        ('{"a":' * 100_000, "cannot be read: "),
        (b'{"schema": "\xff"}', "cannot be read: 'utf-8' codec can't decode byte 0xff in position 12"),
        (b'{"schema": "\xed\xa0\x80"}', "cannot be read: 'utf-8' codec can't decode byte 0xed"),
        ('{"schema": "\\ud800"}', r"cannot be read: 'utf-8' codec can't encode character '\\ud800'"),
        ('{"\\uDFFF": 1}', r"cannot be read: 'utf-8' codec can't encode character '\\udfff'"),
        ('{"schema": ' + "9" * 10_000 + "}", "cannot be read: Exceeds the limit"),
        ("[]", r'must say "schema": "anyaccel.recording/1" \(got None\)'),
        ("7", 'must say "schema"'),
        ('{"schema": ["anyaccel.recording/1"]}', r"\(got \['anyaccel.recording/1'\]\)"),
        (with_part("environ", []), r"recording.environ must be an object \(got \[\] that is a list\)"),
        (with_part("environ", {"A": 1}), r"recording.environ\['A'\] must be str \(got 1 that is a int\)"),
        (with_part("environ", {"A": "a\0"}), r"must have a name without '=', and no NUL \(got 'A=a\\x00'\)"),
        (with_part("environ", {"A=B": ""}), r"must have a name without '=', and no NUL \(got 'A=B='\)"),
        (with_part("environ", {"": ""}), "must have a name"),
        (with_part("paths", "x"), r"recording.paths must be .* \(got 'x' that is a str\)"),
        (with_part("paths", {"etc": {}}), r"a path must be absolute, without '\.', '\.\.', .* \(got 'etc'\)"),
        (with_part("paths", {"../../etc": {}}), r"\(got '\.\./\.\./etc'\)"),
        (with_part("paths", {"/sys/../etc": {}}), r"\(got '/sys/\.\./etc'\)"),
        (with_part("paths", {"//sys": {}}), r"\(got '//sys'\)"),
        (with_part("paths", {"/sys/": {}}), r"\(got '/sys/'\)"),
        (with_part("paths", {"/sys\0": {}}), r"\(got '/sys\\x00'\)"),
        (with_part("paths", {"/a" * 65: {}}), "of a usual length"),
        (with_part("paths", {"/" + "a" * 4096: {}}), "of a usual length"),
        (with_part("paths", {"/" + "a" * 4096: []}), r"recording.paths\['/aaaaa.*\] must be an object \(got \[\]"),
        (with_part("paths", {"/a": []}), r"recording.paths\['/a'\] must be an object \(got \[\] that is a list\)"),
        (
            with_part("paths", {"/a": {"txt": ""}}),
            r"recording.paths\['/a'\] must have no field 'txt': .* has text, link",
        ),
        (with_part("paths", {"/a": {"text": 1}}), r"recording.paths\['/a'\].text must be str \(got 1 that is a int\)"),
        (with_part("paths", {"/a": {"link": "a\0"}}), r"the link '/a' must have a target without NUL"),
        (with_part("paths", {"/a": {"char": [1]}}), r"\['/a'\].char must be a list of 2 \(got \[1\]"),
        (with_part("paths", {"/a": {"char": "12"}}), r"char must be a list of 2"),
        (with_part("paths", {"/a": {"block": [1, -1]}}), "the numbers of '/a' must be 0 or more"),
        (with_part("paths", {"/a": {"char": [True, 1]}}), r"char\[0\] must be int \(got True that is a bool\)"),
        (with_part("paths", {"/a": {"group": 1 << 64}}), "group must be int, finite and of at most 64 bits"),
        (with_part("paths", {"/a": {"access": ["r"]}}), r"access must be .*'', 'r', 'w', 'rw'\] \(got \['r'\]"),
        (with_part("paths", {"/a": {"dir": 1}}), r"dir must be bool \(got 1 that is a int\)"),
        (with_part("paths", {"/a": {"errno": "errorcode"}}), "must be the name of an error such as EACCES"),
        (with_part("paths", {"/a": {"errno": "ENOTHING"}}), "must be the name of an error"),
        (with_part("paths", {"/a": {"errno": 13}}), r"errno must be str \(got 13 that is a int\)"),
        (with_part("commands", {}), r"recording.commands must be .* \(got {} that is a dict\)"),
        (with_part("commands", ["x"]), r"recording.commands\[0\] must be an object \(got 'x'"),
        (with_part("commands", [{}]), r"recording.commands\[0\] must have the field 'argv'"),
        (
            with_part("commands", [{"argv": ["a"]}, {"argv": "a"}]),
            r"commands\[1\].argv must be a list \(got",
        ),
        (with_part("commands", [{"argv": []}]), "must have 'argv', the program first"),
        (with_part("commands", [{"argv": ["a", 1]}]), r"argv\[1\] must be str \(got 1 that is a int\)"),
        (with_part("commands", [{"argv": ["a"], "returncode": "0"}]), r"returncode must be int \(got '0'"),
        (with_part("commands", [{"argv": ["a"], "stdout": None}]), r"stdout must be str \(got None"),
        (with_part("commands", [{"argv": ["a"], "timeout": "yes"}]), r"timeout must be bool \(got 'yes'"),
        (with_part("queries", []), r"recording.queries must be .* \(got \[\] that is a list\)"),
        (with_part("queries", {"q": 1}), r"recording.queries\['q'\] must be an object \(got 1"),
        (
            with_part("queries", {"q": {"error": "x"}}),
            r"recording.queries\['q'\].error must be .*Error \| None \(got 'x'",
        ),
        (with_part("queries", {"q": {"error": {"kind": "a"}}}), "error must have the field 'message'"),
        (
            with_part("queries", {"q": {"error": {"kind": "a", "message": "b", "value": "c"}}}),
            r"value must be int \| None",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place_and_value(content, message, tmp_path):
    path = written(tmp_path, content)
    with pytest.raises(MachineError, match=message) as caught:
        load(path)
    assert path in str(caught.value)
    assert len(str(caught.value)) < 500
    assert (
        caught.value.hint == "correct the file, or record the machine again, into a new directory: anyaccel record DIR"
    )


def fifo(path):
    os.mkfifo(path)


def listening(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (fifo, r"must be a regular file \(its mode is p"),
        (os.mkdir, r"must be a regular file \(its mode is d"),
        (listening, r"must be a regular file \(its mode is s"),
        (lambda path: os.symlink("/dev/zero", path), r"must be a regular file \(its mode is c"),
        (lambda path: os.symlink("/proc/kmsg", path), r"must have from 1 to \d+ bytes \(got 0\)"),
        (lambda path: os.symlink("/proc/self/environ", path), "must have from 1 to"),
        (lambda path: os.symlink(path, path), "Too many levels of symbolic links"),
        (lambda path: os.symlink("/no/such/file", path), "No such file or directory"),
        (lambda path: (path.touch(), os.truncate(path, 1 << 40)), r"\(got 1099511627776\)"),
    ],
)
@pytest.mark.timeout(20)
def test_what_is_no_file_of_a_usual_size_is_never_read(make, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "machine.json")
    with pytest.raises(MachineError, match=message):
        load(str(tmp_path / "machine.json"))


def test_a_link_to_a_file_is_followed(tmp_path):
    (tmp_path / "there").write_text(json.dumps(SCHEMA))
    (tmp_path / "machine.json").symlink_to("there")
    assert load(str(tmp_path / "machine.json")) == SCHEMA


@pytest.mark.timeout(20)
def test_a_file_that_becomes_a_fifo_on_the_way_is_not_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(SCHEMA))
    found = os.stat(path)
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(recording.os, "stat", lambda _: found)
    with pytest.raises(MachineError, match=r"must be a regular file \(its mode is p"):
        load(str(path))


def test_a_file_that_grows_while_it_is_read_stays_bounded(tmp_path, monkeypatch):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(SCHEMA) + " " * 100)
    monkeypatch.setattr(recording, "LARGEST", 60)
    monkeypatch.setattr(recording, "_check_regular", lambda _: None)
    with pytest.raises(MachineError, match=r"must have at most 60 bytes \(got more\)"):
        load(str(path))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
parts = st.sampled_from(["environ", "paths", "commands", "queries"])
keys = st.sampled_from(["text", "link", "char", "errno", "argv", "value", "error", "kind", "/a", "/a/b", "NAME"])
shapes = st.recursive(
    json_values,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(parts, shapes))
def test_any_json_is_a_recording_that_can_be_asked_or_is_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / f"any-{threading.get_ident()}.json"
    path.write_text(json.dumps({**SCHEMA, **content}))
    try:
        facts = RecordedFacts(load(str(path)))
    except MachineError:
        return
    for name in ("/a", "/a/b", "/"):
        for ask in (facts.read, facts.readlink, facts.exists, facts.is_dir, facts.node):
            with contextlib.suppress(OSError):
                ask(name)
    assert isinstance(facts.glob("/*"), list)
    facts.run(["x"], 1)


def test_a_path_has_one_name(tmp_path):
    class Facts(RecordedFacts):
        pass

    recorder = Recorder(Facts({"paths": {"/sys/a/b": {"text": "1"}, "/sys/a/2\u00b23": {"text": "2"}}}))
    assert recorder.read("/sys/a//x/../b/") == "1"
    assert recorder.read("/sys/a/2\u00b23") == "2"
    recording = recorder.recording()
    assert set(recording["paths"]) == {"/sys/a/b", "/sys/a/2\u00b23"}
    path = written(tmp_path, json.dumps(recording))
    assert RecordedFacts(load(path)).read("/sys/./a/b") == "1"


def test_other_json_is_read_alike(tmp_path):
    path = written(tmp_path, '{"vendors": {"acme": [1, 2.5, null, "\\ud83d\\ude00"]}}')
    assert read_json(path, "") == {"vendors": {"acme": [1, 2.5, None, "\U0001f600"]}}
