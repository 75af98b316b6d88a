"""The mark: what a process and all that it starts carry, whatever they close, clear or leave.

A mark is the hard limit ``RLIMIT_LOCKS``. Linux has not enforced this limit since 2.4.25, but still keeps 64 bits of it
for each process, copies them on fork, keeps them over exec, and lets no process without ``CAP_SYS_RESOURCE`` raise
them again (``setrlimit(2)``). ``/proc/PID/limits`` shows them to every user. So no descendant drops a mark by closing
descriptors, clearing its environment, opening a session or losing its parents.

The 63 bits are three fields of 21. A process without a mark has "unlimited". Each mark fills one more field, and ones
follow: unlimited > A|ones|ones > A|B|ones > A|B|C. A mark that is drawn inside another one is lower, as the kernel
demands, and begins with it: who carries A|B carries A.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Collection, Iterable, Mapping
from functools import cache

from anyaccel.ledger import process

Mark = tuple[int, ...]
"""The fields of a mark, one to three; empty for none."""

_LOCKS = 10  # RLIMIT_LOCKS, which Python does not name
_BITS, _LEVELS = 21, 3
_ONES = (1 << _BITS) - 1
_ALL = (1 << _BITS * _LEVELS) - 1
_LINE = b"Max file locks"
_ROUNDS = 100
"""How often a look at all processes lists them anew before it gives up: they fork faster than it can look."""

_lock = threading.Lock()
_of_process: tuple[int, Mark] = (0, ())


def own() -> Mark | None:
    """The mark that this process carries; None when there can be none.

    That is so where the limit says something else, which an administrator has set, and where the kernel keeps no limit.
    """
    try:
        return parse(resource.prlimit(0, _LOCKS)[1]) if _supported() else None
    except OSError:
        return None


@cache
def _supported() -> bool:
    """Whether the kernel keeps the limit: there are some that refuse to set it to what it is."""
    try:
        resource.prlimit(0, _LOCKS, resource.prlimit(0, _LOCKS))
    except (OSError, ValueError):
        return False
    return True


def obstacle() -> str:
    """Say why what this process starts cannot be marked; empty when it can."""
    if not _supported():
        return "this kernel does not let the limit RLIMIT_LOCKS be set"
    mark = own()
    if mark is None:
        return f"the hard limit RLIMIT_LOCKS is {resource.prlimit(0, _LOCKS)[1]}, which an administrator has set"
    if len(mark) == _LEVELS:
        return f"this process was started inside of {_LEVELS} leases already, which is the most"
    return ""


def parse(value: int) -> Mark | None:
    """The mark that a hard limit says: empty for "unlimited"; None when it is no mark."""
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
    """The hard limit that says a mark."""
    value = _ALL
    for level, field in enumerate(mark):
        value -= (_ONES - field) << _BITS * (_LEVELS - 1 - level)
    return value


def draw(used: Collection[Mark] = (), *, inside: Mark | None = None) -> Mark:
    """Draw a mark at random.

    Args:
        used: Marks that must not be drawn: those of other leases.
        inside: The mark that it begins with; that of this process when None.

    Returns:
        The mark; empty where there can be none: three marks are the most, and an administrator's limit stays as it is.
    """
    outer = own() if inside is None else inside
    if outer is None or len(outer) == _LEVELS:
        return ()
    while True:
        mark = (*outer, 1 + int.from_bytes(os.urandom(4)) % (_ONES - 1))
        if mark not in used:
            return mark


def of_process(used: Collection[Mark] = ()) -> Mark:
    """The mark of the leases that this process takes for itself; drawn once, and put on the process by :func:`put`."""
    global _of_process  # noqa: PLW0603 -- a process cannot change its mark
    with _lock:
        if _of_process[0] != os.getpid():  # a fork has its parent's
            _of_process = os.getpid(), draw(used)
        return _of_process[1]


def put(mark: Mark) -> None:
    """Put a mark on this process and all that it will start, for good; nothing happens for an empty one."""
    if mark and not carried(mark):
        resource.prlimit(0, _LOCKS, (limit(mark), limit(mark)))


def carried(mark: Mark) -> bool:
    """Whether this process carries a mark."""
    return _says(hard_limit(os.getpid()), mark)


def hidden() -> bool:
    """Whether ``/proc`` hides processes of other users from this one (``hidepid``), or cannot be read at all."""
    return not (_read(1) and _read(os.getpid()))


def carriers(marks: Iterable[Mark]) -> Mapping[Mark, tuple[int, ...]] | None:
    """Find the living processes that carry one of some marks, by one look at all processes.

    A carrier was forked by a carrier. So a look that is complete and finds none is final. It is complete once a listing
    shows no process that was not looked at. A process is listed after its child only where process ids began anew in
    between; then it looks again.

    Returns:
        Process ids by mark, without marks that no process carries; None when processes start faster than it can look.
    """
    ranges = {mark: _range(mark) for mark in marks if mark}
    rounds = 0
    while ranges:
        before = _last_pid()
        seen: set[str] = set()
        found: dict[Mark, tuple[int, ...]] = {}
        while new := [name for name in os.listdir("/proc") if name[0] <= "9" and name not in seen]:
            seen.update(new)
            rounds += 1
            if rounds > _ROUNDS:
                return None
            for pid in map(int, new):
                value = hard_limit(pid)
                if value is None or not 0 <= value < _ALL:
                    continue
                for mark, (low, high) in ranges.items():
                    if low <= value <= high and not process.gone(pid, 0):
                        found[mark] = (*found.get(mark, ()), pid)
        if found or _last_pid() >= before:
            return found
    return {}


def carries(pid: int, mark: Mark) -> bool:
    """Whether a process is alive and carries a mark; a process that cannot be looked at does not count."""
    return _says(hard_limit(pid), mark) and not process.gone(pid, 0)


def _says(value: int | None, mark: Mark) -> bool:
    """Whether a hard limit says a mark, or one that was drawn inside it."""
    if value is None or not mark:
        return False
    low, high = _range(mark)
    return low <= value <= high


def _range(mark: Mark) -> tuple[int, int]:
    """The lowest and the highest limit of those who carry a mark."""
    high = limit(mark)
    return high - (1 << _BITS * (_LEVELS - len(mark))) + 1, high


def hard_limit(pid: int) -> int | None:
    """The hard limit of a process, -1 for "unlimited"; None when the process has gone or cannot be looked at."""
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
    """The hard limit as ``/proc`` writes it; empty when it cannot be read."""
    try:
        fd = os.open(f"/proc/{pid}/limits", os.O_RDONLY | os.O_CLOEXEC)
    except process.UNSEEN:
        return b""
    try:
        text = os.read(fd, 4096)
    except process.UNSEEN:
        return b""
    finally:
        os.close(fd)
    start = text.find(_LINE)
    words = text[start + len(_LINE) :].split(None, 2) if start >= 0 else []
    return words[1] if len(words) > 1 else b""


def _last_pid() -> int:
    """The process id that was given out last."""
    try:
        with open("/proc/loadavg", "rb") as file:
            return int(file.read().split()[-1])
    except OSError:
        return 0
