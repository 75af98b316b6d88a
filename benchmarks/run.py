"""Measure everything that has a budget, in one run, and print what it is a multiple of.

    python benchmarks/run.py [NAME ...] [--json FILE]

Nothing here fails when a budget is missed: a busy machine is no defect. The table says which were kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from pathlib import Path

BENCHMARKS = ("startup", "detection", "scheduling", "peers")


def main() -> None:
    """Run the benchmarks that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", default=BENCHMARKS, help=", ".join(BENCHMARKS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    found = []
    for name in args.names:
        if name not in BENCHMARKS:
            parser.error(f"there is no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
        for row in importlib.import_module(name).rows():
            found.append(row)
            ratio = "" if row.ratio is None else f"{row.ratio:.1f}x"
            verdict = {None: "", True: "kept", False: "MISSED"}[row.kept]
            print(f"{row.what:<45} {row.seconds * 1e3:>10.3f} ms {ratio:>8}   {row.budget:<20} {verdict}", flush=True)
    if args.json:
        args.json.write_text(json.dumps([row.to_json() for row in found], indent=1) + "\n")
    if not found:
        sys.exit("nothing was measured")


if __name__ == "__main__":
    main()
