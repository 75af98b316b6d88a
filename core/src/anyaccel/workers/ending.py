"""How a process ended, in words."""

from __future__ import annotations

import signal


def ending(status: int | None) -> str:
    """Say how a process with this exit status ended; negative numbers are signals."""
    if status is None:
        return "ended"
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"
