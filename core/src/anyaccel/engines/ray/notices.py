"""Word between pools and calls that run: in the key-value store that every Ray cluster has.

Ray does not say when a task starts. A call that takes a while leaves a notice, and its pool looks for notices while it
has calls of which it has heard nothing. A pool that wants only those calls back that have not begun lets Ray cancel
them, and leaves word that a call which runs by then is to be spared.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable
from typing import Any, NamedTuple

from anyaccel.engines.ray.connection import import_ray
from anyaccel.model import Allocation

LOOK_SECONDS = 0.1
"""How often a pool looks for notices, and how long a call runs before it leaves one."""
_NAMESPACE = b"anyaccel"
_SPARED = b"anyaccel spared"


class Started(NamedTuple):
    """A call has its devices and runs.

    Attributes:
        node: Name of its node.
        allocation: What it holds.
    """

    node: str
    allocation: Allocation


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
