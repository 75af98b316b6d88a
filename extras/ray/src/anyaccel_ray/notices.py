"""Word between pools and calls that run: in the key-value store that every Ray cluster has.

Ray does not say when a call starts. A call that takes a while leaves a notice, and its pool looks for notices while it
has calls of which it has heard nothing. A pool that wants only those calls back that have not begun lets Ray cancel
them, and leaves word that a call which runs by then is to be spared.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from anyaccel.engines.remote import Started

from anyaccel_ray.connection import import_ray

if TYPE_CHECKING:
    from anyaccel.engines.remote import Driver

LOOK_SECONDS = 0.1
"""How often a pool looks for notices."""
_NAMESPACE = b"anyaccel"
_SPARED = b"anyaccel spared"


class NoticePoller:
    """Looks for notices of a pool's calls, as long as there are some of which nothing was heard.

    Args:
        driver: The pool.
        ray: Ray, connected.
    """

    def __init__(self, driver: Driver, ray: Any) -> None:
        self._driver = driver
        self._ray = ray
        self._lock = threading.Lock()
        self._looking = False

    def begin(self) -> None:
        """A call is on its way: look from now on."""
        with self._lock:
            unwatched, self._looking = not self._looking, True
        if unwatched:
            threading.Thread(target=self._look, name="anyaccel ray", daemon=True).start()

    def _look(self) -> None:
        """Look every now and then, until the pool has no calls."""
        while True:
            time.sleep(LOOK_SECONDS)
            with contextlib.suppress(Exception):  # the cluster is busy, or has gone, of which the calls themselves tell
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
    """Leave a notice for the pool."""
    _store()._internal_kv_put(key, pickle.dumps(started), overwrite=True, namespace=_NAMESPACE)  # noqa: SLF001


def remove(key: str) -> None:
    """Remove a notice; nothing happens when there is none, or nobody to ask."""
    _delete(key, _NAMESPACE)


def look(prefix: str, known: Iterable[str]) -> dict[str, Started]:
    """New notices, by key.

    Args:
        prefix: What their keys begin with.
        known: Keys of those that were read before.
    """
    found = {}
    for key in {each.decode() for each in _store()._internal_kv_list(prefix, namespace=_NAMESPACE)} - {*known}:  # noqa: SLF001
        value = _store()._internal_kv_get(key, namespace=_NAMESPACE)  # noqa: SLF001
        if value is not None:  # it is over meanwhile
            found[key] = pickle.loads(value)  # noqa: S301 - from a process that runs the same user's code
    return found


def spare(key: str) -> None:
    """Leave word that a call is to go on when Ray wants to cancel it, if it runs by then."""
    _store()._internal_kv_put(key, b"", overwrite=True, namespace=_SPARED)  # noqa: SLF001


def spared(key: str) -> bool:
    """Whether there is such a word."""
    return bool(_store()._internal_kv_exists(key, namespace=_SPARED))  # noqa: SLF001


def spare_no_more(key: str) -> None:
    """Take it back; nothing happens when there is none, or nobody to ask."""
    _delete(key, _SPARED)


def _delete(key: str, namespace: bytes) -> None:
    with contextlib.suppress(Exception):  # it goes with the cluster, if not now
        _store()._internal_kv_del(key, namespace=namespace)  # noqa: SLF001


def _store() -> Any:
    return import_ray().experimental.internal_kv
