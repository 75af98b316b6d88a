"""Find faults in settings, plug-ins, drivers, permissions, variables and leases, and say how to mend them.

The exit status is 0 without a fault, and 1 with a warning or a failure.
"""

from __future__ import annotations

import argparse

from anyaccel.cli import output
from anyaccel.cli.sample import machine_notes
from anyaccel.inventory.diagnose import ORDER, Diagnosis, diagnose
from anyaccel.model import Finding, Inventory, Severity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EXAMPLES = (
    ("anyaccel doctor", "all findings, each fault with a remedy"),
    ("anyaccel doctor --quiet", "faults only"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("-q", "--quiet", action="store_true", help="leave out what is in order")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    inventory, of_vendors = diagnose(args.machine, timeout=args.probe_timeout)
    # Failures come last, next to the prompt.
    found = sorted(
        (*of_vendors, *_of_launches(inventory)), key=lambda diagnosis: ORDER.index(diagnosis.finding.severity)
    )
    wrong = [diagnosis for diagnosis in found if diagnosis.finding.severity is not Severity.OK]
    shown = wrong if args.quiet else found
    if args.json:
        findings = [{"vendor": each.vendor or None, **finding_json(each.finding)} for each in shown]
        output.print_json("doctor/1", {"machine": inventory.machine, "well": not wrong, "findings": findings})
    else:
        for note in machine_notes(inventory):
            output.say(note)
        for diagnosis in shown:
            output.print_folded(line(diagnosis.finding, diagnosis.vendor))
    return 1 if wrong else 0


def _of_launches(inventory: Inventory) -> list[Diagnosis]:
    from anyaccel.cli.diagnose import diagnose_cgroups, diagnose_configuration, diagnose_leases

    found = (*diagnose_configuration(), *diagnose_cgroups(inventory), *diagnose_leases(inventory))
    return [Diagnosis(vendor="", finding=finding) for finding in found]


def finding_json(finding: Finding) -> dict[str, Any]:
    """Return a finding as JSON."""
    return {"severity": finding.severity.value, "message": finding.reason, "fix": finding.remedy or None}


def line(finding: Finding, vendor: str = "") -> str:
    """Format a finding for people: ``warn  message  ->  remedy``."""
    # Reasons come from plug-ins and exceptions, which may have several lines and a full stop.
    message = " ".join(finding.reason.split()).rstrip(".")
    if vendor.casefold() not in message.casefold():
        message = f"{vendor}: {message}"
    fix = " ".join(finding.remedy.split())
    return f"{finding.severity.value:<4}  {message}" + (f"  ->  {fix}" if fix else "")
