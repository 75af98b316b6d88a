"""The fork server of guarded processes. This module is imported before the server starts, so it imports little."""

from __future__ import annotations

from anyaccel.forkserver import client

IDLE_SECONDS = 60.0
"""A vendor's process ends after a minute without a call, and the fork server after a minute without a process."""
STUCK_SECONDS = 0.5
"""How long to wait for a killed process: a process that is stuck in the kernel ignores even SIGKILL."""


def find_server(*preload: str) -> client.ForkServer:
    """Return the fork server with some preloaded modules; start the server if none runs.

    Raises:
        OSError: When the server cannot be started.
    """
    config = {"own": preload, "stuck": STUCK_SECONDS, "idle": IDLE_SECONDS}
    return client.find_server(preload, lambda: client.ForkServer(config, apart=True))
