"""Leases: devices go to who came first, in this process and on this machine, and come back when they are free."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.ledger import Ledger
from anyaccel.pool import devices, dispatcher
from anyaccel.pool.dispatcher import broker_of
from two_plugins import plugin
from waiting import PATIENCE, until

MACHINE = "sim:A1:2"


RULE = """


@hookimpl
def anyaccel_validate(request, devices):
    return None
"""


@pytest.fixture(params=[False, True], ids=["of this process", "of the machine"])
def shared(request):
    return request.param


def wait_for(path):
    until(path.exists, "the end of the test")
    return os.getpid()


def ids(future):
    return {device.id for device in future.allocation.devices}


def test_devices_are_given_at_once_and_come_back(pool, shared, tmp_path):
    one = pool("A1:1", shared=shared)
    whole = one.submit(wait_for, tmp_path / "one")
    until(whole.running, "the first")
    halves = [one.options(needs="A1:0.5").submit(wait_for, tmp_path / "two") for _ in range(2)]
    until(lambda: all(each.running() for each in halves), "the others")
    assert ids(halves[0]) == ids(halves[1]) != ids(whole)
    third = one.submit(os.getpid)
    assert third.allocation is None
    assert third.why().fits_now is False
    (tmp_path / "one").touch()
    third.result()
    assert ids(third) == ids(whole)
    (tmp_path / "two").touch()


def test_the_first_request_is_served_first(pool, shared, tmp_path):
    two, one = pool("A1:2", shared=shared), pool("A1:1", shared=shared)
    holder = two.submit(wait_for, tmp_path / "holder")
    both = two.submit(wait_for, tmp_path / "both")
    until(holder.running, "the first")
    singles = [one.submit(os.getpid) for _ in range(2)]
    (tmp_path / "holder").touch()
    until(both.running, "the second")
    assert [each.allocation for each in singles] == [None, None]
    (tmp_path / "both").touch()
    for each in singles:
        each.result()


def test_a_call_that_is_cancelled_is_in_nobodys_way(pool, shared, tmp_path):
    two, one = pool("A1:2", shared=shared), pool("A1:1", shared=shared)
    holder, both = two.submit(wait_for, tmp_path / "end"), two.submit(os.getpid)
    single = one.submit(os.getpid)
    assert both.cancel()
    (tmp_path / "end").touch()
    assert single.result()
    assert holder.result() != single.result()


def test_what_can_never_be_served(pool, shared):
    one = pool(shared=shared)
    for needs, error in (("A1:3", aa.NeverFitsError), ("B1:1", aa.UnknownNameError)):
        with pytest.raises(error):
            one.options(needs=needs)
    assert [one.options(needs="A1:3,else=cpu").submit(lambda: aa.current().cpu).result() for _ in range(2)] == [
        True
    ] * 2


def test_calls_that_compete_for_nothing_pass(pool, shared, tmp_path):
    one = pool("A1:1", machine="sim:A1:1,Acme-Whole:4", shared=shared)
    holder, waiting = one.submit(wait_for, tmp_path / "end"), one.submit(os.getpid)
    assert one.options(needs="Acme-Whole:1").submit(pow, 2, 2).result() == 4
    assert not waiting.done()
    (tmp_path / "end").touch()
    assert holder.result() != waiting.result()


def test_pools_in_many_threads_never_hold_a_device_twice(pool, shared, tmp_path):
    def take(path):
        (device,) = aa.current().devices
        try:
            (path / device.id).mkdir()
        except FileExistsError:
            return False
        time.sleep(0.0005)
        (path / device.id).rmdir()
        return True

    pools = [pool("A1:1", shared=shared) for _ in range(3)]
    found = []

    def work(one):
        found.extend(one.submit(take, tmp_path).result() for _ in range(5))

    threads = [threading.Thread(target=work, args=(one,)) for one in pools for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 30


def at_once(path, number):
    """Run until so many of us do, each in a process of its own."""
    path.mkdir(exist_ok=True)
    (path / str(os.getpid())).touch()
    until(lambda: len(list(path.iterdir())) == number, "all")
    return os.getpid()


def test_only_as_many_idle_processes_end_as_another_request_needs(pool, shared, tmp_path):
    keeps = pool("A1:1", machine="sim:A1:8", max_calls=0, shared=shared, idle=1000)
    pids = {future.result() for future in [keeps.submit(at_once, tmp_path / "eight", 8) for _ in range(8)]}
    assert len(pids) == 8
    assert pool("A1:2", machine="sim:A1:8", shared=shared).submit(pow, 2, 2).result() == 4
    until(lambda: len(keeps._core.members) == 6, "the end of two")
    left = {future.result() for future in [keeps.submit(at_once, tmp_path / "six", 6) for _ in range(6)]}
    assert len(left) == 6
    assert left < pids


def test_leases_of_one_process_are_nowhere_to_be_seen(pool, tmp_path):
    one = pool("A1:1", machine="sim:A1:1", shared=False)
    running = one.submit(wait_for, tmp_path / "end")
    until(running.running, "the call")
    assert Ledger.open().leases() == ()
    (tmp_path / "end").touch()
    assert one.submit(os.environ.get, "ANYACCEL_LEASE").result() in (None, "")


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


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "anyaccel.wait"]


def test_a_pool_that_waits_for_others_says_so_once(pool, script, caplog, monkeypatch):
    """By the logger anyaccel.wait, as acquire() does; not where its own calls are in the way."""
    monkeypatch.setattr(dispatcher, "TELL_SECONDS", 0.3)
    one = pool("A1:2")
    running, waiting = one.submit(time.sleep, 1), one.submit(pow, 2, 2)
    assert (running.result(), waiting.result(), said(caplog)) == (None, 4, [])
    other = script(OTHER.format(needs="A1:2", max_calls=1, seconds=1000))
    assert other.stdout.readline() == "holds\n"
    futures = [one.submit(pow, 2, number) for number in range(3)]
    until(lambda: said(caplog), "the report")
    other.send_signal(signal.SIGINT)
    assert [future.result() for future in futures] == [1, 2, 4]
    assert said(caplog) == ["anyaccel: pow is waiting (1st): you have 2"]
    other.communicate()


def test_a_pool_that_waits_for_what_its_program_holds_says_where(pool, acme, caplog, monkeypatch):
    monkeypatch.setattr(dispatcher, "TELL_SECONDS", 0.3)
    with aa.acquire("A1:2", machine=MACHINE):
        future = pool("A1:1").submit(pow, 2, 2)
        until(lambda: said(caplog), "the report")
    assert future.result() == 4
    assert re.fullmatch(r"anyaccel: pow is waiting \(1st\): .*test_leases.py.*", *said(caplog))


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
    server, left = map(int, caller.stdout.readline().split())
    os.kill(server, signal.SIGSTOP)  # neither tidies up between the two signals
    caller.kill()
    os.kill(server, signal.SIGKILL)
    caller.communicate()
    (lease,) = until(lambda: [each for each in Ledger.open().leases() if each.state == "kept"], "its holder's end")
    until(lambda: {each.carriers for each in Ledger.open().leases()} == {(left,)}, "the end of the worker")
    with pytest.raises(aa.NotFreeError, match=f"kept: process {left} .* of the ended lease still runs"):
        aa.acquire("A1:1", machine="sim:A1:1", wait=0)
    assert Ledger.open().end_lease(lease.id) == (left,)
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


def test_a_call_that_is_cancelled_waits_for_nothing(pool, tmp_path):
    one = pool("A1:2")
    holder = one.submit(wait_for, tmp_path / "never")
    until(holder.running, "the holder")
    waiting = one.submit(pow, 2, 2)
    assert waiting.why() is not None
    assert waiting.cancel()
    assert waiting.why() is None
    assert waiting.cancel()
    assert holder.cancel()


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


def test_a_device_whose_memory_is_not_free_is_quarantined(pool, lingering):
    machine, say = lingering
    one = pool("A1:1", machine=machine)
    say(used=8 << 30)
    with pytest.raises(aa.BrokenWorkerError):
        one.submit(end_by, signal.SIGKILL).result()
    waiting = one.submit(pow, 2, 2)
    until(lambda: one.quarantined and "8192 MiB in use" in one.quarantined[0][1], "the reason")
    assert waiting.allocation is None
    say()
    assert waiting.result() == 4
    assert one.quarantined == ()


def test_a_device_that_no_thread_can_look_at_now_is_released_later(pool, lingering, tmp_path, monkeypatch):
    machine, say = lingering
    monkeypatch.setattr(devices, "LAST_LOOK_SECONDS", 0.05)
    one = pool("A1:1", machine=machine, max_calls=0)
    assert one.submit(pow, 2, 2).result() == 4
    say(used=8 << 30)
    former = threading.stack_size(1 << 47)
    try:
        with pytest.raises(aa.BrokenWorkerError):
            one.submit(end_by, signal.SIGKILL).result()
        until(lambda: one.quarantined, "the quarantine")
        one.shutdown()
    finally:
        threading.stack_size(former)
    until(lambda: one.quarantined and "8192 MiB in use" in one.quarantined[0][1], "the reason")
    say()
    until(lambda: not one.quarantined, "the release")


def stay(path):
    (path.parent / "new").write_text(str(os.getpid()))
    (path.parent / "new").rename(path)
    time.sleep(1000)


def test_a_vendor_that_cannot_be_asked_hides_no_other(install, tmp_path, monkeypatch):
    memory = tmp_path / "memory"
    memory.write_text(str(8 << 30))
    tells = f"""

from pathlib import Path
from anyaccel.plugin import Stats


@hookimpl
def anyaccel_stats(devices, ctx):
    used = int(Path({str(memory)!r}).read_text())
    return {{device.id: Stats(memory_used_bytes=used, processes=()) for device in devices}}
"""
    install("acme", plugin("acme", 'id="a", memory_bytes=16 << 30') + tells)
    install("other", plugin("other", 'id="b"'))
    one = aa.Pool("acme:1 other:1")
    killed = one.submit(stay, tmp_path / "pid")
    pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the call"))
    monkeypatch.setenv("ANYACCEL_PLUGINS", "acme")
    monkeypatch.syspath_prepend(str(tmp_path))  # the plug-ins are looked up anew
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(aa.BrokenWorkerError):
        killed.result()
    until(lambda: one.quarantined and "8192 MiB in use" in one.quarantined[0][1], "the reason")
    memory.write_text("0")
    until(lambda: not one.quarantined, "the release")
    one.shutdown()


def test_a_device_that_still_lists_the_dead_is_quarantined(pool, lingering, tmp_path):
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
    until(lambda: one.quarantined and f"still in use by process {pid}" in one.quarantined[0][1], "the reason")
    say(pids=[os.getpid()])  # those of another process
    assert waiting.result() == 4


def test_a_call_that_ends_by_itself_leaves_nothing_to_wait_for(pool, lingering):
    machine, say = lingering
    one = pool("A1:1", machine=machine)
    say(used=8 << 30)
    assert [one.submit(pow, 2, 2).result() for _ in range(2)] == [4, 4]
    assert one.quarantined == ()


@pytest.mark.parametrize("instead", ["", ",else=cpu"])
def test_a_call_does_not_wait_for_devices_whose_plug_in_has_gone(install, tmp_path, monkeypatch, instead):
    install("acme", plugin("acme", 'id="a"', 'id="b"') + RULE)
    with aa.Pool("acme:1") as one:
        first = one.submit(wait_for, tmp_path / "go")
        until(first.running, "the first")
        waiting = one.options(needs=f"acme:2{instead}").submit(pow, 2, 2)
        until(lambda: waiting.why() and not waiting.why().fits_now, "the request")
        monkeypatch.setenv("ANYACCEL_PLUGINS", "none")
        monkeypatch.syspath_prepend(str(tmp_path))  # the plug-ins are looked up anew
        (tmp_path / "go").touch()
        if instead:
            assert waiting.result(PATIENCE) == 4
            assert waiting.allocation.devices == ()
        else:
            with pytest.raises(aa.NeverFitsError, match="no plug-in of that name is installed"):
                waiting.result(PATIENCE)


def test_the_leases_of_a_machine_are_one_for_all_pools(acme):
    first = broker_of(MACHINE, None, shared=True)
    assert broker_of(MACHINE, {}, shared=True) is first
    assert broker_of(MACHINE, None, shared=False) is not first
    assert broker_of("sim:A1:3", None, shared=True) is not first


def test_an_idle_process_ends_for_a_request_though_a_running_one_will_end_too(pool, shared, tmp_path):
    """A worker of one call is not about to give its device back while the call runs."""
    fresh = pool("A1:1", shared=shared, idle=1000)
    kept = fresh.options(max_calls=0)
    running = fresh.submit(wait_for, tmp_path / "end")
    until(running.running, "the call")
    idle = kept.submit(os.getpid).result()
    assert fresh.submit(os.getpid).result() != idle
    assert not running.done()
    (tmp_path / "end").touch()


def test_an_idle_process_makes_room_in_a_full_pool_though_a_running_one_will_end_too(pool, tmp_path):
    full = pool("A1:1", max_workers=2, idle=1000)
    running = full.submit(wait_for, tmp_path / "end")
    until(running.running, "the call")
    idle = full.options(needs=None).submit(os.getpid).result()
    assert full.submit(os.getpid).result() != idle
    assert not running.done()
    (tmp_path / "end").touch()
