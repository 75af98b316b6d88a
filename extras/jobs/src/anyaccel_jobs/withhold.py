"""Drains and reservations of a machine's devices: withheld from requests, by the administrator."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence

import anyaccel
from anyaccel.errors import LeaseNotFoundError, NotFreeError, UnknownNameError, UsageError
from anyaccel.inventory import find_named
from anyaccel.launcher import Scope
from anyaccel.ledger import DeviceBlock, Ledger, make_block
from anyaccel.linux import process, users
from anyaccel.model import Device, Extent, Inventory, Request
from anyaccel.scheduler import Choice, Verdict, asked, goes_by, parse_request
from anyaccel.vendors import KnownNames, validate


def find_devices(inventory: Inventory, name: str) -> tuple[Device, ...]:
    """Return the devices with a name, in any state: as of :func:`find_named`, or one term of a request with filters.

    Words of a term that are no filters, such as ``linked``, are ignored.

    Args:
        inventory: The machine.
        name: The name.

    Raises:
        RequestError: When the name is neither an id nor a term.
        UsageError: When the name has a quantity or several terms, which do not say which devices are meant.
        UnknownNameError: When no device has the name and passes the filters.
    """
    found = find_named(inventory.devices, name)
    if not found:
        term, *more = parse_request(name).terms
        if more or ":" in name.partition(",")[0]:
            raise UsageError(
                f"a name must say which devices, not how many (got {name!r})",
                hint="name each device, such as GPU/0 or GPU/0-3; GPU alone stands for all",
            )
        filters = [(each, each.filter.predicate(each)) for each in asked(term, inventory)]
        found = [
            device
            for device in inventory.devices
            if goes_by(device, term.names) and all(passes(device) for _, passes in filters)
        ]
    if not found:
        raise UnknownNameError(
            f"no device of this machine is {name!r}", hint="'anyaccel --columns device,id' lists names and ids"
        )
    return tuple(found)


def drain(inventory: Inventory, names: Sequence[str], note: str) -> DeviceBlock:
    """Withhold devices from every request; running leases go on. Drains outlast a reboot.

    A drained device may be drained again, by a drain of its own.

    Args:
        inventory: The machine.
        names: Names of the devices, as of :func:`find_devices`.
        note: Purpose, for display; cut to 250 characters.

    Returns:
        The drain.

    Raises:
        RequestError, UnknownNameError, UsageError: When a name is wrong, as of :func:`find_devices`, or there is none.
        LeasePermissionError: When this user is neither root nor the owner of the state directory.
        LedgerError: When the drain cannot be written.
    """
    if not names:
        raise UsageError("a drain needs a device", hint="name each device, such as GPU/0 or GPU/0-3")
    devices = {device.id for name in names for device in find_devices(inventory, name)}
    block = make_block(Scope.make(inventory, os.environ).keys(devices), note)
    Ledger.open().change_blocks(lambda blocks: [*blocks, block])
    return block


def undrain(inventory: Inventory, names: Sequence[str]) -> tuple[DeviceBlock, ...]:
    """End drains; with an error, none ends, but after an error of writing a drain may end with the next boot.

    Args:
        inventory: The machine.
        names: Identities of drains, or names of drained devices: each drain with one of the devices ends, as a whole.

    Returns:
        The ended drains.

    Raises:
        UsageError: When no device of a name is drained, or a name has a quantity or several terms, or is that of a
            reservation.
        RequestError, UnknownNameError: When a name is wrong.
        LeaseNotFoundError: When another process has ended one of the drains meanwhile.
        LeasePermissionError: When this user is neither root nor the owner of the state directory.
        LedgerError: When the blocks cannot be read or written.
    """
    ledger, scope = Ledger.open(), Scope.make(inventory, os.environ)
    blocks = ledger.blocks()
    drains = [block for block in blocks if block.drains]
    found: dict[str, DeviceBlock] = {}
    for name in names:
        if any(block.id == name for block in blocks if not block.drains):
            raise UsageError(f"{name} is a reservation", hint=f"'anyaccel reserve --remove {name}' removes it")
        meant = [block for block in drains if block.id == name]
        if not meant:
            keys = scope.keys(device.id for device in find_devices(inventory, name))
            meant = [block for block in drains if not keys.isdisjoint(block.devices)]
        if not meant:
            raise UsageError(f"{name} is not drained", hint="'anyaccel queue' lists drained devices")
        found |= {block.id: block for block in meant}
    remove(found.keys())
    return tuple(found.values())


def remove(ids: Collection[str]) -> None:
    """Remove drains and reservations: every given one, or none if an error is raised.

    After an error of writing, a removal may come with the next boot.

    Args:
        ids: Their identities.

    Raises:
        LeaseNotFoundError: When an identity belongs to no drain and no reservation, or to an ended reservation.
        LeasePermissionError: When this user is neither root nor the owner of the state directory.
        LedgerError: When the state directory stays locked, or the blocks cannot be written.
    """

    def change(blocks: Sequence[DeviceBlock]) -> Sequence[DeviceBlock]:
        known = {block.id for block in blocks}
        if unknown := [each for each in ids if each not in known]:
            raise LeaseNotFoundError(
                f"there is no drain or reservation {unknown[0]!r}", hint="'anyaccel reserve' lists them"
            )
        return [block for block in blocks if block.id not in ids]

    Ledger.open().change_blocks(change)


def reserve(  # noqa: PLR0917 -- in the order of the command's arguments
    inventory: Inventory,
    request: Request,
    begin: float,
    end: float,
    user: str,
    note: str = "",
) -> DeviceBlock:
    """Reserve whole devices for a user or a group, out of the devices that are certain to be free in that time.

    A drained device is never free.

    Args:
        inventory: The machine.
        request: The devices.
        begin: Start, in seconds since 1970; may be in the past.
        end: End, in seconds since 1970; not in the past.
        user: Name or number of the user; behind ``@`` that of a group, whose members may have the devices.
        note: Purpose, for display; cut to 250 characters.

    Returns:
        The reservation.

    Raises:
        UsageError: When the end is past or not after the start, when the request asks for a share or permits the CPU,
            or there is no such user or group.
        UnknownNameError: When neither a device nor an installed plug-in has any of the names of a term.
        NeverFitsError: When the machine has no such devices.
        NotFreeError: When too few of the devices are certain to be free: the others are drained, have another
            reservation in that time, or have a lease that does not end before ``begin``.
        LeasePermissionError: When this user is neither root nor the owner of the state directory.
        LedgerError: When the ledger stays locked, cannot be read, or the reservation cannot be written.
    """
    if not max(begin, time.time()) < end:
        raise UsageError("a reservation must end after its start, and in the future")
    if any(term.fraction for term in request.terms) or request.else_cpu:
        raise UsageError(f"a reservation must be of whole devices (got {request})")
    scope = Scope.make(inventory, os.environ)
    choice = Choice(inventory, request, validate, KnownNames())
    if not choice.ever_fits:
        anyaccel.open_scheduler(inventory).allocate(request)  # which raises the reason

    group = user.startswith("@")
    number = users.find_group(user[1:]) if group else users.find_user(user)
    if number is None:
        kind, name, table = ("group", user[1:], "group") if group else ("user", user, "passwd")
        way_out = f"'getent {table}' lists the {kind}s"
        if not group and users.find_group(user) is not None:
            way_out = f"for the members of a group: @{user}"
        raise UsageError(f"there is no {kind} {name!r}", hint=way_out)
    made: list[DeviceBlock] = []
    ledger = Ledger.open()

    def change(blocks: Sequence[DeviceBlock]) -> Sequence[DeviceBlock]:
        used = set(ledger.find_leased(begin))
        for block in blocks:
            if block.drains or ((block.begin or 0.0) < end and begin < (block.end or 0.0)):
                used.update(block.devices)
        grants = choice.choose(scope.to_devices(dict.fromkeys(used, Extent())))
        if grants is None:
            verdict = Verdict(request=request, fits_now=False, ever_fits=True)
            raise NotFreeError(
                f"{request} cannot be reserved: too many devices are drained, or may be in use then, by leases without"
                " an earlier end or other reservations",
                verdict=verdict,
                hint="'anyaccel status --columns device,user,until,note' shows them; leases get an end by --time",
            )
        devices = scope.keys(share.device.id for grant in grants for share in grant.shares)
        whose = {"group": number} if group else {"user": process.find_outer_user(number)}
        made.append(make_block(devices, note, begin=begin, end=end, request=str(request), **whose))
        return [*blocks, *made]

    ledger.change_blocks(change)
    return made[0]
