"""Record what detection asks of this machine, so that it can be replayed anywhere with --machine DIR."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from anyaccel.cli import output
from anyaccel.cli.options import machine_options
from anyaccel.errors import UsageError
from anyaccel.inventory.detect import ask, problem_in
from anyaccel.inventory.machine import parse_machine
from anyaccel.probe.recording import FILE_NAME, merge


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory for the recording; made when missing")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    machine = parse_machine(machine_options(args)["machine"])
    if machine.simulated:
        raise UsageError(f"a simulated machine has no facts to record (got --machine {machine.text})")
    target: Path = args.directory / FILE_NAME
    if target.exists():
        raise UsageError(f"{target} exists and is not overwritten; choose another directory or remove it")
    answers, problems = ask("detect", machine, timeout=args.probe_timeout, record=True)
    recordings: list[dict[str, Any]] = []
    for source, outcome in answers.values():
        problem = problem_in(source, outcome, "anyaccel_detect")
        if problem:
            problems.append(problem)
        if outcome.value and "recording" in outcome.value:
            recordings.append(outcome.value["recording"])
    try:
        args.directory.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(merge(recordings), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}; choose another directory") from error
    for problem in problems:
        output.say(str(problem))
    if args.json:
        output.print_json("record/1", {"path": str(target), "vendors": sorted(answers)})
    else:
        print(target)
    return 0
