"""Holding devices: every process of the machine takes part, in order, and only what is ours is handed on."""

import asyncio
import atexit
import copy
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import anyaccel as aa
import preloaded
import pytest
from waiting import until

MACHINE = "sim:Acme-Whole:2"
CLI = [sys.executable, "-m", "anyaccel", "--machine", MACHINE]


def start(*arguments, machine=MACHINE):
    return preloaded.start(
        ["--machine", machine, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
    )  # fmt: skip


HOLD = ("--", "sh", "-c", 'echo "$ACME_VISIBLE"; read line')


def test_two_shells_get_different_devices_and_a_third_waits_for_them(acme):
    first, second = start("run", "APU", *HOLD), start("run", "APU", "--note", "second job", *HOLD)
    got = {first.stdout.readline().strip(), second.stdout.readline().strip()}
    assert got == {"acme-0", "acme-1"}
    third = start("run", "APU", *HOLD)
    said = third.stderr.readline()
    assert said == "anyaccel: waiting (1st): you have 2\n"
    second.send_signal(signal.SIGKILL)
    assert third.stdout.readline().strip() in got
    for process in (first, third):
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
    second.communicate()


def test_what_is_held_is_shown_with_its_share_and_not_once_it_was_given_back(acme):
    with aa.acquire("APU:0.5", machine="sim:A1:2") as hold:
        (share,) = hold.allocation.shares
        assert repr(hold) == f"<DeviceLease {hold.id}: {share.device.id}>"
        assert repr(hold.allocation) == f"<Allocation {hold.id}: {share.device.id}:0.5>"
        memory = f"<td>0.5</td><td>{share.memory_bytes / (1 << 30):.1f} GiB</td><td>by agreement</td>"
        assert memory in hold._repr_html_()
        assert memory in hold.allocation._repr_html_()
    assert repr(hold) == f"<DeviceLease {hold.id}: released>"
    assert "<caption>APU:0.5 released</caption>" in hold._repr_html_()
    assert "<td>" not in hold._repr_html_()
    with aa.acquire("APU:9,else=cpu", machine="sim:A1:2") as nothing:
        assert repr(nothing) == "<DeviceLease of nothing: CPU>"
        assert repr(nothing.allocation) == "<Allocation of nothing: CPU>"


def test_an_error_that_says_why_travels_between_processes(acme):
    """The pools of others would wait for ever for one that cannot."""
    with pytest.raises(aa.NeverFitsError) as told:
        aa.acquire("APU:9", machine=MACHINE)
    for error in (pickle.loads(pickle.dumps(told.value)), copy.copy(told.value)):
        assert type(error) is aa.NeverFitsError
        assert (str(error), error.hint, error.verdict) == (str(told.value), told.value.hint, told.value.verdict)
        assert error.__notes__ == [error.hint]


def test_what_is_not_free_now_is_said_with_its_holder(acme, anyaccel):
    with aa.acquire("APU:2", machine=MACHINE, note="the whole box") as hold:
        assert [device.id for device in hold.devices] == ["acme-0", "acme-1"]
        done = anyaccel("--machine", MACHINE, "run", "APU", "--no-wait", "--", "true")
        assert done.returncode == 4
        assert "APU:1 does not fit now" in done.stderr
        assert "the whole box" in done.stderr
        with pytest.raises(aa.NotFreeError, match="does not fit now") as caught:
            aa.acquire("APU", machine=MACHINE, wait=0.05)
        assert caught.value.verdict.ever_fits
        status = anyaccel("--machine", MACHINE, "why", "APU")
        assert (status.returncode, "the whole box" in status.stdout) == (4, True)
    assert anyaccel("--machine", MACHINE, "why", "APU").returncode == 0


def test_a_wait_takes_no_random_number_of_the_program(acme):
    state = random.getstate()
    with aa.acquire("APU:2", machine=MACHINE), pytest.raises(aa.NotFreeError):
        aa.acquire("APU", machine=MACHINE, wait=0.05)
    assert random.getstate() == state


def test_what_can_never_fit_does_not_wait(acme):
    with pytest.raises(aa.NeverFitsError):
        aa.acquire("APU:5", machine=MACHINE)
    with aa.acquire("APU:5,else=cpu", machine=MACHINE) as hold:
        assert (hold.devices, hold.id, hold.environ["ACME_VISIBLE"]) == ((), "", "")


def test_shares_of_several_processes_fill_one_device(acme):
    holds = [aa.acquire("A1:0.25", machine="sim:A1:2") for _ in range(4)]
    assert len({hold.devices[0].id for hold in holds}) == 1
    with aa.acquire("A1:0.25", machine="sim:A1:2") as fifth:
        assert fifth.devices[0].id != holds[0].devices[0].id
    for hold in holds:
        hold.release()
        hold.release()


def test_status_shows_who_holds_what(acme, anyaccel):
    with aa.acquire("A1:0.5", machine="sim:A1:2", note="evaluation"):
        first, second = json.loads(anyaccel("--machine", "sim:A1:2", "--json").stdout)["devices"]
        assert (first["free"], second["free"], second["holders"]) == (0.5, 1.0, [])
        (holder,) = first["holders"]
        assert (holder["share"], holder["pid"], holder["note"], holder["confined"]) == (
            0.5,
            os.getpid(),
            "evaluation",
            False,
        )
        table = anyaccel("--machine", "sim:A1:2").stdout
        assert "evaluation" in table
        assert "2 devices, 1.5 free" in table


def test_the_worker_carries_the_lease_when_the_launcher_is_gone(acme):
    code = f"""
import anyaccel, subprocess, os
hold = anyaccel.acquire("APU:2", machine={MACHINE!r})
subprocess.Popen(["sleep", "600"], pass_fds=hold.fds, stdout=subprocess.DEVNULL)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    with pytest.raises(aa.NotFreeError):
        aa.acquire("APU", machine=MACHINE, wait=0.2)
    (lease, _) = aa.leases(aa.detect(MACHINE))
    from anyaccel.ledger import Ledger

    Ledger.open().end_lease(lease.id)
    aa.acquire("APU:2", machine=MACHINE, wait=60).release()


def test_inside_a_worker_its_devices_are_subdivided_and_never_widened(acme):
    inner = [sys.executable, "-m", "anyaccel", "run"]
    half = ["run", "A1:0.5", "--", *inner]
    base = [sys.executable, "-m", "anyaccel", "--machine", "sim:A1:2"]
    show = ["--", "sh", "-c", "echo $ANYACCEL_DEVICES $ANYACCEL_MEMORY_LIMIT"]
    done = subprocess.run([*base, *half, "A1:0.25", *show], capture_output=True, text=True, check=True)
    device, limit = done.stdout.split()
    assert (device, int(limit)) == (aa.detect("sim:A1:2").devices[0].id, 4 << 30)
    refused = subprocess.run([*base, *half, "A1:1", *show], capture_output=True, text=True, check=False)
    assert refused.returncode == 3
    assert "ours in part only" in refused.stderr
    assert "nearest that fits: A1:0.5" in refused.stderr


def test_a_share_inside_a_worker_is_a_share_of_what_it_holds(acme, tmp_path):
    """Two halves of a half fill it: a third finds nothing, though the device itself has room."""
    code = """
import anyaccel
a, b = (anyaccel.acquire("A1:0.25") for _ in range(2))
try:
    anyaccel.acquire("A1:0.25", wait=0)
except anyaccel.NotFreeError as error:
    print("full")
"""
    done = aa.run("A1:0.5", [sys.executable, "-c", code], machine="sim:A1:1", capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("full\n", "")


def test_machines_do_not_share_devices(acme):
    with aa.acquire("A1:2", machine="sim:A1:2"), aa.acquire("A1:1", machine="sim:A1:1", wait=0):
        pass


def test_of_a_hold_that_was_released_nothing_is_left_for_the_end(acme):
    inventory = aa.detect(MACHINE)
    aa.acquire("APU", inventory=inventory).release()
    before = atexit._ncallbacks()
    for _ in range(3):
        aa.acquire("APU", inventory=inventory).release()
    assert atexit._ncallbacks() == before


def test_what_a_process_does_at_its_end_does_not_grow_with_what_a_scheduler_has_given(acme):
    scheduler = aa.open_scheduler(aa.detect("sim:A1:4"), shared=True)
    held = [scheduler.allocate("A1")]
    before = atexit._ncallbacks()
    held += [scheduler.allocate("A1") for _ in range(3)]
    assert atexit._ncallbacks() == before
    for allocation in held:
        scheduler.release(allocation)


def test_asyncio_waits_without_blocking_and_can_be_cancelled(acme):
    async def main():
        hold = await aa.acquire_async("APU:2", machine=MACHINE)
        waiting = asyncio.create_task(aa.acquire_async("APU", machine=MACHINE))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        patient = asyncio.create_task(aa.acquire_async("APU", machine=MACHINE))
        await asyncio.sleep(0.3)
        hold.release()
        (await asyncio.wait_for(patient, 60)).release()

    asyncio.run(main())


def test_hold_and_release_from_the_command_line(acme, anyaccel):
    done = anyaccel("--machine", MACHINE, "hold", "APU", "--note", "my notebook", "--json")
    held = json.loads(done.stdout)
    assert held["devices"] == ["acme-0"]
    assert anyaccel("--machine", MACHINE, "why", "APU:2").returncode == 4
    assert "my notebook" in anyaccel("--machine", MACHINE).stdout
    assert anyaccel("release", held["lease"]).returncode == 0
    assert anyaccel("--machine", MACHINE, "why", "APU:2").returncode == 0
    unknown = anyaccel("release", held["lease"])
    assert unknown.returncode == 2
    assert "Traceback" not in unknown.stderr


def test_a_hold_ends_by_itself(acme, anyaccel):
    anyaccel("--machine", MACHINE, "hold", "APU:2", "--for", "1s")
    assert anyaccel("--machine", MACHINE, "run", "APU:2", "--wait", "60s", "--", "true").returncode == 0


def test_the_queue_shows_who_waits(acme, anyaccel):
    assert anyaccel("queue").stdout == "No request waits.\n"
    with aa.acquire("APU:2", machine=MACHINE):
        waiting = start("run", "APU", "--note", "patient", "--", "true")
        waiting.stderr.readline()
        (ticket,) = json.loads(anyaccel("queue", "--json").stdout)["tickets"]
        assert (ticket["place"], ticket["request"], ticket["note"], ticket["pid"]) == (
            1,
            "APU:1",
            "patient",
            waiting.pid,
        )
    waiting.communicate(timeout=60)
    assert waiting.returncode == 0


def test_what_others_wait_for_is_not_said_to_be_free(acme, anyaccel):
    """One of two is free, and who waits for both of them comes first."""
    with aa.acquire("APU", machine=MACHINE):
        waiting = start("run", "APU:2", "--", "true")
        waiting.stderr.readline()
        # Where who waits has not shown for a while that it does, as on a machine that does much else, it is passed.
        message = "APU:1 does not fit now: 1 earlier request is ahead."
        until(lambda: aa.why("APU", machine=MACHINE).message == message, "a verdict")
        told = until(lambda: (done := anyaccel("--machine", MACHINE, "why", "APU")).returncode and done, "a verdict")
        assert told.stdout.splitlines()[:2] == [message, "'anyaccel queue' shows who waits"]
        assert told.returncode == 4
        refused = ("--machine", MACHINE, "run", "APU", "--no-wait", "--", "true")
        until(lambda: anyaccel(*refused).returncode == 4, "a refusal")
    waiting.communicate(timeout=60)
    assert aa.why("APU", machine=MACHINE).fits_now


BUSY = """
@hookimpl
def anyaccel_stats(devices, ctx):
    return {d.id: Stats(memory_used_bytes=12 << 30, processes=(DeviceProcess(pid=7),)) for d in devices if d.index == 0}
"""


def test_devices_in_use_without_a_lease(install, record, anyaccel, acme):
    """They are shown, given out by the memory that is really free, and left alone on demand."""
    source = acme.read_text()
    at = source.index("@hookimpl\ndef anyaccel_stats")
    end = source.index("@hookimpl", at + 1)
    acme.write_text(source[:at] + BUSY + "\n\n" + source[end:])
    machine = record({}, {})
    ids = [device.id for device in aa.detect(machine).devices]
    columns = ("--columns", "state,user,program,id")
    assert [row.split() for row in anyaccel("--machine", machine, *columns).stdout.splitlines()[1:3]] == [
        ["busy", "*?", "process", "7", ids[0]], ["free", ids[1]],
    ]  # fmt: skip
    for request, options, expected in (
        ("APU", {}, ids[0]),
        ("APU", {"avoid_busy": True}, ids[1]),
        ("APU,mem=3GiB", {}, ids[0]),
        ("APU,mem=10GiB", {}, ids[1]),
    ):
        with aa.acquire(request, machine=machine, wait=0, **options) as hold:
            assert [device.id for device in hold.devices] == [expected]
    for request, options, reason in (
        ("APU:2", {"avoid_busy": True}, "acme/0 is used without a lease, by process 7"),
        ("APU:2,mem=10GiB", {}, "acme/0 has 4GiB free"),
    ):
        with pytest.raises(aa.NotFreeError, match=f"^{re.escape(request)} is not free: {reason}\\.\n") as refused:
            aa.acquire(request, machine=machine, wait=0, **options)
        assert "a request that waits gets them in time" in refused.value.hint


def test_what_a_command_left_behind_is_not_avoided(acme, anyaccel):
    """The name of a lease outlives a command that carried it; the next one gets the same devices all the same."""
    for _ in range(3):
        done = anyaccel("--machine", "sim:Acme-Whole:4", "run", "APU:2", "--", "sh", "-c", "echo $ACME_VISIBLE")
        assert done.stdout == "acme-0,acme-1\n"


def test_a_share_by_memory_is_held_exactly(acme):
    machine = "sim:A1:1"
    with aa.acquire("A1:10GiB", machine=machine) as first:
        with pytest.raises(aa.NotFreeError, match=r"no A1 has 8GiB free, the most is 6\.0GiB"):
            aa.acquire("A1:8GiB", machine=machine, wait=0)
        with aa.acquire("A1:5.5GiB", machine=machine, wait=0) as second:
            (small,) = second.allocation.shares
    (large,) = first.allocation.shares
    for share, amount in ((large, 10 << 30), (small, 11 << 29)):
        assert share.memory_bytes >= amount > share.device.memory_bytes * (share.units - 1) // 10_000


def test_commands_that_several_threads_start_at_once_have_one_mark(acme):
    """A lease is left to one mark: a command with another would lose its devices while it runs."""
    inventory = aa.detect("sim:A1:1")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            with aa.acquire("APU", inventory=inventory) as lease, ThreadPoolExecutor(4) as threads:
                started = list(threads.map(lambda _, lease=lease: lease.popen(["sleep", "1000"]), range(4)))
                for process in started:
                    process.kill()
                    process.wait()
            assert len({tuple(process.args) for process in started}) == 1  # the words of the wrapper have the mark
    finally:
        sys.setswitchinterval(before)
