"""Schedulers that take part in the machine's leases: several processes, one line."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading

import anyaccel as aa
import pytest
from anyaccel.errors import LeaseCancelledError, NeverFitsError, NotFreeError, UsageError
from anyaccel.launcher.shared import _QueuedRequest
from anyaccel.ledger import Ledger, tickets
from anyaccel.model import Extent, replace
from waiting import PATIENCE, until

OTHER = """
import os, subprocess, sys, time
import anyaccel as aa
from anyaccel.ledger import tickets as line

line._PATIENCE = float(sys.argv[2])

def say(*words):  # at once: two threads speak
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())

scheduler = aa.open_scheduler(aa.detect(declare={"GPU": int(sys.argv[1])}), shared=True)
tickets = {}
for line in sys.stdin:
    verb, name, request, priority = line.split()
    if verb == "ask":
        def said(ticket):
            say("has", ticket.note, *sorted(device.id for device in ticket.allocation.devices))

        tickets[name] = scheduler.submit(request, note=name, priority=int(priority), on_placed=said)
    elif verb == "give":
        end = time.monotonic() + 60  # others see its lease before its own thread has told it
        while tickets[name].allocation is None and time.monotonic() < end:
            time.sleep(0.005)
        scheduler.release(tickets[name].allocation)
    elif verb == "start":
        say("pid", subprocess.Popen(["sleep", "600"]).pid)
    say("done", verb, name)
"""


class Other:
    """Another program with a scheduler of its own."""

    def __init__(self, devices=2):
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER, str(devices), str(PATIENCE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def does(self, verb, name, request="declared", priority=0):
        """Have it do something; what it says until that is done."""
        self.process.stdin.write(f"{verb} {name} {request} {priority}\n")
        self.process.stdin.flush()
        said = []
        while not said or said[-1] != f"done {verb} {name}":
            said.append(self.line())
        return said[:-1]

    def line(self):
        line = self.process.stdout.readline().strip()
        assert line, "it has ended"
        return line


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """On a busy machine a waiting process may not stamp its ticket in time: no request is passed for that here."""
    monkeypatch.setattr(tickets, "_PATIENCE", PATIENCE)


@pytest.fixture
def other():
    with contextlib.ExitStack() as stack:

        def begin(devices=2):
            found = Other(devices)
            stack.callback(found.process.stdout.close)
            stack.callback(found.process.wait, 60)
            stack.callback(found.process.stdin.close)
            return found

        yield begin


def new(devices=2):
    return aa.open_scheduler(aa.detect(declare={"GPU": devices}), shared=True)


def queued():
    return [ticket.note for ticket in Ledger.open().tickets()]


def test_what_one_program_has_is_taken_for_the_other_and_commands_see_both(other, anyaccel):
    there, scheduler = other(), new()
    (said,) = there.does("ask", "theirs")
    device = said.split()[2]
    assert scheduler.free(device) == 0
    (held,) = scheduler.holders(device)
    assert held.id in {record.id for record in aa.leases(scheduler.inventory)}
    mine = scheduler.allocate("declared", note="mine")
    assert mine.devices[0].id != device
    with pytest.raises(NotFreeError, match=r"you have declared/\d \(theirs, lease \w+\)"):
        scheduler.allocate("declared")
    shown = json.loads(anyaccel("status", "--declare", "GPU=2", "--json").stdout)
    assert {holder["note"] for each in shown["devices"] for holder in each["holders"]} == {"theirs", "mine"}
    there.does("give", "theirs")
    assert scheduler.free(device) == 10_000
    both = scheduler.allocate("declared:0.5")
    scheduler.release(mine)
    scheduler.release(both)
    with pytest.raises(ValueError, match="released before"):
        scheduler.release(mine)
    assert not aa.leases(scheduler.inventory)


def test_who_waits_knows_the_place_and_the_reason_and_is_next(other):
    there, scheduler = other(1), new(1)
    there.does("ask", "theirs")

    async def main():
        first = asyncio.create_task(scheduler.acquire("declared", note="first"))
        second = asyncio.create_task(scheduler.acquire("declared:0.5", note="second"))
        while [ticket.place for ticket in scheduler.pending()] != [1, 2] or len(queued()) != 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        ahead, behind = scheduler.pending()
        assert "theirs" in ahead.why().message
        assert "waiting for the same devices in front: t1 (first)" in behind.why().message
        await asyncio.to_thread(there.does, "give", "theirs")
        got = await first
        assert not second.done()
        scheduler.release(got)
        scheduler.release(await second)

    asyncio.run(main())
    assert (queued(), scheduler.pending()) == ([], ())


def test_a_request_behind_that_of_another_program_says_so(other):
    there, scheduler = other(1), new(1)
    there.does("ask", "theirs")
    there.does("ask", "waits")
    until(lambda: queued() == ["waits"], "who waits")
    ticket = scheduler.submit("declared", note="mine")
    until(lambda: ticket.place == 2, "the place in the line")
    assert "1 of other programs" in ticket.why().message
    there.does("give", "theirs")
    until(lambda: ticket.place == 1, "the place in the line")
    there.does("give", "waits")
    until(lambda: ticket.allocation is not None, "its turn")
    assert ticket.place == 0
    scheduler.release(ticket.allocation)


def test_a_wait_that_is_cancelled_or_over_leaves_no_ticket(other):
    there, scheduler = other(1), new(1)
    there.does("ask", "theirs")

    async def main():
        task = asyncio.create_task(scheduler.acquire("declared", note="cancelled"))
        while not queued():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(NotFreeError, match=r"not free within 0\.05 s: .*theirs"):
            await scheduler.acquire("declared", timeout=0.05)

    asyncio.run(main())
    assert scheduler.pending() == ()
    until(lambda: not queued(), "the end of the line")
    there.does("give", "theirs")
    scheduler.release(scheduler.allocate("declared"))


def test_the_higher_priority_is_first_whichever_program_asks(other):
    there, scheduler = other(1), new(1)
    held = scheduler.allocate("declared")
    there.does("ask", "low")
    there.does("ask", "high", priority=2)
    ticket = scheduler.submit("declared", note="middle", priority=1)
    until(lambda: queued() == ["high", "middle", "low"], "who waits")
    scheduler.release(held)
    assert there.line().startswith("has high")
    there.does("give", "high")
    until(lambda: ticket.allocation is not None, "its turn")
    scheduler.release(ticket.allocation)
    assert there.line().startswith("has low")


def test_a_program_that_is_killed_gives_its_devices_back_once_what_it_started_has_ended(other):
    there, scheduler = other(1), new(1)
    there.does("ask", "theirs")
    (started,) = there.does("start", "job")
    ticket = scheduler.submit("declared")
    until(lambda: len(queued()) == 1, "who waits")
    there.process.send_signal(signal.SIGKILL)
    until(lambda: [record.state for record in aa.leases(scheduler.inventory)] == ["kept"], "the kept lease")
    assert ticket.allocation is None
    os.kill(int(started.split()[1]), signal.SIGKILL)
    until(lambda: ticket.allocation is not None, "its turn")
    scheduler.release(ticket.allocation)


def test_a_device_that_is_lost_keeps_what_is_held_and_a_new_one_serves_who_waits_in_turn(other):
    there, scheduler = other(1), new(2)
    theirs = scheduler.allocate("declared:2")
    ticket = scheduler.submit("declared", note="mine")
    until(lambda: queued() == ["mine"], "who waits")
    there.does("ask", "later")
    until(lambda: queued() == ["mine", "later"], "who waits")
    before = Ledger.open().tickets()[0]
    scheduler.update(aa.detect(declare={"GPU": 1}))
    assert len(scheduler.holders(theirs.devices[0].id)) == 1
    assert {record.device for record in aa.leases(aa.detect(declare={"GPU": 2}))} == {
        each.id for each in theirs.devices
    }
    anew = until(
        lambda: len(found := Ledger.open().tickets()) == 2 and before.id not in {each.id for each in found} and found,
        "who waits anew",
    )
    assert [each.note for each in anew] == ["mine", "later"], "it stands where it stood"
    scheduler.update(aa.detect(declare={"GPU": 3}))
    until(lambda: ticket.allocation is not None, "its turn")
    assert [device.id for device in ticket.allocation.devices] == ["declared-GPU-2"]
    scheduler.release(theirs)
    assert there.line() == "has later declared-GPU-0"
    scheduler.release(ticket.allocation)


def test_a_name_of_which_the_last_device_is_lost_may_still_stand_beside_others():
    scheduler = aa.open_scheduler(aa.detect(declare={"GPU": 1, "FPGA": 1}), shared=True)
    held = scheduler.allocate("FPGA GPU")
    ticket = scheduler.submit("FPGA|GPU")
    scheduler.update(aa.detect(declare={"GPU": 2}))
    until(lambda: ticket.allocation is not None, "its turn")
    scheduler.release(held)
    for allocation in (ticket.allocation, scheduler.allocate("FPGA|GPU")):
        scheduler.release(allocation)


def test_who_can_never_be_served_any_more_stands_in_nobodys_way():
    scheduler = new(2)
    held = scheduler.allocate("declared:2")
    ticket = scheduler.submit("declared:2", note="both")
    until(lambda: queued() == ["both"], "who waits")
    scheduler.update(aa.detect(declare={"GPU": 1}))
    until(lambda: not queued(), "the end of the line")
    assert (scheduler.pending(), ticket.place) == ((ticket,), 0)
    scheduler.release(held)
    scheduler.release(scheduler.allocate("declared"))
    scheduler.update(aa.detect(declare={"GPU": 2}))
    until(lambda: ticket.allocation is not None, "its turn")
    scheduler.release(ticket.allocation)


def test_a_ticket_that_is_cancelled_from_outside_says_so(anyaccel):
    scheduler = new(1)
    held = scheduler.allocate("declared")

    async def main():
        task = asyncio.create_task(scheduler.acquire("declared"))
        while not (tickets := Ledger.open().tickets()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.to_thread(Ledger.open().cancel, tickets[0].id)
        with pytest.raises(LeaseCancelledError, match="was cancelled"):
            await task

    asyncio.run(main())
    assert scheduler.pending() == ()
    scheduler.release(held)


def test_what_never_fits_and_what_a_program_counts_itself():
    scheduler = new(2)
    with pytest.raises(NeverFitsError):
        scheduler.allocate("declared:3")
    assert scheduler.allocate("declared:3,else=cpu").cpu
    pending = scheduler.submit("declared:3", infeasible="pend")
    assert (pending.place, queued()) == (0, [])
    counted = scheduler.occupy({"declared-GPU-0": Extent()}, holder="container")
    (given,) = scheduler.allocate("declared").devices
    assert given.id == "declared-GPU-1"
    with pytest.raises(NotFreeError, match="container"):
        scheduler.allocate("declared")
    scheduler.release(counted)
    scheduler.release(scheduler.allocate("declared"))
    with pytest.raises(ValueError, match="user must be None"):
        scheduler.allocate("declared", user=1)
    scheduler.update(aa.detect(declare={"GPU": 4}))
    until(lambda: pending.allocation is not None, "its turn")


def test_a_simulated_machine_is_the_same_machine_whatever_its_name_says_that_it_has(acme):
    scheduler = aa.open_scheduler(aa.detect("sim:A1:2"), shared=True)
    held = scheduler.allocate("APU:2")
    scheduler.update(aa.detect("sim:A1:3"))
    (third,) = scheduler.allocate("APU").devices
    assert third.id not in {device.id for device in held.devices}
    with pytest.raises(NotFreeError):
        scheduler.allocate("APU")
    assert len(aa.leases(scheduler.inventory)) == 3


def test_a_request_that_is_refused_while_others_wait_is_not_in_their_way():
    scheduler = new(1)
    held = scheduler.allocate("declared")
    behind = scheduler.submit("declared")
    with pytest.raises(aa.UsageError, match="time must be a number of seconds"):
        scheduler.submit("declared", time=-1)
    assert scheduler.pending() == (behind,)
    scheduler.release(held)
    until(lambda: behind.allocation is not None, "its turn")
    scheduler.release(behind.allocation)


def test_who_comes_when_another_program_waits_is_told_so(other):
    there, scheduler = other(2), new(2)
    there.does("ask", "theirs")
    there.does("ask", "both", "declared:2")
    until(lambda: queued() == ["both"], "who waits")

    with pytest.raises(NotFreeError, match="waiting for the same devices in front: 1 of other programs"):
        scheduler.allocate("declared")
    assert not scheduler.why("declared").fits_now
    scheduler.release(scheduler.allocate("declared", priority=1))
    with pytest.raises(NotFreeError, match=": 1 earlier request is ahead"):
        aa.acquire("declared", inventory=scheduler.inventory, wait=0)


def test_what_a_program_counts_itself_of_a_device_that_is_lost_stays_in_nobodys_way():
    scheduler = new(2)
    counted = scheduler.occupy({"declared-GPU-1": Extent()}, holder="container")
    scheduler.update(aa.detect(declare={"GPU": 1}))
    scheduler.release(scheduler.allocate("declared"))
    scheduler.update(aa.detect(declare={"GPU": 2}))
    with pytest.raises(NotFreeError, match="container"):
        scheduler.allocate("declared:2")
    scheduler.release(counted)
    scheduler.release(scheduler.allocate("declared:2"))


def test_leases_of_a_former_program_are_not_restored():
    scheduler = new(1)
    held = scheduler.allocate("declared")
    with pytest.raises(UsageError, match="leases, which count until its processes have ended"):
        new(1).restore(held)
    scheduler.release(held)


def test_what_a_program_counts_itself_of_a_device_keeps_the_parts_into_which_it_was_divided(acme):
    whole = aa.detect("sim:A1:1")
    (device,) = whole.devices
    parts = tuple(replace(device, id=f"part-{index}", index=index, parent=device.id) for index in range(2))
    scheduler = aa.open_scheduler(whole, shared=True)
    counted = scheduler.occupy({device.id: Extent()}, holder="container")
    scheduler.update(replace(whole, devices=parts))
    with pytest.raises(NotFreeError):
        scheduler.allocate("APU")
    scheduler.release(counted)
    scheduler.release(scheduler.allocate("APU:2"))


AT_THE_END = """
import atexit
import anyaccel as aa

def end():
    print(ticket.cancel(), scheduler.pending())
    scheduler.release(held)

atexit.register(end)
scheduler = aa.open_scheduler(aa.detect(declare={"GPU": 1}), shared=True)
held, ticket = scheduler.allocate("declared"), scheduler.submit("declared")
"""


REFUSED_MARK = """
import asyncio, resource
import anyaccel as aa

scheduler = aa.open_scheduler(aa.detect(declare={"GPU": 1}), shared=True)
first = scheduler.allocate("declared")
device = first.devices[0].id
ticket = scheduler.submit("declared")
resource.prlimit(0, 10, (5, 5))  # the kernel does not let this user raise the limit to the mark again

async def wait():
    await ticket

scheduler.release(first)
for ask in (lambda: asyncio.run(wait()), lambda: scheduler.allocate("declared")):
    try:
        ask()
    except (OSError, ValueError):
        print("refused", ticket.place, len(aa.leases(scheduler.inventory)), scheduler.free(device))
"""


def test_a_process_that_cannot_be_marked_any_more_leaves_no_lease():
    # Root may raise the limit again, unless it has lost the capability.
    without = ["setpriv", "--bounding-set=-sys_resource"] if os.geteuid() == 0 else []
    if without and shutil.which(without[0]) is None:
        pytest.skip("root cannot give up a capability here: there is no setpriv")
    command = [*without, sys.executable, "-c", REFUSED_MARK]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.stdout.splitlines() == ["refused 0 0 10000"] * 2, done.stderr


def test_a_program_that_tidies_up_at_its_end_can_cancel_and_release():
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True ()\n", "")


GREEDY = """
import asyncio, os, random, sys
import anyaccel as aa

fewer, more = (aa.detect(declare={"GPU": count}) for count in (3, 4))
scheduler = aa.open_scheduler(fewer, shared=True)
chance = random.Random(sys.argv[2])

async def worker(requests):
    for request in requests:
        wait = asyncio.create_task(scheduler.acquire(request, timeout=chance.choice((None, None, 0.02))))
        if chance.random() < 0.2:
            await asyncio.sleep(0.01)
            wait.cancel()
        try:
            allocation = await wait
        except (aa.NotFreeError, asyncio.CancelledError):
            continue
        for device in allocation.devices:
            os.close(os.open(f"{sys.argv[1]}/{device.id}", os.O_CREAT | os.O_EXCL))  # fails where another has it
        await asyncio.sleep(0.001)
        for device in allocation.devices:
            os.unlink(f"{sys.argv[1]}/{device.id}")
        scheduler.release(allocation)

async def main():
    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(worker(["declared", "declared:2", "declared"] * 5))
        for inventory in (more, fewer) * 5:
            await asyncio.sleep(0.02)
            scheduler.update(inventory)
            scheduler.why("declared:2")
    scheduler.update(fewer)

asyncio.run(main())
"""


def test_two_programs_never_have_one_device_and_no_request_starves(tmp_path):
    (tmp_path / "held").mkdir()
    programs = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", GREEDY, str(tmp_path / "held"), seed], stderr=subprocess.PIPE
        )
        for seed in "ab"
    ]
    for program in programs:
        _, said = program.communicate(timeout=120)
        assert (program.returncode, said) == (0, b"")
    assert os.listdir(tmp_path / "held") == []
    assert not aa.leases(aa.detect(declare={"GPU": 4}))
    assert queued() == []


def test_a_request_whose_thread_cannot_start_is_refused_and_the_next_is_served(acme):
    code = """
    import threading, anyaccel as aa
    scheduler = aa.open_scheduler(aa.detect("sim:A1:1"), shared=True)
    held = scheduler.allocate("A1:1")
    threading.stack_size(1 << 47)
    try:
        scheduler.submit("A1:1")
    except RuntimeError as error:
        print(error)
    threading.stack_size(0)
    served = threading.Event()
    ticket = scheduler.submit("A1:1", on_placed=lambda _: served.set())
    scheduler.release(held)
    served.wait()
    print(ticket.allocation.request)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.stdout, done.stderr) == ("can't start new thread\nA1:1\n", "")


def test_a_wait_begins_after_the_end_of_all_earlier_ones():
    request, events, end = _QueuedRequest(), [], threading.Event()

    async def first():
        events.append("begins")
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.to_thread(end.wait)
            events.append("ends")

    async def other():
        events.append("another begins")

    request.start(first)
    until(lambda: events, "the first")
    for _ in range(2):
        request.start(other)
    begun = threading.Event()
    _QueuedRequest().start(lambda: asyncio.sleep(0, begun.set()))  # behind those, in the same thread
    assert begun.wait(PATIENCE)
    end.set()
    until(lambda: "another begins" in events, "the last")
    assert events == ["begins", "ends", "another begins"]
