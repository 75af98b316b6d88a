"""One ledger for one machine: users with directories of their own, the machine's directory, and the change to it.

Each test has an empty ``/run`` and an empty ``/dev/shm`` of its own, in a mount namespace. What these tests need from
their own files is loaded before: the clone, and the Python that runs it, may lie there.
"""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import anyaccel
import pytest
from claimant import Claimant, ClaimantError, eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount file systems and act as other users")

SOURCES = str(Path(anyaccel.__file__).parents[1])
ALICE, BOB, MALLORY = 61_001, 61_002, 61_003
MOUNTS = "mount -n -t tmpfs -o mode=755 none /run && mount -t tmpfs -o mode=1777 none /dev/shm && rm -rf /run/mount"
LOAD = """
import codecs, contextlib, ctypes, datetime, fcntl, logging, pwd, random, shlex, shutil, subprocess, typing, unicodedata
for encoding in ("ascii", "utf-8", "latin-1"): codecs.lookup(encoding)
import anyaccel.launcher.hold, anyaccel.cli.doctor
import anyaccel.ledger.diagnosis, anyaccel.ledger.ending, anyaccel.ledger.handovers, anyaccel.ledger.recovery
import anyaccel.linux.inotify; anyaccel.linux.system._libc()
"""
MOUNT = f"""
done = subprocess.run(["sh", "-c", {MOUNTS!r}], stdin=subprocess.DEVNULL, check=False)
if done.returncode:
    raise SystemExit(done.returncode)
"""
PRELOAD = (
    LOAD
    + """
sys.executable = PYTHON  # the one that runs the tests may be closed to other users

def become(uid):
    os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: like any program that a user starts

def begin():
    global ledger
    ledger = Ledger.open({})

def held():
    return sorted((record.device, record.uid, record.pid) for record in ledger.leases())

def told():
    from anyaccel.ledger.diagnosis import diagnose
    return [f"{each.severity.value} {each.reason} -> {each.remedy}" for each in diagnose({})]
"""
)


@pytest.fixture
def as_user():
    """Start claimants as users, root among them, on a machine where no process has used a ledger before."""
    python = next(filter(None, (shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin"), sys.executable)))
    script = str(Path(__file__).parent / "claimant.py")
    ours, theirs = socket.socketpair()
    command = ["unshare", "--mount", sys.executable, script, LOAD + MOUNT]
    nest = subprocess.Popen(command, stdin=theirs, stderr=subprocess.PIPE, start_new_session=True)
    theirs.close()
    claimants = []

    def as_user(uid, ledger=True):
        try:
            claimant = Claimant(nest_socket)
        except EOFError:
            pytest.skip(f"a mount namespace cannot be made here: {nest.communicate()[1].decode().strip()}")
        claimants.append(claimant)
        claimant.do(PRELOAD.replace("PYTHON", repr(python)))
        if uid:
            claimant.do(f"become({uid})")
        if ledger:
            claimant.do("begin()")
        return claimant

    with ours as nest_socket:
        yield as_user
        for claimant in claimants:
            claimant.close()
        ours.shutdown(socket.SHUT_RDWR)
    nest.communicate(timeout=30)


def refusal(claimant, code):
    with pytest.raises(ClaimantError) as caught:
        claimant.do(code)
    return str(caught.value)


MAKE = "os.umask(0); os.mkdir('/run/anyaccel', 0o1777)"
SETUP = "from anyaccel.ledger.setup import steps; steps()[0].perform()"
SHARED = "/run/anyaccel"


def test_looking_makes_nothing(as_user):
    for uid in (0, ALICE):
        claimant = as_user(uid)
        assert claimant.do("[list(ledger.leases()), list(ledger.tickets())]") == [[], []]
        assert "which is made when devices are taken" in claimant.do("told()[-1]")
        with pytest.raises(ClaimantError, match=r"the state directory .* does not exist"):
            claimant.do("ledger.end_lease('0123456789ab')")
        assert claimant.do("os.listdir('/run') + os.listdir('/dev/shm')") == []


def test_root_looks_while_a_user_holds(as_user):
    alice, root = as_user(ALICE), as_user(0)
    alice.do("take('a')")
    assert root.do("held()") == []
    assert root.do("os.listdir('/run')") == []
    with pytest.raises(ClaimantError, match="a is held by"):
        as_user(ALICE).do("take('a')")


def test_root_takes_devices_while_users_hold_and_wait(as_user):
    """Root's is the machine's directory, and what users hold is in it from the first moment."""
    alice, bob, waiter, root = as_user(ALICE), as_user(BOB), as_user(ALICE), as_user(0)
    alice.do("take('a', note='mine')")
    bob.do("take('b')")
    waiter.begin("take('a', wait=60)")
    eventually(lambda: waiter.busy() and alice.do("len(ledger.tickets())"))
    with pytest.raises(ClaimantError, match=f"a is held by {ALICE} \\(process {alice.pid}.*b is held by {BOB}"):
        root.do("take('a', 'b')")
    assert root.do("take('a', 'b', 'c', priority=1)") == {"c": 10_000}  # before who waits, and may be there by now
    assert root.do("os.listdir('/dev/shm')") == []
    everything = [["a", ALICE, alice.pid], ["b", BOB, bob.pid], ["c", 0, root.pid]]
    for claimant in (alice, bob, root, as_user(MALLORY), as_user(ALICE)):
        assert claimant.do("held()") == everything
        assert claimant.do("[ledger.path, ledger.shared]") == [SHARED, True]
    eventually(lambda: root.do("[each.uid for each in ledger.tickets()]") == [ALICE])
    eventually(lambda: "1 earlier request" in refusal(bob, "take('a')"))  # unless it gets no processor for seconds
    alice.do("give()")
    assert waiter.end() == {"a": 10_000}
    bob.kill()
    assert root.do("take('b', wait=60)") == {"b": 10_000}


@pytest.mark.parametrize("ends", ["give()", "os._exit(0)"])
def test_setup_brings_over_what_a_user_holds_and_from_then_on_all_see_it(as_user, ends):
    alice, old, root = as_user(ALICE), as_user(ALICE), as_user(0, ledger=False)
    alice.do("take('a', note='mine')")
    root.do(SETUP)
    rival = as_user(ALICE)
    with pytest.raises(ClaimantError, match=f"a is held by {ALICE} \\(process {alice.pid}\\)"):
        rival.do("take('a')")
    with pytest.raises(ClaimantError, match=f"a is held by {ALICE}"):
        old.do("take('a')")  # which has opened its ledger when there was no machine's directory
    bob = as_user(BOB)
    with pytest.raises(ClaimantError, match=f"a is held by {ALICE}"):
        bob.do("take('a')")
    assert rival.do("os.listdir('/dev/shm')") == []
    bob.begin("take('a', wait=60)")
    alice.begin(ends)
    assert bob.end() == {"a": 10_000}


def test_what_is_not_in_a_directory_that_was_made_by_hand_is_said_and_setup_brings_it(as_user):
    alice, root = as_user(ALICE), as_user(0, ledger=False)
    alice.do("take('a')")
    root.do(MAKE)
    bob = as_user(BOB)
    for claimant in (bob, as_user(ALICE), root):
        (said, _) = claimant.do("told()")
        assert said.startswith(f"warn {ALICE} keeps leases in a directory of their own, made before /run/anyaccel: ")
        assert "sudo anyaccel setup" in said
    root.do(SETUP)
    for claimant in (bob, root):
        assert len(claimant.do("told()")) == 1
    assert bob.do("held()") == [["a", ALICE, alice.pid]]


def test_it_appears_while_a_user_makes_ones_own(as_user):
    """Which would tell everybody that leases are kept in it."""
    alice, root = as_user(ALICE), as_user(0, ledger=False)
    alice.begin(
        "make = os.mkdir\n"
        "def mkdir(path, mode=0o777):\n"
        "    open('/dev/shm/making', 'w').close()\n"
        "    while not os.path.exists('/run/anyaccel'): time.sleep(0.01)\n"
        "    make(path, mode)\n"
        "os.mkdir = mkdir\n"
        "take('a')"
    )
    eventually(lambda: root.do("os.path.exists('/dev/shm/making')"))
    root.do(MAKE)
    alice.end()
    assert root.do("os.listdir('/dev/shm')") == ["making"]
    assert as_user(0).do("held()") == [["a", ALICE, alice.pid]]


def test_who_publishes_while_the_directory_changes_starts_anew(as_user):
    """A choice takes its time; what is chosen in the user's own directory is not published there any more."""
    alice, root = as_user(ALICE), as_user(0)
    alice.begin(
        "def choose(taken):\n"
        "    open('/dev/shm/choosing', 'a').close()\n"
        "    while not os.path.exists('/run/go'): time.sleep(0.01)\n"
        "    return None if taken.get('a') else {'a': Extent()}\n"
        "ledger.acquire(Want(candidates=frozenset('a')), choose, wait=0)"
    )
    eventually(lambda: root.do("os.path.exists('/dev/shm/choosing')"))
    assert root.do("take('a')") == {"a": 10_000}
    root.do("open('/run/go', 'w').close()")
    with pytest.raises(ClaimantError, match="a is held by root"):
        alice.end()


def test_the_machines_directory_is_deleted_while_users_hold(as_user):
    root = as_user(0)
    root.do("take('r')")
    alice, bob = as_user(ALICE), as_user(BOB)
    alice.do("take('a')")
    bob.do("take('b')")
    root.do("shutil.rmtree('/run/anyaccel')")
    with pytest.raises(ClaimantError, match="a is held by"):
        as_user(ALICE).do("take('a')")
    everything = [["a", ALICE, alice.pid], ["b", BOB, bob.pid], ["r", 0, root.pid]]
    assert root.do("take('a', 'b', 'c', 'r')") == {"c": 10_000}
    assert root.do("held()")[:3] == sorted([*everything, ["c", 0, root.pid]])[:3]
    assert bob.do("held()") == sorted([*everything, ["c", 0, root.pid]])
    for claimant, device in ((alice, "a"), (bob, "b")):
        claimant.do("give()")
        assert as_user(MALLORY).do(f"take({device!r})") == {device: 10_000}


SQUAT = {
    "directory": "os.mkdir(path, 0o777)",
    "file": "open(path, 'w').close()",
    "link": "os.symlink('/tmp', path)",
    "pipe": "os.mkfifo(path)",
}


@pytest.mark.parametrize("kind", SQUAT)
def test_a_directory_that_another_user_made_is_gone_around(as_user, kind):
    mallory, alice = as_user(MALLORY), as_user(ALICE)
    mallory.do(f"path = '/dev/shm/anyaccel-{ALICE}'; {SQUAT[kind]}")
    assert alice.do("take('a')") == {"a": 10_000}
    assert alice.do("ledger.path") == f"/dev/shm/anyaccel-{ALICE}.1"
    other = as_user(ALICE)
    with pytest.raises(ClaimantError, match="a is held by"):
        other.do("take('a')")
    # It goes away: what is there already stays in force, for all processes alike.
    mallory.do("os.rmdir(path)" if kind == "directory" else "os.unlink(path)")
    with pytest.raises(ClaimantError, match="a is held by"):
        as_user(ALICE).do("take('a')")
    alice.do("give()")
    assert other.do("take('a')") == {"a": 10_000}


def test_all_names_are_taken_by_another_user(as_user):
    mallory, alice, root = as_user(MALLORY), as_user(ALICE), as_user(0, ledger=False)
    mallory.do("import anyaccel.ledger.directory as d")
    mallory.do(f"for path in d.private_places({ALICE})[:-1]: os.mkdir(path)")
    with pytest.raises(ClaimantError, match=r"another user has made something there.*No such file or directory"):
        alice.do("take('a')")
    root.do(f"os.makedirs('/run/user/{ALICE}'); os.chown('/run/user/{ALICE}', {ALICE}, -1)")
    assert alice.do("take('a')") == {"a": 10_000}
    assert alice.do("ledger.path") == f"/run/user/{ALICE}/anyaccel"
    with pytest.raises(ClaimantError, match="a is held by"):
        as_user(ALICE).do("take('a')")
    with pytest.raises(ClaimantError, match=f"a is held by {ALICE}"):
        as_user(0).do("take('a')")


def test_a_user_cannot_make_root_stumble_over_a_private_directory(as_user):
    """Odd things in it, and a lock that is never let go, cost root a second at most."""
    mallory, root = as_user(MALLORY), as_user(0)
    mallory.do("take('m')")
    mallory.do(
        f"home = '/dev/shm/anyaccel-{MALLORY}'\n"
        "start = 'v2.x.10000.1.1.0000000000000000.'\n"
        "os.mkfifo(f'{home}/{start}' + '0' * 20); os.mkdir(f'{home}/{start}' + '1' * 20)\n"
        "os.symlink('/etc/shadow', f'{home}/{start}' + '2' * 20)\n"
        "lock = os.open(home, os.O_RDONLY); fcntl.flock(lock, fcntl.LOCK_EX)"
    )
    mallory.do(f"os.symlink(home, '/dev/shm/anyaccel-{ALICE}'); os.mkfifo('/dev/shm/anyaccel-7')")
    assert root.do("take('x', 'm')") == {"x": 10_000}
    assert root.do("held()") == [["m", MALLORY, mallory.pid], ["x", 0, root.pid]]


ENTER = """
def enter(*mounts):
    "Become root of a user namespace, as in a rootless container: one user outside is all that there is inside."
    uid, gid = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(0x10000000 | 0x20000):  # CLONE_NEWUSER, CLONE_NEWNS
        raise NotImplementedError
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    for mount in mounts:
        subprocess.run(["mount", "-n", *mount.split()], check=True, capture_output=True)
"""


@pytest.fixture
def in_container(as_user):
    """Start claimants in user namespaces."""

    def in_container(uid, *mounts):
        claimant = as_user(uid, ledger=False)
        claimant.do(ENTER)
        try:
            claimant.do(f"enter(*{mounts!r})")
        except ClaimantError as error:
            if error.kind == "NotImplementedError":
                pytest.skip("user namespaces cannot be made here")
            raise
        claimant.do("begin()")
        return claimant

    return in_container


MOUNTED = ("--bind /run/anyaccel /dev/shm/kept", "-t tmpfs none /run")


@pytest.mark.parametrize("mounts", [(), MOUNTED], ids=["namespace", "container"])
def test_a_user_namespace_shares_the_machines_directory(as_user, in_container, mounts):
    root, bob = as_user(0, ledger=False), as_user(BOB, ledger=False)
    root.do(MAKE)
    root.do("os.mkdir('/dev/shm/kept')")
    bob.do("begin(); take('b')")
    inside = in_container(ALICE, *mounts)
    if mounts:
        inside.do("os.mkdir('/run/anyaccel')")
        inside.do("subprocess.run(['mount', '-n', '--bind', '/dev/shm/kept', '/run/anyaccel'], check=True); begin()")
    assert inside.do("[ledger.path, ledger.shared]") == [SHARED, True]
    with pytest.raises(ClaimantError, match=f"b is held by unknown \\(process {bob.pid}"):
        inside.do("take('b')")
    assert inside.do("take('a', 'b')") == {"a": 10_000}
    assert inside.do("held()") == [["a", 0, inside.pid], ["b", None, bob.pid]]
    assert inside.do("[each.user for each in ledger.leases() if each.device == 'b']") == ["unknown"]
    assert bob.do("held()") == [["a", ALICE, inside.pid], ["b", BOB, bob.pid]]
    bob.begin("take('a', wait=60)")
    eventually(lambda: inside.do("[each.user for each in ledger.tickets()]") == ["unknown"])
    inside.do("give()")
    assert bob.end() == {"a": 10_000}


def test_a_user_inside_and_outside_of_a_namespace_has_one_directory(as_user, in_container):
    outside, inside = as_user(ALICE), in_container(ALICE)
    inside.do("take('a')")
    assert inside.do("ledger.path") == f"/dev/shm/anyaccel-{ALICE}"
    with pytest.raises(ClaimantError, match=f"a is held by {ALICE}"):
        outside.do("take('a')")
    assert outside.do("take('b')") == {"b": 10_000}
    assert inside.do("held()") == [["a", 0, inside.pid], ["b", 0, outside.pid]]


def test_a_directory_of_a_user_who_is_not_shown_is_refused_with_the_right_remedy(as_user, in_container):
    mallory = as_user(MALLORY)
    mallory.do("os.umask(0); os.mkdir('/dev/shm/hers', 0o1777)")
    inside = in_container(ALICE)
    with pytest.raises(ClaimantError, match="belongs to a user who has no number in this user namespace"):
        inside.do("Ledger.open({'ANYACCEL_STATE_DIR': '/dev/shm/hers'})")
    with pytest.raises(ClaimantError, match=f"belongs to user {MALLORY}, who could take the leases"):
        as_user(ALICE).do("Ledger.open({'ANYACCEL_STATE_DIR': '/dev/shm/hers'})")
