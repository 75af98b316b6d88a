"""The mark of a lease: a process and every descendant carry it, whatever they close, clear or leave.

A mark is the hard limit ``RLIMIT_LOCKS``. Linux has not enforced this limit since 2.4.25, but still keeps 64 bits of it
for each process, copies them on fork, keeps them over exec, and lets no process without ``CAP_SYS_RESOURCE`` raise
them again (``setrlimit(2)``). ``/proc/PID/limits`` shows them to every user. So no descendant drops a mark by closing
descriptors, clearing its environment, opening a session or losing its parents.

The 63 bits are three fields of 21. A process without a mark has "unlimited". Each mark fills one more field, and ones
follow: unlimited > A|ones|ones > A|B|ones > A|B|C. A mark that is drawn inside another mark is lower, as the kernel
demands, and begins with the outer mark: a process that carries A|B carries A.
"""

from __future__ import annotations

import os
import resource
import time
from _thread import allocate_lock
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache

from anyaccel.linux import process
from anyaccel.linux.fork import renew_in_child

Mark = tuple[int, ...]
"""The fields of a mark, one to three; empty for none."""

_LOCKS = 10  # RLIMIT_LOCKS, which Python does not name
_BITS, _LEVELS = 21, 3
_ONES = (1 << _BITS) - 1
_ALL = (1 << _BITS * _LEVELS) - 1
_LINE = b"Max file locks"
_ROUNDS = 100
"""Listings of one scan until it gives up, because processes fork faster than it can follow."""
_FASTEST_FORK = 2e-6
"""Least seconds of a fork, over all processors: bounds how soon the process ids can wrap."""
_SCAN_SECONDS = 60.0
"""How long this process relies on its last scan for living marks."""

_lock = renew_in_child(allocate_lock())
_of_process: tuple[int, Mark] = (0, ())
_scan: tuple[float, frozenset[Mark]] = (float("-inf"), frozenset())
_drawn: set[Mark] = set()
"""Marks drawn since the last scan, which a process may carry soon."""


def own() -> Mark | None:
    """Return the mark of this process; None when this process can carry none.

    A process can carry no mark where an administrator has set the limit, or the kernel does not keep the limit.
    """
    return parse(resource.prlimit(0, _LOCKS)[1]) if _supported() else None


@cache
def _supported() -> bool:
    """Return whether the kernel lets this process set the limit to the present value; some kernels refuse."""
    try:
        resource.prlimit(0, _LOCKS, resource.prlimit(0, _LOCKS))
    except (OSError, ValueError):
        return False
    return True


def obstacle() -> str:
    """Return the reason why descendants of this process cannot be marked; empty when they can."""
    if not _supported():
        return "this kernel does not let the limit RLIMIT_LOCKS be set"
    mark = own()
    if mark is None:
        return f"the hard limit RLIMIT_LOCKS is {resource.prlimit(0, _LOCKS)[1]}, which an administrator has set"
    if len(mark) == _LEVELS:
        return f"this process was started inside of {_LEVELS} leases already, which is the most"
    return ""


def parse(value: int) -> Mark | None:
    """Return the mark in a hard limit: empty for "unlimited", None for a number that is no mark."""
    if not 0 <= value < _ALL:
        return ()
    mark: Mark = ()
    for level in range(_LEVELS):
        field = value >> _BITS * (_LEVELS - 1 - level) & _ONES
        if field == _ONES:
            break
        mark += (field,)
    return mark if mark and 0 not in mark and limit(mark) == value else None


def limit(mark: Mark) -> int:
    """Return the hard limit that stands for a mark, the inverse of :func:`parse`; for no mark, "unlimited"."""
    value = _ALL
    for level, field in enumerate(mark):
        value -= (_ONES - field) << _BITS * (_LEVELS - 1 - level)
    return value


def draw(used: Collection[Mark] = (), *, inside: Mark | None = None) -> Mark:
    """Draw a random mark without a living carrier; the mark is put on no process.

    A scan of all processes takes a system call for each, so a scan serves all draws of a minute, and forked children.
    A carrier that is younger than the scan is missed; the ledger passes the marks of living leases in ``used``.

    Args:
        used: Marks of other leases, which are not drawn either.
        inside: The mark that the new mark begins with; the mark of this process when None.

    Returns:
        The mark. Empty where this process can carry none: three fields are the most, and the limit of an administrator
        stays unchanged.
    """
    global _scan, _drawn
    outer = own() if inside is None else inside
    if outer is None or len(outer) == _LEVELS:
        return ()
    now = time.monotonic()
    if now - _scan[0] > _SCAN_SECONDS:
        living = _living()  # without the lock: a fork must not find it taken for so long
        with _lock:
            _scan, _drawn = (now, living | _drawn), set()
    with _lock:
        while True:
            mark = (*outer, 1 + int.from_bytes(os.urandom(4)) % (_ONES - 1))  # neither 0 nor all ones
            if not any(mark in known for known in (used, _scan[1], _drawn)):
                _drawn.add(mark)
                return mark


def _living() -> frozenset[Mark]:
    """Return the marks of the visible processes, zombies included, with the outer marks that each begins with."""
    found: set[Mark] = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        value = hard_limit(int(name))
        mark = None if value is None else parse(value)
        while mark:
            found.add(mark)
            mark = mark[:-1]
    return frozenset(found)


def draw_for_process(used: Collection[Mark] = ()) -> Mark:
    """Return the mark of the leases that this process takes for itself; :func:`put` sets it.

    The first call of a process draws the mark, and later calls return the same. A forked child draws its own.

    Args:
        used: Marks of other leases; they count at the first call only.

    Returns:
        The mark; empty if this process can carry none.
    """
    global _of_process  # noqa: PLW0603 -- a process cannot change its mark
    if _of_process[0] != os.getpid():  # a fork has its parent's
        drawn = draw(used)
        with _lock:
            if _of_process[0] != os.getpid():
                _of_process = os.getpid(), drawn
    return _of_process[1]


def put(mark: Mark) -> None:
    """Set a mark on this process and its future descendants, for good; does nothing if empty, or carried already.

    Raises:
        OSError, ValueError: When the kernel refuses.
    """
    if mark and not carried(mark):  # an inner mark stands for the outer one as well
        resource.prlimit(0, _LOCKS, (limit(mark), limit(mark)))


def carried(mark: Mark) -> bool:
    """Return whether this process carries a mark, or a mark inside it; False for an empty mark."""
    return _says(hard_limit(os.getpid()), mark)


def hidden() -> bool:
    """Return whether ``/proc`` hides processes of other users (``hidepid``), or cannot be read."""
    return not (_read(1) and _read(os.getpid()))


def carriers(marks: Iterable[Mark]) -> Mapping[Mark, tuple[int, ...]] | None:
    """Find the living carriers of the given marks, or of marks inside them, by a single scan of all processes.

    Returns:
        Process ids by mark; a mark that no process carries has no entry. None when processes start faster than the scan
        can follow, or ``/proc`` is of another pid namespace.
    """
    found: dict[Mark, tuple[int, ...]] = {}

    def visit(pid: int, mark: Mark) -> None:
        if pid not in found.get(mark, ()):
            found[mark] = (*found.get(mark, ()), pid)

    return found if visit_carriers(marks, visit) and process.sees_itself() else None


def visit_carriers(marks: Iterable[Mark], visit: Callable[[int, Mark], None]) -> bool:
    """Scan all processes for living carriers of the given marks.

    A carrier was forked by a carrier. So a complete scan without a carrier is final. The scan is complete once a
    listing shows no unseen process. ``/proc`` lists a process after its child only if process ids wrapped in between;
    then the scan lists the processes once more. A process id that was reused counts as another process.

    Args:
        marks: The marks; no process carries an empty one.
        visit: Called with a process id and a mark as soon as a carrier is found: a process that forks and exits all the
            time has another id when the scan is over. Older processes come first: a shell must get its signal before
            the commands that it waits for, or it would run the next command.

    Returns:
        Whether the scan is complete: processes may start faster than the scan can follow.
    """
    ranges = {mark: _range(mark) for mark in marks if mark}
    seen: set[tuple[str, int]] = set()
    before = None
    for _ in range(_ROUNDS if ranges else 0):
        began = _moment()
        new = set(_listed()) - seen
        if not new and before is not None and _rose(before, _moment()):
            return True
        before = began
        seen |= new
        for pid in sorted(int(name) for name, _ in new):
            value = hard_limit(pid)
            if value is None or not 0 <= value < _ALL:
                continue
            for mark, (low, high) in ranges.items():
                if low <= value <= high and not process.gone(pid, 0):
                    visit(pid, mark)
    return not ranges


def _listed() -> Iterator[tuple[str, int]]:
    """Yield each process by number and by inode in ``/proc``, which differs when the number is reused."""
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name[0] <= "9":
                yield entry.name, entry.inode()


def _moment() -> tuple[int, float]:
    """Return the last process id that the kernel assigned, and the time by the monotonic clock."""
    return _number("/proc/loadavg"), time.monotonic()


def _rose(before: tuple[int, float], now: tuple[int, float]) -> bool:
    """Return whether process ids surely rose from one moment to a later one without a wrap; False in doubt."""
    seconds = now[1] - before[1]  # long where this process was stopped: all may have been given out once
    few = seconds < 32768 * _FASTEST_FORK or seconds < _number("/proc/sys/kernel/pid_max") * _FASTEST_FORK
    return few and now[0] >= before[0]


def carries(pid: int, mark: Mark) -> bool:
    """Return whether a process is alive and carries a mark, or a mark inside; False for a process that is hidden."""
    return _says(hard_limit(pid), mark) and not process.gone(pid, 0)


def _says(value: int | None, mark: Mark) -> bool:
    """Return whether a hard limit stands for a mark, or for an inner mark."""
    if value is None or not mark:
        return False
    low, high = _range(mark)
    return low <= value <= high


def _range(mark: Mark) -> tuple[int, int]:
    """Return the lowest and the highest hard limit of carriers of a mark."""
    high = limit(mark)
    return high - (1 << _BITS * (_LEVELS - len(mark))) + 1, high


def hard_limit(pid: int) -> int | None:
    """Return the hard limit of a process; None for a process that is gone or hidden.

    "Unlimited" is -1, and so is a limit of another user's process that is no number.
    """
    try:
        return resource.prlimit(pid, _LOCKS)[1]
    except ProcessLookupError:
        return None
    except OSError:  # another user's: the file is open to all, but takes ten times as long as the system call
        text = _read(pid)
    if not text:
        return None
    return int(text) if text.isdigit() else -1


def _read(pid: int) -> bytes:
    """Return the hard limit of a process as ``/proc`` writes it; empty when the process is gone or hidden."""
    try:
        with open(f"/proc/{pid}/limits", "rb", buffering=0) as file:
            text = file.read(4096)
    except process.UNSEEN:
        return b""
    start = text.find(_LINE)
    words = text[start + len(_LINE) :].split(None, 2) if start >= 0 else []
    return words[1] if len(words) > 1 else b""


def _number(path: str) -> int:
    """Return the last number in a file of the kernel; 0 without the file.

    Raises:
        ValueError: When the last word is no number.
    """
    try:
        with open(path, "rb") as file:
            return int(file.read().split()[-1])
    except OSError:
        return 0
