"""How much code a fresh ``submit`` and an ``acquire`` cross: functions, modules and changes of module.

``python benchmarks/trace_calls.py`` counts what the calling thread does, until it has the result or the devices.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from types import FrameType

import anyaccel as aa

MACHINE = "sim:H100:8"
SETTLED_SECONDS = 0.5
"""Until the worker before has gone, and its device is back: else the call is given another one, and asks anew."""


class Trace:
    """Counts the functions of anyaccel that are called."""

    def __init__(self) -> None:
        self.calls = 0
        self.changes = 0
        self.modules: set[str] = set()
        self._last: dict[int, str] = {}

    def see(self, frame: FrameType, event: str, _: object) -> None:
        """Count one call; the profiler of every thread."""
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith("anyaccel"):
            return
        self.calls += 1
        self.modules.add(module)
        thread = threading.get_ident()
        self.changes += self._last.get(thread, module) != module
        self._last[thread] = module

    def of(self, work: Callable[[], object]) -> str:
        """Run something, and say what was counted."""
        sys.setprofile(self.see)
        try:
            work()
        finally:
            sys.setprofile(None)
        return f"{self.calls} calls in {len(self.modules)} modules, {self.changes} changes of module"


def main() -> None:
    """Print both."""
    with tempfile.TemporaryDirectory() as state:
        os.environ["ANYACCEL_STATE_DIR"] = state
        with aa.Pool("GPU:1", machine=MACHINE) as pool:
            for _ in range(3):
                pool.submit(os.getpid).result()
            time.sleep(SETTLED_SECONDS)
            print("submit: ", Trace().of(lambda: pool.submit(os.getpid).result()))
        inventory = aa.detect(MACHINE)
        for _ in range(3):
            aa.acquire("GPU:1", inventory=inventory).release()
        print("acquire:", Trace().of(lambda: aa.acquire("GPU:1", inventory=inventory).release()))


if __name__ == "__main__":
    main()
