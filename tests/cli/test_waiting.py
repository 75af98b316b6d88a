"""What a waiting command writes, and shells with devices."""

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.ledger import Ledger
from anyaccel.model import format_share
from anyaccel.shell import exports
from terminals import assert_plain, read_to_end, run_on_terminal
from waiting import PATIENCE, until

RUN = [sys.executable, "-m", "anyaccel", "run", "A1:1", "--", "true"]


@pytest.fixture(autouse=True)
def simulated(acme, monkeypatch, tmp_path):
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def on_terminal():
    """Start commands on pseudo-terminals."""
    started = []

    def start(command):
        pid, terminal = pty.fork()
        if not pid:
            os.execv(command[0], command)
        started.append((pid, terminal))
        return pid, terminal

    yield start
    for pid, terminal in started:
        os.close(terminal)
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def test_a_log_gets_the_first_line_and_the_end_and_each_device_once():
    shares = [aa.acquire("A1:0.5", note="x" * 100) for _ in range(4)]
    waiting = [subprocess.Popen(RUN, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [process.stderr.readline() for process in waiting]
    for share in shares:
        share.release()
    assert any("waiting (1st): you have 2\n" in line for line in lines), "shares of one device are added"
    for process, line in zip(waiting, lines, strict=True):
        assert re.match(r"anyaccel: waiting \((1st|2nd)\): (you have 2|1 earlier request is ahead)", line)
        rest_of_it = process.communicate(timeout=PATIENCE)[1]
        assert re.fullmatch(r"anyaccel: got acme/[01] after \w+\n", rest_of_it)


def test_a_terminal_gets_one_line_in_place_that_fits(on_terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "32")
    with aa.acquire("A1:2", note="x" * 200):
        _, terminal = on_terminal(RUN)
        until(Ledger.open().tickets, "the ticket")
        shown = os.read(terminal, 1 << 16)
    data = shown + read_to_end(terminal)
    states = data.decode().split("\r")
    assert states[1].startswith("anyaccel: waiting (1st): you"), states
    assert states[1].endswith("\u2026")
    assert max(map(len, states[:3])) < 32
    assert states[2] == " " * len(states[1])
    assert re.match(r"anyaccel: got acme/[01] after", states[3])  # it may have looked at both while they went back
    assert "\n" not in "".join(states[:3])


def test_run_without_a_command_starts_the_shell_of_a_person(on_terminal, monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/sh")
    pid, terminal = on_terminal([sys.executable, "-m", "anyaccel", "run", "A1:1"])
    until(Ledger.open().leases, "the lease")
    os.write(terminal, b'echo "mask=$ACME_VISIBLE"; exit 7\n')
    text = assert_plain(read_to_end(terminal))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert text.count("/bin/sh has acme/0, until the shell ends") == 1
    assert "mask=acme-" in text
    assert Ledger.open().leases() == ()


@pytest.mark.parametrize("arguments", [["A1:1"], ["A1:1", "--"]])
def test_a_script_is_given_no_shell(arguments, anyaccel):
    done = anyaccel("run", *arguments, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "a command to run must follow '--'" in done.stderr


def test_a_command_without_its_dashes_is_told_where_it_stands():
    status, data = run_on_terminal([*RUN[:4], "A1:1", "python", "train.py"])
    assert status == 2
    assert "unknown name 'python'" in assert_plain(data)
    assert "the command to run stands after '--', as in: anyaccel run GPU:1 -- python train.py" in " ".join(
        assert_plain(data).split()
    )
    status, data = run_on_terminal([*RUN[:4], "A1:2", "sleep", "3"])
    shown = " ".join(assert_plain(data).split())
    assert (status, "request '3'" in shown, "the command to run stands after '--'" in shown) == (2, True, True)
    _, data = run_on_terminal([*RUN[:4], "3"])
    assert "'--'" not in assert_plain(data), "a term alone is a slip in the request"
    _, data = run_on_terminal([*RUN[:4], "A1:1", "train.py", "--lr", "3"])
    assert "unrecognized arguments: --lr" in assert_plain(data)  # up to Python 3.13 with the value
    assert "the command to run, with its own options, stands after '--'" in " ".join(assert_plain(data).split())


def test_a_line_in_place_takes_what_was_typed_behind_it_away(on_terminal):
    with aa.acquire("A1:2", note="all"):
        pid, terminal = on_terminal([*RUN[:4], "A1:1", "--wait", "1s", "--", "true"])
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
        data = read_to_end(terminal)
    assert os.waitpid(pid, 0)[1]
    lines = data.decode().split("\r")
    assert len(max(re.findall(" {20,}", data.decode()), key=len)) == 159, lines


def test_the_queue_without_notes_has_one_line_for_each_on_80_columns(anyaccel):
    with aa.acquire("A1:2", note="all"):
        waiting = subprocess.Popen([*RUN[:4], "A1:1", "--", "true"], stderr=subprocess.PIPE, text=True)
        waiting.stderr.readline()
        status, data = run_on_terminal([sys.executable, "-m", "anyaccel", "queue"])
        assert len(assert_plain(data).splitlines()) == 2
        assert "NOTE" not in assert_plain(data)
        assert "  unknown  " in assert_plain(data)  # the lease has no time limit
        waiting.kill()
        waiting.communicate()
    assert status == 0


def test_why_says_that_a_start_is_unknown_and_where_jobs_are_explained(anyaccel):
    lease = anyaccel("hold", "A1:2").stdout.strip()
    unknown = "Its start is unknown: not all leases, requests and drains in the way have an end."
    assert anyaccel("why", "A1:1").stdout.splitlines()[-1] == unknown
    for job in ("4", lease):
        done = anyaccel("why", job)
        assert done.returncode == 2
        assert "'anyaccel jobs ID' says why a job waits" in done.stderr
    assert anyaccel("release").returncode == 0
    assert anyaccel("hold", "A1:2", "--for", "1h").returncode == 0
    assert "Its start is unknown" not in anyaccel("why", "A1:1").stdout
    assert anyaccel("release").returncode == 0
    seen = subprocess.run(
        [*RUN[:4], "A1:1", "--", *RUN[:3], "status", "--no-stats"], capture_output=True, text=True, check=True
    )
    assert re.search(r"inside lease [0-9a-f]{12}: all other devices are hidden", seen.stderr)


def test_why_names_only_what_the_queue_lets_pass_and_the_time_limit_with_which_it_does(anyaccel, monkeypatch):
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:4")
    with aa.acquire("A1:2", time="2h"), subprocess.Popen([*RUN[:4], "A1:4", "--", "true"], stderr=subprocess.DEVNULL):
        (ahead,) = until(Ledger.open().tickets, "the ticket")
        shorter = r"fits now with --time 1h[45]\dm\b"
        why = anyaccel("why", "A1:1").stdout
        assert re.match(r"A1:1 does not fit now: 1 earlier request is ahead\.\n" + shorter, why)
        assert anyaccel("run", "A1:1", "--no-wait", "--time", "100m", "--", "true").returncode == 0
        refused = anyaccel("run", "A1:1", "--no-wait", "--", "true")
        assert (refused.returncode, bool(re.search(shorter, refused.stderr))) == (4, True)
        assert "fits now" not in anyaccel("why", "A1:4").stdout, "A1:2 would fit, but for the earlier request"
        assert "fits now: A1:2\n" in anyaccel("why", "A1:4", "--time", "1h").stdout
        Ledger.open().cancel(ahead.id)


def test_a_shell_with_the_masks_of_an_ended_lease_is_told_which_variable_hides_devices(anyaccel, monkeypatch):
    held = anyaccel("hold", "A1:1", "--export").stdout
    assert anyaccel("release").returncode == 0
    monkeypatch.setenv("ACME_VISIBLE", re.search(r"ACME_VISIBLE='(.*)'", held).group(1))
    hint = "in a shell whose lease has ended, 'unset ACME_VISIBLE' shows them again"
    for command in (("why", "A1:2"), ("run", "A1:2", "--", "true")):
        done = anyaccel(*command)
        assert done.returncode == 3
        assert "hidden by the environment: acme/1." in done.stdout + done.stderr
        assert hint in done.stdout + done.stderr
    assert "anyaccel: acme/1 hidden by ACME_VISIBLE of this shell\n" in anyaccel("status").stderr
    monkeypatch.delenv("ACME_VISIBLE")
    inside = anyaccel("run", "A1:1", "--", *RUN[:4], "A1:2", "--", "true")
    assert ("hidden" in inside.stderr, "unset" in inside.stderr) == (True, False), "there, the mask is right"


def test_a_share_by_memory_is_shown_as_the_memory_that_was_asked_for(anyaccel):
    held = anyaccel("hold", "A1:5GiB", "A1:1", "--note", "half")  # of 16 GiB
    assert held.stderr.startswith("anyaccel: acme/0, 5GiB of acme/1 held;") or held.stderr.startswith(
        "anyaccel: acme/1, 5GiB of acme/0 held;"
    )
    shown = anyaccel("status", "--no-stats", "--columns", "share,state,free").stdout
    assert {" ".join(line.split()) for line in shown.splitlines()[1:3]} == {"1 held 0", "5GiB 11.0GiB free 11.0GiB"}
    assert shown.splitlines()[-1] == "2 devices, 0.68 free"
    holders = [device["holders"][0]["share"] for device in json.loads(anyaccel("status", "--json").stdout)["devices"]]
    assert sorted(holders) == [0.3125, 1]
    assert re.search(r"; you have acme/\d, 5GiB of acme/\d \(half, lease", anyaccel("why", "A1:2").stdout)
    waiting = subprocess.Popen([*RUN[:4], "A1:2", "--", "true"], stderr=subprocess.PIPE, text=True)
    assert waiting.stderr.readline() == "anyaccel: waiting (1st): you have 1 and 5GiB\n"
    assert "you have 1 and 5GiB" in anyaccel("queue").stdout
    waiting.kill()
    waiting.communicate()
    done = anyaccel("run", "-v", "A1:5GiB", "--", "true")
    assert re.search(r"acme/\d: a share of 5GiB, by agreement", done.stderr)
    assert anyaccel("release", held.stdout.strip()).returncode == 0


def test_a_request_that_is_not_of_the_held_part_is_not_shown_for_it():
    assert format_share(3125, "A1:5GiB,mem=1GiB A1:2", 16 << 30) == "5GiB"
    assert format_share(3125, "A1:1GiB", 16 << 30) == "0.3125"
    assert format_share(3125, "A1:5GiB A1:1GiB") == "0.3125"
    assert format_share(3125, "free: everything") == "0.3125"
    assert format_share(10_000, "A1:16GiB") == "1"


def test_a_time_limit_is_said_as_it_was_understood(anyaccel):
    assert anyaccel("run", "A1:1", "--time", "20", "--", "true").stderr == "anyaccel: time limit 20s\n"
    assert anyaccel("run", "A1:1", "--time", "20s", "--", "true").stderr == ""
    held = anyaccel("hold", "A1:2", "--for", "90m")
    assert held.stderr.startswith("anyaccel: acme/0-1 held for 1h30m; set in your shell")
    waiting = subprocess.Popen(
        [*RUN[:4], "A1:1", "--time", "20m", "--", "true"], stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert waiting.stderr.readline().startswith("anyaccel: waiting (1st): you have 2 until ")
    assert anyaccel("release").returncode == 0
    assert re.fullmatch(r"anyaccel: got acme/\d after \w+, time limit 20m\n", waiting.communicate()[1])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "sh"])
def test_a_shell_evaluates_what_hold_exports(shell, anyaccel):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}, which is not installed here (try: apt-get install {shell})")
    script = f'eval "$({sys.executable} -m anyaccel hold A1:1 --export)"; printenv ACME_VISIBLE; printenv ACME_ORDER'
    environ = {**os.environ, "ACME_ORDER": "to be unset", "HOME": str(Path.cwd())}
    done = subprocess.run(
        [shell, "-c", script], env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    (lease,) = Ledger.open().leases()
    assert done.stdout == f"{lease.device.rpartition('|')[2].rpartition('/')[2]}\n"
    assert f"acme/0 held by lease {lease.id}; release with: anyaccel release {lease.id}" in done.stderr
    assert anyaccel("release", lease.id).returncode == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "sh"])
def test_every_text_survives_every_shell(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}, which is not installed here (try: apt-get install {shell})")
    texts = ["a'b\\c\\'d$HOME `x` \"q\" !x {y} * ~", "", "\\", "'\\''", "\\n\\\\", "caf\xe9 \u65e5"]
    variables = {f"V{number}": text for number, text in enumerate(texts)}
    strict = "" if shell == "fish" else "set -eu; "
    script = f'{strict}eval "$TEXT"; printenv GONE NEVER || env -0'
    environ = {
        "TEXT": exports(variables, ["GONE", "NEVER"]),
        "GONE": "1",
        "PATH": os.environ["PATH"],
        "HOME": str(Path.cwd()),
        "LANG": "C.UTF-8",
    }
    done = subprocess.run([shell, "-c", script], env=environ, capture_output=True, text=True, check=False)
    found = dict(entry.split("=", 1) for entry in done.stdout.split("\0") if "=" in entry)
    assert {name: found.get(name) for name in variables} == variables, done.stderr
    assert done.stderr == ""
