"""Torture: what was started with a device drops all it can, is killed at random, and the device is asked for.

    python tests/chaos/torture.py [--trees N] [--seed N] [--ways run,call,...]

Each tree is a command, or a call of a pool, that holds a device and starts others in every way that Python and the
shell know: some of them close their descriptors, clear their environment, open sessions, fork twice or replace
themselves. Processes are killed with SIGKILL, launchers and fork servers among them. Meanwhile another user, without
any privilege, asks for the device. The truth is a control group for each tree, which only this test has. The user who
gets the device while a process of the tree is left was given it too early; the user who does not get it once all have
ended is kept from it. Needs root. Prints, for each way, trees, kills, questions, early and late; the exit status says
whether any was wrong. The way ``ray`` is not run by default: it starts a cluster of Ray, and a tree takes seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

if sys.argv[1:2] != ["tree"]:  # which import no more than they need: there are many
    from anyaccel.errors import DevicesBusyError
    from anyaccel.ledger.entries import boot, lease_name, new_nonce, parse_lease
    from anyaccel.linux.process import start_time
    from anyaccel.model import Extent

WAYS = ("run", "call", "popen", "acquire", "hold", "pool", "actor")
"""Those that need nothing else."""
ASKER = 61_003
SLOTS = 6
PATIENCE = 60.0
"""Seconds after which a device that is not free again counts as lost: most of it is for a machine that is busy."""
MONITOR = "anyaccel-mon"

DECLARED = {"GPU": 1}


# The trees.


def tree(group: str, seed: int, depth: int) -> None:
    """Be a tree: start others in random ways, wait for none of them, and end."""
    enter(group)
    rng = random.Random(seed)
    for _ in range(rng.choice((1, 2, 2, 3)) if depth else 0):
        grow(group, rng, depth - 1)
        time.sleep(rng.uniform(0, 0.05))
    time.sleep(rng.uniform(0, 0.4))


def enter(group: str) -> None:
    """Be counted among the processes of the tree, with all that this one starts."""
    with open(f"{group}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))


def grow(group: str, rng: random.Random, depth: int) -> None:  # noqa: C901 -- one way after the other
    """Start another process in a random way."""
    argv = [sys.executable, "-I", "-S", os.path.abspath(__file__), "tree", group, str(rng.randrange(10**9)), str(depth)]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    way = rng.choice(("popen", "clean", "spawn", "forkserver", "fork", "detached", "shell", "setsid", "exec"))
    if way == "popen":
        subprocess.Popen(argv, **quiet)
    elif way == "clean":
        subprocess.Popen(argv, env={}, start_new_session=True, **quiet)
    elif way in ("spawn", "forkserver"):
        multiprocessing.get_context(way).Process(target=time.sleep, args=(rng.uniform(0.1, 0.8),)).start()
    elif way == "fork":
        if os.fork() == 0:
            time.sleep(rng.uniform(0, 0.5))
            os._exit(0)
    elif way == "detached":
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 256)
                for _ in range(3):
                    os.open(os.devnull, os.O_RDWR)
                os.execve(argv[0], argv, {})
            os._exit(0)
    elif way == "shell":  # redirections that overwrite the descriptors, whatever their numbers
        line = 'exec 3>/dev/null 4>/dev/null 5>/dev/null 6>/dev/null 7>/dev/null 8>/dev/null 9>&-; ("$@" &)'
        subprocess.Popen(["sh", "-c", line, "sh", *argv], close_fds=False, **quiet)
    elif way == "setsid":
        subprocess.Popen(["env", "-i", "setsid", "-f", *argv], **quiet)
    else:
        time.sleep(rng.uniform(0, 0.1))
        os.execv(argv[0], argv)


# Processes that hold the device.


def start(way: str, group: str, seed: int, resource: str = "GPU", address: str = "") -> None:
    """Get the device and start the tree with it, in one of the ways that there are.

    Args:
        way: The way.
        group: Path of the control group of the tree.
        seed: What makes the tree.
        resource: What the device is, on a cluster of Ray
        address: at this address.
    """
    import anyaccel as aa

    command = [sys.executable, "-I", "-S", __file__, "tree", group, str(seed), "3"]
    ours = [sys.executable, "-m", "anyaccel", "--declare", "GPU=1"]
    if way == "run":
        os.execv(ours[0], [*ours, "run", "GPU:1", "--", *command])
    elif way == "hold":
        enter(group)
        os.execv(ours[0], [*ours, "hold", "GPU:1", "--for", f"{random.Random(seed).uniform(0.2, 1.5):.1f}s"])
    elif way == "call":
        aa.run("GPU:1", command, declare=DECLARED)
    elif way == "popen":
        with aa.acquire("GPU:1", declare=DECLARED) as lease:
            lease.popen(command).wait()
    elif way == "acquire":
        lease = aa.acquire("GPU:1", declare=DECLARED)
        subprocess.Popen(command, env=dict(lease.environ)).wait()
        os._exit(0)  # and does not give it back
    else:
        where: dict[str, Any] = {"engine": "ray", "address": address} if address else {"declare": DECLARED}
        with aa.Pool(f"{resource}:1", grace=0.2, **where) as pool, contextlib.suppress(aa.AnyaccelError):
            if way in ("pool", "ray"):
                pool.submit(tree, group, seed, 3).result()
            else:
                actor = pool.actor(Tree, group, seed)
                actor.grow().result()
                actor.close()


class Tree:
    """An actor that is a tree."""

    def __init__(self, group: str, seed: int) -> None:
        self.group, self.seed = group, seed

    def grow(self) -> None:
        """Start the others."""
        tree(self.group, self.seed, 3)


# Another user.


class Asker:
    """A process of another user that asks for a device when it is told to."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            self.pid = os.fork()
            if self.pid == 0:
                try:
                    self._ours.close()
                    _ask(theirs)
                except BaseException:  # noqa: BLE001 -- nothing of a fork goes on
                    traceback.print_exc()
                finally:
                    os._exit(1)

    def gets(self, state: Path, device: str) -> bool:
        """Whether it gets the device when it asks now; it gives it back at once."""
        self._ours.sendall(f"{state}\0{device}\n".encode())
        answer = self._ours.recv(1)
        assert answer, "the asker has died"
        return answer == b"y"

    def close(self) -> None:
        """End it: the end of its connection would not, since others have inherited ours."""
        self._ours.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _ask(connection: socket.socket) -> None:
    from anyaccel.ledger import Ledger, Want

    def gets(state: str, device: str) -> bool:
        ledger = Ledger.open({"ANYACCEL_STATE_DIR": state})
        want = Want(candidates=frozenset({device}))
        try:
            lease = ledger.acquire(want, lambda taken: None if taken.get(device) else {device: Extent()}, wait=0)
        except DevicesBusyError:
            return False
        lease.release()
        return True

    # The interpreter may be closed to other users, so everything is used once before.
    with tempfile.TemporaryDirectory() as state:
        holder = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
        name = lease_name("a", Extent(), new_nonce(), (holder.pid, start_time(holder.pid) or 0), (1,))
        Path(state, name).touch()
        assert not gets(state, "a")
        holder.communicate(b"\n")
        while not gets(state, "a"):  # a scan that gets no processor cannot say that no process carries the mark
            pass
    os.setgroups([])
    os.setresgid(ASKER, ASKER, ASKER)
    os.setresuid(ASKER, ASKER, ASKER)
    for line in connection.makefile():
        connection.sendall(b"y" if gets(*line.rstrip("\n").split("\0")) else b"n")


# A cluster.


class Place(NamedTuple):
    """Where a tree finds its device.

    Attributes:
        state: The state directory.
        environ: Environment of the process that starts the tree.
        arguments: What that is told beside the way, the group and the seed.
        device: The device by its name in the ledger; empty for the only one.
    """

    state: Path
    environ: dict[str, str]
    arguments: tuple[str, ...] = ()
    device: str = ""


@contextlib.contextmanager
def cluster(home: Path) -> Iterator[list[Place]]:
    """A node of Ray, with a device of a resource of its own for each tree that is tortured at the same time."""
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    from ray_nodes import environment, free_port, head_options, short_directory, started_node

    state = home / "ray"
    state.mkdir()
    _open_to_all(state)
    environ = environment(ANYACCEL_STATE_DIR=str(state), ANYACCEL_PLUGINS=",")
    names = [f"GPU{number}" for number in range(SLOTS)]
    declared = [f"--declare={name}=1" for name in names]
    port = free_port()
    with short_directory() as files:
        ours = [sys.executable, "-m", "anyaccel", "ray", "start", *declared, "--num-cpus=1"]
        with started_node([*ours, *head_options(port, files)], environ, home / "node.log"):
            yield [Place(state, environ, (name, f"127.0.0.1:{port}"), f"declared/declared-{name}-0") for name in names]


# The torture.


class Group:
    """A control group: the processes of one tree."""

    def __init__(self) -> None:
        root = next(
            path for path in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup/unified", "/sys/fs/cgroup") if _groups(path)
        )
        self.path = Path(tempfile.mkdtemp(prefix="torture-", dir=root))

    def members(self) -> list[int]:
        """Who is left."""
        return [int(pid) for pid in (self.path / "cgroup.procs").read_text().split()]

    def close(self) -> None:
        """End who is left, and remove it."""
        while members := self.members():
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.path.rmdir()


def _groups(path: str) -> bool:
    return os.path.exists(f"{path}/cgroup.procs") and os.access(path, os.W_OK)


def able() -> str:
    """Why this cannot be done here; empty when it can."""
    if os.geteuid():
        return "needs root, for control groups and to act as another user"
    return (
        ""
        if any(map(_groups, ("/sys/fs/cgroup/pids", "/sys/fs/cgroup/unified", "/sys/fs/cgroup")))
        else ("needs control groups that can be written")
    )


def torture(way: str, seed: int, asker: Asker, home: Path, place: Place | None = None) -> Counter[str]:
    """Start one tree, kill some of it, and ask for its device until it is free.

    Args:
        way: How it is started.
        seed: What makes it, and decides who is killed when.
        asker: Who asks.
        home: Where to put files.
        place: Where its device is; a place of its own when None.

    Returns:
        How many questions and kills there were, and whether the device was given too early or too late.
    """
    rng = random.Random(seed)
    found = Counter(trees=1)
    group, (state, environ, arguments, _) = Group(), (place := place or _own_place(home))
    with open(home / f"{way}-{seed}.log", "w") as log:
        caller = subprocess.Popen(
            [sys.executable, __file__, "start", way, str(group.path), str(seed), *arguments],
            env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        device = _device(place, group, caller)
        kills = sorted(time.monotonic() + rng.uniform(0.0, 0.8) for _ in range(rng.randint(0, 4)))
        empty = None
        while device:
            while kills and kills[0] < time.monotonic():
                kills.pop(0)
                found["kills"] += _kill(rng, caller, group)
            got = asker.gets(state, device)
            found["questions"] += 1
            left = [pid for pid in group.members() if way != "hold" or holds(pid, caller)]
            if left and got:
                found["early"] += 1
                print("EARLY", way, seed, [_command(pid) for pid in left], flush=True)
                break
            if got and caller.poll() is not None:
                break
            if left or caller.poll() is None:
                empty = None
            elif time.monotonic() > (empty := empty or time.monotonic()) + PATIENCE:
                found["late"] += 1
                print("LATE", way, seed, os.listdir(state), flush=True)
                break
            time.sleep(rng.uniform(0, 0.03))
    finally:
        caller.kill()
        caller.wait()
        group.close()
    return found


def holds(pid: int, caller: subprocess.Popen[bytes]) -> bool:
    """Whether a process of a command that holds devices is its holder: the caller and the monitor wait for that one."""
    return pid != caller.pid and _name(pid).strip() != MONITOR


def _own_place(home: Path) -> Place:
    """A state directory for one tree."""
    state = Path(tempfile.mkdtemp(dir=home))
    _open_to_all(state)
    # Of this host no vendor is asked: the interpreter that asks them would count as what is left of a tree.
    environ = {name: value for name, value in os.environ.items() if name != "ANYACCEL_MACHINE"}
    return Place(state, {**environ, "ANYACCEL_STATE_DIR": str(state), "ANYACCEL_PLUGINS": "none"})


def _open_to_all(state: Path) -> None:
    """Make a state directory that all users share, whose locks were found to hold."""
    os.chmod(state, 0o1777)
    for user in (0, ASKER):
        (state / f"checked.{boot()}.{user}").touch()
        os.chown(state / f"checked.{boot()}.{user}", user, -1)


def _device(place: Place, group: Group, caller: subprocess.Popen[bytes]) -> str:
    """The device by its name in the ledger, once the tree has begun; empty where it never did."""
    while True:
        ended = caller.poll() is not None  # before the look, or it might end in between
        members = group.members()
        devices = {lease.device for name in os.listdir(place.state) if (lease := parse_lease(name))}
        if members and devices:
            return place.device or devices.pop()
        if ended and not members:
            return ""
        time.sleep(0.005)


def _kill(rng: random.Random, caller: subprocess.Popen[bytes], group: Group) -> int:
    """Kill the caller, its fork server, the oldest process of the tree, or any."""
    servers = [pid for pid in _children(caller.pid) if b"accel" in _command(pid) or b"-I" in _command(pid)]
    left = sorted(group.members())
    hosts = _hosts(left)
    kinds = [kind for kind in ([caller.pid] if caller.poll() is None else [], servers, hosts, left[:1], left) if kind]
    if not kinds:
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(rng.choice(kinds)), signal.SIGKILL)
    return 1


def _hosts(left: list[int]) -> list[int]:
    """On a cluster: the fork server of a tree and the process of Ray above it, as long as the worker is below them."""
    servers = {server: _parent(server) for pid in left if (server := _parent(pid)) > 1}
    above = {server: host for server, host in servers.items() if _name(host).startswith("ray::")}
    return [*above, *above.values()]


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
    return 0


def _name(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
        return file.read()
    return ""


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        yield from map(int, file.read().split())


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
    return b""


def all_of(ways: tuple[str, ...], trees: int, seed: int) -> dict[str, Counter[str]]:
    """Torture some trees, spread over the ways, several at once.

    Returns:
        What was found, by way.
    """
    askers = [Asker() for _ in range(SLOTS)]  # before there are threads
    totals: dict[str, Counter[str]] = {way: Counter() for way in ways}
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torture-")))
        home.chmod(0o755)
        places = stack.enter_context(cluster(home)) if "ray" in ways else []
        slots = list(enumerate(askers))

        def one(number: int) -> None:
            way = ways[number % len(ways)]
            slot, asker = slots.pop()
            try:
                place = places[slot] if way == "ray" else None
                totals[way].update(torture(way, seed + number, asker, home, place))
            finally:
                slots.append((slot, asker))

        with ThreadPoolExecutor(SLOTS) as pool:
            list(pool.map(one, range(trees)))
    for asker in askers:
        asker.close()
    return totals


def main() -> int:
    """Run it by hand; or be a tree, or a process that starts one."""
    if sys.argv[1:2] == ["tree"]:
        tree(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        os._exit(0)  # waits for none of them
    if sys.argv[1:2] == ["start"]:
        start(sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=int, default=70)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--ways", default=",".join(WAYS))
    args = parser.parse_args()
    totals = all_of(tuple(args.ways.split(",")), args.trees, args.seed)
    for way, found in totals.items():
        print(way, *(f"{name} {found[name]}" for name in ("trees", "kills", "questions", "early", "late")))
    return int(any(found["early"] or found["late"] for found in totals.values()))


if __name__ == "__main__":
    sys.exit(main())
