"""A device is taken until all that was started with it is gone; a lease covers what was started with it."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyaccel as aa
import preloaded
import pytest
from anyaccel.cli.parser import APART
from anyaccel.launcher import start as starting
from anyaccel.ledger import Ledger
from anyaccel.linux import mark
from lengths import length
from waiting import PATIENCE, until

DECLARED = {"GPU": 2}
OURS = [sys.executable, "-m", "anyaccel", "--declare", "GPU=2"]
HOLDS = length(8, 20)
"""How often a hold is disturbed."""


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch):
    monkeypatch.setenv("ANYACCEL_PLUGINS", "none")


def ours(command, *arguments, **options):
    program = OURS[:3] if command in APART else OURS  # they look at no machine
    return preloaded.run([*program[3:], command, *arguments], **options)


def leave(*command):
    """Run a command on devices that leaves something behind, which must not have our pipes."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    preloaded.start([*OURS[3:], "run", *command], **quiet).wait(60)


def leases():
    return aa.leases(aa.detect(declare=DECLARED))


def left_behind():
    """The process that keeps the devices; it is ended."""
    (carriers,) = {lease.carriers for lease in leases()}
    for pid in carriers:
        os.kill(pid, signal.SIGKILL)
    return carriers


# What keeps a device


SPAWN = """
import multiprocessing, os, time
THERE = __file__ + ".there"
def stay():
    os.mkdir(THERE)
    time.sleep(600)
if __name__ == "__main__":
    multiprocessing.get_context({way!r}).Process(target=stay).start()
    while not os.path.exists(THERE):
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
"""
CLEAN = """
import os, subprocess
subprocess.Popen(["sleep", "600"], env={{}}, start_new_session=True, stdout=subprocess.DEVNULL)
os.kill(os.getpid(), {number})
"""


@pytest.mark.parametrize(
    "program",
    [SPAWN.format(way="spawn"), SPAWN.format(way="forkserver"), CLEAN.format(number=9), CLEAN.format(number=0)],
    ids=["spawn", "forkserver", "clean, killed", "clean, ended"],
)
def test_what_a_program_leaves_behind_keeps_its_device(tmp_path, program):
    (tmp_path / "program.py").write_text(program)
    leave("GPU:2", "--", sys.executable, str(tmp_path / "program.py"))
    refused = ours("run", "GPU:1", "--no-wait", "--", "true")
    assert refused.returncode == 4
    assert "of the ended lease still run" in refused.stderr
    assert "anyaccel release " in refused.stderr
    carriers = left_behind()
    assert len(carriers) > ("multiprocessing" in program)  # which has a process for itself, too
    assert ours("run", "GPU:2", "--wait", "30s", "--", "true").returncode == 0


def test_a_shell_that_overwrites_descriptors():
    line = "exec 3>/dev/null 4>/dev/null 5>/dev/null 6>/dev/null; (sleep 600)& sleep 0.2; kill -9 $$"
    leave("GPU:1", "--", "bash", "-c", line)
    assert [lease.state for lease in leases()] == ["kept"]
    left_behind()


@pytest.mark.parametrize("options", [{}, {"timeout": 0.3}], ids=["it ends", "it takes too long"])
def test_what_a_call_leaves_behind_keeps_its_device(options):
    command = "sleep 600 >/dev/null 2>&1 & " + ("sleep 600" if options else "")
    for more in (1, 10, 100):  # so that all has begun by then
        with contextlib.suppress(subprocess.TimeoutExpired):
            limits = {name: seconds * more for name, seconds in options.items()}
            aa.run("GPU:1", ["sh", "-c", command], declare=DECLARED, **limits)
        if [len(lease.carriers) for lease in leases()] == [1 + bool(options)]:
            break
        for pid in [pid for lease in leases() for pid in lease.carriers]:
            os.kill(pid, signal.SIGKILL)
    (lease,) = leases()
    assert (lease.state, len(lease.carriers)) == ("kept", 1 + bool(options))
    with pytest.raises(aa.NotFreeError, match="of the ended lease still run") as caught:
        aa.run("GPU:2", ["true"], declare=DECLARED, wait=0)
    assert "release --forget" in caught.value.hint
    left_behind()
    assert aa.run("GPU:2", ["true"], declare=DECLARED, wait=PATIENCE).returncode == 0


def test_json_says_who_keeps_a_device():
    leave("GPU:1", "--", "sh", "-c", "sleep 600 >/dev/null 2>&1 &")
    devices = json.loads(ours("--json").stdout)["devices"]
    (holder,) = [holder for device in devices for holder in device["holders"]]
    (carrier,) = holder["carriers"]
    assert holder["reason"].startswith(f"kept: process {carrier} (")
    (kept,) = json.loads(ours("queue", "--json").stdout)["kept"]
    assert (kept["lease"], kept["carriers"]) == (holder["lease"], [carrier])
    why = json.loads(ours("why", "GPU:2", "--json").stdout)
    assert why["ways_out"] == [holder["hint"]]
    assert f"kept: process {carrier}" in why["message"]
    done = ours("release", holder["lease"], "--json")
    assert json.loads(done.stdout)["released"] == {holder["lease"]: [carrier]}
    assert ours("run", "GPU:2", "--no-wait", "--", "true").returncode == 0


def test_a_device_is_given_back_whatever_still_runs():
    leave("GPU:2", "--", "sh", "-c", "sleep 600 >/dev/null 2>&1 &")
    (carrier,) = {pid for lease in leases() for pid in lease.carriers}
    lease_id = leases()[0].id
    done = ours("release", "--forget", lease_id, "--json")
    assert json.loads(done.stdout)["running"] == {lease_id: [carrier]}
    assert ours("run", "GPU:2", "--no-wait", "--", "true").returncode == 0
    os.kill(carrier, signal.SIGKILL)


# A command with a mark


def test_popen_keeps_the_devices_until_its_tree_has_ended():
    with aa.acquire("GPU:1", declare=DECLARED) as lease:
        command = "env -i setsid sh -c 'sleep 600' >/dev/null 2>&1 & printenv ANYACCEL_DEVICES"
        with lease.popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True) as process:
            assert process.communicate()[0].strip() == lease.devices[0].id
        assert process.returncode == 0
    (kept,) = leases()
    assert (kept.state, kept.id) == ("kept", lease.id)
    assert ours("run", "GPU:2", "--no-wait", "--", "true").returncode == 4
    left_behind()
    until(lambda: not leases(), "the end of the leases")


def test_popen_inside_of_three_leases_gives_back_at_once():
    """There is no fourth mark: what it starts carries that of the process, which lives on."""
    code = (
        "import anyaccel as aa, subprocess\n"
        "with aa.acquire('GPU:1', declare={'GPU': 2}) as lease:\n"
        "    lease.popen(['sleep', '0.1']).wait()\n"
        "assert aa.leases(aa.detect(declare={'GPU': 2})) == (), 'it is kept'"
    )
    inner = [*OURS, "run", "GPU:1", "--no-wait", "--"]
    subprocess.run([*inner * 2, sys.executable, "-c", code], check=True, timeout=60)


def test_a_release_is_the_callers_word_for_all_else():
    with aa.acquire("GPU:1", declare=DECLARED) as lease:
        child = subprocess.Popen(["sleep", "600"])
        assert mark.carries(child.pid, lease.lease.mark)
    assert leases() == ()
    child.kill()
    child.wait()


@pytest.mark.parametrize("tool", ["prlimit", ""], ids=["prlimit", "interpreter"])
class TestStart:
    """The same errors, descriptors and streams as without a mark, with either program that puts it on."""

    @pytest.fixture(autouse=True)
    def tool_is(self, tool, monkeypatch):
        starting._prlimit.cache_clear()
        if not tool:
            monkeypatch.setattr(starting, "_prlimit", lambda: None)

    @staticmethod
    def start(command, **options):
        found = mark.draw()
        options = {"stdout": subprocess.PIPE, "text": True} | options
        with starting.start_marked(command, found, **options) as process:
            out = process.communicate()[0]
        return process.returncode, out

    def test_it_carries_the_mark_from_its_first_instruction_on(self):
        found = mark.draw()
        with starting.start_marked(["cat", "/proc/self/limits"], found, stdout=subprocess.PIPE, text=True) as process:
            out = process.communicate()[0]
        assert f" {mark.limit(found)} " in next(line for line in out.splitlines() if line.startswith("Max file locks"))

    def test_arguments_environment_and_directory(self, tmp_path):
        shell = 'printf "%s|" "$0" "$@" "$X"; pwd'
        command = ["/bin/sh", "-c", shell, "a b", "-c", "--", "$X"]
        code, out = self.start(command, env={"X": "é", "PATH": os.environ["PATH"]}, cwd=tmp_path)
        assert (code, out) == (0, f"a b|-c|--|$X|é|{tmp_path}\n")

    def test_a_shell(self):
        assert self.start("exit 7", shell=True)[0] == 7
        assert self.start("echo $0", shell=True, executable="/bin/bash")[1].strip().endswith("sh")

    def test_another_program_than_its_name(self):
        assert self.start(["name", "-c", "echo $0"], executable="/bin/sh")[1] == "name\n"

    def test_signals_are_as_they_would_be(self):
        """What Python ignores is not ignored in the command."""
        command = ["sh", "-c", "grep SigIgn /proc/self/status"]
        without = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        # 32 and 33 are glibc's own signals, which its posix_spawn() ignores in the child, and vfork() does not.
        with_mark, without = (int(told.split()[1], 16) & ~(0b11 << 31) for told in (self.start(command)[1], without))
        assert with_mark == without

    def test_what_is_not_there(self, tmp_path):
        with pytest.raises(FileNotFoundError) as caught:
            self.start(["no-such-program"])
        assert caught.value.filename == "no-such-program"
        (tmp_path / "text").write_text("")
        with pytest.raises(PermissionError):
            self.start([str(tmp_path / "text")])
        with pytest.raises(FileNotFoundError):
            self.start(["no-such-program"], env={"PATH": ""})
        with pytest.raises(FileNotFoundError, match="nowhere"):
            self.start(["true"], cwd="/nowhere")

    def test_a_program_relative_to_its_directory(self, tmp_path):
        (tmp_path / "program").write_text("#!/bin/sh\necho here\n")
        (tmp_path / "program").chmod(0o755)
        assert self.start(["./program"], cwd=tmp_path) == (0, "here\n")


# A lease that the environment names


def test_a_stale_lease_counts_for_nothing():
    """Take the variables of a hold that has ended: its device is another's by now."""
    with aa.acquire("GPU:1", declare=DECLARED) as lease:
        stale = {name: lease.environ[name] for name in lease.environ if name.startswith("ANYACCEL_")}
    with aa.acquire("GPU:2", declare=DECLARED):
        done = ours("run", "GPU:1", "--no-wait", "--", "true", env={**os.environ, **stale})
        assert done.returncode == 4
        assert f"the lease '{lease.id}', which ANYACCEL_LEASE names, is ignored: it has ended" in done.stderr
        code = (
            "import anyaccel as aa\n"
            "assert aa.current() is None and aa.current() is None\n"
            "print([device.visible for device in aa.detect(declare={'GPU': 2}).devices])"
        )
        python = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **stale}, capture_output=True, text=True, check=True
        )
        assert python.stdout.strip() == "[True, True]"
        assert python.stderr.count("is ignored: it has ended") == 1


def test_a_lease_covers_what_was_started_with_it_alone():
    with aa.acquire("GPU:1", declare=DECLARED) as lease:
        seen = subprocess.run(
            [*OURS, "run", "GPU:1", "--no-wait", "--", "printenv", "ANYACCEL_DEVICES"],
            env=dict(lease.environ), capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert seen.stdout.strip() == lease.devices[0].id
    holder = subprocess.Popen(
        [*OURS, "run", "GPU:1", "--", "sh", "-c", "env -0; echo END; exec sleep 600"], stdout=subprocess.PIPE
    )
    try:
        pairs = []
        until(
            lambda: pairs.append(os.read(holder.stdout.fileno(), 1 << 16)) or b"".join(pairs).endswith(b"\0END\n"),
            "its environment",
        )
        found = dict(
            pair.split("=", 1) for pair in b"".join(pairs).decode().split("\0") if pair.startswith("ANYACCEL_")
        )
        done = ours("run", "GPU:2", "--no-wait", "--", "true", env={**os.environ, **found})
        assert done.returncode == 4
        assert "is ignored: this process was not started with it" in done.stderr
    finally:
        holder.kill()
        holder.communicate()


def test_leases_nest_and_the_fourth_has_the_lock_alone():
    inner = [*OURS, "run", "GPU:1", "--no-wait", "--"]
    done = subprocess.run(
        [*inner * 5, "sh", "-c", "echo $ANYACCEL_DEVICES; grep 'file locks' /proc/self/limits"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    device, limit = done.stdout.splitlines()
    held = leases()  # the monitor of an inner run carries the outer mark, and notices the end a moment later
    assert not held or device == held[0].device
    until(lambda: not leases(), "the end of the leases")
    assert len(mark.parse(int(limit.split()[3]))) == 3


# Hold


def settled(ledger, target):
    """What was printed, and the leases, once nothing is held that was not printed; None before."""
    found = "" if target == "/dev/full" else Path(target).read_text().strip()
    held = {lease.id for lease in ledger.leases()}
    return (found, held) if held <= {found} else None


def test_what_hold_prints_is_held_and_what_is_held_was_printed(tmp_path):
    """Full outputs, and signals at any moment, to the command and to the child that is to hold the device."""
    rng = random.Random(5)
    ledger = Ledger.open()
    printed = 0
    for number in range(HOLDS):
        full = rng.random() < 0.3
        target = "/dev/full" if full else str(tmp_path / f"out{number}")
        with open(target, "w") as out:
            command = subprocess.Popen([*OURS, "hold", "GPU:1"], stdout=out, stderr=subprocess.DEVNULL)
        victim = 0
        if rng.random() < 0.8:
            time.sleep(rng.uniform(0, 0.35))
            victims = [command.pid]
            with contextlib.suppress(OSError):
                victims += map(int, Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split())
            victim = rng.choice(victims)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, rng.choice((signal.SIGINT, signal.SIGTERM, signal.SIGKILL)))
        command.wait(PATIENCE)
        # A child whose parent was killed is killed next.
        found, held = until(lambda target=target: settled(ledger, target), "what is held to be what was printed")
        if command.returncode == 0:
            assert held or victim not in (0, command.pid)  # it may have been the holder already
            printed += 1
        if held:
            released = ours("release", found)
            # Its holder may have been killed, and be about to go.
            assert released.returncode == 0 or (victim and not ledger.leases()), released.stderr
        assert full is False or command.returncode != 0
    assert printed


@pytest.mark.parametrize("options", [(), ("--export",)])
def test_hold_whose_reader_has_gone_says_that_nothing_is_held(options):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*OURS, "hold", "GPU:1", *options], stdout=writer, stderr=-1, text=True, check=False)
    os.close(writer)
    assert done.returncode == 1
    assert "nothing is held: the reader of standard output has gone" in done.stderr
    assert leases() == ()


def test_hold_prints_nothing_that_makes_others_nest():
    done = ours("hold", "GPU:1", "--json")
    held = json.loads(done.stdout)
    assert "ANYACCEL_LEASE" not in held["set"]
    assert "ANYACCEL_ALLOCATION" not in held["set"]
    assert held["set"]["ANYACCEL_DEVICES"] == held["devices"][0]
    (lease,) = leases()
    assert (lease.id, lease.pid, lease.command) == (held["lease"], held["pid"], lease.command)
    assert ours("release", held["lease"]).returncode == 0


def test_what_holds_is_called_the_same_from_the_beginning():
    """Here it is also where it has no program to become."""
    held = json.loads(ours("hold", "GPU:1", "--json", env={**os.environ, "PATH": "/nowhere"}).stdout)
    assert Path(f"/proc/{held['pid']}/comm").read_text() == "sleep\n"
    assert ours("release", held["lease"]).returncode == 0


def test_hold_says_why_it_fails():
    with open("/dev/full", "w") as out:
        done = subprocess.run([*OURS, "hold", "GPU:1"], stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "standard output cannot be written: No space left on device" in done.stderr
    assert leases() == ()
    assert ours("hold", "GPU:3").returncode == 3
    assert ours("hold", "GPU:3,else=cpu").returncode == 0
    with aa.acquire("GPU:1", declare=DECLARED):
        assert ours("hold", "GPU:2", "--no-wait").returncode == 4
