"""Commands: they see exactly what they were given, and nothing stands between them and the terminal."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading

import anyaccel as aa
import psutil
import pytest
from terminals import read_to_end
from waiting import PATIENCE, until

SHOW = [sys.executable, "-c", "import os; print(os.environ['ACME_VISIBLE'])"]
CLI = [sys.executable, "-m", "anyaccel", "--machine", "sim:Acme-Whole:4", "run", "APU:2", "--"]


def test_a_command_sees_its_devices(acme):
    done = aa.run("APU:2", SHOW, machine="sim:Acme-Whole:4", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "acme-0,acme-1\n")


def test_options_of_subprocess_run_work(acme, tmp_path):
    done = aa.run("APU", ["sh", "-c", "pwd; cat; exit 3"], machine="sim:A1", cwd=tmp_path, input=b"in", stdout=-1)
    assert (done.returncode, done.stdout.decode()) == (3, f"{tmp_path}\nin")
    with pytest.raises(subprocess.CalledProcessError):
        aa.run("APU", ["false"], machine="sim:A1", check=True)
    with pytest.raises(subprocess.TimeoutExpired) as told:
        aa.run("APU", ["sleep", "9"], machine="sim:A1", timeout=0.1)
    assert told.value.cmd == ["sleep", "9"]
    done = aa.run("APU", "echo $ACME_VISIBLE; exit 4", machine="sim:A1", shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (4, aa.detect("sim:A1").devices[0].id)


def test_words_of_bytes_work_as_in_subprocess_run(acme):
    for command, options in ((b"echo $ACME_VISIBLE", {"shell": True}), ([b"sh", b"-c", b"echo $ACME_VISIBLE"], {})):
        done = aa.run("APU", command, machine="sim:A1", capture_output=True, text=True, **options)
        assert (done.args, done.stdout.strip()) == (command, aa.detect("sim:A1").devices[0].id)
    assert aa.run("APU", ["./true"], machine="sim:A1", cwd=b"/bin").returncode == 0
    with pytest.raises(aa.CommandNotFoundError, match="the command 'no-such' was not found"):
        aa.run("APU", [b"no-such"], machine="sim:A1")


def test_a_program_that_runs_many_commands_detects_once(acme, monkeypatch):
    inventory = aa.detect("sim:A1:2")
    monkeypatch.setenv("ANYACCEL_PLUGINS", "none")  # another detection would find nothing
    done = aa.run("acme/1", ["sh", "-c", "echo $ACME_VISIBLE"], inventory=inventory, capture_output=True, text=True)
    assert done.stdout.strip() == inventory.devices[1].id


def test_what_subprocess_run_would_refuse_is_refused_before_the_request_waits(acme):
    with aa.acquire("APU", machine="sim:A1"):
        for command, options, told in (
            (
                "sleep 9",
                {},
                r"command must be a list, such as \['sleep', '9'\], or a string with shell=True \(got 'sleep 9'\)",
            ),
            ([], {}, r"command must be a list, such as \['python', 'train.py'\]"),
            ("", {"shell": True}, "command must be a list"),
            (7, {}, r"command must be a list, .* \(got 7\)"),
            (iter(["true"]), {}, "command must be a list"),
            (["true"], {"env": {}}, "give what it is to start from as environ"),
            (["cat"], {"input": b"", "stdin": subprocess.PIPE}, "give one of them"),
            (["true"], {"capture_output": True, "stdout": 1}, "leave these out"),
        ):
            with pytest.raises(aa.UsageError, match=told):
                aa.run("APU", command, machine="sim:A1", **options)


def test_a_command_that_is_not_there(acme):
    with pytest.raises(aa.CommandNotFoundError, match="the command 'no-such' was not found"):
        aa.run("APU", ["no-such"], machine="sim:A1")
    with pytest.raises(aa.CommandNotRunnableError, match="the command '/etc/passwd' cannot be run: Permission denied"):
        aa.run("APU", ["/etc/passwd"], machine="sim:A1")
    with pytest.raises(FileNotFoundError, match="/no/such/dir"):
        aa.run("APU", ["true"], machine="sim:A1", cwd="/no/such/dir")


def test_a_command_that_is_not_there_does_not_wait_for_devices(acme, anyaccel):
    with aa.acquire("APU", machine="sim:A1:1"):
        with pytest.raises(aa.CommandNotFoundError):
            aa.run("APU", ["no-such-command"], machine="sim:A1:1", wait=PATIENCE)
        for options in ((), ("--ranks",)):
            done = anyaccel("run", *options, "--machine", "sim:A1:1", "APU", "--no-wait", "--", "no-such-command")
            assert done.returncode == 127


def test_a_worker_knows_what_it_holds(acme):
    code = "import anyaccel; a = anyaccel.current(); print([d.id for d in a.devices], a.shares[0].units, a.request)"
    done = aa.run("A1:0.25", [sys.executable, "-c", code], machine="sim:A1", capture_output=True, text=True)
    (device,) = aa.detect("sim:A1").devices
    assert done.stdout == f"['{device.id}'] 2500 A1:0.25\n"
    assert aa.current() is None
    assert aa.current({}) is None


def test_nonsense_in_the_variable_is_refused():
    for text in ("{", "[]", '{"id": 1}'):
        with pytest.raises(aa.UsageError, match="ANYACCEL_ALLOCATION must hold what the launcher wrote"):
            aa.current({"ANYACCEL_ALLOCATION": text})


def test_inside_a_worker_only_its_devices_are_handed_out(acme):
    inner = [*CLI[:3], "--json"]
    outer = subprocess.run([*CLI, *inner], capture_output=True, text=True, check=True)
    found = json.loads(outer.stdout)
    assert found["machine"] == "sim:Acme-Whole:4"
    assert [device["id"] for device in found["devices"] if device["visible"]] == ["acme-0", "acme-1"]


@pytest.mark.parametrize(("code", "status"), [("exit 0", 0), ("exit 41", 41), ("kill -9 $$", -9), ("kill -15 $$", -15)])
def test_the_exit_status_is_the_commands_own(code, status, acme):
    assert subprocess.run([*CLI, "sh", "-c", code], check=False).returncode == status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_the_command(number, acme, tmp_path):
    code = f"""
import pathlib, signal, sys, time
signal.signal({int(number)}, lambda *_: sys.exit(77))
pathlib.Path({str(tmp_path / "ready")!r}).touch()
while True: time.sleep(0.1)  # a signal may come just before a call that waits
"""
    process = subprocess.Popen([*CLI, sys.executable, "-c", code])
    until((tmp_path / "ready").exists, "the command")
    process.send_signal(number)
    assert process.wait(60) == 77


def test_nothing_stands_between_the_command_and_its_parent(acme):
    process = subprocess.Popen([*CLI, "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    own = psutil.Process(process.pid)
    until(lambda: own.name() == "cat", "the command")
    assert own.children() == []
    process.stdin.close()
    assert process.wait(60) == 0


def test_the_terminal_is_the_commands_own(acme):
    main, side = pty.openpty()
    code = "import os, sys; print(sys.stdin.isatty(), sys.stdout.isatty(), os.tcgetpgrp(0) == os.getpgrp(), input())"
    process = subprocess.Popen(
        [*CLI, sys.executable, "-c", code], stdin=side, stdout=side, stderr=side, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - no thread is running here
    )  # fmt: skip
    os.close(side)
    os.write(main, b"typed\n")
    assert "True True True typed" in read_to_end(main).decode()
    os.close(main)
    assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(("run", "APU:1", "--", "true"), 0), (("hold", "APU:1", "--for", "1s"), 0), (("config", "--check", "file"), 2)],
)
def test_a_working_directory_that_was_deleted_is_no_traceback(arguments, status, acme, tmp_path):
    where = ["--machine", "sim:Acme-Whole:4"] if arguments[0] != "config" else []
    words = [sys.executable, "-m", "anyaccel", *where, *arguments]
    script = 'mkdir "$0" && cd "$0" && rmdir "$0" && exec "$@"'
    done = subprocess.run(["sh", "-c", script, tmp_path / "gone", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr


def test_ignored_signals_are_not_handed_on(acme):
    shell = ["sh", "-c", "cat /proc/$$/status | grep SigIgn"]
    ignored = subprocess.run([*CLI, *shell], capture_output=True, text=True, check=True).stdout.split()[1]
    assert not int(ignored, 16) & (1 << (signal.SIGPIPE - 1))


def test_a_command_whose_time_limit_no_thread_can_watch_is_killed(acme, tmp_path):
    script = f"import time; time.sleep({PATIENCE}); open({str(tmp_path / 'ended')!r}, 'x')"
    former = threading.stack_size(1 << 47)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            aa.run("APU", [sys.executable, "-c", script], machine="sim:A1", time=1000)
    finally:
        threading.stack_size(former)
    assert not (tmp_path / "ended").exists()
    aa.acquire("APU", machine="sim:A1").release()
