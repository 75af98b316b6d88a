"""Plug-ins: which are installed, which may have hardware here, and one process per vendor that runs its hooks."""

import sys

DEADLINE_SECONDS = 10.0
"""Time for a hook that touches the machine."""


def close() -> None:
    """End the processes of all vendors, where there are any. The next call starts them again."""
    if process := sys.modules.get("anyaccel.vendors.process"):
        process.close()
