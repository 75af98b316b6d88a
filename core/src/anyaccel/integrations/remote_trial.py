"""The trial that an objective sees in a worker: all that it asks goes to the process that has the study."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Any

from optuna import Trial  # type: ignore[import-not-found, unused-ignore]
from optuna.trial import BaseTrial  # type: ignore[import-not-found, unused-ignore]

QUESTIONS = frozenset(name for name in dir(Trial) if not name.startswith("_")) - {"study"}
"""What a trial of this version of Optuna can be asked."""


def run_trial(address: str, key: bytes, number: int, objective: Callable[[Any], Any]) -> Any:
    """Run an objective with a trial whose study is elsewhere.

    Args:
        address: Where the process of the study listens.
        key: What proves to it that we belong to it.
        number: Which call of the objective this is.
        objective: The objective.
    """
    with Client(address, family="AF_UNIX", authkey=key) as connection:
        connection.send(number)
        _received(connection)
        return objective(RemoteTrial(connection))


def _received(connection: Connection) -> Any:
    well, answer = connection.recv()
    if not well:
        raise answer
    return answer


class Asking:
    """The part of a remote trial that is the same in every version of Optuna."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._connection.send((name, args, kwargs))
        return _received(self._connection)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a trial in a worker has no {name!r}: the study is in the process that called optimize(); what needs it"
            " can be done in a callback"
        )


def _forward(name: str) -> Any:
    """What passes a question on, in the shape that Optuna's trial has it."""
    original = inspect.getattr_static(Trial, name)
    if isinstance(original, property):
        return property(lambda trial: trial._ask(name), doc=original.__doc__)  # noqa: SLF001

    @functools.wraps(original)
    def ask(trial: Asking, *args: Any, **kwargs: Any) -> Any:
        return trial._ask(name, *args, **kwargs)  # noqa: SLF001

    return ask


RemoteTrial = type("RemoteTrial", (Asking, BaseTrial), {name: _forward(name) for name in QUESTIONS})
"""A trial as Optuna's documentation describes it, but for ``study``."""
