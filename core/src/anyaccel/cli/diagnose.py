"""What is wrong with the files of configuration, cgroups, leases and the line for devices, and the way out of each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping

from anyaccel import configuration
from anyaccel.configuration import Configuration
from anyaccel.errors import AnyaccelError, ConfigurationError, LedgerError
from anyaccel.launcher.hold import leases, why
from anyaccel.launcher.launch import prepare
from anyaccel.ledger import LeaseRecord, Ledger, TicketRecord
from anyaccel.ledger.diagnosis import diagnose
from anyaccel.linux import cgroup
from anyaccel.linux.process import exists
from anyaccel.model import Finding, Inventory, Severity
from anyaccel.policy import unknown_users
from anyaccel.probe import HOST
from anyaccel.text import elapsed, listed, printable, shown

LONG_SECONDS = 600.0
"""A wait that somebody who asks what is wrong should hear of."""


def diagnose_configuration() -> tuple[Finding, ...]:
    """Look for what is wrong with the machine's file of configuration and the user's, which commands refuse."""
    return (*diagnose_file(configuration.machine), *diagnose_file(configuration.user))


def diagnose_file(read: Callable[[], Configuration]) -> Iterator[Finding]:
    """Look for what is wrong with one file of configuration.

    Args:
        read: Reads it as commands do.
    """
    try:
        found = read()
    except ConfigurationError as error:
        for each in (error, *error.further):
            yield Finding(severity=Severity.FAIL, reason=str(each), remedy=each.hint)
        return
    unknown = unknown_users(found)
    lines = configuration.find_lines(found.path) if unknown else {}
    for name in unknown:
        line = next((number for key, number in lines.items() if f"{key}.".startswith(f"users.{name}.")), None)
        where = f"{printable(found.path)!r}" + (f", line {line}" if line else "")
        message = f"{where}: there is no user {shown(name)}, so that what stands there has no effect"
        yield Finding(severity=Severity.WARN, reason=message, remedy=_close_user(name))


def _close_user(name: str) -> str:
    import difflib
    import pwd

    close = difflib.get_close_matches(name, [each.pw_name for each in pwd.getpwall()], n=1)
    return f"did you mean {shown(close[0])}?" if close else "correct the name, or take the table out"


def diagnose_cgroups(inventory: Inventory) -> Iterator[Finding]:
    """Say where the kernel could hold shares to memory of devices and this user is not let. Changes nothing.

    Args:
        inventory: The machine.
    """
    if inventory.machine != HOST or not (shared := _countable(inventory)):
        return
    try:
        cgroup.find_place({"dmem"}, os.environ)
    except (OSError, cgroup.UnavailableError) as error:
        reason = (
            f"the kernel can hold shares of {listed(shared)} to their memory, and this user may not let it: {error}"
        )
        yield Finding(severity=Severity.WARN, reason=reason, remedy=_delegation() or getattr(error, "remedy", ""))


def _countable(inventory: Inventory) -> list[str]:
    """Devices whose memory the kernel counts, and whose plug-in says what it calls that."""
    regions = cgroup.device_regions()
    found = []
    for device in inventory.devices if regions else ():
        with contextlib.suppress(AnyaccelError):  # no shares of it are given out
            made = prepare(f"{device.name}:0.5", inventory=inventory).environment
            if any(region in regions for region, _ in made.regions.values()):
                found.append(device.name)
    return found


def _delegation() -> str:
    """The command with which root gives the controller to the user's own systemd; empty where there is none."""
    above = cgroup.controls_above_home()
    return f"once per boot: echo +dmem | sudo tee {' '.join(above)}" if above else ""


def diagnose_leases(inventory: Inventory) -> tuple[Finding, ...]:
    """Look for devices that are held and not used, for waits that do not end, and for a ledger that cannot work.

    Args:
        inventory: The machine.
    """
    found = diagnose(os.environ)
    if not any(finding.severity is Severity.OK for finding in found):  # there is nothing to look into
        return found
    try:
        held, waiting = leases(inventory), Ledger.open().tickets()
    except LedgerError as error:
        return (*found, Finding(severity=Severity.FAIL, reason=str(error), remedy=error.hint))
    names = {device.id: device.name for device in inventory.devices}
    return (*_of_leases(held, names), *_of_tickets(waiting, inventory), *found)


def _of_leases(records: tuple[LeaseRecord, ...], names: Mapping[str, str]) -> Iterator[Finding]:
    for record in records:
        name = f"{names[record.device]} ({record.device})"
        holder = f"process {record.pid} of {record.user}"
        if record.state == "quarantined":
            message = f"{name} is quarantined by {holder}: {record.reason}"
            fix = (
                "nothing if this is new: it comes back by itself; else end what is left on it, reset it with its"
                f" vendor's tool, or have it given out as it is (anyaccel release {record.id})"
            )
        elif record.state == "leaving":
            message = f"{name} is not free yet: {record.reason}"
            fix = "wait; if this stays so, the kernel's log (dmesg) says more, and only a restart of the machine helps"
        elif record.state == "kept":
            message, fix = f"{name} is {record.reason}", record.hint
        elif record.state == "unknown":
            message = f"{name} counts as held: {record.reason}"
            fix = "use one version of anyaccel for all, or end what locks the file (fuser shows it)"
        elif record.here and record.pid and not exists(record.pid):
            message = f"{name} is held by what {holder} left running when it ended"
            fix = f"if that was forgotten: anyaccel release {record.id}"
        elif record.reason:
            message = f"{name} is held by {holder}: {record.reason}"
            fix = f"{record.hint}, or: anyaccel release {record.id}"
        else:
            continue
        yield Finding(severity=Severity.WARN, reason=message, remedy=fix)


def _of_tickets(tickets: tuple[TicketRecord, ...], inventory: Inventory) -> Iterator[Finding]:
    for ticket in tickets:
        wish = ticket.request or "devices"
        who = f"process {ticket.pid} of {ticket.user}"
        if not ticket.responsive:
            message = f"{who} has waited for {wish} for {elapsed(ticket.waited)} and does not look any more"
            fix = f"let it go on (kill -CONT {ticket.pid}), or end it; until then others are served first"
        elif ticket.waited >= LONG_SECONDS:
            reason, hint = _why(ticket, inventory)
            message = f"{who} has waited for {wish} for {elapsed(ticket.waited)}" + (f": {reason}" if reason else "")
            fix = hint or "anyaccel queue shows who comes first, and anyaccel status who holds what"
        else:
            continue
        yield Finding(severity=Severity.WARN, reason=message, remedy=fix)


def _why(ticket: TicketRecord, inventory: Inventory) -> tuple[str, str]:
    """For whom somebody waits, and what would fit: by its own words, which may be about another machine."""
    try:
        verdict = why(ticket.request, inventory=inventory)
    except AnyaccelError:
        return "", ""
    return (verdict.message, verdict.hint) if verdict.ever_fits and not verdict.fits_now else ("", "")
