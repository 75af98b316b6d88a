"""What the first record of ``neuron-monitor`` says: which process uses which cores, and how busy these are.

Source: "Neuron Monitor User Guide" of the AWS Neuron documentation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from anyaccel.plugin import ProbeContext, QueryError

MONITOR = "/opt/aws/neuron/bin/neuron-monitor"
SECONDS = 3.0
LINE_LIMIT = 8 << 20
PERCENT = 100


class Monitor:
    """The runtimes of a machine, each a process.

    Attributes:
        answered: Whether the monitor said anything.
        cores: Ids of the cores that it says a process uses, by process id.
    """

    def __init__(self, ctx: ProbeContext) -> None:
        """Ask the monitor. A record that cannot be had or understood is none."""
        runtimes = _runtimes(ctx)
        self.answered = runtimes is not None
        self.cores: dict[int, set[str]] = {}
        self._percent: dict[str, object] = {}
        for runtime in runtimes or ():
            used: Any = runtime
            for key in ("report", "neuroncore_counters", "neuroncores_in_use"):
                used = used.get(key) if isinstance(used, dict) else None
            if isinstance(used, dict) and isinstance(runtime.get("pid"), int):
                self.cores.setdefault(runtime["pid"], set()).update(used)
            for core, counters in used.items() if isinstance(used, dict) else ():
                if isinstance(counters, dict):
                    self._percent.setdefault(core, counters.get("neuroncore_utilization"))

    def utilization(self, core: int) -> float | None:
        """Share of time that a core was busy; None when no process of the record uses it."""
        percent = self._percent.get(str(core))
        if isinstance(percent, int | float) and not isinstance(percent, bool) and 0 <= percent <= PERCENT:
            return percent / PERCENT
        return None


def _runtimes(ctx: ProbeContext) -> Sequence[Mapping[str, Any]] | None:
    path, seconds = ctx.environ.get("PATH", os.defpath), min(SECONDS, ctx.remaining() / 2)
    try:
        record = json.loads(ctx.query("neuron-monitor/record", lambda: _first_line(path, seconds)))
    except (QueryError, ValueError, TypeError, RecursionError):
        return None
    runtimes = record.get("neuron_runtime_data") if isinstance(record, dict) else None
    if not isinstance(runtimes, list):
        return None
    return [runtime for runtime in runtimes if isinstance(runtime, dict) and not runtime.get("error")]


def _first_line(path: str, seconds: float) -> str:
    """Run the monitor until its first record, which comes at once, and end it: it has no form that prints one only."""
    import contextlib  # loaded for the monitor only: most detections run none
    import select
    import shutil
    import signal
    import subprocess
    import time

    program = shutil.which(MONITOR) or shutil.which("neuron-monitor", path=path)
    if program is None:
        raise FileNotFoundError("neuron-monitor is not installed")
    end, data = time.monotonic() + seconds, b""
    process = subprocess.Popen(
        [program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    with contextlib.closing(process.stdout) as stream:  # type: ignore[type-var] # pyright: ignore
        try:
            while b"\n" not in data and len(data) < LINE_LIMIT:
                if not select.select([stream], [], [], max(0.0, end - time.monotonic()))[0]:
                    raise TimeoutError(f"neuron-monitor printed no record within {seconds:.1f} s")
                chunk = os.read(stream.fileno(), 1 << 16)
                if not chunk:
                    break
                data += chunk
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that is stuck in the kernel ignores SIGKILL
                process.wait(timeout=1)
    return data.partition(b"\n")[0].decode(errors="replace")
