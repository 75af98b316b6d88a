"""The child side of a guarded call: a small process that forks one grandchild per task and watches them.

It is started by :mod:`anyaccel.probe.guard`, loads the modules that tasks need once, and reads one line of JSON from
standard input: ``{"seconds": s, "tasks": {key: ["module:function", payload]}}``. For every task it writes one line to
standard output as soon as it is known: ``{"key": ..., "value": ...}`` or ``{"key": ..., "fault": {...}}``.

Whatever a task does - hang, crash, exit, print, raise - costs that task only. When the caller goes away (end of file
on standard input) everything is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import sys
import time
from typing import Any

ANSWER_LIMIT = 64 << 20
OUTPUT_TAIL = 8192
REAP_SECONDS = 0.5


def main(preload: list[str]) -> None:
    """Import some modules, serve one batch of tasks, then end."""
    gc.disable()  # nobody here lives long enough to need it, and it costs every fork a copy of what it touches
    for module in preload:
        importlib.import_module(module)
    batch = json.loads(sys.stdin.buffer.readline() or "{}")
    if batch:
        Batch(batch["tasks"], batch["seconds"]).serve()
        reap(REAP_SECONDS)
    os._exit(0)


def reap(seconds: float) -> None:
    """Collect the processes that have ended: in a container nobody else may. One stuck in the kernel is left behind."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)


class Task:
    """One forked grandchild: its process, the pipe of its answer and the file that catches its output."""

    def __init__(self, key: str, function: str, payload: Any, seconds: float) -> None:
        self.key = key
        self.answer = bytearray()
        self.output = os.memfd_create("output")
        self.pipe, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _perform(function, payload, write_end, self.output, seconds)
        os.close(write_end)

    def kill(self) -> None:
        """End it and whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)
            os.killpg(self.pid, signal.SIGKILL)

    def outcome(self) -> dict[str, Any]:
        """What came out of it, once it has closed its pipe."""
        try:
            answer: dict[str, Any] = json.loads(self.answer)
        except ValueError:
            return self.fault("died", f"its process {self._end()} before it answered")
        if "fault" in answer:
            return self.fault(answer["fault"]["kind"], answer["fault"]["reason"], answer["fault"]["details"])
        return {"key": self.key, **answer}

    def _end(self) -> str:
        for _ in range(100):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
            time.sleep(0.01)
        return "is stuck in the kernel and closed its answer"

    def fault(self, kind: str, reason: str, details: str = "") -> dict[str, Any]:
        """Describe a failure, with the end of what the task had printed."""
        size = os.fstat(self.output).st_size
        printed = os.pread(self.output, OUTPUT_TAIL, max(0, size - OUTPUT_TAIL)).decode(errors="replace")
        return {"key": self.key, "fault": {"kind": kind, "reason": reason, "details": details + printed}}


class Batch:
    """The tasks of one call, all running at once."""

    def __init__(self, tasks: dict[str, Any], seconds: float) -> None:
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ)
        self.running = {key: Task(key, function, payload, seconds) for key, (function, payload) in tasks.items()}
        for task in self.running.values():
            self.selector.register(task.pipe, selectors.EVENT_READ, task)

    def serve(self) -> None:
        """Report each task when it ends, and all that are left at the deadline."""
        while self.running:
            left = self.deadline - time.monotonic()
            if left <= 0:
                break
            for ready, _ in self.selector.select(left):
                if ready.data is None:  # nothing more is ever sent: the caller has gone
                    self._kill_all()
                    return
                self._receive(ready.data)
        self._kill_all()
        for task in self.running.values():
            # Not waited for: a process that is stuck in the kernel ignores even SIGKILL.
            _report(task.fault("timeout", f"it did not answer within {self.seconds:g} s"))

    def _receive(self, task: Task) -> None:
        chunk = os.read(task.pipe, 1 << 16)
        task.answer += chunk
        if chunk and len(task.answer) <= ANSWER_LIMIT:
            return
        self.selector.unregister(task.pipe)
        del self.running[task.key]
        task.kill()  # what it started, and itself if it closed the pipe and lives on
        _report(task.outcome())

    def _kill_all(self) -> None:
        for task in self.running.values():
            task.kill()


def _report(outcome: dict[str, Any]) -> None:
    os.write(1, json.dumps(outcome).encode() + b"\n")


def _perform(function: str, payload: Any, pipe: int, output: int, seconds: float) -> None:
    """Run one task in the grandchild; never returns."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(2)
    # A hang is found by its traceback, written just before the deadline.
    faulthandler.dump_traceback_later(max(0.05, seconds * 0.9), file=2)
    try:
        module, _, name = function.partition(":")
        value = getattr(importlib.import_module(module), name)(payload)
        answer = json.dumps({"value": value})
    except BaseException as error:  # noqa: BLE001 - SystemExit of a vendor's tool is no reason to vanish
        import traceback

        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        fault = {"kind": "raised", "reason": reason, "details": traceback.format_exc()}
        answer = json.dumps({"fault": fault})
    faulthandler.cancel_dump_traceback_later()
    with open(pipe, "wb") as file:
        file.write(answer.encode())
    os._exit(0)
