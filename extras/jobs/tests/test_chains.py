"""Jobs after other jobs and times, notifications, jobs submitted again, and what is listed."""

import json
import os
import re
import shlex
import signal
import sys
import time
from datetime import datetime
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.ledger import Ledger
from anyaccel.model import replace
from anyaccel_jobs import jobs as jobs_
from anyaccel_jobs.moments import moment, read_moment
from terminals import assert_plain, run_on_terminal
from waiting import until

TELL = """
echo "$ANYACCEL_JOB $ANYACCEL_JOB_STATE $ANYACCEL_JOB_STATUS" >> told; test -s "$ANYACCEL_JOB_LOG" && echo log >> told
"""


@pytest.fixture(autouse=True)
def simulated(acme, monkeypatch, tmp_path):
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    yield
    for job in jobs_.jobs():
        if job.here:
            jobs_.cancel(job, grace=0.1)


@pytest.fixture
def run(anyaccel):
    """Run the command line; its standard output."""

    def run(*arguments, status=0, **options):
        done = anyaccel(*arguments, **options)
        assert "Traceback" not in done.stdout + done.stderr
        assert done.returncode == status, done.stderr
        return done.stdout.strip()

    return run


def submit(run, script, *options):
    return run("run", "--detach", "A1:1", *options, "--", "sh", "-c", script)


def lines(path="told"):
    return Path(path).read_text().split("\n")[:-1] if Path(path).exists() else []


def test_a_chain_of_jobs_runs_in_order_and_tells_of_each_end(run):
    first = submit(run, "while ! test -e go; do sleep 0.05; done; echo first >> order", "--notify", TELL)
    second = submit(run, "echo second | tee -a order; exit 3", "--after-ok", first, "--notify", TELL)
    third = submit(run, "echo third >> order", "--after", second)
    never = submit(run, "echo never >> order", "--after-ok", second, "--notify", TELL)
    assert [jobs_.find(each).state for each in (first, second, third, never)] == ["running", *["waiting"] * 3]
    assert Ledger.open().tickets() == (), "who waits for another job does not stand in line for devices"
    Path("go").touch()
    run("wait", second, status=3)
    run("wait", third)
    run("wait", never, status=1)
    assert lines("order") == ["first", "second", "third"]
    assert jobs_.find(never).state == "cancelled"
    assert f"job {second} did not succeed (failed), and this job needs its success" in run("logs", never)
    assert f"reason         job {second} did not succeed (failed)" in run("jobs", never)
    assert "exit status" not in run("jobs", never)
    (shown,) = [line.split() for line in run("jobs").splitlines() if line.split()[:2] == [never, "cancelled"]]
    assert shown[3:8] == ["-"] * 5, "no devices, start, duration, exit status or reason to wait"
    until(lambda: len(lines()) == 5, "three notifications")
    assert sorted(lines()) == sorted([f"{first} done 0", f"{second} failed 3", f"{never} cancelled 1", "log", "log"])
    assert Ledger.open().leases() == ()


def test_a_job_that_needs_the_success_of_a_job_that_failed_is_refused_at_once(run, anyaccel):
    failed = submit(run, "exit 3")
    run("wait", failed, status=3)
    for command in (("run", "A1:1"), ("sweep", "A1:1", "--each", "n=1")):
        done = anyaccel(*command, "--detach", "--after-ok", failed, "--", "true")
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert f"job {failed} did not succeed (failed), and this job needs its success" in " ".join(done.stderr.split())
    begun = anyaccel("run", "A1:1", "--detach", "--after", failed, "--begin", "2030-01-01", "--", "true")
    assert f"job {int(failed) + 1} waits until 2030-01-01; see" in " ".join(begun.stderr.split())
    run("cancel", begun.stdout.strip())
    run("wait", submit(run, "true", "--after", failed))
    elsewhere = jobs_.find(failed)
    jobs_.write(replace(elsewhere, host="elsewhere", state="running"))
    done = anyaccel("run", "--detach", "--after", failed, "A1:1", "--", "true")
    assert (done.returncode, f"job {failed} belongs to elsewhere" in " ".join(done.stderr.split())) == (2, True)
    assert [job.id for job in jobs_.jobs()] == [str(int(failed) + more) for more in range(3)]


def test_a_notification_has_no_devices_and_its_failure_stands_in_the_log(run):
    command = "touch begun; while ! test -e go; do sleep 0.05; done; echo said; exit 5"
    number = submit(run, "true", "--notify", command)
    until(Path("begun").exists, "the notification")
    run("wait", number)
    assert Ledger.open().leases() == ()
    Path("go").touch()
    until(lambda: "--notify failed" in run("logs", number), "its failure")
    assert run("logs", number) == "said\nanyaccel: --notify failed with exit status 5"


def test_the_end_of_a_lost_job_and_of_a_time_limit_is_told(run):
    number = submit(run, "sleep 1000", "--notify", TELL)
    os.kill(jobs_.find(number).pid, signal.SIGKILL)
    until(lambda: lines() == [f"{number} lost "], "the notification")
    run("cancel", number)  # what it has left running is ended
    limited = submit(run, "sleep 1000", "--time", "1s", "--notify", TELL)
    until(lambda: len(lines()) == 3, "the other one")
    assert lines()[1].split()[:2] == [limited, "timeout"]


def test_a_job_begins_at_its_time_and_is_cancelled_before(run):
    later = submit(run, "echo later", "--begin", "12h")
    assert jobs_.find(later).state == "waiting"
    run("cancel", later)
    assert (jobs_.find(later).state, run("logs", later)) == ("cancelled", "")
    assert "reason         cancelled by 'anyaccel cancel'" in (told := run("jobs", later))
    assert "exit status" not in told
    soon = submit(run, "true", "--begin", "1s")
    run("wait", soon)
    job = jobs_.find(soon)
    assert job.started >= job.begins
    run("wait", submit(run, "true", "--begin", "2001-01-01"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--after", "1", "A1:1", "--", "true"), "--after belongs to --detach"),
        (("run", "--notify", "true", "A1:1", "--", "true"), "--notify belongs to --detach"),
        (("sweep", "--begin", "1h", "A1:1", "--", "true"), "--begin belongs to --detach"),
        (("run", "--detach", "--after-ok", "77", "A1:1", "--", "true"), "there is no job '77'"),
        (("run", "--detach", "--begin", "soon", "A1:1", "--", "true"), "must be a time such as"),
        (("redo", "77"), "there is no job '77'"),
        (("jobs", "77"), "there is no job '77'"),
        (("jobs", "--state", "odd"), "there is no state 'odd'; there are waiting, running"),
        (("jobs", "--since", "never"), "must be a time such as"),
    ],
)
def test_bad_input_gets_one_message(arguments, words, anyaccel):
    done = anyaccel(*arguments)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert jobs_.jobs() == ()


def test_moments_are_dates_times_and_durations():
    now = time.time()
    assert time.localtime(moment(ahead=True)("2030-02-03T04:05"))[:5] == (2030, 2, 3, 4, 5)
    assert time.localtime(moment(ahead=False)("2020-02-03"))[:5] == (2020, 2, 3, 0, 0)
    for text in ("00:00", "12:00", "23:59"):
        assert now - 90_100 < moment(ahead=False)(text) <= time.time()
        assert now < moment(ahead=True)(text) < time.time() + 90_100
    assert moment(ahead=False)("2h") <= time.time() - 7200
    assert moment(ahead=True)("2h") >= now + 7200


@pytest.mark.parametrize(
    ("now", "text", "ahead", "wanted"),
    [
        ("2030-10-27T00:20Z", "02:30", True, "2030-10-27T00:30Z"),  # clocks show 02:00 to 03:00 twice
        ("2030-10-27T00:40Z", "02:30", True, "2030-10-27T01:30Z"),
        ("2030-10-27T01:20Z", "02:30", True, "2030-10-27T01:30Z"),
        ("2030-10-27T01:20Z", "2030-10-27 02:30", True, "2030-10-27T01:30Z"),
        ("2030-10-27T01:40Z", "02:30", True, "2030-10-28T01:30Z"),
        ("2030-10-27T01:20Z", "02:30", False, "2030-10-27T00:30Z"),
        ("2030-10-27T01:40Z", "02:30", False, "2030-10-27T01:30Z"),
        ("2030-03-30T22:00Z", "02:30", True, "2030-03-31T01:30Z"),  # clocks skip 02:00 to 03:00
        ("2030-03-31T01:10Z", "02:30", False, "2030-03-30T01:30Z"),
    ],
)
def test_a_time_of_the_day_is_the_next_one_where_clocks_are_put_back_or_forward(now, text, ahead, wanted, monkeypatch):
    begin, end = (datetime.fromisoformat(each).timestamp() for each in (now, wanted))
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        assert read_moment(text, begin, ahead=ahead) == end
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_job_is_submitted_again_as_it_was(run, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    first = submit(run, "pwd; echo $ACME_VISIBLE | grep -c ,", "--note", "two words", "--time", "1h")
    run("wait", first, status=1)
    monkeypatch.chdir(tmp_path)
    second = run("redo", first)
    run("wait", second, status=1)
    was, is_now = jobs_.find(first), jobs_.find(second)
    for name in ("request", "note", "command", "directory", "time_limit", "arguments"):
        assert getattr(was, name) == getattr(is_now, name), name
    assert run("logs", second) == run("logs", first) == f"{tmp_path}/there\n0"
    (tmp_path / "there").rmdir()
    run("redo", first, status=1)
    again = run("sweep", "A1:1", "--detach", "--each", "n=1..2", "--", "sh", "-c", "echo {n}")
    run("wait", again)
    assert json.loads(run("redo", "--json", again))["command"] == list(jobs_.find(again).command)


def test_an_earlier_job_or_a_time_that_is_over_is_not_waited_for_by_name(run, anyaccel):
    first = submit(run, "true")
    run("wait", first)
    with aa.acquire("A1:2"):
        done = anyaccel("run", "--detach", "A1:1", "--after-ok", first, "--", "true")
        number = done.stdout.strip()
        assert f"job {number} waits for its devices;" in done.stderr
        later = anyaccel("run", "--detach", "A1:1", "--after", number, "--begin", "2030-01-01", "--", "true")
        assert f" waits for job {number} and until 2030-01-01;" in later.stderr
        past = anyaccel("run", "--detach", "A1:1", "--begin", "2020-01-01", "--", "true")
        assert " waits for its devices;" in past.stderr
    run("wait", number)


def test_everything_about_a_job_and_the_filters(run):
    good = submit(run, "true", "--note", "fine")
    bad = submit(run, "exit 3", "--after", good, "--notify", "true")
    run("wait", bad, status=3)
    shown = dict(line.split("  ", 1) for line in run("jobs", bad).splitlines())
    shown = {name: value.strip() for name, value in shown.items()}
    job = jobs_.find(bad)
    assert shown["job"] == bad
    assert (shown["state"], shown["exit status"], shown["after"], shown["notify"]) == ("failed", "3", good, "true")
    assert (shown["log"], shown["directory"]) == (job.log, str(Path.cwd()))
    assert shlex.split(shown["submitted as"]) == ["anyaccel", *job.arguments]
    listed = json.loads(run("jobs", "--state", "failed,lost", "--json"))["jobs"]
    assert [(each["job"], each["after"], each["notify"]) for each in listed] == [(bad, [good], "true")]
    assert [each["job"] for each in json.loads(run("jobs", "--since", "1h", "--json"))["jobs"]] == [good, bad]
    assert run("jobs", "--since", "2099-01-01") == "No jobs."
    run("cancel", run("run", "--detach", "A1:12.5GiB", "--note", "a share by memory", "--", "sleep", "1000"))
    status, data = run_on_terminal([sys.executable, "-m", "anyaccel", "jobs"], columns=80)
    heading, *rows = assert_plain(data).splitlines()
    assert (status, len(rows), "COMMAND" in heading) == (0, 3, True)
    assert " A1:12.5GiB " in rows[-1]
    assert max(map(len, (heading, *rows))) <= 80


def test_foreground_runs_of_the_past_come_from_the_journal(run):
    run("run", "A1:1", "--note", "mine", "--", "sh", "-c", "exit 4", status=4)
    number = submit(run, "true")
    run("wait", number)
    until(lambda: len(json.loads(run("jobs", "--runs", "--json"))["runs"]) == 1, "the journal")
    found = json.loads(run("jobs", "--runs", "--json"))
    (entry,) = found["runs"]
    assert (entry["note"], entry["program"], entry["request"]) == ("mine", "sh", "A1:1")
    assert (entry["state"], entry["exit_status"], entry["devices"]) == ("ended", None, [entry["devices"][0]])
    assert [each["job"] for each in found["jobs"]] == [number]
    assert "runs" not in json.loads(run("jobs", "--json"))
    assert "[mine] sh" in run("jobs", "--runs")
    assert "[mine] sh" in run("jobs", "--user", "all")
    assert "[mine] sh" in run("jobs", "--runs", "--state", "ended,lost")
    assert run("jobs", "--runs", "--state", "lost") == "No jobs."
    assert run("jobs", "--user", "no-such-user") == "No jobs."


def test_the_list_says_why_each_job_waits_in_the_words_of_the_queue(run, acme):
    lease = run("hold", "A1:1", "--for", "2h")
    run("drain", "acme/1")
    first = run("run", "--detach", "A1:2", "--", "true")
    until(lambda: len(Ledger.open().tickets()) == 1, "the first ticket")
    second = run("run", "--detach", "A1:2", "--note", "second", "--", "true")
    until(lambda: len(Ledger.open().tickets()) == 2, "the second ticket")
    third = run("run", "--detach", "--after", first, "A1:1", "--", "true")
    fourth = run("run", "--detach", "--begin", "2h", "A1:1", "--", "true")
    found = {job["job"]: job["reason"] for job in json.loads(run("jobs", "--json"))["jobs"]}
    assert re.fullmatch(r"you have 1 until (\d\d-\d\d )?\d\d:\d\d; 1 drained", found[first])
    assert (found[second], found[third]) == ("1 earlier request is ahead", f"after job {first}")
    assert re.fullmatch(r"begins at (\d\d-\d\d )?\d\d:\d\d", found[fourth])
    queued = [ticket["reason"] for ticket in json.loads(run("queue", "--json"))["tickets"]]
    assert queued == [found[first], found[second]]
    status, data = run_on_terminal([sys.executable, "-m", "anyaccel", "jobs"])
    shown = assert_plain(data).splitlines()
    assert (status, max(map(len, shown)) <= 80) == (0, True), shown
    assert all(reason in "\n".join(shown) for reason in found.values()), shown
    assert f"\nreason         {found[first]}\n" in run("jobs", first)
    run("undrain", "acme/1")
    run("release", lease)
    run("wait", first, second, third)
    assert {job["job"]: job["reason"] for job in json.loads(run("jobs", "--json"))["jobs"]} == {
        **dict.fromkeys((first, second, third)),
        fourth: found[fourth],
    }
