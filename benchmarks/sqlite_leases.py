"""Leases in a table of SQLite in WAL mode: what the ledger is compared with.

One row per lease, summed in an immediate transaction, and retries at random intervals. Some processes are served
thousands of times more often than others then. In order it does what the ledger does: it also keeps a table of waiting
processes, serves the first, and continues when the first or a holder has died. It checks the first at every look, and
holders when nothing fits. SQLite's own wait for its lock gets longer and longer, so that most processes would never
be queued; in order, that is retried at random intervals as well.
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count

from anyaccel.model import Extent

SPINS = 32
"""How often to try at once to begin, as the ledger does with its lock."""

Choose = Callable[[Mapping[str, Extent]], Mapping[str, Extent] | None]


class SqliteLeases:
    """One process's connection to the table.

    Args:
        directory: Where the table is.
        choose: Chooses how much of which device, given what is taken; None when nothing fits.
        in_order: Whether claims are served in order.
    """

    def __init__(self, directory: str, choose: Choose, *, in_order: bool) -> None:
        self._choose = choose
        self._in_order = in_order
        self._me = (os.getpid(), started(os.getpid()))
        self._table = sqlite3.connect(f"{directory}/leases.db", isolation_level=None, timeout=60)
        for statement in (
            "PRAGMA journal_mode=WAL",
            "PRAGMA synchronous=NORMAL",
            "CREATE TABLE IF NOT EXISTS leases (id INTEGER PRIMARY KEY, device, units, pid, start, nonce, asked, name)",
            "CREATE TABLE IF NOT EXISTS line (id INTEGER PRIMARY KEY AUTOINCREMENT, pid, start)",
        ):
            self._table.execute(statement)
        if in_order:
            self._table.execute("PRAGMA busy_timeout=1")

    def claim(self) -> Callable[[], None]:
        """Get a device, once there is one and it is our turn; returns how to give it back."""
        place = None
        while True:
            self._begin()
            if self._in_order and place is None:
                place = self._table.execute("INSERT INTO line (pid, start) VALUES (?, ?)", self._me).lastrowid
            lease = self._take(place)
            self._table.execute("COMMIT")
            if lease is not None:
                return partial(self._give, lease)
            pause()

    def _give(self, lease: int) -> None:
        self._begin()
        self._remove("leases", lease)
        self._table.execute("COMMIT")

    def _begin(self) -> None:
        for tries in count():
            try:
                self._table.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:  # another process has begun
                os.sched_yield() if tries < SPINS else pause()
            else:
                return

    def _take(self, place: int | None) -> int | None:
        if place is not None and not self._is_first(place):
            return None
        chosen = self._fitting()
        if chosen is None and place is not None:
            for number, *holder in self._table.execute("SELECT id, pid, start FROM leases").fetchall():
                if not lives(*holder):
                    self._remove("leases", number)
            chosen = self._fitting()
        if chosen is None:
            return None
        ((device, extent),) = chosen.items()
        row = (device, extent.units, *self._me, os.urandom(6).hex(), "APU:0.5", "bench")
        insert = "INSERT INTO leases (device, units, pid, start, nonce, asked, name) VALUES (?, ?, ?, ?, ?, ?, ?)"
        lease = self._table.execute(insert, row).lastrowid
        if place is not None:
            self._remove("line", place)
        return lease

    def _is_first(self, place: int) -> bool:
        while True:
            first, *who = self._table.execute("SELECT id, pid, start FROM line ORDER BY id LIMIT 1").fetchone()
            if first == place or lives(*who):
                return bool(first == place)
            self._remove("line", first)

    def _fitting(self) -> Mapping[str, Extent] | None:
        rows = self._table.execute("SELECT device, SUM(units) FROM leases GROUP BY device")
        return self._choose({device: Extent(units) for device, units in rows})

    def _remove(self, table: str, number: int) -> None:
        self._table.execute(f"DELETE FROM {table} WHERE id = ?", (number,))


def pause() -> None:
    """Wait for a moment, at random so that rivals do not march in step."""
    time.sleep(random.uniform(0.0002, 0.001))


def started(pid: int) -> bytes:
    """When a process was started, in ticks since the boot; empty when it has gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19]
    except OSError:
        return b""


def lives(pid: int, start: bytes) -> bool:
    """Whether a process is still the one that it was."""
    return started(pid) == start
