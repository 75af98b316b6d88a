"""What fits on 80 and 120 columns with real holders and waiters; commands that need no id where there is just one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.inventory import find_named
from anyaccel.launcher import Scope
from anyaccel.ledger import Ledger, make_block
from terminals import assert_plain, run_on_terminal
from waiting import PATIENCE, until

ANYACCEL = [sys.executable, "-m", "anyaccel"]


@pytest.fixture(autouse=True)
def simulated(acme, monkeypatch, tmp_path):
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def waiting():
    """Requests that wait, of processes of their own."""
    started = []

    def waiting(*arguments):
        started.append(subprocess.Popen([*ANYACCEL, "run", *arguments, "--", "true"], stderr=subprocess.DEVNULL))
        until(lambda: len(Ledger.open().tickets()) == len(started), "the ticket")

    yield waiting
    for process in started:
        process.kill()
        process.wait(PATIENCE)


def drain(name, note=""):
    """Withhold a device, as 'anyaccel drain' of an extra does."""
    inventory = aa.detect()
    ids = [device.id for device in find_named(inventory.devices, name)]
    block = make_block(Scope.make(inventory, os.environ).keys(ids), note)
    Ledger.open().change_blocks(lambda blocks: [*blocks, block])
    return block


def shown(*arguments, columns):
    status, data = run_on_terminal([*ANYACCEL, *arguments], columns=columns)
    assert status == 0
    found = assert_plain(data).splitlines()
    assert max(map(len, found)) <= columns, found
    return found


@pytest.mark.parametrize("columns", [80, 120])
def test_a_table_has_one_heading_and_no_empty_column(columns, anyaccel, waiting):
    with aa.acquire("A1:1", note="theirs", time=7200), aa.acquire("A1:0.5", time=3600):
        (heading, *rows) = [line for line in shown("status", columns=columns) if not line.startswith("anyaccel: ")][:3]
        assert {"DEVICE", "TYPE", "STATE", "USER", "SHARE", "UNTIL", "LEASE", "NOTE"} <= set(heading.split())
        assert not {"LOAD", "TEMP", "POWER"} & set(heading.split()), "a simulation knows none of these"
        assert all(re.search(r" (\d\d-\d\d )?\d\d:\d\d +[0-9a-f]{12} ", row) for row in rows)
        waiting("A1:1")
        (heading, *rows) = shown("queue", columns=columns)
        assert (len(rows), "NOTE" in heading) == (1, False)
        waiting("A1:2", "--note", "a note that is as long as a note of a person may well be " * 3)
        (heading, *rows) = shown("queue", columns=columns)
        assert {"PLACE", "REQUEST", "USER", "WAITED", "REASON", "NOTE"} <= set(heading.split())
        assert [row.split()[0] for row in rows if row[:1].strip()] == ["1", "2"]
        told = dict(zip(("heading", "row"), (line.split() for line in shown("queue", columns=200)), strict=False))
        assert told["heading"][-2:] == ["TICKET", "PROCESS"]
    with aa.acquire("A1:1"):
        assert "UNTIL" not in shown("status", columns=columns)[1]


def test_the_queue_of_another_machine_is_another_queue(anyaccel, waiting):
    drain("acme/0")
    with aa.acquire("A1:1"):
        waiting("A1:1")
        for machine in ([], ["--machine", "sim:A1:2"]):
            done = anyaccel("queue", *machine)
            assert (done.stdout.splitlines()[1].split()[:2], "acme/0: drained" in done.stderr) == (["1", "A1:1"], True)
        other = anyaccel("queue", "--machine", "sim:Acme-Whole:1")
        assert (other.stdout, other.stderr) == ("No request waits.\n", "")
        document = json.loads(anyaccel("queue", "--machine", "sim:Acme-Whole:1", "--json").stdout)
        assert (document["tickets"], document["withheld"]) == ([], [])


@pytest.mark.parametrize("columns", [80, 120])
def test_no_note_is_cut_off_and_a_repeated_one_is_shown_once(columns, acme):
    notes = [
        "evaluation of the second run, at the latest",
        "an experiment of the group next door",
    ]
    with aa.acquire("A1:0.5", note=notes[0]), aa.acquire("A1:0.5", note=notes[1]):
        reason = "the fan is replaced on Monday"
        block = drain("acme/1", reason)
        (heading, *lines) = [line for line in shown("status", columns=columns) if not line.startswith("anyaccel: ")]
        told = " ".join(" ".join(line[heading.index("NOTE") :].split()) for line in lines[:-1])
        assert all(note in told for note in (*notes, reason)), lines
        Ledger.open().change_blocks(lambda blocks: [each for each in blocks if each.id != block.id])
    with aa.acquire("A1:2", note=notes[0]):
        text = "\n".join(shown("status", columns=columns))
        assert text.count("evaluation") == 2
        assert text.count("latest") == 1


def test_release_needs_no_id_where_there_is_one_lease(anyaccel):
    done = anyaccel("release")
    assert (done.returncode, "you have no lease" in done.stderr) == (2, True)
    first = anyaccel("hold", "A1:1").stdout.strip()
    assert anyaccel("release").returncode == 0
    assert Ledger.open().leases() == ()
    first, second = (anyaccel("hold", "A1:1").stdout.strip() for _ in range(2))
    done = anyaccel("release")
    assert (done.returncode, done.stderr.count(first), done.stderr.count(second)) == (2, 1, 1)
    assert "you have 2 leases: " in done.stderr
    assert anyaccel("release", first, second).returncode == 0


def test_cancel_needs_no_id_where_there_is_one_thing_to_cancel(anyaccel, waiting):
    done = anyaccel("cancel")
    assert (done.returncode, done.stderr) == (0, "anyaccel: nothing to cancel\n")
    lease = anyaccel("hold", "A1:2").stdout.strip()
    waiting("A1:1")
    (ticket,) = Ledger.open().tickets()
    done = anyaccel("cancel")
    assert done.returncode == 2
    assert f"you have 2 to cancel: {ticket.id}, {lease}" in done.stderr
    assert anyaccel("cancel", ticket.id).returncode == 0
    assert anyaccel("cancel").returncode == 0
    assert Ledger.open().leases() == ()


def test_the_lines_of_hold_can_be_copied_into_a_shell(anyaccel):
    done = anyaccel("hold", "A1:1")
    first, *lines = done.stderr.splitlines()
    lease = done.stdout.strip()
    assert first == "anyaccel: acme/0 held; set in your shell, and release in the end:"
    assert lines[-1] == f"anyaccel release {lease}"
    Path("copied").write_text("\n".join([*lines[:-1], "printenv ACME_VISIBLE"]))
    printed = subprocess.run(["sh", "copied"], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == Ledger.open().leases()[0].device.rpartition("/")[2].rpartition("|")[2]
    assert anyaccel(*lines[-1].split()[1:]).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "close"),
    [
        pytest.param(("export", "slrum"), "slurm", marks=pytest.mark.needs("export")),
        (("completion", "zhs"), "zsh"),
        (("env", "A1:1", "--mask", "indx"), "index"),
    ],
)
def test_a_wrong_choice_is_told_the_nearest(arguments, close, anyaccel):
    done = anyaccel(*arguments)
    assert done.returncode == 2
    assert f"; did you mean {close}?" in done.stderr


def test_messages_are_broken_between_words_and_name_devices_as_ranges(anyaccel):
    status, data = run_on_terminal([*ANYACCEL, "run", "20GiB", "--", "true"])
    told = assert_plain(data).splitlines()
    assert (status, max(map(len, told)) <= 80, len(told) > 1) == (2, True, True), told
    assert " ".join(line.strip() for line in told).endswith("(got '20GiB'); did you mean GPU:20GiB?")
    lease = anyaccel("hold", "A1:2")
    assert lease.stderr.startswith("anyaccel: acme/0-1 held;")
    assert anyaccel("release").returncode == 0
