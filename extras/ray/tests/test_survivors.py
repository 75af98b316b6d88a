"""A device on a node of Ray stays with what a call has started, whichever process above it is killed."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lengths import length
from ray_nodes import needs_ray, uses_ray
from waiting import until

sys.path.append(str(Path(__file__).parents[3] / "tests" / "chaos"))

import torture

pytestmark = [
    needs_ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # Ray's own
]

TREES = length(4, 12)
"""Half as many as each of the other ways has in ``tests/chaos``: one takes seconds."""
MACHINE = "sim:Acme-Whole:1"
PROGRAM = """
import os, subprocess, sys, time
import anyaccel

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(200)"

def write(path, *words):
    with open(path + ".new", "w") as file:
        print(*words, file=file)
    os.rename(path + ".new", path)

def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])

def start(path):
    # Without any variable, descriptor or session of ours.
    command = [sys.executable, "-I", "-S", "-c", CHILD]
    child = subprocess.Popen(command, env={}, start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    write(path, child.pid, os.getppid(), parent(os.getppid()))
    time.sleep(200)

if __name__ == "__main__":
    with anyaccel.Pool("Acme-Whole:1", engine="ray", address=sys.argv[1], grace=1.0) as pool:
        pool.submit({"start": start, "write": write}[sys.argv[2]], sys.argv[3]).result()
"""


@pytest.fixture(scope="module")
def node(ray_nodes):
    """The environment of a node that has one device."""
    added = ray_nodes.add(MACHINE)
    yield {"ANYACCEL_STATE_DIR": ray_nodes.states[MACHINE], "ANYACCEL_MACHINE": MACHINE, "PYTHONPATH": ray_nodes.path}
    ray_nodes.kill(added)


@pytest.fixture
def program(ray_nodes, node, tmp_path):
    """Start programs that use the cluster, and say what they are to write; all are ended after the test."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {**os.environ, "PYTHONPATH": node["PYTHONPATH"]}
    started = []

    def program(what):
        path = tmp_path / what
        command = [sys.executable, str(tmp_path / "program.py"), ray_nodes.address, what, str(path)]
        with open(tmp_path / f"{what}.log", "w") as log:
            started.append(subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        return started[-1], path

    yield program
    for each in started:
        each.kill()
        each.wait()
    for log in tmp_path.glob("*.log"):
        print(log.name, log.read_text())


def ended(pinned):
    """Whether a process that is pinned by a descriptor has left the kernel."""
    return bool(select.select([pinned], [], [], 0)[0])


@pytest.mark.parametrize("also", [(), ("process of Ray", "fork server")], ids=["driver", "all above"])
def test_a_clean_child_keeps_its_device_when_those_above_it_are_killed(node, program, anyaccel, also):
    driver, started = program("start")
    until(lambda: started.exists() or driver.poll() is not None, "the call")
    child, *above = map(int, started.read_text().split())
    pids = dict(zip(("fork server", "process of Ray"), above, strict=True))
    pinned = os.pidfd_open(child)
    try:
        for pid in (driver.pid, *(pids[each] for each in also)):
            os.kill(pid, signal.SIGKILL)
        driver.wait()
        while f"kept: process {child} (" not in (said := refusal(anyaccel, node)):
            assert said or ended(pinned), "a command was given the device while the child lived"
            if ended(pinned):
                break
        # Ray ends its process when the driver has gone, and kills the process's child, our fork server. If the process
        # notices that before it has ended, it kills what is left of the call; otherwise the child lives.
        assert not also or not ended(pinned), "the child has ended, so nothing was shown"
        follower, written = program("write")
        if not ended(pinned):
            until(lambda: tickets(node) or follower.poll() is not None, "the next job to stand in line")
            time.sleep(1)
            assert f"kept: process {child} (" in refusal(anyaccel, node)
            assert not written.exists(), "the next job was given the device while the child lived"
            assert follower.poll() is None
            os.kill(child, signal.SIGKILL)
        until(lambda: written.exists() or follower.poll() is not None, "the next job")
        assert follower.wait(90) == 0
        until(lambda: not refusal(anyaccel, node), "the device for a command")
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pinned, signal.SIGKILL)
        os.close(pinned)


def refusal(anyaccel, node):
    """Why the device is refused to a command on the node; empty when it was given."""
    done = anyaccel("run", "APU:1", "--no-wait", "--", "true", env=node)
    return done.stderr if done.returncode else ""


def tickets(node):
    """Who waits on the node."""
    return list(Path(node["ANYACCEL_STATE_DIR"]).glob("t1.*"))


@uses_ray
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(torture.able()), reason=torture.able() or "-")
def test_random_trees_keep_their_device_until_the_last_of_them_has_ended():
    command = [sys.executable, torture.__file__, "--ways=ray", f"--trees={TREES}", "--seed=11"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=890, check=False)
    print(done.stdout)
    way, *words = done.stdout.splitlines()[-1].split()
    found = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    assert (way, found["trees"], found["early"], found["late"], done.returncode) == ("ray", TREES, 0, 0, 0)
    assert found["questions"] > TREES
    assert found["kills"] > TREES / 2
