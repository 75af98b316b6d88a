"""One worker of a pool: what it runs, what it holds, and when it is to end."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from anyaccel.errors import BrokenWorkerError, NurseryError, WorkerError
from anyaccel.ledger import mark as marks
from anyaccel.workers import client
from anyaccel.workers.ending import ending
from anyaccel.workers.handle import Gone, Worker
from anyaccel.workers.launching import CPU, outputs
from anyaccel.workers.loop import Timer, loop
from anyaccel.workers.pickling import Pickled
from anyaccel.workers.tasks import Options, Task
from anyaccel.workers.wire import Kind, Message

if TYPE_CHECKING:
    from anyaccel.workers.core import Core
    from anyaccel.workers.leases import Held

QUICK_SECONDS = 0.005
"""About so much work stands in line in a channel; a worker that does not answer for so long is looked after."""

MOST_QUEUED, MOST_QUEUED_BYTES = 32, 1 << 12
"""So many calls at most stand in line in a channel, and larger ones do not: together they find room in its buffer."""


class Member:
    """A worker process of a pool, from the decision to fork it until its devices have gone back.

    Attributes:
        core: The pool.
        options: How the calls that it runs are to be run.
        held: The devices that it holds, or None for the CPU alone.
        ids: Ids of these devices.
        allocation: What it holds, with what enforces that once it is known.
        worker: Its process, once the nursery was asked for it.
        task: The call that it runs, or None.
        feeding: Held by whoever gives it a call, from the choice to the sending: calls arrive in the order of choice.
        queued: Calls that stand behind that one in its channel: it begins with them without asking.
        pace: Seconds that an answer has taken lately.
        heard: Time of ``time.monotonic()`` of its last answer, or of the first call since it had none.
        calls: Calls that it was given so far.
        ending: Whether it gets no more calls.
        stopped: Whether we have ended it, whatever it was doing.
        proven: Whether it has answered at all.
        unsent: Numbers of calls that could not even be sent, since it had gone.
        fault: Why nothing that it says is believed any more, or an empty string.
        last: Number of the call that it has answered last.
        notices: What it has to say before it answers, in order.
        rested: Time of ``time.monotonic()`` since which it has no call.
    """

    __slots__ = (
        "allocation", "calls", "core", "ending", "fault", "feeding", "heard", "held", "ids", "last", "notices",
        "options", "pace", "proven", "queued", "rested", "stopped", "stuck", "task", "timer", "unsent", "worker",
    )  # fmt: skip

    def __init__(self, core: Core, options: Options, held: Held | None, task: Task | None) -> None:
        self.core = core
        self.options = options
        self.held = held
        self.allocation = CPU if held is None else held.allocation
        self.ids = frozenset(device.id for device in self.allocation.devices)
        self.worker: Worker | None = None
        self.task = task
        self.queued: deque[Task] = deque()
        self.pace = float("inf")
        self.feeding = threading.Lock()
        self.heard = 0.0
        self.calls = 0
        self.ending = False
        self.stopped = False
        self.proven = False
        self.unsent: set[int] = set()
        self.stuck = ""
        self.fault = ""
        self.last = 0
        self.notices: deque[Kind] = deque()
        self.rested = 0.0
        self.timer: Timer | None = None

    @property
    def busies_processor(self) -> bool:
        """Whether it counts among those that may run at once without devices."""
        return self.held is None

    @property
    def room(self) -> int:
        """How many calls may stand behind the one that it runs: few that take long, none that take very long."""
        return min(MOST_QUEUED, int(QUICK_SECONDS / max(self.pace, 1e-6)))

    @property
    def outstanding(self) -> list[Task]:
        """Calls that it was given and has not answered, in order."""
        return [*([] if self.task is None else [self.task]), *self.queued]

    def launch(self, task: Task) -> None:
        """Have it forked, make its environment, and send it its first call."""
        core = self.core
        task.future.allocation = self.allocation
        try:
            descriptors = () if self.held is None else self.held.descriptors
            nursery, self.worker = client.spawn(self, core.preload, grace=core.grace, leases=descriptors)
            self.worker.mark = (() if self.held is None else self.held.mark) or marks.draw()
            self.allocation, setup = core.preparation.setup(
                self.allocation,
                core.leases.inventory,
                lease="" if self.held is None else self.held.lease,
                mark=self.worker.mark,
                environ=nursery.environ,
                path=nursery.path,
                ready=task.options.timeout is not None,
            )
            task.future.allocation = self.allocation
            if task.options.timeout is not None:
                self.notices.append(Kind.READY)
            if core.preparation.staged:
                self.notices.append(Kind.PREPARED)
            with outputs() as pair:
                self.worker.send(Kind.SETUP, setup, (*pair, *descriptors))
            self._assign(task, fresh=True)
            if self.stopped:  # when there was no worker yet that could have been told
                self.worker.stop(core.grace)
            core.use(nursery, ahead=self.options.max_calls == 1)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            task.fail(error)
            if self.worker is None:
                core.on_gone(self, Gone(forked=False))
            else:
                self.stop(0)

    def run(self, task: Task) -> None:
        """Send it another call."""
        task.future.allocation = self.allocation
        self.heard = time.monotonic()
        try:
            self._assign(task)
        except OSError as error:
            task.fail(error)
            self.stop(0)

    def queue(self, task: Task) -> None:
        """Send it a call that is to wait in its channel. What does not reach it is found there when it has gone."""
        worker, body = self.worker, task.body
        assert worker is not None  # noqa: S101 - it has answered already
        if body is None:  # cancelled just now, and on its way back
            return
        task.future.allocation = self.allocation
        task.worker = worker
        self.calls += 1
        if not worker.send(Kind.CALL, body, number=task.number):
            self.unsent.add(task.number)

    def answered(self, number: int) -> Task | None:
        """The call that it has answered, which it does not run any more; called with the pool's lock held."""
        now = time.monotonic()
        taken, self.heard = now - self.heard, now
        self.pace = self.pace + (taken - self.pace) / 4 if self.proven else taken
        self.proven = True
        task = self.task
        if task is None or task.number != number:
            task = next((task for task in self.queued if task.number == number), None)
        if task is not None:
            self.drop(task)
            task.body = None
            self.last = number
        return task

    def takes(self, task: Task, *, ahead: bool) -> bool:
        """Whether a call may be run here, or stand behind one that runs; called with the pool's lock held."""
        if task.options.reuse != self.options.reuse or not self.core.feeds:
            return False
        if not ahead:
            return True
        body = task.body
        small = body is not None and not body.buffers and len(body.data) <= MOST_QUEUED_BYTES
        return small and self.task is not None and task.options.timeout is None and self.options.max_calls == 0

    def add(self, task: Task) -> None:
        """Say that it has a call; called with the pool's lock held."""
        if self.task is None:
            self.task = task
        else:
            self.queued.append(task)
            if self.worker is not None:
                self.worker.awaited = 1 + len(self.queued)

    def drop(self, task: Task) -> None:
        """Forget a call that it was given; called with the pool's lock held."""
        if self.task is task:
            self.task = self.queued.popleft() if self.queued else None
        else:
            self.queued.remove(task)
        if self.worker is not None:
            self.worker.awaited = 1 + len(self.queued)

    def take_back(self) -> Task | None:
        """The first call that it has not begun with, which it never will now; called with the pool's lock held."""
        message = None if self.worker is None else self.worker.take_back()
        task = next((task for task in self.outstanding if message and task.number == message.number), None)
        if message is not None and task is not None:
            self._regain(task, message)
            self.drop(task)
        return task

    def not_begun(self) -> list[Task]:
        """The calls that it never began with, now that it has gone; called with the pool's lock held."""
        messages: dict[int, Message] = {}
        while self.worker is not None and (message := self.worker.take_back()) is not None:
            for descriptor in message.descriptors:
                os.close(descriptor)
            messages[message.number] = message
        if not self.proven:
            messages = {}  # it never became a worker, and another one may not either
        found = []
        for task in self.outstanding:
            if task.number in messages:
                self._regain(task, messages[task.number])
            elif task.number not in self.unsent:
                continue
            task.worker = None
            found.append(task)
        return [task for task in found if task.kind != Kind.METHOD and not task.future.done()]

    @staticmethod
    def _regain(task: Task, message: Message) -> None:
        task.worker = None
        if task.undecided():
            task.body = Pickled(bytes(message.data), message.buffers)

    def _assign(self, task: Task, *, fresh: bool = False) -> None:
        assert self.worker is not None  # noqa: S101 - it was launched
        self.calls += 1
        self.ending = self.ending or self.calls == self.options.max_calls
        body = task.body
        if task.tries >= task.options.retries:
            task.body = None
        if body is None:  # cancelled just now, and its worker is being ended
            return
        task.worker = self.worker
        kind = task.kind if not self.ending or task.kind != Kind.CALL else Kind.LAST_CALL
        if not fresh:  # the time of a fresh one begins when it is there
            self._start_timer(task)
        if self.core.logs is None:
            sent = self.worker.send(kind, body, number=task.number)
        else:
            task.future.log = self.core.logs.path_for(task.name)
            with outputs(task.future.log) as pair:
                sent = self.worker.send(kind, body, pair, number=task.number)
        if not sent:
            self.unsent.add(task.number)
            task.body = body

    def _start_timer(self, task: Task | None) -> None:
        if task is not None and task.options.timeout is not None:
            task.timer = loop().call_later(task.options.timeout, partial(self.core.on_timeout, self, task))

    def stop(self, grace: float, *, answer: bool = True) -> None:
        """End it, and everything that it started.

        Args:
            grace: Seconds between asking and killing.
            answer: Whether anybody still wants what it may say.
        """
        self.ending = self.stopped = True
        if self.worker is not None:
            self.worker.stop(grace)
            if not answer:
                self.worker.interrupt()

    def finish(self) -> None:
        """Let it end by itself; if it takes too long, end it."""
        self.ending = True
        if self.worker is not None:
            self.worker.finish()
        self.expect_end()

    def leave(self) -> None:
        """The pool takes no more calls: end once there is nothing to do."""
        if self.task is None and not self.ending:
            self.finish()

    def expect_end(self) -> None:
        """Give it so long to end by itself."""
        grace = self.core.grace
        self.timer = loop().call_later(max(grace, 1.0), partial(self.stop, grace))

    def on_message(self, _: Worker, message: Message) -> None:
        """It has answered, or is ready to begin."""
        if not self.expects(message):
            if not self.fault:
                self.refuse(f"it sent what is no answer (a message of the kind {message.kind})")
        elif message.kind == Kind.BROKEN:
            self.core.on_broken(self, message)
        elif message.kind in (Kind.READY, Kind.PREPARED):
            if self.notices.popleft() == Kind.READY:
                self._start_timer(self.task)
        else:
            self.core.on_answer(self, message)

    def expects(self, message: Message) -> bool:
        """Whether a worker that keeps to the rules may say this now."""
        if self.fault:
            return False
        if message.kind in (Kind.RESULT, Kind.ERROR):
            return not self.notices
        if message.kind == Kind.BROKEN:
            return bool(self.notices) if self.core.preparation.staged else not self.proven
        return bool(self.notices) and self.notices[0] == message.kind

    def on_unasked(self, number: int) -> None:
        """It has answered a call that it does not run. The last one a second time costs nothing: others may run."""
        if number != self.last:
            self.refuse("it answered a call that it was not given")

    def refuse(self, fault: str) -> None:
        """Believe it nothing any more, and end it."""
        self.fault, self.ending = fault, True
        if self.worker is not None:
            self.worker.refuse(fault)

    def on_fault(self, _: Worker, reason: str) -> None:
        """What it sent is no answer, or cannot be read."""
        self.fault, self.ending = self.fault or reason, True

    def on_stuck(self, _: Worker, reason: str) -> None:
        """It ignores SIGKILL, or cannot be understood."""
        self.stuck = reason
        self.core.on_stuck(self, reason)

    def on_gone(self, _: Worker, gone: Gone) -> None:
        """It has left the kernel."""
        if self.timer is not None:
            self.timer.cancel()
        self.core.on_gone(self, gone)

    def death(self, gone: Gone, name: str) -> WorkerError:
        """Why its call has no result."""
        if not gone.forked:
            return NurseryError(f"no worker can be started for {name}: {gone.reason}")
        who = f"the worker (process {gone.pid}) that ran {name}" if gone.pid else f"the worker that ran {name}"
        if self.fault:
            return BrokenWorkerError(f"{who} was ended: {self.fault}", exit_status=gone.status)
        notes = "; ".join(filter(None, (gone.reason, self.stuck)))
        text = f"{who} {ending(gone.status)} before it answered" + (f": {notes}" if notes else "")
        return BrokenWorkerError(text, exit_status=gone.status)
