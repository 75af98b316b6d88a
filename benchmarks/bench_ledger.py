"""What a lease costs, against SQLite in WAL mode doing the same, in one run on one machine.

Every claimant asks for half of any of eight devices, holds it for no time, and asks again.
"""

from __future__ import annotations

import ctypes  # noqa: F401 - loaded by those who wait; like sqlite3, it is there before anybody competes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from anyaccel.ledger import Ledger, Want
from measure import Row, against, at_most, state
from sqlite_leases import SqliteLeases

DEVICES = [f"dev-{number}" for number in range(8)]
HALF, WHOLE = 5_000, 10_000
ROUNDS, RIVALS, LINES = 20, 64, (1, 10, 100)
LEASE_SECONDS, TAKEOVER_SECONDS, FAIR = 0.2e-3, 20e-3, 10.0

Claim = Callable[[], Callable[[], None]]
"""Gets half a device and returns how to give it back."""


def choose(taken: Mapping[str, int]) -> dict[str, int] | None:
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
    return SqliteLeases(directory, choose, in_order=in_order).claim


def compete(make: Callable[[str], Claim], directory: str, begin: float, seconds: float, answers: Any) -> None:
    """Claim and give back until the time is up; answers with the number of turns and the slowest one, or an error."""
    turns, slowest, error = 0, 0.0, ""
    try:
        claim = make(directory)
        time.sleep(max(0, begin - time.monotonic()))
        while (now := time.monotonic()) < begin + seconds:
            claim()()
            turns += 1
            slowest = max(slowest, time.monotonic() - now)
    except Exception as failure:  # noqa: BLE001 - whatever it is, the others' turns mean nothing then
        error = f"{type(failure).__name__}: {failure}"
    answers.put((turns, slowest, error))


def measure(make: Callable[[str], Claim], rivals: int, seconds: float) -> tuple[float, float, float]:
    """Seconds per turn, how many times more the most served got than the least, seconds of the slowest turn."""
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
    errors = [error for _, _, error in results if error]
    if errors:
        raise SystemExit(f"{len(errors)} of {rivals} rivals gave up: {errors[0]}")
    turns = [turn for turn, _, _ in results]
    return seconds / max(1, sum(turns)), max(turns) / max(1, min(turns)), max(slow for _, slow, _ in results)


def acquire_with(live: int, turns: int) -> float:
    """Median seconds of one lease and back while some leases of other devices are live."""
    with state() as directory:
        ledger = Ledger.open({"ANYACCEL_STATE_DIR": directory})
        other = Want(candidates=frozenset(["other"]))
        held = [ledger.acquire(other, lambda _: {"other": 1}) for _ in range(live)]
        claim = ledger_claim(directory)
        samples = []
        for _ in range(turns):
            before = time.perf_counter()
            claim()()
            samples.append(time.perf_counter() - before)
        for lease in held:
            lease.release()
    return sorted(samples)[len(samples) // 2]


def takeover(rounds: int) -> list[float]:
    """Seconds from SIGKILL of a holder to the moment at which the next has the device."""
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
            samples.append(float(waiter.stdout.readline()) - before)
            holder.wait()
            holder = waiter
        holder.kill()
        holder.wait()
    return sorted(samples)


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure one lease and back, rivals beside SQLite, and what follows the death of a holder."""
    found = []
    for live in (0, 16, 256):
        seconds = acquire_with(live, 50 * rounds)
        what = f"lease and back, {live} others live"
        found.append(Row(what=what, seconds=seconds) if live else at_most(what, seconds, LEASE_SECONDS))
    contenders = {
        "ledger": ledger_claim,
        "SQLite in order": partial(sqlite_claim, in_order=True),
        "SQLite": sqlite_claim,
    }
    for rivals in (1, 8, RIVALS) if rounds > 1 else (2,):
        turns, spread = {}, {}
        for name, claim in contenders.items():
            who = f"{name}, {rivals} rival{'s' if rivals > 1 else ''}"
            turns[who], spread[who], _ = measure(claim, rivals, rounds / 10)
        ours, in_order, _ = turns
        if rivals == RIVALS:
            found += against(in_order, turns, {ours: 1.0, f"SQLite, {rivals} rivals": None})
            for who, unfair in spread.items():
                budget, kept = (f"at most {FAIR:g}x", unfair <= FAIR) if who == ours else ("", None)
                found.append(
                    Row(
                        what=f"most to least served, {who}", seconds=turns[who], ratio=unfair,
                        reference="the least served", budget=budget, kept=kept,
                    )
                )  # fmt: skip
        else:
            found += against(in_order, turns, {ours: None, f"SQLite, {rivals} rival{'s' if rivals > 1 else ''}": None})
    samples = takeover(rounds)
    found.append(at_most("next holder after SIGKILL, median", samples[len(samples) // 2], TAKEOVER_SECONDS))
    found.append(Row(what=f"next holder after SIGKILL, slowest of {rounds}", seconds=samples[-1]))
    found += [
        Row(what=f"turn in a line of {number:,} threads", seconds=line_of(number)) for number in LINES[: rounds + 1]
    ]
    return found


def line_of(number: int) -> float:
    """Seconds per turn when so many threads of one process stand in the machine's line for one device."""
    want = Want(candidates=frozenset(["one"]))
    with state() as directory:
        ledger = Ledger.open({"ANYACCEL_STATE_DIR": directory})
        first = ledger.acquire(want, lambda taken: None if taken.get("one") else {"one": WHOLE})

        def turn() -> None:
            ledger.acquire(want, lambda taken: None if taken.get("one") else {"one": WHOLE}).release()

        threads = [threading.Thread(target=turn) for _ in range(number)]
        for thread in threads:
            thread.start()
        while sum(name.startswith("t1.") for name in os.listdir(directory)) < number:
            if not all(thread.is_alive() for thread in threads):
                raise SystemExit(f"one of {number} threads could not stand in line")
            time.sleep(0.01)
        start = time.perf_counter()
        first.release()
        for thread in threads:
            thread.join()
        return (time.perf_counter() - start) / number
