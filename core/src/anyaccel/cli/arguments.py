"""The parser of a command's arguments."""

from __future__ import annotations

import argparse

from anyaccel.cli import output
from anyaccel.cli.parser import EPILOG, add_common
from anyaccel.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import NoReturn


def parse(name: str, module: ModuleType, arguments: list[str]) -> argparse.Namespace:
    """Understand the arguments of a command.

    Args:
        name: The command.
        module: Its module.
        arguments: What stands beside its name.

    Raises:
        UsageError: When one is wrong.
    """
    parser = Parser(prog=f"anyaccel {name}", description=module.__doc__, epilog=EPILOG, allow_abbrev=False)
    add_common(parser)
    module.add_arguments(parser)
    if getattr(module, "PASSES_ON", False):
        args, passed_on = parser.parse_known_args(arguments)
        args.passed_on = passed_on
        return args
    return parser.parse_intermixed_args(arguments)


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        raise UsageError(message, hint=f"see '{self.prog} --help'")

    def _get_formatter(self) -> argparse.HelpFormatter:
        """As wide as the terminal; argparse imports several modules to find that out, for each argument."""
        return self.formatter_class(prog=self.prog, width=output.width() - 2)  # type: ignore[call-arg]

    def _print_message(self, message: str, file: object = None) -> None:  # noqa: ARG002 - it is standard output
        output.print_help(message)
