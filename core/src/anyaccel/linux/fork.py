"""The one list of what a forked child tidies up: it has its parent's locks and descriptors, and none of its threads."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _thread import LockType, RLock
    from collections.abc import Callable
    from typing import Any, TypeVar

    Lock = TypeVar("Lock", LockType, RLock)
    Tidy = TypeVar("Tidy", bound=Callable[[], object])

FORK_SECONDS = 10.0
"""How long a fork waits for a lock: the thread that holds it may wait for what the forking thread holds."""

_locks: list[Any] = []
_tidies: list[Callable[[], object]] = []


def renew_in_child(lock: Lock) -> Lock:
    """Have a lock free in every child that this process forks, also where another thread holds it at that moment.

    Args:
        lock: A lock that lives as long as the process.

    Returns:
        The lock.
    """
    _locks.append(lock)
    return lock


def hold_while_forking(lock: RLock) -> RLock:
    """Have a fork wait for a lock, so that the child finds nothing half done by the thread that holds it.

    Locks for which a fork waits already, such as that of :mod:`logging`, may be taken by that thread.

    Args:
        lock: A lock that lives as long as the process.

    Returns:
        The lock, which is free in the child as that of :func:`renew_in_child`.
    """

    def release() -> None:
        try:  # noqa: SIM105 - contextlib takes long to import
            lock.release()
        except RuntimeError:  # it was not free in time
            pass

    os.register_at_fork(before=lambda: lock.acquire(timeout=FORK_SECONDS), after_in_parent=release)
    return renew_in_child(lock)


def tidy_in_child(tidy: Tidy) -> Tidy:
    """Have a function called in every child that this process forks, once all locks are free, in the order given.

    Args:
        tidy: A function that lives as long as the process. If it raises, the others are called all the same.

    Returns:
        The function, so that this can be used as a decorator.
    """
    _tidies.append(tidy)
    return tidy


def _tidy_up() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # noqa: SLF001 - as the standard library does with its own locks
    for tidy in _tidies:
        try:
            tidy()
        except Exception as error:  # noqa: BLE001 - the child goes on, as after a function of os.register_at_fork
            sys.excepthook(type(error), error, error.__traceback__)


os.register_at_fork(after_in_child=_tidy_up)
