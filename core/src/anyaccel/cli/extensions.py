"""Extensions of commands by installed distributions, found by entry point.

An entry point of the group ``anyaccel.options`` has the name of a command and leads to a module. For ``run`` the module
has ``add_arguments(parser)``, which declares options, and ``main(args)``, which returns an exit status, or None if none
of its options was given. For ``cancel`` it is a :class:`CancelExtension`.
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
        """Module of an extension of ``cancel``."""

        def list_own(self) -> tuple[list[str], list[str], set[int]]:
            """Return identities of waiting things, of running things, and process ids of the former."""

        def cancel(self, what: str, grace: float | None) -> str | None:
            """Cancel by identity; return a message for the user, or None for an identity of another kind."""


GROUP = "anyaccel.options"


def extensions(command: str) -> list[Any]:
    """Return the extension modules of a command.

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
    """Import a module of an installed distribution; any exception becomes one error.

    Args:
        distribution: The distribution.
        target: The module.
        what: Its description, for the message.

    Raises:
        CommandNotRunnableError: When the import fails.
    """
    try:
        return import_module(target)
    # Any exception: a plug-in that cannot be imported must not end in a traceback of ours.
    except Exception as error:
        raise CommandNotRunnableError(
            f"{what} cannot be loaded: {type(error).__name__}: {error}", hint=f"pip install --upgrade {distribution}"
        ) from error
