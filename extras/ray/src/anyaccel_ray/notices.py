"""Notices between pools and running calls, in the key-value store of the Ray cluster.

Ray does not report when a call starts. A call that runs for a while leaves a notice, and its pool polls for notices
while it has calls without one. Keys begin with the job, so that the notices of a job that was killed can be found.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from anyaccel_cluster import Started

from anyaccel_ray.connection import import_ray

if TYPE_CHECKING:
    from anyaccel_cluster import Driver

LOOK_SECONDS = 0.1
"""Interval in seconds between two polls for notices."""
_NAMESPACE = b"anyaccel"


class NoticePoller:
    """Polls for notices of a pool's calls while the pool has calls.

    Args:
        driver: The engine of the pool.
        ray: The module, connected to the cluster.
    """

    def __init__(self, driver: Driver, ray: Any) -> None:
        self._driver = driver
        self._ray = ray
        self._lock = threading.Lock()
        self._looking = self._tidied = False

    def begin(self) -> None:
        """Start polling, because a call or an actor was submitted."""
        with self._lock:  # against the end of the thread, which may decide so at the same time
            unwatched, self._looking = not self._looking, True
        if unwatched:
            threading.Thread(target=self._look, name="anyaccel ray", daemon=True).start()

    def _look(self) -> None:
        """Poll until the pool has no calls, or this process has left the cluster.

        The first time, remove what jobs that were killed have left.
        """
        if not self._tidied:
            self._tidied = True
            remove_stale()
        while True:
            time.sleep(LOOK_SECONDS)
            with contextlib.suppress(Exception):  # the cluster is busy or has gone, which the calls themselves report
                self._look_once()
            with self._lock, self._driver.lock:
                left = not self._ray.is_initialized()
                self._looking = bool(self._driver.members) and not left
            if left:
                self._driver.on_disconnected()
            if not self._looking:
                return

    def _look_once(self) -> None:
        with self._driver.lock:
            begun = {member.key: member.begun for member in self._driver.members}
        if self._ray.is_initialized() and not all(begun.values()):
            for key, started in look(f"{self._driver.name}/", [key for key in begun if begun[key]]).items():
                self._driver.on_started(key, started)


def leave(key: str, started: Started) -> None:
    """Write the notice of a running call."""
    _store()._internal_kv_put(_job() + key, pickle.dumps(started), overwrite=True, namespace=_NAMESPACE)  # noqa: SLF001


def remove(key: str) -> None:
    """Remove the notice of a call; no effect if there is none, or the cluster has gone."""
    with contextlib.suppress(Exception):  # the store ends with the cluster
        _store()._internal_kv_del(_job() + key, namespace=_NAMESPACE)  # noqa: SLF001


def remove_stale() -> None:
    """Remove the notices of jobs that have ended: one that is killed removes none of its own."""
    with contextlib.suppress(Exception):  # the next pool tries again
        store = _store()
        noticed = {key.partition(b"/")[0].decode() for key in store._internal_kv_list(b"", namespace=_NAMESPACE)}  # noqa: SLF001
        if noticed - {_job().rstrip("/")}:
            # The keys first: a job with a notice is in the list of jobs.
            jobs = import_ray()._private.state.jobs()  # noqa: SLF001 - there is no public way
            for job in noticed - {job["JobID"] for job in jobs if not job["IsDead"]}:
                store._internal_kv_del(f"{job}/", del_by_prefix=True, namespace=_NAMESPACE)  # noqa: SLF001


def look(prefix: str, known: Iterable[str]) -> dict[str, Started]:
    """Read and return new notices by key.

    Args:
        prefix: Prefix of the keys.
        known: Keys of notices that were read before.
    """
    found, job = {}, _job()
    there = _store()._internal_kv_list(job + prefix, namespace=_NAMESPACE)  # noqa: SLF001
    for key in {each.decode().removeprefix(job) for each in there} - {*known}:
        value = _store()._internal_kv_get(job + key, namespace=_NAMESPACE)  # noqa: SLF001
        if value is not None:  # else the call is over, and has removed its notice
            found[key] = pickle.loads(value)  # noqa: S301 - from a process that runs the same user's code
    return found


def _store() -> Any:
    return import_ray().experimental.internal_kv


def _job() -> str:
    """Return the first part of each key: the job of this process, the same for a program and its calls."""
    return f"{import_ray().get_runtime_context().get_job_id()}/"
