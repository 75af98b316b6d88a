"""The inside of a pool: calls that wait, workers that run them, and the order between the two.

No lock is held while a future is set or a worker is launched: that may run code of others, or come back to us.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from anyaccel.errors import TaskTimeoutError, UsageError
from anyaccel.launcher.sandbox import confines
from anyaccel.model import Request
from anyaccel.workers.actors import ActorMember
from anyaccel.workers.feeding import Feeding
from anyaccel.workers.handle import Gone
from anyaccel.workers.launching import Preparation
from anyaccel.workers.leases import Held, Leases
from anyaccel.workers.logs import Logs
from anyaccel.workers.member import Member
from anyaccel.workers.pickling import Pickled, dumps
from anyaccel.workers.tasks import Options, Task, TaskFuture, exception_in, name_of, settle_task
from anyaccel.workers.wire import Message

if TYPE_CHECKING:
    from anyaccel.workers.gangs import GangFuture

Step = Callable[[], object]

PROCESSORS = len(os.sched_getaffinity(0))
"""Processors that this process may use: as many calls as that can run at once without devices."""


class Core(Feeding):
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

    Raises:
        EnforcementError: When workers must be confined and the kernel cannot.
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
        super().__init__(
            leases,
            grace=grace,
            idle=idle,
            confined=confines(preparation.enforce),
            max_workers=max_workers,
            logs=logs,
        )
        self.preparation = preparation
        self.preload = preload

    def submit(self, options: Options, function: Callable[..., Any], args: Any, kwargs: Any) -> TaskFuture:
        """Let a call be run as soon as there is a worker and, where it needs them, devices for it."""
        task = Task(name_of(function), options, self.on_cancel)
        self.enter(task, (function, args, kwargs))
        return task.future

    def gang(self, options: Options, hosts: int, name: str, call: bytes) -> GangFuture:
        """Let a pickled call be run as a gang of one, on this machine."""
        from anyaccel.launcher.rendezvous import Rendezvous
        from anyaccel.workers.gangs import GangFuture, ranked

        if hosts > 1:
            raise UsageError(
                f"hosts must be 1 with engine='local', which has this machine alone (got {hosts}); engine='ray' has"
                " those of a cluster"
            )
        rendezvous = Rendezvous()
        task = Task(name, options, self.on_cancel)
        future = GangFuture([task.future])
        future.add_done_callback(lambda _: rendezvous.close())
        try:
            self.enter(task, ranked(0, 1, rendezvous.variables, call))
        except BaseException:
            rendezvous.close()
            raise
        return future

    def enter(self, task: Task, call: object) -> None:
        """Give a call to an unused worker, or let it wait for one."""
        options = task.options
        self.leases  # noqa: B018 - they may not be there, which is told before anything else
        try:
            body = call if isinstance(call, Pickled) else dumps(call)
            task.body = body.frozen() if options.retries else body
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
            elif options.needs is not None and self.max_workers is None:
                place = self.backlog.add(task)
            elif options.needs is not None:
                crowded = bool(self.backlog.gate)
                self.backlog.gate.append(task)
            elif task.actor is None:
                crowded = bool(self.backlog.cpu)  # then there is no room for this one either
                self.backlog.cpu.append(task)
            else:
                crowded = False
                self.backlog.cpu.appendleft(task)
        if member is not None:
            member.run(task)
            return
        if place is not None:
            self.claim(place)
        elif not crowded:
            self.pump()
        self.keep(task)

    def check(self, request: Request) -> None:
        """Raise the error of a request that can never be served."""
        self.leases.check(request)

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
        task = None
        try:
            with self.lock:
                task = member.answered(message.number)
                idle = member.task is None
            if task is None:
                member.on_unasked(message.number)
                return
            if member.ending:
                if idle:
                    member.expect_end()
            elif not idle:
                self.feed(member)
            elif not self.go_on(member):
                self.rest(member)
            if task is not None:
                settle_task(task, message, plain=self.preparation.plain)
        except BaseException as error:
            # We may be in the thread of a user who has pressed Ctrl-C: leave nothing half done.
            member.stop(0)
            if task is not None:
                task.fail(error)
            raise

    def on_broken(self, member: Member, message: Message) -> None:
        """A worker could not be set up."""
        member.fault = "it could not be set up"  # first: whatever else it says, another thread may be about to hear
        error = exception_in(message, plain=self.preparation.plain)
        task = member.task
        if self.preparation.staged:
            self.break_off(error)
        elif task is not None:  # it has no environment or directory, which the next one may have
            task.fail(error)
            member.stop(0)

    def on_gone(self, member: Member, gone: Gone) -> None:
        """A worker and all that it started have left the kernel: its devices may go back."""
        with self.lock:
            self.members.discard(member)
            self.resting.discard(member)
            again = member.not_begun()
            begun = [task for task in member.outstanding if task not in again]
            member.task = None
            member.queued.clear()
            held, member.held = member.held, None
            if held is not None and again and not begun:  # it was unused, or never there
                self.backlog.placed.appendleft((again.pop(0), held))
                held = None
        for task in begun:
            if gone.forked and not member.stopped and task.may_be_retried:
                task.tries += 1
                task.worker = None
                again.insert(0, task)
            else:
                task.fail(member.death(gone, task.name))
        self.put_back(again)  # first, or others that came later would be given the devices
        if held is not None:
            self.give_back(held, gone)
        self.pump()
        self.settle()

    def on_stuck(self, member: Member, reason: str) -> None:
        """Something of a worker ignores SIGKILL: its devices stay with it."""
        task = member.task
        if member.held is not None:
            self.set_aside(member.held, reason)
        if task is not None:
            task.fail(member.death(Gone(reason=reason), task.name))
        self.recall(member)
        self.pump()

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
            ahead = next((member for member in self.members if task in member.queued), None)
        if ahead is not None and self.recall(ahead) and not self.go_on(ahead):
            self.rest(ahead)
        with self.lock:
            member = next((member for member in self.members if member.task is task), None)
            if member is not None:
                member.ending = True
            place = self.backlog.remove(task)
            task.body = None
        if member is not None:
            member.stop(self.grace, answer=False)
        self.give_up(place)
        self.pump()
        self.settle()

    def _next(self) -> Step | None:
        """The next thing to do; called with the lock held, done without it."""
        backlog = self.backlog
        if backlog.placed and backlog.placed[0][0].future.done():  # cancelled
            return backlog.placed.popleft()[1].release
        if backlog.placed:  # it was given room before it asked for devices
            return self._joined(*backlog.placed.popleft())
        step = self._admit()
        if step is None and backlog.waits_for_room and self.resting:
            ending = any(member.ending for member in self.members)
            return None if ending else self.resting.take_oldest().finish
        return step

    def _admit(self) -> Step | None:
        """Let the first of those who wait for room have some."""
        backlog = self.backlog
        task, gated = backlog.next_cpu(), backlog.next_gated()
        if task is not None and (gated is None or task.number < gated.number):
            member = self.resting.take(task.options.reuse)
            if member is not None:
                member.task = backlog.cpu.popleft()
                return partial(member.run, task)
            if self._room_for(task):
                return self._joined(backlog.cpu.popleft(), None)
        if gated is not None and self._room_for(gated):
            return partial(self.claim, backlog.add(backlog.gate.popleft()))
        return None

    def _room_for(self, task: Task) -> bool:
        """Whether one more process may be had."""
        if self.max_workers is not None:
            return len(self.members) + self.backlog.admitted < self.max_workers
        busy = sum(member.busies_processor for member in self.members)
        return task.actor is not None or busy < PROCESSORS

    def _joined(self, task: Task, held: Held | None) -> Step:
        member = (Member if task.actor is None else ActorMember)(self, task.options, held, task)
        self.members.add(member)
        return partial(member.launch, task)

    def rest(self, member: Member) -> None:
        """Keep a worker for later calls, unless somebody waits for its devices."""
        with self.lock:
            watch = self.resting.add(member)
            when = self.resting.next_look() if watch else None
        if when is not None:
            self.look_at_idle(when)
        if member.held is not None and (wanted := self.leases.wanted(member.ids)):
            self.make_way(wanted)
        if self.backlog:
            self.pump()
        self.settle()
