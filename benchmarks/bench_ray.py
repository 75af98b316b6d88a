"""What a call costs through Ray: a bare task of Ray, ours in a process that lives, and ours in a fresh one.

    python benchmarks/bench_ray.py [--rounds N]

Needs ``anyaccel[ray]`` and a vendor's plug-in. The calls take turns in one run, so that differences hold while the
machine's speed drifts; the overhead is what our mapping and our worker add to the bare task.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from posixpath import basename

import anyaccel as aa
from measure import Row, interleaved

ROUNDS = 200
OVERHEAD = 0.0005
"""Seconds that a task of Ray may take longer when it is ours."""
MACHINE = "sim:H100:4"
NAME = "a/b"
"""What the calls look at: next to no work, by a function that every process can import."""
BARE = ("bare task of Ray without devices", "bare task of Ray with a device")
FRESH = ("fresh process of Ray with a device", "fresh worker with a device")
LIVE = ("live worker without devices", "live worker with a device")


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure, and compare with the budget."""
    import ray

    with tempfile.TemporaryDirectory() as state:
        os.environ |= {"ANYACCEL_MACHINE": MACHINE, "ANYACCEL_STATE_DIR": state}
        with aa.Pool(engine="ray", address="local") as pool:
            task = ray.remote(max_calls=0)(basename)
            with_cpu, with_device = task.options(num_cpus=1), task.options(num_cpus=0, num_gpus=1)
            fresh = pool.options(needs="GPU:1")
            live = fresh.options(max_calls=0)
            clean = ray.remote(max_calls=1)(basename).options(num_cpus=0, num_gpus=1)
            own = {
                BARE[0]: lambda: ray.get(with_cpu.remote(NAME)),
                LIVE[0]: lambda: pool.submit(basename, NAME).result(),
                BARE[1]: lambda: ray.get(with_device.remote(NAME)),
                LIVE[1]: lambda: live.submit(basename, NAME).result(),
            }
            times = interleaved(own, rounds)
            times |= interleaved({FRESH[0]: lambda: ray.get(clean.remote(NAME))}, 5)
            times |= interleaved({FRESH[1]: lambda: fresh.submit(basename, NAME).result()}, rounds // 4)
        ray.shutdown()
    found = [Row(what=name, seconds=seconds) for name, seconds in times.items()]
    for bare, live in zip(BARE, LIVE, strict=True):
        added = times[live] - times[bare]
        budget = f"{OVERHEAD * 1e3:g} ms"
        found.append(Row(what=f"{live}, added", seconds=added, budget=budget, kept=added <= OVERHEAD))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")
    for row in rows(arguments.rounds):
        verdict = {None: "", True: "kept", False: "MISSED"}[row.kept]
        print(f"{row.what:<44} {row.seconds * 1e3:>9.3f} ms   {row.budget:<8} {verdict}")


if __name__ == "__main__":
    main()
