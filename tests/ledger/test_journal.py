"""The journal: what is written is read; what others put there is not believed."""

import os

import pytest
from anyaccel.ledger import journal
from anyaccel.ledger.journal import JournalEntry, Used
from anyaccel.ledger.record import user_name
from anyaccel.model import replace

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
    marked, without = journal.read(environ)
    assert marked.note == "\ufffd[31m"
    assert marked.user == user_name(os.geteuid())
    assert without.devices == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make the machine's directory and to own files as others")
def test_in_the_machines_directory_the_owner_of_a_file_is_the_user(tmp_path, environ, monkeypatch):
    machine = tmp_path / "machine"
    machine.mkdir()
    machine.chmod(0o1777)
    monkeypatch.setattr(journal, "MACHINE_DIRECTORY", str(machine))
    squatter = machine / f"{os.geteuid()}.jsonl"
    squatter.write_bytes(journal._line(ENTRY))
    os.chown(squatter, 61_002, 61_002)
    assert journal.write(ENTRY, environ)
    assert sorted(os.listdir(machine)) == [f"{os.geteuid()}-1.jsonl", f"{os.geteuid()}.jsonl"]
    assert sorted(entry.user for entry in journal.read(environ)) == sorted(["61002", user_name(os.geteuid())])
    machine.chmod(0o777)  # not sticky: any user could replace files, so it is not the machine's
    assert list(journal.read(environ)) == []
