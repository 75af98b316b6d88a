"""The joblib backend ``anyaccel``: each batch runs in a worker of a pool and holds devices of its own."""

from __future__ import annotations

from anyaccel.errors import UsageError

NAME = "anyaccel"


def register_joblib() -> None:
    """Register the backend ``anyaccel`` with joblib.

    ``with joblib.parallel_config(backend="anyaccel", needs="GPU:1"):`` and ``joblib.Parallel(backend="anyaccel",
    needs="GPU:1")`` then take the options of :class:`anyaccel.Pool`. ``n_jobs=-1``, the default, means as many as the
    devices allow. See :class:`anyaccel_integrations.joblib_backend.AnyaccelBackend`.

    Raises:
        UsageError: If joblib is not installed.
    """
    try:
        import joblib  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise UsageError("joblib is not installed", hint="pip install 'anyaccel[joblib]'") from error
    from anyaccel_integrations.joblib_backend import AnyaccelBackend

    joblib.register_parallel_backend(NAME, AnyaccelBackend)
