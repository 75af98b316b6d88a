"""What a lease costs, against SQLite in WAL mode doing the same, in one run on one machine.

    python benchmarks/bench_ledger.py [--seconds S] [--rivals N]

Every claimant asks for half of any of eight devices, holds it for no time, and asks again. SQLite keeps one row per
lease, sums them in an immediate transaction, and retries at random intervals; "in order" it keeps a table of those
who wait, too, and serves the first. It does not notice that a holder has died. Prints ratios; absolute values are
there for scale.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from anyaccel.ledger import Ledger, Want

DEVICES = [f"dev-{number}" for number in range(8)]
HALF, WHOLE = 5_000, 10_000

Claim = Callable[[], Callable[[], None]]
"""Gets half a device and returns how to give it back."""


def choose(taken: dict[str, int]) -> dict[str, int] | None:
    """Half of the first device that has it."""
    for device in DEVICES:
        if taken.get(device, 0) + HALF <= WHOLE:
            return {device: HALF}
    return None


def ledger_claim(directory: str) -> Claim:
    """Claim from the ledger."""
    ledger = Ledger.open({"ANYACCEL_STATE_DIR": directory})
    want = Want(candidates=frozenset(DEVICES), request="APU:0.5")
    return lambda: ledger.acquire(want, choose).release


def sqlite_claim(directory: str, *, in_order: bool = False) -> Claim:
    """Claim from a table of leases."""
    table = sqlite3.connect(f"{directory}/leases.db", isolation_level=None, timeout=60)
    table.execute("PRAGMA journal_mode=WAL")
    table.execute("PRAGMA synchronous=NORMAL")
    table.execute(
        "CREATE TABLE IF NOT EXISTS leases (id INTEGER PRIMARY KEY, device, units, pid, start, nonce, request, command)"
    )
    table.execute("CREATE TABLE IF NOT EXISTS line (id INTEGER PRIMARY KEY AUTOINCREMENT, pid)")
    with open("/proc/self/stat", "rb") as file:
        start = file.read().rpartition(b")")[2].split()[19]
    insert = "INSERT INTO leases (device, units, pid, start, nonce, request, command) VALUES (?, ?, ?, ?, ?, ?, ?)"

    def give(number: int | None) -> None:
        table.execute("DELETE FROM leases WHERE id = ?", (number,))

    def claim() -> Callable[[], None]:
        place = None
        while True:
            table.execute("BEGIN IMMEDIATE")
            if in_order and place is None:
                place = table.execute("INSERT INTO line (pid) VALUES (?)", (os.getpid(),)).lastrowid
            if not in_order or table.execute("SELECT MIN(id) FROM line").fetchone() == (place,):
                choice = choose(dict(table.execute("SELECT device, SUM(units) FROM leases GROUP BY device")))
                if choice:
                    ((device, units),) = choice.items()
                    row = (device, units, os.getpid(), start, os.urandom(6).hex(), "APU:0.5", "bench")
                    number = table.execute(insert, row).lastrowid
                    table.execute("DELETE FROM line WHERE id = ?", (place,))
                    table.execute("COMMIT")
                    return partial(give, number)
            table.execute("COMMIT")
            time.sleep(random.uniform(0.0002, 0.001))

    return claim


def compete(make: Callable[[str], Claim], directory: str, begin: float, seconds: float, answers: Any) -> None:
    """Claim and give back until the time is up; answers with the number of turns and the slowest one."""
    claim = make(directory)
    time.sleep(max(0, begin - time.monotonic()))
    turns, slowest = 0, 0.0
    while (now := time.monotonic()) < begin + seconds:
        claim()()
        turns += 1
        slowest = max(slowest, time.monotonic() - now)
    answers.put((turns, slowest))


def measure(make: Callable[[str], Claim], rivals: int, seconds: float) -> tuple[float, float, float]:
    """Turns per second, most to least served, slowest turn in ms."""
    with state() as directory:
        make(directory)
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()
        begin = time.monotonic() + 0.2 + 0.02 * rivals
        processes = [
            context.Process(target=compete, args=(make, directory, begin, seconds, answers)) for _ in range(rivals)
        ]
        for process in processes:
            process.start()
        results = [answers.get() for _ in processes]
        for process in processes:
            process.join()
    turns = [turn for turn, _ in results]
    return sum(turns) / seconds, max(turns) / max(1, min(turns)), max(slow for _, slow in results) * 1e3


@contextmanager
def state() -> Iterator[str]:
    """A directory on tmpfs where there is one."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        yield directory


def acquire_with(live: int) -> float:
    """Median microseconds of one lease and back while some leases of other devices are live."""
    with state() as directory:
        ledger = Ledger.open({"ANYACCEL_STATE_DIR": directory})
        other = Want(candidates=frozenset(["other"]))
        held = [ledger.acquire(other, lambda _: {"other": 1}) for _ in range(live)]
        claim = ledger_claim(directory)
        samples = []
        for _ in range(1000):
            before = time.perf_counter()
            claim()()
            samples.append(time.perf_counter() - before)
        for lease in held:
            lease.release()
    return sorted(samples)[len(samples) // 2] * 1e6


def takeover(rounds: int) -> list[float]:
    """Milliseconds from SIGKILL of a holder to the moment at which the next has the device."""
    samples = []
    code = (
        "import sys; from anyaccel.ledger import Ledger, Want; import time\n"
        "ledger = Ledger.open({'ANYACCEL_STATE_DIR': sys.argv[1]})\n"
        "lease = ledger.acquire(Want(candidates=frozenset('a')), lambda t: None if t.get('a') else {'a': 10_000})\n"
        "print(time.monotonic(), flush=True); time.sleep(60)"
    )
    with state() as directory:
        Ledger.open({"ANYACCEL_STATE_DIR": directory})
        command = [sys.executable, "-c", code, directory]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        holder.stdout.readline()
        for _ in range(rounds):
            waiter = subprocess.Popen(command, stdout=subprocess.PIPE)
            while not any(name.startswith("t1.") for name in os.listdir(directory)):
                time.sleep(0.01)
            time.sleep(0.2)
            before = time.monotonic()
            holder.send_signal(signal.SIGKILL)
            samples.append((float(waiter.stdout.readline()) - before) * 1e3)
            holder.wait()
            holder = waiter
        holder.kill()
        holder.wait()
    return sorted(samples)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rivals", type=int, default=64)
    args = parser.parse_args()
    print("one lease and back, median: ", end="")
    print(", ".join(f"{acquire_with(live):.0f} us with {live} live" for live in (0, 16, 64, 256)))
    rivals = {"ledger": ledger_claim, "sqlite in order": partial(sqlite_claim, in_order=True), "sqlite": sqlite_claim}
    print(f"{'rivals':>6}  {'':<16} {'turns/s':>8} {'ratio':>6} {'most:least':>11} {'slowest':>10}")
    for number in sorted({1, 8, args.rivals}):
        base = 0.0
        for name, claim in rivals.items():
            turns, spread, slowest = measure(claim, number, args.seconds)
            base = base or turns
            print(f"{number:>6}  {name:<16} {turns:>8.0f} {base / turns:>6.2f} {spread:>9.1f}:1 {slowest:>7.0f} ms")
    samples = takeover(20)
    print(f"next holder after SIGKILL: median {samples[10]:.1f} ms, slowest of 20 {samples[-1]:.1f} ms")


if __name__ == "__main__":
    main()
