"""Plug-ins: which are installed, which may have hardware here, and one process per vendor that runs its hooks."""

import contextlib
import sys

DEADLINE_SECONDS = 10.0
"""Time for a hook that touches the machine."""
TASKS = "anyaccel.vendors.tasks"
"""The module that runs in a vendor's process; named, since nobody else must import it."""


def begin() -> None:
    """Start what forks vendors' processes, which takes as long as what the caller may do before it asks them."""
    from anyaccel.probe.guard import guard

    with contextlib.suppress(OSError):  # whoever asks says why
        guard(TASKS)


def close() -> None:
    """End the processes of all vendors, where there are any. The next call starts them again."""
    if process := sys.modules.get("anyaccel.vendors.process"):
        process.close()
