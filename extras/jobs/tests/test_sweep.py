"""Sweeps: what is run, in which order, on which devices; logs, going on, retries, and a tidy end."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.errors import UsageError
from anyaccel.launcher.sandbox import find_obstacle
from anyaccel.ledger import Ledger
from anyaccel.linux.process import gone
from anyaccel_jobs.sweep import COLUMNS, Commands, parse_each, written
from holders import COPIER, copied, mark_of
from terminals import assert_plain, read_to_end, run_on_terminal
from waiting import PATIENCE, until

FOLDER = Path("anyaccel-sweep")


@pytest.fixture(autouse=True)
def simulated(monkeypatch, tmp_path):
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sweep(acme, anyaccel):
    """Run a sweep; its exit status and what it said."""

    def sweep(*arguments, **options):
        out = () if "--out" in arguments else ("--out", str(FOLDER))
        done = anyaccel("sweep", "A1:1", *out, *arguments, **options)
        assert "Traceback" not in done.stdout + done.stderr
        return done.returncode, done.stderr if not done.stdout else done.stdout

    return sweep


def job_log(folder=FOLDER):
    heading, *rows = [line.split("\t") for line in (folder / "jobs.tsv").read_text().splitlines()]
    assert tuple(heading) == COLUMNS
    return {int(row[0]): dict(zip(heading, row, strict=True)) for row in rows}


def made(template, lines=None, **each):
    return [command for _, command in Commands(template, {name: tuple(text) for name, text in each.items()}, lines)]


def test_each_combination_is_made_the_last_fastest():
    commands = Commands(("x", "--lr={lr}", "{seed}{#}"), {"lr": ("0.1", "b c"), "seed": ("1", "2")})
    assert len(commands) == 4
    assert list(commands) == [
        (1, ("x", "--lr=0.1", "11")),
        (2, ("x", "--lr=0.1", "22")),
        (3, ("x", "--lr=b c", "13")),
        (4, ("x", "--lr=b c", "24")),
    ]


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("lr=0.1,0.01", "lr", ["0.1", "0.01"]),
        ("seed=1..3,7", "seed", ["1", "2", "3", "7"]),
        ("n=3..1", "n", ["3", "2", "1"]),
        ("n=-1..1", "n", ["-1", "0", "1"]),
        ("n=08..10", "n", ["08", "09", "10"]),
        ("path=../data,a=b", "path", ["../data", "a=b"]),
        ("lr=1e-4..1e-1:4:log", "lr", ["0.0001", "0.001", "0.01", "0.1"]),
        ("lr=0.1..0.5:3", "lr", ["0.1", "0.3", "0.5"]),
        ("n=10..1:4,-.5..1e0:2", "n", ["10", "7", "4", "1", "-0.5", "1"]),
        ("url=a..b:3", "url", ["a..b:3"]),
    ],
)
def test_values_are_lists_and_ranges(text, name, values):
    assert parse_each(text) == (name, tuple(values))


@pytest.mark.parametrize(
    "text",
    [
        "lr",
        "=1",
        "l r=1",
        "lr=",
        "lr=1,,2",
        "lr=0.1..0.3",
        "n=1..99999999",
        "1=2",
        "n=1..5:1",
        "n=1..5:9999999",
        "n=0..1:3:log",
        "n=-2..-1:3:log",
    ],
)
def test_wrong_values_are_refused(text):
    with pytest.raises(UsageError, match=r"--each|range|value"):
        parse_each(text)


def test_lines_are_values_or_commands_and_no_shell_reads_them():
    assert made(("wc", "{}", "{#}"), ["a b", "", "$HOME;x"]) == [("wc", "a b", "1"), ("wc", "$HOME;x", "2")]
    assert made((), ["python 'a b'  c", "", "# no", "grep '>' \"|\" \\; x"]) == [
        ("python", "a b", "c"), ("grep", ">", "|", ";", "x")
    ]  # fmt: skip
    for line in ("a > b", "a | b", "a&", "a 'b' >c"):
        with pytest.raises(UsageError, match="line 2 of the commands needs a shell for"):
            made((), ["x", line])
    with pytest.raises(UsageError, match="line 1 of the commands is no command: No closing quotation"):
        made((), ["a 'b"])


def test_an_unknown_name_is_an_error_with_the_nearest_and_a_way_to_write_braces():
    commands = Commands(("awk", "{{print}} {lr {}", '{"a": {lr}} {{}}'), {"lr": ("1",), "seed": ("2",)})
    assert list(commands) == [(1, ("awk", "{print} {lr {}", '{"a": 1} {}'))]
    assert commands.notes == ("no argument has '{seed}': each value of seed runs the same",)
    for name, told in (("LR", ": did you mean {lr}?"), ("sed", ": did you mean {seed}?"), ("print", "")):
        with pytest.raises(UsageError) as refused:
            Commands(("x", f"{{{name}}}"), {"lr": ("1",), "seed": ("2",)})
        assert str(refused.value) == f"{{{name}}} is not one of --each{told}"
        assert refused.value.hint == f"for the text {{{name}}} itself write {{{{{name}}}}}"


@pytest.mark.parametrize(
    ("each", "lines", "names"),
    [
        ({"lr": ("0.1", "1e-3"), "seed": ("1", "2")}, None,
         ["lr=0.1,seed=1.log", "lr=0.1,seed=2.log", "lr=1e-3,seed=1.log", "lr=1e-3,seed=2.log"]),
        ({"path": ("a/b", "a_b")}, None, ["1.log", "2.log"]),
        ({"n": ("1", "1")}, None, ["1.log", "2.log"]),
        ({"n": ("x" * 300,)}, None, ["1.log"]),
        ({"n": ("1",)}, ["line"], ["1.log"]),
        ({}, None, ["1.log"]),
    ],
)  # fmt: skip
def test_logs_are_named_by_values_where_these_can_name_files(each, lines, names):
    commands = Commands(("x", "{}{#}", *(f"{{{name}}}" for name in each)), each, lines)
    assert [commands.log_name(number) for number, _ in commands] == names


def test_values_are_not_read_again():
    assert made(("x", "{a}{b}"), a=["{b}"], b=["{#}"]) == [("x", "{b}{#}")]


def test_commands_are_written_on_one_line():
    assert written(("a b", "c\td\n")) == "'a b' 'c\\td\\n'"


def test_a_sweep_runs_on_all_devices_at_once_and_logs_each(sweep):
    """Two that meet prove that two run at once; the third would time out if there were three."""
    meet = "touch here{n}; while ! test -e here1 -a -e here2; do sleep 0.02; done; echo {n} $ACME_VISIBLE; exit {n}"
    status, said = sweep("--each", "n=1..2", "--", "sh", "-c", meet)
    assert status == 1
    assert "1 failed with exit status 1: sh -c" in said
    assert "0 of 2 done, 2 failed in" in said
    logs = [(FOLDER / f"n={n}.log").read_text().split() for n in (1, 2)]
    assert [words[0] for words in logs] == ["1", "2"]
    assert len({words[1] for words in logs}) == 2
    rows = job_log()
    assert [(row["Host"], row["Exitval"], row["Signal"]) for _, row in sorted(rows.items())] == [
        (":", "1", "0"), (":", "2", "0")
    ]  # fmt: skip
    assert float(rows[1]["Starttime"]) > 1e9
    assert rows[1]["Command"] == written(("sh", "-c", meet.replace("{n}", "1")))
    assert Ledger.open().leases() == ()


def test_jobs_limits_how_many_run_and_they_start_in_order(sweep):
    status, _ = sweep(
        "--jobs", "1", "--each", "n=1..6", "--", "sh", "-c", "mkdir lock && echo {n} >> order && rmdir lock"
    )
    assert (status, Path("order").read_text().split()) == (0, list("123456"))


def test_resume_runs_what_has_not_ended_well(sweep):
    command = ("--each", "n=1..3", "--", "sh", "-c", "echo {n} >> ran; test {n} != 2 || test -e good")
    assert sweep(*command)[0] == 1
    status, said = sweep(*command)
    assert (status, "is the job log of an earlier sweep" in said) == (2, True)
    left = "sh -c 'echo 2 >> ran; test 2 != 2 || test -e good'\n"
    assert sweep("--resume", "--dry-run", *command) == (0, left)
    Path("good").touch()
    status, said = sweep("--resume", *command)
    assert (status, "3 of 3 done (2 of them before)" in said) == (0, True)
    assert sorted(Path("ran").read_text().split()) == ["1", "2", "2", "3"]
    status, said = sweep("--resume", *command[:-1], "other {n}")
    assert (status, "is the job log of another sweep" in said) == (2, True)
    (FOLDER / "jobs.tsv").write_text("something\n")
    status, said = sweep("--resume", *command)
    assert (status, "is no job log" in said) == (2, True)


def test_resume_alone_goes_on_with_the_recorded_command_in_its_directory(acme, anyaccel, monkeypatch, tmp_path):
    command = (
        "A1:1",
        "--retries",
        "1",
        "--from",
        "-",
        "--",
        "sh",
        "-c",
        "echo {} >> ran; test {} != b || test -e good",
    )
    done = anyaccel("sweep", *command, input="a\nb\n")
    (folder,) = tmp_path.glob("anyaccel-sweep-*")
    assert (done.returncode, Path("ran").read_text().split().count("b")) == (1, 2)
    assert done.stderr.splitlines()[-1] == f"anyaccel sweep --resume --out {folder}"
    assert anyaccel("sweep", "--resume", "--jobs", "1").returncode == 1, "the newest here"
    assert Path("ran").read_text().split().count("b") == 4
    assert anyaccel("sweep", "--resume", "--", "true").returncode == 2
    refused = anyaccel("sweep", "--resume", str(folder))
    assert refused.stderr.splitlines()[-1] == f"anyaccel: as in: anyaccel sweep --resume --out {folder}"
    Path("good").touch()
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    done = anyaccel("sweep", "--resume", "--out", str(folder), "--detach")
    assert done.returncode == 0, done.stderr
    assert anyaccel("wait", done.stdout.strip()).returncode == 0
    assert "2 of 2 done (1 of them before)" in anyaccel("logs", done.stdout.strip()).stdout
    assert sorted((tmp_path / "ran").read_text().split()) == ["a", *["b"] * 5]
    assert not list(Path().iterdir())


def test_resume_trusts_the_record_of_its_user_only(sweep, anyaccel):
    assert sweep("--each", "n=1", "--", "sh", "-c", "exit {n}")[0] == 1
    record = FOLDER / "sweep.json"
    record.chmod(0o666)
    for spoil in (lambda: None, lambda: (record.chmod(0o600), record.write_text("[]")), record.unlink):
        spoil()
        done = anyaccel("sweep", "--resume", "--out", str(FOLDER))
        assert done.returncode == 2
        assert "does not hold the command line of a sweep of yours" in " ".join(done.stderr.split())


@pytest.mark.parametrize("detach", [(), ("--detach",)], ids=["here", "as a job"])
def test_resume_of_a_folder_without_a_sweep_is_refused_and_runs_nothing(detach, sweep):
    for folder in (FOLDER, Path.cwd() / "empty"):
        if folder.is_absolute():
            folder.mkdir()
        status, said = sweep("--resume", "--out", str(folder), *detach, "--each", "n=1..3", "--", "touch", "ran{n}")
        told = f"there is no sweep in {folder.absolute()}: it has no jobs.tsv"
        assert (status, told in said) == (2, True), said
    assert not FOLDER.exists()
    assert not [*Path("empty").iterdir(), *Path().glob("ran*")]


def test_a_folder_that_cannot_be_made_is_refused_with_a_way_out(sweep):
    Path("file").write_text("")
    status, said = sweep("--out", "file/logs", "--each", "n=1..3", "--", "touch", "ran{n}")
    assert (status, "Not a directory" in said, "name another directory with --out" in said) == (1, True, True), said
    assert not [*Path().glob("ran*")]


def test_retries_and_the_first_error(sweep):
    status, said = sweep("--retries", "2", "--each", "n=1", "--", "sh", "-c", "echo x >> ran{n}; exit 3")
    assert (status, Path("ran1").read_text(), "failed with exit status 3 (3 times)" in said) == (1, "x\nx\nx\n", True)
    assert len(job_log()) == 1
    script = "echo {n} >> ran; exit 1"
    status, said = sweep("--out", "b", "--stop-on-error", "--jobs", "1", "--each", "n=1..9", "--", "sh", "-c", script)
    assert (status, Path("ran").read_text()) == (1, "1\n")


def test_a_command_that_is_not_there_fails_alone(sweep):
    Path("list").write_text("true\nno-such-command\ntrue\n")
    status, said = sweep("--from", "list")
    assert (status, "2 failed with exit status 127: no-such-command" in said) == (1, True)
    assert "was not found" in (FOLDER / "2.log").read_text()
    assert {number: row["Exitval"] for number, row in job_log().items()} == {1: "0", 2: "127", 3: "0"}


def test_lines_come_from_standard_input_and_the_end_is_json(sweep):
    status, out = sweep("--from", "-", "--json", "--", "test", "{}", "=", "a b", input="a b\nc\n")
    found = json.loads(out)
    assert (status, found["total"], found["done"], found["failed"], found["exit_status"]) == (1, 2, 1, 1, 1)
    assert found["failures"][0]["command"] == ["test", "c", "=", "a b"]


def test_each_sweep_has_a_new_dated_folder(acme, anyaccel):
    for _ in range(2):
        done = anyaccel("sweep", "A1:1", "--each", "n=1", "--", "echo", "{n}")
        assert done.returncode == 0, done.stderr
    folders = sorted(Path().glob("anyaccel-sweep-*"))
    assert [(folder / "n=1.log").read_text() for folder in folders] == ["1\n", "1\n"]
    assert re.fullmatch(r"anyaccel-sweep-\d{8}-\d{6}(-2)?", folders[0].name)
    shutil.rmtree(folders[0])
    shutil.rmtree(folders[1])
    done = anyaccel("sweep", "A1:1", "--resume", "--each", "n=1", "--", "echo", "{n}")
    assert (done.returncode, "there is no anyaccel-sweep-DATE-TIME to go on with in" in done.stderr) == (2, True)


def test_a_sweep_that_is_refused_leaves_no_folder(acme, anyaccel):
    for request, machine in (("A1:99", ()), ("A1:1", ("--machine", "/nowhere"))):
        assert anyaccel("sweep", request, *machine, "--each", "n=1", "--", "echo", "{n}").returncode != 0
    assert list(Path().glob("anyaccel-sweep-*")) == []


def test_a_sweep_that_its_engine_refuses_leaves_no_folder(acme, anyaccel):
    """An engine may miss what it is for, or find no cluster."""
    source = (
        "from anyaccel.errors import UsageError\ndef open_engine(settings): raise UsageError('there is no cluster')"
    )
    (acme.parent / "refusing_engine.py").write_text(source)
    info = acme.parent / "refusing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: refusing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[anyaccel.engines]\nrefusing = refusing_engine:open_engine\n")
    done = anyaccel("sweep", "A1:1", "--engine", "refusing", "--", "true")
    assert (done.returncode, done.stderr) == (2, "anyaccel: there is no cluster\n")
    assert list(Path().glob("anyaccel-sweep*")) == []


@pytest.mark.parametrize("arguments", [("A1:1", "--", "true"), ("--resume",), ("--resume", "--out", "x")])
def test_a_working_directory_that_has_gone_is_told(arguments, acme, tmp_path):
    script = 'mkdir gone; cd gone; rmdir ../gone; exec "$0" -m anyaccel sweep "$@"'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "anyaccel: a sweep needs its working directory, which has gone" in done.stderr
    assert "Traceback" not in done.stderr


def test_dry_run_prints_the_commands(sweep):
    assert sweep("--dry-run", "--each", "a=1,x y", "--", "echo", "{a}")[1] == "echo 1\necho 'x y'\n"
    assert not FOLDER.exists()


def test_the_report_has_what_a_sweep_held(sweep, anyaccel):
    assert sweep("--note", "seeds", "--each", "seed=1..6", "--", "sh", "-c", ": {seed}")[0] == 0
    assert sweep("--time", "1m", "--out", "timed", "--each", "seed=1..6", "--", "sh", "-c", ": {seed}")[0] == 0
    rows = {
        row["job"].split(": ")[-1]: row
        for row in json.loads(anyaccel("report", "--by", "job", "--json").stdout)["rows"]
    }
    assert 1 <= rows["seeds"]["leases"] <= 2  # a device is kept from one command to the next
    assert rows["sh"]["leases"] == 6


def test_fractions_share_devices(sweep):
    script = "touch here{n}; while test $(ls | grep -c here) != 4; do sleep 0.02; done"
    assert sweep("A1:0.5", "--each", "n=1..1", "--dry-run", "--", "true")[0] == 0
    command = [sys.executable, "-m", "anyaccel", "sweep", "A1:0.5", "--each", "n=1..4", "--", "sh", "-c", script]
    assert subprocess.run(command, timeout=PATIENCE, check=False).returncode == 0


def test_another_user_of_the_machine_gets_its_turn(acme):
    """Devices are kept from one command to the next only while no other request waits for them."""
    script = "until test -e stop{n}; do sleep 0.02; done"
    command = [
        sys.executable,
        "-m",
        "anyaccel",
        "sweep",
        "A1:1",
        "--out",
        str(FOLDER),
        "--jobs",
        "2",
        "--each",
        "n=1..9",
        "--",
        "sh",
        "-c",
        script,
    ]
    process = subprocess.Popen(command)
    try:
        until((FOLDER / "n=2.log").exists, "two commands")
        waiting = subprocess.Popen([sys.executable, "-m", "anyaccel", "run", "A1:1", "--", "true"])
        for number in range(1, 8):  # who has not shown for a while that it waits is passed, and gets the next one
            until(lambda: [each for each in Ledger.open().tickets() if each.responsive], "the ticket")
            Path(f"stop{number}").touch()
            following = FOLDER / f"n={number + 2}.log"
            until(lambda: waiting.poll() is not None or following.exists(), "the next one")  # noqa: B023
            if waiting.poll() is not None:
                break
        assert waiting.wait(PATIENCE) == 0, "two commands are left, which have both devices if they were kept"
        for number in range(1, 10):
            Path(f"stop{number}").touch()
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()


def test_what_a_command_leaves_running_keeps_its_device_from_the_next(sweep):
    """The sweep goes on with the other device, and nothing else gets the first one."""
    script = "echo $ACME_VISIBLE; test {n} != 1 || { setsid sleep 1000 >/dev/null 2>&1 & echo $! > pid; }"
    status, _ = sweep("--jobs", "1", "--each", "n=1..3", "--", "sh", "-c", script)
    first, second, third = [(FOLDER / f"n={n}.log").read_text() for n in (1, 2, 3)]
    assert (status, first == second, second == third) == (0, False, True)
    (lease,) = Ledger.open().leases()
    assert lease.state == "kept"
    os.kill(int(Path("pid").read_text()), signal.SIGKILL)
    until(lambda: not Ledger.open().leases(), "the device")


STUBBORN = "trap '' TERM; setsid sh -c 'echo $$ > inner{n}; while :; do sleep 600; done' & touch ready{n}; wait; wait"


@pytest.mark.parametrize(
    "script", ["touch ready{n}; test -e go || sleep 1000", STUBBORN], ids=["at once", "killed in the end"]
)
def test_ctrl_c_on_a_terminal_stops_tidily_and_says_how_to_go_on(script, acme, anyaccel):
    command = [
        sys.executable,
        "-m",
        "anyaccel",
        "sweep",
        "A1:1",
        "--grace",
        "0.3s",
        "--each",
        "n=1..9",
        "--",
        "sh",
        "-c",
        script,
    ]
    pid, terminal = pty.fork()
    if not pid:
        os.execv(command[0], command)
    try:
        until(lambda: Path("ready1").exists() and Path("ready2").exists(), "two commands")
        os.write(terminal, b"\x03")
        data = read_to_end(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGINT
    finally:
        os.close(terminal)
    shown = assert_plain(data.replace(b"^C", b""))
    (folder,) = Path().glob("anyaccel-sweep-*-*")
    told = " ".join(shown.split())  # without the breaks at the width of the terminal
    assert "0 of 9 done, 2 interrupted, 7 not started (3-9) in" in told
    assert f"; logs: {folder} " in told
    again = shown.splitlines()[-1]
    assert again == shlex.join(["anyaccel", "sweep", "--resume", "--out", str(folder.absolute())])
    rows = job_log(folder)
    assert sorted(rows) == [1, 2]
    assert {row["Signal"] for row in rows.values()} <= {str(int(signal.SIGTERM)), str(int(signal.SIGKILL))}
    assert Ledger.open().leases() == ()
    if script != STUBBORN:
        Path("go").touch()
        done = anyaccel(*shlex.split(again)[1:])
        assert (done.returncode, "9 of 9 done in" in done.stderr) == (0, True), done.stderr
        assert sorted(job_log(folder)) == list(range(1, 10))
        assert anyaccel("sweep", "--resume", *command[4:]).returncode == 0, "the newest folder"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_a_stopped_sweep_does_not_wait_for_another_user_who_has_copied_the_mark(acme):
    command = [sys.executable, "-m", "anyaccel", "sweep", "A1:1", "--grace", "0.2s", "--each", "n=1", "--"]
    with subprocess.Popen([*command, "sh", "-c", STUBBORN], stderr=subprocess.PIPE, text=True) as process:
        until(lambda: Path("ready1").exists() and Path("inner1").exists(), "the command")
        with copied(mark_of(Ledger.open().path)) as copy:
            process.terminate()
            said = process.communicate(timeout=PATIENCE)[1]
            assert process.returncode == 143
            assert f"processes {copy} ({COPIER}) carry the mark of the sweep" in said
            (lease,) = Ledger.open().leases()
            assert (lease.state, lease.carriers) == ("kept", (copy,))
    until(lambda: not Ledger.open().leases(), "the device")


def test_a_stopped_sweep_ends_what_left_the_process_group_of_a_command_that_holds_nothing(acme):
    """There is no mark to find it by: it descends from the command."""
    inner = "setsid env -i sh -c 'echo $$ > inner.new; mv inner.new inner; exec sleep 1000' & wait; : {n}"
    command = [sys.executable, "-m", "anyaccel", "sweep", "A1:3,else=cpu", "--each", "n=1", "--", "sh", "-c", inner]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until(Path("inner").exists, "the command")
        process.terminate()
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 143
    assert gone(int(Path("inner").read_text()), 0)


def test_progress_is_one_line_in_place_on_a_terminal(acme):
    command = [sys.executable, "-m", "anyaccel", "sweep", "A1:1", "--each", "n=1..4", "--", "sleep", "0.{n}"]
    status, data = run_on_terminal(command, columns=40)
    assert status == 0
    progress, _, end = data.decode().rpartition("\ranyaccel: ")
    assert all(len(line.strip("\n")) <= 40 for line in (*progress.split("\r"), *end.split("\r")))
    assert " ".join(end.split()).startswith("4 of 4 done in")


def test_a_sweep_runs_as_a_job_and_is_cancelled_tidily(acme, anyaccel):
    done = anyaccel("sweep", "A1:1", "--detach", "--each", "n=1..9", "--", "sh", "-c", "touch ready{n}; sleep 1000")
    until(lambda: Path("ready1").exists() and Path("ready2").exists(), "two commands")
    assert anyaccel("cancel", done.stdout.strip()).returncode == 0
    (job,) = json.loads(anyaccel("jobs", "--json").stdout)["jobs"]
    assert (job["state"], job["exit_status"], job["request"]) == ("cancelled", 143, "A1:1")
    assert "0 of 9 done, 2 interrupted, 7 not started (3-9)" in anyaccel("logs", job["job"]).stdout
    assert Ledger.open().leases() == ()


def test_the_progress_of_a_sweep_that_is_a_job_is_shown(acme, anyaccel):
    script = "test {n} -le 3 || until test -e go; do sleep 0.05; done; test {n} != 2"
    number = anyaccel("sweep", "A1:1", "--detach", "--each", "n=1..6", "--", "sh", "-c", script).stdout.strip()
    until(lambda: "progress       2 of 6 done\n" in anyaccel("jobs", number).stdout, "commands 1 and 3")
    Path("go").touch()
    assert anyaccel("wait", number).returncode == 1
    assert "progress       5 of 6 done\n" in anyaccel("jobs", number).stdout
    assert "  5 of 6 done  sweep --each=n=1..6 " in anyaccel("jobs").stdout
    (folder,) = Path().glob("anyaccel-sweep-*")
    shutil.rmtree(folder)
    done = anyaccel("jobs", number)
    assert (done.returncode, "\nprogress" in done.stdout) == (0, False)


def test_a_sweep_waits_for_devices_and_gives_up_in_time(sweep):
    with aa.acquire("A1:2"):
        status, said = sweep("--wait", "0.1s", "--each", "n=1", "--", "true")
        assert (status, "does not fit now" in said) == (4, True)


def test_a_sweep_that_waits_for_its_first_device_says_so_in_its_log_and_among_the_jobs(acme, anyaccel):
    with aa.acquire("A1:2", note="all"):
        job = anyaccel("sweep", "A1:1", "--detach", "--each", "n=1,2", "--", "echo", "{n}").stdout.strip()
        until(lambda: "waiting" in anyaccel("logs", job).stdout, "the wait")
        assert "\nanyaccel: waiting for devices, place 1 in line: you have 2\n" in anyaccel("logs", job).stdout
        assert "reason         you have 2\n" in anyaccel("jobs", job).stdout
        assert "  0 of 2 done; you have 2  " in anyaccel("jobs").stdout
    assert anyaccel("wait", job).returncode == 0
    assert "  2 of 2 done  sweep" in anyaccel("jobs").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "a command to run must follow '--'"),
        (("--each", "a=1"), "a command to run must follow '--'"),
        (("--each", "a=1", "--each", "a=2", "--", "x"), "gives 'a' twice"),
        (("--from", "nowhere"), "--from nowhere cannot be read"),
        (("--jobs", "0", "--", "x"), "must be a whole number from 1 to 1000000"),
        (("--address", "x", "--", "x"), "--address belongs to"),
    ],
)
def test_bad_input_gets_one_message(arguments, words, sweep):
    status, said = sweep(*arguments, here=True)
    assert status == 2
    assert words in said


def test_a_command_whose_time_is_over_is_ended_and_the_next_gets_its_device(sweep):
    """A stopped one hears that, too: it is not killed after the grace."""
    command = ("--", "sh", "-c", "kill -{how} $$; true")
    for seconds in (1, 10, 60):  # enough for one that is not stopped
        shutil.rmtree(FOLDER, ignore_errors=True)
        time = ("--time", f"{seconds}s")
        status, _ = sweep("--jobs", "1", *time, "--grace", "1h", "--each", "how=STOP,CONT", *command)
        assert status == 1
        ended = [(row["Exitval"], row["Signal"]) for row in job_log().values()]
        if ended[1:] == [("0", "0")]:
            break
    assert ended == [("0", "15"), ("0", "0")]
    assert Ledger.open().leases() == ()


LEAVES = "setsid env -i sh -c 'trap : TERM; while :; do sleep 600; done' & "


@pytest.mark.parametrize("then", ["wait", "true"], ids=["its time is over", "it ended before"])
def test_what_has_left_the_process_group_of_a_command_is_ended_at_its_time(sweep, then):
    """With the command, or by a monitor where the sweep is over before."""
    for seconds in (1, 5, 60):  # enough for one that ends before
        shutil.rmtree(FOLDER, ignore_errors=True)
        limits = ("--time", f"{seconds}s", "--grace", "0.2s")
        status, _ = sweep(*limits, "--each", "n=1", "--", "sh", "-c", f"{LEAVES}: {{n}}; {then}")
        if then == "wait":
            assert Ledger.open().leases() == ()
        until(lambda: not Ledger.open().leases(), "the device")
        if status == (then == "wait"):
            break
    assert status == (then == "wait")


def test_commands_are_started_with_the_options_that_run_has(sweep):
    program = "import anyaccel, os; print(anyaccel.current().confined, os.environ['ACME_VISIBLE'])"
    options = "--try-enforce", "--no-bind", "--mask", "index"
    status, said = sweep(*options, "--each", "n=1", "--", sys.executable, "-c", program, "{n}")
    assert status == 0, said
    assert (FOLDER / "n=1.log").read_text() == f"{not find_obstacle()} 0\n"
