"""Trials of Optuna in the workers of a pool, each with devices of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

from anyaccel import Pool
from anyaccel.durations import Duration, read_seconds
from anyaccel.errors import UsageError
from anyaccel.scheduler import RequestLike

from anyaccel_integrations.n_jobs import count_jobs

Objective = Callable[[Any], Any]


def optimize(
    study: Any,
    objective: Objective,
    n_trials: int | None = None,
    timeout: Duration | None = None,
    *,
    needs: RequestLike | None = "GPU:1",
    n_jobs: int | None = None,
    catch: type[Exception] | tuple[type[Exception], ...] = (),
    callbacks: Iterable[Callable[[Any, Any], None]] = (),
    trial_timeout: Duration | None = None,
    **options: Any,
) -> None:
    """Optimize an objective like ``study.optimize``, with trials that run at the same time on devices of their own.

    The objective runs in a worker. Its trial sends every question to this process, where the study's own sampler,
    pruner and storage answer. A trial begins when its devices are free. The worker has no ``trial.study``, and the
    storage gets no heartbeat.

    Args:
        study: The study, an ``optuna.Study``.
        objective: Called with the trial; returns its value or values.
        n_trials: The number of trials to run; None for as many as fit in ``timeout``.
        timeout: Time after which no trial starts; trials that run are waited for.
        needs: The request of each trial; None for the CPU alone.
        n_jobs: The number of trials at the same time; None or -1 for as many as the devices allow.
        catch: Exceptions of the objective that fail their trial and do not end the study. With
            ``anyaccel.WorkerError``, the study goes on when a worker dies.
        callbacks: Functions that this process calls after each trial, with the study and the trial;
            ``study.stop()`` works in them.
        trial_timeout: Time that a trial may run; None for no limit.
        options: Further options of :class:`anyaccel.Pool`.

    Raises:
        UsageError: If Optuna is not installed, or an argument is invalid.
        NeverFitsError: If the machine can never serve ``needs``.
        Exception: The exception of the objective, unless ``catch`` has it. The trials that run are cancelled and fail.
    """
    try:
        import optuna  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise UsageError("Optuna is not installed", hint="pip install 'anyaccel[optuna]'") from error
    if not isinstance(study, optuna.Study):
        raise UsageError(f"study must be an optuna.Study (got {study!r:.60})")
    if options.get("engine", "local") != "local":
        raise UsageError("trials ask this process, which other machines cannot reach", hint="leave engine out")
    from anyaccel_integrations.trials import Trials

    seconds = read_seconds("timeout", timeout)
    count = count_jobs(n_jobs, needs, options)
    pool_options: dict[str, Any] = {"max_workers": count, "timeout": trial_timeout, **options}
    with Pool(needs, **pool_options) as pool, Trials(study, objective) as trials:
        _run(pool, trials, count, n_trials=n_trials, timeout=seconds, catch=catch, callbacks=tuple(callbacks))


def _run(
    pool: Pool,
    trials: Any,
    n_jobs: int,
    *,
    n_trials: int | None,
    timeout: float | None,
    catch: type[Exception] | tuple[type[Exception], ...],
    callbacks: tuple[Callable[[Any, Any], None], ...],
) -> None:
    end = None if timeout is None else time.monotonic() + timeout
    running: dict[Any, int] = {}
    started = 0
    try:
        while True:
            while (
                len(running) < n_jobs
                and (n_trials is None or started < n_trials)
                and (end is None or time.monotonic() < end)
                and not trials.stopped
            ):
                running[pool.submit(*trials.make_call(started))] = started
                started += 1
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=running.__getitem__):
                trial, error = trials.finish(running.pop(future), future)
                if error is not None and not isinstance(error, catch):
                    raise error
                for callback in callbacks if trial is not None else ():
                    callback(trials.study, trial)
    finally:
        for future in running:
            future.cancel()
        for future, number in running.items():
            trials.finish(number, future)
