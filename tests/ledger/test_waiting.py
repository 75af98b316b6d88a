"""Waiting: the order, the end of patience, interruptions, and what wakes waiting processes."""

import asyncio
import contextlib
import fcntl
import os
import signal
import threading

import pytest
from anyaccel.errors import DevicesBusyError, UsageError
from anyaccel.ledger import Acquisition, Want
from anyaccel.ledger.entries import make_tenure, new_nonce, ticket_name
from anyaccel.linux import inotify
from anyaccel.model import Extent
from claimant import ClaimantError, eventually
from lengths import length

ANY = Want(candidates=frozenset("a"), request="APU")


def one(taken):
    return None if taken.get("a") else {"a": Extent()}


def test_no_wait_and_an_expired_wait(claim, ledger, files):
    claim().do("take('a')")
    for wait in (0, 0.005, 0.2):
        with pytest.raises(DevicesBusyError, match=r"APU is not free( after \S+ s)?: a is held by") as caught:
            ledger.acquire(ANY, one, wait=wait)
        assert caught.value.exit_code == 4
        assert caught.value.holders == tuple(record.id for record in ledger.leases())
    assert len(files()) == 1


def test_a_child_that_was_forked_meanwhile_does_not_keep_a_dead_waiters_place(claim, ledger, in_line):
    claim().do("take('a')")
    waiter = claim()
    waiter.do("threading.Thread(target=take, args=('a',), kwargs={'wait': 60}, daemon=True).start()")
    in_line(1)
    child = waiter.do("pid = os.fork()\nif pid == 0:\n    time.sleep(600)\n    os._exit(0)\nresult = pid")
    waiter.kill()
    in_line(0)
    os.kill(child, signal.SIGKILL)


def test_who_has_priority_is_served_first(claim, ledger, in_line):
    holder = claim()
    holder.do("take('a')")
    waiters = {}
    for count, priority in enumerate((0, 5, -5, 5), 1):
        waiters[count] = claim()
        waiters[count].begin(f"take('a', wait=60, priority={priority}); result = time.monotonic_ns(); give()")
        in_line(count)
    assert [ticket.priority for ticket in ledger.tickets()] == [5, 5, 0, -5]
    late = claim()
    with pytest.raises(ClaimantError, match="2 earlier requests"):
        late.do("take('a', priority=4)")
    holder.do("give()")
    served = {waiter.end(): count for count, waiter in waiters.items()}
    assert [served[moment] for moment in sorted(served)] == [2, 4, 1, 3]


@pytest.mark.parametrize("number", [9_999_999_999_999_999, 10**15, 0])
def test_a_false_number_in_a_ticket_does_not_change_the_order_of_later_requests(claim, ledger, in_line, state, number):
    holder, second, first = claim(), claim(), claim()
    holder.do("take('a')")
    name = ticket_name(-5, number, new_nonce(), frozenset("b"))
    with open(state / name, "xb") as false:
        fcntl.flock(false, fcntl.LOCK_EX)
        in_line(1)
        first.begin("take('a', wait=60, note='first'); result = time.monotonic_ns(); give()")
        in_line(2)
        second.begin("take('a', wait=60, note='second'); result = time.monotonic_ns(); give()")
        in_line(3)
        assert [ticket.note for ticket in ledger.tickets()] == ["first", "second", ""]
        holder.do("give()")
        assert first.end() < second.end()


def test_requests_that_do_not_compete_pass(claim, in_line):
    holder, first, second = claim(), claim(), claim()
    holder.do("take('a')")
    first.begin("take('a', wait=60)")
    in_line(1)
    assert second.do("take('b', wait=60)") == {"b": 10_000}
    many = ", ".join(repr(f"d{number}") for number in range(40))  # more than a name can list
    second.begin(f"take('a', {many}, count=41, wait=60)")
    in_line(2)
    assert holder.do("take('b', 'x', wait=60)") == {"x": 10_000}
    with pytest.raises(ClaimantError, match="1 earlier request"):
        holder.do("take('d7')")
    holder.do("leases.pop(0).release()")
    assert first.end() == {"a": 10_000}


def test_many_devices_that_are_not_in_the_name_of_a_ticket_compete_by_what_they_are(claim, in_line):
    first, other = (", ".join(repr(f"{letter}{number}") for number in range(40)) for letter in "xy")
    holder, waiter, stranger = claim(), claim(), claim()
    holder.do("take('x0')")
    waiter.begin(f"take({first}, count=40, wait=60)")
    in_line(1)
    assert stranger.do(f"take({other}, count=40, wait=60)").keys() == {f"y{number}" for number in range(40)}
    with pytest.raises(ClaimantError, match="1 earlier request"):
        stranger.do(f"take({first})")
    holder.do("give()")
    assert len(waiter.end()) == 40


def test_a_request_that_came_in_front_during_the_choice_is_not_passed(claim, ledger, in_line):
    holder, greedy = claim(), claim()
    holder.do("take('a')")
    chosen = []

    def choose(taken):
        if not chosen:
            greedy.begin("take('a', 'b', count=2, wait=60)")
            in_line(1)
        chosen.append("b")
        return {"b": Extent()}

    with pytest.raises(DevicesBusyError, match="1 earlier request"):
        ledger.acquire(Want(candidates=frozenset("ab")), choose, wait=0)
    assert chosen == ["b"]
    holder.do("give()")
    assert greedy.end() == {"a": 10_000, "b": 10_000}


def test_what_was_taken_during_the_choice_is_chosen_anew(claim, ledger):
    rival, chosen = claim(), []

    def choose(taken):
        free = [device for device in "ab" if not taken.get(device)]
        if not chosen:
            rival.do("take('a')")
        chosen.append(free)
        return {free[0]: Extent()}

    with ledger.acquire(Want(candidates=frozenset("ab")), choose, wait=0) as lease:
        assert chosen == [["a", "b"], ["b"]]
        assert dict(lease.devices) == {"b": Extent()}


def test_a_waiting_caller_is_told_its_place(claim, ledger, in_line):
    holder, first = claim(), claim()
    holder.do("take('a', note='training')")
    first.begin("take('a', wait=60)")
    in_line(1)
    told = []
    thread = threading.Thread(
        target=lambda: ledger.acquire(ANY, one, on_wait=lambda place, holders: told.append((place, holders))).release()
    )
    thread.start()
    in_line(2)
    eventually(lambda: told)
    holder.do("give()")
    first.end()
    eventually(lambda: len(told) > 1)
    first.do("give()")
    thread.join(30)
    assert [place for place, _ in told] == [2, 1]
    assert [(record.device, record.pid, record.note) for record in told[0][1]] == [("a", holder.pid, "training")]


def test_what_the_callback_raises_ends_the_wait(claim, ledger, files):
    claim().do("take('a')")
    with pytest.raises(ZeroDivisionError):
        ledger.acquire(ANY, one, on_wait=lambda place, holders: 1 // 0)
    assert len(files()) == 1


def test_ctrl_c(claim, files, in_line):
    holder, waiter = claim(), claim()
    holder.do("take('a')")
    waiter.begin("take('a', wait=None)")
    in_line(1)
    waiter.signal(signal.SIGINT)
    with pytest.raises(ClaimantError, match="KeyboardInterrupt"):
        waiter.end()
    assert len(files()) == 1


INTERRUPT_EACH_LINE = """
import gc
import anyaccel.errors, anyaccel.ledger
home = os.path.dirname(anyaccel.ledger.__file__)
gc.disable()

def interrupted_at(number):
    'Interrupt a claim at one line; whether it has that many.'
    left = number
    def trace(frame, event, argument):
        nonlocal left
        if not frame.f_code.co_filename.startswith(home):
            return None
        left -= event == 'line'
        if event == 'line' and left == 0:
            raise KeyboardInterrupt
        return trace
    attempt = anyaccel.ledger.Acquisition(ledger.state, want, choose, wait=WAIT)
    sys.settrace(trace)
    try:
        attempt.get().release()
    except (KeyboardInterrupt, anyaccel.errors.DevicesBusyError):
        pass
    finally:
        sys.settrace(None)
        attempt.undo()  # what was interrupted may be a release
    return left <= 0

want = Want(candidates=frozenset('ab'))
lines = 0
while interrupted_at(lines + 1):
    lines += STEP
    names = [name for name in os.listdir(ledger.path) if not name.startswith('checked')]
    assert len(names) == LEFT, (lines, names)
result = lines
""".replace("STEP", str(length(3, 1)))


def test_an_interrupt_at_any_line_loses_nothing(claim, ledger, files):
    """A lease that could not be returned any more is given back, and the directory is not left locked."""
    code = INTERRUPT_EACH_LINE.replace("WAIT", "0").replace("LEFT", "0")
    choose = "choose = lambda taken: None if taken else {'a': Extent(), 'b': Extent(5000)}\n"
    assert claim().do(choose + code, timeout=100) > 200
    with claimant_of_everything(ledger):
        assert len(files()) == 2


def test_an_interrupt_at_any_line_of_a_wait_leaves_no_place_in_line(claim, files):
    claim().do("take('a')")
    code = INTERRUPT_EACH_LINE.replace("WAIT", "0.012").replace("LEFT", "1")
    assert claim().do("choose = lambda taken: None\n" + code, timeout=100) > 200
    assert len(files()) == 1


def claimant_of_everything(ledger):
    return ledger.acquire(
        Want(candidates=frozenset("ab")), lambda taken: None if taken else {"a": Extent(), "b": Extent()}, wait=0
    )


def test_threads_exclude_each_other_like_processes(ledger):
    held, most, turns = 0, 0, 0

    def work():
        nonlocal held, most, turns
        for _ in range(20):
            with ledger.acquire(ANY, one, wait=60):
                held += 1
                most = max(most, held)
                turns += 1
                held -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (most, turns) == (1, 160)


def test_on_an_event_loop(claim, ledger, files, in_line):
    holder = claim()
    holder.do("take('a')")

    async def main():
        first = asyncio.create_task(Acquisition(ledger.state, ANY, one).get_async())
        await asyncio.to_thread(in_line, 1)
        second = asyncio.create_task(Acquisition(ledger.state, ANY, one).get_async())
        await asyncio.to_thread(in_line, 2)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not second.done()
        await asyncio.to_thread(in_line, 1)
        holder.do("give()")
        lease = await second
        with pytest.raises(DevicesBusyError):
            await Acquisition(ledger.state, ANY, one, wait=0.05).get_async()
        lease.release()

    asyncio.run(main())
    assert files() == []


def test_without_a_watch_there_is_the_poll(claim, in_line):
    """A user has 128 watches by default. To take them all would take them from all other tests, too."""
    holder, waiter = claim(), claim()
    refused = waiter.do(
        "import errno, os\n"
        "from anyaccel.linux import inotify\n"
        "def refuse(*_, **__): raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))\n"
        "inotify.system.call = refuse\n"
        "try: inotify.FileEvents()\n"
        "except OSError as error: result = error.strerror"
    )
    assert refused == "Too many open files"
    holder.do("take('a')")
    waiter.begin("take('a', wait=60)")
    in_line(1)
    holder.do("give()")
    assert waiter.end() == {"a": 10_000}


def test_a_request_looks_ever_later_at_a_lease_whose_end_no_event_tells(ledger):
    tenure = lambda: make_tenure("pod 7", 600)  # noqa: E731
    ledger.acquire(Want(candidates=frozenset("a"), tenure=tenure), one, wait=0).leave_to(())
    looks = []
    with pytest.raises(DevicesBusyError, match="a is held by"):
        ledger.acquire(ANY, looks.append, wait=1)
    assert len(looks) < 150  # 50 or so before the ticket


def test_who_waits_is_woken(claim, in_line):
    """By what happens, not by a timer: the one here would not come in time."""
    holder, waiter = claim(), claim()
    waiter.do("from anyaccel.ledger import tickets; tickets.recheck_interval = lambda place: 3600")
    for ends in ("give()", "os._exit(0)"):
        holder.do("take('a')")
        waiter.begin("take('a', wait=None)")
        in_line(1)
        holder.begin(ends)
        assert waiter.end() == {"a": 10_000}
        waiter.do("give()")
        if ends == "give()":
            holder.end()


def test_a_place_in_line_that_becomes_free_wakes_the_next(claim, in_line):
    holder = claim()
    holder.do("take('a')")
    waiters = [claim() for _ in range(4)]
    for count, waiter in enumerate(waiters, 1):
        waiter.do("from anyaccel.ledger import tickets; tickets.recheck_interval = lambda place: 3600")
        waiter.begin("take('a', wait=None); give()")
        in_line(count)
    waiters[1].kill()
    holder.do("give()")
    for waiter in (waiters[0], *waiters[2:]):
        waiter.end()


@pytest.mark.timeout(400)
def test_many_wait(claim, ledger):
    """Hundreds, in a few processes; fewer where time matters."""
    threads = length(10, 50)
    holder = claim()
    holder.do("take('a', 'b', 'c', 'd', count=4)")
    crowd = [claim() for _ in range(10)]
    for claimant in crowd:
        claimant.begin(
            f"threads = {threads}; served, errors = [], []\n"
            "def wait():\n"
            "    try:\n"
            "        take('a', 'b', 'c', 'd', wait=300).popitem(); served.append(1); give()\n"
            "    except BaseException as error: errors.append(repr(error))\n"
            "threads = [threading.Thread(target=wait) for _ in range(threads)]\n"
            "for thread in threads: thread.start()\n"
            "for thread in threads: thread.join()\n"
            "result = [len(served), sorted(set(errors))]"
        )
    eventually(lambda: len(os.listdir(ledger.path)) > 9 * threads, 200)
    holder.do("give()")
    for claimant in crowd:
        assert claimant.end(300) == [threads, []]
    assert ledger.leases() == ()
    assert ledger.tickets() == ()


def test_arguments_are_checked(ledger):
    for wait in (-1, float("nan")):
        with pytest.raises(UsageError, match="wait must be seconds, 0 or more, or None"):
            ledger.acquire(ANY, one, wait=wait)
    for priority in (1_000_001, -1_000_001):
        with pytest.raises(UsageError, match="priority must be from -1000000 to 1000000"):
            ledger.acquire(ANY, one, priority=priority)
    for priority in (0.5, "1", None):
        with pytest.raises(UsageError, match="priority must be a whole number"):
            ledger.acquire(ANY, one, priority=priority)


def test_an_empty_choice_holds_nothing(ledger, files):
    with ledger.acquire(ANY, lambda taken: {}, wait=0) as lease:
        assert dict(lease.devices) == {}
        assert lease.fds == ()
        assert not lease.released
        assert files() == []


def test_a_watch_tells_what_it_is_for(tmp_path):

    def try_to_watch():
        with contextlib.suppress(OSError):  # another test, or program, may have all that a user can have
            return inotify.FileEvents()
        return None

    watch = eventually(try_to_watch)
    watch.follow(str(tmp_path))
    (tmp_path / "a").write_text("x")
    os.unlink(tmp_path / "a")
    assert list(watch.events()) == [("a", False), ("a", True)]
    (tmp_path / "b").touch()
    list(watch.events())
    watch.follow(str(tmp_path / "b"))
    os.unlink(tmp_path / "b")
    assert list(watch.events()) == [("", True)]
    with pytest.raises(FileNotFoundError):
        watch.follow(str(tmp_path / "b"))
    watch.close()
    watch.close()
