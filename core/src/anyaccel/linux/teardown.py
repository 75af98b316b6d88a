"""Teardown of processes that were started with devices: ask to end, look again, kill in the end.

Every user can read the mark of a process and set the mark on another process. So a carrier counts as ours only if both
hold:

- its real user id is the owner's: a set-user-ID program keeps the real id of the user who started it, until the program
  changes that itself. Or the carrier descends from this process, with any user id: the supervisor of a job and a sweep
  adopt orphans, so their descendants stay below them;
- and the kernel lets this process signal the carrier. A user without privilege cannot end a process under ``sudo``, but
  can end a process in a container of the user's own.

So a process of root with another user id (``setpriv``, ``su``) ends with its job, and a process of another user with a
copy of root's mark is left alone. From outside, and after a SIGKILL of all ancestors, the two look alike: both are left
alone and named, and the devices stay taken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from anyaccel.linux import mark as marks
from anyaccel.linux import process
from anyaccel.linux.mark import Mark
from anyaccel.linux.system import signal
from anyaccel.linux.users import user_name

GRACE_SECONDS = 10.0
"""Time between asking processes to end (SIGTERM) and killing them, where the caller says nothing else."""
KILL_SECONDS = 10.0
"""How long processes may take to leave the kernel after SIGKILL, until they count as stuck."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
_SHARE = 4.0
"""Length of a pause in times of the scan before it: scans take at most a fifth of one processor."""

Visit = Callable[[int, int], object]
"""Handle a living process, by id and start time, once it is found: after a fork and an exit it would have a new id."""
Find = Callable[[Visit], bool]
"""Visit the living processes that are to end, except this process; return whether the scan was complete."""


def find_carriers(wanted: Iterable[Mark]) -> Find:
    """Return a finder of the carriers of the given marks, this process left out; empty marks are ignored."""
    wanted = {mark for mark in wanted if mark}

    def find(visit: Visit) -> bool:
        def visit_other(pid: int, mark: Mark) -> None:
            start = process.start_time(pid)
            # The mark again: the id may have been reused before the start time was read.
            if pid != os.getpid() and start is not None and marks.carries(pid, mark):
                visit(pid, start)

        return marks.visit_carriers(wanted, visit_other)

    return find


def find_tree(roots: Mapping[int, int]) -> Find:
    """Return a finder of processes and their descendants, by the parents that the kernel shows.

    A process that was found once stays in the tree, with its descendants, also when its ancestors have ended. A child
    of this process in the process group of a root counts as well: when this process adopts orphans, it becomes the
    parent of descendants of the root.

    Args:
        roots: Start times of the processes by id, read anew each time. Of this process, only descendants are found.
    """
    known: dict[int, int] = {}

    def find(visit: Visit) -> bool:
        own = os.getpid()
        left = [*roots.items(), *known.items()]
        left += _children_of(own, lambda pid: pid not in roots and process.group_of(pid) in roots)
        known.clear()
        for pid, start in left:  # the list grows during the loop
            if pid not in known and process.started_at(pid, start):
                known[pid] = start
                left += _children_of(pid)
                if pid != own and not process.gone(pid, 0):
                    visit(pid, start)
        known.pop(own, None)
        return True

    return find


def _children_of(parent: int, wanted: Callable[[int], bool] = lambda _: True) -> Iterator[tuple[int, int]]:
    """Yield the children of a process that pass ``wanted``, with their start times."""
    for pid in filter(wanted, process.children(parent)):
        if process.parent_of(pid) == parent and (start := process.start_time(pid)) is not None:
            yield pid, start


def combine_finds(*finds: Find) -> Find:
    """Return a finder that runs several finders in turn; complete if each was complete."""

    def find(visit: Visit) -> bool:
        complete = True
        for each in finds:
            complete &= each(visit)
        return complete

    return find


class Teardown:
    """The teardown of processes, step by step; the caller pauses between two steps.

    Args:
        find: Finder of the processes.
        grace: Seconds between SIGTERM and SIGKILL, from the first step on; infinite to wait for :meth:`kill` or
            :meth:`allow`.
        owner: Owner of processes that this process has not started, whose other carriers are left alone. None for
            processes of this user, and all descendants of this process.
        force: Whether processes that do not end are killed; if not, the time is up after the grace.
        patience: Seconds between SIGKILL and the end of the time, in which the processes may leave the kernel.
        ask: The signal that asks the processes to end; 0 for none.

    Attributes:
        own: The remaining processes that count, with their start times.
        others: The carriers that are left alone, with their start times.
        asked: Ids of the processes that were asked to end, or killed.
        killing: Whether processes are being killed.
        expired: Whether the time is up.
        patience: Seconds between SIGKILL and the end of the time.
    """

    def __init__(
        self,
        find: Find,
        *,
        grace: float,
        owner: int | None = None,
        force: bool = True,
        patience: float = KILL_SECONDS,
        ask: int = signal.SIGTERM,
    ) -> None:
        self.own: dict[int, int] = {}
        self.others: dict[int, int] = {}
        self.asked: set[int] = set()
        self.killing = False
        self.expired = False
        self._find = find
        self._grace = grace
        self._user = os.geteuid() if owner is None else owner
        self._inside = owner is None
        self._force = force
        self.patience = patience
        self._ask = ask
        self._asked: set[tuple[int, int, bool]] = set()
        self._below: set[tuple[int, int]] = set()
        self._pause = _SHORTEST_PAUSE
        self._until: float | None = None

    def kill(self) -> None:
        """Kill the remaining processes from the next step on, without waiting for the grace; start the patience."""
        if not self.killing:
            self.killing = True
            self._pause = _SHORTEST_PAUSE
            self._until = time.monotonic() + self.patience

    def allow(self, seconds: float) -> None:
        """Shorten the grace: kill the remaining processes after this time, unless they are due earlier."""
        self._grace = min(self._grace, seconds)
        if self._until is not None and not self.killing:
            self._until = min(self._until, time.monotonic() + seconds)

    def run(self) -> None:
        """Take steps until no counted process remains, or the time is up."""
        while (pause := self.step()) is not None:
            time.sleep(pause)

    def step(self) -> float | None:
        """Scan once, and ask or kill the found processes. The first step begins the grace.

        Returns:
            Seconds to pause until the next step; None when no counted process remains, or the time is up.
        """
        began = time.monotonic()
        if self._until is None:
            self._until = began + self._grace
        if began >= self._until and not self.killing and self._force:
            self.kill()
        self.own, self.others = {}, {}
        fresh = False

        def visit(pid: int, start: int) -> None:
            nonlocal fresh
            fresh |= self._meet(pid, start)

        complete = self._find(visit)
        now = time.monotonic()
        self.expired = now >= self._until and (self.killing or not self._force)
        if self.expired or (complete and not self.own):
            return None
        if fresh:  # a killed process ends at once, and rare scans would never catch up with a fork loop
            self._pause = _SHORTEST_PAUSE
        pause = self._pause if fresh and self.killing else max(self._pause, _SHARE * (now - began))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return max(_SHORTEST_PAUSE, min(pause, self._until - now))

    def _meet(self, pid: int, start: int) -> bool:
        """Enter a process into ``own`` or ``others``; ask or kill a process that counts.

        Returns:
            True for the first signal of a kind to the process; else False, also for a process that has ended.
        """
        user = process.user(pid)
        if user is None or self.own.get(pid) == start:
            return False
        if not self._counts(pid, start, user):
            self.others[pid] = start
            return False
        self.own[pid] = start
        return self._signal(pid, start)

    def _counts(self, pid: int, start: int, user: int) -> bool:
        """Return whether a process is to end: of the user, or a descendant, and this process may signal it.

        Without an ``owner``, a descendant with another user id still counts once its ancestors have ended.
        """
        if self._inside and user != self._user and process.descends(pid):
            self._below.add((pid, start))  # the process still counts once its ancestors have ended
        return (user == self._user or (pid, start) in self._below) and process.may_signal(pid)

    def _signal(self, pid: int, start: int) -> bool:
        """Ask a process to end, once, or kill it.

        Returns:
            True for the first signal of a kind, whether or not the kernel has sent it.
        """
        signalled = pid, start, self.killing
        first = signalled not in self._asked
        if self.killing:
            process.send(pid, start, signal.SIGKILL)
        elif first and (not self._ask or process.send(pid, start, self._ask)):
            process.send(pid, start, signal.SIGCONT)  # a stopped process handles SIGTERM only after SIGCONT
        self._asked.add(signalled)
        self.asked.add(pid)
        return first


def describe_left(rest: Teardown, of: str) -> list[str]:
    """Return a sentence for each kind of process that a teardown has left; none if none is left.

    Args:
        rest: The teardown, after its last step.
        of: Subject of the teardown, such as ``job 3``.
    """
    told = []
    if rest.others:
        told.append(f"{_listed(rest.others)} carry the mark of {of}, belong to another user, and were not ended")
    if rest.own:
        told.append(f"{_listed(rest.own)} of {of} did not end {rest.patience:g} s after SIGKILL")
    return told


def _listed(pids: Iterable[int]) -> str:
    """Return process ids and users as text; the plural stands for one process as well."""
    return f"processes {', '.join(map(_named, sorted(pids)))}"


def _named(pid: int) -> str:
    """Return a process id, with the name of the user in brackets, if known."""
    user = process.user(pid)
    return str(pid) if user is None else f"{pid} ({user_name(user)})"
