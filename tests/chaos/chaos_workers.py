"""Chaos: programs run calls on devices while they, their nurseries, their workers and what those start are killed.

    python tests/chaos/chaos_workers.py [--rounds N] [--seed N]

The watchman is independent of anyaccel: a call locks a file of its own for every part of the devices that it was given,
and finds it locked when anything else still has the device. Some calls leave a process behind that carries the
locks on. A round is one signal. In the end everything must be free, and no process may be left. Prints rounds, kills,
double allocations, devices lost, processes and files left, and how long calls waited; the exit status says whether
anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path

import anyaccel as aa
from anyaccel.ledger import Ledger

DEVICES, PARTS = 3, 2
MARK = "ANYACCEL_TEST_CHAOS"
PATIENCE = 90.0
VERBOSE = "ANYACCEL_TEST_VERBOSE" in os.environ
CALLS_BETWEEN, MOST_SECONDS, LINE = 2, 3.0, 20
"""Calls between two signals, seconds to wait for them, and bytes that one writes at least."""
DECLARED = {"GPU": DEVICES}
PROGRAMS = ("pool", "pool", "actor", "acquire", "run")
SIGNALS = (signal.SIGKILL,) * 8 + (signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happened.

    Attributes:
        rounds: Signals that were sent.
        kills: SIGKILLs among them.
        calls: Calls that had devices.
        doubles: Times at which a call found a part of its device in use.
        lost: Devices that were not free in the end.
        orphans: Processes that were left in the end.
        debris: Files that were left in the state directory.
        waits: Seconds that calls waited, sorted.
    """

    rounds: int
    kills: int
    calls: int
    doubles: int
    lost: tuple[str, ...]
    orphans: tuple[str, ...]
    debris: tuple[str, ...]
    waits: tuple[float, ...]

    @property
    def sound(self) -> bool:
        """Whether nothing was wrong."""
        return not (self.doubles or self.lost or self.orphans or self.debris)

    def __str__(self) -> str:
        marks = [self.waits[min(len(self.waits) - 1, len(self.waits) * each // 100)] * 1e3 for each in (50, 95, 99)]
        return (
            f"rounds {self.rounds}, kills {self.kills}, calls {self.calls}, double allocations {self.doubles}, devices "
            f"lost {len(self.lost)}, processes left {len(self.orphans)}, files left {len(self.debris)}, waited ms: "
            f"median {marks[0]:.1f}, 95 % {marks[1]:.1f}, 99 % {marks[2]:.1f}, longest {self.waits[-1] * 1e3:.1f}"
        )


def use(home: str, seed: int, since: float, leave: bool = True) -> None:
    """The call: lock what was given, look whether another process has it, and sometimes leave a process behind."""
    rng = random.Random(seed)
    waited = time.monotonic() - since
    log = os.open(f"{home}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for share in (share for grant in aa.current().grants for share in grant.shares):
        missing = share.units * PARTS // 10_000
        for part in range(PARTS):
            file = os.open(f"{home}/{share.device.id}.{part}", os.O_RDWR | os.O_CREAT)
            with contextlib.suppress(BlockingIOError):
                if missing:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    missing -= 1
        if missing:
            found = "; ".join(holders(f"{home}/{share.device.id}."))
            os.write(
                log, f"double {share.device.id} {share.units} in process {os.getpid()}, held by {found}\n".encode()
            )
    os.write(log, f"call {waited}\n".encode())
    if leave and rng.random() < 0.3 and os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(rng.uniform(0, 0.05))
        os._exit(0)
    time.sleep(rng.uniform(0, 0.02))


def holders(path: str) -> list[str]:
    """Processes that have a file open whose path begins so, for the report."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if any(os.readlink(f"/proc/{pid}/fd/{each}").startswith(path) for each in os.listdir(f"/proc/{pid}/fd")):
                parent = next(line for line in open(f"/proc/{pid}/status") if line.startswith("PPid"))  # noqa: SIM115
                found.append(f"{_command(int(pid))} ({parent.strip()})")
    return found


class User:
    """An actor that uses what it was given, once: its locks stay until its process has gone."""

    def __init__(self, home: str, seed: int, since: float) -> None:
        use(home, seed, since)

    def work(self, seconds: float) -> None:
        """Take a while."""
        time.sleep(seconds)


class Program:
    """One of the programs: it goes on until something ends it."""

    def __init__(self, home: str, seed: int) -> None:
        self.home = home
        self.rng = random.Random(seed)
        self.numbers = iter(range(seed * 1000, seed * 1000 + 999))

    def needs(self) -> str:
        """What the next call is to be given."""
        return self.rng.choice(["GPU:1", "GPU:1", "GPU:0.5", "GPU:2"])

    def command(self, *, leave: bool) -> list[str]:
        """A command that does what a call does."""
        words = ["use", self.home, str(next(self.numbers)), str(time.monotonic()), "leave" * leave]
        return [sys.executable, __file__, *words]

    def pool(self) -> None:
        """Calls, of which some are cancelled and some take too long."""
        with aa.Pool("GPU:1", grace=0.1, declare=DECLARED) as pool:
            while True:
                futures = [
                    pool.options(needs=self.needs(), timeout=self.rng.choice([None, 0.05])).submit(
                        use, self.home, next(self.numbers), time.monotonic()
                    )
                    for _ in range(4)
                ]
                if self.rng.random() < 0.3:
                    self.rng.choice(futures).cancel()
                for future in futures:
                    with contextlib.suppress(Exception, CancelledError):
                        future.result()

    def actor(self) -> None:
        """Actors, which are closed or killed."""
        with aa.Pool("GPU:1", grace=0.1, declare=DECLARED) as pool:
            while True:
                user = pool.options(needs=self.needs()).actor(User, self.home, next(self.numbers), time.monotonic())
                with contextlib.suppress(Exception):
                    user.work(self.rng.uniform(0, 0.02)).result()
                self.rng.choice([user.close, user.kill])()

    def acquire(self) -> None:
        """A lease of our own, which a child carries, too. When we give it back, the child must have ended."""
        while True:
            with (
                aa.acquire(self.needs(), declare=DECLARED) as lease,
                subprocess.Popen(self.command(leave=False), env=lease.environ, pass_fds=lease.fds) as child,
            ):
                try:
                    child.wait()
                finally:
                    child.kill()
                    child.wait()

    def run(self) -> None:
        """The command line."""
        launcher = [sys.executable, "-m", "anyaccel", "--declare", f"GPU={DEVICES}", "run"]
        while True:
            subprocess.run([*launcher, self.needs(), "--", *self.command(leave=True)], check=False)


def left(mark: str) -> list[int]:
    """Processes that carry a mark in their environment, but for those that have ended and wait to be asked for."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if mark.encode() in file.read():
                found.append(int(pid))
    return found


def hit(rng: random.Random, mark: str) -> signal.Signals | None:
    """Send a signal to one of all processes: each kind is as likely as the others, however many there are."""
    number = rng.choice(SIGNALS)
    kinds: dict[str, list[int]] = {}
    for pid in left(mark):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
            kinds.setdefault(file.read(), []).append(pid)
    with contextlib.suppress(IndexError, ProcessLookupError):
        victim = rng.choice(kinds[rng.choice(sorted(kinds))])
        os.kill(victim, number)
        with contextlib.suppress(OSError), open(f"/proc/{victim}/comm") as file:
            print(time.monotonic(), number.name, victim, file.read().strip(), file=sys.stderr) if VERBOSE else None
        if number == signal.SIGSTOP:
            time.sleep(rng.uniform(0, 0.1))
            os.kill(victim, signal.SIGCONT)
        return number
    return None


class Stage:
    """The programs, kept running.

    Args:
        home: Directory for everything.
        seed: What chance depends on.
    """

    def __init__(self, home: Path, seed: int) -> None:
        self.mark = f"{MARK}={os.urandom(8).hex()}"
        self.log, self.output = home / "log", home / "output"
        self.log.touch()
        name, _, value = self.mark.partition("=")
        self.environ = {
            **os.environ,
            name: value,
            "ANYACCEL_STATE_DIR": str(home / "state"),
            "ANYACCEL_PLUGINS": "none",
        }
        self._home = home
        self._numbers = iter(range(seed * 1_000, (seed + 1) * 1_000))
        self._programs: list[tuple[str, subprocess.Popen[bytes]]] = [(kind, self._start(kind)) for kind in PROGRAMS]

    def _start(self, kind: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, kind, str(self._home), str(next(self._numbers))]
        with self.output.open("ab") as output:
            return subprocess.Popen(command, env=self.environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def wait_for_calls(self) -> None:
        """Let some calls be made, or this would be a test of how fast programs start."""
        size, until = self.log.stat().st_size, time.monotonic() + MOST_SECONDS
        while self.log.stat().st_size < size + CALLS_BETWEEN * LINE and time.monotonic() < until:
            time.sleep(0.002)

    def restart(self) -> None:
        """Start again what has ended."""
        self._programs = [
            (kind, program if program.poll() is None else self._start(kind)) for kind, program in self._programs
        ]

    def end(self) -> None:
        """Kill the programs; what they started must end by itself."""
        for _, program in self._programs:
            program.kill()
            program.wait()


def chaos(home: Path, *, rounds: int, seed: int) -> Outcome:
    """Let programs compete for some rounds, and see what is left."""
    rng = random.Random(seed)
    state = home / "state"
    state.mkdir(mode=0o700)
    stage = Stage(home, seed)
    sent: list[signal.Signals] = []
    while len(sent) < rounds:
        stage.wait_for_calls()
        time.sleep(rng.uniform(0, 0.02))
        number = hit(rng, stage.mark)
        if number is not None:
            sent.append(number)
        stage.restart()
    stage.end()
    ledger = Ledger.open({"ANYACCEL_STATE_DIR": str(state)})
    deadline = time.monotonic() + PATIENCE
    while (left(stage.mark) or ledger.leases()) and time.monotonic() < deadline:
        time.sleep(0.05)
    orphans = tuple(_command(pid) for pid in left(stage.mark))
    lost = tuple(sorted({record.device for record in ledger.leases()}))
    debris = _debris(stage, state, rounds)
    lines = stage.log.read_text().splitlines()
    wrong = [line for line in lines if not line.startswith("call ")]
    for line in [*wrong[:10], *orphans[:10], *debris[:10]]:
        print(line, file=sys.stderr)
    waits = tuple(sorted(float(line.split()[1]) for line in lines if line.startswith("call ")))
    return Outcome(
        rounds=rounds,
        kills=sent.count(signal.SIGKILL),
        calls=len(waits),
        doubles=len(wrong),
        lost=lost,
        orphans=orphans,
        debris=debris,
        waits=waits or (0.0,),
    )


def _debris(stage: Stage, state: Path, rounds: int) -> tuple[str, ...]:
    """What is left in the state directory after the next ones have swept it, which they do a few files at a time.

    They take all devices: what an ended lease left behind goes when its device is given again.
    """
    for _ in range(rounds):
        with aa.acquire(f"GPU:{DEVICES}", wait=0, environ=stage.environ, declare=DECLARED):
            pass
        debris = tuple(name for name in os.listdir(state) if not name.startswith("checked."))
        if not debris:
            break
    return debris


def _command(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return f"process {pid}: {file.read().replace(bytes(1), b' ').decode(errors='replace')[:200]}"
    return f"process {pid}"


def main() -> int:
    """Run it by hand; or be one of its programs, or a command that one of them starts."""
    if sys.argv[1:2] == ["use"]:
        home, seed, since, leave = sys.argv[2:]
        use(home, int(seed), float(since), bool(leave))
        return 0
    if sys.argv[1:2] and sys.argv[1] in PROGRAMS:
        getattr(Program(sys.argv[2], int(sys.argv[3])), sys.argv[1])()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as home:
        outcome = chaos(Path(home), rounds=args.rounds, seed=args.seed)
        if not outcome.sound:
            print((Path(home) / "output").read_text(errors="replace")[-3000:], file=sys.stderr)
    print(f"seed {args.seed}: {outcome}")
    return 0 if outcome.sound and outcome.calls else 1


if __name__ == "__main__":
    sys.exit(main())
