"""List the installed plug-ins, their resources, and their faults."""

from __future__ import annotations

import argparse

from anyaccel.cli import output
from anyaccel.cli.output import take_fields
from anyaccel.cli.table import print_table
from anyaccel.errors import UsageError
from anyaccel.model import Problem
from anyaccel.probe.machine import parse_machine
from anyaccel.vendors.discovery import Source
from anyaccel.vendors.process import answer_in, ask, find_process, problem_in

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
    machine = parse_machine(args.machine)
    task = (
        "detect" if args.vendor else "products"
    )  # detection finds more faults; it is slower, and runs on request only
    answers, problems = ask(task, machine, timeout=args.probe_timeout)
    entries = {
        vendor: _entry(
            source,
            outcome.value or {},
            answer_in(task, source, outcome)[1]
            if task == "products"
            else problem_in(source, outcome, "anyaccel_detect"),
            find_process(source).printed(),
        )
        for vendor, (source, outcome) in answers.items()
    }
    # Plug-ins whose entry point is wrong have no process, and no answer.
    entries |= {problem.vendor: _entry(Source(vendor=problem.vendor, target=""), {}, problem) for problem in problems}
    unknown = [vendor for vendor in args.vendor if vendor not in entries]
    if unknown:
        raise UsageError(
            f"no plug-in for {unknown[0]!r} is installed (installed: {', '.join(sorted(entries)) or 'none'});"
            f" try 'pip install anyaccel-{unknown[0]}'"
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


def _entry(source: Source, answer: dict[str, Any], problem: Problem | None, printed: str = "") -> dict[str, Any]:
    info = answer.get("info", {})
    of_problem = ("hook", "reason", "next_step", "details")
    return {
        "vendor": source.vendor,
        "state": "failed" if problem else "ok",
        "resource": info.get("resource"),
        "kind": info.get("kind"),
        "env_vars": info.get("env_vars", []),
        "url": info.get("url"),
        "target": source.target or None,
        **take_fields(problem or source, "distribution", "version"),
        **(take_fields(problem, *of_problem) if problem else dict.fromkeys(of_problem)),
        "printed": printed or None,
    }
