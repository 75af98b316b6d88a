"""The life of a pool: open, closed once it takes no more calls, drained once its last worker has gone."""

from __future__ import annotations

import threading

from anyaccel.workers.backlog import Backlog
from anyaccel.workers.client import Nursery
from anyaccel.workers.failures import BrokenPoolError
from anyaccel.workers.loop import loop
from anyaccel.workers.member import Member
from anyaccel.workers.resting import Resting
from anyaccel.workers.tasks import Task

_FEEDING_SECONDS = 1.0
"""To send a worker some calls takes microseconds, unless a callback of the user's comes in between."""


class Lifecycle:
    """What a pool has, and how it ends.

    Args:
        grace: Seconds between asking a process to end and killing it.
        idle: Seconds after which an unused process gives its devices back.

    Attributes:
        lock: Held over every look at what follows, and over nothing that takes time or runs code of others.
        backlog: Calls that wait.
        members: Workers that live, or are about to.
        resting: Those among them that are kept for later calls.
        closed: Whether no more calls are taken.
        feeds: Whether kept workers are given calls that wait.
        foreign: Whether we are a fork of the process that the pool belongs to.
        broken: Why no call can be run, or None.
        drained: Set when it is closed and nothing is left.
    """

    def __init__(self, *, grace: float, idle: float) -> None:
        self.grace = grace
        self.lock = threading.Lock()
        self.backlog = Backlog()
        self.members: set[Member] = set()
        self.resting = Resting(idle)
        self.closed = False
        self.feeds = True
        self.foreign = False
        self.broken: BrokenPoolError | None = None
        self.drained = threading.Event()
        self._nurseries: set[Nursery] = set()

    def check_open(self) -> None:
        """Raise what keeps a call from being taken."""
        if self.foreign:
            raise RuntimeError("this pool belongs to the process that this one was forked from; make a new one here")
        if self.broken is not None:
            raise BrokenPoolError(str(self.broken)) from self.broken.__cause__
        if self.closed:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def keep(self, task: Task) -> None:
        """Let a call that has to wait not see what becomes of its arguments."""
        body = task.body
        if body is not None and body.buffers:
            frozen = body.frozen()
            with self.lock:
                if task.body is body:
                    task.body = frozen

    def shutdown(self, *, wait: bool, cancel_futures: bool = False) -> None:
        """Take no more calls; end when those that there are have been run."""
        if self.foreign:
            return
        with self.lock:
            self.closed = True
        if cancel_futures:
            self._cancel_waiting()
        self.settle()
        if wait and not loop().inside:
            self.drained.wait()

    def stop(self, grace: float) -> None:
        """Take no more calls, cancel those that wait, and end the workers of those that run."""
        if self.foreign:
            return
        self.shutdown(wait=False, cancel_futures=True)
        with self.lock:
            members = list(self.members)
        for member in members:
            member.stop(grace)

    def _cancel_waiting(self) -> None:
        """Cancel what nobody has begun with."""
        with self.lock:
            self.feeds = False  # or what is taken back might be sent again
            members = list(self.members)
        try:
            for member in members:
                if member.feeding.acquire(timeout=_FEEDING_SECONDS):  # whoever sends it something now has done so
                    member.feeding.release()
                self.recall(member)
            with self.lock:
                waiting = list(self.backlog)
            for task in waiting:
                task.future.cancel()
        finally:
            self.feeds = True

    def recall(self, member: Member) -> bool:  # noqa: ARG002 - not every engine sends calls ahead
        """Take calls back that a worker was given and has not begun with; returns whether it is idle now."""
        return False

    def settle(self) -> None:
        """Once closed and out of work, let the workers go."""
        if not self.closed:
            return
        with self.lock:
            if self.backlog:
                return
            self.resting.take_all()
            members = list(self.members)
            empty = not members
        for member in members:
            member.leave()
        if empty:
            with self.lock:
                nurseries, self._nurseries = self._nurseries, set()
            for nursery in nurseries:
                nursery.leave()
            self.drained.set()

    def use(self, nursery: Nursery, *, ahead: bool) -> None:
        """Say that a worker came from a nursery.

        Args:
            nursery: The nursery.
            ahead: Whether another fresh worker will be needed, and is better forked now.
        """
        with self.lock:
            new = nursery not in self._nurseries
            self._nurseries.add(nursery)
        if new:
            nursery.use()
        if ahead:
            nursery.fork_ahead()

    def break_off(self, cause: BaseException) -> None:
        """A worker could not be set up: no other will be."""
        error = BrokenPoolError(f"the pool is broken: setting up a worker failed with {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        with self.lock:
            self.broken = self.broken or error
            running = [task for member in self.members for task in member.outstanding]
            unfinished = [*self.backlog, *running]
        for task in unfinished:
            task.fail(error)
        self.stop(self.grace)
