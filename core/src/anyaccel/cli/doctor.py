"""Look for what is wrong - settings, plug-ins, drivers, permissions, variables, leases - and say what to do about it.

Exit status: 0 when all is well, 1 when there is a warning or a failure.
"""

from __future__ import annotations

import argparse

from anyaccel.cli import output
from anyaccel.inventory.diagnose import ORDER, Diagnosis, diagnose
from anyaccel.model import Finding, Inventory, Severity
from anyaccel.probe import HOST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EXAMPLES = (
    ("anyaccel doctor", "what is wrong, and what to do about it"),
    ("anyaccel doctor --quiet", "only what is not well"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("-q", "--quiet", action="store_true", help="leave out what is well")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    inventory, of_vendors = diagnose(args.machine, timeout=args.probe_timeout)
    found = sorted(
        (*of_vendors, *_of_launches(inventory)), key=lambda diagnosis: ORDER.index(diagnosis.finding.severity)
    )
    wrong = [diagnosis for diagnosis in found if diagnosis.finding.severity is not Severity.OK]
    shown = wrong if args.quiet else found
    if args.json:
        findings = [{"vendor": each.vendor or None, **finding_json(each.finding)} for each in shown]
        output.print_json("doctor/1", {"machine": inventory.machine, "well": not wrong, "findings": findings})
    else:
        if inventory.machine != HOST:
            output.say(f"this is not your host but {inventory.machine}")
        for diagnosis in shown:
            output.print_folded(line(diagnosis.finding, diagnosis.vendor))
    return 1 if wrong else 0


def _of_launches(inventory: Inventory) -> list[Diagnosis]:
    from anyaccel.cli.diagnose import diagnose_cgroups, diagnose_configuration, diagnose_leases

    found = (*diagnose_configuration(), *diagnose_cgroups(inventory), *diagnose_leases(inventory))
    return [Diagnosis(vendor="", finding=finding) for finding in found]


def finding_json(finding: Finding) -> dict[str, Any]:
    """Return a finding for programs."""
    return {"severity": finding.severity.value, "message": finding.reason, "fix": finding.remedy or None}


def line(finding: Finding, vendor: str = "") -> str:
    """Write a finding as people read it: ``warn  what was found  ->  what to do``."""
    message = " ".join(finding.reason.split()).rstrip(".")
    if vendor.casefold() not in message.casefold():
        message = f"{vendor}: {message}"
    fix = " ".join(finding.remedy.split())
    return f"{finding.severity.value:<4}  {message}" + (f"  ->  {fix}" if fix else "")
