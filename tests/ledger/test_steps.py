"""A claimant is killed at, or gets an error from, each of its system calls in turn; all that is left is swept."""

import collections
import contextlib
import os
import re
import shutil
import signal
import subprocess

import pytest
from anyaccel.ledger.entries import boot
from claimant import Claimant, ClaimantError, eventually
from lengths import length

pytestmark = pytest.mark.skipif(
    not shutil.which("strace"), reason="strace is not installed: no step can be interrupted"
)

ERRORS = ["EIO", "ENOSPC", "EMFILE", "EACCES", "ENOLCK", "EINTR", "ESTALE", "EROFS"]
HARMLESS = {"rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "futex", "mmap", "munmap", "brk", "mprotect", "madvise"}
CHANNEL = {"recvfrom", "sendto"}  # what drives the claimant
EVERY = os.environ.get("ANYACCEL_EVERY_STEP")  # with each error at each call, which takes minutes
STRIDE = length(3, 1)
STRIDE_AFTER_A_WAIT = length(7, 1)  # a claim that is made at once takes most of its steps
"""Odd numbers, so that each of the eight errors has its turn."""

WARM = """
import gc, anyaccel.ledger.acquisition, anyaccel.linux.inotify
gc.disable()
anyaccel.ledger.acquisition.IMPATIENT_SECONDS = 0  # the looks before a place in line are all alike
anyaccel.linux.system._libc()  # and what happens in the import system is not ours
"""
UNDISTURBED = """
import anyaccel.ledger.tickets
anyaccel.ledger.tickets.recheck_interval = lambda place: 3600
"""
"""For the steps that each run has: how often one that waits looks again though nothing happened differs."""


class Traced:
    """A claimant with strace attached."""

    def __init__(self, claimant, output, *options):
        self.claimant, self.output = claimant, output
        command = ["strace", "-p", str(claimant.pid), "-o", str(output), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        said = self.process.stderr.readline()
        if "attached" not in said:
            self.process.wait()
            pytest.skip(f"strace cannot attach here: {said.strip()}")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.terminate()
        self.process.communicate()

    def calls(self):
        """Names of the system calls so far."""
        return re.findall(r"^(\w+)\(", self.output.read_text(), re.MULTILINE)


def steps(calls):
    """Each call as its name and the how-many-th of its name it is."""
    counts = collections.Counter()
    for name in calls:
        if name not in HARMLESS | CHANNEL:
            counts[name] += 1
            yield name, counts[name]


def errors(number):
    """The errors to inject into a call: all of them, or one that changes from call to call."""
    return ERRORS if EVERY else [ERRORS[number % len(ERRORS)]]


@pytest.fixture
def scene(claim, state, files, tmp_path):
    """Runs a claimant under strace and makes sure of what it leaves behind."""
    device = tmp_path / "device"
    device.mkdir()
    take = f"take('a', 'b', count=2, wait={{}}, device_locks={{{{'a': [DeviceLock({str(device)!r})]}}}})"
    fresh = claim()

    class Scene:
        wait = 0

        @property
        def code(self):
            return f"{take.format(self.wait)}; give()"

        def run(self, *options):
            """Execute the code; its outcome, or None when the claimant died."""
            claimant = claim()
            claimant.do(WARM if options else WARM + UNDISTURBED)
            holder = None
            if self.wait:
                holder = claim()
                holder.do("take('a')")
            with Traced(claimant, tmp_path / "trace", *options) as traced:
                claimant.begin(self.code)
                if holder:
                    eventually(lambda: any(name.startswith("t1.") for name in files()) or not claimant.busy(0.005))
                    holder.do("give()")
                try:
                    outcome = claimant.end() or "done"
                except EOFError:
                    outcome = None
                except ClaimantError as error:
                    outcome = error.kind
                calls = traced.calls()
            return claimant, outcome, calls

        def all_is_free(self):
            """A fresh claimant gets everything, and nothing is left then."""
            fresh.do(take.format(20))
            fresh.do("give()")
            fresh.do("take('a', 'b', units=5000, count=2, wait=0); give()")
            assert files() == []

    return Scene()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("wait", [0, 20], ids=["at once", "after a wait"])
def test_killed_at_each_step(scene, wait):
    scene.wait = wait
    _, outcome, calls = scene.run()
    assert outcome == "done"
    scene.all_is_free()
    points = list(steps(calls))
    assert {"flock", "getdents64"} <= {name for name, _ in points}
    died = 0
    tried = points[:: STRIDE_AFTER_A_WAIT if wait else STRIDE]
    for name, number in tried:
        claimant, outcome, _ = scene.run("-e", f"trace={name}", "-e", f"inject={name}:signal=KILL:when={number}")
        died += outcome is None
        scene.all_is_free()
        claimant.close()
    # How often a waiter looks is not the same every time, so the last of its steps may not come.
    assert died >= len(tried) * (0.6 if wait else 1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("wait", [0, 20], ids=["at once", "after a wait"])
def test_an_error_at_each_step(scene, wait):
    scene.wait = wait
    _, _, calls = scene.run()
    points = list(steps(calls))
    outcomes = collections.Counter()
    for position, (name, number) in list(enumerate(points))[:: STRIDE_AFTER_A_WAIT if wait else STRIDE]:
        for error in errors(position):
            claimant, outcome, _ = scene.run("-e", f"trace={name}", "-e", f"inject={name}:error={error}:when={number}")
            assert outcome is not None, f"{error} at {name} {number} killed the claimant"
            outcomes[outcome] += 1
            # What it holds after a release that met an error ends with it, and no later.
            claimant.kill()
            scene.all_is_free()
            claimant.close()
    with contextlib.suppress(KeyError):
        del outcomes["done"]
    # An error in a release is not raised; one in a claim is ours, never a bare OSError.
    ours = {"LedgerError", "StateDirectoryError", "LedgerBusyError", "DevicesBusyError", "ConfigurationError"}
    assert set(outcomes) <= ours
    assert outcomes["LedgerError"]


@pytest.fixture
def starved(nest, state, tmp_path):
    """Lets a new claimant ask for the device while system calls find no descriptor left, and once more without that.

    What one process reads first and keeps is read while each of these calls fails in turn, so each turn has a new one.
    """

    def starved(before, *options):
        claimant = Claimant(nest)
        claimant.do(f"import anyaccel.ledger.ending, anyaccel.ledger.recovery, encodings.ascii\n{WARM}")
        claimant.do(before)
        ask = f"open_ledger({str(state)!r}); take('a', device_locks={{'a': [DeviceLock({str(tmp_path)!r})]}})"
        with Traced(claimant, tmp_path / "trace", *options) as traced:
            with pytest.raises(ClaimantError):
                claimant.do(ask)
            injected = "(INJECTED)" in traced.output.read_text()
        with pytest.raises(ClaimantError, match="DevicesBusyError"):
            claimant.do(ask)
        claimant.close()
        return injected

    return starved


def test_without_a_descriptor_a_lease_that_only_its_process_keeps_is_in_force(claim, ledger, state, starved):
    holder = claim()
    holder.do("take('a')")
    for path in state.iterdir():
        path.unlink()
    assert ledger.leases()  # which has made its file again; no process locks that one
    number = 1
    failing = "openat", "pidfd_open"
    while starved("", "-e", f"trace={','.join(failing)}", "-e", f"inject=openat:error=EMFILE:when={number}",
                  "-e", "inject=pidfd_open:error=EMFILE") and number < 20:  # fmt: skip
        number += 1
    assert number > 10


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to look as a user at what another one started")
def test_without_a_descriptor_a_lease_that_only_a_mark_keeps_is_in_force(claim, state, starved):
    """Another user's process is asked through a file, which may be one too many."""
    holder, user = claim(), 61_001
    holder.do("from anyaccel.linux import mark; want = Want(candidates=frozenset('a'), mark=mark.draw)")
    holder.do("mark.put(ledger.acquire(want, chooser('a'), wait=0).mark)")
    child = holder.do("subprocess.Popen(['sleep', '600']).pid")
    holder.kill()
    os.chmod(state, 0o1777)
    (state / f"checked.{boot()}.{user}").touch()
    become = f"os.setgroups([]); os.setresgid({user}, {user}, {user}); os.setresuid({user}, {user}, {user})"
    limits = f"/proc/{child}/limits"
    assert starved(f"import random, pwd; {become}", "-P", limits, "-e", "inject=openat:error=EMFILE:when=1")
    os.kill(child, signal.SIGKILL)


def test_without_a_descriptor_the_lock_on_the_device_itself_is_not_left_out(claim, tmp_path, starved):
    there = claim(tmp_path / "elsewhere")
    there.do(f"take('a', device_locks={{'a': [DeviceLock({str(tmp_path)!r})]}})")
    assert starved("", "-P", str(tmp_path), "-e", "inject=openat:error=EMFILE:when=1")
