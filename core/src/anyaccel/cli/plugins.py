"""List the installed plug-ins, their resources, and their faults."""

from __future__ import annotations

import argparse

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.output import take_fields
from anyaccel.cli.table import print_table
from anyaccel.errors import UsageError
from anyaccel.model import Problem, VendorReport
from anyaccel.vendors import Source, find_process, installed, known

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


EXAMPLES = (
    ("anyaccel plugins", "the installed plug-ins, and their faults"),
    ("anyaccel plugins acme", "one of them, with details of its fault"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("vendor", nargs="*", metavar="VENDOR", help="show only these, with details of their faults")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    # Every vendor is asked, on this machine or not, and for products as well: this finds the most faults.
    inventory = anyaccel.detect(args.machine, timeout=args.probe_timeout, everybody=True)
    sources = {source.vendor: source for source in installed()[0]}
    of_products = {problem.vendor: problem for problem in known()[1]}
    entries = {
        report.vendor: _entry(report, sources.get(report.vendor), report.problem or of_products.get(report.vendor))
        for report in inventory.vendors
    }
    unknown = [vendor for vendor in args.vendor if vendor not in entries]
    if unknown:
        raise UsageError(
            f"no plug-in for {unknown[0]!r} is installed (installed: {', '.join(sorted(entries)) or 'none'})",
            hint=f"try 'pip install anyaccel-{unknown[0]}'",
        )
    chosen = [entries[vendor] for vendor in sorted(args.vendor or entries)]
    if args.json:
        output.print_json("plugins/1", {"plugins": chosen})
        return 0
    if not chosen:
        output.print_line("No plug-in is installed: install one, for example with 'pip install anyaccel[all]'.")
        return 0
    print_table(
        ("VENDOR", "STATE", "RESOURCE", "DISTRIBUTION"),
        [
            (
                entry["vendor"],
                entry["state"],
                entry["resource"] or "-",
                " ".join(filter(None, (entry["distribution"], entry["version"]))) or "-",
            )
            for entry in chosen
        ],
    )
    for entry in chosen:
        if entry["reason"]:
            output.say(f"{entry['vendor']}: {entry['reason']}")
        if entry["details"] and args.vendor:
            output.say_lines(entry["details"])
        # A native library may print its reason before it ends the process.
        elif entry["printed"] and args.vendor:
            output.say(f"{entry['vendor']} has printed:")
            output.say_lines(entry["printed"])
    return 0


def _entry(report: VendorReport, source: Source | None, problem: Problem | None) -> dict[str, Any]:
    """Return a plug-in as JSON; without a source, which a plug-in with a wrong entry point lacks, it has no process."""
    of_problem = ("hook", "reason", "next_step", "details")
    return {
        "vendor": report.vendor,
        "state": "failed" if problem else "ok",
        **take_fields(report, "resource", "kind", "env_vars"),
        "url": find_process(source).info.url or None if source and report.resource else None,
        "target": source.target if source else None,
        **take_fields(report, "distribution", "version"),
        **(take_fields(problem, *of_problem) if problem else dict.fromkeys(of_problem)),
        "printed": find_process(source).printed() or None if source else None,
    }
