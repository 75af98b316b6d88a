"""The parser of a command's arguments."""

from __future__ import annotations

import argparse

from anyaccel import extras
from anyaccel.cli import output
from anyaccel.cli.parser import EPILOG, HELP, PASSES_ON, UNCONFIGURED, add_common, columns, defaults
from anyaccel.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
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
    parser.examples = module.EXAMPLES
    add_common(parser, name)
    module.add_arguments(parser)
    if name not in UNCONFIGURED and HELP.isdisjoint(arguments):
        dests = {action.dest for action in parser._actions}  # noqa: SLF001 - argparse has no other way to name them
        parser.set_defaults(**{name: value for name, value in defaults(name).items() if name in dests})
    if name in PASSES_ON:
        args, passed_on = parser.parse_known_args(arguments)
        args.passed_on = passed_on
        return args
    return parser.parse_intermixed_args(arguments)


class Formatter(argparse.HelpFormatter):
    """A formatter that keeps paragraphs apart."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(fill(part, width, indent) for part in text.strip().split("\n\n"))


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of printing its usage and exiting.

    Attributes:
        listed: Things that an argument may name, under a title, each with what it is.
        examples: Command lines, each with what it does, that stand at the end of the help as they are.
    """

    listed: tuple[str, Mapping[str, str]] | None = None
    examples: tuple[tuple[str, str], ...] = ()

    def format_help(self) -> str:
        """The help, with what is listed and examples."""
        listed = f"\n{self.listed[0]}:\n{columns(self.listed[1])}\n" if self.listed else ""
        lines = [f"  {line}\n      {told}\n" for line, told in self.examples]
        return f"{super().format_help()}{listed}\nexamples:\n{''.join(lines)}"

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        hint = f"see '{self.prog} --help'"
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            from difflib import get_close_matches

            option = unknown.split(" ")[0].partition("=")[0]
            if option in extras.OPTIONS:
                raise extras.not_installed(f"the option {option}", extras.OPTIONS[option])
            close = get_close_matches(option, self._option_string_actions, n=1, cutoff=0.75)
            message += f"; did you mean {close[0]}?" if close else ""
            if any(action.dest == "cmd" for action in self._actions):
                hint += "; a command, with its own options, stands behind '--'"
        raise UsageError(message, hint=hint)

    def _get_formatter(self) -> argparse.HelpFormatter:
        """As wide as the terminal; argparse imports several modules to find that out, for each argument."""
        return Formatter(prog=self.prog, width=output.width() - 2)

    def _print_message(self, message: str, file: object = None) -> None:  # noqa: ARG002 - it is standard output
        output.print_help(message)
