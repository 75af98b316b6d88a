"""run --ranks and --port: the processes of a job find each other, and no two jobs meet at the same port."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyaccel as aa
import preloaded
import pytest
from anyaccel.launcher.sandbox import find_obstacle
from anyaccel_jobs.ranks import divide_processors
from numa_nodes import OURS, SHOW, nodes, run_on_nodes, two_nodes, two_processors
from terminals import run_on_terminal
from waiting import PATIENCE, until

__all__ = ["nodes", "two_nodes"]

MACHINE = "sim:A1:4"
TELL = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACME_VISIBLE")
os.write(1, json.dumps([os.environ.get(name) for name in names]).encode() + b"\\n")  # in one piece
"""
MEET = """
import os, socket
rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
address = os.environ["MASTER_ADDR"], port
if rank == 0:
    with socket.create_server(address) as server:
        for _ in range(int(os.environ["WORLD_SIZE"]) - 1):
            server.accept()[0].sendall(b"hello")
else:
    while True:
        try:
            with socket.create_connection(address, 60) as connection:
                assert connection.recv(5) == b"hello"
                break
        except ConnectionRefusedError:
            pass
"""


@pytest.fixture
def job(acme):
    """Start jobs; all that is left of them is killed in the end."""
    started = []

    def job(request, flag, *command, options=(), **more):
        arguments = ["--machine", MACHINE, "run", request, flag, *options, "--", *command]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(preloaded.start(arguments, text=True, **(pipes | more)))
        return started[-1]

    yield job
    for process in started:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def finished(process):
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def alive(pid):
    return state(pid) not in ("", "Z", "X")


def test_one_process_per_device_knows_its_rank(job):
    status, out, err = finished(job("A1:4", "--ranks", sys.executable, "-c", TELL))
    assert status == 0, err
    told = sorted(json.loads(line) for line in out.splitlines())
    assert [line[:4] for line in told] == [[str(rank), str(rank), "4", "4"] for rank in range(4)]
    assert len({tuple(line[4:]) for line in told}) == 1
    assert told[0][4] == "127.0.0.1"
    assert len(told[0][6].split(",")) == 4  # all see all, and choose by their rank


def test_jobs_at_the_same_time_have_other_devices_and_other_ports(job):
    wait = TELL + "sys.stdin.close(); import time; time.sleep(1000)"
    processes = [job("A1:2", "--ranks", sys.executable, "-c", wait) for _ in range(2)]
    told = [[json.loads(process.stdout.readline()) for _ in range(2)] for process in processes]
    assert {line[5] for line in told[0]} != {line[5] for line in told[1]}
    assert {line[6] for line in told[0]} != {line[6] for line in told[1]}


def test_the_ranks_meet(job):
    processes = [job("A1:2", "--ranks", sys.executable, "-c", MEET) for _ in range(2)]
    assert [finished(process)[::2] for process in processes] == [(0, ""), (0, "")]


def test_a_fraction_or_the_processor_alone_is_one_rank(job):
    status, out, err = finished(job("A1:0.5", "--ranks", sys.executable, "-c", TELL))
    assert (status, [json.loads(line)[:4] for line in out.splitlines()]) == (0, [["0", "0", "1", "1"]]), err
    status, out, _ = finished(job("A1:9,else=cpu", "--ranks", sys.executable, "-c", TELL))
    assert (status, [json.loads(line)[2] for line in out.splitlines()]) == (0, ["1"])


@pytest.mark.parametrize(
    ("end", "status"),
    [("sys.exit(5)", 5), ("os.kill(os.getpid(), 9)", 137), ("os.kill(os.getpid(), 15)", 143)],
    ids=["exit", "SIGKILL", "SIGTERM"],
)
def test_the_first_failure_ends_the_others_and_what_they_started(job, tmp_path, end, status):
    code = f"""
import os, subprocess, sys, time
rank = os.environ["RANK"]
child = subprocess.Popen(["sleep", "1000"])
with open({str(tmp_path)!r} + "/" + rank, "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
os.rename(file.name, file.name + ".there")
while len([name for name in os.listdir({str(tmp_path)!r}) if name.endswith(".there")]) < 4:
    time.sleep(0.01)
if rank == "1":
    {end}
time.sleep(1000)
"""
    found, _, err = finished(job("A1:4", "--ranks", sys.executable, "-c", code))
    assert found == status, err
    pids = [int(pid) for path in tmp_path.glob("*.there") for pid in path.read_text().split()]
    assert len(pids) == 8
    until(lambda: not any(map(alive, pids)), "the end of all")
    assert aa.leases(aa.detect(MACHINE)) == ()


def test_a_failure_ends_what_has_left_the_process_group_of_a_rank(job, tmp_path):
    script = f"""
if [ $RANK = 1 ]; then
    setsid env -i sh -c 'echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 1000' &
    exec sleep 1000
fi
while [ ! -e {tmp_path}/pid ]; do sleep 0.01; done
exit 3
"""
    assert finished(job("A1:2", "--ranks", "sh", "-c", script))[0] == 3
    assert not alive(int((tmp_path / "pid").read_text()))
    assert aa.leases(aa.detect(MACHINE)) == ()


def test_a_rank_that_does_not_end_is_killed(acme, tmp_path):
    """With less patience than the command line has."""
    code = f"""
import anyaccel, sys
from anyaccel.launcher import Rendezvous
from anyaccel_jobs.ranks import run_ranks
script = "trap '' TERM; touch {tmp_path}/$RANK; while [ ! -e {tmp_path}/1 ]; do sleep 0.01; done; " \
    "[ $RANK = 0 ] && exit 3; while true; do sleep 0.1; done"
launch = anyaccel.prepare("A1:2", machine={MACHINE!r})
sys.exit(run_ranks(launch, ["sh", "-c", script], Rendezvous(), grace=0.2))
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=PATIENCE, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        3, "anyaccel: rank 0 ended with exit status 3, which ends the job\n",
    )  # fmt: skip


def test_ranks_that_end_well_are_waited_for(job, tmp_path):
    code = f"[ $RANK = 0 ] || {{ while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; echo late; }}; touch {tmp_path}/go"
    assert finished(job("A1:2", "--ranks", "sh", "-c", code))[:2] == (0, "late\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_passed_on(job, number):
    code = f"""
import os, signal, sys, time
signal.signal({int(number)}, lambda *_: sys.exit(7))
os.write(1, b"ready\\n")
while True: time.sleep(0.1)  # a signal may come just before a call that waits
"""
    process = job("A1:2", "--ranks", sys.executable, "-c", code)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(number)
    assert finished(process)[0] == 7


def test_stopped_and_going_on(job):
    code = "import os, time; os.write(1, f'{os.getpid()}\\n'.encode()); time.sleep(1000)"
    process = job("A1:2", "--ranks", sys.executable, "-c", code)
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGTSTP)
    until(lambda: [state(pid) for pid in (process.pid, *pids)] == ["T"] * 3, "all to stop")
    process.send_signal(signal.SIGCONT)
    until(lambda: "T" not in [state(pid) for pid in (process.pid, *pids)], "all to go on")
    process.terminate()
    assert finished(process)[0] == 128 + signal.SIGTERM


def test_what_is_ignored_stays_ignored(job):
    """As under nohup."""
    code = "import time; print('ready', flush=True); time.sleep(1000)"
    process = job(
        "A1:1", "--ranks", sys.executable, "-c", code, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert finished(process)[0] == 128 + signal.SIGTERM


def test_a_launcher_that_is_killed_leaves_the_devices_to_its_ranks(job):
    code = "import os, time; os.write(1, f'{os.getpid()}\\n'.encode()); time.sleep(1000)"
    process = job("A1:2", "--ranks", sys.executable, "-c", code)
    pids = [int(process.stdout.readline()) for _ in range(2)]
    try:
        process.kill()
        process.wait(PATIENCE)
        assert len(aa.leases(aa.detect(MACHINE))) == 2
        os.kill(pids[0], signal.SIGKILL)
        assert len(aa.leases(aa.detect(MACHINE))) == 2
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    until(lambda: aa.leases(aa.detect(MACHINE)) == (), "the end of the leases")


def test_input_goes_to_the_first(job):
    process = job("A1:2", "--ranks", "sh", "-c", "echo $RANK $(cat)", stdin=subprocess.PIPE)
    out, _ = process.communicate("given\n", timeout=PATIENCE)
    assert sorted(out.splitlines()) == ["0 given", "1"]


@pytest.mark.skipif(bool(find_obstacle()), reason=f"workers cannot be confined here: {find_obstacle()}")
def test_ranks_are_confined(job):
    status, out, err = finished(
        job("A1:2", "--ranks", "grep", "NoNewPrivs", "/proc/self/status", options=["--enforce"])
    )
    assert (status, out) == (0, "NoNewPrivs:\t1\n" * 2), err


def test_a_command_that_cannot_be_started(job):
    status, _, err = finished(job("A1:2", "--ranks", "no-such-command"))
    assert (status, "no-such-command" in err, "Traceback" in err) == (127, True, False)


def test_a_port_alone_for_a_command_that_starts_its_ranks_itself(job):
    names = ("MASTER_PORT", "PET_MASTER_PORT", "PET_NPROC_PER_NODE", "RANK")
    code = f"import os; print(*(os.environ.get(name) for name in {names}))"
    told = []
    for process in [job("A1:2", "--port", sys.executable, "-c", code) for _ in range(2)]:
        status, out, err = finished(process)
        assert status == 0, err
        told.append(out.split())
    assert all(port == same and (count, rank) == ("2", "None") for port, same, count, rank in told)
    status, _, err = finished(job("A1:1", "--port", "true", options=["--ranks"]))
    assert (status, "not allowed with" in err) == (2, True)


ON_TERMINAL = [sys.executable, "-m", "anyaccel", "--machine", MACHINE, "run", "A1:2", "--ranks", "--"]
LINES = r"""
import os, sys, time
rank = os.environ["RANK"]
assert os.isatty(1) and os.isatty(2)
sys.stdout.write("one " + rank + "\n")
print("half\rtwo", rank, file=sys.stderr)
os.write(1, b"x" * 100_000 + b"end")
"""


def test_output_is_marked_by_rank_at_a_terminal(acme):
    status, data = run_on_terminal([*ON_TERMINAL, sys.executable, "-c", LINES])
    assert status == 0
    lines = (
        data.replace("\r", "\n").split("\n")
        if isinstance(data, str)
        else data.replace(b"\r", b"\n").decode().split("\n")
    )
    for rank in "01":
        for text in (f"one {rank}", "half", f"two {rank}"):
            assert f"[{rank}] {text}" in lines
        marked = [line.removeprefix(f"[{rank}] ") for line in lines if line.startswith(f"[{rank}] ")]
        assert sum(line.count("x") for line in marked) == 100_000
        assert any(line.endswith("xend") for line in marked)


@pytest.mark.parametrize(
    ("end", "told"), [("exit 3", "ended with exit status 3"), ("kill -9 $$", "was killed by SIGKILL")]
)
def test_the_rank_that_ends_the_job_is_named_and_piped_output_has_no_marks(job, end, told):
    code, out, err = finished(
        job("A1:2", "--ranks", "sh", "-c", f"echo hello; test $RANK = 0 || {end}; exec sleep 1000")
    )
    assert code == (3 if "3" in end else 137)
    assert set(out.splitlines()) == {"hello"}
    assert err.count("ends the job") == 1
    assert f"anyaccel: rank 1 {told}, which ends the job\n" in err


def test_no_rank_is_named_where_all_end_well_or_by_a_signal_from_outside(job):
    assert finished(job("A1:2", "--ranks", "true")) == (0, "", "")
    process = job("A1:2", "--ranks", "sh", "-c", "echo ready; exec sleep 1000")
    assert process.stdout.readline() == process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert "ends the job" not in finished(process)[2]


# The processors near each rank


@two_processors
def test_ranks_run_near_their_own_device(two_nodes):
    done = run_on_nodes("run", "A1:2", "--ranks", "--bind", "--machine", "sim:A1:2", "--", sys.executable, "-c", SHOW)
    assert sorted(map(json.loads, done.stdout.splitlines())) == sorted([near, near] for near in two_nodes)


@two_processors
def test_ranks_of_one_node_divide_its_processors(acme, nodes):
    nodes({0: OURS})
    machine = "sim:A1:4"  # two of node 0
    request = ["acme/0", "acme/1"]
    done = run_on_nodes("run", *request, "--ranks", "--bind", "--machine", machine, "--", sys.executable, "-c", SHOW)
    half = len(OURS) // 2
    assert sorted(map(json.loads, done.stdout.splitlines())) == [[OURS[:half]] * 2, [OURS[half:]] * 2]


@pytest.mark.parametrize(
    ("devices", "parts"),
    [
        ([0, 0], [(0, 1, 8, 9), (2, 3, 10, 11)]),
        ([0, 0, 1], [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),
        ([0, 0, 0], [(0, 8), (1, 9), (2, 3, 10, 11)]),
        ([0] * 5, [(0, 1, 2, 3, 8, 9, 10, 11)] * 5),
        ([0, None], [(0, 1, 2, 3, 8, 9, 10, 11), ()]),
    ],
)
def test_threads_of_one_core_stay_together(nodes, devices, parts):
    cores = [(core, core + 8) for core in range(8)]
    nodes({0: [*range(4), *range(8, 12)], 1: [*range(4, 8), *range(12, 16)]}, cores)
    assert divide_processors(devices, range(16)) == parts


def test_ranks_need_a_command(anyaccel):
    """And no shell, at a terminal neither."""
    for option in ("--ranks", "--port"):
        done = anyaccel("run", option, "A1:1", stdin=subprocess.DEVNULL)
        assert done.returncode == 2
        assert f"a command to run must follow '--', as in: anyaccel run {option} GPU:1 -- python" in done.stderr
