"""The journal: what is written is read; what others put there is not believed."""

import contextlib
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from anyaccel.ledger import journal
from anyaccel.ledger.journal import JournalEntry, Used
from anyaccel.ledger.record import user_name
from anyaccel.model import replace
from counting import count_calls

ENTRY = JournalEntry(
    lease="0123456789ab",
    user=user_name(os.geteuid()),
    began=1000.5,
    ended=1060.5,
    held=60.0,
    waited=2.25,
    devices=(
        Used(device="nvidia/0", type="H100", observed=50.0, utilization=0.5, idle=20.0, memory_peak_bytes=1 << 30),
        Used(device="nvidia/1", type="H100", units=2500),
    ),
    request="GPU:1.25",
    note="a note",
    program="train.py",
    exit=3,
    leases=2,
    timeouts=1,
)


@pytest.fixture(autouse=True)
def unprepared(monkeypatch, tmp_path):
    """Let no administrator have made the directory of this machine."""
    monkeypatch.setattr(journal, "MACHINE_DIRECTORY", str(tmp_path / "nothing here"))


@pytest.fixture
def environ(tmp_path):
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "state" / "anyaccel" / "journal.jsonl"


def test_what_is_written_is_read(environ, file):
    assert journal.write(ENTRY, environ)
    assert journal.write(replace(ENTRY, exit=None), environ)
    first, second = journal.read(environ)
    assert first == ENTRY
    assert second == replace(ENTRY, exit=None)
    assert first.device_seconds == 75.0
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(journal.read(environ, since=1061)) == []


def test_lines_that_are_too_old_cost_little(environ):
    def add():
        for _ in range(20):
            journal.write(ENTRY, environ)

    def read(since):
        return count_calls(lambda: list(journal.read(environ, since=since)))

    add()
    few_new, few_old = read(ENTRY.ended), read(ENTRY.ended + 1)
    add()
    assert read(ENTRY.ended + 1) - few_old < (read(ENTRY.ended) - few_new) / 5


def test_a_lease_that_ends_before_its_start_ended_at_its_start(environ):
    journal.write(replace(ENTRY, ended=ENTRY.began - 10), environ)
    assert [each.ended for each in journal.read(environ, since=ENTRY.began)] == [ENTRY.began]
    assert not [*journal.read(environ, since=ENTRY.began + 1)]


def test_nothing_fails_where_nothing_can_be_written(tmp_path):
    (tmp_path / "state").write_text("in the way")
    assert not journal.write(ENTRY, {"XDG_STATE_HOME": str(tmp_path / "state")})
    assert not journal.write(ENTRY, {})
    assert not journal.write(ENTRY, {"HOME": "relative"})
    assert list(journal.read({})) == []


def test_it_is_put_aside_once_it_is_full(environ, file, monkeypatch):
    monkeypatch.setattr(journal, "MOST_BYTES", 1000)
    for number in range(12):
        assert journal.write(replace(ENTRY, began=float(number), ended=2000.0 + number), environ)
    assert 0 < file.stat().st_size < 1400
    assert (file.parent / "journal.jsonl.1").stat().st_size < 1400
    assert sorted(os.listdir(file.parent)) == ["journal.jsonl", "journal.jsonl.1"]
    began = [entry.began for entry in journal.read(environ)]
    assert began == sorted(began)
    assert began[-1] == 11


def test_no_link_is_followed(environ, file, tmp_path):
    file.parent.mkdir(parents=True)
    (tmp_path / "precious").write_text("")
    file.symlink_to(tmp_path / "precious")
    assert not journal.write(ENTRY, environ)
    assert (tmp_path / "precious").read_text() == ""
    file.unlink()
    os.mkfifo(file)
    assert not journal.write(ENTRY, environ)
    assert list(journal.read(environ)) == []


def test_false_entries_are_left_out_or_made_harmless(environ, file):
    file.parent.mkdir(parents=True)
    line = journal._line(ENTRY).decode()
    file.write_text(
        "\n".join(
            [
                "",
                "[]",
                "{",
                "[" * 10_000,
                '{"v": 2}',
                '{"v": 1, "began": "x"}',
                line.replace('"held": 60.0', '"held": -1'),
                line.replace('"held": 60.0', '"held": NaN'),
                line.replace("a note", "x" * 20_000),
                line.replace("a note", "\\u001b[31m").replace('"v": 1', '"v": 1, "user": "another-user"'),
                line.replace("10000", "0").replace("2500", "true"),
            ]
        )
    )
    (marked,) = journal.read(environ)
    assert marked.note == "\ufffd[31m"
    assert marked.user == user_name(os.geteuid())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make the machine's directory and to own files as others")
def test_in_the_machines_directory_the_owner_of_a_file_is_the_user(tmp_path, environ, monkeypatch):
    machine = tmp_path / "machine"
    machine.mkdir()
    machine.chmod(0o1777)
    monkeypatch.setattr(journal, "MACHINE_DIRECTORY", str(machine))
    squatter = machine / f"{os.geteuid()}.jsonl"
    squatter.write_bytes(journal._line(ENTRY))
    os.chown(squatter, 61_002, 61_002)
    (machine / "61003.jsonl").mkdir()
    assert journal.write(ENTRY, environ)
    assert sorted(os.listdir(machine)) == [f"{os.geteuid()}-1.jsonl", f"{os.geteuid()}.jsonl", "61003.jsonl"]
    assert sorted(entry.user for entry in journal.read(environ)) == sorted(["61002", user_name(os.geteuid())])
    machine.chmod(0o777)  # not sticky: any user could replace files, so it is not the machine's
    assert list(journal.read(environ)) == []


def test_a_line_that_was_cut_off_spoils_no_other(environ, file):
    """As on a full disk: here by a limit on the size of files, which the kernel enforces."""
    assert journal.write(ENTRY, environ)
    size = file.stat().st_size
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, size + 20))
        os._exit(int(journal.write(ENTRY, environ)))
    assert os.waitpid(child, 0)[1] == 0
    assert file.stat().st_size == size + 20
    assert journal.write(replace(ENTRY, exit=7), environ)
    assert [entry.exit for entry in journal.read(environ)] == [3, 7]


HALF_LIFE = 3600.0


@pytest.fixture
def machine(monkeypatch):
    """The machine's directory, where other users get to, and a configuration that counts use over time."""
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        machine = Path(parent) / "machine"
        machine.mkdir()
        machine.chmod(0o1777)
        monkeypatch.setattr(journal, "MACHINE_DIRECTORY", str(machine))
        monkeypatch.setattr(journal, "count_half_life", lambda: HALF_LIFE)
        monkeypatch.setattr(journal, "_LOCK_TRIES", 1_000_000)  # the lock is waited for, however slow the machine is
        yield machine


def used(devices, held, ended):
    """A lease that ended at a time."""
    units = Used(device="nvidia/0", units=round(devices * 10_000))
    return replace(ENTRY, began=ended - held, ended=ended, held=held, devices=(units,))


def start_as(uid, *entries):
    """Start a process of a user that writes entries, and fails if one cannot be written."""
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            os.setresuid(uid, uid, uid)
            os.umask(0o077)
            os._exit(not all(journal.write(entry, {}) for entry in entries))
        os._exit(2)
    return child


def write_as(uid, *entries):
    assert os.waitpid(start_as(uid, *entries), 0)[1] == 0


def seconds(uid, at, half_life=HALF_LIFE):
    usage = journal.read_usage(half_life).get(uid)
    return usage.decayed(at, half_life) if usage else 0.0


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to write as other users")


@needs_root
def test_the_last_line_of_each_user_has_the_usage(machine, monkeypatch):
    now = time.time()
    old, new = used(2, 100.0, now - HALF_LIFE), used(0.5, 100.0, now)
    write_as(61_001, old, new)
    write_as(61_002, old)
    expected = {uid: seconds(uid, now) for uid in (61_001, 61_002, 61_003)}
    assert expected == pytest.approx({61_001: 150.0, 61_002: 100.0, 61_003: 0.0}, rel=0.02)
    file = machine / "61001.jsonl"
    first, _, rest = file.read_text().partition("\n")
    file.write_text("x" * len(first) + "\n" + rest)
    assert seconds(61_001, now) == expected[61_001]
    # A full file is put aside, and the usage goes on in the new one.
    monkeypatch.setattr(journal, "MOST_BYTES", 10)
    write_as(61_001, used(1, 100.0, now))
    assert len(file.read_text().splitlines()) == 1
    assert seconds(61_001, now) == pytest.approx(250.0, rel=0.02)
    file.unlink()  # as between the two steps
    assert seconds(61_001, now) == expected[61_001]


@needs_root
def test_another_half_life_counts_the_leases_again(machine, monkeypatch):
    now = time.time()
    write_as(61_001, used(1, 10.0, now - 60.0), used(1, 10.0, now))
    assert seconds(61_001, now, 60.0) == pytest.approx(15.0, rel=0.1)
    monkeypatch.setattr(journal, "count_half_life", lambda: 60.0)
    write_as(61_001, used(1, 10.0, now))
    assert json.loads((machine / "61001.jsonl").read_text().splitlines()[-1])["used"][0] == 60.0
    assert seconds(61_001, now, 60.0) == pytest.approx(25.0, rel=0.1)


@needs_root
def test_processes_of_one_user_that_end_at_once_all_count(machine):
    now = time.time()
    children = [start_as(61_001, *[used(1, 1.0, now)] * 5) for _ in range(6)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
    assert seconds(61_001, now) == pytest.approx(30.0, rel=0.01)


@needs_root
def test_a_child_that_is_forked_during_a_write_does_not_keep_the_file_locked(machine, monkeypatch):
    line, children = journal._line, []

    def fork(*words):
        if not (child := os.fork()):
            signal.pause()
            os._exit(0)
        children.append(child)
        return line(*words)

    monkeypatch.setattr(journal, "_line", fork)
    assert journal.write(ENTRY)
    try:
        with open(machine / f"{os.geteuid()}.jsonl") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def test_only_a_users_own_file_that_all_can_read_says_what_the_user_used(machine):
    """A squatter neither adds to another user's usage nor takes it away; nonsense counts as nothing."""
    now = time.time()
    write_as(61_001, used(1, 100.0, now))
    stolen = machine / "61002.jsonl"
    stolen.write_bytes((machine / "61001.jsonl").read_bytes())
    os.chown(stolen, 61_001, 61_001)
    os.mkfifo(machine / "61003.jsonl")
    (machine / "61004.jsonl").symlink_to(machine / "61001.jsonl")
    assert set(journal.read_usage(HALF_LIFE)) == {61_001}
    write_as(61_002, used(1, 50.0, now))
    assert seconds(61_002, now) == pytest.approx(50.0, rel=0.02)
    (machine / "61001.jsonl").chmod(0o600)
    assert set(journal.read_usage(HALF_LIFE)) == {61_002}
    own = machine / "61002-1.jsonl"
    for false in ("[3600.0, -1, 1]", "[3600.0, NaN, 1]", "[3600.0, 5]", '"x"', "[3600.0, 1e99, 1]", "[3600.0, {}, []]"):
        own.write_text(json.dumps({"v": 1}) + "\n" + '{"used": ' + false + "}\n")
        assert journal.read_usage(HALF_LIFE) == {}, false
    own.write_text('{"used": [3600.0, 5, 99999999999]}\n')  # in a time to come: as if now
    assert seconds(61_002, time.time()) == pytest.approx(5.0, rel=0.01)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file that cannot be read")
def test_a_file_that_cannot_be_read_spoils_no_report(environ, file):
    assert journal.write(ENTRY, environ)
    code = """
import os, subprocess, sys
from anyaccel.ledger import journal

subprocess.run(["mount", "--bind", f"/proc/{os.getpid()}/mem", sys.argv[1]], check=True)
print(list(journal.read({"XDG_STATE_HOME": sys.argv[2]})))
"""
    command = ["unshare", "--mount", sys.executable, "-c", code, str(file), environ["XDG_STATE_HOME"]]
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("this system lets root mount nothing")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
