"""Processes that are not what they look like: in other namespaces, without their first thread, under attack."""

import fcntl
import io
import os
import signal
import subprocess
import sys

import pytest
from anyaccel.linux import descriptors, process
from claimant import SILENCE, ClaimantError, eventually
from claimant import state as state_of
from lengths import length

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make namespaces and act as another user")
ALICE = 61_001


@needs_root
def test_clocks_that_jump_in_a_time_namespace(claim, ledger, state):
    """There every process seems to have been started a day later: it is still the same process."""
    code = (
        "import sys; from anyaccel.ledger import Ledger, Want; from anyaccel.model import Extent\n"
        "ledger = Ledger.open({'ANYACCEL_STATE_DIR': sys.argv[1]})\n"
        "print([(record.device, record.state) for record in ledger.leases()], flush=True)\n"
        "choose = lambda taken: None if taken.get(sys.argv[2]) else {sys.argv[2]: Extent()}\n"
        "lease = ledger.acquire(Want(candidates=frozenset(sys.argv[2])), choose, wait=0)\n"
        "print('held', flush=True); input()"
    )
    shift = ["unshare", "--time", "--fork", "--kill-child", "--boottime", "86400", "--monotonic", "86400"]
    tried = subprocess.run([*shift, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"a time namespace cannot be made here: {tried.stderr.strip()}")
    holder = claim()
    holder.do("take('a'); os.close(leases[0].fds[0])")
    command = [*shift, sys.executable, "-c", code, str(state)]
    refused = subprocess.run([*command, "a"], capture_output=True, text=True, check=False, timeout=60)
    assert refused.stdout == "[('a', 'held')]\n"
    assert "DevicesBusyError" in refused.stderr
    with subprocess.Popen([*command, "b"], stdin=-1, stdout=-1, text=True) as shifted:
        assert (shifted.stdout.readline(), shifted.stdout.readline()) == ("[('a', 'held')]\n", "held\n")
        assert [(record.device, record.here) for record in ledger.leases()] == [("a", True), ("b", True)]
        shifted.communicate("\n", timeout=30)
    assert [record.device for record in ledger.leases()] == ["a"]


@needs_root
@pytest.mark.parametrize("offset", [1000, -1000])
def test_a_time_namespace_changes_nobodys_turn(claim, ledger, in_line, state, offset):
    """Stamps and the time of arrival are those of the machine's clock, in every process that looks."""
    code = (
        "import sys; from anyaccel.ledger import Ledger, Want, tickets; from anyaccel.model import Extent\n"
        f"tickets._PATIENCE = {SILENCE}; ledger = Ledger.open({{'ANYACCEL_STATE_DIR': sys.argv[1]}})\n"
        "choose = lambda taken: None if taken.get('a') else {'a': Extent()}\n"
        "lease = ledger.acquire(Want(candidates=frozenset('a'), request='inside'), choose)\n"
        "print([(each.responsive, each.waited < 100) for each in ledger.tickets()], flush=True); input()"
    )
    shift = ["unshare", "--time", "--fork", "--kill-child", "--monotonic", str(offset)]
    tried = subprocess.run([*shift, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"a time namespace cannot be made here: {tried.stderr.strip()}")
    holder, first, last = claim(), claim(), claim()
    holder.do("take('a')")
    first.begin("take('a', wait=60)")
    in_line(1)
    with subprocess.Popen([*shift, sys.executable, "-c", code, str(state)], stdin=-1, stdout=-1, text=True) as inside:
        in_line(2)
        last.begin("take('a', wait=60)")
        in_line(3)
        eventually(lambda: min(ticket.waited for ticket in ledger.tickets()) > 0.3)
        assert [ticket.request for ticket in ledger.tickets()] == ["a", "inside", "a"]
        assert all(ticket.responsive and ticket.waited < 100 for ticket in ledger.tickets())
        holder.do("give()")
        assert first.end() == {"a": 10_000}
        assert inside.poll() is None
        assert last.busy(0.3)
        first.do("give()")
        assert inside.stdout.readline() == "[(True, True)]\n"
        inside.communicate("\n", timeout=30)
        assert last.end() == {"a": 10_000}


PREPARED = """
import os, signal, sys
from anyaccel.errors import DevicesBusyError
from anyaccel.ledger import Ledger, Want
from anyaccel.linux import mark
from anyaccel.model import Extent
print('ready', flush=True)
ledger = Ledger.open({'ANYACCEL_STATE_DIR': sys.argv[1]})
want = Want(candidates=frozenset('a'), mark=mark.draw)
choose = lambda taken: None if 'a' in taken else {'a': Extent()}
"""
MARKED = """
ready, told = os.pipe()
if not (holder := os.fork()):
    lease = ledger.acquire(want, choose, wait=0)
    answer = b'listed'
    while answer == b'listed':  # a number that /proc lists may have the mark by chance
        if not os.fork():
            if os.path.exists(f'/proc/{os.getpid()}'):
                os.write(told, b'listed')
                os._exit(0)
            mark.put(lease.mark)
            for descriptor in lease.fds:
                os.close(descriptor)
            os.write(told, b'marked')
            signal.pause()
        answer = os.read(ready, 6)
    os._exit(0)
os.waitpid(holder, 0)
try:
    print(dict(ledger.acquire(want, choose, wait=0).devices), flush=True)
except DevicesBusyError as error:
    print('busy', flush=True)
"""


@pytest.fixture
def in_namespace(state):
    """Start a program in a process namespace with the /proc of the outer one, where numbers are of other processes."""
    programs = []

    def start(code):
        inside = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", PREPARED + code, str(state)]
        programs.append(subprocess.Popen(inside, stdin=-1, stdout=-1, stderr=-1, text=True))
        if programs[-1].stdout.readline() != "ready\n":
            pytest.skip(f"a process namespace cannot be made here: {programs[-1].stderr.read().strip()}")
        return programs[-1]

    yield start
    for program in programs:
        program.kill()
        program.communicate()


@needs_root
def test_a_killed_holder_in_a_namespace_without_its_own_proc_leaves_nothing(claim, in_namespace):
    """Its number is 1 there: the process 1 of /proc, which never ends, is not the holder."""
    inside = in_namespace("lease = ledger.acquire(want, choose, wait=0); print('held', flush=True); input()")
    assert inside.stdout.readline() == "held\n"
    rival = claim()
    with pytest.raises(ClaimantError, match="DevicesBusyError"):
        rival.do("take('a')")
    inside.kill()
    assert rival.do("take('a', wait=60)") == {"a": 10_000}


@needs_root
def test_a_marked_process_in_a_namespace_without_its_own_proc_keeps_the_device(in_namespace):
    """What /proc lists there tells nothing of the namespace's processes, so that a lease in doubt is active."""
    inside = in_namespace(MARKED)
    assert inside.stdout.readline() == "busy\n", inside.stderr.read()


def test_a_holder_whose_first_thread_has_ended(claim, ledger):
    """The table of processes calls it a zombie, and it lives."""
    holder, rival = claim(), claim()
    holder.begin(
        "take('a')\n"
        "libc = __import__('ctypes').CDLL(None)\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "libc.syscall(60 if os.uname().machine == 'x86_64' else 93, 0)\n"  # exit of one thread, not of the process
    )
    eventually(lambda: state_of(holder.pid) == "Z")
    assert [(record.device, record.state) for record in ledger.leases()] == [("a", "held")]
    assert not process.gone(holder.pid, process.start_time(holder.pid))
    with pytest.raises(ClaimantError, match="DevicesBusyError"):
        rival.do("take('a')")
    holder.kill()
    assert rival.do("take('a')") == {"a": 10_000}


def test_a_stopped_holder_keeps_its_device_and_is_shown(claim, ledger):
    holder, rival = claim(), claim()
    holder.do("take('a')")
    holder.stop()
    with pytest.raises(ClaimantError, match=f"process {holder.pid} is stopped"):
        rival.do("take('a')")
    assert ledger.leases()[0].state == "held"
    holder.signal(signal.SIGCONT)
    eventually(lambda: state_of(holder.pid) != "T")
    assert ledger.leases()[0].reason == ""


@needs_root
def test_thousands_of_files_of_another_user(claim, ledger, state):
    """Junk, dead leases and dead tickets: no process is kept from a device by them, and root removes what is dead."""
    os.chmod(state, 0o1777)
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    pid = int(dead.stdout)
    for number in range(length(2_000, 10_000)):
        name = (
            f"junk.{number}",
            f"v2.a.10000.{pid}.1.0000000000000000.{number:020d}",
            f"t1.5000000.{number:016d}.{pid}.1.{number:020d}.+",
        )[number % 3]
        descriptor = os.open(state / name, os.O_CREAT | os.O_WRONLY, 0o644)
        os.fchown(descriptor, ALICE, -1)
        os.close(descriptor)
    rival = claim()
    assert rival.do("take('a', wait=60)", timeout=60) == {"a": 10_000}
    assert [record.pid for record in ledger.leases()] == [rival.pid]
    assert sum(not name.startswith("junk.") for name in os.listdir(state)) < 5


def test_who_has_a_lock_is_found_where_the_kernels_table_skips_it(tmp_path, monkeypatch):
    """As it does in a long one, when other locks are dropped while it is read."""
    with open(tmp_path / "file", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = os.fstat(file.fileno())
        line = f"1: FLOCK  ADVISORY  WRITE {os.getpid()} {os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
        tables = ["", f"{line}:{found.st_ino} 0 EOF\n"]
        assert descriptors.lock_owner(found) == os.getpid()
        monkeypatch.setattr(descriptors, "open", lambda *_, **__: io.StringIO(tables.pop(0)), raising=False)
        assert descriptors.lock_owner(found) == os.getpid()
        assert tables == []
