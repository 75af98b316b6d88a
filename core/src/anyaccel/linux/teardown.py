"""The end of what was started with devices: asked at first, killed in the end, and looked at in between.

Every user can read the mark of a process and put it on a process of its own. So a carrier counts for the end of what is
ours only where it is our own:

- its real user id is that of the owner: a program with the set-user-ID bit keeps the one of the user who started it,
  until it changes that itself. Or, for the process that has started it all, it descends from that one, whatever its
  user id is by now: the supervisor of a job and a sweep adopt orphans, so all descendants of theirs stay below them;
- and the kernel lets this process signal it. What ``sudo`` has started cannot be ended by a user without privilege, and
  what runs in a container of that user's own can.

So a process of root's that has taken another user id (``setpriv``, ``su``) is ended with its job, and a process of
another user that has copied root's mark is left alone. From outside, and where nothing is left above it, as after the
SIGKILL of all that started it, the two look alike: both are left alone and named, and keep the devices taken.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from anyaccel.linux import mark as marks
from anyaccel.linux import process
from anyaccel.linux.mark import Mark
from anyaccel.linux.users import user_name

GRACE_SECONDS = 10.0
"""Time between asking processes to end (SIGTERM) and killing them, where the caller says nothing else."""
KILL_SECONDS = 10.0
"""How long processes may take to leave the kernel after SIGKILL, until they count as stuck."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
_SHARE = 4.0
"""A pause is so many times as long as the look before it took: looks cost a fifth of one processor at most."""

Confirm = Callable[[int], bool]
"""Say whether a process is still the one that was found, given its id once no other process can get that."""
Tell = Callable[[int, Confirm], None]
"""Take a living process as soon as it is found: what forks and ends all the time is another one a moment later."""
Find = Callable[[Tell], bool]
"""Tell of the living processes that are to end, this one left out, and say whether these are all."""


def find_carriers(wanted: Iterable[Mark]) -> Find:
    """Return what finds the processes that carry one of some marks; an empty mark is carried by none."""
    wanted = {mark for mark in wanted if mark}

    def find(tell: Tell) -> bool:
        def tell_other(pid: int, mark: Mark) -> None:
            if pid != os.getpid():
                tell(pid, lambda pid: marks.carries(pid, mark))

        return marks.look(wanted, tell_other)

    return find


def find_tree(roots: Mapping[int, int]) -> Find:
    """Return what finds some processes and all that descends from them, by the parents that the kernel names.

    What was found once is of the tree for good, and so is what it starts, also when what is above it has ended. A child
    of this process is of it as well that is of the process group of a root: where this process adopts orphans, it has
    become the parent of what descended from the root.

    Args:
        roots: Start times of the processes by id, looked at anew each time; of this process, the descendants are found.
    """
    known: dict[int, int] = {}

    def find(tell: Tell) -> bool:
        own = os.getpid()
        left = [*roots.items(), *known.items()]
        left += _children_of(own, lambda pid: pid not in roots and process.group_of(pid) in roots)
        known.clear()
        for pid, start in left:  # which grows meanwhile
            if pid not in known and process.started_at(pid, start):
                known[pid] = start
                left += _children_of(pid)
                if pid != own and not process.gone(pid, 0):
                    tell(pid, partial(process.started_at, start=start))
        known.pop(own, None)
        return True

    return find


def _children_of(parent: int, wanted: Callable[[int], bool] = lambda _: True) -> Iterator[tuple[int, int]]:
    """Yield the children of a process with their start times."""
    for pid in filter(wanted, process.children(parent)):
        if process.parent_of(pid) == parent and (start := process.start_time(pid)) is not None:
            yield pid, start


def find_all(*finds: Find) -> Find:
    """Return what finds all that some others do."""

    def find(tell: Tell) -> bool:
        complete = True
        for each in finds:
            complete &= each(tell)
        return complete

    return find


class Teardown:
    """The end of some processes, step by step; the caller pauses between two steps in its own way.

    Args:
        find: Finds them.
        grace: Seconds between asking them to end (SIGTERM) and killing them, from the first step on; infinite to wait
            for :meth:`kill` or :meth:`allow`.
        user: Whose processes they are; those of this process's user when None.
        inside: Whether this process has started them, so that all that descends from it counts.
        force: Whether what does not end is killed; if not, the time is up after the grace.
        patience: Seconds that they may take to leave the kernel after SIGKILL, until the time is up.
        ask: The signal by which they are asked to end; 0 for none.

    Attributes:
        own: Those that are left and count, with their start times.
        others: Those that are left alone, likewise.
        asked: Ids of all that were asked to end, or killed.
        killing: Whether they are being killed.
        expired: Whether the time is up.
        patience: Seconds that they may take after SIGKILL.
    """

    def __init__(
        self,
        find: Find,
        *,
        grace: float,
        user: int | None = None,
        inside: bool = True,
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
        self._user = os.geteuid() if user is None else user
        self._inside = inside
        self._force = force
        self.patience = patience
        self._ask = ask
        self._asked: set[tuple[int, int, bool]] = set()
        self._below: set[tuple[int, int]] = set()
        self._pause = _SHORTEST_PAUSE
        self._until: float | None = None

    def kill(self) -> None:
        """Kill what is left from the next step on, whatever is left of the grace."""
        if not self.killing:
            self.killing = True
            self._pause = _SHORTEST_PAUSE
            self._until = time.monotonic() + self.patience

    def allow(self, seconds: float) -> None:
        """Kill what is left once so many seconds are over, unless that is due before."""
        self._grace = min(self._grace, seconds)
        if self._until is not None and not self.killing:
            self._until = min(self._until, time.monotonic() + seconds)

    def run(self) -> None:
        """Take one step after the other until nothing is left that counts, or the time is up."""
        while (pause := self.step()) is not None:
            time.sleep(pause)

    def step(self) -> float | None:
        """Look once, and ask or kill what there is.

        Returns:
            Seconds to pause until the next step; None when nothing is left that counts, or the time is up.
        """
        began = time.monotonic()
        if self._until is None:
            self._until = began + self._grace
        if began >= self._until and not self.killing and self._force:
            self.kill()
        self.own, self.others = {}, {}
        fresh = False

        def tell(pid: int, confirm: Confirm) -> None:
            nonlocal fresh
            fresh |= self._meet(pid, confirm)

        complete = self._find(tell)
        now = time.monotonic()
        self.expired = now >= self._until and (self.killing or not self._force)
        if self.expired or (complete and not self.own):
            return None
        if fresh:  # what was killed ends at once; and looks that come seldom would never end what forks
            self._pause = _SHORTEST_PAUSE
        pause = self._pause if fresh and self.killing else max(self._pause, _SHARE * (now - began))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return max(_SHORTEST_PAUSE, min(pause, self._until - now))

    def _meet(self, pid: int, confirm: Confirm) -> bool:
        """Tell whose a process is, and ask or kill one of our own; return whether that is the first time of either."""
        start, user = process.start_time(pid), process.user(pid)
        if start is None or user is None or self.own.get(pid) == start:
            return False
        if not self._counts(pid, start, user):
            self.others[pid] = start
            return False
        self.own[pid] = start
        return self._signal(pid, start, confirm)

    def _counts(self, pid: int, start: int, user: int) -> bool:
        if self._inside and user != self._user and process.descends(pid):
            self._below.add((pid, start))  # it still counts when what is above it has ended
        return (user == self._user or (pid, start) in self._below) and process.may_signal(pid)

    def _signal(self, pid: int, start: int, confirm: Confirm) -> bool:
        """Ask a process to end, or kill it; return whether that is the first time of either."""

        def still() -> bool:
            user = process.user(pid)
            meant = process.started_at(pid, start) and confirm(pid)
            return meant and user is not None and self._counts(pid, start, user)

        signalled = pid, start, self.killing
        first = signalled not in self._asked
        if self.killing:
            process.send(pid, signal.SIGKILL, still)
        elif first and (not self._ask or process.send(pid, self._ask, still)):
            process.send(pid, signal.SIGCONT, still)  # a stopped process hears only once it goes on
        self._asked.add(signalled)
        self.asked.add(pid)
        return first


def tell_left(rest: Teardown, of: str) -> list[str]:
    """Say which processes a teardown has left, each kind in one sentence.

    Args:
        rest: The teardown, after its last step.
        of: What it has ended, such as ``job 3``.
    """
    told = []
    if rest.others:
        told.append(f"{_listed(rest.others)} carry the mark of {of}, belong to another user, and were not ended")
    if rest.own:
        told.append(f"{_listed(rest.own)} of {of} did not end {rest.patience:g} s after SIGKILL")
    return told


def _listed(pids: Iterable[int]) -> str:
    """Name processes and their users; all are called processes, also where there is one."""
    return f"processes {', '.join(map(_named, sorted(pids)))}"


def _named(pid: int) -> str:
    user = process.user(pid)
    return str(pid) if user is None else f"{pid} ({user_name(user)})"
