"""A vendor changes devices when they are given, and undoes that when they are given back, whatever ends the holder."""

import asyncio
import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyaccel as aa
import cloudpickle
import pytest
from anyaccel.errors import PluginError
from anyaccel.ledger import Ledger
from anyaccel.linux import system
from anyaccel.model import replace
from anyaccel.vendors import contract
from two_plugins import plugin
from waiting import PATIENCE, until

HOOK = """

import os, signal, time
from pathlib import Path

ROOT = Path({root!r})


@hookimpl
def anyaccel_handover(devices, ctx, given):
    for device in devices:
        state = ROOT / device.id
        with (ROOT / "log").open("a") as log:
            print(device.id, "given" if given else "idle", file=log)
        state.write_text("half")
        failure = ROOT / ("fail-given" if given else "fail-idle")
        if failure.exists():
            if failure.read_text() == "hang":
                (ROOT / "hangs").touch()
                signal.pause()
            raise OSError(failure.read_text())
        state.write_text("given" if given else "idle")
"""
HOLDER = """
import signal, sys
import anyaccel as aa
lease = aa.acquire(sys.argv[1])
print("held", flush=True)
signal.pause()
"""


class Machine:
    """The state of the devices of the vendor with the hook, as its tool would show it."""

    def __init__(self, root):
        self.root = root

    def state(self, device="a"):
        path = self.root / device
        return path.read_text() if path.exists() else ""

    def calls(self):
        path = self.root / "log"
        return path.read_text().splitlines() if path.exists() else []

    def fail(self, when, how="the driver refuses"):
        (self.root / f"fail-{when}").write_text(how)

    def mend(self, when):
        (self.root / f"fail-{when}").unlink()

    def wait_until_it_hangs(self):
        until((self.root / "hangs").exists, "the hook to hang")


@pytest.fixture
def machine(install, tmp_path):
    root = tmp_path / "devices"
    root.mkdir()
    install("acme", plugin("acme", 'id="a"', 'id="b"') + HOOK.format(root=str(root)))
    install("other", plugin("other", 'id="c"'))
    return Machine(root)


@pytest.fixture
def short_deadline(monkeypatch):
    """Give a hook that hangs two seconds, not ten."""
    hook = replace(contract.HOOKS["handover"], seconds=2.0)
    monkeypatch.setattr(contract, "HOOKS", {**contract.HOOKS, "handover": hook})


def holder(request):
    """Start a process that acquires devices, and prints a line when it has them."""
    return subprocess.Popen([sys.executable, "-c", HOLDER, request], stdout=-1, stderr=-1, text=True)


def leases():
    return aa.leases(aa.detect())


def command(*words):
    return subprocess.run(
        [sys.executable, "-m", "anyaccel", *words], capture_output=True, text=True, check=False, timeout=PATIENCE
    )


# Given and given back


def test_devices_are_changed_before_the_holder_has_them_and_back_after_it(machine):
    with aa.acquire("acme/0"):
        assert machine.state() == "given"
    assert machine.state() == "idle"
    assert machine.calls() == ["a idle", "a given", "a idle"]


def test_devices_of_a_lease_on_behalf_stay_changed_until_its_release(machine):
    code = "import os, signal, anyaccel as aa\naa.acquire_on_behalf('acme/0', 'pod 7', seconds=600)\n"
    taker = subprocess.run([sys.executable, "-c", code + "os.kill(os.getpid(), signal.SIGKILL)"], check=False)
    assert taker.returncode == -signal.SIGKILL
    assert machine.state() == "given"
    lease = aa.acquire_on_behalf("acme/0", "pod 7", seconds=600)
    assert machine.calls() == ["a idle", "a given"]  # not once more, while the pod runs
    lease.release()
    assert machine.state() == "idle"


def test_a_release_on_behalf_that_cannot_plan_the_way_back_keeps_the_lease_for_another_one(machine):
    environ = dict(os.environ)
    lease = aa.acquire_on_behalf("acme/0", "pod 7", seconds=600, environ=environ)
    environ |= {"ANYACCEL_LEASE": "x", "ANYACCEL_ALLOCATION": "no allocation"}
    with pytest.raises(aa.UsageError, match="ANYACCEL_ALLOCATION"):
        lease.release()
    assert (len(leases()), machine.state()) == (1, "given")
    del environ["ANYACCEL_LEASE"], environ["ANYACCEL_ALLOCATION"]
    lease.release()
    assert (leases(), machine.state()) == ((), "idle")


def test_devices_of_a_lease_on_behalf_are_put_back_although_a_process_keeps_the_lock(install, tmp_path, monkeypatch):
    machine = Machine(tmp_path)
    install("acme", plugin("acme", 'id="a", nodes=("/dev/full",)') + HOOK.format(root=str(tmp_path)))
    lease = aa.acquire_on_behalf("acme/0", "pod 7", seconds=600, wait=PATIENCE)  # other tests have it, too
    (file,) = (path for path in Path(Ledger.open().path).iterdir() if lease.id in path.name)
    lock = os.path.realpath("/sys/dev/char/1:7")
    keep = f"exec 8<{file} 9<{lock}; flock 8; flock -s 9; echo; read forever"
    with subprocess.Popen(["bash", "-c", keep], stdin=-1, stdout=-1) as process:
        assert process.stdout.readline()

        def refuse(*_):
            raise PermissionError(errno.EPERM, "ptrace_scope")  # as the kernel may answer pidfd_getfd

        monkeypatch.setattr(system, "syscall", refuse)
        with pytest.raises(aa.LedgerError, match=f"kept by process {process.pid}"):
            lease.release()
        assert machine.state() == "idle"
        process.communicate()


def test_a_descriptor_that_a_process_closes_during_a_release_keeps_no_lock(install, tmp_path, monkeypatch):
    install("acme", plugin("acme", 'id="a", nodes=("/dev/full",)'))
    lease = aa.acquire_on_behalf("acme/0", "pod 7", seconds=600, wait=PATIENCE)  # other tests have it, too
    (file,) = (path for path in Path(Ledger.open().path).iterdir() if lease.id in path.name)
    keep = f"exec 8<{file} 9<{os.path.realpath('/sys/dev/char/1:7')}; flock 8; flock -s 9; echo; read forever"
    with subprocess.Popen(["bash", "-c", keep], stdin=-1, stdout=-1) as process:
        assert process.stdout.readline()

        def close(*_):
            process.communicate()
            raise OSError(errno.EBADF, "closed just now")

        monkeypatch.setattr(system, "syscall", close)
        lease.release()
    assert leases() == ()


def test_a_taker_that_was_killed_in_between_is_completed(machine):
    machine.fail("given", "hang")
    code = "import anyaccel as aa\naa.acquire_on_behalf('acme/0', 'pod 7', seconds=600)\n"
    with subprocess.Popen([sys.executable, "-c", code]) as taker:
        machine.wait_until_it_hangs()
        taker.kill()
    machine.mend("given")
    lease = aa.acquire_on_behalf("acme/0", "pod 7", seconds=600)
    assert machine.state() == "given"
    lease.release()
    assert machine.state() == "idle"


def test_what_an_earlier_holder_left_changed_is_not_given_to_a_taker_that_was_killed_before(machine):
    with holder("acme/0") as earlier:
        assert earlier.stdout.readline()
        earlier.kill()
    (file,) = Path(Ledger.open().path).glob("handover.*")
    code = "import anyaccel as aa\naa.acquire_on_behalf('acme/0', 'pod 7', seconds=600)\n"
    with file.open() as handover:
        fcntl.flock(handover, fcntl.LOCK_EX)  # the taker comes no further
        with subprocess.Popen([sys.executable, "-c", code]) as taker:
            until(leases, "the lease of the taker")
            taker.kill()
    assert machine.calls() == ["a idle", "a given"]
    lease = aa.acquire_on_behalf("acme/0", "pod 7", seconds=600)
    assert machine.calls() == ["a idle", "a given"] * 2
    lease.release()
    assert machine.state() == "idle"


def test_only_the_devices_of_the_lease_are_changed(machine):
    with aa.acquire("acme/1 other:1"):
        assert (machine.state("a"), machine.state("b")) == ("", "given")


def test_a_vendor_without_the_hook_is_not_called(machine):
    with aa.acquire("other:1"):
        pass
    assert machine.calls() == []


def test_the_first_of_several_holders_gives_and_the_last_takes_back(machine):
    first, second = aa.acquire("acme/0:0.5"), aa.acquire("acme/0:0.5")
    assert machine.calls() == ["a idle", "a given"]
    first.release()
    assert machine.state() == "given"
    second.release()
    assert machine.calls() == ["a idle", "a given", "a idle"]


def test_a_lease_inside_a_lease_changes_nothing(machine):
    with aa.use("acme/0"), aa.acquire("acme:0.5"):
        assert machine.calls() == ["a idle", "a given"]


def test_a_simulated_machine_is_not_changed(machine, install):
    products = plugin("made", resource="MADE", products=[("Made-One",)])
    install("made", products + HOOK.format(root=str(machine.root)))
    with aa.acquire("made:1", machine="sim:Made-One:1"):
        pass
    assert machine.calls() == []


@pytest.mark.usefixtures("short_deadline")
def test_a_loop_goes_on_while_a_vendor_takes_long(machine):
    machine.fail("given", "hang")

    async def work():
        pending = asyncio.create_task(aa.acquire_async("acme/0"))
        while not (machine.root / "hangs").exists():  # noqa: ASYNC110 - another process makes the file
            await asyncio.sleep(0.01)
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending

    asyncio.run(work())
    assert machine.state() == "idle"
    assert not leases()


def test_a_scheduler_hands_over_what_it_allocates(machine):
    scheduler = aa.open_scheduler(aa.detect(), shared=True)
    allocation = scheduler.allocate("acme/0")
    ticket = scheduler.submit("acme/0")
    assert machine.state() == "given"
    scheduler.release(allocation)
    second = until(lambda: ticket.allocation, "the ticket")
    assert machine.state() == "given"
    scheduler.release(second)
    assert machine.state() == "idle"


@pytest.fixture
def by_value():
    """Methods of this module travel by value: workers cannot import it."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.usefixtures("by_value")
def test_a_pool_hands_over_before_a_call_and_takes_back_after_it(machine):
    with aa.Pool() as pool:
        assert pool.options(needs="acme/0").submit(machine.state).result(timeout=PATIENCE) == "given"
    until(lambda: machine.state() == "idle", "the device to be idle")


# The command line


def test_the_command_of_run_finds_its_device_given_and_leaves_it_idle(machine):
    done = command("run", "acme/0", "--", "cat", str(machine.root / "a"))
    assert (done.returncode, done.stdout) == (0, "given"), done.stderr
    until(lambda: machine.state() == "idle", "the device to be idle")


def test_after_sigkill_of_the_command_of_run_the_device_is_idle(machine):
    done = command("run", "acme/0", "--", "sh", "-c", "kill -KILL $$")
    assert done.returncode in {137, -signal.SIGKILL}
    until(lambda: machine.state() == "idle", "the device to be idle")


# Failures


def test_a_vendor_that_fails_to_give_is_named_and_nothing_stays_held(machine):
    machine.fail("given")
    with pytest.raises(PluginError, match="the driver refuses") as caught:
        aa.acquire("acme/0")
    assert "anyaccel_handover" in str(caught.value)
    assert machine.state() == "idle"
    assert not leases()
    with aa.acquire("other:1"):
        pass


@pytest.mark.usefixtures("by_value")
def test_a_vendor_that_fails_in_a_pool_fails_the_call_alone(machine):
    machine.fail("given")
    with aa.Pool() as pool:
        refused = pool.options(needs="acme/0").submit(machine.state)
        with pytest.raises(PluginError, match="the driver refuses"):
            refused.result(timeout=PATIENCE)
        machine.mend("given")
        assert pool.options(needs="acme/0").submit(machine.state).result(timeout=PATIENCE) == "given"


@pytest.mark.usefixtures("short_deadline")
def test_a_vendor_that_hangs_in_a_pool_holds_up_no_other_vendor(machine):
    machine.fail("given", "hang")
    with aa.Pool() as pool:
        hanging = pool.options(needs="acme/0").submit(machine.state)
        machine.wait_until_it_hangs()
        assert pool.options(needs="other:1").submit(os.getpid).result(timeout=PATIENCE)
        assert not hanging.done()
        with pytest.raises(PluginError, match="did not answer within"):
            hanging.result(timeout=PATIENCE)
    until(lambda: machine.state() == "idle", "the device to be idle")


@pytest.mark.usefixtures("by_value", "short_deadline")
def test_a_call_of_a_pool_that_is_cancelled_during_the_handover_never_runs(machine, tmp_path):
    machine.fail("given", "hang")
    with aa.Pool() as pool:
        hanging = pool.options(needs="acme/0").submit((tmp_path / "ran").touch)
        machine.wait_until_it_hangs()
        assert hanging.cancel()
        machine.mend("given")
        assert pool.options(needs="acme/0").submit(machine.state).result(timeout=PATIENCE) == "given"
    until(lambda: machine.state() == "idle", "the device to be idle")
    assert not (tmp_path / "ran").exists()


def test_a_vendor_that_fails_to_take_back_is_told_and_the_next_holder_tries_again(machine, caplog):
    with aa.acquire("acme/0") as lease:
        machine.fail("idle")
    assert "the driver refuses" in caplog.text
    assert lease.id in caplog.text
    told = command("doctor")
    assert f"acme/a was not put back into its idle state after lease {lease.id}" in " ".join(told.stdout.split())
    with pytest.raises(PluginError, match="the driver refuses"):
        aa.acquire("acme/0")
    machine.mend("idle")
    with aa.acquire("acme/0"):
        assert machine.state() == "given"
    assert machine.state() == "idle"
    assert "idle state" not in command("doctor").stdout


# Signals


def test_after_sigkill_of_the_holder_doctor_names_the_device_and_the_next_holder_gets_it_idle_first(machine):
    with holder("acme/0") as held:
        assert held.stdout.readline() == "held\n"
        assert machine.calls() == ["a idle", "a given"]
        held.kill()
    until(lambda: not leases(), "the lease to end")
    assert machine.state() == "given"
    assert "acme/a was not put back" in " ".join(command("doctor").stdout.split())
    assert "acme/0 was not put back into its idle state" in " ".join(command("status").stderr.split())
    with aa.acquire("acme/0"):
        assert machine.calls() == ["a idle", "a given", "a idle", "a given"]
    assert machine.state() == "idle"


def test_after_sigkill_while_a_vendor_gives_the_next_holder_of_a_share_does_it_again(machine):
    machine.fail("given", "hang")
    with holder("acme/0:0.5") as held:
        machine.wait_until_it_hangs()
        held.kill()
    machine.mend("given")
    with aa.acquire("acme/0:0.5"):
        assert machine.state() == "given"
    assert machine.state() == "idle"


def test_an_interrupt_while_a_vendor_gives_leaves_no_lease_and_the_device_idle(machine):
    machine.fail("given", "hang")
    with holder("acme/0") as held:
        machine.wait_until_it_hangs()
        held.send_signal(signal.SIGINT)
        _, printed = held.communicate(timeout=PATIENCE)
    assert "KeyboardInterrupt" in printed
    assert machine.state() == "idle"
    assert not leases()


def test_a_file_that_cannot_be_made_for_all_users_stays_not_open(machine, monkeypatch):
    directory = Path(os.environ["ANYACCEL_STATE_DIR"])
    directory.mkdir(exist_ok=True)
    directory.chmod(0o1777)
    aa.acquire("other").release()
    before = len(os.listdir("/proc/self/fd"))

    change = os.fchmod

    def refuse(descriptor, mode):
        if mode == 0o666:
            raise PermissionError(errno.EPERM, "the file system refuses")
        change(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", refuse)
    for _ in range(3):
        with pytest.raises(aa.LedgerError, match="the file system refuses"):
            aa.acquire("acme/0")
        next(directory.glob("handover.*")).unlink()
    assert len(os.listdir("/proc/self/fd")) == before
