"""Notices between pools and running calls, in the key-value store of the Ray cluster.

Ray does not report when a call starts. A call that runs for a while leaves a notice, and its pool polls for notices
while it has calls without one.
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
        self._looking = False

    def begin(self) -> None:
        """Start polling, because a call was submitted."""
        with self._lock:  # against the end of the thread, which may decide so at the same time
            unwatched, self._looking = not self._looking, True
        if unwatched:
            threading.Thread(target=self._look, name="anyaccel ray", daemon=True).start()

    def _look(self) -> None:
        """Poll until the pool has no calls."""
        while True:
            time.sleep(LOOK_SECONDS)
            with contextlib.suppress(Exception):  # the cluster is busy or has gone, which the calls themselves report
                self._look_once()
            with self._lock, self._driver.lock:
                if not self._driver.members or not self._ray.is_initialized():
                    self._looking = False
                    return

    def _look_once(self) -> None:
        with self._driver.lock:
            begun = {member.key: member.begun for member in self._driver.members}
        if self._ray.is_initialized() and not all(begun.values()):
            for key, started in look(f"{self._driver.name}/", [key for key in begun if begun[key]]).items():
                self._driver.on_started(key, started)


def leave(key: str, started: Started) -> None:
    """Write the notice of a running call."""
    _store()._internal_kv_put(key, pickle.dumps(started), overwrite=True, namespace=_NAMESPACE)  # noqa: SLF001


def remove(key: str) -> None:
    """Remove the notice of a call; no effect if there is none, or the cluster has gone."""
    with contextlib.suppress(Exception):  # the store ends with the cluster
        _store()._internal_kv_del(key, namespace=_NAMESPACE)  # noqa: SLF001


def look(prefix: str, known: Iterable[str]) -> dict[str, Started]:
    """Read and return new notices by key.

    Args:
        prefix: Prefix of the keys.
        known: Keys of notices that were read before.
    """
    found = {}
    for key in {each.decode() for each in _store()._internal_kv_list(prefix, namespace=_NAMESPACE)} - {*known}:  # noqa: SLF001
        value = _store()._internal_kv_get(key, namespace=_NAMESPACE)  # noqa: SLF001
        if value is not None:  # else the call is over, and has removed its notice
            found[key] = pickle.loads(value)  # noqa: S301 - from a process that runs the same user's code
    return found


def _store() -> Any:
    return import_ray().experimental.internal_kv
