"""Entries of the state directory: their names, and how other processes test and read them.

Leases are counted by name first, and by lock only if the answer depends on a lock.

The name of a lease is ``v2.<device>.<extent>.<pid>.<starttime>.<mark>.<nonce>``, so the taken devices can be counted by
names alone.

- Ids are unique per vendor, so the ledger names a device ``vendor/id``. A physical part is named by its path, without
  the vendor, since several drivers may list the same part.
- Of a lease of another version only the device is read, and the whole device counts as held. An earlier form has the
  vendor behind the id: ``v2.<id>.<vendor>.<extent>``.
- The extent is a number of units, in 1/10000 of the device. If the device has slots, a hyphen and the held slots
  follow, as a bit mask in hexadecimal digits. The extent is 0 for a device of which a part is held that is a device of
  its own; then the device itself is not given out.
- The mark is the mark of the processes that were started with the lease, as 16 hexadecimal digits of
  :func:`anyaccel.linux.mark.limit`, zeros for none. With a process id of 0, only carriers of the mark keep the lease.
- A lease with a time limit has ``.e`` and the end before the nonce, in milliseconds since the boot as hexadecimal
  digits. If the request passed earlier requests, a hyphen and the time of that follow.

The name of a ticket is ``t1.<rank>.<number>.<pid>.<starttime>.<nonce>.<wanted>``. The number is the time of arrival in
microseconds since the boot. Rank and number have leading zeros, so that the order of the names is the order of service.
An unfinished file is hidden: ``.<pid>.<starttime>.<nonce>``. A nonce starts with the tag of the boot, which tells files
of an earlier boot.

Names come from other processes, possibly of another version or with bad intent; the readers never raise.

A lease is active by its lock, its process, its mark, or its tenure. No process holds the lock of a lease on behalf of
other processes, which outlives the program that took it. The body of its files has a tenure instead: the lease is
active until a moment that its program postpones from time to time, and beyond that while a named control group has
processes. Every process can judge a tenure, so a program that is killed, stopped or upgraded frees nothing that others
still use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
from binascii import crc32
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache, lru_cache
from types import MappingProxyType

from anyaccel._typing import NamedTuple, TypeVar
from anyaccel.errors import UsageError
from anyaccel.linux import UNSEEN, process
from anyaccel.linux import mark as marks
from anyaccel.model import ANY_SLOTS, DIVIDED, NOTHING, UNITS_PER_DEVICE, Extent, Value, replace
from anyaccel.model import decode as decode_value
from anyaccel.text import clean, elapsed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HANDOVER = "handover."
"""Beginning of the names of files of handovers; see :mod:`anyaccel.ledger.handovers`."""
MAX_PRIORITY = 1_000_000  # keeps the rank below within seven digits
_RANK_OF_PRIORITY_0 = 5_000_000
_LONGEST = 150  # of an encoded device: a file name has 255 bytes, and the rest of a lease's name needs about 100
_LISTED_IN_NAME = 20  # devices of eight digits each: 160 characters of a ticket's name
_IN_BODY = "+"

_OF_VENDOR = r"(?P<vendor>[a-z][a-z0-9_]{0,31})/(?P<id>.+)"
_INNER = r"([0-9a-f]{8}\|)?[0-9a-f]{12}\|"
_ESCAPES = {code: f"%{code:02X}" for code in range(128) if not chr(code).isalnum() and chr(code) not in ":@+_-"}
_OWNER, _NONCE = r"(?P<pid>[0-9]{1,10})\.(?P<start>[0-9]{1,20})", r"(?P<boot>[0-9a-f]{8})(?P<id>[0-9a-f]{12})"
_UNITS, _SLOTS = r"(?P<units>[0-9]{1,5})", r"(-(?P<slots>[0-9a-f]{1,8}))?"
_TERM = r"(\.e(?P<until>[0-9a-f]{1,10})(-(?P<passed>[0-9a-f]{1,10}))?)?"
_LEASE = re.compile(rf"v2\.(?P<device>[^.]+)\.{_UNITS}{_SLOTS}\.{_OWNER}\.(?P<mark>[0-9a-f]{{16}}){_TERM}\.{_NONCE}")
_ANY_LEASE = r"v[0-9]+\.(?P<device>[^.]+)(\.(?P<vendor>[a-z][a-z0-9_]{0,31}))?(\..*)?"
_TICKET = rf"t1\.(?P<rank>[0-9]{{7}})\.(?P<number>[0-9]{{16}})\.{_OWNER}\.{_NONCE}\.(?P<wanted>([0-9a-f]{{8}})*|\+)"
_HIDDEN = rf"\.{_OWNER}\.{_NONCE}"


class Period(NamedTuple):
    """Time limit of a lease, in milliseconds since the boot.

    Attributes:
        until: End of the time limit; None for no limit.
        passed: Start of the lease if the request passed earlier requests; None if it was served in turn.
    """

    until: int | None = None
    passed: int | None = None


ENDLESS = Period()


class LeaseName(NamedTuple):
    """A parsed name of a lease's file.

    Attributes:
        name: The name.
        device: Name of the device in the ledger, ``vendor/id``; of a physical part its path.
        extent: The extent that is held; the whole device if the rest of the name is not understood.
        pid: Process that took the lease; 0 if unknown, or if only carriers of the mark count.
        start: Start time of that process, in ticks since the boot; 0 when unknown.
        boot: Tag of the boot in which the lease was taken.
        id: Identity of the lease, the same for each device of a request.
        mark: Mark of processes that were started with the lease; empty for none.
        understood: Whether this version understands the name.
        period: The time limit.
    """

    name: str
    device: str
    extent: Extent = Extent()
    pid: int = 0
    start: int = 0
    boot: str = ""
    id: str = ""
    mark: marks.Mark = ()
    understood: bool = False
    period: Period = ENDLESS


class TicketName(NamedTuple):
    """A parsed name of a ticket's file.

    Attributes:
        name: The name.
        priority: The higher, the earlier.
        number: Time of arrival, in microseconds since the boot: the position in the order of arrival.
        pid: Process that waits.
        start: Start time of that process.
        boot: Tag of the boot in which the ticket was made.
        id: Identity of the ticket.
        wanted: Hashes of the devices that could serve the request; None if the file's body lists them.
    """

    name: str
    priority: int
    number: int
    pid: int
    start: int
    boot: str
    id: str
    wanted: frozenset[int] | None

    @property
    def since(self) -> float:
        """Time of arrival, in seconds since the boot."""
        return self.number / 1e6


@cache
def boot() -> str:
    """Return the tag of this boot: eight hexadecimal digits, zeros if the kernel shows no valid boot id.

    The tag is kept from the first call. An OSError for want of descriptors or memory passes.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            tag = file.read(8)
    except UNSEEN:
        return "0" * 8
    return tag if re.fullmatch("[0-9a-f]{8}", tag) else "0" * 8


def device_name(vendor: str, device: str, scope: str = "") -> str:
    """Return the name of a device in the ledger: ``vendor/id``, independent of other vendors' devices.

    Args:
        vendor: Key of the vendor; empty for none.
        device: Id of the device, which may begin with ``vendor/`` already.
        scope: Prefix of the id for a device that is not a device of this host as every process sees it.

    Returns:
        The name; if its encoded form is too long for the name of a file, with a SHA-256 hash in place of the id.
    """
    of_vendor = f"{vendor}/" if vendor else ""
    own = device.removeprefix(of_vendor)
    name = f"{of_vendor}{scope}{own}"
    if len(name.translate(_ESCAPES)) <= _LONGEST:
        return name
    import hashlib

    return f"{of_vendor}{scope}{hashlib.sha256(own.encode()).hexdigest()}"


def vendor_and_id(name: str) -> tuple[str, str]:
    """Split the name of a device in the ledger into vendor and id, which includes the scope.

    A name without a vendor, as of a physical part, gives an empty vendor and the whole name.
    """
    match = re.fullmatch(_OF_VENDOR, name)
    return (match["vendor"], match["id"]) if match else ("", name)  # a physical part has no vendor


def without_scope(name: str) -> str:
    """Return the name of a device without the scope, for display: ``vendor/id``, or the id alone without a vendor."""
    vendor, own = vendor_and_id(name)
    own = own.rpartition("|")[2]
    return f"{vendor}/{own}" if vendor else own


def is_inner(name: str) -> bool:
    """Return whether a name is of a part of a lease: a device as a worker inside of that lease names it."""
    return re.match(_INNER, vendor_and_id(name)[1]) is not None


@lru_cache(maxsize=2048)
def encode(device: str) -> str:
    """Encode the name of a device for a file name, reversibly: letters, digits and ``:@+-_`` stay, the rest is ``%XX``.

    Raises:
        ValueError: When the name is not printable ASCII, or not 1 to 150 characters in its encoded form.
    """
    encoded = device.translate(_ESCAPES)
    if not 1 <= len(encoded) <= _LONGEST or not device.isascii() or not device.isprintable():
        raise ValueError(
            f"the name of a device must be 1 to {_LONGEST} printable ASCII characters in its encoded form"
            f" (got {device!r})"
        )
    return encoded


def decode(text: str) -> str | None:
    """Decode the name of a device that :func:`encode` wrote; None for any other text."""
    device = re.sub("%([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), text)
    try:
        return device if encode(device) == text else None
    except ValueError:
        return None


def new_nonce() -> str:
    """Return the tag of the boot and 12 random hexadecimal digits, which are the identity of the lease or ticket."""
    return boot() + os.urandom(6).hex()


def hidden_name() -> str:
    """Return a new random name for an unfinished file, which names this process as the maker."""
    pid, start = process.me()
    return f".{pid}.{start}.{new_nonce()}"


def lease_name(  # noqa: PLR0917 -- in the order of the name
    device: str,
    extent: Extent,
    nonce: str,
    owner: tuple[int, int] | None = None,
    mark: marks.Mark = (),
    period: Period = ENDLESS,
) -> str:
    """Return the name of a lease of this process, or of the process with the given id and start time.

    Args:
        device: Name of the device in the ledger.
        extent: The extent that is held.
        nonce: Tag of the boot and identity of the lease; see :func:`new_nonce`.
        owner: Process id and start time; zeros for no process, this process when None.
        mark: Mark of processes that are started with the lease; empty for none.
        period: The time limit.

    Raises:
        ValueError: When the device cannot be encoded; see :func:`encode`.
    """
    pid, start = owner or process.me()
    slots = "" if extent.divided or extent.slots == ANY_SLOTS else f"-{extent.slots:x}"
    term = "" if period.until is None else f".e{period.until:x}"
    if period.until is not None and period.passed is not None:
        term += f"-{period.passed:x}"
    marked = marks.limit(mark) if mark else 0
    return f"v2.{encode(device)}.{extent.units}{slots}.{pid}.{start}.{marked:016x}{term}.{nonce}"


def ticket_name(priority: int, number: int, nonce: str, candidates: frozenset[str]) -> str:
    """Return the name of a ticket of this process, with the hashes of the candidates.

    With more than 20 candidates the name has none: the body has them.
    """
    pid, start = process.me()
    listed = len(candidates) <= _LISTED_IN_NAME
    wanted = "".join(f"{each:08x}" for each in sorted(hashes(candidates))) if listed else _IN_BODY
    rank = _RANK_OF_PRIORITY_0 - priority
    return f"t1.{rank:07}.{number:016}.{pid}.{start}.{nonce}.{wanted}"


@lru_cache(maxsize=2048)
def parse_lease(name: str) -> LeaseName | None:
    """Parse the name of a lease; None for any other name, or if the device cannot be read.

    A name of another version or form, or with an impossible extent or mark, gives the whole device, not ``understood``;
    process, identity and time limit are left out then.
    """
    match = _LEASE.fullmatch(name)
    found = match or re.fullmatch(_ANY_LEASE, name)
    device = decode(found["device"]) if found else None
    if device is None:
        return None
    if match is None:
        vendor = found["vendor"] if found else None
        return LeaseName(name=name, device=f"{vendor}/{device}" if vendor else device)
    value = int(match["mark"], 16)
    mark = marks.parse(value) or None if value else ()
    extent = _read_extent(match["units"], match["slots"] or "")
    if mark is None or extent is None:
        return LeaseName(name=name, device=device)
    return LeaseName(
        name=name,
        device=device,
        extent=extent,
        pid=int(match["pid"]),
        start=int(match["start"]),
        boot=match["boot"],
        id=match["id"],
        mark=mark,
        understood=True,
        period=Period(*(int(each, 16) if each else None for each in (match["until"], match["passed"]))),
    )


def _read_extent(units: str, slots: str) -> Extent | None:
    """Return the extent in the name of a lease; None for an impossible extent.

    Args:
        units: Units in decimal digits; without slots, 0 is a device of which a part is held.
        slots: Bit mask in hexadecimal digits; empty for any slots.
    """
    number, mask = int(units), int(slots, 16) if slots else ANY_SLOTS
    if not number and not slots:
        return DIVIDED
    return Extent(number, mask) if mask and 0 < number <= UNITS_PER_DEVICE else None


@lru_cache(maxsize=2048)
def parse_ticket(name: str) -> TicketName | None:
    """Parse the name of a ticket; None for any other name."""
    match = re.fullmatch(_TICKET, name)
    if match is None:
        return None
    wanted = match["wanted"]
    hashed = frozenset(int(wanted[at : at + 8], 16) for at in range(0, len(wanted), 8)) if wanted != _IN_BODY else None
    return TicketName(
        name=name,
        priority=_RANK_OF_PRIORITY_0 - int(match["rank"]),
        number=int(match["number"]),
        pid=int(match["pid"]),
        start=int(match["start"]),
        boot=match["boot"],
        id=match["id"],
        wanted=hashed,
    )


def parse_hidden(name: str) -> tuple[int, int, str] | None:
    """Parse a hidden name into process id, start time and tag of the boot; None for any other name."""
    match = re.fullmatch(_HIDDEN, name)
    return (int(match["pid"]), int(match["start"]), match["boot"]) if match else None


@lru_cache(maxsize=256)
def hashes(candidates: frozenset[str]) -> frozenset[int]:
    """Return the devices of a request as the numbers that tickets compare, possibly fewer: see :func:`hash_device`."""
    return frozenset(map(hash_device, candidates))


def hash_device(device: str) -> int:
    """Return the CRC-32 of a device's name: the number that tickets compare. Two devices may share a number."""
    return crc32(device.encode())


class Listing(NamedTuple):
    """The names in the state directory at one moment; without a directory, none.

    Attributes:
        leases: The parsed names of leases, also of ended leases and of other versions.
        pids: Processes that took the leases.
        marks: Marks of the leases.
        taken: The taken extents by device name.
        tickets: Names of tickets, in the order of service.
        hidden: Names of unfinished or leftover files.
    """

    leases: tuple[LeaseName, ...] = ()
    pids: frozenset[int] = frozenset()
    marks: frozenset[marks.Mark] = frozenset()
    taken: Mapping[str, Extent] = MappingProxyType({})
    tickets: Sequence[str] = ()
    hidden: Sequence[str] = ()

    def find_lease(self, lease_id: str) -> list[LeaseName]:
        """Return the parsed names of a lease, also of an ended lease; none for an unknown or empty id.

        Each device has a name, and after a recovery further names for further processes.
        """
        return [lease for lease in self.leases if lease.id == lease_id and lease.id]


def sum_taken(leases: Iterable[LeaseName], over: Collection[str] = ()) -> dict[str, Extent]:
    """Sum the taken extents by device name, up to the whole device, without the leases whose names are in ``over``.

    A device of a lease counts once, although after a recovery several processes have a file for it.
    """
    found: dict[str, Extent] = {}
    counted = set()
    for lease in leases:
        # With the extent: a user who copies the identity of another user's lease hides no part of that lease.
        part = lease.id, lease.device, lease.extent
        if lease.name not in over and part not in counted:
            counted.add(part)
            found[lease.device] = found.get(lease.device, NOTHING).joined(lease.extent)
    return found


@lru_cache(maxsize=2)
def _parse_leases(named: tuple[str, ...]) -> Listing:
    """Parse the names of leases. A name of another version counts as a lease of the whole device.

    Only a name without a readable device is left out. An acquisition lists the directory twice, and mostly finds the
    same leases: with 256 leases, acquire and release take 0.5 ms of processor time, and 1.6 ms without this cache.
    """
    leases = tuple(filter(None, map(parse_lease, named)))
    pids, marked = frozenset(lease.pid for lease in leases), frozenset(lease.mark for lease in leases)
    return Listing(leases, pids, marked, sum_taken(leases))


def list_names(directory: int) -> Listing:
    """List the state directory of a descriptor by kind of name, which the first letter tells; omit other kinds.

    Only the tickets are sorted, and files are not opened. OSError passes.
    """
    named, tickets, hidden = [], [], []
    for name in os.listdir(directory):
        first = name[0]
        if first == "v":
            named.append(name)
        elif first == "t":
            tickets.append(name)
        elif first == ".":
            hidden.append(name)
    tickets.sort()
    return _parse_leases(tuple(named))._replace(tickets=tickets, hidden=hidden)


def fits(choice: Mapping[str, Extent], taken: Mapping[str, Extent]) -> bool:
    """Return whether each chosen extent is free; a device without an entry in ``taken`` is free."""
    return all(taken.get(device, NOTHING).leaves(extent) for device, extent in choice.items())


_Value = TypeVar("_Value", bound=Value)
BODY_LIMIT = 4096
# Files belong to other users: no symbolic link is followed, and opening a FIFO must not block.
_LOOKING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Life(Enum):
    """Reason why a lease is active."""

    HELD = "held"
    """The lock is held, or may be."""
    LEAVING = "leaving"
    """The lock is free, but the process has not left the kernel yet: its devices may still be open."""
    KEPT = "kept"
    """The lock is free and the process gone, but a process that was started with the lease lives, or may live."""
    ON_BEHALF = "on behalf"
    """No process holds the lock, but the tenure of the lease lasts."""


def probe_lock(directory: int, name: str) -> tuple[bool, os.stat_result | None]:
    """Test whether a file is locked exclusively.

    The test takes a shared lock for a moment, which does not disturb other tests, even if this process is stopped
    meanwhile.

    Returns:
        Whether the file is locked, and the state of the file. A regular file that cannot be opened, for want of
        permission or because of a kernel lease (``F_SETLEASE``), counts as locked: its owner could keep the device by a
        lock, too. A file that is not regular counts as unlocked, since no version makes one, and so does a missing
        file; both without state.

    Raises:
        OSError: When the file cannot be tested for another reason, as for want of descriptors.
    """
    try:
        fd = os.open(name, _LOOKING, dir_fd=directory)
    except (PermissionError, BlockingIOError):
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return False, None
        return (True, found) if stat.S_ISREG(found.st_mode) else (False, None)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):  # gone, a symbolic link, a socket
            return False, None
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return False, None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True, found
        return False, found
    finally:
        os.close(fd)


def find_obstacle(directory: int, name: str) -> str:
    """Return the reason why an existing file cannot be opened and so counts as held, as a clause without subject.

    Empty if the file can be opened, is gone, or cannot be opened for another reason.
    """
    try:
        os.close(os.open(name, _LOOKING, dir_fd=directory))
    except BlockingIOError:
        return "has a kernel lease on it (F_SETLEASE), which keeps others from opening it"
    except PermissionError:
        return "may not be opened by others"
    except OSError:
        pass
    return ""


def is_left_behind(pid: int, start: int, tag: str) -> bool:
    """Return whether the maker of a file has left the kernel, so that it cannot use a device any more; in doubt False.

    Args:
        pid: Process id of the maker.
        start: Start time of the maker; 0 when unknown.
        tag: Tag of the maker's boot; after another boot, the answer is True.
    """
    return tag != boot() or process.gone(pid, start)


def read_body(directory: int, name: str, limit: int = BODY_LIMIT) -> bytes:
    """Read the content of another process's file, up to ``limit`` bytes, 4096 by default.

    Empty if the file is not regular, or cannot be opened for any reason. An OSError of the reading itself passes.
    """
    try:
        fd = os.open(name, _LOOKING, dir_fd=directory)
    except OSError:
        return b""
    try:
        return os.read(fd, limit) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object from another process; empty for anything else."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_value(kind: type[_Value], data: object) -> _Value | None:
    """Decode a value from another process, without the fields that only a later version has; None if implausible."""
    try:
        return decode_value(kind, {name: data[name] for name in kind._fields if name in data})  # type: ignore[index, operator]
    except (ValueError, TypeError):
        return None


def read_number(value: object) -> float | None:
    """Convert a number of seconds, or the like, from another process; None unless a number from 0 to below 2**40."""
    return float(value) if type(value) in (int, float) and 0 <= value < 1 << 40 else None  # type: ignore[operator, arg-type] # pyright: ignore[reportOperatorIssue, reportArgumentType]


def with_entry(body: bytes, name: str, value: Any) -> bytes:
    """Return the body of a lease with an entry added or replaced, as JSON of any length.

    Args:
        body: The current content: any carrier of the lease may have written it, so anything but a JSON object is
            dropped.
        name: Name of the entry.
        value: The value, which JSON must be able to encode.
    """
    return json.dumps(read_object(body) | {name: value}, ensure_ascii=False).encode(errors="replace")


ENTRY = "tenure"
"""Name of the tenure in the body of a lease."""
RENEWED = "for another"
"""Beginning of the reason of a lease that is renewed in time."""
_MOST_GROUPS = 16
_LONGEST_PATHS = 2048
"""Most characters of all paths in JSON, so that all of it stays below the limit of a body."""
_MOST_SECONDS = 2**31


class Tenure(Value):
    """The condition under which a lease that no process holds stays active.

    Attributes:
        key: Identity of the use, given by the program that took the lease.
        until: The lease is active until then at least, in seconds since the boot.
        groups: Control groups, by path below the root of the hierarchy and by inode: while one of them has processes,
            the lease stays active.
    """

    key: str
    until: float
    groups: tuple[tuple[str, int], ...] = ()

    def encode(self) -> dict[str, Any]:
        """Return the tenure as JSON values."""
        return {"key": self.key, "until": self.until, "groups": [list(group) for group in self.groups]}

    def reason(self) -> str:
        """Return the reason why the lease is active now, as a clause; empty once the tenure has ended.

        Before ``until``, the clause begins with :data:`RENEWED`, and the groups are not looked at. After that, a
        control group that cannot be seen from here counts as having processes.
        """
        left = self.until - process.boot_seconds()
        if left > 0:
            return f"{RENEWED} {elapsed(left)} unless renewed"
        from anyaccel.linux import is_populated  # few leases are on behalf of others

        for path, inode in self.groups:
            populated = is_populated(path, inode)
            if populated:
                return f"not renewed any more, and kept while control group {clean(path)} has processes"
            if populated is None:
                return f"not renewed any more, and control group {clean(path)} cannot be seen from here"
        return ""


def read_tenure(directory: int, lease: LeaseName) -> Tenure | None:
    """Return the tenure of a lease, which may have ended; None if there is no valid tenure of this boot.

    None also if the file is unreadable or longer than 4096 bytes, or has an implausible tenure. Of the groups, the
    first 16 count.
    """
    if not lease.understood or lease.boot != boot():
        return None
    found = read_value(Tenure, read_object(read_body(directory, lease.name)).get(ENTRY))
    if found is None or read_number(found.until) is None:
        return None
    return replace(found, key=clean(found.key), groups=found.groups[:_MOST_GROUPS])


def make_tenure(key: str, seconds: float, groups: tuple[tuple[str, int], ...] = ()) -> Tenure:
    """Make a tenure that begins now.

    Args:
        key: Identity of the use: 1 to 250 printable characters.
        seconds: Seconds until the tenure ends unless renewed; more than 0, and at most 2**31, which is 68 years.
        groups: Control groups by path and inode: 16 at most, with paths of 2048 characters in all as JSON writes them.
            While a group has processes, the lease stays active after ``seconds``.

    Raises:
        UsageError: When a value is out of range.
    """
    if not key or clean(key) != key:
        raise UsageError(f"key must be 1 to 250 printable characters (got {key!r:.80})")
    if not 0 < seconds <= _MOST_SECONDS:
        raise UsageError(f"seconds must be more than 0 and at most {_MOST_SECONDS} (got {seconds!r})")
    if len(groups) > _MOST_GROUPS or sum(len(json.dumps(path)) - 2 for path, _ in groups) > _LONGEST_PATHS:
        raise UsageError(
            f"a lease follows at most {_MOST_GROUPS} control groups, with {_LONGEST_PATHS} characters in all"
            f" (got {len(groups)})"
        )
    return Tenure(key=key, until=process.boot_seconds() + seconds, groups=groups)


class LeaseState(NamedTuple):
    """Reason why a lease is active.

    Attributes:
        life: The kind of reason.
        carriers: Visible processes that carry the mark of a lease whose holder has ended.
        reason: Reason why a lease on behalf of others is active; empty for other leases.
        key: Identity of the use of a lease on behalf of others; empty for other leases.
    """

    life: Life
    carriers: tuple[int, ...] = ()
    reason: str = ""
    key: str = ""


def find_active(directory: int, leases: Iterable[LeaseName]) -> dict[str, LeaseState]:
    """Test leases, and return by name why each is active, without those that have ended. Nothing is removed.

    Each lock is tested; the processes are scanned at most once, and only for marks of leases whose holder has ended.

    A lease that has ended stays ended in this directory: names are never reused. Only if the directory was deleted, the
    names are made again in the next directory. A lease whose holder has ended, and whose descriptors are still open in
    a carrier of its mark, is kept like a lease with the mark alone. A marked lease is also kept, without carriers, if a
    carrier may be hidden: ``/proc`` hides processes of other users, and this user is neither root nor the owner of the
    lease, or processes start faster than the scan can follow. A lease of another version is judged by its lock alone.

    Raises:
        OSError: When a lock cannot be tested, as for want of descriptors.
    """
    found, marked = {}, []
    for lease in leases:
        locked, file = probe_lock(directory, lease.name)
        if locked:
            found[lease.name] = LeaseState(Life.HELD)
        if file is None or not lease.understood or (locked and not lease.mark):
            continue
        left = is_left_behind(lease.pid, lease.start, lease.boot)
        if left and lease.mark and lease.boot == boot():
            marked.append(lease)
        elif locked:
            continue
        elif not left and stat_of(directory, lease.name):
            found[lease.name] = LeaseState(Life.LEAVING)
        elif (tenure := read_tenure(directory, lease)) and (reason := tenure.reason()):
            found[lease.name] = LeaseState(Life.ON_BEHALF, reason=reason, key=tenure.key)
    carried = marks.carriers({lease.mark for lease in marked}) if marked else {}
    for lease in marked:
        carriers = () if carried is None else carried.get(lease.mark, ())
        file = stat_of(directory, lease.name)  # again: the scan takes a while
        hidden = not carriers and (carried is None or (file and file.st_uid != os.geteuid() and marks.hidden()))
        if file and (carriers or (hidden and lease.name not in found)):
            found[lease.name] = LeaseState(Life.KEPT, carriers)
    return found


def sweep(directory: int, names: Iterable[str]) -> None:
    """Remove the named files, which the caller found to have ended; locks are not tested again, failures ignored."""
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)


def find_debris(directory: int, hidden: Iterable[str]) -> list[str]:
    """Return the hidden names whose files are unlocked, irregular or gone and whose makers have ended.

    Names of another form are left out. Nothing is removed.

    Raises:
        OSError: When a lock cannot be tested.
    """
    found = []
    for name in hidden:
        maker = parse_hidden(name)
        # In another container the maker seems to have ended: the lock tells that the file is in use.
        if maker and is_left_behind(*maker) and not probe_lock(directory, name)[0]:
            found.append(name)
    return found


def stat_of(directory: int, name: str) -> os.stat_result | None:
    """Return the state of a file, of a symbolic link itself; None if the file is gone. Other errors pass."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
