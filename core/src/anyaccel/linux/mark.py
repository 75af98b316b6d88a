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
"""How often a look at all processes lists them anew before it gives up: they fork faster than it can look."""
_FASTEST_FORK = 2e-6
"""Seconds that a fork takes at least, over all processors: until all process ids can have been given out once."""
_SEEN_SECONDS = 60.0
"""How long a pool relies on its last look at the marks of living processes."""

_lock = renew_in_child(allocate_lock())
_of_process: tuple[int, Mark] = (0, ())
_seen: tuple[float, frozenset[Mark]] = (float("-inf"), frozenset())
_drawn: set[Mark] = set()


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
    """Draw a mark at random that no living process carries, by one look at all processes.

    Args:
        used: Marks that must not be drawn either: those of other leases.
        inside: The mark that it begins with; that of this process when None.

    Returns:
        The mark; empty where there can be none: three marks are the most, and an administrator's limit stays as it is.
    """
    outer = own() if inside is None else inside
    if outer is None or len(outer) == _LEVELS:
        return ()
    return _draw(outer, used, _living())


def draw_often(used: Collection[Mark] = ()) -> Mark:
    """Draw a mark like :func:`draw`, but rely on earlier looks: for a pool, which starts many processes.

    The marks that were seen are kept, with those that were drawn since, and looked at anew once a minute.
    """
    global _seen, _drawn
    outer = own()
    if outer is None or len(outer) == _LEVELS:
        return ()
    now = time.monotonic()
    if now - _seen[0] > _SEEN_SECONDS:
        living = _living()  # without the lock: a fork must not find it taken for so long
        with _lock:
            _seen, _drawn = (now, living | _drawn), set()
    with _lock:
        mark = _draw(outer, used, _seen[1], _drawn)
        _drawn.add(mark)
    return mark


def _draw(outer: Mark, *used: Collection[Mark]) -> Mark:
    while True:
        mark = (*outer, 1 + int.from_bytes(os.urandom(4)) % (_ONES - 1))
        if not any(mark in each for each in used):
            return mark


def _living() -> frozenset[Mark]:
    """The marks that living processes carry, each with the outer ones that it begins with."""
    found: set[Mark] = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        value = hard_limit(int(name))
        mark = None if value is None else parse(value)
        while mark:
            found.add(mark)
            mark = mark[:-1]
    return frozenset(found)


def of_process(used: Collection[Mark] = ()) -> Mark:
    """The mark of the leases that this process takes for itself; drawn once, and put on the process by :func:`put`."""
    global _of_process  # noqa: PLW0603 -- a process cannot change its mark
    if _of_process[0] != os.getpid():  # a fork has its parent's
        drawn = draw(used)
        with _lock:
            if _of_process[0] != os.getpid():
                _of_process = os.getpid(), drawn
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

    Returns:
        Process ids by mark, without marks that no process carries; None when processes start faster than it can look.
    """
    found: dict[Mark, tuple[int, ...]] = {}

    def tell(pid: int, mark: Mark) -> None:
        if pid not in found.get(mark, ()):
            found[mark] = (*found.get(mark, ()), pid)

    return found if look(marks, tell) else None


def look(marks: Iterable[Mark], tell: Callable[[int, Mark], None]) -> bool:
    """Look at all processes for those that are alive and carry one of some marks.

    A carrier was forked by a carrier. So a look that is complete and finds none is final. It is complete once a listing
    shows no process that was not looked at. A process is listed after its child only where process ids began anew in
    between: then it lists them once more. A number that was given out again is another process to it.

    Args:
        marks: The marks; an empty one is carried by none.
        tell: Called with each process and a mark that it carries, as soon as it is found: what forks and ends all the
            time has another process id when the look is over. Older ones come first: a shell that is to end must not
            go on, since what it waits for has been ended before.

    Returns:
        Whether the look came to an end: processes may start faster than it can look.
    """
    ranges = {mark: _range(mark) for mark in marks if mark}
    seen: set[tuple[str, int]] = set()
    before = None
    for _ in range(_ROUNDS if ranges else 0):
        began = _Moment()
        new = set(_listed()) - seen
        if not new and before is not None and before.precedes_in_order(_Moment()):
            return True
        before = began
        seen |= new
        for pid in sorted(int(name) for name, _ in new):
            value = hard_limit(pid)
            if value is None or not 0 <= value < _ALL:
                continue
            for mark, (low, high) in ranges.items():
                if low <= value <= high and not process.gone(pid, 0):
                    tell(pid, mark)
    return not ranges


def _listed() -> Iterator[tuple[str, int]]:
    """Every process by its number and by its inode in ``/proc``, which the next one of the same number does not get."""
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name[0] <= "9":
                yield entry.name, entry.inode()


class _Moment:
    """A moment, by the clock and by the process id that was given out last."""

    def __init__(self) -> None:
        self._pid = _number("/proc/loadavg")
        self._time = time.monotonic()

    def precedes_in_order(self, later: _Moment) -> bool:
        """Return whether process ids have risen from this moment to a later one, without beginning anew."""
        if later._pid < self._pid:
            return False
        seconds = later._time - self._time  # long where this process was stopped: all may have been given out once
        return seconds < 32768 * _FASTEST_FORK or seconds < _number("/proc/sys/kernel/pid_max") * _FASTEST_FORK


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


def _number(path: str) -> int:
    """The last number in a file of the kernel's; 0 where there is none."""
    try:
        with open(path, "rb") as file:
            return int(file.read().split()[-1])
    except OSError:
        return 0
