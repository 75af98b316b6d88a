"""A time limit is told wherever something is ended by it, and programs may save what they have before that."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.errors import TaskTimeoutError, UsageError
from anyaccel.launcher.time_limit import EarlySignal, TimeLimit
from anyaccel.ledger import Ledger
from anyaccel_jobs import jobs
from terminals import assert_plain, run_on_terminal
from waiting import PATIENCE, until

MACHINE = "sim:A1:4"
COMMAND = (sys.executable, "-m", "anyaccel")
SAVES = """
import signal, subprocess, sys
child = subprocess.Popen(["sleep", "1000"])  # it does not catch SIGUSR1, by which it would end
def save(*_):
    open("checkpoint", "a").write("saved\\n")
def end(*_):
    open("checkpoint", "a").write(f"child {child.wait()}\\n")
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
signal.signal(signal.SIGTERM, end)
while True:
    signal.pause()
"""
"""Writes a checkpoint at SIGUSR1, and how its child has ended at SIGTERM, which the child gets, too."""
SAVED = "saved\nchild -15\n"
LENGTHS = (2, 10, 50)
"""Seconds of a time limit, until a program has come to its handlers by then."""

pytestmark = pytest.mark.usefixtures("acme")


@pytest.fixture(autouse=True)
def simulated(monkeypatch, tmp_path):
    monkeypatch.setenv("ANYACCEL_MACHINE", MACHINE)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(anyaccel):
    """Run the command line."""

    def run(*arguments, status=0, **options):
        done = anyaccel(*arguments, **options)
        assert "Traceback" not in done.stdout + done.stderr
        assert done.returncode == status, done.stderr
        return done

    yield run
    for job in jobs.jobs():
        jobs.cancel(job, grace=0.1)


def entries(count):
    """Wait until the journal has so many lines, and read them."""
    file = Path(os.environ["XDG_STATE_HOME"]) / "anyaccel" / "journal.jsonl"
    until(lambda: file.exists() and len(file.read_text().splitlines()) >= count, f"{count} lines in the journal")
    return [json.loads(line) for line in file.read_text().splitlines()]


def saved_in_time(attempt):
    """Try with longer and longer limits until a program has saved what it had; what the last attempt returned."""
    for seconds in LENGTHS:
        Path("checkpoint").unlink(missing_ok=True)
        found = attempt(f"{seconds}s", seconds)
        until(lambda: not Ledger.open().leases(), "the end of all that was started")
        if Path("checkpoint").exists() and Path("checkpoint").read_text() == SAVED:
            break
    assert Path("checkpoint").read_text() == SAVED
    return seconds, found


def test_a_terminal_reads_that_the_limit_ended_the_command():
    """The line comes before the words of the shell, whose next line would else stand in front of it."""
    line = f"{' '.join(COMMAND)} run A1:1 --time 1s -- sleep 1000; echo status $?"
    _, data = run_on_terminal(["bash", "-c", line], seconds=PATIENCE)
    said = assert_plain(data).splitlines()
    assert said[0] == "anyaccel: time limit of 1s reached: ended"
    assert said[-1] == "status 143"
    assert [(line["exit"], line["timeouts"]) for line in entries(1)] == [(None, 1)]


def test_a_command_that_ends_in_time_reads_nothing(run):
    assert run("run", "A1:1", "--time", "1h", "--signal", "USR1@1m", "--grace", "5s", "--", "true").stderr == ""
    assert [line["timeouts"] for line in entries(1)] == [0]


def test_a_terminal_that_takes_no_more_does_not_keep_a_command_from_its_end():
    """The pipe that is its standard error is full, and the reader does not read."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write, True)
    command = [*COMMAND, "run", "A1:1", "--time", "1s", "--", "sleep", "1000"]
    assert subprocess.run(command, stderr=write, timeout=PATIENCE, check=False).returncode == -signal.SIGTERM
    assert [line["timeouts"] for line in entries(1)] == [1]
    os.close(read)
    os.close(write)


def test_a_job_says_that_its_limit_ended_it(run):
    """In its state, in the last line of its log, to who waits for it, in the journal and in reports."""
    script = "printf unfinished; trap 'exit 0' TERM; sleep 1000 & wait"
    begun = run("run", "--detach", "A1:1", "--time", "2", "--note", "n", "--", "sh", "-c", script)
    number = begun.stdout.strip()
    assert f"job {number} runs with acme/0, time limit 2s; see" in begun.stderr
    done = run("wait", number, "--json", status=124)
    (found,) = json.loads(done.stdout)["jobs"]
    assert (found["state"], found["time_limit_seconds"]) == ("timeout", 2.0)
    assert f"job {number} reached its time limit of 2s" in run("wait", number, status=124).stderr
    assert "time limit     2s\n" in run("jobs", number).stdout
    assert run("jobs").stdout.splitlines()[1].split()[:2] == [number, "timeout"]
    assert json.loads(run("jobs", "--json").stdout)["jobs"] == [found]
    assert json.loads(run("logs", number, "--json").stdout)["state"] == "timeout"
    assert run("logs", number).stdout.splitlines()[-1] == "anyaccel: time limit of 2s reached: ended"
    assert f"job {number} was ended by its time limit already" in run("cancel", number).stderr
    (line,) = entries(1)
    assert (line["timeouts"], line["exit"]) == (1, found["exit_status"])
    (row,) = json.loads(run("report", "--json").stdout)["rows"]
    assert (row["leases"], row["timeouts"]) == (1, 1)
    header, values = (line.split(",") for line in run("report", "--csv").stdout.splitlines())
    assert dict(zip(header, values, strict=True))["timeouts"] == "1"
    header, values = (line.split() for line in run("report").stdout.splitlines()[1:3])
    assert (header[-1], values[-1]) == ("TIMEOUTS", "1")


def test_what_a_job_leaves_behind_is_ended_in_time(run):
    """By a command that has ended, and where the supervisor is killed that would have ended the command."""
    asked = ("A1:1", "--time", "3s", "--detach", "--")
    done = run("run", *asked, "sh", "-c", "setsid sleep 1000 &").stdout.strip()
    lost = run("run", *asked, "sh", "-c", "touch begun; exec setsid sleep 1000").stdout.strip()
    until(Path("begun").exists, "the command")  # else the supervisor may be killed before there is anything to end
    with contextlib.suppress(ProcessLookupError):  # the time is over already
        os.kill(jobs.find(lost).pid, signal.SIGKILL)
    for number in (done, lost):
        jobs.wait(jobs.find(number))
    until(lambda: not Ledger.open().leases(), "the end of what was left")
    assert [line["timeouts"] for line in entries(2)] == [1, 1]


def test_a_job_that_was_cancelled_or_ended_by_itself_was_not_ended_by_its_limit(run):
    quick = run("run", "--detach", "A1:1", "--time", "1h", "--", "false").stdout.strip()
    slow = run("run", "--detach", "A1:1", "--time", "1h", "--", "sleep", "1000").stdout.strip()
    run("wait", quick, status=1)
    run("cancel", slow)
    assert [jobs.find(number).state for number in (quick, slow)] == ["failed", "cancelled"]
    assert "time limit" not in run("logs", quick).stdout + run("logs", slow).stdout
    assert {line["timeouts"] for line in entries(2)} == {0}


def test_ranks_end_with_the_status_of_a_time_limit(anyaccel):
    for seconds in LENGTHS:  # until the ranks have been started by then
        done = anyaccel("run", "--ranks", "A1:2", "--time", f"{seconds}s", "--", "sleep", "1000")
        if done.returncode == 124:
            break
    assert (done.returncode, done.stderr) == (124, f"anyaccel: time limit of {seconds}s reached: ended\n")


def test_a_sweep_says_which_commands_their_limit_ended(run):
    """One that ends with 0 then has not ended well, and is run again by --resume."""
    command = ("--", "sh", "-c", "test {end} = none && trap 'exit 0' TERM; test {end} = soon || { sleep 1000 & wait; }")
    for seconds in LENGTHS:
        out = ("--out", f"out-{seconds}", "--time", f"{seconds}s", "--jobs", "1", "--json")
        done = run("sweep", "A1:1", "--each", "end=soon,none", *out, *command, status=1)
        found = json.loads(done.stdout)
        if (found["done"], found["failed"], found["failures"][0]["exit_status"]) == (1, 1, 124):
            break
    (failure,) = found["failures"]
    assert (failure["number"], failure["timeout"], failure["exit_status"]) == (2, True, 124)
    assert "2 was ended by its time limit" in done.stderr
    assert Path(failure["log"]).read_text() == f"anyaccel: time limit of {seconds}s reached: ended\n"
    assert Path(f"out-{seconds}/end=soon.log").read_text() == ""
    assert sum(line["timeouts"] for line in entries(2)) >= 1


def test_a_call_from_python_says_that_its_limit_ended_the_command(capfd):
    done = aa.run("A1:1", ["sh", "-c", "trap 'exit 0' TERM; sleep 1000 & wait"], time=1.5)
    assert done.timed_out
    assert capfd.readouterr().err == "anyaccel: time limit of 1.5s reached: ended\n"
    assert not aa.run("A1:1", ["true"], time=60).timed_out
    assert capfd.readouterr().err == ""
    assert [line["timeouts"] for line in entries(2)] == [1, 0]


def test_a_program_saves_what_it_has_at_a_signal_before_the_limit(run):
    """What does not catch the signal, as the program's child and the shell in front of it, is not ended by it."""
    shell = ("sh", "-c", 'status=0; "$@" || status=$?; exit $status', "sh", sys.executable, "-c", SAVES)

    def attempt(text, _):
        return run("run", "A1:1", "--time", text, "--signal", "USR1@1s", "--", *shell, status=-15)

    seconds, done = saved_in_time(attempt)
    assert done.stderr.splitlines() == [
        f"anyaccel: 1s before the time limit of {seconds}s: SIGUSR1 sent to 1 process",
        f"anyaccel: time limit of {seconds}s reached: ended",
    ]


def test_a_job_saves_what_it_has(run):
    def attempt(text, _):
        asked = ("--time", text, "--signal", "SIGUSR1@1s", "--ranks")  # the ranks' parent passes nothing on
        number = run("run", "--detach", "A1:1", *asked, "--", sys.executable, "-c", SAVES).stdout.strip()
        run("wait", number, status=124)
        return run("logs", number).stdout

    seconds, log = saved_in_time(attempt)
    assert log.splitlines() == [
        f"anyaccel: 1s before the time limit of {seconds}s: SIGUSR1 sent to 1 process",
        f"anyaccel: time limit of {seconds}s reached: ended",
    ]


def test_a_command_of_a_sweep_saves_what_it_has(run):
    def attempt(text, seconds):
        out = ("--out", str(seconds), "--time", text, "--signal", "usr1@1s", "--each", "x=1")
        run("sweep", "A1:1", *out, "--", sys.executable, "-c", SAVES, "{x}", status=1)
        return Path(f"{seconds}/x=1.log").read_text()

    seconds, log = saved_in_time(attempt)
    assert log.splitlines() == [
        f"anyaccel: 1s before the time limit of {seconds}s: SIGUSR1 sent to 1 process",
        f"anyaccel: time limit of {seconds}s reached: ended",
    ]


def test_a_command_of_a_call_saves_what_it_has(capfd):
    def attempt(_, seconds):
        return aa.run("A1:1", [sys.executable, "-c", SAVES], time=seconds, signal=f"{int(signal.SIGUSR1)}@1s")

    seconds, done = saved_in_time(attempt)
    assert (done.returncode, done.timed_out) == (0, True)
    assert capfd.readouterr().err.splitlines()[-2:] == [
        f"anyaccel: 1s before the time limit of {seconds}s: SIGUSR1 sent to 1 process",
        f"anyaccel: time limit of {seconds}s reached: ended",
    ]


def test_a_call_of_a_pool_saves_what_it_has():
    checkpoint = str(Path("checkpoint").absolute())

    def work():
        signal.signal(signal.SIGUSR1, lambda *_: Path(checkpoint).write_text(SAVED))
        while True:
            signal.pause()

    def attempt(_, seconds):
        with aa.Pool("A1:1", timeout=seconds, signal="USR1@1s") as pool, pytest.raises(TaskTimeoutError):
            pool.submit(work).result()

    saved_in_time(attempt)
    assert sum(line["timeouts"] for line in entries(1)) >= 1


def test_a_signal_that_no_process_catches_ends_none(run):
    done = run("run", "A1:1", "--time", "2s", "--signal", "USR1@1s", "--", "sleep", "1000", status=-15)
    assert done.stderr.splitlines() == [
        "anyaccel: 1s before the time limit of 2s: SIGUSR1 sent to no process, since none catches it",
        "anyaccel: time limit of 2s reached: ended",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--time", "1m", "--signal", "USR1"), "must be a signal and how long before the time limit it is sent"),
        (("--time", "1m", "--signal", "USR1@soon"), "such as USR1@60s (got 'USR1@soon')"),
        (("--time", "1m", "--signal", "NONE@1s"), "such as USR1 in USR1@60s (got 'NONE@1s')"),
        (("--time", "1m", "--signal", "0@1s"), "such as USR1@60s (got '0@1s')"),
        (("--time", "1m", "--signal", "KILL@1s"), "must be a signal that a program can catch"),
        (("--signal", "USR1@60s"), "signal USR1@1m is sent before a time limit, and there is none"),
        (("--signal", "USR1@60s"), "give a time limit as well: --time"),
        (("--time", "10", "--signal", "USR1@60s"), "signal USR1@1m needs a time limit over 1m (got 10s)"),
    ],
)
def test_a_signal_that_makes_no_sense_is_refused(arguments, words, run):
    for command in (("run", "A1:1"), ("sweep", "A1:1", "--each", "x=1")):
        assert words in run(*command, *arguments, "--", "true", status=2, here=True).stderr


def test_arguments_of_a_call_that_make_no_sense_are_refused():
    for options in ({"signal": "USR1@1s"}, {"time": 1, "signal": "USR1@1s"}, {"time": 1, "signal": 10}, {"grace": -1}):
        with pytest.raises(UsageError):
            aa.run("A1:1", ["true"], **options)
    with pytest.raises(UsageError, match="needs a time limit over"):
        aa.Pool("A1:1", timeout=1, signal="USR1@1s")


@pytest.mark.full  # a shorter grace that was given is kept in the next test
def test_what_is_asked_to_end_has_the_grace_that_was_given(run):
    """More than the 10 seconds that hold where no grace is given: each ends by itself 12 seconds after SIGTERM."""
    slow = ("sh", "-c", "trap 'sleep 12; exit 7' TERM; echo; while :; do sleep 0.1; done")
    for seconds in LENGTHS:
        asked = ("A1:1", "--time", f"{seconds}s", "--grace", "10m")
        with subprocess.Popen([*COMMAND, "run", *asked, "--", *slow], stdout=subprocess.DEVNULL) as here:
            timed = run("run", "--detach", *asked, "--", *slow).stdout.strip()
            cancelled = run("run", "--detach", "A1:1", "--grace", "10m", "--", *slow).stdout.strip()
            until(Path(jobs.find(cancelled).log).read_text, "the job")
            with subprocess.Popen([*COMMAND, "cancel", cancelled]) as cancel:
                called = aa.run("A1:1", slow, time=seconds, grace=600, stdout=subprocess.DEVNULL)
                assert cancel.wait(PATIENCE) == 0
            status = here.wait(PATIENCE)
        run("wait", timed, status=124)
        found = [(job.state, job.status) for job in (jobs.find(timed), jobs.find(cancelled))]
        assert called.timed_out
        if (status, called.returncode, found[0]) == (7, 7, ("timeout", 7)):  # each had come to its trap by then
            break
    assert (status, called.returncode, found) == (7, 7, [("timeout", 7), ("cancelled", 7)])


def test_what_does_not_end_is_killed_after_the_grace_that_was_given(run):
    stubborn = ("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")
    for seconds in LENGTHS:
        asked = ("A1:1", "--time", f"{seconds}s", "--grace", "0.2s")
        number = run("run", "--detach", *asked, "--", *stubborn).stdout.strip()
        called = aa.run("A1:1", stubborn, time=seconds, grace=0.2)
        run("wait", number, status=124)
        if (called.returncode, jobs.find(number).status) == (-signal.SIGKILL, 137):
            break
    assert (called.returncode, called.timed_out) == (-signal.SIGKILL, True)
    assert (jobs.find(number).state, jobs.find(number).status) == ("timeout", 137)


CATCHES = """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"caught\\n"))  # print() may not be called within itself
print(flush=True)
while True:
    signal.pause()
"""
"""A process without children: one that a shell has just forked catches the signals that the shell catches."""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start a process of another user")
def test_a_process_of_another_user_gets_no_signal_before_the_limit():
    """Marks can be copied, and the process of a user who copies them may catch any signal."""
    catches = ["sh", "-c", "trap 'echo caught' USR1; echo; while :; do sleep 0.1; done"]
    with aa.acquire("A1:1") as hold, contextlib.ExitStack() as ends:
        own = hold.popen([sys.executable, "-c", CATCHES], stdout=subprocess.PIPE, text=True)
        other = hold.popen(catches, stdout=subprocess.PIPE, text=True, user=65534, cwd="/")
        for process in (own, other):
            ends.enter_context(process)
            ends.callback(process.kill)  # before it is awaited
        assert (own.stdout.readline(), other.stdout.readline()) == ("\n", "\n")
        mark = hold.lease.mark
        said = TimeLimit.begin(60, early=EarlySignal.parse("USR1@1s")).send_early(mark)
        assert said == "1s before the time limit of 1m: SIGUSR1 sent to 1 process"
        assert own.stdout.readline() == "caught\n"
