"""Chaos: programs run calls on devices while they, their nurseries, their workers and what those start are killed.

    python tests/chaos/chaos_workers.py [--rounds N] [--seed N]

The watchman is independent of anyaccel: a call locks a file of its own for every part of the devices that it was given,
and finds it locked when anything else still has the device. Some calls leave a process behind that carries the
locks on. A round is one signal. In the end everything must be free, and nobody may be left. Prints rounds, kills,
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
from dataclasses import dataclass
from pathlib import Path

import anyaccel as aa
from anyaccel.ledger import Ledger

DEVICES, PARTS = 3, 2
MARK = "ANYACCEL_TEST_CHAOS"
PATIENCE = 30.0
VERBOSE = "ANYACCEL_TEST_VERBOSE" in os.environ
CALLS_BETWEEN, LINE = 2, 20
"""Calls between two signals, and bytes that one writes at least."""
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
        return not (self.doubles or self.lost or self.orphans or self.debris) and self.calls > 0

    def __str__(self) -> str:
        marks = [self.waits[min(len(self.waits) - 1, len(self.waits) * each // 100)] * 1e3 for each in (50, 95, 99)]
        return (
            f"rounds {self.rounds}, kills {self.kills}, calls {self.calls}, double allocations {self.doubles}, devices "
            f"lost {len(self.lost)}, processes left {len(self.orphans)}, files left {len(self.debris)}, waited ms: "
            f"median {marks[0]:.1f}, 95 % {marks[1]:.1f}, 99 % {marks[2]:.1f}, longest {self.waits[-1] * 1e3:.1f}"
        )


def use(home: str, seed: int, since: float, leave: bool = True) -> None:
    """The call: lock what was given, look whether anybody else has it, and sometimes leave somebody behind."""
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
            os.write(log, f"double {share.device.id} {share.units} in process {os.getpid()}, held by {found}\n".encode())
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


def run_program(kind: str, home: str, seed: int) -> None:
    """Be one of the programs, until the end."""
    rng = random.Random(seed)
    machine = {"declare": {"GPU": DEVICES}}
    numbers = iter(range(seed * 1000, seed * 1000 + 999))

    def needs() -> str:
        return rng.choice(["GPU:1", "GPU:1", "GPU:0.5", "GPU:2"])

    if kind == "pool":
        with aa.Pool("GPU:1", grace=0.1, **machine) as pool:
            while True:
                futures = [
                    pool.options(needs=needs(), timeout=rng.choice([None, 0.05])).submit(
                        use, home, next(numbers), time.monotonic()
                    )
                    for _ in range(4)
                ]
                if rng.random() < 0.3:
                    rng.choice(futures).cancel()
                for future in futures:
                    with contextlib.suppress(Exception):
                        future.result()
    elif kind == "actor":
        with aa.Pool("GPU:1", grace=0.1, **machine) as pool:
            while True:
                user = pool.options(needs=needs()).actor(User, home, next(numbers), time.monotonic())
                with contextlib.suppress(Exception):
                    user.work(rng.uniform(0, 0.02)).result()
                rng.choice([user.close, user.kill])()
    elif kind == "acquire":
        while True:
            since = time.monotonic()
            with aa.acquire(needs(), wait=60, **machine) as lease:
                subprocess.run(
                    [sys.executable, __file__, "use", home, str(next(numbers)), str(since), ""],  # release is the end
                    env=lease.environ,
                    pass_fds=lease.fds,
                    check=False,
                )
    else:
        while True:
            command = [sys.executable, __file__, "use", home, str(next(numbers)), str(time.monotonic()), "leave"]
            launcher = [sys.executable, "-m", "anyaccel", "--declare", f"GPU={DEVICES}", "run", needs(), "--"]
            subprocess.run([*launcher, *command], check=False)


def left(mark: str) -> list[int]:
    """Processes that carry a mark in their environment, but for those that have ended and wait to be asked for."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb") as file:
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


def chaos(home: Path, *, rounds: int, seed: int) -> Outcome:
    """Let programs compete for some rounds, and see what is left."""
    rng = random.Random(seed)
    state = home / "state"
    state.mkdir(mode=0o700)
    mark = f"{MARK}={os.urandom(8).hex()}"
    name, _, value = mark.partition("=")
    environ = {**os.environ, name: value, "ANYACCEL_STATE_DIR": str(state), "ANYACCEL_PLUGINS": ","}
    numbers = iter(range(seed * 1_000, (seed + 1) * 1_000))
    log = open(home / "output", "ab")  # noqa: SIM115 - closed below

    def start(kind: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, kind, str(home), str(next(numbers))]
        return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    programs = [(kind, start(kind)) for kind in PROGRAMS]
    beginning = time.monotonic()
    while not (home / "log").exists():
        time.sleep(0.01)
        assert time.monotonic() < beginning + PATIENCE, (home / "output").read_text()
    sent: list[signal.Signals] = []
    while len(sent) < rounds:
        size, until = (home / "log").stat().st_size, time.monotonic() + 1
        while (home / "log").stat().st_size < size + CALLS_BETWEEN * LINE and time.monotonic() < until:
            time.sleep(0.002)  # or it would be a test of how fast programs start
        time.sleep(rng.uniform(0, 0.02))
        number = hit(rng, mark)
        if number is not None:
            sent.append(number)
        programs = [(kind, start(kind) if process.poll() is not None else process) for kind, process in programs]
    for _, process in programs:
        process.kill()
        process.wait()
    log.close()
    ledger = Ledger.open({"ANYACCEL_STATE_DIR": str(state)})
    deadline = time.monotonic() + PATIENCE
    while (left(mark) or ledger.leases()) and time.monotonic() < deadline:
        time.sleep(0.05)
    orphans = tuple(_command(pid) for pid in left(mark))
    lost = tuple(sorted({record.device for record in ledger.leases()}))
    for _ in range(rounds):  # what was killed is swept by the next ones, a few files at a time
        with aa.acquire("GPU:1", wait=0, environ={**environ}, declare={"GPU": DEVICES}):
            pass
        if all(each.startswith("checked.") for each in os.listdir(state)):
            break
    debris = tuple(each for each in os.listdir(state) if not each.startswith("checked."))
    lines = (home / "log").read_text().splitlines()
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
        run_program(sys.argv[1], sys.argv[2], int(sys.argv[3]))
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
    return 0 if outcome.sound else 1


if __name__ == "__main__":
    sys.exit(main())
