"""The inside of a pool: calls that wait, workers that run them, and the order between the two.

No lock is held while devices are asked for or given back, while a future is set, or while a worker is launched: all of
that may run code of others, or come back to us.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from anyaccel.errors import TaskTimeoutError
from anyaccel.workers.actors import ActorMember
from anyaccel.workers.backlog import Place
from anyaccel.workers.handle import Gone
from anyaccel.workers.launching import Preparation
from anyaccel.workers.leases import Held, Leases
from anyaccel.workers.lifecycle import Lifecycle
from anyaccel.workers.logs import Logs
from anyaccel.workers.loop import loop
from anyaccel.workers.member import Member
from anyaccel.workers.pickling import dumps
from anyaccel.workers.tasks import Options, Task, TaskFuture, exception_in, name_of, settle_task
from anyaccel.workers.wire import Kind, Message

Step = Callable[[], object]

PROCESSORS = len(os.sched_getaffinity(0))
"""Processors that this process may use: as many calls as that can run at once without devices."""


class Core(Lifecycle):
    """The state of a pool. Every method may be called by any thread.

    Args:
        leases: Gives the machine and its devices; called once, when they are needed first.
        preparation: What all workers have in common.
        preload: Modules that the nursery imports.
        max_workers: Processes at the same time, or None: then the devices set the limit, and the processors do for
            calls that need none.
        grace: Seconds between asking a process to end and killing it.
        idle: Seconds after which an unused process gives its devices back.
        logs: Where the output of each call goes, or None for where ours goes.
    """

    def __init__(
        self,
        leases: Callable[[], Leases],
        preparation: Preparation,
        *,
        preload: tuple[str, ...],
        max_workers: int | None,
        grace: float,
        idle: float,
        logs: Logs | None,
    ) -> None:
        super().__init__(grace=grace, idle=idle)
        self._leases_of = leases
        self._leases: Leases | None = None
        self.preparation = preparation
        self.preload = preload
        self.max_workers = max_workers
        self.logs = logs
        self.opening = threading.Lock()

    @property
    def leases(self) -> Leases:
        """The machine and its devices.

        Raises:
            MachineError: When the machine cannot be understood.
        """
        if self._leases is None:
            with self.opening:
                if self._leases is None:
                    leases = self._leases_of()
                    leases.join(self)
                    self._leases = leases
        return self._leases

    def submit(self, options: Options, function: Callable[..., Any], args: Any, kwargs: Any) -> TaskFuture:
        """Let a call be run as soon as there is a worker and, where it needs them, devices for it."""
        task = Task(name_of(function), options, self.on_cancel)
        self.enter(task, (function, args, kwargs))
        return task.future

    def enter(self, task: Task, call: object) -> None:
        """Give a call to an unused worker, or let it wait for one."""
        leases, options = self.leases, task.options
        try:
            task.body = dumps(call)
        except Exception as error:  # noqa: BLE001 - it belongs to the future, as other executors do it
            self.check_open()
            task.fail(error)
            return
        place, crowded = None, True
        with self.lock:
            self.check_open()
            member = self.resting.take(options.reuse)
            if member is not None:
                member.task = task
            elif options.needs is None:
                crowded = bool(self.backlog.cpu)  # then there is no room for this one either
                self.backlog.cpu.append(task)
            else:
                place = self.backlog.add(task)
        if member is not None:
            member.run(task)
            return
        if place is not None:
            self._claim(leases, place)
        elif not crowded:
            self.pump()
        self.keep(task)

    def pump(self) -> None:
        """Start whatever can be started now."""
        while True:
            with self.lock:
                step = self._next()
            if step is None:
                return
            step()

    def on_answer(self, member: Member, message: Message) -> None:
        """A worker has answered: give it the next call, then hand over what it said."""
        if message.kind == Kind.BROKEN:
            self.break_off(exception_in(message))
            return
        task = None
        try:
            with self.lock:
                task, member.task = member.task, None
            if member.ending:
                member.expect_end()
            elif not self._go_on(member):
                self._rest(member)
            if task is not None:
                settle_task(task, message)
        except BaseException as error:
            # We may be in the thread of a user who has pressed Ctrl-C: leave nothing half done.
            member.stop(0)
            if task is not None:
                task.fail(error)
            raise

    def on_gone(self, member: Member, gone: Gone) -> None:
        """A worker and all that it started have left the kernel: its devices may go back."""
        with self.lock:
            self.members.discard(member)
            self.resting.discard(member)
            task, member.task = member.task, None
            held, member.held = member.held, None
            again = task is not None and member.unsent and not task.future.done()
            if task is not None and again:
                task.worker = None
                if held is None:
                    self.backlog.cpu.appendleft(task)
                else:
                    self.backlog.placed.appendleft((task, held))
        if task is not None and not again:
            task.fail(member.death(gone, task.name))
        if held is not None and not again:
            held.release()
        self.pump()
        self.settle()

    def on_stuck(self, member: Member, reason: str) -> None:
        """Something of a worker ignores SIGKILL: its devices stay with it."""
        task = member.task
        if task is not None:
            task.fail(member.death(Gone(reason=reason), task.name))

    def on_timeout(self, member: Member, task: Task) -> None:
        """The time of a call is up."""
        with self.lock:
            if member.task is not task:
                return
            member.ending = True
        task.fail(TaskTimeoutError(f"{task.name} took longer than its timeout of {task.options.timeout:g} s"))
        member.stop(self.grace, answer=False)

    def on_cancel(self, task: Task) -> None:
        """A call was cancelled: if it runs, end its worker."""
        with self.lock:
            member = next((member for member in self.members if member.task is task), None)
            if member is not None:
                member.ending = True
            place = self.backlog.remove(task)
            task.body = None
        if member is not None:
            member.stop(self.grace, answer=False)
        self._give_up(place)
        self.pump()
        self.settle()

    def line_up(self) -> None:
        """Somebody else comes for devices: let all who wait here have a place in front of them."""
        with self.lock:
            places = self.backlog.line_up()
        for place in places:
            self._claim(self.leases, place)

    def make_way(self, devices: frozenset[str]) -> None:
        """Somebody waits for devices: those that we hold without using them go back."""
        with self.lock:
            unused = self.resting.take_holders(devices)
        for member in unused:
            member.finish()

    def keep(self, task: Task) -> None:
        """Let a call that has to wait not see what becomes of its arguments."""
        body = task.body
        if body is not None and body.buffers:
            frozen = body.frozen()
            with self.lock:
                if task.body is body:
                    task.body = frozen

    def _claim(self, leases: Leases, place: Place) -> None:
        """Stand in line for devices."""
        task = place.task
        if task is None or task.options.needs is None:
            return
        try:
            claim = leases.claim(task.options.needs, task.name, partial(self._on_held, place))
        except Exception as error:  # noqa: BLE001 - the request was served before; whatever has changed, it is told
            with self.lock:
                self.backlog.remove(task)
            task.fail(error)
            self.settle()
            return
        with self.lock:
            place.claim = claim
            unwanted = place.task is None
        if unwanted:
            claim.withdraw()

    @staticmethod
    def _give_up(place: Place | None) -> None:
        if place is not None and place.claim is not None:
            place.claim.withdraw()

    def _on_held(self, place: Place, held: Held) -> None:
        with self.lock:
            taken, following = self.backlog.grant(place, held)
        if not taken:
            held.release()
        if following is not None:
            self._claim(self.leases, following)
        self.pump()

    def _next(self) -> Step | None:
        """The next thing to do; called with the lock held, done without it."""
        backlog = self.backlog
        if backlog.placed and backlog.placed[0][0].future.cancelled():
            return backlog.placed.popleft()[1].release
        if backlog.placed and self._room(cpu=False):
            return self._joined(*backlog.placed.popleft())
        task = backlog.next_cpu()
        if task is not None:
            member = self.resting.take(task.options.reuse)
            if member is not None:
                member.task = backlog.cpu.popleft()
                return partial(member.run, task)
            if task.actor is not None or self._room(cpu=True):
                return self._joined(backlog.cpu.popleft(), None)
        if (backlog.placed or task is not None) and self.resting and not any(member.ending for member in self.members):
            return self.resting.take_oldest().finish
        return None

    def _room(self, *, cpu: bool) -> bool:
        if self.max_workers is not None:
            return len(self.members) < self.max_workers
        return not cpu or sum(member.busies_processor for member in self.members) < PROCESSORS

    def _joined(self, task: Task, held: Held | None) -> Step:
        member = (Member if task.actor is None else ActorMember)(self, task.options, held, task)
        self.members.add(member)
        return partial(member.launch, task)

    def _go_on(self, member: Member) -> bool:
        """Give a worker the next call of its kind, unless that would overtake somebody."""
        place = None
        if member.held is None:
            with self.lock:
                task = self.backlog.next_cpu()
                if task is None or task.options.reuse != member.options.reuse or self.backlog.placed:
                    return False
                member.task = self.backlog.cpu.popleft()
        else:
            reuse = member.options.reuse
            with self.lock:
                task = self.backlog.first(reuse)
                claim = task.place.claim if task is not None and task.place is not None else None
            if claim is None or not claim.first():
                return False
            with self.lock:
                if task is None or self.backlog.first(reuse) is not task:
                    return False
                place = self.backlog.remove(task)
                member.task = task
        member.run(task)
        self._give_up(place)
        return True

    def _rest(self, member: Member) -> None:
        """Keep a worker for later calls, unless somebody waits for its devices."""
        with self.lock:
            watch = self.resting.add(member)
            when = self.resting.next_look() if watch else None
        if when is not None:
            loop().call_at(when, self._end_idle)
        if member.held is not None and self.leases.wanted(member.held.allocation):
            self.make_way(frozenset(device.id for device in member.allocation.devices))
        if self.backlog:
            self.pump()
        self.settle()

    def _end_idle(self) -> None:
        """End workers that have held devices for too long without a call."""
        with self.lock:
            old = self.resting.take_old()
            when = self.resting.next_look()
        if when is not None:
            loop().call_at(when, self._end_idle)
        for member in old:
            member.finish()
