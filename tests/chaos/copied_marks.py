"""Trees of processes that are ended while another user copies their marks.

    python tests/chaos/copied_marks.py [--trees N] [--seed N] [--ways cancel,sweep,...]
    python tests/chaos/copied_marks.py --trees 1000 --all

Each tree holds a device and grows in shapes of its own: forks, double forks, sessions, cleared environments, spawns,
processes that are stopped, that ignore SIGTERM, that replace themselves all the time, in namespaces, of another user.
A second user puts each mark of the state directory on processes of its own. Then the tree is ended, in one of the ways
that there are, and a third user asks for the device. The truth is a control group for each tree. What must hold: the
command that ends the tree ends while the copies live, and none of the tree is left; no copy is ended; no user gets the
device while a process of the tree is left; and it is free once copies and tree have gone. What a plug-in has started
holds no device: it ends with the vendor's process. Needs root. Prints a table: for each way the trees, those whose
device was given too early, too late, those of which a process was left, what else went wrong, and the seconds that an
end took beside its grace. With ``--all`` half of the trees are those of ``torture.py``, which are killed at random.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import platform
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

if sys.argv[1:2] not in (
    ["tree"],
    ["grow"],
    ["copy"],
    ["start"],
):  # which import no more than they need: there are many
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    import anyaccel
    import torture
    import users
    from anyaccel.ledger.entries import boot, parse_lease
    from empty_folders import BIND, mount
    from waiting import PATIENCE, until

WAYS = (
    "cancel", "sweep", "sweep in time", "call in time", "release", "pool", "ranks", "run in time", "plug-in",
)  # fmt: skip
INSIDE = ("cancel", "sweep", "sweep in time", "ranks")
"""Ways in which what ends a tree is above all of it."""
IN_TIME = ("sweep in time", "call in time", "run in time")
OUTLIVED = ("run in time", "plug-in")
"""Ways in which what is waited for is not what ends the tree: the monitor and the fork server go on."""
OWNER, COPIER, TAKEN = 61_011, 61_012, 61_013
"""Users: who owns the trees, beside root; who copies; who processes of root's trees become."""
GRACE = 0.5
TIME = 2.0
SHAPES = ("fork", "double", "setsid", "clean", "spawn", "vfork", "group", "exec", "thread", "clone parent")
LEAVES = ("sleep", "stopped", "stubborn", "stubborn and stopped", "moving", "memfd")
WRONG = ("early", "late", "left", "copies ended", "failed")
_LOCKS = 10
_CLONE_PARENT, _SYS_CLONE = 0x8000, 56


# The trees.


def tree(signs: str, plans: list[str]) -> NoReturn:
    """Be the first process of a tree: start each branch, wait until its leaf is there, say so, and stay."""
    for plan in plans:
        if os.fork() == 0:
            grow(signs, plan.split(","))
    while len([sign for sign in os.listdir(signs) if sign.startswith("leaf")]) < len(plans):
        time.sleep(0.01)
    Path(signs, "ready").touch()
    while True:
        time.sleep(1000)


def grow(signs: str, plan: list[str]) -> NoReturn:  # noqa: C901, PLR0912 -- one shape after the other
    """Be a branch: take the first shape, and go on with the others."""
    shape, *rest = plan
    if not rest:
        leaf(signs, shape)
    argv = [sys.executable, "-I", "-S", os.path.abspath(__file__), "grow", signs, ",".join(rest)]
    if shape == "fork":
        if os.fork() == 0:
            grow(signs, rest)
        while True:
            time.sleep(1000)
    elif shape == "double":
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                grow(signs, rest)
    elif shape == "setsid":
        if os.fork() == 0:
            os.setsid()
            grow(signs, rest)
    elif shape == "clean":
        os.closerange(0, 256)
        for _ in range(3):
            os.open(os.devnull, os.O_RDWR)
        os.execve(argv[0], argv, {})
    elif shape == "spawn":
        os.posix_spawn(argv[0], argv, {}, setsid=True)
    elif shape == "vfork":
        subprocess.Popen(argv, close_fds=False)
    elif shape == "group":
        with contextlib.suppress(PermissionError):  # it leads a session
            os.setpgid(0, 0)
        grow(signs, rest)
    elif shape == "thread":
        threading.Thread(target=os.execv, args=(argv[0], argv)).start()
        time.sleep(1000)
    elif shape == "namespace":
        kinds = ["--pid", "--fork"] if os.geteuid() == 0 else ["--user", "--pid", "--fork"]
        os.execvp("unshare", ["unshare", *kinds, *argv])
    elif shape == "clone parent" and platform.machine() == "x86_64":
        if ctypes.CDLL(None).syscall(_SYS_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0) == 0:
            os.execv(argv[0], argv)
    elif shape == "user":
        os.setgroups([])
        os.setresgid(TAKEN, TAKEN, TAKEN)
        os.setresuid(TAKEN, TAKEN, TAKEN)
        grow(signs, rest)
    else:
        os.execv(argv[0], argv)
    os._exit(0)


def leaf(signs: str, kind: str) -> NoReturn:
    """Be the end of a branch."""
    if "stubborn" in kind:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    Path(signs, f"leaf-{os.urandom(8).hex()}").touch()
    if "stopped" in kind:
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "memfd":
        descriptor = os.memfd_create("sleep", 0)
        with open("/bin/sleep", "rb") as file:
            os.write(descriptor, file.read())
        os.execve(descriptor, ["sleep", "1000"], {})
    while kind == "moving":
        if os.fork():
            os._exit(0)
        time.sleep(0.02)
    while True:
        time.sleep(1000)


def plans(rng: random.Random, *, root: bool, inside: bool) -> list[str]:
    """Draw the branches of a tree."""
    shapes = (*SHAPES, "user") if root and inside else SHAPES
    drawn = []
    for _ in range(rng.randint(1, 3)):
        branch = [rng.choice(shapes) for _ in range(rng.randint(0, 3))]
        leaf = rng.choice(LEAVES)
        if rng.random() < 0.2 and leaf != "moving":  # a namespace ends with its first process
            branch.append("namespace")
        drawn.append(",".join([*branch, leaf]))
    return drawn


# Programs that start a tree inside of Python.


def call(command: list[str]) -> None:
    """Run a tree as a call that is ended in time, and print how long it took."""
    import anyaccel as aa

    began = time.monotonic()
    with contextlib.suppress(aa.AnyaccelError):
        aa.run("GPU:1", command, declare={"GPU": 1}, time=TIME)
    print(time.monotonic() - began - TIME)


def pool(command: list[str]) -> None:
    """Start a tree in a worker, and wait for its end."""
    import anyaccel as aa

    with aa.Pool("GPU:1", declare={"GPU": 1}, grace=GRACE) as workers, contextlib.suppress(aa.AnyaccelError):
        workers.submit(subprocess.run, command).result()


PLUGIN = """
import os, subprocess, time
from anyaccel.plugin import *

@hookimpl
def anyaccel_info():
    return PluginInfo(vendor="tree", resource="TREE", kind="tree", env_vars=())

@hookimpl
def anyaccel_detect(ctx):
    subprocess.Popen({command!r})
    while not os.path.exists({ready!r}):
        time.sleep(0.01)

@hookimpl
def anyaccel_fractional(device):
    return Fractional.NO

@hookimpl
def anyaccel_tags(device):
    return ()

@hookimpl
def anyaccel_env(devices):
    return EnvEdits()
"""


def plug_in(command: list[str]) -> None:
    """Have the process of a vendor start a tree, and end that process."""
    import anyaccel as aa
    from anyaccel import vendors

    signs = command[command.index("tree") + 1]
    site = os.path.join(os.environ["HOME"], "site")
    information = os.path.join(site, "anyaccel_tree-1.dist-info")
    os.makedirs(information)
    Path(site, "plug_tree.py").write_text(PLUGIN.format(command=command, ready=os.path.join(signs, "ready")))
    Path(information, "METADATA").write_text("Metadata-Version: 2.1\nName: anyaccel-tree\nVersion: 1\n")
    Path(information, "entry_points.txt").write_text("[anyaccel]\ntree = plug_tree\n")
    sys.path.insert(0, site)
    os.environ["ANYACCEL_PLUGINS"] = "tree"
    (report,) = aa.detect("host", timeout=90.0).vendors
    assert report.problem is None, report.problem
    vendors.close()


# The user who copies.


def copy(directory: int) -> NoReturn:
    """Be the user who copies: put each mark of a state directory on a child of one's own."""
    os.setgroups([])
    os.setresgid(COPIER, COPIER, COPIER)
    os.setresuid(COPIER, COPIER, COPIER)
    copied: set[str] = set()
    while True:
        for name in os.listdir(directory):
            for mark in re.findall(r"\.([0-9a-f]{16})\.", name):
                if int(mark, 16) and mark not in copied:
                    copied.add(mark)
                    if os.fork() == 0:
                        resource.setrlimit(_LOCKS, (int(mark, 16), int(mark, 16)))
                        os.execlp("sleep", "sleep", "1000")
        time.sleep(0.002)


class Copier:
    """The user who copies the marks of a state directory, from outside."""

    def __init__(self, state: Path) -> None:
        directory = os.open(state, os.O_RDONLY)
        command = [sys.executable, "-I", "-S", __file__, "copy", str(directory)]
        self._process = subprocess.Popen(command, pass_fds=[directory], stdin=subprocess.DEVNULL)
        os.close(directory)

    def copies(self) -> list[int]:
        """The processes with copied marks that are alive."""
        return [pid for pid in torture._children(self._process.pid) if torture._name(pid).strip() == "sleep"]

    def close(self) -> None:
        """End it, with what it has started, also what has the mark and is about to become a copy."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGSTOP)
            os.waitpid(self._process.pid, os.WUNTRACED)
            for pid in torture._children(self._process.pid):
                os.kill(pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()


# The teardown.


def let_in() -> None:
    """Let all users run this Python with anyaccel, in a mount namespace of our own."""
    paths = {sys.base_prefix, sys.prefix, str(Path(anyaccel.__file__).parents[1]), str(Path(__file__).parents[1])}
    kept = {path: os.open(path, os.O_PATH) for path in sorted(paths)}
    for hidden in sorted({hidden for path in paths if (hidden := users.closed(f"{path}/x"))}):
        mount("none", hidden, "tmpfs", options="mode=755")
    for path, descriptor in kept.items():
        if not os.path.exists(path):
            os.makedirs(path)
            mount(f"/proc/self/fd/{descriptor}", path, flags=BIND)


def _as(owner: int) -> list[str]:
    return ["setpriv", f"--reuid={owner}", f"--regid={owner}", "--clear-groups"] if owner else []


class Teardown:
    """One tree, its users and its files.

    Args:
        way: How it is ended.
        seed: What makes the tree.
        home: Where to put files.
        owner: Its user.
    """

    def __init__(self, way: str, seed: int, home: Path, owner: int) -> None:
        self.way, self.owner = way, owner
        self.group = torture.Group()
        self.place = Path(tempfile.mkdtemp(dir=home))
        self.state, self.signs, own = (self.place / name for name in ("state", "signs", "own"))
        for path, mode in ((self.state, 0o1777), (self.signs, 0o777), (own, 0o700), (self.place, 0o755)):
            path.mkdir(exist_ok=True)
            path.chmod(mode)
        os.chown(own, owner, owner)
        for user in {0, owner, torture.ASKER}:
            (self.state / f"checked.{boot()}.{user}").touch()
            os.chown(self.state / f"checked.{boot()}.{user}", user, -1)
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(("ANYACCEL_", "XDG_"))}
        self.environ |= {"ANYACCEL_STATE_DIR": str(self.state), "ANYACCEL_PLUGINS": "none", "HOME": str(own)}
        self.own = own
        self.output = (self.place / "output").open("w")
        self.started: list[subprocess.Popen[bytes]] = []
        self.devices: set[str] = set()
        self.copied: set[int] = set()
        drawn = plans(random.Random(seed), root=not owner, inside=way in INSIDE)
        self.words = f"{way} {seed} of {owner}: {drawn}"
        self.command = [sys.executable, "-I", "-S", os.path.abspath(__file__), "tree", str(self.signs), *drawn]
        self.copier = Copier(self.state)

    def start(self, *command: str, member: bool = True) -> subprocess.Popen[bytes]:
        """Start a command of the owner's, among the processes of the tree or not."""
        enter = ["sh", "-c", 'echo $$ >"$0"; exec "$@"', f"{self.group.path}/cgroup.procs"] if member else []
        self.ending = subprocess.Popen(
            [*enter, *_as(self.owner), *command],
            env=self.environ, cwd=self.own, stdin=subprocess.DEVNULL, stdout=self.output, stderr=self.output,
            start_new_session=True,
        )  # fmt: skip
        self.started.append(self.ending)
        return self.ending

    def said(self) -> str:
        """What all that was started has printed."""
        return (self.place / "output").read_text()

    def ours(self, *arguments: str, machine: bool = True) -> list[str]:
        """A command line of ours."""
        return [sys.executable, "-m", "anyaccel", *(["--declare", "GPU=1"] if machine else []), *arguments]

    def left(self) -> list[int]:
        """The processes of the tree that are left."""
        return [pid for pid in self.group.members() if not self._launcher(pid)]

    def _launcher(self, pid: int) -> bool:
        """Whether a process has only started the tree, watches it, or is about to become one of these."""
        name, command = torture._name(pid).strip(), torture._command(pid)
        watches = name in (torture.MONITOR, "anyaccel-job", "accel-forksrv", "accel-vendor", "unshare")
        return (
            watches
            or not command
            or b"-m\0anyaccel" in command
            or b"\0start\0" in command
            or b"cgroup.procs" in command
        )

    def ready(self) -> bool:
        """Return whether the tree is there, and its mark has been copied."""
        return (self.signs / "ready").exists() and bool(self.copier.copies())

    def begin(self) -> float:
        """Start the tree, and end it once it is there; return its grace. What is waited for is ``ending`` then."""
        way, grace = self.way, ("--grace", f"{GRACE}s")
        if way == "cancel":
            self.start(*self.ours("run", "--detach", "GPU:1", "--", *self.command)).wait(PATIENCE)
            until(self.ready, f"{self.words}")
            self.start(*self.ours("cancel", *grace, "1", machine=False), member=False)
        elif way == "release":
            self.start(*self.ours("run", "GPU:1", "--", *self.command))
            until(self.ready, f"{self.words}")
            (lease,) = {lease.id for name in os.listdir(self.state) if (lease := parse_lease(name))}
            self.start(*self.ours("release", "--force", *grace, lease, machine=False), member=False)
        elif way == "sweep":
            sweep = self.start(*self.ours("sweep", *grace, "GPU:1", "--each", "n=1", "--", *self.command))
            until(self.ready, f"{self.words}")
            sweep.send_signal(signal.SIGTERM)  # SIGINT may be ignored here, as in the background of a shell
        elif way == "sweep in time":
            limits = ("--time", f"{TIME}s", *grace, "--out", "out")
            self.start(*self.ours("sweep", *limits, "GPU:1", "--each", "n=1", "--", *self.command))
        elif way == "run in time":
            self.start(*self.ours("run", "--time", f"{TIME}s", *grace, "GPU:1", "--", *self.command))
        elif way == "ranks":
            ranks = self.start(*self.ours("run", "--ranks", *grace, "GPU:1", "--", *self.command))
            until(self.ready, f"{self.words}")
            ranks.send_signal(signal.SIGTERM)
        elif way == "plug-in":
            self.start(sys.executable, __file__, "start", way, *self.command)
            return 0.0
        else:
            self.start(sys.executable, __file__, "start", way, *self.command)
            if way == "call in time":
                return 10.0  # it has no other
            until(self.ready, f"{self.words}")
            (server,) = [pid for pid in self.group.members() if torture._name(pid).strip() == "accel-forksrv"]
            os.kill(server, signal.SIGKILL)
            return 0.0
        return GRACE

    def run(self, asker: torture.Asker) -> tuple[Counter[str], float]:
        """End the tree, and ask for its device meanwhile.

        Returns:
            What went wrong, and the seconds that the end took beside its grace.
        """
        found: Counter[str] = Counter(trees=1)
        began, grace = time.monotonic(), self.begin()
        took = self.watch(asker, found, began if self.way in IN_TIME else time.monotonic())
        found["copies ended"] += not self.copied <= {*self.copier.copies()}
        if left := self.left():
            found["left"] += 1
            print("LEFT", self.words, [torture._command(pid) for pid in left], flush=True)
        self.copier.close()
        if self.way != "plug-in":
            try:
                until(lambda: self.ask(asker, found), f"the device of {self.words}")
            except AssertionError as late:
                found["late"] += 1
                print("LATE", late, os.listdir(self.state), flush=True)
        return found, took - grace

    def watch(self, asker: torture.Asker, found: Counter[str], began: float) -> float:
        """Wait for the end, ask for the device meanwhile, and return the seconds that the end took."""
        while self.ending.poll() is None:
            self.ask(asker, found)
            assert time.monotonic() < began + PATIENCE, f"{self.words} does not end"
            time.sleep(0.01)
        if self.way in OUTLIVED:
            with contextlib.suppress(AssertionError):  # what is left is counted
                until(lambda: self.ask(asker, found) or not self.left(), f"the end of {self.words}")
        if self.way == "plug-in":
            assert not self.ending.returncode, f"{self.words} ends with {self.ending.returncode}"
        if self.way == "call in time":
            return float(self.said().split()[-1])
        if self.way == "sweep in time":
            row = (self.own / "out" / "jobs.tsv").read_text().splitlines()[1].split("\t")
            return time.time() - float(row[2]) - TIME
        return time.monotonic() - began - (TIME if self.way in IN_TIME else 0.0)

    def ask(self, asker: torture.Asker, found: Counter[str]) -> bool:
        """Ask for the device, once it was held; return whether the asker got it."""
        self.copied |= {*self.copier.copies()}
        self.devices |= {lease.device for name in os.listdir(self.state) if (lease := parse_lease(name))}
        got = bool(self.devices) and asker.gets(self.state, min(self.devices))
        if got and (left := self.left()):
            found["early"] += 1
            print("EARLY", self.words, [torture._command(pid) for pid in left], flush=True)
        found["questions"] += bool(self.devices)
        return got

    def close(self) -> None:
        """End what is left."""
        self.copier.close()
        self.group.close()
        for process in self.started:
            process.wait()
        self.output.close()


def all_of(ways: tuple[str, ...], trees: int, seed: int, slots: int = 3) -> dict[str, tuple[Counter[str], list[float]]]:
    """End some trees, spread over the ways and over two owners, several at once.

    Returns:
        What was found, and how long each end took beside its grace, by way.
    """
    askers = [torture.Asker() for _ in range(slots)]  # before there are threads
    totals: dict[str, tuple[Counter[str], list[float]]] = {way: (Counter(), []) for way in ways}
    owners = (OWNER, 0)
    with tempfile.TemporaryDirectory(prefix="copied-") as home:
        os.chmod(home, 0o755)

        def one(number: int) -> None:
            way, owner = ways[number % len(ways)], owners[number // len(ways) % len(owners)]
            asker, one = askers.pop(), Teardown(way, seed + number, Path(home), owner)
            try:
                found, took = one.run(asker)
                totals[way][0].update(found)
                totals[way][1].append(took)
            except Exception:  # noqa: BLE001 - the others go on
                totals[way][0].update(trees=1, failed=1)
                print(one.words, one.said(), traceback.format_exc(), flush=True)
            finally:
                one.close()
                askers.append(asker)

        with ThreadPoolExecutor(slots) as pool:
            list(pool.map(one, range(trees)))
    for asker in askers:
        asker.close()
    return totals


def main() -> int:
    """Run it by hand; or be a part of it."""
    role, *rest = sys.argv[1:] or [""]
    if role == "tree":
        tree(rest[0], rest[1:])
    if role == "grow":
        grow(rest[0], rest[1].split(","))
    if role == "copy":
        copy(int(rest[0]))
    if role == "start":
        {"call in time": call, "pool": pool, "plug-in": plug_in}[rest[0]](rest[1:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=int, default=300)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--all", action="store_true", help="half of them killed at random, in the ways of torture.py")
    parser.add_argument("--inside", action="store_true", help="in a mount namespace of its own already")
    args = parser.parse_args()
    if not args.inside:
        os.execvp("unshare", ["unshare", "--mount", sys.executable, __file__, *sys.argv[1:], "--inside"])
    let_in()
    killed = args.trees // 2 if args.all else 0
    totals = all_of(tuple(args.ways.split(",")), args.trees - killed, args.seed, args.slots)
    if killed:
        of_torture = torture.all_of(torture.WAYS, killed, args.seed)
        totals |= {f"{way}, killed": (found, []) for way, found in of_torture.items()}
    columns = ("trees", "questions", *WRONG)
    totals["all"] = (sum((found for found, _ in totals.values()), Counter()), [])
    print(f"{'way':16}", *columns, "seconds", "at most", sep="  ")
    for way, (found, took) in totals.items():
        numbers = (f"{found[name]:{len(name)}}" for name in columns)
        seconds = (f"{measure(took):7.2f}" for measure in (statistics.median, max) if took)
        print(f"{way:16}", *numbers, *seconds, sep="  ")
    return int(any(totals["all"][0][wrong] for wrong in WRONG))


if __name__ == "__main__":
    sys.exit(main())
