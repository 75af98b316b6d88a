"""The mark: numbers that nest, processes that carry it, and what a lease that names it means to others."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from anyaccel.errors import LeasePermissionError, LedgerError
from anyaccel.ledger import Want, ending, entries
from anyaccel.ledger.entries import make_tenure
from anyaccel.linux import mark, process
from anyaccel.linux.users import user_name
from anyaccel.model import Extent
from claimant import ClaimantError, eventually
from hypothesis import given
from hypothesis import strategies as st

FIELD = st.integers(1, (1 << 21) - 2)
MARKS = st.lists(FIELD, min_size=1, max_size=3).map(tuple)
IMPORT = "from anyaccel.linux import mark; "
TAKE = "want = Want(candidates=frozenset('a'), mark=mark.draw); lease = ledger.acquire(want, chooser('a'), wait=0); "


def only_b(taken):
    return None if "b" in taken else {"b": Extent()}


def carrier(claimant, keeps="", **options):
    """Have a claimant take the device and start something that carries its mark and nothing else of it."""
    claimant.do(IMPORT + TAKE + "mark.put(lease.mark)")
    run = f"subprocess.Popen(['sleep', '600'], env={{}}, start_new_session=True{keeps}).pid"
    child = claimant.do(run)
    # The kernel closes descriptors, upon which Popen returns, before the process has its new name.
    eventually(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n")
    return child


@given(MARKS)
def test_a_mark_is_a_number_and_back(fields):
    assert mark.parse(mark.limit(fields)) == fields


@given(MARKS, MARKS)
def test_marks_differ_as_numbers_and_inner_ones_are_lower(one, other):
    assert (mark.limit(one) == mark.limit(other)) == (one == other)
    inner = (*one, *other)[:3]
    assert mark.limit(inner) < mark.limit(one) or inner == one


@given(st.integers(-1, 1 << 64))
def test_every_limit_can_be_read(value):
    found = mark.parse(value)
    assert found is None or found == () or mark.limit(found) == value


@given(st.sets(MARKS, max_size=5), st.lists(FIELD, max_size=3).map(tuple))
def test_what_is_drawn_is_new_and_inside(used, outer):
    drawn = mark.draw(used, inside=outer)
    if len(outer) == 3:
        assert drawn == ()
    else:
        assert drawn[:-1] == outer
        assert drawn not in used


@pytest.fixture
def few_marks(monkeypatch):
    """Let marks have four values, so that they would often be drawn twice; return the number below the first.

    Other tests run beside this one: no process of theirs carries one of the four.
    """
    random, below = os.urandom, 4 * (os.getpid() % (1 << 18))
    monkeypatch.setattr(mark.os, "urandom", lambda count: (below + random(1)[0] % 4).to_bytes(max(count, 4))[-count:])
    return below


@pytest.fixture
def no_scan_yet(monkeypatch):
    """Let this process scan for living marks at its next draw."""
    monkeypatch.setattr(mark, "_scan", (float("-inf"), frozenset()))
    monkeypatch.setattr(mark, "_drawn", set())


def test_no_mark_is_drawn_that_a_living_process_carries(claim, few_marks, monkeypatch):
    """As of a process that has given its devices back: no lease names its mark any more."""
    monkeypatch.setattr(mark, "_SCAN_SECONDS", -1.0)
    stale = claim()
    outer = mark.own()
    carried = [(*outer, few_marks + number) for number in (1, 2)]
    stale.do(f"from anyaccel.linux import mark; mark.put({(*carried[0], 7)!r})")
    other = claim()
    other.do(f"from anyaccel.linux import mark; mark.put({carried[1]!r})")
    assert {mark.draw() for _ in range(40)} <= {(*outer, few_marks + 3), (*outer, few_marks + 4)}


def test_no_mark_is_drawn_twice(few_marks, no_scan_yet):
    """No process carries the first one by then: what it is for has not been started."""
    assert len({mark.draw() for _ in range(4)}) == 4


def test_draws_within_a_minute_share_a_scan_with_a_forked_child(no_scan_yet, monkeypatch):
    real, scans = mark.hard_limit, []
    monkeypatch.setattr(mark, "hard_limit", lambda pid: (pid == os.getpid() and scans.append(pid), real(pid))[1])
    parent = {mark.draw() for _ in range(4)}
    child = os.fork()
    if child == 0:
        drawn = {mark.draw() for _ in range(4)}
        os._exit(len(scans) == 1 and len(drawn) == 4 and not drawn & parent)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert scans == [os.getpid()]


def test_a_lease_gets_no_mark_that_a_living_process_carries(claim):
    """Whatever the ledger says: no lease names it."""
    stale, holder = claim(), claim()
    outer = mark.own()
    stale.do(IMPORT + f"mark.put({(*outer, 1)!r})")
    few = "lambda count: bytes([*bytes(3), real(1)[0] % 8]) if count == 4 else real(count)"
    for _ in range(40):  # each of eight at random; a look that is repeated draws again
        holder.do(f"real = os.urandom; os.urandom = {few}")
        holder.do(IMPORT + "mark._scan, mark._drawn = (float('-inf'), frozenset()), set()")
        holder.do(IMPORT + TAKE + "os.urandom = real; lease.release()")
        assert tuple(holder.do("lease.mark")) != (*outer, 1)


def test_a_number_that_is_given_out_again_is_another_process_to_a_look(claim, monkeypatch):
    """A carrier that got the number of a process that the look had seen before is found all the same."""
    carrier, looked, wanted = claim(), [], mark.draw()
    carrier.do(IMPORT + f"mark.put({wanted})")
    old = mark._listed
    real = mark.hard_limit

    def listed():
        """Let the carrier appear late, under a number that was seen as another process."""
        looked.append(1)
        return {(name, inode if len(looked) > 1 or int(name) != carrier.pid else 1) for name, inode in old()}

    monkeypatch.setattr(mark, "_listed", listed)
    monkeypatch.setattr(mark, "hard_limit", lambda pid: -1 if pid == carrier.pid and len(looked) == 1 else real(pid))
    assert mark.carriers([wanted]) == {wanted: (carrier.pid,)}


def test_a_process_with_a_mark_passes_it_on_and_cannot_lose_it(claim):
    claimant = claim()
    claimant.do(
        "from anyaccel.linux import mark; first = mark.draw(); mark.put(first); second = mark.draw(); mark.put(second)"
    )
    assert claimant.do("mark.own() == second and second[:len(first)] == first and mark.carried(first)")
    child = claimant.do("subprocess.Popen(['sleep', '600'], env={}, start_new_session=True).pid")
    first, second = (tuple(claimant.do(name)) for name in ("first", "second"))
    assert mark.carries(child, first)
    assert mark.carries(child, second)
    assert set(mark.carriers([first])[first]) == {claimant.pid, child}
    claimant.kill()
    assert mark.carriers([first, second]) == {first: (child,), second: (child,)}
    os.kill(child, signal.SIGKILL)
    eventually(lambda: mark.carriers([first, second]) == {})
    assert not mark.carries(child, first)


def test_of_one_mark_leaves_another_alone(claim):
    claimant = claim()
    claimant.do("from anyaccel.linux import mark; mark.put((5, 7))")
    assert mark.carries(claimant.pid, (5,))
    for other in ((5, 8), (6,), (5, 7, 1), (4,), ()):
        assert not mark.carries(claimant.pid, other)
    assert claimant.pid in mark.carriers([(5,), (6,)])[5,]
    assert mark.carriers([(5, 8), (6,), (5, 7, 1)]) == {}


def test_who_was_started_with_a_device_keeps_it(claim, ledger):
    holder, rival = claim(), claim()
    child = carrier(holder)
    holder.kill()
    (record,) = ledger.leases()
    assert (record.state, record.carriers) == ("kept", (child,))
    assert record.reason == f"kept: process {child} ({user_name(os.geteuid())}, sleep) of the ended lease still runs"
    assert f"anyaccel release {record.id}" in record.hint
    with pytest.raises(ClaimantError, match=f"kept: process {child}"):
        rival.do("take('a')")
    rival.begin("take('a', wait=30)")
    assert rival.busy(0.2)
    os.kill(child, signal.SIGKILL)
    assert rival.end() == {"a": 10_000}
    assert [record.state for record in ledger.leases()] == ["held"]


def test_the_first_of_several_to_end_does_not_free_the_device(claim, ledger):
    holder, rival = claim(), claim()
    children = [carrier(holder)]
    children += [holder.do("subprocess.Popen(['sleep', '600'], env={}).pid") for _ in range(5)]
    holder.kill()
    rival.begin("take('a', wait=30)")
    for child in children:
        assert rival.busy(0.05)
        (record,) = ledger.leases()
        assert child in record.carriers
        os.kill(child, signal.SIGKILL)
    rival.end()


def test_another_device_is_given_without_a_look(claim, ledger, state):
    """Only a device that the choice needs is worth a look at all processes."""
    holder, rival = claim(), claim()
    child = carrier(holder)
    holder.kill()
    rival.do("import anyaccel.linux.mark as module; looks = []; old = module.carriers")
    rival.do("module.carriers = lambda marks: (looks.append(1), old(marks))[1]")
    assert rival.do("take('b')") == {"b": 10_000}
    assert rival.do("looks") == []
    os.kill(child, signal.SIGKILL)
    eventually(
        lambda: not mark.carriers([record.mark for record in map(entries.parse_lease, os.listdir(state)) if record])
    )
    assert rival.do("take('a')") == {"a": 10_000}
    assert rival.do("looks") == [1]


def test_a_release_that_leaves_something_behind_keeps_the_device(claim, ledger, files):
    holder = claim()
    holder.do(IMPORT + TAKE)
    outer = holder.do("lease.mark")
    child = holder.do(
        "(value := mark.limit(lease.mark))"
        " and subprocess.Popen(['prlimit', f'--locks={value}:{value}', 'sleep', '600']).pid"
    )
    eventually(lambda: mark.carries(child, tuple(outer)))
    assert holder.do("lease.leave_to(lease.mark)") is False
    (record,) = ledger.leases()
    assert (record.state, record.pid, record.carriers) == ("kept", 0, (child,))
    holder.do(f"os.kill({child}, 9); os.waitpid({child}, 0)")
    assert ledger.leases() == ()
    with ledger.acquire(Want(candidates=frozenset("a")), lambda taken: None if taken else {"a": Extent(1)}, wait=0):
        assert len(files()) == 1


def test_release_ends_the_carriers_of_the_mark(claim, ledger):
    holder = claim()
    child = carrier(holder)
    holder.kill()
    (record,) = ledger.leases()
    assert ledger.end_lease(record.id) == (child,)
    assert ledger.leases() == ()


def test_forgetting_leaves_them_alone(claim, ledger, files):
    holder, rival = claim(), claim()
    child = carrier(holder)
    holder.kill()
    (record,) = ledger.leases()
    assert ledger.drop_lease(record.id) == (child,)
    assert files() == []
    assert rival.do("take('a')") == {"a": 10_000}
    assert process.state(child) not in ("", "Z")
    os.kill(child, signal.SIGKILL)


def test_forgetting_a_share_unlocks_the_device_with_the_last_one(claim, ledger, tmp_path):
    (tmp_path / "device").mkdir()
    holder, rival, there = claim(), claim(), claim(tmp_path / "elsewhere")
    locks = f"device_locks={{'a': (DeviceLock({str(tmp_path / 'device')!r}),)}}"
    holder.do(f"take('a', units=5000, {locks}); take('a', units=5000, {locks})")
    first, second = ledger.leases()
    assert ledger.drop_lease(first.id) == (holder.pid,)
    with pytest.raises(ClaimantError, match="outside of this ledger"):
        there.do(f"take('a', {locks})")
    assert ledger.drop_lease(second.id) == (holder.pid,)
    assert rival.do(f"take('a', {locks})") == {"a": 10_000}


def test_forgetting_unlocks_the_device_itself(claim, ledger, tmp_path):
    (tmp_path / "device").mkdir()
    holder, rival = claim(), claim()
    locks = f"device_locks={{'a': (DeviceLock({str(tmp_path / 'device')!r}),)}}"
    holder.do(f"take('a', {locks})")
    child = holder.do("subprocess.Popen(['sleep', '600'], pass_fds=leases[0].fds).pid")
    holder.kill()
    (record,) = ledger.leases()
    assert ledger.drop_lease(record.id) == (child,)
    assert rival.do(f"take('a', {locks})") == {"a": 10_000}
    os.kill(child, signal.SIGKILL)


def test_a_device_that_cannot_be_unlocked_for_want_of_descriptors_is_named_as_such(
    claim, ledger, tmp_path, monkeypatch
):
    (tmp_path / "device").mkdir()
    holder = claim()
    holder.do(f"take('a', device_locks={{'a': (DeviceLock({str(tmp_path / 'device')!r}),)}})")
    (record,) = ledger.leases()

    def scarce(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(ending.system, "syscall", scarce)
    with pytest.raises(LedgerError, match=r"the lock on the device itself is kept by .*Too many open files"):
        ledger.drop_lease(record.id)
    assert ledger.leases() == ()


def test_without_marks_the_lock_decides(state, claim):
    """As where the kernel keeps no such limit, or an administrator has set it to something else."""
    code = (
        "import os, subprocess, sys; from anyaccel.ledger import Ledger, Want; from anyaccel.linux import mark\n"
        "from anyaccel.model import Extent\n"
        f"ledger = Ledger.open({{'ANYACCEL_STATE_DIR': {str(state)!r}}})\n"
        "assert mark.own() is None and mark.obstacle(), mark.own()\n"
        "want = Want(candidates=frozenset('a'), mark=mark.draw)\n"
        "lease = ledger.acquire(want, lambda taken: {'a': Extent()}, wait=0)\n"
        "assert lease.mark == ()\n"
        "print(subprocess.Popen(['sleep', '600'], pass_fds=lease.fds, stdout=subprocess.DEVNULL).pid)\n"
        "sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        ["prlimit", "--locks=5:5", sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False
    )
    child, rival = int(done.stdout), claim()
    with pytest.raises(ClaimantError, match="a is held by"):
        rival.do("take('a')")
    os.kill(child, signal.SIGKILL)
    assert rival.do("take('a', wait=30)") == {"a": 10_000}


# Several users


root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")
ALICE, BOB = 61_001, 61_002


@pytest.fixture
def shared(state, claim):
    """The state directory open to all, and claimants of other users."""
    os.chmod(state, 0o1777)

    def user(uid):
        claimant = claim()
        claimant.do("import pwd, anyaccel.ledger.ending, anyaccel.linux.inotify")
        claimant.do("open('/proc/self/status', encoding='ascii').close(); " + IMPORT)
        (state / f"checked.{entries.boot()}.{uid}").touch()
        os.chown(state / f"checked.{entries.boot()}.{uid}", uid, -1)
        claimant.do(f"os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})")
        return claimant

    return user


@root
def test_another_user_sees_who_keeps_a_device(shared, ledger):
    alice, bob = shared(ALICE), shared(BOB)
    child = carrier(alice)
    alice.kill()
    with pytest.raises(ClaimantError, match=rf"kept: process {child} \({ALICE}, sleep\)"):
        bob.do("take('a')")
    os.kill(child, signal.SIGKILL)
    assert bob.do("take('a', wait=30)") == {"a": 10_000}


@root
@pytest.mark.parametrize("locked", [True, False], ids=["locked", "not locked"])
def test_nothing_is_ended_because_a_name_says_so(shared, ledger, state, locked):
    """A file that names another user's process and another user's mark, for root to release."""
    victim, attacker = shared(ALICE), shared(BOB)
    victim.do("mark.put(mark.draw())")
    theirs = tuple(victim.do("mark.own()"))
    start = process.start_time(victim.pid)
    name = entries.lease_name("a", Extent(), nonce := entries.new_nonce(), (victim.pid, start), theirs)
    attacker.do(f"import fcntl; fd = os.open({str(state / name)!r}, os.O_CREAT | os.O_RDWR, 0o644)")
    if locked:
        attacker.do("fcntl.flock(fd, fcntl.LOCK_EX)")
    lease_id = nonce.removeprefix(entries.boot())
    with pytest.raises(LedgerError) as caught:
        ledger.end_lease(lease_id, grace=0.2, force=True)
    assert str(victim.pid) in str(caught.value) + caught.value.hint
    assert victim.do("1") == 1
    if locked:
        eventually(lambda: process.state(attacker.pid) in ("", "Z"))  # it has let go a moment before
    else:
        assert attacker.do("1") == 1


@root
def test_a_lock_that_was_passed_to_a_process_of_another_user_does_not_end_it(shared, ledger, state):
    """As a daemon has it that takes descriptors from everybody."""
    daemon, attacker = shared(ALICE), shared(BOB)
    attacker.do("take('a')")
    fd = attacker.do("leases[0].fds[0]")
    address = f"\0passed-{daemon.pid}"
    daemon.do(f"import socket; server = socket.socket(socket.AF_UNIX); server.bind({address!r}); server.listen()")
    attacker.do(
        f"import socket; client = socket.socket(socket.AF_UNIX); client.connect({address!r});"
        f"socket.send_fds(client, [b'x'], [{fd}])"
    )
    daemon.do("connection, _ = server.accept(); got = socket.recv_fds(connection, 1, 1)[1]")
    (record,) = ledger.leases()
    with pytest.raises(LedgerError, match=rf"still held by process {daemon.pid} \({ALICE}\), which was not ended"):
        ledger.end_lease(record.id, grace=0.2, force=True)
    assert daemon.do("1") == 1
    eventually(lambda: process.state(attacker.pid) in ("", "Z"))


@root
def test_an_ended_lease_of_another_user_is_not_renewed_because_it_has_ended(shared, ledger, state):
    alice = shared(ALICE)
    tenure = "from anyaccel.ledger.entries import make_tenure; tenure = lambda: make_tenure('pod', 600); "
    alice.do(f"{tenure}want = Want(candidates=frozenset('a'), tenure=tenure)")
    lease = ledger.acquire(Want(candidates=frozenset("b"), tenure=lambda: make_tenure("pod 7", 600)), only_b, wait=0)
    lease.leave_to(())
    with pytest.raises(ClaimantError, match="LeasePermissionError"):
        alice.do(f"ledger.renew({lease.id!r}, tenure())")
    (file,) = (path for path in state.iterdir() if lease.id in path.name)
    file.write_text(json.dumps({"tenure": {"key": "pod 7", "until": 1.0, "groups": []}}))
    with pytest.raises(ClaimantError, match=f"LeaseNotFoundError: lease {lease.id} has ended"):
        alice.do(f"ledger.renew({lease.id!r}, tenure())")


@root
def test_only_the_owner_forgets(shared, ledger):
    alice, bob = shared(ALICE), shared(BOB)
    alice.do("take('a')")
    (record,) = ledger.leases()
    with pytest.raises(ClaimantError, match="LeasePermissionError"):
        bob.do(f"ledger.drop_lease({record.id!r})")
    with pytest.raises(LeasePermissionError, match="only its owner can"):
        ledger.drop_lease(record.id)
    assert ledger.leases()
    assert alice.do(f"ledger.drop_lease({record.id!r})") == []


@root
def test_where_processes_are_hidden_the_owner_and_root_can_tell(shared, ledger, tmp_path):
    """With hidepid, what another user started cannot be seen; so it counts until it is known to be over."""
    script = tmp_path / "hidden.py"
    alice = shared(ALICE)
    child = carrier(alice)
    alice.kill()
    shared(BOB)  # who has tested the lock
    (record,) = ledger.leases()
    program = (
        "import os, sys; from anyaccel.ledger import Ledger; from anyaccel.linux import mark\n"
        "from anyaccel.ledger.diagnosis import diagnose\n"
        "Ledger.open().leases(), diagnose(os.environ)  # the interpreter may be closed to other users\n"
        "os.setgroups([]); uid = int(sys.argv[1]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)\n"
        "told = any('/proc hides processes' in finding.reason for finding in diagnose(os.environ))\n"
        "print(told, [(each.state, each.carriers, each.reason) for each in Ledger.open().leases()])"
    )
    script.write_text(program)
    environ = {**os.environ, "ANYACCEL_STATE_DIR": ledger.path}

    def seen_by(uid):
        command = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", command, "sh", sys.executable, script, str(uid)],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return done.stdout

    assert f"True [('kept', ({child},)" in seen_by(ALICE)
    assert "True [('kept', (), 'kept: whether a process of the ended lease still runs cannot be seen" in seen_by(BOB)
    assert f"False [('kept', ({child},)" in seen_by(0)
    os.kill(child, signal.SIGKILL)
    eventually(lambda: not ledger.leases())
    assert "True [('kept', ()" in seen_by(BOB)
    assert "True []" in seen_by(ALICE)
    assert record.uid == ALICE


def test_a_look_that_cannot_come_to_an_end_is_no_answer(claim, ledger, monkeypatch):
    holder = claim()
    child = carrier(holder)
    holder.kill()
    monkeypatch.setattr(mark, "_ROUNDS", 0)
    assert mark.carriers([(1,)]) is None
    assert [record.state for record in ledger.leases()] == ["kept"]
    os.kill(child, signal.SIGKILL)
    time.sleep(0.05)
    assert [record.state for record in ledger.leases()] == ["kept"]
    monkeypatch.undo()
    assert eventually(lambda: not ledger.leases())
