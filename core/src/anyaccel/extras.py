"""Commands, options and engines of separate distributions, and errors for a distribution that is not installed."""

from __future__ import annotations

from anyaccel.errors import UsageError

COMMANDS = {
    "top": "jobs", "sweep": "jobs", "jobs": "jobs", "logs": "jobs", "wait": "jobs", "redo": "jobs", "report": "jobs",
    "metrics": "jobs", "adopt": "jobs", "drain": "jobs", "undrain": "jobs", "reserve": "jobs",
    "export": "export", "check": "testing", "new": "testing", "testbed": "testing", "ray": "ray",
    "kubernetes": "kubernetes",
}  # fmt: skip
"""Extras by command."""
OPTIONS = dict.fromkeys(("--ranks", "--port", "--detach", "--after", "--after-ok", "--begin", "--notify"), "jobs")
"""Extras by the option that they add to a command."""
ENGINES = {"dask": "dask", "ray": "ray"}
"""Extras by engine."""


def distribution(extra: str) -> str:
    """Return the distribution of an extra."""
    return f"anyaccel-{extra}"


def remedy(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'anyaccel[{extra}]'"


def plugin_remedy(name: str) -> str:
    """Return the command that installs the plug-in behind a vendor, a resource or a product such as ``ACME-V4``.

    Empty if no extra of this distribution has the name, or its first part before a dash, or if it is installed.
    """
    from importlib import metadata  # late: only errors need it

    extra = name.lower().partition("-")[0]
    try:
        if extra not in (metadata.metadata("anyaccel").get_all("Provides-Extra") or ()):
            return ""
        metadata.version(distribution(extra))
    except metadata.PackageNotFoundError:
        return remedy(extra)
    return ""


def not_installed(what: str, extra: str) -> UsageError:
    """Return the error for a command, an option or an engine of an extra that is not installed."""
    return UsageError(f"{what} is in the extra {extra!r}, which is not installed", hint=remedy(extra))
