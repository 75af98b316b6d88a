"""Names of files in the state directory: their list, their content, and the encoding of device ids in them.

Leases are counted by name first, and by lock only if the answer depends on a lock.

The name of a lease is ``v2.<device>.<extent>.<pid>.<starttime>.<mark>.<nonce>``, so the taken devices can be counted by
names alone.

- Ids are unique per vendor, so the ledger names a device ``vendor/id``. A physical part is named by its path, without
  the vendor, since several drivers may list the same part.
- Of a lease of another version only the device is read, and the whole device counts as held.
- The extent is a number of units, in 1/10000 of the device. If the device has slots, a hyphen and the held slots
  follow, as a bit mask in hexadecimal digits. The extent is 0 for a device of which a part is held that is a device of
  its own; then the device itself is not given out.
- The mark is the mark of the processes that were started with the lease, as 16 hexadecimal digits of
  :func:`anyaccel.linux.mark.limit`, zeros for none. With a process id of 0, only carriers of the mark keep the lease.
- A lease with a time limit has ``.e`` and the end before the nonce, in milliseconds since the boot as hexadecimal
  digits. If the request passed earlier requests, ``b`` and the time of that follow.

The name of a ticket is ``t1.<rank>.<number>.<pid>.<starttime>.<nonce>.<wanted>``. The number is the time of arrival in
microseconds since the boot. Rank and number have leading zeros, so that the order of the names is the order of service.
An unfinished file is hidden: ``.<pid>.<starttime>.<nonce>``. A nonce starts with the tag of the boot, which tells files
of an earlier boot.

Names come from other processes, possibly of another version or with bad intent; the readers never raise.
"""

from __future__ import annotations

import os
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import crc32
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from types import MappingProxyType

from anyaccel._typing import NamedTuple
from anyaccel.linux import mark as marks
from anyaccel.linux.process import UNSEEN, me
from anyaccel.model.device import ANY_SLOTS, DIVIDED, NOTHING, UNITS_PER_DEVICE, Extent

HANDOVER = "handover."
"""Beginning of the names of files of handovers; see :mod:`anyaccel.ledger.handovers`."""
MAX_PRIORITY = 1_000_000  # keeps the rank below within seven digits
_RANK_OF_PRIORITY_0 = 5_000_000
_LONGEST = 150  # of an encoded device: a file name has 255 bytes, and the rest of a lease's name needs about 100
_LISTED_IN_NAME = 32  # devices of four bytes each in base64: 171 characters of a ticket's name
_IN_BODY = "+"

_OF_VENDOR = r"(?P<vendor>[a-z][a-z0-9_]{0,31})/(?P<id>.+)"
_INNER = r"([0-9a-f]{8}\|)?[0-9a-f]{12}\|"
_ESCAPES = {code: f"%{code:02X}" for code in range(128) if not chr(code).isalnum() and chr(code) not in ":@+_-"}
_OWNER, _NONCE = r"(?P<pid>[0-9]{1,10})\.(?P<start>[0-9]{1,20})", r"(?P<boot>[0-9a-f]{8})(?P<id>[0-9a-f]{12})"
_UNITS, _SLOTS = r"(?P<units>[0-9]{1,5})", r"(-(?P<slots>[0-9a-f]{1,8}))?"
_TERM = r"(\.e(?P<until>[0-9a-f]{1,10})(b(?P<passed>[0-9a-f]{1,10}))?)?"
_LEASE = re.compile(rf"v2\.(?P<device>[^.]+)\.{_UNITS}{_SLOTS}\.{_OWNER}\.(?P<mark>[0-9a-f]{{16}}){_TERM}\.{_NONCE}")
_ANY_LEASE = r"v[0-9]+\.(?P<device>[^.]+)(\..*)?"
_TICKET = rf"t1\.(?P<rank>[0-9]{{7}})\.(?P<number>[0-9]{{16}})\.{_OWNER}\.{_NONCE}\.(?P<wanted>[0-9A-Za-z_+-]*)"
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
    pid, start = me()
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
    pid, start = owner or me()
    slots = "" if extent.divided or extent.slots == ANY_SLOTS else f"-{extent.slots:x}"
    term = "" if period.until is None else f".e{period.until:x}"
    if period.until is not None and period.passed is not None:
        term += f"b{period.passed:x}"
    marked = marks.limit(mark) if mark else 0
    return f"v2.{encode(device)}.{extent.units}{slots}.{pid}.{start}.{marked:016x}{term}.{nonce}"


def ticket_name(priority: int, number: int, nonce: str, candidates: frozenset[str]) -> str:
    """Return the name of a ticket of this process, with the hashes of the candidates.

    With more than 32 candidates the name has none: the body has them.
    """
    pid, start = me()
    packed = b"".join(each.to_bytes(4) for each in sorted(hashes(candidates)))
    wanted = urlsafe_b64encode(packed).decode().rstrip("=") if len(candidates) <= _LISTED_IN_NAME else _IN_BODY
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
    if match is None or device is None:
        return None if device is None else LeaseName(name=name, device=device)
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
    """Parse the name of a ticket; None for any other name. Faulty hashes count as listed in the body."""
    match = re.fullmatch(_TICKET, name)
    if match is None:
        return None
    return TicketName(
        name=name,
        priority=_RANK_OF_PRIORITY_0 - int(match["rank"]),
        number=int(match["number"]),
        pid=int(match["pid"]),
        start=int(match["start"]),
        boot=match["boot"],
        id=match["id"],
        wanted=_read_wanted(match["wanted"]),
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


def _read_wanted(text: str) -> frozenset[int] | None:
    """Decode the hashes in the name of a ticket; None if the body lists them, or the text is faulty."""
    try:
        packed = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return None
    if text == _IN_BODY or len(packed) % 4:
        return None
    return frozenset(int.from_bytes(packed[at : at + 4]) for at in range(0, len(packed), 4))


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
