"""Trials in workers: a server in the process of the study answers the questions of trials."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import tempfile
import threading
from concurrent.futures import CancelledError, Future
from multiprocessing.connection import Connection, Listener
from types import TracebackType
from typing import Any, Self

import optuna  # type: ignore[import-not-found, unused-ignore]

from anyaccel_integrations.remote_trial import QUESTIONS, run_trial

_log = logging.getLogger("optuna.anyaccel")  # below Optuna's own, so that its verbosity counts


class Trials:
    """Server for the trials of a study in workers; calls are numbered in the order of submission.

    Attributes:
        study: The study.
    """

    def __init__(self, study: Any, objective: Any) -> None:
        self.study = study
        self._objective = objective
        self._key = os.urandom(32)
        self._begun: dict[int, Any] = {}
        self._lock = threading.Lock()  # samplers are not thread-safe
        self._over: set[int] = set()
        self._closing = False
        self._directory = ""

    def __enter__(self) -> Self:
        # study.stop() refuses to work in a callback unless Optuna's own loop has set this.
        if self.study._thread_local.in_optimize_loop:  # noqa: SLF001
            raise RuntimeError("a study cannot be optimized from within its own optimization")
        self._directory = tempfile.mkdtemp(prefix="anyaccel-")
        self._listener = Listener(os.path.join(self._directory, "study"), family="AF_UNIX", authkey=self._key)
        self._accepting = threading.Thread(target=self._accept, name="anyaccel study", daemon=True)
        self._accepting.start()
        self.study._thread_local.in_optimize_loop = True  # noqa: SLF001
        self.study._stop_flag = False  # noqa: SLF001
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.study._thread_local.in_optimize_loop = False  # noqa: SLF001
        self._closing = True
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(self._listener.address))  # accept() has no time-out: a connection wakes its thread
        self._accepting.join()
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def stopped(self) -> bool:
        """True once ``study.stop()`` was called."""
        return bool(self.study._stop_flag)  # noqa: SLF001

    def make_call(self, number: int) -> tuple[Any, ...]:
        """Return the function and the arguments with which a worker runs a trial."""
        return run_trial, self._listener.address, self._key, number, self._objective

    def finish(self, number: int, future: Future[Any]) -> tuple[Any, BaseException | None]:
        """Record the end of a trial in the study.

        Returns:
            The finished trial, or None if it never began; and the exception of the objective, unless that pruned the
            trial.
        """
        with self._lock:
            trial = self._begun.pop(number, None)
            self._over.add(number)
        try:
            error = future.exception()
        except CancelledError as cancelled:
            error = cancelled
        pruned = isinstance(error, optuna.TrialPruned)
        if trial is None:
            return None, error
        with self._lock:
            if pruned:
                self.study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            elif error is not None:
                self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                self.study.tell(trial, future.result())
            frozen = self.study._storage.get_trial(trial._trial_id)  # noqa: SLF001 - the public way reads all trials
        _log_end(frozen, error)
        return frozen, None if pruned else error

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except Exception as error:  # noqa: BLE001 - a client that left, or has no key: others still come
                if self._closing:
                    return
                _log.debug("a client that is no trial: %r", error)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="anyaccel trial", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Answer the questions of a trial until the worker closes the connection."""
        with connection, contextlib.suppress(EOFError, OSError):
            number = connection.recv()
            _send(connection, self._answer(self._begin, number))
            while True:
                name, args, kwargs = connection.recv()
                _send(connection, self._answer(self._ask, number, name, args, kwargs))

    def _answer(self, function: Any, *arguments: Any) -> tuple[bool, Any]:
        with self._lock:
            try:
                return True, function(*arguments)
            except Exception as error:  # noqa: BLE001 - raised again in the objective
                return False, error

    def _begin(self, number: int) -> int:
        if number in self._over:
            raise CancelledError("the optimization has ended")
        before = self._begun.pop(number, None)
        if before is not None:  # its worker died, and the pool retries the call
            self.study.tell(before, state=optuna.trial.TrialState.FAIL)
        trial = self._begun[number] = self.study.ask()
        return int(trial.number)

    def _ask(self, number: int, name: str, args: Any, kwargs: Any) -> Any:
        if name not in QUESTIONS:
            raise AttributeError(f"a trial has no {name!r}")
        found = getattr(self._begun[number], name)
        return found(*args, **kwargs) if callable(found) else found


def _send(connection: Connection, answer: tuple[bool, Any]) -> None:
    try:
        connection.send(answer)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - pickle raises anything; the objective gets the reason
        connection.send((False, RuntimeError(f"the answer cannot be sent: {error!r}; it was {answer[1]!r:.200}")))


def _log_end(trial: Any, error: BaseException | None) -> None:
    """Log the end of a trial in Optuna's own words."""
    if trial.state == optuna.trial.TrialState.COMPLETE:
        value = trial.value if len(trial.values) == 1 else trial.values
        _log.info("Trial %d finished with value: %s and parameters: %s.", trial.number, value, trial.params)
    elif trial.state == optuna.trial.TrialState.PRUNED:
        _log.info("Trial %d pruned. %s", trial.number, error)
    else:
        _log.warning("Trial %d failed with parameters: %s because of: %r.", trial.number, trial.params, error)
