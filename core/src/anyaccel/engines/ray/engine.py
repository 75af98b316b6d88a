"""The engine that has Ray place calls, which workers of our own then run on the nodes."""

from __future__ import annotations

import os
import pickle
import secrets
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from anyaccel.engines.ray import actor_host, host
from anyaccel.engines.ray.cluster import Cluster
from anyaccel.engines.ray.members import RemoteActor, RemoteCall
from anyaccel.engines.ray.messages import Order, Spec
from anyaccel.engines.ray.notices import LOOK_SECONDS, look
from anyaccel.engines.ray.plan import Plan
from anyaccel.errors import UsageError
from anyaccel.model import Allocation, Request
from anyaccel.workers.engine import Setting
from anyaccel.workers.lifecycle import Lifecycle
from anyaccel.workers.loop import loop
from anyaccel.workers.member import Member
from anyaccel.workers.pickling import Pickled, dumps, dumps_whole
from anyaccel.workers.tasks import Options, Task, TaskFuture, name_of

if TYPE_CHECKING:
    from anyaccel.workers.gangs import GangFuture

LARGE = 1 << 15
"""Bytes from which what each call needs is stored once."""
MOST_PREPARED = 256
THREADS = 4
"""Of an actor's host: for a call, for word of its end, and for whatever ends it."""


def open_engine(setting: Setting) -> RayEngine:
    """Make it.

    Raises:
        UsageError: When Ray is not installed or not there, or an argument is for one machine.
    """
    for name, given in (("machine", setting.machine), ("declare", setting.declare)):
        if given is not None:
            raise UsageError(f"{name} is for engine='local': each node of a Ray cluster has devices of its own")
    return RayEngine(setting)


class RayEngine(Lifecycle):
    """The calls of one pool on a Ray cluster. Every method may be called by any thread.

    Attributes:
        ray: The module.
        cluster: The cluster.
        logs: Where the output of each call goes, or None.
        run: Our task of Ray.
        spec: What hosts must know of the pool.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(grace=setting.grace, idle=setting.idle)
        self.cluster = Cluster(setting.address)
        self.ray = self.cluster.ray
        self.max_workers = setting.max_workers
        self.logs = setting.logs
        self.preparation = setting.preparation
        self._name = secrets.token_hex(8)
        self._numbers = count()
        # With the plan and the options, of which the key has the ids: they take long to hash.
        self._prepared: dict[object, tuple[Any, bytes, Plan | None, Options]] = {}
        self._looking = False
        # Whatever dies is told at once, and run again by us where that was asked for.
        self.run = self.ray.remote(max_calls=0, max_retries=0)(host.run)
        self._actors = self.ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=THREADS)(
            actor_host.ActorHost
        )
        spec = dumps_whole(
            Spec(
                pool=self._name,
                path=tuple(os.path.abspath(entry) for entry in sys.path),
                preparation=setting.preparation,
                preload=setting.preload,
                grace=setting.grace,
                idle=setting.idle,
                shared=setting.shared,
            )
        )
        self.spec = spec if len(spec) < LARGE else self.ray.put(spec)

    def check(self, request: Request) -> None:
        """Raise the error of a request that no node can ever serve."""
        self.cluster.plan(request)

    def submit(self, options: Options, function: Callable[..., Any], args: Any, kwargs: Any) -> TaskFuture:
        """Let Ray place a call."""
        task = Task(name_of(function), options, self.on_cancel)
        self.enter(task, (function, args, kwargs))
        return task.future

    def gang(self, options: Options, hosts: int, name: str, call: bytes) -> GangFuture:
        """Let a pickled call be run on each of several nodes at once."""
        from anyaccel.engines.ray.gangs import Gang

        if self.max_workers is not None:
            raise UsageError("a gang starts all its workers at once; max_workers must be None for it")
        gang = Gang(self, options, hosts, name)
        with self.lock:
            self.check_open()
            self.members.update(gang.calls)
        gang.start(call)
        self._watch()
        return gang.future

    def enter(self, task: Task, call: object) -> None:
        """Let Ray place a call, once there may be one more."""
        try:
            body = call if isinstance(call, Pickled) else dumps(call)
        except Exception as error:  # noqa: BLE001 - it belongs to the future, as other executors do it
            self.check_open()
            task.fail(error)
            return
        task.body = body
        with self.lock:
            self.check_open()
            self.backlog.cpu.append(task)
        self.pump()
        self.keep(task)

    def pump(self) -> None:
        """Hand over to Ray whatever may be."""
        while True:
            with self.lock:
                task = self.backlog.next_cpu()
                if task is None or (self.max_workers is not None and len(self.members) >= self.max_workers):
                    return
                self.backlog.cpu.popleft()
                member = (RemoteCall if task.actor is None else RemoteActor)(self, task.options, task)
                self.members.add(member)
            member.launch(task)
            self._watch()

    def prepared(self, task: Task) -> tuple[Any, bytes]:
        """What to ask Ray for, and what to tell the host of a call; the same for all calls that are alike.

        Raises:
            NeverFitsError: When no node can ever serve its request any more.
        """
        needs, options = task.options.needs, _options(task)
        plan = None if needs is None else self.cluster.plan(needs)
        key = (task.name, task.kind, id(options), id(plan))
        found = self._prepared.get(key)
        if found is None:
            order, wanted = self.order(task, plan)
            remote = (
                self.run.options(name=task.name, **wanted) if task.actor is None else self._actors.options(**wanted)
            )
            if len(self._prepared) > MOST_PREPARED:
                self._prepared.clear()
            found = self._prepared[key] = (remote, pickle.dumps(order), plan, options)
        return found[:2]

    @staticmethod
    def order(task: Task, plan: Plan | None) -> tuple[Order, dict[str, Any]]:
        """What to tell the host of a call, and the options of what to ask Ray for."""
        options = _options(task)
        order = partial(Order, name=task.name, max_calls=options.max_calls, timeout=options.timeout)
        if plan is None or plan.request is None:
            # Actors are idle for most of the time, as calls with devices leave the processors to others.
            return order(request=None, resources=()), {"num_cpus": 1 if task.actor is None else 0}
        resources = dict(plan.resources)
        wanted: dict[str, Any] = {"num_cpus": 0, "num_gpus": resources.pop("GPU", 0), "resources": resources}
        if plan.selector:
            wanted["label_selector"] = dict(plan.selector)
        return order(request=plan.request, resources=plan.terms), wanted

    def follow(
        self,
        ref: Any,
        on_value: Callable[[Any], None],
        on_lost: Callable[[BaseException], None],
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Have a value of Ray handed over once it is there, or why it never will be; in the thread of the loop.

        Args:
            ref: The value.
            on_value: Called with it.
            on_lost: Called with the reason.
            wanted: Whether anybody still wants it by then.
        """

        def tell(done: Future[Any]) -> None:
            if wanted():
                loop().call_soon(partial(_hand_over, done, on_value, on_lost))

        ref.future().add_done_callback(tell)

    def new_key(self) -> str:
        """A key for the notice of a call."""
        return f"{self._name}/{next(self._numbers)}"

    def look_for_notices(self) -> None:
        """See which calls run by now, as long as there are some of which nothing was heard."""
        with self.lock:
            calls = {member.key: member for member in self.members if isinstance(member, RemoteCall)}
        silent = self.ray.is_initialized() and any(member.started is None for member in calls.values())
        try:
            found = look(f"{self._name}/", (key for key, member in calls.items() if member.started)) if silent else {}
        except Exception:  # noqa: BLE001 - the cluster is busy, or has gone, of which the calls themselves tell
            found = {}
        for key, started in found.items():
            if key in calls:
                calls[key].on_started(started)
        with self.lock:
            self._looking = bool(self.members) and self.ray.is_initialized()
        if self._looking:
            loop().call_later(LOOK_SECONDS, self._look_aside)

    def _watch(self) -> None:
        """Look for notices from now on, if we do not yet."""
        with self.lock:
            unwatched, self._looking = not self._looking, True
        if unwatched:
            loop().call_later(LOOK_SECONDS, self._look_aside)

    def _look_aside(self) -> None:
        # Not in the thread of the loop, which others need: this may take a while.
        threading.Thread(target=self.look_for_notices, name="anyaccel ray", daemon=True).start()

    def tell(self, method: Any, *arguments: object) -> None:
        """Call a method of an actor of Ray, and expect no answer."""
        if self.ray.is_initialized():  # else Ray would start a cluster to do that
            method.remote(*arguments)

    def kill(self, actor: Any) -> None:
        """End an actor of Ray."""
        if self.ray.is_initialized():
            self.ray.kill(actor)

    def cancel(self, ref: Any) -> None:
        """Let Ray stop a task."""
        if self.ray.is_initialized():
            self.ray.cancel(ref)

    def shutdown(self, *, wait: bool, cancel_futures: bool = False) -> None:
        """Take no more calls; end when those that there are have been run, or nobody is left who would."""
        if not self.foreign and not self.ray.is_initialized():
            with self.lock:
                members = [member for member in self.members if isinstance(member, (RemoteCall, RemoteActor))]
            for member in members:
                member.on_lost(ConnectionError("this process has left the cluster"))
        super().shutdown(wait=wait, cancel_futures=cancel_futures)

    def recall(self, member: Member) -> bool:
        """Cancel a call that nobody has begun with."""
        if isinstance(member, (RemoteCall, RemoteActor)) and self.ray.is_initialized():
            member.recall()
        return False

    def discard(self, member: Member) -> None:
        """A call is over, or an actor."""
        with self.lock:
            self.members.discard(member)
        self.pump()
        self.settle()

    def retry(self, task: Task) -> None:
        """Let a call be placed again, whose worker or node has died."""
        with self.lock:
            task.tries += 1
            task.worker = None
            self.backlog.cpu.appendleft(task)

    def on_cancel(self, task: Task) -> None:
        """A call was cancelled: if Ray knows of it, tell Ray."""
        with self.lock:
            member = next((member for member in self.members if member.task is task), None)
            task.body = None
        if member is not None:
            member.stop(self.grace, answer=False)
        self.pump()
        self.settle()

    def kept_aside(self) -> tuple[tuple[Allocation, str], ...]:
        """The nodes keep devices aside, and say so in their ledgers."""
        return ()


def _options(task: Task) -> Options:
    """How a call is to be run, or the calls of an actor."""
    return task.options if task.actor is None else task.actor.options


def _hand_over(done: Future[Any], on_value: Callable[[Any], None], on_lost: Callable[[BaseException], None]) -> None:
    try:
        value = done.result()
    except BaseException as error:  # noqa: BLE001 - Ray raises many kinds
        on_lost(error)
    else:
        on_value(value)
