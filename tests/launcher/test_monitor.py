"""Time limits and the journal of runs, holds and leases of this process."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyaccel
import pytest
from anyaccel import detect, leases
from anyaccel.launcher.hold import take
from anyaccel.launcher.monitor import NAME, start_monitor
from anyaccel.ledger import Ledger
from anyaccel.linux.mark import draw_for_process
from waiting import PATIENCE, until

MACHINE = ("--machine", "sim:A1:2")


pytestmark = pytest.mark.usefixtures("acme")


@pytest.fixture
def lines():
    """Wait until the journal has so many lines, and read them."""
    file = Path(os.environ["XDG_STATE_HOME"]) / "anyaccel" / "journal.jsonl"

    def lines(count):
        until(lambda: file.exists() and len(file.read_text().splitlines()) >= count, f"{count} lines in the journal")
        return [json.loads(line) for line in file.read_text().splitlines()]

    return lines


def test_a_run_is_ended_in_time_with_all_that_it_started(anyaccel, lines):
    """Also what ignores SIGHUP and has a session of its own; what was asked to end may do so by itself."""
    script = "trap 'echo ended; exit 7' TERM; setsid sleep 1000 & while :; do sleep 0.05; done"
    for number, seconds in enumerate((1, 10, 30), 1):  # until the shell has come to its trap by then
        done = anyaccel("run", *MACHINE, "APU:1", "--time", f"{seconds}s", "--note", "n", "--", "sh", "-c", script)
        line = lines(number)[-1]
        if done.stdout:
            break
    assert (done.returncode, done.stdout) == (7, "ended\n")
    assert (line["note"], line["program"], line["request"], line["exit"]) == ("n", "sh", "APU:1", None)
    assert [(name, kind) for name, kind, *_ in line["devices"]] == [("acme/0", "Acme-One")]
    assert line["held"] >= 0.9 * seconds
    assert json.loads(anyaccel("status", *MACHINE, "--json").stdout)["devices"][0]["holders"] == []


def test_a_forked_child_that_leaves_the_block_writes_no_line(lines):
    child = 0
    with anyaccel.acquire("APU:1", machine=MACHINE[1], note="once"):
        child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with anyaccel.acquire("APU:1", machine=MACHINE[1], note="after"):
        pass
    assert [line["note"] for line in lines(2)] == ["once", "after"]


def monitors():
    """Process ids of the monitors of the runs of this test."""
    mine = f"XDG_STATE_HOME={os.environ['XDG_STATE_HOME']}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, environ = (process / "comm").read_text(), (process / "environ").read_bytes().split(b"\0")
            if name == f"{NAME}\n" and mine in environ:
                found.append(int(process.name))
    return found


def test_a_run_whose_monitor_is_killed_goes_on_with_its_devices(tmp_path):
    """No other process watches over its time."""
    script = f"echo; until test -e {tmp_path}/go; do sleep 0.05; done"
    status = None
    for seconds in (2, 10, 60):  # until the monitor has been killed by then
        command = ["run", *MACHINE, "APU:1", "--time", f"{seconds}s", "--", "sh", "-c", script]
        with subprocess.Popen([sys.executable, "-m", "anyaccel", *command], stdout=subprocess.PIPE) as run:
            run.stdout.readline()
            for pid in monitors():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            held = leases(detect(MACHINE[1]))
            in_time = bool(held) and time.time() < held[0].until
            if in_time:
                until(lambda end=held[0].until: time.time() > end, "the end of its time")
                assert leases(detect(MACHINE[1]))[0].id == held[0].id
            (tmp_path / "go").touch()
            status = run.wait(PATIENCE)
        if in_time:
            break
        (tmp_path / "go").unlink()
    assert in_time
    assert status == 0
    assert leases(detect(MACHINE[1])) == ()


def test_a_monitor_ends_without_its_state_directory_and_ends_no_process(tmp_path, monkeypatch):
    """The directory is deleted with its parent while the command runs, as by a test that cleans up."""
    monkeypatch.setenv("ANYACCEL_STATE_DIR", str(tmp_path / "gone" / "state"))
    (tmp_path / "gone").mkdir()
    script = f"sleep 1000 & echo $!; until test -e {tmp_path}/go; do sleep 0.05; done"
    command = [sys.executable, "-m", "anyaccel", "run", *MACHINE, "APU:1", "--time", "1h", "--", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        child = int(run.stdout.readline())
        assert len(monitors()) == 1
        shutil.rmtree(tmp_path / "gone")
        (tmp_path / "go").touch()
        assert run.wait(PATIENCE) == 0
        until(lambda: not monitors(), "the end of the monitor")
        assert os.path.exists(f"/proc/{child}")
        os.kill(child, signal.SIGKILL)


def test_a_time_limit_that_cannot_be_enforced_is_no_secret(monkeypatch, capfd, tmp_path):
    with take("APU:1", draw_for_process, machine=MACHINE[1], time=3600) as held:
        with monkeypatch.context() as full:
            full.setattr(os, "fork", lambda: os.kill(2**22 + 1, 0))  # an OSError, as when the kernel makes no process
            start_monitor(held)
        assert f"no process can be made to end lease {held.id} at its time limit" in capfd.readouterr().err
        state = Path(held.lease.path)
        state.rename(tmp_path / "former")
        state.symlink_to(tmp_path / "former")
        with pytest.raises(anyaccel.StateDirectoryError, match="symbolic link"):
            start_monitor(held)
        state.unlink()
        (tmp_path / "former").rename(state)


def test_the_monitor_holds_nothing_of_the_callers(anyaccel, lines):
    """No standard stream and no other descriptor: a reader gets to the end when the command has ended."""
    read, write = os.pipe()
    command = [
        sys.executable,
        "-m",
        "anyaccel",
        "run",
        *MACHINE,
        "APU:1",
        "--time",
        "1h",
        "--",
        "sh",
        "-c",
        "setsid sleep 1000 >&- 2>&- <&- 9>&- & echo $!",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[write], text=True) as run:
        os.close(write)
        out, err = run.communicate(timeout=60)
    left = int(out)
    assert err == ""
    assert os.path.exists(f"/proc/{left}")
    os.kill(left, 15)
    assert os.read(read, 1) == b""
    os.close(read)
    assert len(lines(1)) == 1


def test_a_parent_that_ignores_sigchld_costs_no_time_limit(lines):
    command = [sys.executable, "-m", "anyaccel", "run", *MACHINE, "APU:1", "--time", "1s", "--", "sleep", "1000"]
    ignore = (
        f"import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv({sys.executable!r}, {command})"
    )
    done = subprocess.run([sys.executable, "-c", ignore], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "anyaccel: time limit of 1s reached: ended\n")
    assert len(lines(1)) == 1


def test_a_hold_is_given_back_in_time(anyaccel, lines):
    assert anyaccel("hold", *MACHINE, "APU:2", "--time", "1s").returncode == 0
    (line,) = lines(1)
    assert len(line["devices"]) == 2


def test_run_in_python_is_ended_in_time_and_says_how_it_ended(lines):
    done = anyaccel.run("APU:1", ["sh", "-c", "sleep 1000 & wait"], machine="sim:A1:1", time=0.5)
    assert done.returncode == -15
    (line,) = lines(1)
    assert (line["exit"], line["program"]) == (-15, "sh")
    assert anyaccel.run("APU:1", ["true"], machine="sim:A1:1", time=60).returncode == 0
    assert lines(2)[1]["exit"] == 0
    with pytest.raises(subprocess.CalledProcessError):
        anyaccel.run("APU:1", ["sh", "-c", "exit 5"], machine="sim:A1:1", check=True)
    assert lines(3)[2]["exit"] == 5


def test_acquire_says_until_when_and_is_written_down_once(lines):
    with anyaccel.acquire("APU:1", machine="sim:A1:1", time=3600, note="mine") as hold:
        (record,) = anyaccel.leases(hold.launch.inventory)
        assert record.until - record.since == pytest.approx(3600, abs=10)
    hold.release()
    assert [line["note"] for line in lines(1)] == ["mine"]
    with pytest.raises(anyaccel.UsageError, match=r"time must be a number of seconds \(more than 0\)"):
        anyaccel.acquire("APU:1", machine="sim:A1:1", time=0)


def test_what_is_not_given_back_is_written_when_the_program_ends(lines):
    code = "import anyaccel; hold = anyaccel.acquire('APU:1', machine='sim:A1:1')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert len(lines(1)) == 1


@pytest.mark.parametrize("end", ["pool.shutdown()", ""])
def test_a_pool_adds_up_short_leases(lines, end):
    code = (
        "import anyaccel\n"
        "if __name__ == '__main__':\n"
        "    pool = anyaccel.Pool('APU:1', machine='sim:A1:1')\n"
        "    print(sum(pool.map(abs, range(5))))\n"
        f"    {end}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=100, capture_output=True, text=True)
    assert done.stdout == "10\n"
    assert sum(line["leases"] for line in lines(1)) >= 1


def test_a_user_may_do_without_a_journal(anyaccel, tmp_path):
    file = Path(os.environ["XDG_CONFIG_HOME"]) / "anyaccel" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("[journal]\nkeep = false\n")
    file.chmod(0o600)
    with __import__("anyaccel").acquire("APU:1", machine="sim:A1:1"):
        pass
    assert not Path(os.environ["XDG_STATE_HOME"]).exists()


INNER = f"{sys.executable} -m anyaccel"


def test_what_runs_inside_a_lease_is_written_down_when_that_is_ended(anyaccel, lines):
    """All that was started with a lease is asked to end with it, monitors of leases inside it among them."""
    inner = f"{INNER} run APU:1 --note inner -- sh -c 'echo $$; exec sleep 1000'"
    outer = [sys.executable, "-m", "anyaccel", "run", *MACHINE, "APU:2", "--note", "outer", "--", "sh", "-c", inner]
    with subprocess.Popen(outer, stdout=subprocess.PIPE, text=True) as run:
        assert int(run.stdout.readline()) > 0
        (lease,) = {record.id for record in leases(detect(MACHINE[1]))}
        assert anyaccel("release", lease).returncode == 0
    assert sorted(line["note"] for line in lines(2)) == ["inner", "outer"]


def test_an_outer_lease_lasts_as_long_as_an_inner_one_and_no_longer(anyaccel, lines):
    inner = f"{INNER} hold APU:1 --note inner"
    done = anyaccel("run", *MACHINE, "APU:2", "--note", "outer", "--", "sh", "-c", inner)
    held = leases(detect(MACHINE[1]))
    assert {record.note for record in held} == {"outer"}  # the inner one is of its devices, and seen inside only
    assert anyaccel("release", done.stdout.strip()).returncode == 0
    assert sorted(line["note"] for line in lines(2)) == ["inner", "outer"]
    assert Ledger.open().leases() == ()
