"""The journal: one line of facts for each ended lease, for reports.

A line is one JSON object, appended by one write to a file of the user's own. If the administrator has made the
machine's directory, the file is there, so that a report sees every user; the user of a line is the owner of the file,
whatever the line says. Leases in a state directory that the environment named are no use of the machine, and have their
lines in the user's own journal. No error here fails a run: a line that cannot be written is lost.

If fair shares count use over time, each line in the machine's directory also has the usage of its user at the end of
the lease, so that a reader needs the last line of each file only: see :func:`read_usage`. A user can falsify the own
usage, by a file that says less, but no other user's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping

from anyaccel import configuration
from anyaccel.configuration import user_directory
from anyaccel.errors import ConfigurationError
from anyaccel.ledger.entries import read_number, read_object, read_value
from anyaccel.linux import process, user_name
from anyaccel.model import UNITS_PER_DEVICE, Value, replace
from anyaccel.policy import Usage
from anyaccel.text import LONGEST_TEXT, clean

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
_TAIL_BYTES = 1 << 18  # read for the usage: mostly of the last line, and of all lines before the half-life was set
_LOCK_TRIES, _LOCK_PAUSE = 20, 0.002
_PLACES = 10
_MACHINE_FILE = r"((?P<user>[0-9]{1,10})(-[0-9])?\.jsonl)(\.1)?"
_MOST_DEVICES = 128


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
        """Whether the device was idle for more than half of the observed time; False if nothing was observed."""
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
        """The seconds in ``held``, times the number of devices; a share counts as a fraction of a device."""
        return self.held * sum(used.units for used in self.devices) / 10_000


def write(entry: JournalEntry, environ: Mapping[str, str] | None = None, *, shared: bool = True) -> bool:
    """Append a line to the journal of this user: to the first possible file of several, which is made if missing.

    In the machine's directory the line has the user's usage, too, if the machine counts past use. A full file is put
    aside first. No error is raised.

    Args:
        entry: The ended lease.
        environ: The environment, whose ``XDG_STATE_HOME`` or ``HOME`` says where the user's own journal is; the
            environment of this process when None.
        shared: Whether the line may go to the machine's directory.

    Returns:
        Whether the line was written. False for a line over 16 KiB, if no file can be opened, or if a write fails. After
        an OSError of a write, no other file is tried.
    """
    try:
        for path, mode in _own_files(os.environ if environ is None else environ, shared=shared):
            counted = count_half_life() if os.path.dirname(path) == MACHINE_DIRECTORY else None
            if _append(path, entry, mode, counted):
                return True
    except (OSError, ValueError):
        pass
    return False


def count_half_life() -> float | None:
    """Return the half-life in seconds with which the machine counts past use; None if it does not.

    A faulty configuration of the machine counts as none.
    """
    try:
        found: float | None = configuration.machine().get("queue.half_life")
    except ConfigurationError:
        return None
    return found


def read_usage(half_life: float) -> dict[int, Usage]:
    """Read the usage by ended leases of each user, by number, from the last lines of the machine's files.

    Only files that every user may read count, and only those of the user in the name: so each process finds the same.
    The usage in several files of a user is added; users without usage are left out. Empty if the machine's directory is
    missing, not fit (see :func:`is_machine_wide`) or unreadable.

    Args:
        half_life: The half-life in seconds.

    Returns:
        The usage at the end of each user's last lease, with that time in seconds since 1970.
    """
    found: dict[int, Usage] = {}
    if not is_machine_wide():
        return found
    with contextlib.suppress(OSError):
        names = filter(None, (re.fullmatch(_MACHINE_FILE, name) for name in os.listdir(MACHINE_DIRECTORY)))
        for name, user in sorted({(match[1], int(match["user"])) for match in names}):
            usage = _file_usage(f"{MACHINE_DIRECTORY}/{name}", user, half_life)
            if user in found:  # in two files, since another user had taken the first name for a while
                usage = found[user].plus(usage, half_life)
            if usage.seconds:
                found[user] = usage
    return found


def read(environ: Mapping[str, str] | None = None, *, since: float = 0.0) -> Iterator[JournalEntry]:
    """Read the journals that this user may see: the machine's files, and the user's own; lazily.

    Files that cannot be opened, and lines that are no lease, are skipped; of a file, the first 16 MiB are read. Leases
    come in the order of the files: of the machine's, by name; of the user's own, the older first. An OSError of reading
    an open file passes.

    Args:
        environ: As for :func:`write`.
        since: Skip leases that ended before, in seconds since 1970.
    """
    for path in _all_files(os.environ if environ is None else environ):
        yield from _entries(path, since)


_usages: dict[tuple[str, float], tuple[tuple[int, ...], Usage]] = {}
"""Usage by file and half-life, with the identity of the file. Each look of a waiting process needs each user's: of 20
users this takes 0.25 ms, and 3.6 ms without this cache."""


def _file_usage(path: str, user: int, half_life: float) -> Usage:
    """Return the usage at the end of a file of a user; if that file does not count, of the file that was put aside.

    A file counts, also without usage, if not empty, regular, readable for every user, and of the given user. Without
    such a file the usage is 0. The result for each file is remembered until that file changes.

    Args:
        path: The file.
        user: The number of the user to whom the file must belong.
        half_life: The half-life in seconds.
    """
    for each in (path, f"{path}.1"):
        with contextlib.suppress(OSError):
            found = os.stat(each, follow_symlinks=False)
            known = _usages.get((each, half_life))
            if known is not None and known[0] == _identity(found):
                return known[1]
            fd = os.open(each, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                found = os.fstat(fd)
                fit = (
                    stat.S_ISREG(found.st_mode)
                    and found.st_mode & stat.S_IROTH
                    and process.find_outer_user(found.st_uid) == user
                )
                if fit and found.st_size:
                    usage = _last_usage(fd, found.st_size, half_life)
                    _usages[each, half_life] = _identity(found), usage
                    return usage
            finally:
                os.close(fd)
    return Usage()


def _identity(found: os.stat_result) -> tuple[int, ...]:
    """Return numbers that change with the content, the owner or the permissions of a file."""
    return found.st_dev, found.st_ino, found.st_ctime_ns, found.st_size


def _last_usage(fd: int, size: int, half_life: float) -> Usage:
    """Return the usage after the last line of a file.

    The last line with a total for this half-life counts, and each lease after that. Without such a line in the last
    256 KiB, the leases there count; without leases the usage is 0.
    """
    usage, newer = Usage(), []
    for line in reversed(os.pread(fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).splitlines()):
        words = read_object(line)
        if (total := _total(words.get("used"), half_life)) is not None:
            usage = total
            break
        newer.append(words)
    for words in reversed(newer):
        if (entry := _entry(words, "")) is not None:
            usage = _with_entry(usage, entry, half_life)
    return usage


def _with_entry(usage: Usage, entry: JournalEntry, half_life: float) -> Usage:
    """Return a user's usage with another ended lease, at the later of the two times; a future end counts as now."""
    devices = sum(used.units for used in entry.devices) / 10_000
    return usage.with_lease(devices, entry.held, min(entry.ended, time.time()), half_life)


def _total(value: object, half_life: float) -> Usage | None:
    """Decode the usage in a line: a list of half-life, seconds and time since 1970. A time to come counts as now.

    None for anything else, or for another half-life.
    """
    if not isinstance(value, list) or len(value) != 3 or value[0] != half_life:  # noqa: PLR2004
        return None
    seconds, at = read_number(value[1]), read_number(value[2])
    return None if seconds is None or at is None else Usage(seconds=seconds, at=min(at, time.time()))


def _line(entry: JournalEntry, usage: Usage | None = None, half_life: float | None = None) -> bytes:
    """Encode an entry as a line of JSON, with at most 128 devices, and the user's usage if given.

    Request, note and program are cut to 250 characters; unprintable ones are replaced by :func:`read`. The entry's user
    is left out.
    """
    words: dict[str, Any] = {"v": VERSION}
    words |= {name: getattr(entry, name) for name in JournalEntry._fields if name != "user"}
    words["devices"] = list(map(_words, entry.devices[:_MOST_DEVICES]))
    for name in ("request", "note", "program"):
        words[name] = str(words[name] or "")[:LONGEST_TEXT]  # callers without a type checker may note any value
    if usage is not None:
        words["used"] = [half_life, round(usage.seconds, 3), round(usage.at, 3)]
    return json.dumps(words).encode() + b"\n"


def _words(used: Used) -> list[Any]:
    """Encode a device as a list, in the order of the fields of :class:`Used`, rounded; None for what is unknown."""
    busy = None if used.utilization is None else round(used.utilization, 4)
    observed, idle = round(used.observed, 3), round(used.idle, 3)
    return [used.device, used.type, used.units, observed, busy, idle, used.memory_peak_bytes]


def is_machine_wide() -> bool:
    """Return whether the machine's directory exists and is fit; False for a symbolic link.

    Fit means that the owner is root or the owner of ``/``, and that no user can remove files of other users.
    """
    try:
        found = os.stat(MACHINE_DIRECTORY, follow_symlinks=False)
    except OSError:
        return False
    sticky = not found.st_mode & (stat.S_IWOTH | stat.S_IWGRP) or found.st_mode & stat.S_ISVTX
    return stat.S_ISDIR(found.st_mode) and found.st_uid in (0, os.stat("/").st_uid) and bool(sticky)


def own_file(environ: Mapping[str, str]) -> str:
    """Return the path of the user's own journal, existing or not; empty if ``environ`` names no directory."""
    directory = user_directory("XDG_STATE_HOME", ".local/state", environ)
    return f"{directory}/journal.jsonl" if directory else ""


def _own_files(environ: Mapping[str, str], *, shared: bool) -> Iterator[tuple[str, int]]:
    """Yield the possible files for this user's lines, best first, each with the mode of a new file.

    In the machine's directory, if ``shared``, fit and writable, ten names are possible. The user's own file is the
    last, unless ``environ`` names no directory for it; its directory is made before its path is yielded.

    Raises:
        OSError: When that directory cannot be made.
    """
    if shared and is_machine_wide() and os.access(MACHINE_DIRECTORY, os.W_OK):
        number = process.find_outer_user(os.geteuid())
        for place in range(_PLACES):  # another user may have made a file with this user's name
            yield f"{MACHINE_DIRECTORY}/{number}{f'-{place}' * bool(place)}.jsonl", 0o644
    own = own_file(environ)
    if own:
        os.makedirs(os.path.dirname(own), mode=0o700, exist_ok=True)
        yield own, 0o600


def _all_files(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the paths of journals: the machine's by name, then the user's own, of these the older first.

    The machine's are left out if its directory is unfit or unreadable. The user's own files may be missing; without a
    directory in ``environ``, there are none.
    """
    if is_machine_wide():
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(MACHINE_DIRECTORY)):
                if name.endswith((".jsonl", ".jsonl.1")):
                    yield f"{MACHINE_DIRECTORY}/{name}"
    own = own_file(environ)
    if own:
        yield from (f"{own}.1", own)


def _append(path: str, entry: JournalEntry, mode: int, half_life: float | None) -> bool:
    """Append an entry to a file of this user, made if missing; a full file is renamed to ``.1`` first, if possible.

    The rest of an earlier write that was cut off gets a line of its own. With a half-life, the line gets the user's
    usage with this entry, and the file is locked until the return; after 40 ms of waiting, no lock is taken.

    Args:
        path: The file.
        entry: The entry.
        mode: Permissions of a new or empty file, whatever the umask is.
        half_life: The half-life in seconds of the usage in the line; None for a line without usage.

    Returns:
        False if the file cannot be opened, is not regular, or belongs to another user, if the line is over 16 KiB, or
        if only a part was written.

    Raises:
        OSError: When the write fails.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, mode)
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return False
        locked = (half_life is not None or found.st_size >= MOST_BYTES) and _lock_briefly(fd)
        found = os.fstat(fd)
        if locked and found.st_size >= MOST_BYTES:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(path, follow_symlinks=False), found):  # else renamed since it was opened
                    os.rename(path, f"{path}.1")
                    return _append(path, entry, mode, half_life)
        if not found.st_size and stat.S_IMODE(found.st_mode) != mode:
            os.fchmod(fd, mode)
        usage = None
        if half_life is not None:
            usage = _with_entry(_file_usage(path, process.find_outer_user(found.st_uid), half_life), entry, half_life)
        line = _line(entry, usage, half_life)
        if len(line) > _LONGEST_LINE:
            return False
        if found.st_size and os.pread(fd, 1, found.st_size - 1) != b"\n":
            line = b"\n" + line  # an earlier write was cut off, as on a full disk: its rest must not spoil this line
        return os.write(fd, line) == len(line)
    finally:
        with contextlib.suppress(OSError):  # as on a file system without locks
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has a copy
        os.close(fd)


def _lock_briefly(fd: int) -> bool:
    """Lock a file until its close, so that no other process of the user adds to the same usage, or renames the file.

    Every user who can read the file can lock it: so a lock that stays must not keep a lease from its end. Without the
    lock, the usage may miss a lease that ends at this moment.

    Returns:
        Whether the file is locked; False after 40 ms.
    """
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(_LOCK_PAUSE)
        else:
            return True
    return False


def _entries(path: str, since: float) -> Iterator[JournalEntry]:
    """Yield the leases of a file that ended at ``since`` or later; none of an irregular or unreadable file.

    The first 16 MiB are read; a line over 16 KiB is skipped. A file that cannot be read any further, as after a fault
    of the disk, counts as ended there. The lines count for the owner of the file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return
    with contextlib.suppress(OSError), contextlib.ExitStack() as rest:  # the files of other users still count
        rest.callback(os.close, fd)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return
        file = rest.enter_context(open(fd, "rb", closefd=False))  # not before: it refuses a directory
        user = user_name(found.st_uid)
        left = 2 * MOST_BYTES  # a file of another user may grow without end
        while left > 0 and (line := file.readline(_LONGEST_LINE + 1)):
            left -= len(line)
            words = read_object(line)
            if _is_since(words, since) and (entry := _entry(words, user)) is not None:
                yield entry


def _is_since(words: Mapping[str, Any], since: float) -> bool:
    """Return whether a line that was not checked yet ended at ``since`` or later; False if a time is implausible.

    A check of all values takes eight times as long as the parsing, and most lines of a journal are older.
    """
    began, ended = (read_number(words.get(name)) for name in ("began", "ended"))
    return began is not None and ended is not None and max(began, ended) >= since


def _entry(words: Mapping[str, Any], user: str) -> JournalEntry | None:
    """Decode a line, of any writer; None for another version, or if a value is implausible.

    An end before the start counts as the start, and an idle time is cut to the observed time. Texts are cut to 250
    characters.
    """
    listed = words.get("devices")
    rows = (each for each in listed[:_MOST_DEVICES] if isinstance(each, list)) if isinstance(listed, list) else ()
    devices = [dict(zip(Used._fields, row, strict=False)) for row in rows]
    entry = read_value(JournalEntry, {**words, "user": user, "devices": devices})
    if entry is None or words.get("v") != VERSION or not _is_plausible(entry):
        return None
    used = (
        replace(used, device=clean(used.device), type=clean(used.type), idle=min(used.idle, used.observed))
        for used in entry.devices
    )
    texts = {name: clean(getattr(entry, name)) for name in ("lease", "request", "note", "program")}
    return replace(entry, ended=max(entry.began, entry.ended), devices=tuple(used), **texts)


def _is_plausible(entry: JournalEntry) -> bool:
    """Return whether the numbers of an entry are in their ranges: times below 2**40, at least one lease."""
    times: tuple[float, ...] = (entry.began, entry.ended, entry.held, entry.waited)
    for used in entry.devices:
        times += used.observed, used.idle
        share, memory = used.utilization or 0.0, used.memory_peak_bytes or 0
        if not (0 < used.units <= UNITS_PER_DEVICE and 0 <= share <= 1 and 0 <= memory < 1 << 60):
            return False
    counts = 0 <= entry.timeouts <= entry.leases < 1 << 40 and entry.leases > 0
    return counts and abs(entry.exit or 0) < 1 << 31 and all(0 <= each < 1 << 40 for each in times)
