"""The trial object in a worker, which sends each call to the process that has the study."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Any

from optuna import Trial  # type: ignore[import-not-found, unused-ignore]
from optuna.trial import BaseTrial  # type: ignore[import-not-found, unused-ignore]

QUESTIONS = frozenset(name for name in dir(Trial) if not name.startswith("_")) - {"study"}
"""Public methods and properties of a trial in this version of Optuna."""


def run_trial(address: str, key: bytes, number: int, objective: Callable[[Any], Any]) -> Any:
    """Call an objective with a trial whose study is in another process.

    Args:
        address: The socket on which the process of the study listens.
        key: The secret that authenticates this worker.
        number: The number of this call, in the order of submission.
        objective: The function to call.
    """
    with Client(address, family="AF_UNIX", authkey=key) as connection:
        connection.send(number)
        _receive(connection)
        return objective(RemoteTrial(connection))


def _receive(connection: Connection) -> Any:
    succeeded, answer = connection.recv()
    if not succeeded:
        raise answer
    return answer


class RemoteTrialBase:
    """The part of a remote trial for every version of Optuna."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._connection.send((name, args, kwargs))
        return _receive(self._connection)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a trial in a worker has no {name!r}: the study is in the process that called optimize(); use a callback"
            " there"
        )


def _forward(name: str) -> Any:
    """Make a method or property that sends a question, with the signature in Optuna."""
    original = inspect.getattr_static(Trial, name)
    if isinstance(original, property):
        return property(lambda trial: trial._ask(name), doc=original.__doc__)  # noqa: SLF001

    @functools.wraps(original)
    def ask(trial: RemoteTrialBase, *args: Any, **kwargs: Any) -> Any:
        return trial._ask(name, *args, **kwargs)  # noqa: SLF001

    return ask


RemoteTrial = type("RemoteTrial", (RemoteTrialBase, BaseTrial), {name: _forward(name) for name in QUESTIONS})
"""A trial with every public name of Optuna's, except ``study``."""
