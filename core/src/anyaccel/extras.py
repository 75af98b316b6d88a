"""Commands, options and engines that distributions of their own bring, and what to say where one is not installed."""

from __future__ import annotations

from anyaccel.errors import UsageError

COMMANDS = {
    "top": "jobs", "sweep": "jobs", "jobs": "jobs", "logs": "jobs", "wait": "jobs", "report": "jobs", "metrics": "jobs",
    "check": "testing", "new": "testing", "testbed": "testing", "ray": "ray",
}  # fmt: skip
"""Extras by the command that they bring."""
OPTIONS = {"--detach": "jobs"}
"""Extras by the option that they add to a command of the core."""
ENGINES = {"dask": "dask", "ray": "ray"}
"""Extras by the engine that they bring."""


def distribution(extra: str) -> str:
    """Name the distribution that an extra of the core brings."""
    return f"anyaccel-{extra}"


def remedy(extra: str) -> str:
    """Say how an extra is installed."""
    return f"pip install 'anyaccel[{extra}]'"


def not_installed(what: str, extra: str) -> UsageError:
    """Make the error of a command, an option or an engine whose extra is not installed."""
    return UsageError(f"{what} is in the extra {extra!r}, which is not installed", hint=remedy(extra))
