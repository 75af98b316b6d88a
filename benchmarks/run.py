"""Measure everything that has a budget, in one run, and print what it is a multiple of.

Each benchmark is a module of its own, ``bench_NAME.py``. Nothing here fails when a budget is missed: a busy machine is
no defect. The table says which were kept, and is written as JSON with a picture beside it.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from measure import Row, duration
from picture import draw

HERE = Path(__file__).parent
FIRST = ["startup", "detection", "scheduling", "ledger", "workers", "preload", "arguments", "peers"]


def main() -> None:
    """Run the benchmarks that the command line names."""
    benchmarks = available()
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0], epilog="benchmarks: " + ", ".join(benchmarks)
    )
    parser.add_argument("names", nargs="*", metavar="BENCHMARK", help="what to measure (default: everything)")
    parser.add_argument("--rounds", type=int, metavar="N", help="how often to measure; 1 to see that it works")
    parser.add_argument("--name", default="latest", help="what to call the results (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", metavar="DIR", help="where to write them (default: %(default)s)"
    )
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in benchmarks:
            parser.error(f"there is no benchmark {name!r}; there are {', '.join(benchmarks)}")
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error(f"--rounds must be 1 or more (got {arguments.rounds})")
    results: dict[str, object] = {"machine": machine()}
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"{'':<54} {'median':>8}  {'ratio':>7}", flush=True)
    found = []
    for name in arguments.names or benchmarks:
        rows = measured(name, arguments.rounds)
        found += rows
        for row in rows:
            print(line(row), flush=True)
    results["rows"] = [row.to_json() for row in found]
    missed = [row.what for row in found if row.kept is False]
    kept = sum(row.kept is True for row in found)
    print(f"{kept} of {kept + len(missed)} budgets kept" + (f"; missed: {', '.join(missed)}" if missed else ""))
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written: {path}")
    picture = draw(results)
    if picture:
        path.with_suffix(".svg").write_text(picture)
        print(f"written: {path.with_suffix('.svg')}")


def available() -> list[str]:
    """Benchmarks by name, those first that belong together."""
    found = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    return sorted(found, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


def measured(name: str, rounds: int | None) -> list[Row]:
    """The rows of a benchmark, from a process in which nothing else was measured."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        return alone.submit(rows_of, name, rounds).result()


def rows_of(name: str, rounds: int | None) -> list[Row]:
    """The rows of a benchmark, measured in this process; none where what it compares with is not installed."""
    try:
        rows = importlib.import_module(f"bench_{name}").rows
    except ImportError as error:
        print(f"{name}: not measured: {error}")
        return []
    found: list[Row] = rows(rounds) if rounds is not None and inspect.signature(rows).parameters else rows()
    return found


def machine() -> dict[str, object]:
    """What was measured on, and how busy that was with other things."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "processors": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
    }


def line(row: Row) -> str:
    """A row as text."""
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
    verdict = {None: "", True: "kept", False: "MISSED"}[row.kept]
    return f"{row.what:<54} {duration(row.seconds):>8}  {ratio:>7}  {verdict:<6}  {row.budget}".rstrip()


if __name__ == "__main__":
    main()
