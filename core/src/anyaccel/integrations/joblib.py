"""Joblib on devices: each batch of a ``Parallel`` runs in a worker of a pool and holds devices of its own."""

from __future__ import annotations

from anyaccel.errors import UsageError

NAME = "anyaccel"


def register_joblib() -> None:
    """Make ``anyaccel`` known to joblib as a backend.

    Then ``with joblib.parallel_config(backend="anyaccel", needs="GPU:1"):`` and ``joblib.Parallel(backend="anyaccel",
    needs="GPU:1")`` take the options of :class:`anyaccel.Pool`, and ``n_jobs=-1``, the default, means as many as
    devices allow. See :class:`anyaccel.integrations.joblib_backend.AnyaccelBackend`.

    Raises:
        UsageError: When joblib is not installed.
    """
    try:
        import joblib  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise UsageError("this needs joblib, which is not installed: pip install 'anyaccel[joblib]'") from error
    from anyaccel.integrations.joblib_backend import AnyaccelBackend

    joblib.register_parallel_backend(NAME, AnyaccelBackend)
