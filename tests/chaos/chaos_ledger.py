"""Chaos: processes take and give back devices while others of them are killed and stopped, and another process watches.

    python tests/chaos/chaos_ledger.py [--rounds N] [--claimants N] [--seed N]

The watchman is independent of the ledger: each claimant that has a device also locks a file of its own for every unit
of it, and finds it locked when another process has the device, too. A round is one kill or stop. In the end everything
must be free again. Prints rounds, kills, double allocations, devices lost and how long claimants waited; the exit
status says whether anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from anyaccel.errors import DevicesBusyError, LedgerBusyError, LedgerError
from anyaccel.ledger import Ledger, Want
from anyaccel.model import NOTHING, Extent

DEVICES = ("a", "b", "c", "d")
PARTS = 4
PART = 10_000 // PARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happened.

    Attributes:
        rounds: Kills and stops.
        kills: Kills among them.
        leases: Leases that were taken.
        doubles: Times at which a claimant found a part of a device in use that it had been given.
        lost: Devices that were not free in the end.
        debris: Files that were left in the end, after one sweep.
        waits: Seconds that each lease was waited for, sorted.
    """

    rounds: int
    kills: int
    leases: int
    doubles: int
    lost: tuple[str, ...]
    debris: tuple[str, ...]
    waits: tuple[float, ...]

    @property
    def sound(self) -> bool:
        """Whether nothing was wrong."""
        return not (self.doubles or self.lost or self.debris) and self.leases > 0

    def __str__(self) -> str:
        marks = [self.waits[min(len(self.waits) - 1, len(self.waits) * each // 100)] * 1e3 for each in (50, 95, 99)]
        return (
            f"rounds {self.rounds}, kills {self.kills}, leases {self.leases}, double allocations {self.doubles}, "
            f"devices lost {len(self.lost)}, files left {len(self.debris)}, waited ms: median {marks[0]:.1f}, "
            f"95 % {marks[1]:.1f}, 99 % {marks[2]:.1f}, longest {self.waits[-1] * 1e3:.1f}"
        )


class Watchman:
    """Locks of our own on parts of devices, with which claimants find each other whatever the ledger says.

    The files are opened before any lease is taken, so a claimant that is killed drops its lease before them.
    """

    def __init__(self, home: Path) -> None:
        self.parts = {
            device: [os.open(home / f"{device}{part}", os.O_RDWR | os.O_CREAT) for part in range(PARTS)]
            for device in DEVICES
        }

    def enter(self, device: str, count: int) -> bool:
        """Lock as many parts of a device as are held; False when others have them."""
        locked = 0
        for part in self.parts[device]:
            with contextlib.suppress(BlockingIOError):
                if locked < count:
                    fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    locked += 1
        return locked == count

    def leave(self, device: str) -> None:
        """Unlock them."""
        for part in self.parts[device]:
            fcntl.flock(part, fcntl.LOCK_UN)


def claim_for_ever(home: Path, seed: int) -> None:
    """Be a claimant: take something, look whether another process has it, hold it for a moment, give it back."""
    rng = random.Random(seed)
    watchman = Watchman(home)
    log = os.open(home / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    ledger = Ledger.open({"ANYACCEL_STATE_DIR": str(home / "state")})
    want = Want(candidates=frozenset(DEVICES), request="chaos")
    while True:
        units = rng.choice([PART, PART * 2, 10_000])
        count = rng.choice([1, 1, 2]) if units == 10_000 else 1

        def choose(taken: Mapping[str, Extent], units: int = units, count: int = count) -> dict[str, Extent] | None:
            wanted = Extent(units)
            free = [device for device in DEVICES if taken.get(device, NOTHING).leaves(wanted)]
            rng.shuffle(free)
            return dict.fromkeys(free[:count], wanted) if len(free) >= count else None

        before = time.monotonic()
        try:
            lease = ledger.acquire(want, choose, wait=rng.choice([0, 0.005, None]), priority=rng.choice([0, 0, 1]))
        except (DevicesBusyError, LedgerBusyError):
            continue
        waited = time.monotonic() - before
        for device, given in lease.devices.items():
            if not watchman.enter(device, given.units // PART):
                os.write(log, f"double {device} {given} {sorted(os.listdir(ledger.path))}\n".encode())
        os.write(log, f"lease {waited}\n".encode())
        time.sleep(rng.uniform(0, 0.002))
        for device in lease.devices:
            watchman.leave(device)
        lease.release()


def start(home: Path, seed: int) -> int:
    """Fork a claimant."""
    pid = os.fork()
    if pid:
        return pid
    try:
        claim_for_ever(home, seed)
    except BaseException as error:  # noqa: BLE001 - the claimant has no other way to say it
        with open(home / "log", "a") as log:
            log.write(f"error {error!r}\n")
    os._exit(1)


def chaos(home: Path, *, rounds: int, claimants: int, seed: int) -> Outcome:
    """Let claimants compete for some rounds, and see what is left."""
    rng = random.Random(seed)
    (home / "state").mkdir(mode=0o700)
    ledger = Ledger.open({"ANYACCEL_STATE_DIR": str(home / "state")})
    numbers = iter(range(seed * 1_000_000, (seed + 1) * 1_000_000))
    alive = [start(home, next(numbers)) for _ in range(claimants)]
    while not (home / "log").exists() or not (home / "log").stat().st_size:  # on a busy machine they start slowly
        time.sleep(0.002)
    kills = 0
    for _ in range(rounds):
        time.sleep(rng.uniform(0, 0.02))
        victim = rng.randrange(len(alive))
        if rng.random() < 0.8:
            os.kill(alive[victim], signal.SIGKILL)
            os.waitpid(alive[victim], 0)
            alive[victim] = start(home, next(numbers))
            kills += 1
        else:
            os.kill(alive[victim], signal.SIGSTOP)
            time.sleep(rng.uniform(0, 0.03))
            os.kill(alive[victim], signal.SIGCONT)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    lost = tuple(sorted({record.device for record in ledger.leases()}))
    everything = dict.fromkeys(DEVICES, Extent())
    want = Want(candidates=frozenset(DEVICES))
    with contextlib.suppress(LedgerError):
        for _ in range(1 + claimants * rounds // 4):  # hidden files are swept a few at a time
            ledger.acquire(want, lambda taken: None if taken else everything, wait=0).release()
            if len(os.listdir(ledger.path)) == 1:
                break
    debris = tuple(name for name in os.listdir(ledger.path) if not name.startswith("checked."))
    lines = (home / "log").read_text().splitlines()
    wrong = [line for line in lines if not line.startswith("lease ")]
    for line in wrong[:10]:
        print(line, file=sys.stderr)
    waits = tuple(sorted(float(line.split()[1]) for line in lines if line.startswith("lease ")))
    return Outcome(
        rounds=rounds,
        kills=kills,
        leases=len(waits),
        doubles=len(wrong),
        lost=lost,
        debris=debris,
        waits=waits or (0.0,),
    )


def main() -> int:
    """Run it by hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--claimants", type=int, default=12)
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as home:
        outcome = chaos(Path(home), rounds=args.rounds, claimants=args.claimants, seed=args.seed)
    print(f"seed {args.seed}: {outcome}")
    return 0 if outcome.sound else 1


if __name__ == "__main__":
    sys.exit(main())
