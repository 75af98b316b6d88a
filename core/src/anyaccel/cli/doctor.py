"""Find faults in settings, plug-ins, drivers, permissions, variables and leases, and say how to mend them.

The exit status is 0 without a fault, and 1 with a warning or a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping

from anyaccel import configuration
from anyaccel.cli import output
from anyaccel.cli.options import name_devices
from anyaccel.cli.sample import machine_notes
from anyaccel.configuration import Configuration
from anyaccel.errors import AnyaccelError, ConfigurationError, LedgerError
from anyaccel.inventory.diagnose import ORDER, diagnose
from anyaccel.launcher import leases, prepare, why
from anyaccel.ledger import BLOCKED, LeaseRecord, Ledger, TicketRecord, journal, unknown_names
from anyaccel.ledger import diagnose as diagnose_ledger
from anyaccel.linux import cgroup, process
from anyaccel.model import Finding, Inventory, Severity
from anyaccel.probe import HOST
from anyaccel.text import elapsed, listed, printable, shown, suggest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LONG_SECONDS = 600.0
"""A request that has waited longer is reported."""

EXAMPLES = (
    ("anyaccel doctor", "all findings, each fault with a remedy"),
    ("anyaccel doctor --quiet", "faults only"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("-q", "--quiet", action="store_true", help="leave out what is in order")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    inventory, found = diagnose(args.machine, timeout=args.probe_timeout)
    of_files = (finding for read in (configuration.machine, configuration.user) for finding in diagnose_file(read))
    of_launches = (*of_files, *diagnose_cgroups(inventory), *diagnose_leases(inventory))
    found += [("", finding) for finding in of_launches]
    found.sort(key=lambda each: ORDER.index(each[1].severity))
    wrong = [each for each in found if each[1].severity is not Severity.OK]
    shown = wrong if args.quiet else found
    if args.json:
        findings = [{"vendor": vendor or None, **finding_json(finding)} for vendor, finding in shown]
        output.print_json("doctor/1", {"machine": inventory.machine, "well": not wrong, "findings": findings})
    else:
        for note in machine_notes(inventory):
            output.say(note)
        for vendor, finding in shown:
            output.print_folded(line(finding, vendor))
    return 1 if wrong else 0


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


def diagnose_file(read: Callable[[], Configuration]) -> Iterator[Finding]:
    """Find faults of a file of configuration.

    Args:
        read: Reads the file.
    """
    try:
        found = read()
    except ConfigurationError as error:
        for each in (error, *error.further):
            yield Finding(severity=Severity.FAIL, reason=str(each), remedy=each.hint)
        return
    for name in unknown_names(found):
        table, _, own = name.partition(".")
        message = (
            f"{printable(found.path)!r}: there is no {table.removesuffix('s')} {shown(own)}; the entry has no effect"
        )
        yield Finding(severity=Severity.WARN, reason=message, remedy=_close_name(table, own))
    if found.get("queue.half_life") and not journal.is_machine_wide():
        message = f"queue.half_life counts no ended lease: root has not made the directory {journal.MACHINE_DIRECTORY}"
        yield Finding(severity=Severity.WARN, reason=message, remedy="sudo anyaccel setup  (makes the directory)")


def _close_name(table: str, name: str) -> str:
    """Return the remedy for an unknown name in the table ``users`` or ``groups``."""
    import grp
    import pwd

    known = [each.pw_name for each in pwd.getpwall()] if table == "users" else [each.gr_name for each in grp.getgrall()]
    return suggest(name, known, "correct the name, or remove the entry")


def diagnose_cgroups(inventory: Inventory) -> Iterator[Finding]:
    """Report devices whose memory the kernel could limit if this user were permitted to. Changes nothing.

    Args:
        inventory: The machine.
    """
    if inventory.machine != HOST or not (shared := _countable(inventory)):
        return
    try:
        cgroup.find_place({"dmem"}, os.environ)
    except (OSError, cgroup.UnavailableError) as error:
        reason = f"the kernel can limit the memory of shares of {listed(shared)}, but not for this user: {error}"
        yield Finding(severity=Severity.WARN, reason=reason, remedy=_delegation() or getattr(error, "remedy", ""))


def _countable(inventory: Inventory) -> list[str]:
    """Return the devices whose memory the kernel counts under a name that the plug-in knows."""
    regions = cgroup.device_regions()
    found = []
    for device in inventory.devices if regions else ():
        with contextlib.suppress(AnyaccelError):  # the device is not shared
            # Only the plug-in knows the names of regions, and says them for a share.
            made = prepare(f"{device.name}:0.5", inventory=inventory).environment
            if any(region in regions for region, _ in made.regions.values()):
                found.append(device.name)
    return found


def _delegation() -> str:
    """Return the command by which root delegates the controller to the user's systemd; empty when unknown."""
    above = cgroup.controls_above_home()
    return f"once per boot: echo +dmem | sudo tee {' '.join(above)}" if above else ""


def diagnose_leases(inventory: Inventory) -> tuple[Finding, ...]:
    """Find devices that are held and not used, requests that wait too long, and faults of the ledger.

    Args:
        inventory: The machine.
    """
    found = diagnose_ledger(os.environ)
    # A directory that cannot be trusted is reported once, and not read.
    if not any(finding.severity is Severity.OK for finding in found):  # there is no ledger to read
        return found
    try:
        ledger = Ledger.open()
        held, waiting = leases(inventory), ledger.tickets()
    except LedgerError as error:
        return (*found, Finding(severity=Severity.FAIL, reason=str(error), remedy=error.hint))
    names = {device.id: device.name for device in inventory.devices}
    # A forgotten drain costs a device, and is in order nevertheless.
    blocks = (
        Finding(
            severity=Severity.OK,
            reason=f"{name_devices(block.devices, inventory)}: {block.describe()}",
            remedy=block.hint,
        )
        for block in ledger.blocks()
    )
    return (*_of_leases(held, names), *_of_tickets(waiting, inventory), *blocks, *found)


def _of_leases(records: tuple[LeaseRecord, ...], names: Mapping[str, str]) -> Iterator[Finding]:
    for record in records:
        name = f"{names[record.device]} ({record.device})"
        holder = f"{record.user} on behalf of {record.key}" if record.key else f"process {record.pid} of {record.user}"
        if record.state in BLOCKED:  # listed by drain and reservation
            continue
        if record.state == "quarantined":
            message = f"{name} is quarantined by {holder}: {record.reason}"
            fix = (
                "wait: a new quarantine ends by itself; else end the processes on the device, reset it with its"
                f" vendor's tool, or use it as it is (anyaccel release {record.id})"
            )
        elif record.state == "leaving":
            message = f"{name} is not free yet: {record.reason}"
            fix = "wait; if the state lasts, see the kernel's log (dmesg) and restart the machine"
        elif record.state == "kept":
            message, fix = f"{name} is {record.reason}", record.hint
        elif record.state == "unknown":
            message = f"{name} counts as held: {record.reason}"
            fix = "use one version of anyaccel for all, or end what locks the file (fuser shows it)"
        elif record.here and record.pid and not process.exists(record.pid):
            message = f"{name} is held by processes that {holder} left running"
            fix = f"if that is not wanted: anyaccel release {record.id}"
        elif record.reason:
            message = f"{name} is held by {holder}: {record.reason}"
            fix = record.hint if record.key else f"{record.hint}, or: anyaccel release {record.id}"
        else:
            continue
        yield Finding(severity=Severity.WARN, reason=message, remedy=fix)


def _of_tickets(tickets: tuple[TicketRecord, ...], inventory: Inventory) -> Iterator[Finding]:
    for ticket in tickets:
        wish = ticket.request or "devices"
        who = f"process {ticket.pid} of {ticket.user}"
        if not ticket.responsive:
            message = f"{who} has waited for {wish} for {elapsed(ticket.waited)} and has stopped"
            fix = f"continue it (kill -CONT {ticket.pid}) or end it; until then later requests are served first"
        elif ticket.waited >= LONG_SECONDS:
            reason, hint = _why(ticket, inventory)
            message = f"{who} has waited for {wish} for {elapsed(ticket.waited)}" + (f": {reason}" if reason else "")
            fix = hint or "anyaccel queue shows the earlier requests, and anyaccel status the holders"
        else:
            continue
        yield Finding(severity=Severity.WARN, reason=message, remedy=fix)


def _why(ticket: TicketRecord, inventory: Inventory) -> tuple[str, str]:
    """Return the reason and the hint for a waiting request; empty for a request about another machine."""
    try:
        verdict = why(ticket.request, inventory=inventory)
    except AnyaccelError:
        return "", ""
    # A request that never fits here was made for another machine, by --machine or a mask.
    return (verdict.message, verdict.hint) if verdict.ever_fits and not verdict.fits_now else ("", "")
