"""What the names of files in the state directory say, and how device ids are written in them.

A lease is ``v2.<id>.<vendor>.<extent>.<pid>.<starttime>.<mark>.<nonce>``: whoever counts what is taken needs nothing
but names. Ids belong to their vendors, so the ledger names a device ``vendor/id``. A physical part is the same whoever
drives it: it goes by its path, and the vendor is left out. Of a lease that another version wrote, id and vendor are
read, and the whole device counts as held. The extent is a number of units, in 1/10000 of the device; where the
device has slots, a hyphen and these slots follow, as a bit mask in hexadecimal digits. No units are held of a device by
who holds a part of it that is a device of its own, and then the device itself is nobody's. The mark is the one that all
carry which was started with the lease, as 16 hexadecimal digits of :func:`anyaccel.linux.mark.limit`, zeros for none;
a process id of 0 says that no process matters but those that carry the mark. Of a lease that ends in time, ``.e`` and
the time stand before the nonce, in milliseconds since the boot as hexadecimal digits; after them, where it was given to
somebody who passed others, ``b`` and when that was. A ticket of a waiter is
``t1.<rank>.<number>.<pid>.<starttime>.<nonce>.<wanted>``, in which the numbers have leading zeros, so that the order of
the names is the order of service. What is being made is hidden: ``.<pid>.<starttime>.<nonce>``. A nonce starts with the
tag of the boot, so that files that outlived a boot say so.

Names come from other processes, possibly of another version or with bad intent; nothing here raises on them.
"""

from __future__ import annotations

import os
import re
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import NamedTuple

from anyaccel.linux import mark as marks
from anyaccel.linux.process import UNSEEN, me
from anyaccel.model.device import UNITS_PER_DEVICE
from anyaccel.model.extent import ANY_SLOTS, DIVIDED, Extent

MAX_PRIORITY = 1_000_000
_RANK_OF_PRIORITY_0 = 5_000_000
_MAX_NUMBER = 10**16 - 1
_LONGEST = 128
_ESCAPED_LENGTH = 150
_LISTED_IN_NAME = 32
_IN_BODY = "+"
_NUMBER = slice(11, 27)

_DEVICE = re.compile(rf"[ -~]{{1,{_LONGEST}}}")
_VENDOR = r"(?P<vendor>[a-z][a-z0-9_]{0,31})"
_OF_VENDOR = re.compile(rf"{_VENDOR}/(?P<id>.+)")
_INNER = re.compile(r"([0-9a-f]{8}\|)?[0-9a-f]{12}\|")
_PLAIN = re.compile(r"[0-9A-Za-z:@+_-]")
_OWNER, _NONCE = r"(?P<pid>[0-9]{1,10})\.(?P<start>[0-9]{1,20})", r"(?P<boot>[0-9a-f]{8})(?P<id>[0-9a-f]{12})"
_UNITS, _SLOTS = r"(?P<units>[0-9]{1,5})", r"(-(?P<slots>[0-9a-f]{1,8}))?"
_TERM = r"(\.e(?P<until>[0-9a-f]{1,10})(b(?P<passed>[0-9a-f]{1,10}))?)?"
_LEASE = re.compile(
    rf"v2\.(?P<device>[^.]+)(\.{_VENDOR})?\.{_UNITS}{_SLOTS}\.{_OWNER}\.(?P<mark>[0-9a-f]{{16}}){_TERM}\.{_NONCE}"
)
_ANY_LEASE = re.compile(rf"v[0-9]+\.(?P<device>[^.]+)(\.{_VENDOR})?(\..*)?")
_TICKET = re.compile(
    rf"t1\.(?P<rank>[0-9]{{7}})\.(?P<number>[0-9]{{16}})\.{_OWNER}\.{_NONCE}\.(?P<wanted>[0-9A-Za-z_+-]*)"
)
_HIDDEN = re.compile(rf"\.{_OWNER}\.{_NONCE}")


class Period(NamedTuple):
    """When a lease ends, in milliseconds since the boot.

    Attributes:
        until: When it ends at the latest; None when it does not say.
        passed: When it was given, where others who had come before were passed; None where it was in turn.
    """

    until: int | None = None
    passed: int | None = None


ENDLESS = Period()


class LeaseName(NamedTuple):
    """What a lease's file name says.

    Attributes:
        name: The name.
        device: Name of the device in the ledger, ``vendor/id``; of a physical part its path.
        extent: How much of it is held, and where; all of it where the rest is not understood.
        pid: Process that took the lease; 0 where it is not understood, or only those matter that carry the mark.
        start: Start time of that process, in ticks since the boot; 0 when unknown.
        boot: Tag of the boot in which it was taken.
        id: Identity of the lease, the same for all devices of one request.
        mark: Mark of all that was started with the lease; empty where there is none.
        understood: Whether this version knows what the name says.
        period: When it ends.
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
    """What a ticket's file name says.

    Attributes:
        name: The name.
        priority: The higher, the earlier.
        number: Position in the order of arrival.
        pid: Process that waits.
        start: Start time of that process.
        boot: Tag of the boot in which it was made.
        id: Identity of the ticket.
        wanted: Hashes of the devices that could serve it; None when the file's body lists them.
    """

    name: str
    priority: int
    number: int
    pid: int
    start: int
    boot: str
    id: str
    wanted: frozenset[int] | None


@cache
def boot() -> str:
    """Tag of this boot: eight hexadecimal digits, zeros where the kernel does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            tag = file.read(8)
    except UNSEEN:
        return "0" * 8
    return tag if re.fullmatch("[0-9a-f]{8}", tag) else "0" * 8


def device_name(vendor: str, device: str, scope: str = "") -> str:
    """Name a device in the ledger: ``vendor/id``, whatever other vendors' devices are seen.

    Args:
        vendor: Key of its vendor; empty for none.
        device: Its id, which may begin with the vendor already.
        scope: What comes before the id where the device is not one of this host as everybody sees it.

    Returns:
        The name. A hash stands for an id that makes it longer than the name of a file has room for.
    """
    of_vendor = f"{vendor}/" if vendor else ""
    own = device.removeprefix(of_vendor)
    name = f"{of_vendor}{scope}{own}"
    if len(name) <= _LONGEST:
        return name
    import hashlib

    return f"{of_vendor}{scope}{hashlib.sha256(own.encode()).hexdigest()}"


def vendor_and_id(name: str) -> tuple[str, str]:
    """Read the name of a device in the ledger: its vendor and id, or nothing and the path of a physical part."""
    match = _OF_VENDOR.fullmatch(name)
    return (match["vendor"], match["id"]) if match else ("", name)


def without_scope(name: str) -> str:
    """The name of a device without what says of which machine or lease it is: ``vendor/id``, for people."""
    vendor, own = vendor_and_id(name)
    own = own.rpartition("|")[2]
    return f"{vendor}/{own}" if vendor else own


def is_inner(name: str) -> bool:
    """Whether a device is a part of what a lease holds, as a worker with that lease sees it."""
    return _INNER.match(vendor_and_id(name)[1]) is not None


def encode(device: str, room: int = _ESCAPED_LENGTH) -> str:
    """Write a device id as a part of a file name, reversibly: letters, digits and ``:@+-_`` stay as they are.

    Args:
        device: The id.
        room: How many characters it may have then; what would have more is written in base64.

    Raises:
        ValueError: When it is not 1 to 128 printable ASCII characters.
    """
    if not _DEVICE.fullmatch(device):
        raise ValueError(f"a device id must be 1 to {_LONGEST} printable ASCII characters (got {device!r})")
    escaped = "".join(char if _PLAIN.fullmatch(char) else f"%{ord(char):02X}" for char in device)
    if len(escaped) <= room:
        return escaped
    return "=" + urlsafe_b64encode(device.encode()).decode().rstrip("=")  # "=" is escaped above: no id starts with it


def decode(text: str, room: int = _ESCAPED_LENGTH) -> str | None:
    """Read what :func:`encode` wrote; None when it did not write this."""
    try:
        if text.startswith("="):
            device = urlsafe_b64decode(text[1:] + "=" * (-len(text[1:]) % 4)).decode("ascii")
        else:
            device = re.sub("%([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), text)
        return device if encode(device, room) == text else None
    except ValueError:
        return None


def new_nonce() -> str:
    """Make a nonce: the tag of the boot and 12 random hexadecimal digits, which are the lease's identity."""
    return boot() + os.urandom(6).hex()


def hidden_name() -> str:
    """Make a name for a file that is being made."""
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
    """Name a lease of this process, or of the one whose process id and start time are given."""
    pid, start = owner or me()
    slots = "" if extent.divided or extent.slots == ANY_SLOTS else f"-{extent.slots:x}"
    term = "" if period.until is None else f".e{period.until:x}"
    if period.until is not None and period.passed is not None:
        term += f"b{period.passed:x}"
    marked = marks.limit(mark) if mark else 0
    return f"v2.{_named(device)}.{extent.units}{slots}.{pid}.{start}.{marked:016x}{term}.{nonce}"


@lru_cache(maxsize=4096)
def _named(device: str) -> str:
    """How the name of a lease says its device."""
    vendor, own = vendor_and_id(device)
    return f"{encode(own, _room(vendor))}.{vendor}" if vendor else encode(own)


def ticket_name(priority: int, number: int, nonce: str, candidates: frozenset[str]) -> str:
    """Name a ticket of this process."""
    pid, start = me()
    packed = b"".join(each.to_bytes(4) for each in sorted(hashes(candidates)))
    wanted = urlsafe_b64encode(packed).decode().rstrip("=") if listed_in_name(candidates) else _IN_BODY
    rank = _RANK_OF_PRIORITY_0 - priority
    return f"t1.{rank:07}.{min(number, _MAX_NUMBER):016}.{pid}.{start}.{nonce}.{wanted}"


def _room(vendor: str) -> int:
    """Characters that an id may have beside its vendor in the name of a lease."""
    return _ESCAPED_LENGTH - len(vendor) - 1 if vendor else _ESCAPED_LENGTH


@lru_cache(maxsize=8192)
def parse_lease(name: str) -> LeaseName | None:
    """Read a lease's name; None when it is none, or says of which device in no way that we know."""
    match = _LEASE.fullmatch(name)
    named = _device_of(match)
    if match is None or named is None:
        other = _device_of(_ANY_LEASE.fullmatch(name))
        return None if other is None else LeaseName(name=name, device=other)
    value = int(match["mark"], 16)
    mark = marks.parse(value) or None if value else ()
    extent = None if mark is None else _read_extent(match["units"], match["slots"] or "")
    if mark is None or extent is None:
        return LeaseName(name=name, device=named)
    return LeaseName(
        name=name,
        device=named,
        extent=extent,
        pid=int(match["pid"]),
        start=int(match["start"]),
        boot=match["boot"],
        id=match["id"],
        mark=mark,
        understood=True,
        period=Period(*(int(each, 16) if each else None for each in (match["until"], match["passed"]))),
    )


def _device_of(match: re.Match[str] | None) -> str | None:
    """Name of the device whose id and vendor a lease's name says; None where it says no id that we can read."""
    if match is None:
        return None
    vendor = match["vendor"] or ""
    device = decode(match["device"], _room(vendor))
    return f"{vendor}/{device}" if vendor and device is not None else device


def _read_extent(units: str, slots: str) -> Extent | None:
    """How much of a device a lease's name says is held; None where that cannot be."""
    number, mask = int(units), int(slots, 16) if slots else ANY_SLOTS
    if not number and not slots:
        return DIVIDED
    return Extent(number, mask) if mask and 0 < number <= UNITS_PER_DEVICE else None


@lru_cache(maxsize=8192)
def parse_ticket(name: str) -> TicketName | None:
    """Read a ticket's name; None when it is none."""
    match = _TICKET.fullmatch(name)
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


def last_number(names: Iterable[str]) -> int:
    """The highest number of the tickets among some names; quick, since the directory is locked meanwhile."""
    numbers = (name[_NUMBER] for name in names if name.startswith("t1."))
    return int(max((number for number in numbers if number.isdecimal() and number.isascii()), default="0"))


def parse_hidden(name: str) -> tuple[int, int, str] | None:
    """Read a hidden file's name: process id, start time and tag of the boot; None when it is none of ours."""
    match = _HIDDEN.fullmatch(name)
    return (int(match["pid"]), int(match["start"]), match["boot"]) if match else None


@lru_cache(maxsize=256)
def hashes(candidates: frozenset[str]) -> frozenset[int]:
    """The devices of a request as the numbers that tickets compare."""
    return frozenset(map(hash_device, candidates))


@lru_cache(maxsize=4096)
def hash_device(device: str) -> int:
    """A device as the number that tickets compare."""
    return zlib.crc32(device.encode())


def listed_in_name(candidates: frozenset[str]) -> bool:
    """Whether a ticket's name has room for the devices that it wants."""
    return len(candidates) <= _LISTED_IN_NAME


def _read_wanted(text: str) -> frozenset[int] | None:
    try:
        packed = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return None
    if text == _IN_BODY or len(packed) % 4:
        return None
    return frozenset(int.from_bytes(packed[at : at + 4]) for at in range(0, len(packed), 4))
