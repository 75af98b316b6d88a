"""Several users: what one may do to another is to wait, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import anyaccel
import pytest
from anyaccel.errors import DevicesBusyError, LeaseNotFoundError, StateDirectoryError
from anyaccel.ledger import Ledger, Want
from anyaccel.ledger.entries import boot
from anyaccel.model import Extent
from claimant import ClaimantError, eventually
from lengths import length

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as two other users")

SOURCES = str(Path(anyaccel.__file__).parents[1])
ALICE, BOB = 61_001, 61_002
PRELOAD = """
import logging, pwd, random, shlex, subprocess, unicodedata
import anyaccel.ledger.ending, anyaccel.ledger.handovers, anyaccel.ledger.recovery, anyaccel.linux.inotify
from anyaccel.ledger.diagnosis import diagnose
anyaccel.linux.system._libc()  # the Python that runs the tests may be closed to other users
"""


@pytest.fixture
def state(state):
    """The state directory as the line for tmpfiles.d makes it."""
    os.chmod(state, 0o1777)
    return state


@pytest.fixture
def user(claim, state):
    """A claimant of another user."""

    def user(uid, path=state):
        claimant = claim()
        claimant.do(PRELOAD)
        (state / f"checked.{boot()}.{uid}").touch()
        os.chown(state / f"checked.{boot()}.{uid}", uid, -1)
        claimant.do(f"os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})")
        claimant.do(f"open_ledger({str(path)!r})")
        return claimant

    return user


def test_they_exclude_each_other_and_see_who_holds(user, ledger):
    alice, bob = user(ALICE), user(BOB)
    alice.do("os.umask(0o077); take('a', note='mine')")
    with pytest.raises(ClaimantError, match=f"a is held by {ALICE} \\(process {alice.pid}, 'mine'\\)"):
        bob.do("take('a')")
    assert bob.do("take('a', 'b')") == {"b": 10_000}
    assert sorted((record.device, record.uid) for record in ledger.leases()) == [("a", ALICE), ("b", BOB)]
    bob.begin("take('a', wait=60)")
    (ticket,) = eventually(ledger.tickets)
    assert (ticket.uid, ticket.user) == (BOB, str(BOB))
    alice.kill()
    assert bob.do("1") == {"a": 10_000}


def test_only_its_owner_and_root_cancel_a_ticket(user, ledger):
    alice, bob = user(ALICE), user(BOB)
    alice.do("take('a')")
    bob.begin("take('a', wait=60)")
    (ticket,) = eventually(ledger.tickets)
    with pytest.raises(ClaimantError, match=f"ticket {ticket.id} belongs to {BOB}; only {BOB} and root can cancel it"):
        alice.do(f"ledger.cancel({ticket.id!r})")
    assert [each.id for each in ledger.tickets()] == [ticket.id]
    assert ledger.cancel(ticket.id) == bob.pid
    with pytest.raises(ClaimantError, match="was cancelled"):
        bob.do("1")
    with pytest.raises(LeaseNotFoundError, match=f"no request waits with ticket '{ticket.id}'"):
        ledger.cancel(ticket.id)


OPERATIONS = {
    "remove the lease": "os.unlink(name)",
    "rename the lease": "os.rename(name, name + 'x')",
    "replace the lease": "open('own', 'w').close(); os.rename('own', name)",
    "write to the lease": "open(name, 'r+')",
    "truncate the lease": "open(name, 'w')",
    "change its mode": "os.chmod(name, 0o666)",
    "change its owner": "os.chown(name, os.getuid(), -1)",
    "change its time": "os.utime(name, (0, 0))",
    "replace the directory": "os.rename(home, home + '.old')",
    "remove the directory": "os.rmdir(home)",
    "change the directory's mode": "os.chmod(home, 0o777)",
    "end its holder": "os.kill(pid, 9)",
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", ["lease", "ticket"])
def test_what_belongs_to_another_cannot_be_touched(user, ledger, state, operation, kind):
    alice, other, bob = user(ALICE), user(ALICE), user(BOB)
    other.do("take('a')")
    if kind == "lease":
        alice.do("take('b')")
    else:
        alice.begin("take('a', wait=60)")
        eventually(ledger.tickets)
    start = "v2.b." if kind == "lease" else "t1."
    (name,) = [name for name in os.listdir(state) if name.startswith(start)]
    bob.do(f"home, name, pid = {str(state)!r}, {name!r}, {alice.pid}; os.chdir(home)")
    with pytest.raises(ClaimantError, match="PermissionError"):
        bob.do(OPERATIONS[operation])
    assert name in os.listdir(state)
    with pytest.raises(ClaimantError, match="DevicesBusyError"):
        bob.do("take('a', 'b', count=2)")


def test_who_locks_a_dead_lease_denies_and_is_not_believed(user, ledger, state):
    """All that a lock on a file of another user can do is to keep a device from being used."""
    alice, bob, carol = user(ALICE), user(BOB), user(61_003)
    alice.do("take('a')")
    (name,) = [name for name in os.listdir(state) if name.startswith("v2.")]
    alice.kill()
    bob.do(f"import fcntl; fd = os.open({str(state / name)!r}, os.O_RDONLY); fcntl.flock(fd, fcntl.LOCK_EX)")
    with pytest.raises(ClaimantError, match="DevicesBusyError"):
        carol.do("take('a')")
    assert [(record.device, record.uid) for record in ledger.leases()] == [("a", ALICE)]
    bob.do("os.close(fd)")
    assert carol.do("take('a')") == {"a": 10_000}
    assert name in os.listdir(state)  # debris of another user, which does not count and is not ours to remove
    carol.do("give()")
    with ledger.acquire(Want(candidates=frozenset("a")), lambda taken: None if taken else {"a": Extent(1)}, wait=0):
        assert name not in os.listdir(state)  # root may


def test_what_cannot_be_read_counts(user, state):
    """Permission to look at the lock is refused, so no process can tell that it is free."""
    alice, bob = user(ALICE), user(BOB)
    name = state / "v2.a.10000.1.1.0000000000000000.00000000000000000000"
    alice.do(f"os.close(os.open({str(name)!r}, os.O_CREAT, 0o600))")
    with pytest.raises(ClaimantError, match="DevicesBusyError"):
        bob.do("take('a')")


def test_a_lying_ticket_costs_time_only(user, ledger, state):
    """It claims the highest priority and every device, and never looks: it is overtaken."""
    liar, bob = user(ALICE), user(BOB)
    liar.do(
        "import fcntl\n"
        f"name = {str(state)!r} + '/t1.0000000.0000000000000000.1.1.' + '0' * 20 + '.+'\n"
        "fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o644); fcntl.flock(fd, fcntl.LOCK_EX)"
    )
    assert bob.do("take('a', wait=60)") == {"a": 10_000}
    liar.do("os.utime(fd, ns=(0, 10**18))")  # from the future, as no honest one's
    assert bob.do("take('b', wait=60)") == {"b": 10_000}
    assert [ticket.uid for ticket in ledger.tickets()] == [ALICE]


def test_links_that_an_attacker_makes_and_changes_meanwhile(user, state):
    """At the names that will be used, and at any other: nothing outside of the directory is touched."""
    victim = state.parent / "victim"
    victim.write_text("precious")
    os.chmod(victim, 0o666)
    attacker, bob = user(ALICE), user(BOB)
    attacker.do(f"home, victim = {f'{state}/'!r}, {str(victim)!r}")
    attacker.do("dead = '.a.10000.1.1.' + '0' * 20; names = ['v2' + dead, '.v2' + dead, 't1' + dead, '.t1' + dead]")
    signs = state.parent / "signs"
    signs.mkdir()
    os.chmod(signs, 0o777)
    attacker.begin(
        f"begun, stop = {str(signs / 'begun')!r}, {str(signs / 'stop')!r}\n"
        "while not os.path.exists(stop):\n"
        "    os.close(os.open(begun, os.O_CREAT))\n"
        "    for name in {*(each for each in os.listdir(home) if each[-2:] not in ('.x', '.y')), *names}:\n"
        "        for act in (\n"
        "            lambda: os.unlink(home + name),\n"
        "            lambda: os.rename(home + name, home + name + '.x'),\n"
        "            lambda: os.symlink(victim, home + name),\n"
        "            lambda: os.link(victim, home + name + '.y'),\n"
        "        ):\n"
        "            try: act()\n"
        "            except OSError: pass\n"
        "result = 'stopped'"
    )
    eventually((signs / "begun").exists)
    for _ in range(length(50, 500)):
        assert bob.do("take('b', wait=60)") == {"b": 10_000}
        bob.do("give()")
    (signs / "stop").touch()
    assert attacker.end() == "stopped"
    assert (victim.read_text(), victim.stat().st_mode & 0o7777) == ("precious", 0o666)


def test_a_directory_of_another_user_is_refused(user, state):
    alice, parent = user(ALICE), state.parent
    os.chmod(parent, 0o1777)
    alice.do(f"os.mkdir({str(parent / 'alices')!r}); os.chmod({str(parent / 'alices')!r}, 0o1777)")
    with pytest.raises(StateDirectoryError, match=f"belongs to user {ALICE}"):
        Ledger.open({"ANYACCEL_STATE_DIR": str(parent / "alices")})
    with pytest.raises(ClaimantError, match=f"StateDirectoryError: .* belongs to user {ALICE}"):
        user(BOB, parent / "alices")


def test_without_permission_to_write_it_says_so(user, state):
    bob = user(BOB)
    os.chmod(state, 0o755)
    with pytest.raises(ClaimantError, match=r"StateDirectoryError: .* cannot be written: Permission denied"):
        bob.do("take('a')")
    assert bob.do("len(ledger.leases())") == 0


def test_only_the_owner_and_root_end_a_lease(user, ledger):
    alice, bob = user(ALICE), user(BOB)
    alice.do("take('a')")
    (record,) = ledger.leases()
    with pytest.raises(ClaimantError, match=f"LeasePermissionError: lease {record.id} belongs to {ALICE}"):
        bob.do(f"ledger.end_lease({record.id!r})")
    assert ledger.end_lease(record.id) == (alice.pid,)
    assert ledger.leases() == ()


def test_what_a_user_left_changed_another_user_may_mend(user, ledger):
    """The file of a handover belongs to its first writer, in a sticky directory."""
    alice, bob = user(ALICE), user(BOB)
    alice.do("os.umask(0o077); take('a')")
    alice.do("with ledger.lock_handovers(['acme/a']) as files: files['acme/a'].write('0' * 12, 'given')")
    assert ledger.unfinished_handovers() == {"acme/a": "0" * 12}
    bob.do("with ledger.lock_handovers(['acme/a']) as files: files['acme/a'].clear()")
    assert ledger.unfinished_handovers() == {}


def may_run(python, user):
    """Whether a user can run a Python with anyaccel."""
    command = [python, "-c", "import sys, anyaccel.ledger; sys.exit(sys.version_info < (3, 11))"]
    try:
        done = subprocess.run(
            command, user=user, extra_groups=[], env={"PYTHONPATH": SOURCES}, capture_output=True, check=False
        )
    except OSError:
        return False
    return done.returncode == 0


def test_a_real_user_with_a_name(ledger, state):
    """As a user who is logged in, with a command of its own."""
    name = "anyaccel-test-a"
    made = subprocess.run(["useradd", "-M", "-N", name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no user can be added here: {made.stderr.strip()}")
    code = (
        "import sys; from anyaccel.ledger import Ledger, Want; from anyaccel.model import Extent\n"
        "ledger = Ledger.open({'ANYACCEL_STATE_DIR': sys.argv[1]})\n"
        "lease = ledger.acquire(Want(candidates=frozenset('a')), lambda taken: {'a': Extent()}, wait=0)\n"
        "print('held', flush=True); input()"
    )
    python = next((each for each in (sys.executable, "/usr/bin/python3") if may_run(each, name)), None)
    try:
        if python is None:
            pytest.skip(f"other users can run neither {sys.executable} nor a Python 3.11 of the system")
        options = {"text": True, "user": name, "extra_groups": [], "env": {"PYTHONPATH": SOURCES}}
        process = subprocess.Popen([python, "-c", code, str(state)], stdin=-1, stdout=-1, stderr=-1, **options)
        with process:
            assert process.stdout.readline() == "held\n", process.stderr.read()
            with pytest.raises(DevicesBusyError, match=f"a is held by {name}"):
                ledger.acquire(Want(candidates=frozenset("a")), lambda taken: None, wait=0)
            process.communicate("\n", timeout=30)
    finally:
        subprocess.run(["userdel", name], check=True, capture_output=True)


OBSTACLES = {
    "kernel lease": "fd = os.open(name, 0o102, 0o644); fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)",
    "mode": "fd = os.open(name, 0o102, 0); fcntl.flock(fd, fcntl.LOCK_EX)",
}


@pytest.mark.parametrize("kind", OBSTACLES)
def test_a_file_that_cannot_be_opened_harms_its_maker_alone(user, ledger, state, kind):
    """It counts as held by its owner, who is named; everybody else is served, and root's looks do not fail."""
    mallory, alice, bob = user(ALICE), user(BOB), user(BOB)
    mallory.do("import fcntl, signal; signal.signal(signal.SIGIO, signal.SIG_IGN)")
    bob.do("take('b')")
    owner, tag = f"{mallory.pid}.1", f"{boot()}deadbeef000"
    file = f"v2.a.10000.{owner}.0000000000000000.{tag}1"
    for name in (file, f"t1.0000000.0000000000000000.{owner}.{tag}2.+", f".{owner}.{tag}3"):
        mallory.do(f"name = {str(state / name)!r}; {OBSTACLES[kind]}")
    assert alice.do("take('a', 'b', 'c', wait=60)") == {"c": 10_000}
    with pytest.raises(ClaimantError, match=f"a is held by {ALICE}"):
        alice.do("take('a', wait=1)")
    assert [(record.device, record.uid) for record in ledger.leases()] == [("a", ALICE), ("b", BOB), ("c", BOB)]
    assert [ticket.uid for ticket in ledger.tickets()] == [ALICE]
    (lease,) = [record.id for record in ledger.leases() if record.device == "b"]
    assert ledger.end_lease(lease) == (bob.pid,)
    if kind == "kernel lease":
        assert f"its file '{file}' has a kernel lease" in ledger.leases()[0].reason
    else:
        assert ledger.leases()[0].reason == ""  # root opens it all the same
        assert f"its file '{file}' may not be opened" in alice.do("ledger.leases()[0].reason")
    mallory.kill()
    if kind == "kernel lease":
        assert alice.do("take('a', wait=60)") == {"a": 10_000}


@pytest.mark.parametrize("make", ["os.mkfifo(name, 0)", "os.mkdir(name, 0)", "os.symlink('/dev/tty', name)"])
def test_what_is_no_file_is_no_lease_of_any_user(user, ledger, state, make):
    mallory, alice = user(ALICE), user(BOB)
    for name in ("v2.a.10000.1.1.0000000000000000.", "t1.0000000.0000000000000000.1.1."):
        mallory.do(f"name = {str(state / name)!r} + '0' * 20; {make}; name += '.+'; {make}")
    assert alice.do("take('a', wait=60)") == {"a": 10_000}
    assert [record.device for record in ledger.leases()] == ["a"]
    assert ledger.tickets() == ()


@pytest.mark.parametrize("body", ["'[' * 10**6", "'{\"wanted\": [1e999]}'", "'{\"wanted\": [' + '9' * 10**5 + ']}'"])
def test_words_that_are_no_words_disturb_no_user(user, ledger, state, body):
    mallory, alice = user(ALICE), user(BOB)
    owner, tag = f"{mallory.pid}.1", f"{boot()}deadbeef000"
    for name in (
        f"v2.a.10000.{owner}.0000000000000000.{tag}1",
        f"t1.0000000.0000000000000000.{owner}.{tag}2.+",
    ):
        mallory.do(
            f"import fcntl\nfile = open({str(state / name)!r}, 'w'); file.write({body}); file.flush()\n"
            "leases.append(file); fcntl.flock(file, fcntl.LOCK_EX)"
        )
    assert alice.do("take('a', 'b', wait=60)") == {"b": 10_000}
    assert alice.do("list(ledger.find_wanted(frozenset('c')))") in (["c"], [])
    assert [(record.device, record.request) for record in ledger.leases()] == [("a", ""), ("b", "a b")]
    assert [ticket.request for ticket in ledger.tickets()] == [""]
