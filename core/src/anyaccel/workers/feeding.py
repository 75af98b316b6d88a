"""Which call a worker runs next, and which ones stand behind it in its channel.

A worker that answers quickly is given some calls before it asks: between two calls it need not wait for us then, nor
we for the kernel to wake it. Nothing is decided by that. What a worker has not taken out of its channel can be taken
back at the other end, and the kernel gives each message to one of the two alone. So whoever becomes idle takes a call
from behind the one that another worker runs, a call that is cancelled is taken back, and when a worker dies, exactly
those that it never began with are run by others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from anyaccel.workers.backlog import Place
from anyaccel.workers.devices import Devices
from anyaccel.workers.leases import Leases
from anyaccel.workers.logs import Logs
from anyaccel.workers.member import QUICK_SECONDS, Member
from anyaccel.workers.tasks import Task


class Feeding(Devices):
    """A pool as the one who gives its workers their calls.

    Args:
        leases: Gives the machine and its devices; called once, when they are needed first.
        grace: Seconds between asking a process to end and killing it.
        idle: Seconds after which an unused process gives its devices back.
        confined: Whether holders will be confined to their devices.
        max_workers: Processes at the same time, or None.
        logs: Where the output of each call goes, or None for where ours goes.
    """

    def __init__(
        self,
        leases: Callable[[], Leases],
        *,
        grace: float,
        idle: float,
        confined: bool,
        max_workers: int | None,
        logs: Logs | None,
    ) -> None:
        super().__init__(leases, grace=grace, idle=idle, confined=confined)
        self.max_workers = max_workers
        self.logs = logs
        self._looked = 0.0

    def go_on(self, member: Member) -> bool:
        """Give an idle worker the next call of its kind, unless that would overtake somebody."""
        if not self.backlog and not any(peer.queued for peer in tuple(self.members)):
            return False
        place = None
        with member.feeding:
            task = self._steal(member, silent=True)
            if task is None:
                task, place = self._take(member)
            task = task or self._steal(member)
            if task is not None:
                member.run(task)
        self.give_up(place)
        if task is not None:
            self.feed(member)
        return task is not None

    def feed(self, member: Member) -> None:
        """Let calls stand behind the one that a worker runs, so that it need not wait for us between the two."""
        room = member.room
        if len(member.queued) >= -(-room // 2) or member.ending or self.logs is not None:
            return
        if not member.feeding.acquire(blocking=False):
            return  # somebody else does
        fed, places = False, []
        try:
            while len(member.queued) < room:
                task, place = self._steal(member, silent=True, ahead=True), None
                if task is None:
                    task, place = self._take(member, ahead=True)
                if task is None:
                    break
                places.append(place)
                member.queue(task)
                fed = True
        finally:
            member.feeding.release()
        for place in places:
            self.give_up(place)
        if fed and self.resting:  # somebody has become idle meanwhile, and must not be while calls stand in line
            with self.lock:
                idle = self.resting.take(member.options.reuse)
            if idle is not None and not self.go_on(idle):
                self.rest(idle)

    def _steal(self, member: Member, *, silent: bool = False, ahead: bool = False) -> Task | None:
        """Give a worker a call that stands behind one that another worker runs.

        Args:
            member: The worker.
            silent: Whether only to do so where the other one takes long.
            ahead: Whether the call is to stand in line again.
        """
        now = time.monotonic()
        if silent and now - self._looked < QUICK_SECONDS:
            return None
        with self.lock:
            self._looked = now if silent else self._looked
            for peer in self.members if self.feeds else ():
                if not peer.queued or peer is member or peer.options.reuse != member.options.reuse:
                    continue
                if (silent and now - peer.heard < QUICK_SECONDS) or (ahead and member.task is None):
                    continue
                while peer.queued and (task := peer.take_back()) is not None:
                    if not task.future.done():
                        member.add(task)
                        return task
        return None

    def _take(self, member: Member, *, ahead: bool = False) -> tuple[Task | None, Place | None]:
        """Give a worker the next call of its kind that waits, unless that would overtake somebody.

        Args:
            member: The worker.
            ahead: Whether the call is to stand behind the one that the worker runs.

        Returns:
            The call, or None; and a place that is to be given up.
        """
        if member.held is None:
            return self._take_from_cpu(member, ahead=ahead), None
        reuse = member.options.reuse
        with self.lock:
            task = self.backlog.first(reuse)
            claim = task.place.claim if task is not None and task.place is not None else None
        if task is None and self.max_workers is not None:
            return self._take_from_gate(member, ahead=ahead), None
        if task is None or claim is None or not claim.first():
            return None, None
        with self.lock:
            if self.backlog.first(reuse) is not task or not member.takes(task, ahead=ahead):
                return None, None
            place = self.backlog.remove(task)
            member.add(task)
        return task, place

    def _take_from_cpu(self, member: Member, *, ahead: bool) -> Task | None:
        with self.lock:
            task, gated = self.backlog.next_cpu(), self.backlog.next_gated()
            if task is None or self.backlog.placed or not member.takes(task, ahead=ahead):
                return None
            if gated is not None and gated.number < task.number:
                return None
            self.backlog.cpu.popleft()
            member.add(task)
        return task

    def _take_from_gate(self, member: Member, *, ahead: bool) -> Task | None:
        """The same where the number of processes is limited, so that most calls have not asked for devices yet."""
        if self.leases.wanted(member.ids):
            return None
        with self.lock:
            task, cpu = self.backlog.next_gated(), self.backlog.next_cpu()
            if task is None or not member.takes(task, ahead=ahead) or (cpu and cpu.number < task.number):
                return None
            self.backlog.gate.popleft()
            member.add(task)
        return task

    def recall(self, member: Member) -> bool:
        """Let calls wait again that a worker was given and has not begun with; returns whether it is idle now."""
        taken: list[Task] = []
        with self.lock:
            while member.queued or taken:
                task = member.take_back()
                if task is None:
                    break
                taken.append(task)
            idle = member.task is None and bool(taken) and not member.ending
        self.put_back([task for task in taken if not task.future.done()])
        return idle

    def put_back(self, tasks: list[Task]) -> None:
        """Let calls wait again, in front of their like."""
        if not tasks:
            return
        places = []
        with self.lock:
            if tasks[0].options.needs is None:
                self.backlog.cpu.extendleft(reversed(tasks))
            elif self.max_workers is None:
                places = self.backlog.put_back(tasks)
            else:
                self.backlog.gate.extendleft(reversed(tasks))
        for place in places:
            self.claim(place)
