"""What dies, hangs or escapes costs its own call, and leaves nothing behind."""

import atexit
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.ledger import Ledger
from anyaccel.linux import find_tree, process
from anyaccel.pool import spawning
from anyaccel.pool.reactor import find_reactor
from holders import copied, found_by, mark_of
from processes import gone, left_of
from waiting import PATIENCE, until


def end(how):
    if how == "exit":
        os._exit(3)
    if how == "sys.exit":
        sys.exit(4)
    os.kill(os.getpid(), how)
    time.sleep(60)


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("exit", 3, "ended with exit status 3"),
        ("sys.exit", 4, "ended with exit status 4"),
        (signal.SIGKILL, -9, "was killed by SIGKILL"),
        (signal.SIGSEGV, -11, "was killed by SIGSEGV"),
        (signal.SIGTERM, -15, "was killed by SIGTERM"),
    ],
)
def test_a_worker_that_ends_costs_its_call_only(pool, how, status, words, capfd):
    one = pool("A1:1", machine="sim:A1:1")
    futures = [one.submit(end, how), *(one.submit(os.getpid) for _ in range(2))]
    with pytest.raises(
        aa.BrokenWorkerError, match=rf"the worker \(process \d+\) that ran end {words} before"
    ) as caught:
        futures[0].result()
    assert caught.value.exit_status == status
    assert all(future.result() for future in futures[1:])
    shared = pool(max_workers=1)
    with pytest.raises(aa.BrokenWorkerError, match=words):
        shared.submit(end, how).result()
    assert shared.submit(os.getpid).result()


@pytest.mark.parametrize("missing", [True, False])
def test_a_worker_without_standard_error_runs_its_exit_handlers_too(pool, tmp_path, missing):
    path = tmp_path / "handled"

    def leave():
        atexit.register(path.touch)
        sys.stderr = None if missing else open(os.devnull)  # noqa: SIM115 - which cannot be written
        sys.exit("a text")

    with pytest.raises(aa.BrokenWorkerError, match="ended with exit status 1 before"):
        pool().submit(leave).result()
    assert path.exists()


def test_a_crash_says_where_it_was(pool, capfd):
    with pytest.raises(aa.BrokenWorkerError):
        pool().submit(end, signal.SIGSEGV).result()
    assert "Segmentation fault" in capfd.readouterr().err


class Home:
    def pid(self):
        return os.getpid()


@pytest.mark.parametrize("actor", [False, True])
@pytest.mark.parametrize("needs", [None, "A1:1"])
def test_a_process_that_was_forked_ahead_and_died_unused_is_replaced(pool, needs, actor):
    one = pool("A1:1")
    used = one.submit(os.getpid).result()
    server = spawning.fork_server().pid

    def forked_ahead():
        left = [pid for pid in process.children(server) if not gone(pid) and pid != used]
        return left[0] if len(left) == 1 else None

    spare = until(forked_ahead, "a process that was forked ahead")
    user = one.options(needs=needs)
    os.kill(server, signal.SIGSTOP)  # so its death is not seen before it is used
    try:
        os.kill(spare, signal.SIGKILL)
        until(lambda: gone(spare), "its death")
        future = user.actor(Home).ready if actor else user.submit(os.getpid)
    finally:
        os.kill(server, signal.SIGCONT)
    assert future.result(60) != spare


@pytest.mark.parametrize("needs", [None, "A1:1"])
def test_a_call_that_its_process_never_took_runs_in_another(pool, needs):
    one = pool(needs, machine="sim:A1:1", max_calls=0, max_workers=1)
    pid = one.submit(os.getpid).result()
    os.kill(pid, signal.SIGSTOP)  # so it takes nothing out of its channel
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it to stop")
    future = one.submit(os.getpid)
    until(future.running, "the call to be sent")
    os.kill(pid, signal.SIGKILL)
    assert future.result(60) != pid


def test_an_unused_worker_that_dies_is_replaced(pool):
    one = pool("A1:1", max_calls=0, machine="sim:A1:1")
    pid = one.submit(os.getpid).result()
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid), "its death")
    until(lambda: not one._core.members, "the news")
    assert one.submit(os.getpid).result() != pid


DAEMON = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(1000)
    os._exit(0)
os._exit(0)
"""


def test_a_daemon_does_not_outlive_its_call(pool, tmp_path):
    """It has forked twice, has a session of its own, an empty environment, and ignores SIGTERM."""
    path = str(tmp_path / "pid")

    def daemonize():
        subprocess.run([sys.executable, "-c", DAEMON, path], env={}, check=True)
        while not (os.path.exists(path) and Path(path).read_text()):
            time.sleep(0.002)

    one = pool("A1:1", machine="sim:A1:1", grace=0.1)
    one.submit(daemonize).result()
    assert one.submit(pow, 2, 2).result() == 4  # the next holder has the device alone
    assert gone(int(Path(path).read_text()))


def test_workers_that_die_at_the_same_moment_are_not_taken_for_each_other(pool, tmp_path):
    """What they leave cannot be told apart any more, so none of their devices is free before all of it has gone."""

    def leave():
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (tmp_path / f"{os.getpid()}.left").touch()
            time.sleep(1000)
        (tmp_path / f"{os.getpid()}.worker").touch()
        time.sleep(1000)

    one = pool("A1:1", machine="sim:A1:2", grace=0.3)
    futures = [one.submit(leave) for _ in range(2)]
    until(lambda: len([*tmp_path.glob("*.left"), *tmp_path.glob("*.worker")]) == 4, "both")
    server = spawning.fork_server().pid
    os.kill(server, signal.SIGSTOP)
    for worker in tmp_path.glob("*.worker"):
        os.kill(int(worker.stem), signal.SIGKILL)
    until(lambda: all(gone(int(worker.stem)) for worker in tmp_path.glob("*.worker")), "their death")
    os.kill(server, signal.SIGCONT)
    left = [int(path.stem) for path in tmp_path.glob("*.left")]
    assert one.submit(lambda: [os.path.exists(f"/proc/{pid}") for pid in left]).result() == [False, False]
    for future in futures:
        with pytest.raises(aa.BrokenWorkerError):
            future.result()


def test_processes_that_fork_while_they_are_killed(pool):
    def bomb():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        deadline = time.monotonic() + 30
        children = 0
        while time.monotonic() < deadline:
            if os.fork() == 0:
                time.sleep(0.05)
            elif (children := children + 1) > 3:
                time.sleep(1000)

    one = pool("A1:1", machine="sim:A1:1", timeout=0.2, grace=0)
    with pytest.raises(aa.TaskTimeoutError):
        one.submit(bomb).result()
    one.options(timeout=None).submit(os.getpid).result()
    # The last worker on its way out, and the next one.
    server = spawning.fork_server().pid
    find = find_tree({server: process.start_time(server)})
    until(lambda: len(found_by(find)) <= 3, "the end of all others")


def test_what_a_worker_leaves_affects_no_other_call(pool, tmp_path):
    """It leaves a child, whose child dies without being reaped: then it is unknown whose the grandchildren are."""

    def leave():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork():
            return os.getpid()
        if os.fork():
            time.sleep(1000)  # and reaps no process
        for seconds in (0.1, 0.2, 1000):
            if not os.fork():
                until((tmp_path / "left").exists, "the end of the worker")
                time.sleep(seconds)
                os._exit(0)
        until((tmp_path / "left").exists, "the end of the worker")
        os._exit(0)

    def live():
        until((tmp_path / "end").exists, "the end of the test")
        return "lives"

    one = pool("A1:1", grace=1)
    other = one.submit(live)
    worker = one.submit(leave).result()
    until(lambda: gone(worker), "the end of the worker")
    (tmp_path / "left").touch()
    assert one.submit(os.getpid).result() != worker, "it waits until what holds the device has been killed"
    (tmp_path / "end").touch()
    assert other.result() == "lives"


def test_the_fork_server_dies(pool, tmp_path):
    def work():
        plain = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        clean = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
        (tmp_path / "new").write_text(f"{os.getpid()} {plain.pid} {clean.pid}")
        (tmp_path / "new").rename(tmp_path / "pids")
        time.sleep(1000)

    one = pool("A1:1", machine="sim:A1:1")
    future = one.submit(work)
    waiting = one.submit(os.getpid)
    pids = until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().split(), "the call")
    old = spawning.fork_server()
    os.kill(old.pid, signal.SIGKILL)
    with pytest.raises(aa.BrokenWorkerError, match="its fork server was killed by SIGKILL"):
        future.result()
    assert waiting.result()
    assert spawning.fork_server() is not old
    until(lambda: all(gone(int(pid)) for pid in pids), "the end of the call's processes")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_a_pool_whose_fork_server_dies_does_not_wait_for_another_user_who_has_copied_the_mark(pool, tmp_path):
    """The device is kept for the copy, which the worker may have started: nothing tells the two apart."""

    def work():
        (tmp_path / "begun").touch()
        time.sleep(1000)

    one = pool("A1:1", machine="sim:A1:1")
    future = one.submit(work)
    until((tmp_path / "begun").exists, "the call")
    with copied(mark_of(Ledger.open().path)) as copy:
        os.kill(spawning.fork_server().pid, signal.SIGKILL)
        with pytest.raises(aa.BrokenWorkerError, match="its fork server was killed by SIGKILL"):
            future.result()
        until(lambda: [each.carriers for each in Ledger.open().leases()] == [(copy,)], "the end of the worker")
        assert not gone(copy)
    assert one.submit(int).result() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_a_pool_ends_even_if_the_ledger_cannot_be_read_when_a_worker_has_gone(pool, tmp_path, monkeypatch):
    def work():
        (tmp_path / "begun").touch()
        time.sleep(1000)

    state = tmp_path / "state"
    monkeypatch.setenv("ANYACCEL_STATE_DIR", str(state))
    one = pool("A1:1", machine="sim:A1:1")
    future = one.submit(work)
    until((tmp_path / "begun").exists, "the call")
    with copied(mark_of(str(state))):  # so that the device is left to the carrier of the mark
        state.rename(tmp_path / "former")
        state.symlink_to(tmp_path / "former")  # which is not trusted
        ending = threading.Thread(target=one.shutdown)
        ending.start()
        until(lambda: one._core.closed, "the shutdown")
        os.kill(spawning.fork_server().pid, signal.SIGKILL)
        with pytest.raises(aa.BrokenWorkerError, match="its fork server was killed by SIGKILL"):
            future.result()
        ending.join(PATIENCE)
        assert not ending.is_alive()


def test_a_fork_server_that_cannot_live(pool, tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text("import os; os._exit(9)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises((aa.WorkerStartError, aa.BrokenWorkerError), match="server"):
        pool(preload=["deadly"]).submit(os.getpid).result()


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise OSError('no such chip')", "the module 'unfit' cannot be preloaded: OSError: no such chip"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(999,), daemon=True).start()",
            r"the fork server has 2 \(.*; preload fewer modules",
        ),
        ("f = open('/dev/fuse')", "a preloaded module has opened /dev/fuse"),
    ],
)
def test_a_fork_server_that_must_not_fork_says_why(pool, tmp_path, monkeypatch, source, why):
    if "/dev/fuse" in source and not os.access("/dev/fuse", os.R_OK):
        pytest.skip("no harmless character device that may be opened here")
    (tmp_path / "unfit.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    unfit = pool("A1:1", preload=["unfit"])
    try:
        with pytest.raises(aa.WorkerStartError, match=why):
            unfit.submit(os.getpid).result()
        with pytest.raises(aa.WorkerStartError, match=why):
            unfit.submit(os.getpid).result()  # the device has come back
    finally:
        spawning.fork_server(["unfit"]).close()  # another test has another module of that name


CALLER = """
import os, signal, subprocess, sys, time
import anyaccel as aa
from anyaccel.pool import spawning
def work():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 1000 & setsid sleep 1000"])
    print("running", flush=True)
    time.sleep(1000)
marker = "STARTED_BY=%d" % os.getpid()
os.environ["STARTED_BY"] = str(os.getpid())
pool = aa.Pool("A1:1", machine="sim:A1:2")
print(marker, flush=True)
futures = [pool.submit(work) for _ in range(4)]
{then}
"""


@pytest.mark.parametrize("when", ["at once", "while it starts", "while it runs"])
def test_nothing_outlives_a_caller_that_is_killed(script, when):
    caller = script(CALLER.format(then="futures[0].result()"))
    marker = caller.stdout.readline().strip()
    if when == "while it starts":
        time.sleep(0.02)
    if when == "while it runs":
        assert [caller.stdout.readline() for _ in range(2)] == ["running\n"] * 2
    caller.kill()
    until(lambda: not left_of(marker), "the end of all")
    caller.communicate()


def test_nothing_outlives_the_terminal(acme, tmp_path):
    """The kernel sends SIGHUP to the leader of the terminal's session; workers have sessions of their own."""
    program = tmp_path / "program.py"
    begin = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    program.write_text(begin + CALLER.format(then="futures[0].result()"))
    terminal, end = pty.openpty()
    with subprocess.Popen(
        [sys.executable, program], stdin=end, stdout=subprocess.PIPE, stderr=end, text=True, start_new_session=True
    ) as caller:
        os.close(end)
        marker = caller.stdout.readline().strip()
        assert [caller.stdout.readline() for _ in range(2)] == ["running\n"] * 2
        os.close(terminal)
        assert caller.wait(PATIENCE) == -signal.SIGHUP
        until(lambda: not left_of(marker), "the end of all")


def test_nothing_outlives_a_caller_that_forked(script):
    """A copy of the caller's end of all channels lives on in a child, so there is no end of file to wait for."""
    caller = script(
        CALLER.format(
            then="child = os.fork()\nif not child: time.sleep(1000)\nprint(child, flush=True)\nfutures[0].result()"
        )
    )
    marker = caller.stdout.readline().strip()
    lines = [caller.stdout.readline() for _ in range(3)]
    (child,) = [int(line) for line in lines if line != "running\n"]
    caller.kill()
    try:
        until(lambda: not left_of(marker), "the end of all")
        assert not gone(child)
    finally:
        os.kill(child, signal.SIGKILL)
        caller.communicate()


def test_the_end_of_the_interpreter_waits_for_calls(script):
    caller = script(
        """
        import time, anyaccel as aa
        pool = aa.Pool("A1:1", machine="sim:A1:1")
        for i in range(3):
            pool.submit(lambda i=i: (time.sleep(0.05), print("done", i)))
        """
    )
    out, err = caller.communicate()
    assert (caller.returncode, out.splitlines(), err) == (0, ["done 0", "done 1", "done 2"], "")


def test_the_end_of_the_interpreter_ends_all_pools_at_once(script, tmp_path):
    """The processes of each pool wait for those of the others before they exit."""
    caller = script(
        f"""
        import atexit, os, time, anyaccel as aa
        def leave(name):
            open(f"{tmp_path}/{{name}}", "w").close()
            while not all(os.path.exists(f"{tmp_path}/{{other}}") for other in range(3)):
                time.sleep(0.01)
            print("met", flush=True)
        pools = [aa.Pool(machine="sim:A1:1", grace=60) for _ in range(3)]
        for name, pool in enumerate(pools):
            pool.submit(lambda name=name: atexit.register(leave, name) and None).result()
        """
    )
    assert caller.communicate() == ("met\n" * 3, "")


def test_the_end_of_the_interpreter_with_an_actor_and_a_kept_process(script):
    caller = script(
        """
        import collections, anyaccel as aa
        pool = aa.Pool("A1:0.5", machine="sim:A1:1", max_calls=0)
        actor = pool.actor(collections.Counter, "hello")
        print(actor.total().result(), pool.submit(pow, 2, 3).result())
        """
    )
    assert caller.communicate() == ("5 8\n", "")
    assert caller.returncode == 0


INTERRUPTED = """
import os, signal, sys, time
import anyaccel as aa
from anyaccel.pool import spawning
def work(stubborn):
    if stubborn:
        signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))
    try:
        print("running", os.getpid(), flush=True)
        time.sleep(1000)
    finally:
        print("cleaned up", flush=True)
with aa.Pool("A1:1", machine="sim:A1:1", grace=1000) as pool:
    running = pool.submit(work, {stubborn})
    waiting = pool.submit(print, "never")
    running.result()
"""


def test_ctrl_c_once_ends_cleanly(script):
    caller = script(INTERRUPTED.format(stubborn=False))
    assert caller.stdout.readline().startswith("running")
    caller.send_signal(signal.SIGINT)
    out, err = caller.communicate()
    assert caller.returncode == -signal.SIGINT
    assert out == "cleaned up\n"
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_twice_kills(script):
    caller = script(INTERRUPTED.format(stubborn=True))
    pid = int(caller.stdout.readline().split()[1])
    caller.send_signal(signal.SIGINT)
    assert caller.stdout.readline() == "asked\n"
    assert not gone(pid)
    caller.send_signal(signal.SIGINT)
    out, _ = caller.communicate()
    assert caller.returncode == -signal.SIGINT
    assert out == ""
    assert gone(pid)


def test_ctrl_c_at_the_terminal_does_not_reach_workers(pool):
    assert pool().submit(lambda: os.getpgid(0) != os.getpgid(os.getppid())).result()


def test_no_zombie_is_left(pool):
    one = pool("A1:1")
    for _ in range(5):
        one.submit(os.system, "true &").result()
    one.shutdown()
    server = spawning.fork_server()

    def ended():
        left = process.children(server.pid)
        return len(left) <= 1 and not any(map(gone, left))

    until(ended, "the fork server to have no children, dead or alive, but the one that was forked ahead")
    assert server.pid in process.children(os.getpid())


def test_a_caller_without_output(script):
    caller = script(
        """
        import os, anyaccel as aa
        os.close(1); os.close(2)
        with aa.Pool("A1:1", machine="sim:A1:1") as pool:
            pool.submit(print, "unheard").result()
            os._exit(pool.submit(pow, 7, 1).result())
        """
    )
    caller.communicate()
    assert caller.returncode == 7


def test_a_caller_that_blocks_signals(script):
    caller = script(
        """
        import signal, threading, time, anyaccel as aa
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
        with aa.Pool("A1:1", machine="sim:A1:1") as pool:
            print(pool.submit(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ())).result())
            try:
                pool.options(timeout=0.1).submit(time.sleep, 1000).result()
            except TimeoutError as error:
                print(error)
        """
    )
    out, err = caller.communicate()
    assert (out, err) == ("set()\nsleep took longer than its timeout of 0.1 s\n", "")


def test_a_working_directory_that_has_gone(pool, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    one = pool("A1:1", machine="sim:A1:1")
    one.submit(pow, 1, 1).result()
    here.rmdir()
    with pytest.raises(aa.WorkerStartError, match="the working directory has gone"):
        one.submit(pow, 1, 1).result()
    monkeypatch.chdir(tmp_path)
    assert one.submit(pow, 2, 1).result() == 2


@pytest.mark.parametrize("leaves", [False, True])
def test_no_descriptors_left(script, tmp_path, leaves):
    """Where the first call leaves something behind, the second one must wait for the device, too."""
    caller = script(
        f"""
        import os, resource, signal, subprocess, threading, time, anyaccel as aa
        from anyaccel.pool.reactor import find_reactor
        def call():
            if {leaves}:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                subprocess.Popen(["sh", "-c", "until [ -e {tmp_path}/go ]; do sleep 0.05; done"])
            return 2
        with aa.Pool("A1:1", machine="sim:A1:1", grace=100) as pool:
            print(pool.submit(call).result())
            while pool._core.members and not {leaves}:
                time.sleep(0.01)
            closed = threading.Event()
            find_reactor().call_soon(closed.set)
            closed.wait()  # no descriptor comes back any more
            used = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, 4096))
            taken = []
            try:
                while True: taken.append(os.dup(0))
            except OSError: pass
            try:
                pool.submit(pow, 2, 1).result()
            except aa.AnyaccelError as error:
                print("Too many open files" in str(error))
            for fd in taken: os.close(fd)
            open("{tmp_path}/go", "w").close()
            print(pool.submit(pow, 2, 2).result())
        """
    )
    assert caller.communicate(timeout=60) == ("2\nTrue\n4\n", "")


def test_a_process_that_ignores_sigkill_keeps_its_device(pool, monkeypatch):
    """The fork server says so after a minute; here it is told to say so at once."""
    one = pool("A1:1", machine="sim:A1:1")
    future = one.submit(time.sleep, 1000)
    until(future.running, "it")
    (member,) = one._core.members
    member.on_stuck("process 7 (state D, in the kernel) did not end 60 s after SIGKILL")
    with pytest.raises(aa.BrokenWorkerError, match=r"process 7 \(state D"):
        future.result()
    waiting = one.submit(pow, 2, 2)
    assert one.quarantined[0][0] == future.allocation
    assert "state D" in one.quarantined[0][1]
    assert waiting.allocation is None
    member.stop(0)
    assert waiting.result() == 4
    assert one.quarantined == ()


def test_an_idle_process_that_ignores_sigkill_gets_no_call(pool):
    """As one whose fork server has died."""
    one = pool(max_workers=2)
    stuck = one.submit(os.getpid).result()
    (member,) = one._core.members
    until(lambda: not member.running, "the answer")
    done = threading.Event()
    find_reactor().call_soon(lambda: (member.on_stuck("process 7 did not end"), done.set()))
    assert done.wait(PATIENCE)
    assert one.submit(os.getpid).result(PATIENCE) != stuck
    member.stop(0)


def test_a_callback_that_exits_costs_no_device(pool):
    """The callback runs in the thread that has more to do at the end of a worker."""
    one = pool("A1:1", machine="sim:A1:1")
    for how in (signal.SIGKILL, "exit"):
        future = one.submit(end, how)
        future.add_done_callback(lambda _: sys.exit(3))
        with pytest.raises(aa.BrokenWorkerError):
            future.result(PATIENCE)
    assert one.submit(pow, 2, 2).result(PATIENCE) == 4
