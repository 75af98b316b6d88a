"""The journal: one line of facts for each ended lease, for reports.

A line is one JSON object, appended by one write to a file of the user's own. If the administrator has made the
machine's directory, the file is there, so that a report sees every user; the user of a line is the owner of the file,
whatever the line says. No error here fails a run: a line that cannot be written is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping

from anyaccel.configuration import user_directory
from anyaccel.ledger.bodies import clean, read_number, read_object
from anyaccel.linux.users import outside, user_name
from anyaccel.model import Value, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MACHINE_DIRECTORY = "/var/lib/anyaccel/journal"
"""Owned by root, sticky and writable for all, like ``/tmp``; without this directory users have separate journals."""
VERSION = 1
MOST_BYTES = 8 << 20
"""Size after which a file is renamed to ``.1``, replacing an older ``.1``."""
IDLE_BELOW = 0.05
"""Utilization below which a sample counts as idle."""
_LONGEST_LINE = 1 << 14  # other users write lines, too: a reader holds no more of one in memory
_PLACES = 10
_MOST_DEVICES = 128
_HELD, _FARED = 3, 7
"""Number of fields of a device, without and with utilization."""


class Used(Value):
    """A device of an ended lease.

    Attributes:
        device: Name of the device in tables, ``vendor/index``, or its id.
        type: Accelerator type; empty if not recorded.
        units: How much of the device was held, in 1/10000.
        observed: Seconds for which the vendor reported the utilization; 0 if it was never asked or does not report it.
        utilization: Share of these seconds that the device was busy, for any holder, from 0 to 1; None without samples.
        idle: Seconds of the observed ones with a utilization below :data:`IDLE_BELOW`.
        memory_peak_bytes: The highest memory use that was seen, of every holder; None if not reported.
    """

    device: str
    type: str = ""
    units: int = 10_000
    observed: float = 0.0
    utilization: float | None = None
    idle: float = 0.0
    memory_peak_bytes: int | None = None

    @property
    def was_idle(self) -> bool:
        """Whether the device was idle for more than half of the observed time."""
        return self.idle > self.observed / 2


class JournalEntry(Value):
    """An ended lease, or the sum of several short leases of a pool.

    Attributes:
        lease: Identity of the lease, or of the first of several.
        user: Holder of the lease: the owner of the file, whatever the line says.
        began: Start of the lease, in seconds since 1970.
        ended: End of the lease, in seconds since 1970.
        held: Seconds for which the devices were held; less than the difference for several leases.
        waited: Seconds for which the request waited.
        devices: The devices.
        request: Text of the request.
        note: Purpose.
        program: Name of the program.
        exit: Exit status of the command; None if unknown.
        leases: Number of leases in the sum.
        timeouts: Number of these leases that their time limit ended.
    """

    lease: str
    user: str
    began: float
    ended: float
    held: float
    waited: float
    devices: tuple[Used, ...]
    request: str = ""
    note: str = ""
    program: str = ""
    exit: int | None = None
    leases: int = 1
    timeouts: int = 0

    @property
    def device_seconds(self) -> float:
        """Seconds of the lease, times the number of devices; a share counts as a fraction of a device."""
        return self.held * sum(used.units for used in self.devices) / 10_000


def write(entry: JournalEntry, environ: Mapping[str, str] | None = None) -> bool:
    """Append a line to the journal of this user: to the first possible file of several, which is made if missing.

    Args:
        entry: The ended lease.
        environ: The environment, whose ``XDG_STATE_HOME`` or ``HOME`` says where the user's own journal is; the
            environment of this process when None.

    Returns:
        Whether the line was written. False for a line over 16 KiB, or if no file can be written.
    """
    line = _line(entry)
    if len(line) > _LONGEST_LINE:
        return False
    try:
        for path, mode in _own_files(os.environ if environ is None else environ):
            if _append(path, line, mode):
                return True
    except (OSError, ValueError):
        pass
    return False


def read(environ: Mapping[str, str] | None = None, *, since: float = 0.0) -> Iterator[JournalEntry]:
    """Read the journals that this user may see: the machine's files, and the user's own.

    Files that cannot be read, and lines that are no lease, are skipped. Leases come in the order of the files.

    Args:
        environ: As for :func:`write`.
        since: Skip leases that ended before, in seconds since 1970.
    """
    for path in _all_files(os.environ if environ is None else environ):
        yield from _entries(path, since)


def _line(entry: JournalEntry) -> bytes:
    """Encode an entry as a line of JSON, with rounded times and at most 128 devices."""
    words = {
        "v": VERSION,
        "lease": entry.lease,
        "began": round(entry.began, 3),
        "ended": round(entry.ended, 3),
        "held": round(entry.held, 3),
        "waited": round(entry.waited, 3),
        "devices": list(map(_words, entry.devices[:_MOST_DEVICES])),
        "request": clean(entry.request),
        "note": clean(entry.note),
        "program": clean(entry.program),
        "exit": entry.exit,
        "leases": entry.leases,
        "timeouts": entry.timeouts,
    }
    return json.dumps(words).encode() + b"\n"


def _words(used: Used) -> list[Any]:
    """Encode a device, with its utilization if known."""
    held = [used.device, used.type, used.units]
    if not used.observed and used.memory_peak_bytes is None:
        return held
    busy = None if used.utilization is None else round(used.utilization, 4)
    return [*held, round(used.observed, 3), busy, round(used.idle, 3), used.memory_peak_bytes]


def _shared() -> bool:
    """Return whether the machine's directory is fit: root owns it, and no user can remove files of other users."""
    try:
        found = os.stat(MACHINE_DIRECTORY, follow_symlinks=False)
    except OSError:
        return False
    sticky = not found.st_mode & (stat.S_IWOTH | stat.S_IWGRP) or found.st_mode & stat.S_ISVTX
    return stat.S_ISDIR(found.st_mode) and found.st_uid in (0, os.stat("/").st_uid) and bool(sticky)


def own_file(environ: Mapping[str, str]) -> str:
    """Return the path of the user's own journal; empty if the environment names no directory for it."""
    directory = user_directory("XDG_STATE_HOME", ".local/state", environ)
    return f"{directory}/journal.jsonl" if directory else ""


def _own_files(environ: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the possible files for this user's lines, best first, each with the mode of a new file.

    The directory of the user's own file is made before its path is yielded.

    Raises:
        OSError: When that directory cannot be made.
    """
    if _shared() and os.access(MACHINE_DIRECTORY, os.W_OK):
        number = outside(os.geteuid())
        for place in range(_PLACES):  # another user may have made a file with this user's name
            yield f"{MACHINE_DIRECTORY}/{number}{f'-{place}' * bool(place)}.jsonl", 0o644
    own = own_file(environ)
    if own:
        os.makedirs(os.path.dirname(own), mode=0o700, exist_ok=True)
        yield own, 0o600


def _all_files(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the paths of possible journals: the machine's, then the user's own, the older file first."""
    if _shared():
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(MACHINE_DIRECTORY)):
                if name.endswith((".jsonl", ".jsonl.1")):
                    yield f"{MACHINE_DIRECTORY}/{name}"
    own = own_file(environ)
    if own:
        yield from (f"{own}.1", own)


def _append(path: str, line: bytes, mode: int) -> bool:
    """Append a line to a file of this user; a full file is renamed first.

    Returns:
        False if the file cannot be opened, is not regular, or belongs to another user, or if only a part was written.

    Raises:
        OSError: When the write fails.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, mode)
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return False
        if found.st_size >= MOST_BYTES:  # another process may have renamed the file since it was opened
            _put_aside(path, fd)
            return _append(path, line, mode) if _other(path, found) else os.write(fd, line) == len(line)
        return os.write(fd, line) == len(line)
    finally:
        os.close(fd)


def _put_aside(path: str, fd: int) -> None:
    """Rename a full file to ``.1``, unless another process is doing so, or has done so; a failure is ignored."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _other(path, os.fstat(fd)):
            os.rename(path, f"{path}.1")
    except OSError:
        return


def _other(path: str, known: os.stat_result) -> bool:
    """Return whether a path leads to another file than before, or to none."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return True
    return (found.st_dev, found.st_ino) != (known.st_dev, known.st_ino)


def _entries(path: str, since: float) -> Iterator[JournalEntry]:
    """Yield the leases of a file that ended at ``since`` or later; none if the file cannot be opened.

    At most 16 MiB are read, and the lines count for the owner of the file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return
        user = user_name(found.st_uid)
        left = 2 * MOST_BYTES  # a file of another user may grow without end
        while left > 0 and (line := file.readline(_LONGEST_LINE + 1)):
            left -= len(line)
            entry = _entry(line, user)
            if entry is not None and entry.ended >= since:
                yield entry


def _entry(line: bytes, user: str) -> JournalEntry | None:
    """Decode a line, of any writer; None for anything but a lease. Implausible optional values are left out."""
    words = read_object(line)
    if words.get("v") != VERSION:
        return None
    times = [read_number(words.get(name)) for name in ("began", "ended", "held", "waited")]
    if None in times:
        return None
    began, ended, held, waited = (float(each or 0) for each in times)
    status = words.get("exit")
    leases = _count(words.get("leases")) or 1
    return JournalEntry(
        lease=clean(words.get("lease")),
        user=user,
        began=began,
        ended=max(began, ended),
        held=held,
        waited=waited,
        devices=tuple(_used(words.get("devices"))),
        request=clean(words.get("request")),
        note=clean(words.get("note")),
        program=clean(words.get("program")),
        exit=status if type(status) is int and abs(status) < 1 << 31 else None,
        leases=leases,
        timeouts=min(_count(words.get("timeouts")), leases),
    )


def _used(value: Any) -> Iterable[Used]:
    """Decode the devices of a line, 128 at most; implausible devices are skipped."""
    for each in value[:_MOST_DEVICES] if isinstance(value, list) else ():
        if isinstance(each, list) and len(each) >= _HELD and type(each[2]) is int and 0 < each[2] <= 10_000:  # noqa: PLR2004
            held = Used(device=clean(each[0]), type=clean(each[1]), units=each[2])
            yield replace(held, **_fared(*each[_HELD:])) if len(each) == _FARED else held


def _fared(observed: object, utilization: object, idle: object, memory: object) -> dict[str, Any]:
    """Decode the utilization of a device as fields of :class:`Used`; implausible values are left out."""
    found: dict[str, Any] = {}
    seconds, busy, stood = read_number(observed), _share(utilization), read_number(idle)
    if seconds and busy is not None and stood is not None:
        found = {"observed": seconds, "utilization": busy, "idle": min(stood, seconds)}
    if type(memory) is int and 0 <= memory < 1 << 60:
        found["memory_peak_bytes"] = memory
    return found


def _count(value: object) -> int:
    """Return a plausible positive number; 0 for anything else."""
    return value if type(value) is int and 0 < value < 1 << 40 else 0


def _share(value: object) -> float | None:
    """Return a number from 0 to 1; None for anything else."""
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= 1 else None
