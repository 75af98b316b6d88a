"""Jobs outlive their terminal, wait in order, and are cancelled with all that they started; lost ones are told."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import anyaccel as aa
import disks
import pytest
from anyaccel.errors import JobNotFoundError, JobStateError, LeaseCancelledError, UsageError
from anyaccel.ledger import Ledger
from anyaccel.linux import process
from anyaccel.model import replace
from anyaccel_jobs import jobs as jobs_
from counting import count_calls
from holders import COPIER, copied, mark_of
from terminals import assert_plain, run_on_terminal
from waiting import PATIENCE, until

MACHINE = "sim:A1:1"
FOREVER = "trap : HUP; while :; do sleep 0.1; done"
STUBBORN = "trap '' TERM HUP; touch ready; while :; do sleep 0.1; done"


@pytest.fixture
def run(acme, anyaccel):
    """Run the command line on a simulated machine; what still runs of its jobs is ended."""

    def run(*arguments, status=0, **options):
        done = anyaccel(*arguments, **options)
        assert "Traceback" not in done.stdout + done.stderr
        assert done.returncode == status, done.stderr
        return done.stdout

    yield run
    for job in jobs_.jobs():
        if job.here:
            jobs_.cancel(job, grace=0.1)


@pytest.fixture(autouse=True)
def simulated(monkeypatch, tmp_path):
    monkeypatch.setenv("ANYACCEL_MACHINE", MACHINE)
    monkeypatch.chdir(tmp_path)


def submit(run, *command, request="A1:1", **options):
    return run("run", "--detach", request, "--", *command, **options).strip()


def state(number):
    return jobs_.find(number).state


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """Jobs lie on a disk of 64 KiB; gives its path."""
    path = tmp_path / "disk"
    path.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    with disks.mounted(path, "size=64k,mode=700"):
        yield path


def test_a_job_that_fills_the_disk_with_its_output_is_not_lost(run, small_disk):
    number = submit(run, "sh", "-c", "cat /dev/zero; exit 7")
    run("wait", number, status=7)
    assert os.statvfs(small_disk).f_bavail == 0
    (found,) = json.loads(run("jobs", "--json"))["jobs"]
    assert (found["state"], found["exit_status"]) == ("failed", 7)


def test_a_job_that_cannot_be_recorded_does_not_start(run, anyaccel, small_disk):
    (small_disk / "anyaccel" / "jobs").mkdir(parents=True, mode=0o700)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "fill").write_bytes(bytes(1 << 17))
    done = anyaccel("run", "--detach", "A1:1", "--", "true")
    jobs = small_disk / "anyaccel" / "jobs"
    assert done.stderr.splitlines()[-2:] == [
        f"anyaccel: the job cannot be recorded in {jobs}: No space left on device",
        "anyaccel: make room there, or set XDG_STATE_HOME to another place of your own",
    ]
    assert (done.returncode, done.stdout, list(jobs.iterdir())) == (6, "", [])
    assert Ledger.open().leases() == ()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_log_that_its_job_has_replaced_is_refused(run, anyaccel, make):
    number = submit(run, "true")
    run("wait", number)
    log = jobs_.find(number).log
    os.unlink(log)
    make(log)
    done = anyaccel("logs", number)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"the log of job {number} is no regular file: {log}" in done.stderr


def test_a_job_runs_with_its_devices_and_its_end_is_known(run):
    number = submit(run, "sh", "-c", 'echo "$ACME_VISIBLE"; echo to stderr >&2; exit 3')
    assert run("wait", number, status=3) == ""
    log = run("logs", number).splitlines()
    assert len(log[0]) > 3
    assert log[1:] == ["to stderr"]
    (found,) = json.loads(run("jobs", "--json"))["jobs"]
    expected = {
        "job": number,
        "state": "failed",
        "request": "A1:1",
        "devices": ["acme/0"],
        "exit_status": 3,
        "pid": None,
    }
    assert {key: found[key] for key in expected} == expected
    assert run("jobs").splitlines()[1].split()[:4] == [number, "failed", "A1:1", "acme/0"]
    assert Ledger.open().leases() == ()


def test_a_reader_of_our_output_does_not_wait_for_the_job(run):
    script = f"exec 3>&1; {sys.executable} -m anyaccel run --detach A1:1 -- sleep 1000"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert state(done.stdout.strip()) == "running"


def test_the_holder_of_a_jobs_device_is_its_command(run):
    """And not its supervisor."""
    submit(run, "sleep", "1000")
    shown = ("status", "--columns", "device,program")
    until(lambda: run(*shown).splitlines()[1].split() == ["acme/0", "sleep"], "the command")


def test_a_job_has_one_line_on_a_narrow_terminal(run):
    number = run("run", "--detach", "A1:1", "--note", "why", "--", "sh", "-c", f"true {'x' * 100}").strip()
    run("wait", number)
    _, data = run_on_terminal([sys.executable, "-m", "anyaccel", "jobs"])
    header, line = (each.replace("\x1b[1m", "").replace("\x1b[0m", "") for each in data.decode().splitlines())
    assert header.split()[-1] == "COMMAND"
    assert line.split()[3] == "acme/0"
    assert (len(line), line[-1]) == (80, "\u2026")
    assert line.split()[7:9] == ["[why]", "sh"]
    assert "x" * 100 in run("jobs")


def test_jobs_wait_in_order_and_a_waiting_one_is_cancelled(run):
    first = submit(run, "sh", "-c", "while ! test -e go; do sleep 0.05; done")
    second, third, fourth = (submit(run, "sh", "-c", f"echo {name} >> served") for name in ("b", "c", "d"))
    assert [state(each) for each in (first, second, third, fourth)] == ["running", "waiting", "waiting", "waiting"]
    run("cancel", third)
    assert [ticket.pid for ticket in Ledger.open().tickets()] == [jobs_.find(each).pid for each in (second, fourth)]
    Path("go").touch()
    run("wait", first, second, fourth)
    assert sorted(Path("served").read_text().split()) == ["b", "d"]
    assert run("wait", third, status=143) == ""
    assert jobs_.find(third).state == "cancelled"


@pytest.mark.parametrize("timeout", [1e9, float("inf"), None])
def test_a_job_is_waited_for_as_long_as_one_likes(run, timeout):
    """The kernel waits 24 days at most in one call."""
    job = jobs_.find(submit(run, "sleep", "0.3"))
    assert jobs_.wait(job, timeout=timeout).state == "done"


def test_a_job_is_waited_for_until_its_devices_have_gone_with_its_supervisor(run):
    submit(run, "sleep", "1000")
    job, gone = jobs_.find("1"), []
    jobs_.write(replace(job, state="done"))  # as the supervisor does, right before it ends
    waiter = threading.Thread(target=lambda: gone.append((jobs_.wait(job), process.gone(job.pid, job.start))[1]))
    waiter.start()
    waiter.join(1.0)
    os.kill(job.pid, signal.SIGTERM)
    waiter.join(PATIENCE)
    assert gone == [True]


def test_a_last_word_that_comes_during_a_look_is_heard(run, monkeypatch):
    submit(run, "true")
    job = jobs_.wait(jobs_.find("1"))
    real = process.gone

    def gone(pid, start):
        jobs_.write(job)
        return real(pid, start)

    jobs_.write(replace(job, state="running"))
    monkeypatch.setattr(process, "gone", gone)
    assert state("1") == "done"


def test_a_job_outlives_its_terminal(run):
    """The terminal's end sends SIGHUP to its session, and whatever reads or writes there fails.

    A shell that is started where the signal is ignored, as below nohup, would ignore it for good.
    """
    script = f"{sys.executable} -m anyaccel run --detach A1:1 -- sh -c '{FOREVER}'; kill -HUP -$$ $$"
    status, data = run_on_terminal(["setsid", "--ctty", "--wait", "env", "--default-signal=HUP", "bash", "-c", script])
    assert status != 0
    assert_plain(data)
    (job,) = jobs_.jobs()
    assert job.state == "running"
    assert jobs_.wait(job, timeout=0.3).state == "running"


def test_cancel_ends_all_that_a_job_started_and_kills_what_does_not_listen(run):
    inner = "import subprocess, sys; subprocess.Popen([*sys.argv[1:]], start_new_session=True).wait()"
    number = submit(run, sys.executable, "-c", inner, "sh", "-c", f"echo $$ > pid; {STUBBORN}")
    until(Path("ready").exists, "the job")
    pid = int(Path("pid").read_text())
    run("cancel", number, "--grace", "0.2s")
    assert state(number) == "cancelled"
    until(lambda: not alive(pid), "its end")
    until(lambda: not Ledger.open().leases(), "the device")


def test_cancel_ends_what_left_the_process_group_of_a_job_that_holds_nothing(run):
    """There is no mark to find it by: the supervisor has become its parent."""
    inner = "setsid env -i sh -c 'echo $$ > pid; exec sleep 1000' & sleep 1000"
    number = submit(run, "sh", "-c", inner, request="A1:2,else=cpu")
    pid = int(until(lambda: Path("pid").exists() and Path("pid").read_text(), "the job"))
    run("cancel", number)
    assert (state(number), alive(pid)) == ("cancelled", False)


def test_what_left_the_process_group_of_a_job_is_ended_after_its_command(run):
    """A program that starts others in sessions of their own ends them in its own way first."""
    inner = "trap 'echo told > inner; exit' TERM; touch ready; while :; do sleep 0.1; done"
    # Builtins alone: a process that a trap starts may be asked to end before it has done anything.
    trap = "[ -e inner ] && : > outer; : > ended; exit"
    outer = f"setsid sh -c \"{inner}\" & trap '{trap}' TERM; while :; do sleep 0.1; done"
    number = submit(run, "sh", "-c", outer)
    until(Path("ready").exists, "the job")
    run("cancel", number)
    assert state(number) == "cancelled"
    assert Path("ended").exists()
    assert Path("inner").read_text() == "told\n"
    assert not Path("outer").exists(), "it was asked before the command had ended"


root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")


@root
def test_cancel_does_not_wait_for_another_user_who_has_copied_the_mark(run):
    inner = "setsid env -i sh -c 'echo $$ > pid; trap \"\" TERM; while :; do sleep 0.1; done' & sleep 1000"
    number = submit(run, "sh", "-c", inner)
    pid = int(until(lambda: Path("pid").exists() and Path("pid").read_text(), "the job"))
    with copied(mark_of(Ledger.open().path)) as copy:
        run("cancel", number, "--grace", "0.2s")
        assert (state(number), alive(pid), alive(copy)) == ("cancelled", False, True)
        assert f"processes {copy} ({COPIER}) carry the mark of job {number}" in run("logs", number)
        (lease,) = Ledger.open().leases()
        assert (lease.state, lease.carriers) == ("kept", (copy,))
    until(lambda: not Ledger.open().leases(), "the device")


@root
def test_cancel_ends_what_has_become_another_user_and_lost_its_parents(run):
    other = f"setpriv --reuid={COPIER} --regid={COPIER} --clear-groups"
    inner = f"(setsid {other} sh -c 'echo $$; exec sleep 1000' > pid &); sleep 1000"
    number = submit(run, "sh", "-c", inner)
    pid = int(until(lambda: Path("pid").exists() and Path("pid").read_text(), "the job"))
    run("cancel", number, "--grace", "0.2s")
    assert (state(number), alive(pid), run("logs", number)) == ("cancelled", False, "")
    until(lambda: not Ledger.open().leases(), "the device")


def test_a_supervisor_that_is_killed_leaves_a_lost_job_and_the_device_to_what_runs(run, anyaccel):
    number = submit(run, "sh", "-c", f"echo $$ > pid; exec 3<&- 4<&- 5<&- 6<&-; {FOREVER}")
    pid = int(until(lambda: Path("pid").exists() and Path("pid").read_text(), "the job"))
    os.kill(jobs_.find(number).pid, signal.SIGKILL)
    until(lambda: state(number) == "lost", "the supervisor's end")
    assert alive(pid)
    run("run", "A1:1", "--no-wait", "--", "true", status=4)
    assert anyaccel("wait", number).stderr == f"anyaccel: job {number} is lost: its supervisor was killed\n"
    assert "reason         its supervisor was killed\n" in run("jobs", number)
    run("cancel", number)
    until(lambda: not alive(pid), "the end of what it left")
    run("run", "A1:1", "--", "true")


def test_a_job_of_an_earlier_boot_is_lost_and_nothing_is_signalled(run):
    number = submit(run, "sleep", "1000")
    job = jobs_.find(number)
    record = Path(job.path, "job.json")
    words = json.loads(record.read_text())
    try:
        record.write_text(json.dumps({**words, "boot": "00000001"}))
        assert state(number) == "lost"
        assert "reason         the machine was rebooted\n" in run("jobs", number)
        run("cancel", number)
        assert alive(job.pid)
        record.write_text(json.dumps({**words, "start": words["start"] - 1}))  # the number is another process's now
        assert state(number) == "lost"
        record.write_text(json.dumps({**words, "host": "elsewhere"}))
        assert "belongs to elsewhere" in _refused(run, "cancel", number)
        assert state(number) == "running"  # as it was written there
    finally:
        record.write_text(json.dumps(words))


def _refused(run, *arguments):
    return json.loads(run(*arguments, "--json", status=2))["error"]["message"]


def test_what_goes_wrong_before_it_begins_is_told_and_no_job_is_left(run, anyaccel):
    for status, words, request, command in (
        (127, "was not found", "A1:1", ["no-such-command"]),
        (3, "can never fit", "A1:2", ["true"]),
        (2, "unknown name", "A2:1", ["true"]),
    ):
        done = anyaccel("run", "--detach", request, "--", *command)
        assert (done.returncode, done.stdout) == (status, "")
        assert words in done.stderr
    submit(run, "sleep", "1000")
    assert "does not fit now" in anyaccel("run", "--detach", "--no-wait", "A1:1", "--", "true").stderr
    assert len(jobs_.jobs()) == 1


def test_a_wait_that_takes_too_long_fails_the_job(run):
    submit(run, "sleep", "1000")
    number = run("run", "--detach", "A1:1", "--wait", "0.1s", "--", "true").strip()
    run("wait", number, status=4)
    assert "does not fit now" in run("logs", number)


def test_logs_follow_until_the_end(run):
    number = submit(run, "sh", "-c", "echo one; while ! test -e go; do sleep 0.05; done; printf 'two\\033[1m'")
    following = subprocess.Popen([sys.executable, "-m", "anyaccel", "logs", "-f", number], stdout=subprocess.PIPE)
    assert following.stdout.readline() == b"one\n"
    Path("go").touch()
    assert following.communicate(timeout=PATIENCE)[0] == b"two\x1b[1m"
    assert following.returncode == 0


def test_ranks_run_as_a_job(run):
    number = run(
        "run", "--detach", "--ranks", "--machine", "sim:A1:2", "A1:2", "--", "sh", "-c", "echo rank $RANK"
    ).strip()
    run("wait", number)
    assert sorted(run("logs", number).split()) == ["0", "1", "rank", "rank"]


def test_what_a_job_leaves_running_keeps_the_device(run):
    submit(run, "sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $! > pid")
    run("wait", "1")
    run("run", "A1:1", "--no-wait", "--", "true", status=4)
    os.kill(int(Path("pid").read_text()), signal.SIGKILL)
    run("run", "A1:1", "--", "true")


def test_records_are_private_and_those_of_others_are_not_trusted(run, tmp_path):
    number = submit(run, "true")
    run("wait", number)
    job = jobs_.find(number)
    assert [os.stat(path).st_mode & 0o777 for path in (job.path, f"{job.path}/job.json", job.log)] == [
        0o700,
        0o600,
        0o600,
    ]
    record = Path(job.path, "job.json")
    words = json.loads(record.read_text())
    wrong = ({"pid": "1"}, {"state": "x"}, {"devices": 1}, {"created": None})
    for damaged in ("[", "[]", *(json.dumps({**words, **one}) for one in wrong)):
        record.write_text(damaged)
        assert jobs_.jobs() == ()
    with pytest.raises(JobNotFoundError, match="there is no job '1'"):
        jobs_.find("1")
    os.chmod(jobs_.directory(), 0o777)
    with pytest.raises(JobStateError, match="other users cannot write to"):
        jobs_.jobs()
    assert "other users cannot write to" in json.loads(run("jobs", "--json", status=6))["error"]["message"]
    os.chmod(jobs_.directory(), 0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory to another user")
def test_root_does_not_use_jobs_of_the_user_before(run, monkeypatch):
    submit(run, "true")
    os.chown(jobs_.directory(), 12345, 12345)
    try:
        assert (
            "XDG_STATE_HOME"
            in json.loads(run("run", "--detach", "A1:1", "--json", "--", "true", status=6))["error"]["hint"]
        )
    finally:
        os.chown(jobs_.directory(), 0, 0)


def test_cancel_takes_a_ticket_and_leaves_its_process_alone(run):
    import threading

    errors = []

    def wait():
        try:
            aa.acquire("A1:1")
        except LeaseCancelledError as error:
            errors.append(str(error))

    with aa.acquire("A1:1"):
        waiter = threading.Thread(target=wait)
        waiter.start()
        (ticket,) = until(Ledger.open().tickets, "the ticket")
        run("cancel", ticket.id)
        waiter.join(PATIENCE)
    assert errors == ["the wait for A1:1 was cancelled"]


def test_cancel_ends_a_waiting_run_with_a_word(run):
    with aa.acquire("A1:1"):
        command = [sys.executable, "-m", "anyaccel", "run", "A1:1", "--", "true"]
        waiting = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        (ticket,) = until(Ledger.open().tickets, "the ticket")
        run("cancel", ticket.id)
        assert "the wait for A1:1 was cancelled" in waiting.communicate(timeout=PATIENCE)[1]
        assert waiting.returncode == 1


def test_cancel_all_ends_what_is_ours_and_nothing_twice(run):
    running = submit(run, "sleep", "1000")
    waiting = submit(run, "touch", "begun")
    command = [sys.executable, "-m", "anyaccel", "run", "A1:1", "--", "touch", "begun"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL):
        _, ticket = until(lambda: len(found := Ledger.open().tickets()) == 2 and found, "both to wait")
        found = json.loads(run("cancel", "--all", "--json"))["cancelled"]
    assert list(found) == [waiting, ticket.id, running], "who waits gets nothing that another one gives back"
    assert (state(running), state(waiting), Path("begun").exists()) == ("cancelled", "cancelled", False)
    lease = run("hold", "A1:1").strip()
    run("cancel", lease)
    assert Ledger.open().leases() == ()
    assert (
        "nothing to cancel"
        in subprocess.run(
            [sys.executable, "-m", "anyaccel", "cancel", "--all"], capture_output=True, text=True, check=True
        ).stderr
    )


def test_a_job_and_its_leases_are_one_thing_to_cancel(run, anyaccel):
    job = submit(run, "sleep", "1000")
    assert anyaccel("cancel").stderr == f"anyaccel: job {job} is cancelled\n"
    sweep = ("sweep", "A1:0.5", "--detach", "--each", "i=1..4", "--", "sh", "-c", "sleep 1000; echo {i}")
    job = run(*sweep, status=0).strip()
    until(lambda: len({lease.id for lease in Ledger.open().leases()}) > 1, "two commands of the sweep")
    assert anyaccel("cancel").stderr == f"anyaccel: job {job} is cancelled\n"


def test_a_lost_job_is_to_cancel_as_long_as_something_of_it_runs(run, anyaccel):
    lost = submit(run, "sh", "-c", "touch begun; exec sleep 1000")
    until(Path("begun").exists, "the command")
    os.kill(jobs_.find(lost).pid, signal.SIGKILL)
    until(lambda: state(lost) == "lost", "the end of the supervisor")
    assert anyaccel("cancel").stderr == f"anyaccel: job {lost} was lost already; what it had left running is ended\n"
    for arguments in (("cancel",), ("cancel", "--all")):
        assert anyaccel(*arguments).stderr == "anyaccel: nothing to cancel\n"
    assert anyaccel("cancel", lost).stderr == f"anyaccel: job {lost} was lost already\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cancel", "--all", "1"), "--all stands alone"),
        (("cancel", "7"), "there is no job '7'"),
        (("cancel", "0123456789ab"), "there is no job, ticket or lease"),
        (("logs", "../../etc"), "there is no job"),
        (("wait", "x"), "there is no job 'x'"),
        (("run", "--detach", "A1:1"), "a command to run must follow"),
    ],
)
def test_bad_input_gets_one_message(arguments, words, run):
    assert words in _refused(run, *arguments)


def test_wait_refuses_jobs_of_other_machines(run):
    job = jobs_.Job(id="1", state="running", host="elsewhere", here=False)
    with pytest.raises(UsageError, match="belongs to elsewhere"):
        jobs_.wait(job)


def add_ended(count):
    """Make the records of jobs that ended long ago, and return their numbers."""
    old = jobs_.Job(id="", state="done", created=10.0, started=11.0, ended=12.0, host=os.uname().nodename)
    return [jobs_.create(old).id for _ in range(count)]


def test_jobs_of_the_past_cost_little():
    add_ended(20)

    def count():
        return count_calls(jobs_.jobs), count_calls(jobs_.active_jobs)

    every, active = count()
    add_ended(20)
    more, still_active = count()
    assert still_active - active < (more - every) / 2


def test_a_completed_number_reads_no_record(monkeypatch):
    numbers = add_ended(20)
    monkeypatch.setattr(os, "open", None)
    assert jobs_.list_ids() == numbers


def test_a_job_that_ended_before_is_left_out_but_none_that_is_lost():
    ended, lost = add_ended(2)
    jobs_.write(replace(jobs_.find(lost), state="running", namespace=jobs_.pid_namespace()))
    assert [job.id for job in jobs_.jobs(since=12.0)] == [ended, lost]
    assert [(job.id, job.state) for job in jobs_.jobs(since=13.0)] == [(lost, "lost")]


def test_a_record_that_is_no_object_is_left_out():
    (number,) = add_ended(1)
    Path(jobs_.find(number).path, "job.json").write_text("[]")
    assert not jobs_.jobs()


SUBMITTER_ENDED = """
import os, signal, sys, time
from anyaccel_jobs import jobs
submitter, write = os.getpid(), jobs.{step}
def ended(*arguments):
    if os.getppid() == submitter:
        os.kill(submitter, signal.{signal})
        while os.getppid() == submitter:
            time.sleep(0.01)
    return write(*arguments)
jobs.{step} = ended
sys.argv[1:] = ["run", "--detach", "A1:1", "--", "touch", "ran"]
from anyaccel.cli import program
program()
"""


@pytest.mark.parametrize("number", ["SIGKILL", "SIGINT", "SIGTERM"])
@pytest.mark.parametrize("step", ["create", "write"])
def test_a_job_whose_submitter_ends_before_it_has_a_number_leaves_nothing(run, step, number):
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{SUBMITTER_ENDED}"
    submitter = subprocess.Popen([sys.executable, "-c", code.format(step=step, signal=number)])
    assert submitter.wait(PATIENCE) == -getattr(signal, number)
    until(lambda: not Ledger.open().leases() and not Ledger.open().tickets(), "the end of the supervisor")
    until(lambda: not os.listdir(jobs_.directory()), "no record")
    assert not Path("ran").exists()
    assert submit(run, "true")
