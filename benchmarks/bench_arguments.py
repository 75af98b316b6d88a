"""What large arguments cost: 10 MB and 1 GB to a live worker, beside ``ProcessPoolExecutor``.

The argument is one block of bytes that says, as arrays do, that it may travel beside its pickle.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import anyaccel as aa
from measure import Row, interleaved, state

SIZES = {"10 MB": 10 * 10**6, "1 GB": 10**9}
ROOM = 6 * 10**9
"""Bytes of free memory for 1 GB, of which a peer makes several copies."""
OUT_OF_BAND = 5
"""The first protocol of pickles that lets buffers travel beside them."""
ROUNDS = 5


class Block:
    """Bytes that travel beside the pickle where the protocol can."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: int) -> tuple[type[Block], tuple[object]]:
        return Block, (pickle.PickleBuffer(self.data) if protocol >= OUT_OF_BAND else bytes(self.data),)


def length(block: Block) -> int:
    """Look at an argument."""
    return len(block.data)


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure one call with each size; the largest only where there is memory, and not in a trial of one round."""
    found = []
    with state(), ProcessPoolExecutor(1) as peer:
        peer.submit(os.getpid).result()  # it forks us: before there is more than one thread
        with aa.Pool(max_workers=1) as pool:
            for name, size in SIZES.items():
                if size > 10**8 and (rounds == 1 or _free() < ROOM):
                    print(f"{name}: not measured, {'in one round' if rounds == 1 else 'too little free memory'}")
                    continue
                found += _rows(name, Block(bytearray(size)), pool, peer, min(rounds, 3) if size > 10**8 else rounds)
    return found


def _rows(name: str, block: Block, pool: aa.Pool, peer: ProcessPoolExecutor, rounds: int) -> list[Row]:
    calls: dict[str, Callable[[], object]] = {
        "anyaccel": lambda: pool.submit(length, block).result(),
        "ProcessPoolExecutor": lambda: peer.submit(length, block).result(),
    }
    times = interleaved(calls, rounds)
    reference = times["ProcessPoolExecutor"]
    return [
        Row(
            what=f"argument of {name}, {who}", seconds=seconds, ratio=seconds / reference,
            reference="ProcessPoolExecutor", group=f"argument of {name}", who=who,
        )
        for who, seconds in times.items()
    ]  # fmt: skip


def _free() -> int:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024
