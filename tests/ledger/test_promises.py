"""The promises of the ledger, each kept under the circumstances that would break it."""

import contextlib
import errno
import os
import resource
import signal
import sys
import threading

import disks
import pytest
from anyaccel.errors import DevicesBusyError, LedgerBusyError, LedgerError, StateDirectoryError
from anyaccel.ledger import Ledger, Want, handovers
from anyaccel.ledger.diagnosis import diagnose
from anyaccel.model import Extent
from claimant import ClaimantError, eventually


def held(ledger):
    """What is held: device, units and state."""
    return [(record.device, record.units, record.state) for record in ledger.leases()]


def refused(claimant, code):
    """The text with which a claim is refused."""
    with pytest.raises(ClaimantError) as caught:
        claimant.do(code)
    assert caught.value.kind == "DevicesBusyError"
    return str(caught.value)


def test_p1_exclusion(claim, ledger):
    first, second = claim(), claim()
    assert first.do("take('a')") == {"a": 10_000}
    assert f"a is held by {ledger.leases()[0].user} (process {first.pid}, 'a')" in refused(second, "take('a')")
    refused(second, "take('a', units=1)")
    assert second.do("take('a', 'b', units=6000)") == {"b": 6000}
    assert first.do("take('b', units=4000)") == {"b": 4000}
    refused(first, "take('b', units=1)")
    refused(first, "take('b')")
    assert sorted(held(ledger)) == [("a", 10_000, "held"), ("b", 4000, "held"), ("b", 6000, "held")]
    first.do("give(); give()")
    assert second.do("take('a')") == {"a": 10_000}


def test_p1_several_devices_are_given_together_or_not_at_all(claim, ledger, files):
    first, second = claim(), claim()
    assert first.do("take('b')") == {"b": 10_000}
    refused(second, "take('a', 'b', count=2)")
    assert held(ledger) == [("b", 10_000, "held")]
    assert len(files()) == 1
    assert second.do("take('a', 'b', 'c', count=2)") == {"a": 10_000, "c": 10_000}
    assert len({record.id for record in ledger.leases()}) == 2


def test_p1_holds_when_many_claim_at_the_same_moment(claim):
    claimants = [claim() for _ in range(12)]
    for _ in range(10):
        for claimant in claimants:
            claimant.begin("take('a', 'b', 'c', units=5000)")
        won = []
        for claimant in claimants:
            with contextlib.suppress(ClaimantError):
                won.append((claimant, claimant.end()))
        assert len(won) == 6
        assert sorted(device for _, (device,) in won) == ["a", "a", "b", "b", "c", "c"]
        for claimant, _ in won:
            claimant.do("give()")


def test_p2_a_lease_ends_with_the_last_process_that_carries_it(claim, ledger, in_line):
    launcher, rival = claim(), claim()
    launcher.do("take('a')")
    worker = launcher.do(
        "subprocess.Popen(['sleep', '600'], pass_fds=leases[0].fds, stdin=-3, stdout=-3).pid"
    )  # -3: /dev/null
    launcher.kill()
    assert held(ledger) == [("a", 10_000, "held")]
    refused(rival, "take('a')")
    rival.begin("take('a', wait=30)")
    in_line(1)
    os.kill(worker, signal.SIGKILL)
    assert rival.end() == {"a": 10_000}


def test_p2_nothing_but_death_ends_it(claim, ledger):
    """No time to live, no heartbeat: a stopped holder keeps its device."""
    holder, rival = claim(), claim()
    holder.do("take('a')")
    holder.stop()
    refused(rival, "take('a', wait=0.3)")
    assert held(ledger) == [("a", 10_000, "held")]
    holder.signal(signal.SIGCONT)
    holder.do("give()")
    assert held(ledger) == []


def test_p2_a_forked_child_carries_the_lease_and_does_not_end_it(claim, ledger):
    holder = claim()
    holder.do("take('a')")
    child = holder.do(
        "r, w = os.pipe()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    leases[0].release()\n"  # lets go of its copy only
        "    os.write(w, b'x')\n"
        "    time.sleep(600)\n"
        "    os._exit(0)\n"
        "os.read(r, 1)\n"
        "result = pid"
    )
    assert held(ledger) == [("a", 10_000, "held")]
    os.kill(child, signal.SIGKILL)
    second = holder.do(
        "pid = os.fork()\nif pid == 0:\n    time.sleep(600)\n    os._exit(0)\nresult = pid"
    )  # this one keeps it
    holder.kill()
    assert held(ledger) == [("a", 10_000, "held")]
    os.kill(second, signal.SIGKILL)
    eventually(lambda: held(ledger) == [])


def test_p2_a_thread_reads_a_lease_while_another_releases_it(ledger):
    devices = frozenset(map(str, range(64)))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    errors = []

    def read(lease):
        try:
            while not lease.released:
                assert len(lease.fds) in (0, 64)
                lease.intact  # noqa: B018 -- an error is wanted
        except RuntimeError as error:
            errors.append(error)

    try:
        for _ in range(30):
            lease = ledger.acquire(Want(candidates=devices), lambda _: dict.fromkeys(devices, Extent()), wait=0)
            thread = threading.Thread(target=read, args=(lease,))
            thread.start()
            lease.release()
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


def test_p2_an_explicit_end_is_the_end_whichever_process_carries_it(claim, ledger):
    holder, rival = claim(), claim()
    holder.do("take('a')")
    child = holder.do("pid = os.fork()\nif pid == 0:\n    time.sleep(600)\n    os._exit(0)\nresult = pid")
    holder.do("give()")
    assert rival.do("take('a')") == {"a": 10_000}
    os.kill(child, signal.SIGKILL)
    assert held(ledger) == [("a", 10_000, "held")]


def test_p3_a_free_lock_is_not_a_free_device(claim, ledger):
    """A killed process may drop the lock long before it drops its devices; here it drops the lock and lives."""
    holder, rival = claim(), claim()
    holder.do("take('a'); os.close(leases[0].fds[0])")
    assert held(ledger) == [("a", 10_000, "held")]
    assert f"(process {holder.pid}, " in refused(rival, "take('a')")
    rival.begin("take('a', wait=30)")
    assert rival.busy(0.3)
    holder.kill()
    assert rival.end() == {"a": 10_000}


def test_p3_who_waits_gets_the_device_after_its_holder_has_left(claim, in_line):
    """Memory keeps the holder in the kernel after its lock is gone: the descriptor below the lease's goes last."""
    rival = claim()
    for _ in range(5):
        holder = claim()
        holder.do(
            "low = os.memfd_create('device')\n"
            "os.truncate(low, 1 << 26)\n"
            "for at in range(0, 1 << 26, 1 << 20): os.pwrite(low, bytes(1 << 20), at)\n"
            "take('a')\n"
            "assert low < leases[0].fds[0]"
        )
        rival.begin(f"pidfd = os.pidfd_open({holder.pid}); take('a', wait=30)")
        rival.begin("import select; result = bool(select.select([pidfd], [], [], 0)[0]); give(); os.close(pidfd)")
        in_line(1)
        holder.signal(signal.SIGKILL)
        rival.end()
        assert rival.end() is True


def test_p4_release_needs_no_descriptors_and_no_lock(claim, ledger, state):
    holder, other = claim(), claim()
    holder.do("take('a')")
    other.do(f"import fcntl; fd = os.open({str(state)!r}, os.O_RDONLY); fcntl.flock(fd, fcntl.LOCK_EX)")
    other.stop()
    holder.do("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 4096))")
    with pytest.raises(ClaimantError, match="Too many open files"):
        holder.do("take('b')")
    holder.do("give()")
    assert held(ledger) == []


@pytest.fixture
def small_tmpfs(tmp_path):
    """A file system of 64 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    with disks.mounted(path, "size=64k,mode=700"):
        yield path


def test_p4_release_works_on_a_full_disk(claim, small_tmpfs):
    holder, rival = claim(small_tmpfs), claim(small_tmpfs)
    for _ in range(4):
        holder.do("take('a', 'b', 'c', 'd')")
    with contextlib.suppress(OSError):
        (small_tmpfs / "filler").write_bytes(bytes(1 << 16))
    with pytest.raises(ClaimantError, match=r"LedgerError: .*No space left on device"):
        rival.do("take('e')")
    ledger = Ledger.open({"ANYACCEL_STATE_DIR": str(small_tmpfs)})
    with pytest.raises(LedgerError) as caught:
        ledger.acquire(Want(candidates=frozenset("e")), lambda _: {"e": Extent()}, wait=0)
    assert caught.value.hint == "free space there, or set ANYACCEL_STATE_DIR to a directory on another file system"
    for _ in range(4):
        holder.do("give()")
    assert sorted(name for name in os.listdir(small_tmpfs) if not name.startswith("checked.")) == ["filler"]
    assert rival.do("take('a')") == {"a": 10_000}


def test_p4_release_works_when_no_file_may_grow(ledger, files):
    want = Want(candidates=frozenset("ab"))
    lease = ledger.acquire(want, lambda taken: {"a": Extent()}, wait=0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(Exception, match=os.strerror(errno.EFBIG)):
            ledger.acquire(want, lambda taken: {"b": Extent()}, wait=0)
        lease.release()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert files() == []


def test_p5_waiters_are_served_in_the_order_of_their_arrival(claim, ledger, in_line):
    holder = claim()
    holder.do("take('a')")
    waiters = []
    for number in range(8):
        waiters.append(claim())
        waiters[-1].begin(f"take('a', wait=60, note='{number}'); result = time.monotonic_ns(); give()")
        in_line(len(waiters))
    assert [ticket.note for ticket in ledger.tickets()] == list("01234567")
    holder.do("give()")
    served = [waiter.end() for waiter in waiters]
    assert served == sorted(served)


def test_p5_a_stopped_or_dead_waiter_blocks_no_request(claim, in_line):
    holder, stopped, dead, last = claim(), claim(), claim(), claim()
    last.do("from anyaccel.ledger import tickets; tickets._PATIENCE = 2")
    holder.do("take('a')")
    for count, waiter in enumerate((stopped, dead, last), 1):
        waiter.begin("take('a', wait=60)")
        in_line(count)
    stopped.stop()
    dead.kill()
    holder.do("give()")
    assert last.end() == {"a": 10_000}
    stopped.signal(signal.SIGCONT)
    assert stopped.busy(0.1)
    last.do("give()")
    assert stopped.end() == {"a": 10_000}


def test_p5_a_later_request_does_not_pass(claim, in_line):
    """A request for two devices is not starved by requests for one."""
    first, second, greedy, late = claim(), claim(), claim(), claim()
    first.do("take('a')")
    second.do("take('b')")
    greedy.begin("take('a', 'b', count=2, wait=60)")
    in_line(1)
    first.do("give()")
    assert "1 earlier request is ahead" in refused(late, "take('a')")
    refused(late, "take('a', wait=0.3)")
    assert late.do("take('c')") == {"c": 10_000}  # no request waits for that one
    second.do("give()")
    assert greedy.end() == {"a": 10_000, "b": 10_000}


def test_p6_a_choice_that_hangs_or_raises_costs_no_other_claimant(claim, ledger, files):
    slow, broken, other = claim(), claim(), claim()
    slow.begin("ledger.acquire(Want(candidates=frozenset('a')), lambda taken: time.sleep(600))")
    with pytest.raises(ClaimantError, match="FileNotFoundError"):
        broken.do("ledger.acquire(Want(candidates=frozenset('a')), lambda taken: open('/no/such/file'))")
    with pytest.raises(ClaimantError, match="SystemExit"):
        broken.do("ledger.acquire(Want(candidates=frozenset('a')), lambda taken: sys.exit(3))")
    assert other.do("take('a')") == {"a": 10_000}
    other.do("give()")
    assert files() == []


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("v3.a.10000.more", "a"),
        (
            "v2.a.acme.10000.1.1.0000000000000000.0123456789abcdef0123",
            "acme/a",
        ),  # an earlier form
    ],
)
def test_p7_what_is_not_understood_counts_while_it_is_locked(claim, ledger, state, name, device):
    other, rival = claim(), claim()
    other.do(
        f"import fcntl; fd = os.open({str(state / name)!r}, os.O_RDWR | os.O_CREAT); fcntl.flock(fd, fcntl.LOCK_EX)"
    )
    assert held(ledger) == [(device, 10_000, "unknown")]
    assert "was not written by this version" in refused(rival, f"take({device!r}, units=1)")
    assert rival.do(f"take({device!r}, 'b')") == {"b": 10_000}
    other.kill()
    assert rival.do(f"take({device!r}, units=1)") == {device: 1}
    assert (state / name).exists()  # it is not ours to remove


def test_p8_what_is_not_shared_says_so(ledger, tmp_path, state):
    environ = {"ANYACCEL_STATE_DIR": str(state)}
    (*_, finding) = diagnose(environ)
    assert str(state) in finding.reason
    assert "not seen" in finding.reason
    assert not ledger.shared
    os.chmod(state, 0o1777)
    assert Ledger.open(environ).shared
    assert "not seen" not in diagnose(environ)[-1].reason
    os.chmod(state, 0o777)
    with pytest.raises(StateDirectoryError, match="not sticky"):
        Ledger.open({"ANYACCEL_STATE_DIR": str(state)})
    with pytest.raises(StateDirectoryError, match="not sticky"):
        ledger.leases()


def test_p9_when_all_die_at_once_the_survivors_keep_the_device(claim, ledger):
    """A worker that escaped from its tree still holds what it uses."""
    launcher, rival = claim(), claim()
    launcher.do("take('a')")
    escaped = launcher.do(
        "code = 'import os, time; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True); "
        "time.sleep(600)'\n"
        "worker = subprocess.Popen([sys.executable, '-c', code], pass_fds=leases[0].fds, stdout=-1)\n"
        "result = int(worker.stdout.readline())"
    )
    launcher.kill()
    refused(rival, "take('a')")
    os.kill(escaped, signal.SIGKILL)
    eventually(lambda: held(ledger) == [])
    assert rival.do("take('a')") == {"a": 10_000}


def test_p10_nothing_secret_is_written(claim, ledger, state, files, in_line):
    holder, waiter = claim(), claim()
    canary = "canary-7f3a"
    for claimant in (holder, waiter):
        claimant.do(f"os.environ['TOKEN'] = {canary!r}; sys.argv = ['/opt/{canary}/train.py', '--token', {canary!r}]")
    holder.do("take('a')")
    waiter.begin("take('a', wait=60)")
    in_line(1)
    assert len(files()) == 2
    for name in files():
        assert canary not in name
        assert canary not in (state / name).read_text()
        assert "train.py" in (state / name).read_text()
    with pytest.raises(DevicesBusyError) as caught:
        ledger.acquire(Want(candidates=frozenset("a")), lambda taken: None, wait=0)
    assert canary not in str(caught.value)


def test_who_keeps_the_ledger_locked_is_named(claim, ledger, state):
    other = claim()
    other.do(f"import fcntl; fd = os.open({str(state)!r}, os.O_RDONLY); fcntl.flock(fd, fcntl.LOCK_EX)")
    other.stop()
    with pytest.raises(LedgerBusyError, match=f"locked for .* s by process {other.pid}, which is stopped") as caught:
        ledger.acquire(Want(candidates=frozenset("a")), lambda taken: {"a": Extent(1)}, wait=0)
    assert f"kill -CONT {other.pid}" in caught.value.hint
    assert caught.value.exit_code == 75
    other.signal(signal.SIGCONT)
    other.do("os.close(fd)")
    ledger.acquire(Want(candidates=frozenset("a")), lambda taken: {"a": Extent(1)}, wait=0).release()


def test_a_child_that_is_forked_during_a_handover_does_not_keep_the_device_locked(ledger, monkeypatch):
    monkeypatch.setattr(handovers, "LOCK_SECONDS", 0.2)
    with ledger.lock_handovers(["a"]):
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
    try:
        with ledger.lock_handovers(["a"]) as files:
            assert not files["a"].changed
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
