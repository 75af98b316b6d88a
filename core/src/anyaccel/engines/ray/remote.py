"""What calls and actors that Ray has been asked to place have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from anyaccel.engines.ray.connection import last_line
from anyaccel.engines.ray.notices import Started
from anyaccel.errors import BrokenWorkerError, NurseryError, WorkerError
from anyaccel.scheduler import Reason, ReasonCode, Verdict
from anyaccel.workers.backlog import Place
from anyaccel.workers.tasks import Task

if TYPE_CHECKING:
    from anyaccel.engines.ray.engine import RayEngine

_LOOK_UP_SECONDS = 0.2
"""How often somebody who waits for Ray looks whether there still is a reason to."""


class Demand:
    """A call that Ray knows of and has not placed: what stands in for a claim."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def withdraw(self) -> bool:
        """The call is cancelled, not this."""
        return False

    def first(self) -> bool:
        """Nobody but Ray knows."""
        return False

    def alone(self) -> bool:
        """Nobody but Ray knows."""
        return False

    def why(self) -> Verdict:
        """What it waits for, as far as anybody can say."""
        request = self._task.options.needs
        assert request is not None  # noqa: S101 - others have no demand
        reason = Reason(code=ReasonCode.TAKEN, message="Ray has not placed it yet; 'ray status' shows all demands")
        return Verdict(request=request, fits_now=False, ever_fits=True, reasons=(reason,))


class Remote:
    """What calls and actors have in common; mixed into members."""

    __slots__ = ()

    if TYPE_CHECKING:
        core: Any
        task: Task | None
        started: Started | None
        _ref: Any

    @property
    def engine(self) -> RayEngine:
        """The pool."""
        engine: RayEngine = self.core
        return engine

    @property
    def begun(self) -> bool:
        """Whether it runs its call by now, as far as is known."""
        return self.started is not None

    def attend(self, pending: Callable[[], bool], seconds: float | None = None) -> None:
        """Take its answer in this thread, which saves the way through Ray's and the loop's."""
        ray = self.engine.ray
        end = float("inf") if seconds is None else time.monotonic() + seconds
        while pending() and (ref := self._ref) is not None and ray.is_initialized():
            left = end - time.monotonic()
            if left <= 0:
                return
            try:
                value = ray.get(ref, timeout=min(left, _LOOK_UP_SECONDS))
            except ray.exceptions.GetTimeoutError:
                continue
            except Exception as error:  # noqa: BLE001 - Ray raises many kinds
                self.hear(ref, partial(self.on_lost, error))
            else:
                self.hear(ref, partial(self.on_value, value))

    def expect_answer(self, ref: Any) -> None:
        """Have the answer to a call handed over, to whoever takes it first."""
        self._ref = ref
        self.engine.follow(
            ref,
            lambda value: self.hear(ref, partial(self.on_value, value)),
            lambda error: self.hear(ref, partial(self.on_lost, error)),
            wanted=lambda: self._ref is ref,
        )

    def hear(self, ref: Any, hand_over: Callable[[], None]) -> None:
        """Hand over an answer, or that there is none, unless somebody else has."""
        with self.core.lock:
            first = self._ref is ref
            if first:
                self._ref = None
        if first:
            hand_over()

    def on_value(self, value: Any) -> None:
        """It has answered."""
        raise NotImplementedError

    def on_lost(self, error: BaseException) -> None:
        """Ray has no answer, and never will."""
        raise NotImplementedError

    def expect_end(self) -> None:
        """Whoever runs the process sees to it."""

    def ask(self, task: Task) -> tuple[Any, bytes]:
        """What to ask Ray for, and what to tell the host of a call."""
        found = self.engine.prepared(task)
        self.expect_devices(task)
        return found

    def expect_devices(self, task: Task) -> None:
        """Let a call say what it waits for."""
        if task.options.needs is not None:
            task.place = Place(task)
            task.place.claim = Demand(task)

    def on_started(self, started: Started) -> None:
        """It has its devices."""
        self.started = started  # type: ignore[misc]
        task = self.task
        if task is not None:
            task.place = None
            task.worker = self
            task.future.allocation = started.allocation

    def lost(self, error: BaseException) -> WorkerError:
        """Why there is no answer when Ray has given up."""
        name = self.task.name if self.task is not None else "it"
        if isinstance(error, self.engine.ray.exceptions.RayTaskError):
            return NurseryError(f"no worker can be started for {name} on a node: {last_line(error)}")
        where = f"on the node {self.started.node}" if self.started else "on a node of the cluster"
        return BrokenWorkerError(
            f"the worker that ran {name} {where} ended before it answered, since the node or Ray's process there has"
            f" died ({type(error).__name__})"
        )
