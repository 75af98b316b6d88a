"""The first record of ``neuron-monitor``: cores of each process, and their utilization.

Source: "Neuron Monitor User Guide" of the AWS Neuron documentation.
"""

from __future__ import annotations

import json
from typing import Any

from anyaccel.plugin import CommandTimeoutError, ProbeContext

from anyaccel_neuron.neuron_ls import natural

Use = dict[int, dict[str, float | None]]
"""Utilization of a core between 0 and 1, or None if unknown, by process id and core id."""

SECONDS = 3.0
# The first record comes at once, and no option ends the monitor after it. So the shell kills the monitor, and waits for
# its children.
FIRST_RECORD = (
    "sh -c 'echo $$; PATH=/opt/aws/neuron/bin${PATH:+:$PATH} exec neuron-monitor'"
    ' | { read -r pid; head -n 1 | head -c 8388608; kill -9 "$pid"; }'
)


def cores_in_use(ctx: ProbeContext) -> Use | None:
    """Ask the monitor; None without a valid record."""
    try:
        result = ctx.run(["sh", "-c", FIRST_RECORD], timeout=min(SECONDS, ctx.remaining() / 2))
        record = json.loads(result.stdout if result else "")
    except (CommandTimeoutError, OSError, ValueError, RecursionError):
        return None
    runtimes = _at(record, "neuron_runtime_data")
    if not isinstance(runtimes, list):
        return None
    found: Use = {}
    for runtime in runtimes:
        pid, cores = _at(runtime, "pid"), _at(runtime, "report", "neuroncore_counters", "neuroncores_in_use")
        # A runtime with an error reports no cores, which does not mean that it uses none.
        if natural(pid) and not _at(runtime, "error"):
            shares = cores.items() if isinstance(cores, dict) else ()
            found.setdefault(pid, {}).update({core: _share(counters) for core, counters in shares})
    return found


def _at(data: Any, *keys: str) -> Any:
    """Return the value at a path of keys; None if the path is missing."""
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _share(counters: Any) -> float | None:
    percent = _at(counters, "neuroncore_utilization")
    known = isinstance(percent, int | float) and not isinstance(percent, bool) and 0 <= percent <= 100  # noqa: PLR2004
    return percent / 100 if known else None
