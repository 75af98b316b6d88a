"""What doctor says of leases: devices that are held and not used, waits that do not end, a ledger that cannot work."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyaccel as aa
import disks
import pytest
from anyaccel.cli import doctor
from anyaccel.cli.doctor import diagnose_leases
from anyaccel.model import Severity
from waiting import PATIENCE, until

MACHINE = "sim:A1:2"

TELLING = """

from anyaccel.plugin import DeviceProcess, Stats

@hookimpl
def anyaccel_stats(ctx, devices):
    said = json.loads(ctx.read("/sys/class/acme/memory") or "{}")
    return {device.id: Stats(memory_used_bytes=said["used"], processes=()) for device in devices}
"""


@pytest.fixture
def state() -> Path:
    """Where the leases of this test lie."""
    return Path(os.environ["ANYACCEL_STATE_DIR"])


@pytest.fixture
def start(acme: object, state: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start programs of ours; all have ended, with what they started, when the test is over."""
    started = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "anyaccel", *arguments]
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        )
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=PATIENCE)


def wrong(machine: str = MACHINE) -> list[tuple[str, str]]:
    found = diagnose_leases(aa.detect(machine))
    return [(each.reason, each.remedy) for each in found if each.severity is not Severity.OK]


@contextlib.contextmanager
def locked(state: Path) -> Iterator[None]:
    """No other process has the ledger locked meanwhile: doctor would report that first, and rightly."""
    descriptor = os.open(state, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def stop(process: subprocess.Popen[str], state: Path) -> None:
    with locked(state):
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)


def until_held(state: Path) -> None:
    """Wait for a lease, and until who took it has unlocked the ledger, too."""
    until(lambda: aa.leases(aa.detect(MACHINE)), "the lease")
    with locked(state):
        pass


def named(state: Path, first: str) -> list[Path]:
    return [path for path in state.iterdir() if path.name.startswith(first)]


def test_nothing_is_wrong_with_what_is_in_use(start, state, anyaccel):
    start("--machine", MACHINE, "run", "A1:1", "--", "sleep", "1000")
    until_held(state)
    done = anyaccel("doctor", "--machine", MACHINE)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"ok    leases are kept in {state} (")
    assert anyaccel("doctor", "--quiet", "--machine", MACHINE).stdout == ""


def test_a_device_that_is_quarantined(acme, record, anyaccel):
    acme.write_text(acme.read_text() + TELLING)
    machine = Path(record({}))

    def say(used: int) -> None:
        recording = json.loads((machine / "machine.json").read_text())
        recording["paths"]["/sys/class/acme/memory"] = {"text": json.dumps({"used": used})}
        (machine / "new").write_text(json.dumps(recording))
        (machine / "new").rename(machine / "machine.json")

    say(0)
    with aa.Pool("A1:1", machine=str(machine)) as pool:
        before = pool.submit(pow, 2, 2)
        before.result()
        say(8 << 30)
        try:
            with pytest.raises(aa.BrokenWorkerError):
                pool.submit(os._exit, 1).result()
            reason = "acme-s0 has 8192 MiB in use, and no process that uses them"
            until(lambda: reason in str(wrong(str(machine))), "the reason")
            ((message, fix),) = wrong(str(machine))
            (record_,) = aa.leases(aa.detect(str(machine)))
            assert message.startswith(f"acme/0 (acme-s0) is quarantined by process {os.getpid()} of ")
            assert message.endswith(reason)
            assert f"anyaccel release {record_.id}" in fix
            assert (record_.state, record_.reason, record_.request) == ("quarantined", reason, "A1:1")
            assert abs(record_.since - time.time()) < 3600  # what was written since does not count
            done = anyaccel("doctor", "--quiet", "--machine", str(machine))
            assert (done.returncode, done.stdout.count("\n")) == (1, 1)
            assert "(quarantined: anyaccel doctor says why)" in anyaccel("--machine", str(machine)).stdout
        finally:
            say(0)
        assert pool.submit(pow, 2, 3).result() == 8
    assert wrong(str(machine)) == []


def test_what_a_holder_left_running(start, state):
    left = "import subprocess, sys; subprocess.Popen(['sleep', '1000'], close_fds=False)"
    holder = start("--machine", MACHINE, "run", "A1:1", "--", sys.executable, "-c", left)
    holder.wait(PATIENCE)
    ((message, fix),) = wrong()
    (lease,) = aa.leases(aa.detect(MACHINE))
    (carrier,) = lease.carriers
    assert f"is kept: process {carrier} (" in message
    assert carrier != holder.pid
    assert fix.startswith(f"'anyaccel release {lease.id}' ends the processes that keep its device; ")


def test_a_holder_that_is_stopped(start, state):
    holder = start("--machine", MACHINE, "run", "A1:1", "--", "sleep", "1000")
    until_held(state)
    stop(holder, state)
    ((message, fix),) = wrong()
    assert f"process {holder.pid} is stopped" in message
    assert fix.startswith(f"it goes on with 'kill -CONT {holder.pid}', or: anyaccel release ")


def test_who_waits_for_long_and_for_whom(start, state, monkeypatch):
    start("--machine", MACHINE, "run", "A1:2", "--note", "evaluation", "--", "sleep", "1000")
    until_held(state)
    waiting = start("--machine", MACHINE, "run", "A1:1", "--", "true")
    until(lambda: named(state, "t1."), "the ticket")
    until(lambda: not wrong(), "nothing to be wrong")  # it has waited for a moment only
    monkeypatch.setattr(doctor, "LONG_SECONDS", 0.0)
    said = ": A1:1 does not fit now: 0 of 2 A1 free; you have acme/0-1 (evaluation, lease "
    (message,) = until(lambda: [message for message, _ in wrong() if said in message], "a wait for long")
    assert message.startswith(f"process {waiting.pid} of ")
    assert " has waited for A1:1 for " in message
    assert "evaluation" in message


def test_who_waits_and_does_not_look(start, state):
    start("--machine", MACHINE, "run", "A1:2", "--", "sleep", "1000")
    until_held(state)
    waiting = start("--machine", MACHINE, "run", "A1:1", "--", "true")
    until(lambda: named(state, "t1."), "the ticket")
    stop(waiting, state)
    message, fix = until(wrong, "doctor to notice")[0]
    assert message.startswith(f"process {waiting.pid} of ")
    assert message.endswith("and has stopped")
    assert f"kill -CONT {waiting.pid}" in fix


def test_a_lease_of_another_version(start, state):
    name = next(iter(aa.detect(MACHINE).devices)).id
    holder = start("--machine", MACHINE, "run", "A1:1", "--", "sleep", "1000")
    until_held(state)
    (file,) = named(state, "v2.")
    device, vendor = file.name.split(".")[1:3]
    file.rename(file.with_name(f"v9.{device}.{vendor}.new"))
    ((message, fix),) = wrong()
    assert message.startswith(f"acme/0 ({name}) counts as held: 'v9.")
    assert fix.startswith("use one version of anyaccel for all")
    assert holder.poll() is None


# The state directory


@pytest.mark.parametrize("trouble", ["mode", "link", "file"])
def test_a_state_directory_that_must_not_be_used(acme, state, anyaccel, trouble, tmp_path):
    shutil.rmtree(state)
    if trouble == "mode":
        state.mkdir()
        state.chmod(0o777)
    elif trouble == "link":
        (tmp_path / "elsewhere").mkdir()
        state.symlink_to(tmp_path / "elsewhere")
    else:
        state.touch()
    done = anyaccel("doctor", "--quiet", "--machine", MACHINE)
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"fail  the state directory {state} ")
    assert (
        line.split("  ->  ")[1]
        == {
            "mode": f"'chmod 1777 {state}'",
            "link": "set ANYACCEL_STATE_DIR to a directory of your own",
            "file": "set ANYACCEL_STATE_DIR to a directory of your own",
        }[trouble]
    )


def test_a_state_directory_that_another_process_keeps_locked(acme, state):
    hold = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", hold, str(state)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        holder.stdout.readline()
        ((message, fix),) = wrong()
        holder.communicate("\n", timeout=PATIENCE)
    assert f"has been locked for 1 s by process {holder.pid}" in message
    assert fix == "end it, then try again"
    assert wrong() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount file systems and become other users")
def test_a_full_and_a_read_only_file_system(acme, state):
    with disks.mounted(state, "size=16k,mode=700"):
        assert any("is full, so that no devices can be taken" in message for message, _ in wrong())
        subprocess.run(["mount", "-o", "remount,size=16M", str(state)], check=True)
        assert wrong() == []
        subprocess.run(["mount", "-o", "remount,ro", str(state)], check=True)
        ((message, fix),) = wrong()
        assert message.endswith("cannot be written by this user, since its file system is read-only")
        assert fix == "mount it for writing, or set ANYACCEL_STATE_DIR"


def test_where_processes_cannot_be_marked(acme, state):
    command = ["prlimit", "--locks=5:5", sys.executable, "-m", "anyaccel", "--machine", MACHINE, "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (message,) = [
        found["message"] for found in json.loads(done.stdout)["findings"] if "RLIMIT_LOCKS" in found["message"]
    ]
    assert message.endswith("the hard limit RLIMIT_LOCKS is 5, which an administrator has set")
    assert not [found for found in diagnose_leases(aa.detect(MACHINE)) if "RLIMIT_LOCKS" in found.reason]
