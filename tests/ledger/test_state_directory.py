"""The state directory: what is trusted, what is refused, and what becomes of it while it is used."""

import os
import resource
import shutil
import signal
import stat
import subprocess
import sys

import disks
import pytest
from anyaccel.errors import DevicesBusyError, LeaseNotFoundError, LedgerError, StateDirectoryError
from anyaccel.ledger import Ledger, Want, directory, entries, tickets
from anyaccel.linux import process
from anyaccel.model import Extent
from claimant import Claimant, ClaimantError
from lengths import length

ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="needs root, to act as another user")
ANY = Want(candidates=frozenset("ab"))


def open_at(path):
    return Ledger.open({"ANYACCEL_STATE_DIR": str(path)})


def one(taken):
    return None if taken.get("a") else {"a": Extent()}


def test_it_is_made_for_oneself_by_who_takes_devices(tmp_path):
    ledger = open_at(tmp_path / "new")
    assert (ledger.leases(), ledger.tickets(), ledger.find_wanted(frozenset("a"))) == ((), (), frozenset())
    with pytest.raises(LeaseNotFoundError, match=r"the state directory .* does not exist"):
        ledger.end_lease("0123456789ab")
    assert not ledger.shared
    assert os.listdir(tmp_path) == []  # looking has made nothing
    with ledger.acquire(ANY, one, wait=0):
        assert stat.S_IMODE(os.stat(tmp_path / "new").st_mode) == 0o700
    assert not ledger.shared


def test_its_parent_must_be_there(tmp_path):
    with pytest.raises(StateDirectoryError, match="must be in a directory") as caught:
        open_at(tmp_path / "no" / "such")
    assert caught.value.exit_code == 6


def test_it_must_be_absolute():
    with pytest.raises(StateDirectoryError, match=r"must be an absolute path \(got 'state'\)"):
        open_at("state")


def test_links_and_files_are_refused(tmp_path, state):
    (tmp_path / "link").symlink_to(state)
    with pytest.raises(StateDirectoryError, match="symbolic link"):
        open_at(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(StateDirectoryError, match="not a directory"):
        open_at(tmp_path / "file")


@needs_root
def test_a_foreign_owner_is_refused(state):
    os.chown(state, 12345, -1)
    os.chmod(state, 0o1777)
    with pytest.raises(StateDirectoryError, match="belongs to user 12345, who could take the leases of others away"):
        open_at(state)


def test_what_others_may_write_must_be_sticky(state):
    for mode in (0o777, 0o770, 0o707):
        os.chmod(state, mode)
        with pytest.raises(StateDirectoryError, match="not sticky"):
            open_at(state)
    os.chmod(state, 0o1777)
    assert open_at(state).shared


def test_without_a_variable_there_is_one_for_all_or_one_for_oneself(monkeypatch, tmp_path):
    monkeypatch.setattr(directory, "MACHINE_WIDE", str(tmp_path / "anyaccel"))
    monkeypatch.setattr(directory, "private_directories", tuple)  # those of this machine's users are left alone
    if not ROOT:
        ledger = Ledger.open({})
        assert ledger.path.startswith(f"/dev/shm/anyaccel-{os.geteuid()}")
        assert not ledger.shared
        return
    ledger = Ledger.open({})
    assert ledger.leases() == ()
    assert os.listdir(tmp_path) == []
    before = os.umask(0o077)
    try:
        ledger.acquire(ANY, one, wait=0).release()
    finally:
        os.umask(before)
    assert ledger.path == str(tmp_path / "anyaccel")
    assert os.listdir(tmp_path) == ["anyaccel"]
    assert stat.S_IMODE(os.stat(ledger.path).st_mode) == 0o1777
    assert ledger.shared


def test_the_line_for_tmpfiles_makes_what_is_looked_for():
    line = os.path.join(os.path.dirname(directory.__file__), "tmpfiles.conf")
    with open(line) as file:
        (setting,) = [text.split() for text in file if not text.startswith("#")]
    assert setting == ["d", directory.MACHINE_WIDE, "1777", "root", "root", "-"]


def test_what_is_lost_is_looked_for_once(tmp_path):
    (tmp_path / "new").mkdir(mode=0o700)
    open_at(tmp_path / "new")
    (marker,) = os.listdir(tmp_path / "new")
    assert marker.startswith("checked.")
    before = os.stat(tmp_path / "new" / marker)
    open_at(tmp_path / "new")
    assert os.stat(tmp_path / "new" / marker).st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        *[(kind, True) for kind in ("nfs", "nfs4", "9p", "fuse.sshfs", "fuse", "cifs", "lustre")],
        *[(kind, False) for kind in ("tmpfs", "ext4", "overlay", "btrfs", "fuse.fuse-overlayfs", "")],
    ],
)
def test_network_file_systems_are_known(kind, network, tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "file_system", lambda descriptor: kind)
    (tmp_path / "new").mkdir(mode=0o700)
    if network:
        with pytest.raises(StateDirectoryError, match=f"on a network file system \\({kind}\\)"):
            open_at(tmp_path / "new")
    else:
        open_at(tmp_path / "new")


def test_a_file_system_is_looked_at_by_each_process_and_with_each_new_directory(tmp_path, monkeypatch):
    """Also where another process has found the directory fit: it may have come by another path."""
    path = tmp_path / "new"
    path.mkdir(mode=0o700)
    program = f"from anyaccel.ledger import Ledger; Ledger.open({{'ANYACCEL_STATE_DIR': {str(path)!r}}})"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert os.listdir(path)  # lost leases were looked for
    with monkeypatch.context() as network:
        network.setattr(directory, "file_system", lambda _: "nfs")
        with pytest.raises(StateDirectoryError, match="on a network file system"):
            open_at(path)
    open_at(path)
    monkeypatch.setattr(directory, "file_system", lambda _: "nfs")
    open_at(path)  # the same directory, so the same file system
    shutil.rmtree(path)
    path.mkdir(mode=0o700)
    with pytest.raises(StateDirectoryError, match="on a network file system"):
        open_at(path)


def test_the_type_of_a_file_system_is_that_of_its_mount():
    descriptor = os.open("/proc", os.O_RDONLY)
    assert directory.file_system(descriptor) == "proc"
    os.close(descriptor)


def test_it_is_deleted_while_it_is_used(claim, ledger, state, in_line):
    """What is held stays held: the holder's open file tells, and is given a name again in the new directory."""
    holder, waiter, late = claim(), claim(), claim()
    holder.do("take('a', note='mine')")
    waiter.begin("take('a', wait=60)")
    in_line(1)
    waiter.stop()  # who looks while file after file is removed sees free what is held: the promise is for after that
    shutil.rmtree(state)
    waiter.signal(signal.SIGCONT)
    with pytest.raises(ClaimantError, match=f"DevicesBusyError: .*process {holder.pid}"):
        late.do("take('a', priority=1)")
    assert waiter.busy(1), waiter.end()
    assert [(record.device, record.pid) for record in ledger.leases()] == [("a", holder.pid)]
    assert stat.S_IMODE(os.stat(state).st_mode) == 0o700
    holder.do("give()")
    assert waiter.end() == {"a": 10_000}
    waiter.do("give()")
    assert late.do("take('a')") == {"a": 10_000}


def test_it_is_emptied_while_it_is_used(claim, ledger, state):
    """As with ``rm -rf /run/anyaccel/*``: who has found it fit before looks for what is in force, too."""
    holder, old = claim(), claim()
    holder.do("take('a')")
    old.do("take('b'); give()")
    for path in state.iterdir():
        path.unlink()
    assert [(record.device, record.pid) for record in ledger.leases()] == [("a", holder.pid)]
    for path in state.iterdir():
        path.unlink()
    with pytest.raises(ClaimantError, match=f"DevicesBusyError: .*process {holder.pid}"):
        old.do("take('a')")
    holder.do("give()")
    assert old.do("take('a')") == {"a": 10_000}


def test_it_is_deleted_while_a_process_looks(claim, ledger, state):
    """A file that went with the directory says that its lease is over for this look, and not for the next one."""
    holder = claim()
    holder.do("take('a')")
    directories = [state]

    def choose(taken):
        while directories:
            shutil.rmtree(directories.pop())
        return one(taken)

    with pytest.raises(DevicesBusyError, match=f"process {holder.pid}"):
        ledger.acquire(ANY, choose, wait=0.2)
    assert [(record.device, record.pid) for record in ledger.leases()] == [("a", holder.pid)]


def test_it_is_renamed_while_a_process_looks(claim, ledger, state):
    """The lease is in the directory that others find."""

    def choose(taken):
        if not former.exists():
            state.rename(former)
        return None if "a" in taken else {"a": Extent()}

    former = state.with_name("former")
    lease = ledger.acquire(Want(candidates=frozenset("a")), choose, wait=600)
    with pytest.raises(ClaimantError, match="DevicesBusyError"):
        claim().do("take('a')")
    lease.release()


def test_it_is_deleted_and_the_holder_is_killed(claim, state):
    """Whatever carries the lock of the lost file keeps the device, and nothing else does."""
    holder, rival = claim(), claim()
    holder.do("take('a')")
    worker = holder.do("subprocess.Popen(['sleep', '600'], pass_fds=leases[0].fds).pid")
    with open(next(state.glob("v*.a.*"))) as file:
        looks = subprocess.Popen(["sleep", "600"], stdin=file)
    shutil.rmtree(state)
    assert rival.do("take('b')") == {"b": 10_000}
    holder.kill()
    with pytest.raises(ClaimantError, match=f"DevicesBusyError: .*process {worker}"):
        rival.do("take('a')")
    os.kill(worker, signal.SIGKILL)
    assert rival.do("take('a', wait=60)") == {"a": 10_000}
    looks.kill()
    looks.wait()


def test_it_is_deleted_and_a_share_of_several_processes_counts_once(claim, ledger, state):
    holder, rival = claim(), claim()
    holder.do("take('a', units=5000)")
    worker = holder.do("subprocess.Popen(['sleep', '600'], pass_fds=leases[0].fds).pid")
    shutil.rmtree(state)
    assert rival.do("take('b')") == {"b": 10_000}
    assert len([name for name in os.listdir(state) if ".5000." in name]) == 2
    assert [record.units for record in ledger.leases() if record.device == "a"] == [5000]
    assert rival.do("take('a', units=5000)") == {"a": 5000}
    directory = os.open(state, os.O_RDONLY)
    assert sorted(each.units for each in tickets.list_holdings(directory, entries.list_names(directory))) == [
        5000,
        5000,
        10_000,
    ]
    os.close(directory)
    os.kill(worker, signal.SIGKILL)


def test_it_is_deleted_and_the_lease_is_left_to_who_has_its_descriptors(claim, state):
    holder, rival = claim(), claim()
    holder.do("take('a')")
    worker = holder.do("subprocess.Popen(['sleep', '600'], pass_fds=leases[0].fds).pid")
    shutil.rmtree(state)
    holder.do("leases.pop().leave_to(())")
    with pytest.raises(ClaimantError, match="DevicesBusyError"):
        rival.do("take('a')")
    os.kill(worker, signal.SIGKILL)
    assert rival.do("take('a', wait=60)") == {"a": 10_000}


def test_what_was_given_back_before_it_was_deleted_is_free(claim, state):
    holder, rival = claim(), claim()
    holder.do("take('a'); take('b'); leases.pop(0).release()")
    shutil.rmtree(state)
    assert rival.do("take('a', 'b')") == {"a": 10_000}


def test_odd_names_disturb_no_process(claim, ledger, state, files):
    holder = claim()
    odd = ["v1", "v1.", "t1.", ".x", ".", "v1.a.b.c.d.e", "naïve", "-rf", "v2.a.5000.1.1.zz", "t1.0.0", "x" * 255]
    for name in odd:
        if name != ".":
            (state / name).touch()
    (state / "v2.a.10000.1.1.0000000000000000.0123456789abcdef0123").mkdir()
    (state / "v2.b.10000.1.1.0000000000000000.0123456789abcdef0123").symlink_to("/etc/passwd")
    os.mkfifo(state / "v2.c.10000.1.1.0000000000000000.0123456789abcdef0123")
    (state / b"v1.d\xff.1".decode(errors="surrogateescape")).touch()
    before = set(files())
    assert holder.do("take('a', 'b', 'c', count=3)") == {"a": 10_000, "b": 10_000, "c": 10_000}
    assert [record.device for record in ledger.leases()] == ["a", "b", "c"]
    assert ledger.tickets() == ()
    holder.do("give()")
    # Links and pipes of ours that look like a lease are swept; what a link points to is not.
    assert before - set(files()) <= {f"v2.{device}.10000.1.1.0000000000000000.0123456789abcdef0123" for device in "bc"}
    assert os.path.exists("/etc/passwd")


def test_a_process_id_that_was_given_out_again(claim, ledger, state, files):
    """The start time tells the dead holder from the process that has its number now."""
    other, rival = claim(), claim()
    pid, start = other.pid, process.start_time(other.pid)
    tag = other.do("__import__('anyaccel.ledger.entries').ledger.entries.new_nonce()")
    name = f"v2.a.10000.{pid}.{start + 1}.0000000000000000.{tag}"
    (state / name).touch(0o644)
    assert ledger.leases() == ()
    assert rival.do("take('a')") == {"a": 10_000}
    assert name not in files()
    rival.do("give()")
    name = f"v2.a.10000.{pid}.{start}.0000000000000000.{tag}"
    (state / name).touch(0o644)
    assert [(record.pid, record.state) for record in ledger.leases()] == [(pid, "held")]


def test_what_outlived_a_boot_is_void(claim, ledger, state, files):
    other, rival = claim(), claim()
    name = f"v2.a.10000.{other.pid}.{process.start_time(other.pid)}.{'0' * 16}.{'0' * 7}f{'1' * 12}"
    (state / name).touch(0o644)
    assert ledger.leases() == ()
    assert rival.do("take('a')") == {"a": 10_000}
    assert name not in files()


def test_debris_is_swept_by_the_next(claim, state, files):
    dead, alive, rival = claim(), claim(), claim()
    start = process.start_time(dead.pid)
    tag = "__import__('anyaccel.ledger.entries').ledger.entries.hidden_name()"
    names = [dead.do(tag), dead.do(tag), alive.do(tag)]
    for name in names:
        (state / name).touch(0o644)
    assert start
    dead.kill()
    rival.do("take('a')")
    rival.do("give()")
    assert files() == [names[2]]


def test_no_descriptors_left(ledger, files):
    lease = ledger.acquire(ANY, one, wait=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    opened = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, hard))
    try:
        for room in range(2):
            while True:
                try:
                    opened.append(os.open("/dev/null", os.O_RDONLY))
                except OSError:
                    break
            for _ in range(room):
                os.close(opened.pop())
            with pytest.raises(LedgerError, match="Too many open files"):
                ledger.acquire(Want(candidates=frozenset("b")), lambda taken: {"b": Extent(1)}, wait=0)
        lease.release()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in opened:
            os.close(descriptor)
    assert files() == []


SCARCE = """
import resource, anyaccel.ledger.recovery, anyaccel.ledger.ending, anyaccel.linux.inotify
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir('/proc/self/fd'))) + 8, limits[1]))
opened = []
try:
    while True:
        opened.append(os.open('/dev/null', os.O_RDONLY))
except OSError:
    pass
for _ in range(ROOM):
    os.close(opened.pop())
"""
PLENTY = "resource.setrlimit(resource.RLIMIT_NOFILE, limits)\nfor each in opened: os.close(each)"


@pytest.mark.parametrize("room", range(5))
def test_who_had_no_descriptor_left_at_first_knows_later_what_is_held(claim, nest, state, room):
    """What could not be read is no answer, and is read again: here the tag of the boot, and the holder's start."""
    holder, late = claim(), Claimant(nest)
    holder.do("take('a')")
    for path in state.iterdir():
        path.unlink()
    with pytest.raises(ClaimantError, match="DevicesBusyError"):
        claim().do("take('a')")  # the lease has no lock now: that its process lives keeps it in force
    claims = f"open_ledger({str(state)!r}); take('a')"
    try:
        late.do(SCARCE.replace("ROOM", str(room)))
        with pytest.raises(ClaimantError):
            late.do(claims)
        late.do(PLENTY)
        with pytest.raises(ClaimantError, match=f"DevicesBusyError: .*process {holder.pid}"):
            late.do(claims)
    finally:
        late.close()


def test_a_fork_in_the_middle_of_everything_leaves_the_lock_to_its_owner(claim, ledger, in_line):
    """A child that is forked while another thread publishes shares no lock of the directory with its parent."""
    holder, rival = claim(), claim()
    holder.do(
        "stop = threading.Event()\n"
        "def churn():\n"
        "    while not stop.is_set():\n"
        "        take('a', wait=30); give()\n"
        "threads = [threading.Thread(target=churn) for _ in range(2)]\n"
        "for thread in threads: thread.start()\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "children = []\n"
        "for _ in range(60):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        time.sleep(600)\n"
        "        os._exit(0)\n"
        "    children.append(pid)\n"
        "stop.set()\n"
        "for thread in threads: thread.join()\n"
    )
    children = holder.do("children")
    try:
        assert rival.do("take('a'); give(); take('b')") is None  # the lock is free, and so is what was released
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_what_is_being_made_may_be_taken_for_debris(claim, ledger, files):
    """As by a process in another container, which sees the file and not the process; it is made again."""
    eager, claimant = claim(), claim()
    stop = os.path.join(os.path.dirname(ledger.path), "stop")
    eager.begin(
        f"while not os.path.exists({stop!r}):\n"
        "    for name in os.listdir(ledger.path):\n"
        "        if name.startswith('.'):\n"
        "            try: os.unlink(ledger.path + '/' + name)\n"
        "            except FileNotFoundError: pass\n"
        "    __import__('time').sleep(0.001)\n"  # on a processor of its own, it would else see every file
    )
    for _ in range(length(50, 500)):
        assert claimant.do("take('a', 'b', count=2, wait=30)") == {"a": 10_000, "b": 10_000}
        claimant.do("give()")
    open(stop, "w").close()
    eager.end()
    assert files() == []


@needs_root
def test_a_container_that_shares_the_directory(claim, ledger, state):
    """Its processes have other numbers, or none, here: the lock tells."""
    code = (
        "import sys; from anyaccel.ledger import Ledger, Want; from anyaccel.model import Extent\n"
        "ledger = Ledger.open({'ANYACCEL_STATE_DIR': sys.argv[1]})\n"
        "print([(record.device, record.here) for record in ledger.leases()], flush=True)\n"
        "lease = ledger.acquire(Want(candidates=frozenset('b')), lambda taken: {'b': Extent()}, wait=0)\n"
        "print('held', flush=True); input()"
    )
    inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", code, str(state)]
    rival = claim()
    rival.do("take('a')")
    with subprocess.Popen(inside, stdin=-1, stdout=-1, stderr=-1, text=True) as container:
        said = container.stdout.readline()
        if not said:
            pytest.skip(f"a process namespace cannot be made here: {container.stderr.read().strip()}")
        assert said == "[('a', False)]\n"
        assert container.stdout.readline() == "held\n"
        assert [(record.device, record.pid, record.here) for record in ledger.leases()][1:] == [("b", 1, False)]
        with pytest.raises(ClaimantError, match="DevicesBusyError"):
            rival.do("take('b')")
        rival.begin("take('b', wait=60)")
        container.kill()
        assert rival.end() == {"b": 10_000}


@needs_root
def test_a_read_only_file_system(tmp_path):
    path = tmp_path / "mount"
    path.mkdir()
    with disks.mounted(path, "mode=700"):
        ledger = open_at(path)
        subprocess.run(["mount", "-o", "remount,ro", path], check=True)
        assert ledger.leases() == ()
        with pytest.raises(StateDirectoryError, match="cannot be written: Read-only file system") as refused:
            ledger.acquire(ANY, one, wait=0)
        assert refused.value.hint == "mount its file system for writing, or set ANYACCEL_STATE_DIR"


def test_nothing_of_it_is_needed_to_import(tmp_path):
    code = "import sys, anyaccel.ledger; print(sorted({'ctypes', 'asyncio', 'subprocess', 'pwd'} & set(sys.modules)))"
    environ = {"HOME": str(tmp_path)}  # without it, Python itself looks it up
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.strip() == "[]"
