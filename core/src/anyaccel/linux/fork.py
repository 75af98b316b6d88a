"""One registry for tidying up after a fork: a child has the locks and descriptors of its parent, but no threads."""

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
"""Seconds that a fork waits for a lock: its holder may wait for a lock of the forking thread."""

_locks: list[Any] = []
_tidies: list[Callable[[], object]] = []


def renew_in_child(lock: Lock) -> Lock:
    """Register a lock to be free in every forked child, even if another thread of the parent holds the lock.

    Args:
        lock: A lock that lives as long as the process.

    Returns:
        The lock.
    """
    _locks.append(lock)
    return lock


def hold_while_forking(lock: RLock) -> RLock:
    """Register a lock that every fork acquires first: no child inherits a half-done change.

    A fork waits ``FORK_SECONDS`` at most, and then goes on without the lock. The holder of the lock may take locks for
    which a fork waits as well, such as the lock of :mod:`logging`.

    Args:
        lock: A lock that lives as long as the process.

    Returns:
        The lock, which is free in the child.
    """

    def release() -> None:
        try:  # noqa: SIM105 - contextlib takes long to import
            lock.release()
        except RuntimeError:  # it was not free in time
            pass

    os.register_at_fork(before=lambda: lock.acquire(timeout=FORK_SECONDS), after_in_parent=release)
    return renew_in_child(lock)


def tidy_in_child(tidy: Tidy) -> Tidy:
    """Register a function for every forked child, called once all locks are free, in order of registration.

    Args:
        tidy: A function that lives as long as the process. If it raises, the next ones still run.

    Returns:
        The function, so that ``tidy_in_child`` can be a decorator.
    """
    _tidies.append(tidy)
    return tidy


def _tidy_up() -> None:
    """Free the registered locks of a forked child, then call the registered functions, and print their exceptions."""
    for lock in _locks:
        lock._at_fork_reinit()  # noqa: SLF001 - as the standard library does with its own locks
    for tidy in _tidies:
        try:
            tidy()
        except Exception as error:  # noqa: BLE001 - the child goes on, as after a function of os.register_at_fork
            sys.excepthook(type(error), error, error.__traceback__)


os.register_at_fork(after_in_child=_tidy_up)
