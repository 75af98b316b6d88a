"""The one error that is an executor's, too; it stands apart since importing executors takes time."""

from __future__ import annotations

from concurrent.futures import BrokenExecutor

from anyaccel.errors import WorkerError


class BrokenPoolError(WorkerError, BrokenExecutor):
    """Raised when no worker of a pool can be used, because its initializer or its sandbox fails."""

    code = "broken-pool"
