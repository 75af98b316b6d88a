"""The calling side of a guarded call: functions that may hang, crash or exit, run where that costs nothing.

The caller never forks: it may have threads, or a device open. It starts one fresh interpreter, which forks.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anyaccel import interpreter

START_SECONDS = 20.0
"""Time that the fresh interpreter itself may take beside its tasks, on a machine under load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came out of one guarded task.

    Attributes:
        value: What the task returned, as JSON data; None when it failed.
        fault: ``raised``, ``timeout`` or ``died``; empty when it returned.
        reason: Why it failed.
        details: Traceback, and the end of what it had printed.
    """

    value: Any = None
    fault: str = ""
    reason: str = ""
    details: str = ""


class GuardedCall:
    """One batch of guarded tasks: create it early, since the fresh interpreter starts while the caller goes on.

    Args:
        preload: Modules that the tasks need, imported once for all of them.
    """

    def __init__(self, *preload: str) -> None:
        self._process = interpreter.start(
            "anyaccel.probe.forkserver", preload, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def run(self, tasks: Mapping[str, tuple[str, Any]], seconds: float) -> dict[str, Outcome]:
        """Run every task at once, each in a process of its own.

        Args:
            tasks: By key, the function as ``module:name`` and the JSON data that it is called with.
            seconds: Time that each may take.

        Returns:
            One outcome per key.
        """
        outcomes: dict[str, Outcome] = {}
        try:
            interpreter.tell(self._process, {"seconds": seconds, "tasks": tasks})
            self._collect(outcomes, len(tasks), time.monotonic() + seconds + START_SECONDS)
        finally:
            self.close()
        lost = Outcome(fault="died", reason="the process that guards it ended before it answered")
        return {key: outcomes.get(key, lost) for key in tasks}

    def abandon(self) -> None:
        """End the interpreter, which has no task yet."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """End the interpreter and every task that is left."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _collect(self, outcomes: dict[str, Outcome], count: int, deadline: float) -> None:
        stream = self._process.stdout
        assert stream is not None  # noqa: S101
        pending = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while len(outcomes) < count and selector.select(max(0.0, deadline - time.monotonic())):
                chunk = os.read(stream.fileno(), 1 << 16)
                if not chunk:
                    return
                *lines, rest = (bytes(pending) + chunk).split(b"\n")
                pending = bytearray(rest)
                for line in lines:
                    answer = json.loads(line)
                    fault = answer.get("fault", {})
                    outcomes[answer["key"]] = Outcome(
                        value=answer.get("value"),
                        fault=fault.get("kind", ""),
                        reason=fault.get("reason", ""),
                        details=fault.get("details", ""),
                    )


_early: dict[tuple[str, ...], GuardedCall] = {}


def start_early(*preload: str) -> None:
    """Start the interpreter for the next batch of tasks, of which nothing needs to be known yet."""
    _early[preload] = GuardedCall(*preload)


def guarded_call(*preload: str) -> GuardedCall:
    """The interpreter that was started early for such tasks, or else a new one."""
    return _early.pop(preload, None) or GuardedCall(*preload)


def abandon_early() -> None:
    """End what was started early and not needed."""
    while _early:
        _early.popitem()[1].abandon()
