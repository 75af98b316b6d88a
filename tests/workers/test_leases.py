"""Leases: devices go to who came first, in this process and on this machine, and come back when they are free."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.ledger import Ledger
from anyaccel.workers import shared_leases
from anyaccel.workers.machine import machine_leases
from processes import until

MACHINE = "sim:A1:2"


class Neighbor:
    def __init__(self, leases):
        self.leases = leases
        self.asked = []
        leases.join(self)

    def line_up(self):
        pass

    def make_way(self, devices):
        self.asked.append(devices)

    def claim(self, request):
        return Claimed(self.leases, request)


class Claimed:
    def __init__(self, leases, request):
        self.held = None
        self.failure = None
        self.claim = leases.claim(aa.parse_request(request), "test", self.on_held, self.on_failed)

    def on_held(self, held):
        self.held = held

    def on_failed(self, failure):
        self.failure = failure

    def wait(self):
        return until(lambda: self.held, "the devices")


@pytest.fixture(params=[False, True], ids=["of this process", "of the machine"])
def leases(request, acme):
    return machine_leases(MACHINE, None, shared=request.param)


def ids(held):
    return [device.id for device in held.allocation.devices]


def test_devices_are_given_at_once_and_come_back(leases):
    user = Neighbor(leases)
    one, two, half = user.claim("A1:1"), user.claim("A1:0.5"), user.claim("A1:0.5")
    first, second = [device.id for device in leases.inventory.devices]
    assert [ids(each.held) for each in (one, two, half)] == [[first], [second], [second]]
    third = user.claim("A1:1")
    assert third.held is None
    assert user.asked == [frozenset({first, second})]
    assert third.claim.why().fits_now is False
    one.held.release()
    assert ids(third.wait()) == [first]


def test_whoever_came_first_is_served_first(leases):
    user = Neighbor(leases)
    holder = user.claim("A1:2")
    both, one, other = user.claim("A1:2"), user.claim("A1:1"), user.claim("A1:1")
    assert [both.claim.first(), one.claim.first(), both.claim.alone()] == [True, False, False]
    everything = frozenset(device.id for device in leases.inventory.devices)
    assert leases.wanted(everything) == everything
    holder.held.release()
    both.wait()
    assert (one.held, other.held) == (None, None)
    both.held.release()
    assert {*ids(one.wait()), *ids(other.wait())} == everything
    assert leases.wanted(everything) == frozenset()


def test_a_claim_can_be_withdrawn(leases):
    user = Neighbor(leases)
    holder = user.claim("A1:2")
    both, one = user.claim("A1:2"), user.claim("A1:1")
    assert both.claim.withdraw()
    assert not both.claim.withdraw()
    holder.held.release()
    one.wait()
    assert both.held is None
    assert not one.claim.withdraw()


def test_what_can_never_be_served(leases):
    user = Neighbor(leases)
    for ask in (lambda request: leases.check(aa.parse_request(request)), user.claim):
        with pytest.raises(aa.NeverFitsError):
            ask("A1:3")
        with pytest.raises(aa.UnknownNameError):
            ask("B1:1")
    assert user.claim("A1:3,else=cpu").held.allocation.cpu
    user.claim("A1:3,else=cpu").held.release()


def test_those_who_compete_for_nothing_pass(acme):
    for shared in (False, True):
        leases = machine_leases("sim:A1:1,Acme-Whole:4", None, shared=shared)
        user = Neighbor(leases)
        holder, waiting = user.claim("A1:1"), user.claim("A1:1")
        assert user.claim("Acme-Whole:1").wait()
        assert waiting.claim.withdraw()
        holder.held.release()


def test_claims_from_many_threads_never_overlap(leases):
    user = Neighbor(leases)
    taken: list[str] = []
    faults: list[str] = []

    def work():
        for _ in range(10):
            claimed = user.claim("A1:1")
            (device,) = ids(claimed.wait())
            if device in taken:
                faults.append(device)
            taken.append(device)
            time.sleep(0.0005)
            taken.remove(device)
            claimed.held.release()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


OTHER = """
import sys, time, anyaccel as aa
with aa.Pool({needs!r}, machine="sim:A1:2", max_calls={max_calls}, idle=1000) as pool:
    held = pool.submit(lambda: aa.current().id).result() if {max_calls} == 0 else None
    running = pool.submit(lambda: (print("holds", flush=True), time.sleep({seconds})))
    running.result()
    print("done", flush=True)
    sys.stdin.read()
"""


def test_another_process_is_waited_for(pool, script):
    other = script(OTHER.format(needs="A1:2", max_calls=1, seconds=1000))
    assert other.stdout.readline() == "holds\n"
    one = pool("A1:1")
    future = one.submit(pow, 2, 2)
    assert future.allocation is None
    assert "test" not in future.why().message
    other.send_signal(signal.SIGINT)
    assert future.result() == 4
    other.communicate()


def test_another_process_gives_what_it_keeps_without_using_it(pool, script):
    other = script(OTHER.format(needs="A1:2", max_calls=0, seconds=0))
    assert [other.stdout.readline() for _ in range(2)] == ["holds\n", "done\n"]
    assert pool("A1:2").submit(pow, 2, 2).result() == 4
    assert other.communicate() == ("", "")


def test_a_busy_pool_lets_another_process_have_its_turn(pool, script):
    busy = pool("A1:2", max_calls=0)
    stop = threading.Event()

    def keep_busy():
        while not stop.is_set():
            for future in [busy.submit(time.sleep, 0.002) for _ in range(5)]:
                future.result()

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        other = script(OTHER.format(needs="A1:1", max_calls=1, seconds=0))
        # Line by line: what was buffered behind the first line, communicate() would not find.
        assert [other.stdout.readline() for _ in range(2)] == ["holds\n", "done\n"]
        assert other.communicate() == ("", "")
    finally:
        stop.set()
        thread.join()


def test_the_lease_of_a_killed_caller_ends_with_its_workers(script, acme):
    caller = script(OTHER.format(needs="A1:2", max_calls=1, seconds=1000))
    assert caller.stdout.readline() == "holds\n"
    assert len(Ledger.open().leases()) == 2
    caller.kill()
    until(lambda: not Ledger.open().leases(), "the end of the lease")
    caller.communicate()


LEAVING = """
import os, subprocess, sys, time
import anyaccel as aa

def leave():
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True, **quiet)
    print(os.getppid(), child.pid, flush=True)
    time.sleep(1000)

pool = aa.Pool("A1:1", machine="sim:A1:1")
pool.submit(leave).result()
"""


def test_what_a_worker_left_keeps_its_device_when_all_are_killed_who_would_end_it(script, acme):
    caller = script(LEAVING)
    nursery, left = map(int, caller.stdout.readline().split())
    os.kill(nursery, signal.SIGSTOP)  # neither tidies up between the two signals
    caller.kill()
    os.kill(nursery, signal.SIGKILL)
    caller.communicate()
    (lease,) = until(lambda: [each for each in Ledger.open().leases() if each.state == "kept"], "its holder's end")
    until(lambda: {each.carriers for each in Ledger.open().leases()} == {(left,)}, "the end of the worker")
    with pytest.raises(aa.NotFreeError, match=f"kept: process {left} .* of the ended lease still runs"):
        aa.acquire("A1:1", machine="sim:A1:1", wait=0)
    assert Ledger.open().release_of(lease.id) == (left,)
    aa.acquire("A1:1", machine="sim:A1:1", wait=0).release()


def test_a_worker_carries_its_lease_and_its_children_do(pool):
    def carried():
        own = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        command = ["sh", "-c", "readlink /proc/$$/fd/*; true"]
        return own, subprocess.check_output(command, close_fds=False, stderr=subprocess.DEVNULL).decode().split()

    one = pool("A1:1")
    state = os.environ["ANYACCEL_STATE_DIR"]
    own, childs = one.submit(carried).result()
    assert len([path for path in own if path.startswith(state)]) == 1
    assert len([path for path in childs if path.startswith(state)]) == 1
    assert not [path for path in pool().submit(carried).result()[0] if path.startswith(state)]


def test_a_state_directory_that_cannot_be_trusted_is_told(pool, monkeypatch, tmp_path):
    monkeypatch.setenv("ANYACCEL_STATE_DIR", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with (
        pytest.raises(aa.StateDirectoryError) if hasattr(aa, "StateDirectoryError") else pytest.raises(aa.AnyaccelError)
    ):
        pool("A1:1")
    assert pool("A1:1", shared=False).submit(pow, 2, 2).result() == 4


TELLING = """
@hookimpl
def anyaccel_stats(devices, ctx):
    state = json.loads(ctx.read("/sys/class/acme/memory"))
    processes = tuple(DeviceProcess(pid=pid) for pid in state["pids"])
    return {device.id: Stats(memory_used_bytes=state["used"], processes=processes) for device in devices}
"""


@pytest.fixture
def lingering(acme, record):
    """A recorded machine whose vendor tells what is in use; the test changes the recording."""
    acme.write_text(acme.read_text() + TELLING)
    machine = Path(record({}))

    def say(*, used=0, pids=()):
        recording = json.loads((machine / "machine.json").read_text())
        recording["paths"]["/sys/class/acme/memory"] = {"text": json.dumps({"used": used, "pids": list(pids)})}
        (machine / "new").write_text(json.dumps(recording))
        (machine / "new").rename(machine / "machine.json")

    say()
    return str(machine), say


def end_by(number):
    os.kill(os.getpid(), number)


def test_a_device_whose_memory_is_not_free_is_kept_aside(pool, lingering):
    machine, say = lingering
    one = pool("A1:1", machine=machine)
    say(used=8 << 30)
    with pytest.raises(aa.BrokenWorkerError):
        one.submit(end_by, signal.SIGKILL).result()
    waiting = one.submit(pow, 2, 2)
    until(lambda: one.kept_aside and "8192 MiB in use" in one.kept_aside[0][1], "the reason")
    assert waiting.allocation is None
    say()
    assert waiting.result() == 4
    assert one.kept_aside == ()


def test_a_device_that_still_lists_the_dead_is_kept_aside(pool, lingering, tmp_path):
    machine, say = lingering
    one = pool("A1:1", machine=machine)

    def end(path):
        path.write_text(str(os.getpid()))
        while path.exists():
            time.sleep(0.002)
        os._exit(1)

    running = one.submit(end, tmp_path / "pid")
    pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the call"))
    say(pids=[pid])
    (tmp_path / "pid").unlink()
    with pytest.raises(aa.BrokenWorkerError):
        running.result()
    waiting = one.submit(pow, 2, 2)
    until(lambda: one.kept_aside and f"still in use by process {pid}" in one.kept_aside[0][1], "the reason")
    say(pids=[os.getpid()])  # somebody else's
    assert waiting.result() == 4


def test_a_call_that_ends_by_itself_leaves_nothing_to_wait_for(pool, lingering):
    machine, say = lingering
    one = pool("A1:1", machine=machine)
    say(used=8 << 30)
    assert [one.submit(pow, 2, 2).result() for _ in range(2)] == [4, 4]
    assert one.kept_aside == ()


def test_the_leases_of_a_machine_are_one_for_all_pools(acme):
    first = machine_leases(MACHINE, None, shared=True)
    assert machine_leases(MACHINE, {}, shared=True) is first
    assert machine_leases(MACHINE, None, shared=False) is not first
    assert machine_leases("sim:A1:3", None, shared=True) is not first


@pytest.fixture
def asked(monkeypatch):
    """Requests that the ledger is asked for; what this process holds itself is waited for without end."""
    found = []
    acquire = Ledger.acquire

    def noting(self, want, choose, **options):
        found.append(want.request)
        return acquire(self, want, choose, **options)

    monkeypatch.setattr(Ledger, "acquire", noting)
    monkeypatch.setattr(shared_leases, "OWN_SECONDS", 1000)
    return found


def wait_for(path):
    until(path.exists, "the end of the test")
    return os.getpid()


def test_the_ledger_is_not_asked_for_what_a_kept_worker_of_ours_holds(pool, asked, tmp_path):
    one = pool("A1:1", machine="sim:A1:1", max_calls=0)
    first = one.submit(wait_for, tmp_path / "go on")
    until(first.running, "the first call")
    second = one.submit(os.getpid)
    assert asked == ["A1:1"]
    (tmp_path / "go on").touch()
    assert second.result() == first.result()
    assert asked == ["A1:1"]


def test_what_a_worker_of_ours_gives_back_is_asked_for_at_once(pool, asked):
    fresh = pool("A1:1", machine="sim:A1:1")
    futures = [fresh.submit(os.getpid) for _ in range(5)]
    assert len({future.result() for future in futures}) == 5
    assert len(asked) >= 5
