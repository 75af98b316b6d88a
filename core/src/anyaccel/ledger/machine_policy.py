"""The machine's rules for requests: drained and reserved devices, and the queue policy of the configuration.

Drains and reservations are in ``blocks.json`` in the state directory, in which the administrator withholds devices from
requests. The file of the machine's directory, which is empty after a boot, has a copy in :data:`KEPT`. Only root and
the owner of the state directory may write it; a file of another owner is ignored, since every user may make files
there.

No lease is ended by a block, also not at the end of the reservation: only the user and root know whether what
runs may be ended. Another reservation is not at risk, since a request that would last into it does not start.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Container, Iterable

from anyaccel import configuration
from anyaccel.configuration import Configuration
from anyaccel.errors import ConfigurationError, LeasePermissionError, LedgerError
from anyaccel.ledger.directory import MACHINE_WIDE, StateDirectory
from anyaccel.ledger.entries import hash_device, read_object, read_value
from anyaccel.ledger.record import LeaseRecord, since_boot
from anyaccel.linux import find_group, find_groups, find_user, group_name, process, user_name, write_whole
from anyaccel.model import UNITS_PER_DEVICE, Value, replace
from anyaccel.policy import FOREVER, NO_LIMITS, PLAIN, Block, Limits, Policy
from anyaccel.text import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = "blocks.json"
KEPT = "/var/lib/anyaccel/blocks.json"
VERSION = 1
_MOST_BYTES = 1 << 24


class _Members:
    """The numbers of a group's members, as a container: each user is looked up, since not every system lists them."""

    def __init__(self, group: int) -> None:
        self._group = group

    def __contains__(self, user: object) -> bool:
        return isinstance(user, int) and self._group in find_groups(user)


class DeviceBlock(Value):
    """A drain or a reservation of devices.

    Attributes:
        id: Identity.
        devices: Names of the devices in the ledger.
        reason: The note, by the name that the file has for it.
        by: Name of the user who made the block.
        begin: Start of a reservation, in seconds since 1970; None for a drain.
        end: End of a reservation, likewise.
        user: Number of the user for whom devices are reserved, outside of user namespaces; None for a drain, and for a
            reservation for a group.
        group: Number of the group for whose members devices are reserved; None for the others.
        request: The reserved request, for display.
    """

    id: str
    devices: tuple[str, ...]
    reason: str = ""
    by: str = ""
    begin: float | None = None
    end: float | None = None
    user: int | None = None
    group: int | None = None
    request: str = ""

    @property
    def drains(self) -> bool:
        """Whether this is a drain."""
        return self.user is self.group is None

    @property
    def reserved_for(self) -> str:
        """The name of the user for whom devices are reserved, or that of the group behind ``@``."""
        return user_name(self.user or 0) if self.group is None else f"@{group_name(self.group)}"

    @property
    def policy_block(self) -> Block:
        """The block as the queue policy sees it, in seconds since the boot, with hashed devices; a drain never ends."""
        users: Container[int | None] = () if self.user is None else (self.user,)
        return Block(
            devices=frozenset(map(hash_device, self.devices)),
            # People give times of day, and leases end by the boot clock.
            begin=-FOREVER if self.begin is None else since_boot(self.begin),
            end=FOREVER if self.end is None else since_boot(self.end),
            users=users if self.group is None else _Members(self.group),
            names=self.devices,
        )

    def describe(self) -> str:
        """Return why requests do not get the devices, without subject and verb.

        Such as ``drained by root: new fan`` or ``reserved for ada from 2026-01-31 08:00 to 2026-01-31 18:00 (course)``,
        in local time.
        """
        if self.drains:
            return f"drained by {self.by or 'the administrator'}" + (f": {self.reason}" if self.reason else "")
        bounds = self.begin or 0.0, self.end or 0.0
        times = " to ".join(time.strftime("%Y-%m-%d %H:%M", time.localtime(each)) for each in bounds)
        note = f" ({self.reason})" if self.reason else ""
        return f"reserved for {self.reserved_for} from {times}{note}"

    @property
    def hint(self) -> str:
        """How root or the user who made the block removes it; empty for users who may not."""
        own = not os.geteuid() or user_name(os.geteuid()) == self.by
        return f"'anyaccel {'undrain' if self.drains else 'reserve --remove'} {self.id}' ends it" if own else ""

    def records(self) -> Iterable[LeaseRecord]:
        """Yield a record for each device, in the form of a lease of the whole device without identity.

        The state is ``drained`` or ``reserved``. The user is the maker of a drain, or the name for which devices are
        reserved.
        """
        for device in self.devices:
            yield LeaseRecord(
                id="",
                device=device,
                units=UNITS_PER_DEVICE,
                state="drained" if self.drains else "reserved",
                reason=self.describe(),
                note=self.reason,
                hint=self.hint,
                user=self.by if self.drains else self.reserved_for,
                uid=self.user,
                since=self.begin,
                until=self.end,
                request=self.request,
            )


_known: dict[str, tuple[object, tuple[DeviceBlock, ...]]] = {}
"""Blocks by path, with the identity of the file: a waiting process reads them at each look."""

_known_policy: tuple[Configuration, Policy] = (Configuration(path=""), PLAIN)


def make_block(devices: Iterable[str], note: str, **more: Any) -> DeviceBlock:
    """Make a drain by this user or, with the fields of a reservation in ``more``, a reservation.

    Args:
        devices: Names of the devices in the ledger; not verified.
        note: Purpose, for display; cut to 250 characters.
        more: ``begin``, ``end``, ``request``, and ``user`` or ``group``; see :class:`DeviceBlock`.
    """
    by = user_name(os.geteuid())
    return DeviceBlock(id=os.urandom(4).hex(), devices=tuple(sorted(devices)), reason=clean(note), by=by, **more)


def read_blocks(state: StateDirectory) -> tuple[DeviceBlock, ...]:
    """Return the drains and reservations of a state directory, also future ones; ended reservations are left out.

    The first trusted file counts: the directory's own, else for the machine's directory the copy in :data:`KEPT`.

    Raises:
        LedgerError: When a file cannot be read, or no descriptor is left.
    """
    paths = [f"{state.path}/{NAME}", *([KEPT] if state.path == MACHINE_WIDE else [])]
    try:
        found = next((blocks for path in paths if (blocks := _read(path, state.path)) is not None), ())
    except OSError as error:
        raise state.fault(error) from error
    if not found:
        return ()
    now = time.time()
    return tuple(block for block in found if block.end is None or block.end > now)


def _read(path: str, directory: str) -> tuple[DeviceBlock, ...] | None:
    """Read one file, or return the blocks of the last call if the file has not changed.

    Returns:
        The blocks, empty for a file with other content or over 16 MiB. None for a missing or untrusted file: not
        to be opened, not regular, writable for group or others, or of an owner other than root and the owner of
        ``directory``.

    Raises:
        OSError: When no descriptor is left, or the file cannot be read.
    """
    try:
        os.stat(path, follow_symlinks=False)  # mostly there is no file, and stat works without free descriptors
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in process.SCARCE:  # says nothing about the file, whose devices must stay withheld
            raise
        return None
    try:
        found = os.fstat(descriptor)
        # In a user namespace root's files seem to belong to an unmapped number, like the root directory.
        owners = {0, os.stat("/").st_uid}
        with contextlib.suppress(OSError):
            owners.add(os.stat(directory).st_uid)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in owners or found.st_mode & 0o022:
            return None
        identity = found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
        known = _known.get(path)
        if known is not None and known[0] == identity:
            return known[1]
        # Not before: open() refuses a directory, which any user can make.
        with open(descriptor, "rb", closefd=False) as file:
            blocks = tuple(_decode(file.read(_MOST_BYTES)))
    finally:
        os.close(descriptor)
    _known[path] = identity, blocks
    return blocks


def _decode(body: bytes) -> Iterable[DeviceBlock]:
    """Decode blocks; skip implausible blocks, and every block of another version.

    Other content than a JSON object with a list of blocks gives none. Texts are cut to 250 characters.
    """
    words = read_object(body)
    listed = words.get("blocks") if words.get("v") == VERSION else None
    for each in listed if isinstance(listed, list) else ():
        block = read_value(DeviceBlock, each)
        if block is None:
            continue
        given = [block.begin is not None, block.end is not None, (block.user is not None) + (block.group is not None)]
        if given in ([0, 0, 0], [1, 1, 1]):  # else neither a drain nor a reservation
            yield replace(block, **{name: clean(getattr(block, name)) for name in ("id", "reason", "by", "request")})


def check_permission(state: StateDirectory, owner: int) -> None:
    """Check that this user may drain and reserve.

    Args:
        state: The state directory.
        owner: Its owner.

    Raises:
        LeasePermissionError: When the user is neither root nor the owner of the state directory.
    """
    if os.geteuid() not in (0, owner):
        owners = f"root and {user_name(owner)}, who owns {state.path}," if owner else "root"
        raise LeasePermissionError(
            f"only {owners} can drain and reserve devices (this is {user_name(os.geteuid())})",
            hint="ask the administrator, or use sudo",
        )


def write_blocks(state: StateDirectory, blocks: Iterable[DeviceBlock]) -> None:
    """Write drains and reservations to the file and, for the machine's directory, to :data:`KEPT`.

    :data:`KEPT` is written first; missing parents are made. The caller has locked the directory: a lease that is
    published later is checked against the new blocks.

    Raises:
        LedgerError: When a file cannot be written. No block changes now; but if :data:`KEPT` was written and the other
            file was not, the change becomes active with the next boot.
    """
    listed = [{name: getattr(block, name) for name in DeviceBlock._fields} for block in blocks]
    text = json.dumps({"v": VERSION, "blocks": listed}, indent=1) + "\n"
    # The copy first: after an interrupt in between, the change is not active, and returns with the next boot at worst.
    paths = [*([KEPT] if state.path == MACHINE_WIDE else []), f"{state.path}/{NAME}"]
    try:
        for path in paths:
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            write_whole(path, text)
    except OSError as error:
        kept_alone = "" if path == paths[0] else f"; {KEPT} has the change, which counts from the next boot on"
        raise LedgerError(
            f"{path} cannot be written: {error.strerror}{kept_alone}", hint="make room, or use sudo"
        ) from error


def current_policy(state: StateDirectory) -> Policy:
    """Return the queue policy of this machine, from its present configuration, without past usage.

    Without a configuration, the rules are those of :data:`PLAIN`. Rules are kept in this process until the
    configuration changes; drains and reservations are looked up at each call.

    Args:
        state: The state directory, whose drains and reservations count.

    Raises:
        ConfigurationError: When the machine's configuration cannot be trusted or understood.
    """
    global _known_policy  # noqa: PLW0603 -- each acquisition needs the policy, and the configuration rarely changes
    found = configuration.machine()
    if found is not _known_policy[0]:
        _known_policy = found, read_policy(found) if found.found else PLAIN
    return with_blocks(_known_policy[1], state)


def with_blocks(policy: Policy, state: StateDirectory) -> Policy:
    """Return a policy with the drains and reservations of a state directory in place of its own.

    Blocks of ended reservations are left out. The given policy is not changed. No error is raised for a file of blocks
    that is missing or not trusted: see :func:`read_blocks`.
    """
    blocks = read_blocks(state)
    if not blocks and not policy.blocks:
        return policy
    return replace(policy, blocks=tuple(block.policy_block for block in blocks))


def with_past(policy: Policy) -> Policy:
    """Return a policy with the past usage of each user, read from the machine's journals.

    Times are by the clock since the boot. A policy without a half-life is returned as it is, and no file is read.
    """
    if policy.half_life is None:
        return policy
    from anyaccel.ledger.journal import read_usage  # few machines count use over time

    past = {user: replace(each, at=since_boot(each.at)) for user, each in read_usage(policy.half_life).items()}
    return replace(policy, past=past)


def policy_for_display(state: StateDirectory) -> Policy:
    """Return the queue policy for a process that only inspects: the default policy if the configuration is faulty.

    Drains and reservations of ``state`` count in both cases.
    """
    with contextlib.suppress(ConfigurationError):
        return current_policy(state)
    return with_blocks(PLAIN, state)


def read_policy(configuration: Configuration) -> Policy:
    """Read the policy from a machine's configuration.

    Entries of unknown users and groups are left out. The default patience counts only beside fair shares, limits, or an
    entry of a known user or group; a patience in the file always counts. Blocks and past usage are not part of the
    configuration.
    """
    groups = {
        name: _limits(configuration, f"groups.{name}")
        for name in configuration.names("groups")
        if find_group(name) is not None
    }
    members = _GroupNames(groups)
    users = {
        number: _limits(configuration, f"users.{name}", f"groups.{members.get(number, '')}")
        for name in configuration.names("users")
        if (number := find_user(name)) is not None
    }
    limits = _limits(configuration, "limits")
    fair = configuration.get("queue.fair_shares")
    # Without another rule the order is by priority and arrival, and patience would only cost its computation.
    changed = fair or users or groups or limits != NO_LIMITS or "queue.patience" in configuration.values
    return Policy(
        backfill=configuration.get("queue.backfill"),
        fair_shares=fair,
        half_life=configuration.get("queue.half_life"),
        patience=configuration.get("queue.patience") if changed else None,
        limits=limits,
        users=users,
        groups=groups,
        members=members if groups else {},
    )


def _limits(configuration: Configuration, table: str, *further: str) -> Limits:
    """Read each limit from a table of the machine's configuration, else from ``further``, else from ``[limits]``.

    Weight, 1 by default, and total are only read from the first table.
    """
    values = configuration.values

    def value(name: str) -> Any:
        keys = (f"{each}.{name}" for each in (table, *further, "limits"))
        return next((values[key] for key in keys if key in values), None)

    return Limits(
        devices=value("devices"),
        seconds=value("time"),
        priority=value("priority"),
        weight=values.get(f"{table}.weight", 1),
        total=values.get(f"{table}.total_devices"),
    )


class _GroupNames(dict[int, str]):
    """Names of groups by user: the first group of the configuration with the user; looked up once for each user.

    Args:
        groups: Names of the groups, in the order of the configuration.
    """

    def __init__(self, groups: Iterable[str]) -> None:
        super().__init__()
        self._numbers = {find_group(name): name for name in groups}

    def get(self, key: int, default: Any = None) -> Any:
        """Return the name of the group that counts for a user, remembered from the first call; ``default`` for none."""
        if key not in self:
            own = find_groups(key) if self._numbers else ()
            self[key] = next((name for number, name in self._numbers.items() if number in own), "")
        return self[key] or default


def unknown_names(configuration: Configuration) -> tuple[str, ...]:
    """Return the tables of a configuration without effect, such as ``users.ada``: no user or group has the name.

    A decimal number counts as known, even if no user has it.
    """
    return tuple(
        f"{table}.{name}"
        for table, find in (("users", find_user), ("groups", find_group))
        for name in configuration.names(table)
        if find(name) is None
    )
