"""A recording from any source is read whole, or refused in one message with the fault."""

import contextlib
import json
import os
import socket
import threading

import pytest
from anyaccel.errors import MachineError
from anyaccel.probe import loading
from anyaccel.probe.loading import load, read_json
from anyaccel.probe.recording import RecordedFacts, Recorder
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
        ("[" * 100_000, r"must be at most 32 levels deep \(got more\)"),
        ('{"a":' * 100_000, "must be at most 32 levels deep"),
        (with_part("queries", {"a": {"value": json.loads("[" * 40 + "]" * 40)}}), "must be at most 32 levels deep"),
        (b'{"schema": "\xff"}', r"must be UTF-8 \(byte 12 is 0xff\)"),
        (b'{"schema": "\xed\xa0\x80"}', "must be UTF-8"),
        ('{"schema": "\\ud800"}', r"must hold Unicode text \(it holds '\\ud800', half a character\)"),
        ('{"\\uDFFF": 1}', "must hold Unicode text"),
        ('{"schema": NaN}', r"a number must be finite \(got NaN\)"),
        ('{"schema": -Infinity}', r"a number must be finite \(got -Infinity\)"),
        ('{"schema": 1e999}', r"a number must be finite \(got 1e999\)"),
        ('{"schema": 18446744073709551616}', r"an integer must have at most 64 bits \(got 18446744073709551616\)"),
        ('{"schema": -9223372036854775809}', "an integer must have at most 64 bits"),
        ('{"schema": ' + "9" * 10_000 + "}", r"an integer must have at most 64 bits \(got 9{40}\.\.\.\)"),
        ('{"schema": 1, "schema": 2}', r"every name must stand once in an object \(got 'schema' twice\)"),
        ("[]", r'must say "schema": "anyaccel.recording/1" \(got None\)'),
        ("7", 'must say "schema"'),
        ('{"schema": ["anyaccel.recording/1"]}', r"\(got \['anyaccel.recording/1'\]\)"),
        (with_part("environ", []), r"'environ' must be an object \(got \[\]\)"),
        (with_part("environ", {"A": 1}), r"the variable 'A' must be a text without NUL \(got 1\)"),
        (with_part("environ", {"A": "a\0"}), r"the variable 'A' must be a text without NUL \(got 'a\\x00'\)"),
        (with_part("environ", {"A=B": ""}), r"must have a name without '=' and NUL \(got 'A=B'\)"),
        (with_part("environ", {"": ""}), "must have a name"),
        (with_part("paths", "x"), r"'paths' must be an object \(got 'x'\)"),
        (with_part("paths", {"etc": {}}), r"a path must be absolute, without '\.', '\.\.', .* \(got 'etc'\)"),
        (with_part("paths", {"../../etc": {}}), r"\(got '\.\./\.\./etc'\)"),
        (with_part("paths", {"/sys/../etc": {}}), r"\(got '/sys/\.\./etc'\)"),
        (with_part("paths", {"//sys": {}}), r"\(got '//sys'\)"),
        (with_part("paths", {"/sys/": {}}), r"\(got '/sys/'\)"),
        (with_part("paths", {"/sys\0": {}}), r"\(got '/sys\\x00'\)"),
        (with_part("paths", {"/a" * 65: {}}), "of a usual length"),
        (with_part("paths", {"/" + "a" * 4096: {}}), "of a usual length"),
        (with_part("paths", {"/a": []}), r"the path '/a' must be an object \(got \[\]\)"),
        (with_part("paths", {"/a": {"txt": ""}}), r"the path '/a' must have no keys but 'text', .* \(got 'txt'\)"),
        (with_part("paths", {"/a": {"text": 1}}), r"'text' of the path '/a' must be a text \(got 1\)"),
        (with_part("paths", {"/a": {"link": ""}}), r"'link' of the path '/a' must be the target of a link \(got ''\)"),
        (with_part("paths", {"/a": {"char": [1]}}), r"'char' .* must be the major and the minor number \(got \[1\]\)"),
        (with_part("paths", {"/a": {"char": "12"}}), "must be the major and the minor number"),
        (with_part("paths", {"/a": {"block": [1, -1]}}), "must be the major and the minor number"),
        (with_part("paths", {"/a": {"char": [True, 1]}}), "must be the major and the minor number"),
        (with_part("paths", {"/a": {"access": ["r"]}}), r"must be '', 'r', 'w' or 'rw' \(got \['r'\]\)"),
        (with_part("paths", {"/a": {"dir": 1}}), r"must be true or false \(got 1\)"),
        (with_part("paths", {"/a": {"errno": "errorcode"}}), "must be the name of an error such as EACCES"),
        (with_part("paths", {"/a": {"errno": "ENOTHING"}}), "must be the name of an error"),
        (with_part("paths", {"/a": {"errno": 13}}), r"\(got 13\)"),
        (with_part("commands", {}), r"'commands' must be a list \(got {}\)"),
        (with_part("commands", ["x"]), r"command 0 must be an object \(got 'x'\)"),
        (with_part("commands", [{}]), r"command 0 must have 'argv' \(got {}\)"),
        (with_part("commands", [{"argv": ["a"]}, {"argv": "a"}]), r"'argv' of command 1 must be a list of texts"),
        (with_part("commands", [{"argv": []}]), "must be a list of texts, the program first"),
        (with_part("commands", [{"argv": ["a", 1]}]), r"\(got \['a', 1\]\)"),
        (with_part("commands", [{"argv": ["a"], "returncode": "0"}]), r"must be an integer \(got '0'\)"),
        (
            with_part("commands", [{"argv": ["a"], "stdout": None}]),
            r"'stdout' of command 0 must be a text \(got None\)",
        ),
        (with_part("commands", [{"argv": ["a"], "timeout": "yes"}]), r"must be true or false \(got 'yes'\)"),
        (with_part("queries", []), "'queries' must be an object"),
        (with_part("queries", {"q": 1}), r"the query 'q' must be an object \(got 1\)"),
        (with_part("queries", {"q": {}}), r"the query 'q' must have either 'value' or 'error'"),
        (
            with_part("queries", {"q": {"value": 1, "error": {"kind": "a", "message": "b"}}}),
            "either 'value' or 'error'",
        ),
        (with_part("queries", {"q": {"error": "x"}}), "must be an object with the texts 'kind' and 'message'"),
        (with_part("queries", {"q": {"error": {"kind": "a"}}}), "must be an object with the texts"),
        (with_part("queries", {"q": {"error": {"kind": "a", "message": "b", "value": "c"}}}), "the integer 'value'"),
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
        (fifo, r"must be a regular file \(got a FIFO\)"),
        (os.mkdir, r"must be a regular file \(got a directory\)"),
        (listening, r"must be a regular file \(got a socket\)"),
        (lambda path: os.symlink("/dev/zero", path), r"must be a regular file \(got a character device\)"),
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
    monkeypatch.setattr(loading.os, "stat", lambda _: found)
    with pytest.raises(MachineError, match=r"must be a regular file \(got a FIFO\)"):
        load(str(path))


def test_a_file_that_grows_while_it_is_read_stays_bounded(tmp_path, monkeypatch):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(SCHEMA) + " " * 100)
    monkeypatch.setattr(loading, "LARGEST", 60)
    monkeypatch.setattr(loading, "_check_regular", lambda _: None)
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
