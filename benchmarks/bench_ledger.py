"""What a lease costs, against SQLite in WAL mode doing the same, in one run on one machine.

Every claimant asks for half of any of eight devices, holds it for no time, and asks again. All leases name a mark, as
those of pools and commands do.
"""

from __future__ import annotations

import ctypes  # noqa: F401 - loaded by waiting processes; like sqlite3, it is there before they compete
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
from anyaccel.linux import mark as marks
from anyaccel.model import NOTHING, Extent
from measure import Row, against, at_most, median, state
from sqlite_leases import SqliteLeases

DEVICES = [f"dev-{number}" for number in range(8)]
HALF = Extent(5_000)
ROUNDS, RIVALS, LINES = 20, 64, (1, 10, 100, 300)
LEASE_SECONDS: dict[int, float | None] = {0: 0.1e-3, 16: None, 256: 0.2e-3}
"""Budget of one lease and back by the number of others that are live."""
TAKEOVER_SECONDS, RESTING_SECONDS, FAIR = 20e-3, 3.0, 10.0
OTHER_USER = 65534
LAST = "next holder after the last descendant"

Claim = Callable[[], Callable[[], None]]
"""Gets half a device and returns how to give it back."""


def choose(taken: Mapping[str, Extent]) -> dict[str, Extent] | None:
    """Half of the first device that has it."""
    for device in DEVICES:
        if taken.get(device, NOTHING).leaves(HALF):
            return {device: HALF}
    return None


def ledger_claim(directory: str) -> Claim:
    """Claim from the ledger."""
    ledger = Ledger.open({"ANYACCEL_STATE_DIR": directory})
    want = Want(candidates=frozenset(DEVICES), request="APU:0.5", mark=marks.draw)
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
        other = Want(candidates=frozenset(["other"]), mark=marks.draw)
        held = [ledger.acquire(other, lambda _: {"other": Extent(1)}) for _ in range(live)]
        claim = ledger_claim(directory)
        samples = []
        for _ in range(turns):
            before = time.perf_counter()
            claim()()
            samples.append(time.perf_counter() - before)
        for lease in held:
            lease.release()
    return sorted(samples)[len(samples) // 2]


HOLDER = """
import subprocess, sys, time
from anyaccel.ledger import Ledger, Want
from anyaccel.linux import mark
from anyaccel.model import Extent
ledger = Ledger.open({"ANYACCEL_STATE_DIR": sys.argv[1]})
want = Want(candidates=frozenset("a"), mark=mark.draw_for_process)
lease = ledger.acquire(want, lambda taken: None if taken.get("a") else {"a": Extent()})
print(time.monotonic(), flush=True)
mark.put(lease.mark)
null = subprocess.DEVNULL
started = subprocess.Popen(["sleep", "60"], env={}, start_new_session=True, stdin=null, stdout=null, stderr=null)
print(started.pid, flush=True)
time.sleep(60)
"""
WATCHER = """
import os, select, sys, time
pinned = os.pidfd_open(int(sys.argv[1]))
print(flush=True)
select.select([pinned], [], [])
print(time.monotonic(), flush=True)
"""


def takeover(rounds: int, *, parent_first: bool) -> list[float]:
    """Seconds from the end of what keeps a device to the moment at which the next one holds it, in order.

    Args:
        rounds: How often.
        parent_first: What a holder has started outlives it, with a clear environment, no descriptor and a session of
            its own, and is killed once the next one knows that it keeps the device. Otherwise it is killed first, and
            then its holder.
    """
    samples = []
    with state() as directory:
        Ledger.open({"ANYACCEL_STATE_DIR": directory})
        command = [sys.executable, "-c", HOLDER, directory]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        holder.stdout.readline()
        for _ in range(rounds):
            child = int(holder.stdout.readline())
            if not parent_first:
                os.kill(child, signal.SIGKILL)
            waiter = subprocess.Popen(command, stdout=subprocess.PIPE)
            while not any(name.startswith("t1.") for name in os.listdir(directory)):
                time.sleep(0.01)
            if parent_first:
                holder.kill()
                holder.wait()
            time.sleep(0.3)
            before = time.monotonic()
            os.kill(child if parent_first else holder.pid, signal.SIGKILL)
            samples.append(float(waiter.stdout.readline()) - before)
            holder.wait()
            holder = waiter
        os.kill(int(holder.stdout.readline()), signal.SIGKILL)
        holder.kill()
        holder.wait()
    return sorted(samples)


def noticed(rounds: int) -> list[float]:
    """Seconds from SIGKILL of a process to the moment at which another one that only waits for it goes on, in order."""
    samples = []
    for _ in range(rounds):
        process = subprocess.Popen(["sleep", "60"])
        watcher = subprocess.Popen([sys.executable, "-S", "-c", WATCHER, str(process.pid)], stdout=subprocess.PIPE)
        watcher.stdout.readline()
        time.sleep(0.05)
        before = time.monotonic()
        process.kill()
        samples.append(float(watcher.stdout.readline()) - before)
        process.wait()
        watcher.wait()
    return sorted(samples)


def look(turns: int) -> float:
    """Median seconds of one look at all processes for a mark that none of them carries."""
    return median(lambda: marks.carriers({(1,)}), turns)


def look_as(user: int, turns: int) -> float:
    """The same as another user, who has to read the limits of others from ``/proc``."""
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()

    def be() -> None:
        os.setgroups([])
        os.setresuid(user, user, user)
        answer.put(look(turns))

    process = context.Process(target=be)
    process.start()
    found: float = answer.get()
    process.join()
    return found


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure one lease and back, rivals beside SQLite, a look at all processes, and what follows an end."""
    found = []
    for live, limit in LEASE_SECONDS.items():
        seconds = acquire_with(live, 50 * rounds)
        what = f"lease and back, {live} others live"
        found.append(Row(what=what, seconds=seconds) if limit is None else at_most(what, seconds, limit))
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
    number = sum(map(str.isdecimal, os.listdir("/proc")))
    if os.geteuid() == 0:
        found.append(Row(what=f"look at all {number} processes, as root", seconds=look(5 * rounds)))
        found.append(Row(what=f"look at all {number} processes, as another user", seconds=look_as(OTHER_USER, rounds)))
    else:
        found.append(Row(what=f"look at all {number} processes", seconds=look(rounds)))
    samples = takeover(rounds, parent_first=False)
    found.append(at_most("next holder after SIGKILL, median", samples[len(samples) // 2], TAKEOVER_SECONDS))
    found.append(Row(what=f"next holder after SIGKILL, slowest of {rounds}", seconds=samples[-1]))
    floor, samples = noticed(rounds), takeover(rounds, parent_first=True)
    found.append(Row(what="end of a process noticed by a process that waits for it", seconds=floor[len(floor) // 2]))
    found.append(at_most(f"{LAST}, median", samples[len(samples) // 2], TAKEOVER_SECONDS))
    found.append(Row(what=f"{LAST}, slowest of {rounds}", seconds=samples[-1]))
    for number in LINES[: rounds + 1]:
        resting, turn = line_of(number)
        found.append(Row(what=f"processor time of {number:,} threads that wait, in a second", seconds=resting))
        found.append(Row(what=f"turn in a line of {number:,} threads", seconds=turn))
    return found


def line_of(number: int) -> tuple[float, float]:
    """So many threads of one process stand in the machine's line for one device.

    Returns:
        Seconds of processor time that they take in a second while they wait, and seconds per turn.
    """
    want = Want(candidates=frozenset(["one"]))
    with state() as directory:
        ledger = Ledger.open({"ANYACCEL_STATE_DIR": directory})
        first = ledger.acquire(want, lambda taken: None if taken.get("one") else {"one": Extent()})

        def turn() -> None:
            ledger.acquire(want, lambda taken: None if taken.get("one") else {"one": Extent()}).release()

        threads = [threading.Thread(target=turn) for _ in range(number)]
        for thread in threads:
            thread.start()
        while sum(name.startswith("t1.") for name in os.listdir(directory)) < number:
            if not all(thread.is_alive() for thread in threads):
                raise SystemExit(f"one of {number} threads could not stand in line")
            time.sleep(0.01)
        start, used = time.perf_counter(), time.process_time()
        time.sleep(RESTING_SECONDS)
        resting = (time.process_time() - used) / (time.perf_counter() - start)
        start = time.perf_counter()
        first.release()
        for thread in threads:
            thread.join()
        return resting, (time.perf_counter() - start) / number
