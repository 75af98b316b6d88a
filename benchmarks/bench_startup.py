"""What it costs to start: the command line and the import, as multiples of an interpreter that does nothing."""

from __future__ import annotations

import os
import sys

from measure import Row, against, command, interleaved

ROUNDS = 15
BARE = "python -c pass"


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure start-up on a machine without devices, with every plug-in that is installed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ANYACCEL_")}
    script = os.path.join(os.path.dirname(sys.executable), "anyaccel")
    times = interleaved(
        {
            BARE: command([sys.executable, "-c", "pass"], environ),
            "anyaccel --version": command([script, "--version"], environ),
            "import anyaccel": command([sys.executable, "-c", "import anyaccel"], environ),
            "anyaccel": command([script], environ),
        },
        rounds,
    )
    return against(BARE, times, {"anyaccel --version": 4, "import anyaccel": 5, "anyaccel": 15})
