"""What installed distributions add to commands of the core, found by entry point.

An entry point of the group ``anyaccel.options`` has the name of a command, and leads to a module. That of ``run`` has
``add_arguments(parser)``, which declares options, and ``main(args)``, which returns an exit status, or None where none
of its options was given. That of ``cancel`` is a :class:`CancelExtension`.
"""

# The methods of the protocol have a docstring and no body.
# pyright: reportReturnType=false

from __future__ import annotations

from importlib import import_module

from anyaccel.errors import CommandNotRunnableError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Protocol

    class CancelExtension(Protocol):
        """What the module of an extension of ``cancel`` has."""

        def list_own(self) -> tuple[list[str], list[str], set[int]]:
            """Return what this user can cancel: what waits, what runs, and the processes that wait for the former."""

        def cancel(self, what: str, grace: float | None) -> str | None:
            """Cancel something by its identity; return the message for the user, None where it is of another kind."""


GROUP = "anyaccel.options"


def extensions(command: str) -> list[Any]:
    """Return the modules that extend a command.

    Raises:
        CommandNotRunnableError: When a module cannot be imported.
    """
    from anyaccel.vendors.entry_points import entry_points

    return [
        import_from(distribution, target, f"what {distribution} adds to {command!r}")
        for name, target, distribution, _ in entry_points(GROUP)
        if name == command
    ]


def import_from(distribution: str, target: str, what: str) -> ModuleType:
    """Import the module of a distribution that is not ours, whatever is wrong with it.

    Args:
        distribution: The distribution.
        target: The module.
        what: What it is, for the message.

    Raises:
        CommandNotRunnableError: When it cannot be imported.
    """
    try:
        return import_module(target)
    except Exception as error:
        raise CommandNotRunnableError(
            f"{what} cannot be loaded: {type(error).__name__}: {error}", hint=f"pip install --upgrade {distribution}"
        ) from error
