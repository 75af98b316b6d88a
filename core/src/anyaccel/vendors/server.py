"""The fork server of guarded processes; imported before that starts, so it imports next to nothing."""

from __future__ import annotations

from anyaccel.forkserver import client

IDLE_SECONDS = 60.0
"""A vendor's process that was not called for so long ends, and so does a fork server without processes."""
STUCK_SECONDS = 0.5
"""How long what was killed is waited for: a process that is stuck in the kernel ignores even SIGKILL."""


def find_server(*preload: str) -> client.ForkServer:
    """Return the fork server of this process whose processes have these modules; started when there is none.

    Raises:
        OSError: When it cannot be started.
    """
    config = {"own": preload, "stuck": STUCK_SECONDS, "idle": IDLE_SECONDS}
    return client.find_server(preload, lambda: client.ForkServer(config, apart=True))
