"""Commands, engines and packages that distributions of their own bring, and what to say where one is not installed."""

from __future__ import annotations

import sys

from anyaccel.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

COMMANDS = {
    "top": "jobs", "sweep": "jobs", "jobs": "jobs", "logs": "jobs", "wait": "jobs", "report": "jobs", "metrics": "jobs",
    "check": "testing", "new": "testing", "ray": "ray",
}  # fmt: skip
"""Extras by the command that they bring."""
ENGINES = {"dask": "dask", "ray": "ray"}
"""Extras by the engine that they bring."""


def distribution(extra: str) -> str:
    """Name the distribution that an extra of the core brings."""
    return f"anyaccel-{extra}"


def remedy(extra: str) -> str:
    """Say how an extra is installed."""
    return f"pip install 'anyaccel[{extra}]'"


def not_installed(what: str, extra: str) -> UsageError:
    """Make the error of a command or an engine whose extra is not installed."""
    return UsageError(f"{what} is in the extra {extra!r}, which is not installed", hint=remedy(extra))


def moved(name: str, package: str, extra: str) -> Callable[[str], object]:
    """Make the ``__getattr__`` of a module of the core that an extra's package has replaced.

    Args:
        name: Name of the module.
        package: Name of the package, whose public names the module offers.
        extra: Name of the extra that brings the package.
    """

    def load(attribute: str) -> object:
        if attribute.startswith("__"):  # as a package, it would import the modules of the other one twice
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        try:
            __import__(package)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            raise ModuleNotFoundError(
                f"{name} is in the extra {extra!r}, which is not installed: {remedy(extra)}", name=package
            ) from None
        value: object = getattr(sys.modules[package], attribute)
        return value

    return load
