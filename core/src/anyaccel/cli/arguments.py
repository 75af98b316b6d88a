"""The parser of a command's arguments."""

from __future__ import annotations

import argparse

from anyaccel import extras
from anyaccel.cli import output
from anyaccel.errors import UsageError
from anyaccel.text import suggest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any, NoReturn

# Its texts have no translation, and the search for one imports locale: a sixtieth of the time of a command.
argparse.__dict__["_"] = str


class Formatter(argparse.HelpFormatter):
    """A formatter that keeps the blank lines between paragraphs, and leaves the options out of the usage."""

    def _format_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: object,  # noqa: ARG002 - groups of options
        prefix: str | None,
    ) -> str:
        arguments = [action for action in actions if not action.option_strings]
        return super()._format_usage(usage, arguments, [], prefix)

    def _set_color(self, *_: object, **__: object) -> None:
        """Have no colors, which came with Python 3.14: their modules take half of an interpreter's start.

        argparse calls this for each parser, also where no help is printed; :meth:`__getattr__` makes up for it.
        """

    def __getattr__(self, name: str) -> Any:
        if name not in {"_theme", "_decolor"}:
            raise AttributeError(name)
        super()._set_color(color=False)  # type: ignore[misc, unused-ignore] # pyright: ignore[reportAttributeAccessIssue]
        return self.__dict__[name]

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(fill(part, width, indent) for part in text.strip().split("\n\n"))


class Parser(argparse.ArgumentParser):
    """A parser with errors as exceptions, instead of a printed usage and an exit.

    Attributes:
        listed: A title, and names that an argument accepts, each with its description.
        examples: Command lines and their descriptions, printed unchanged at the end of the help.
    """

    listed: tuple[str, Mapping[str, str]] | None = None
    examples: tuple[tuple[str, str], ...] = ()

    def format_help(self) -> str:
        """Return the help, with the listed names and the examples."""
        listed = f"\n{self.listed[0]}:\n{name_columns(self.listed[1])}\n" if self.listed else ""
        lines = [f"  {line}\n      {told}\n" for line, told in self.examples]
        return f"{super().format_help()}{listed}\nexamples:\n{''.join(lines)}"

    def error(self, message: str) -> NoReturn:
        """Raise a usage error, with the closest option as a suggestion."""
        hint = f"see '{self.prog} --help'"
        argument, ignored, value = message.partition(": ignored explicit argument ")
        if ignored:  # argparse's words for --detach=2
            message = f"{argument} takes no value (got {value})"
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            # argparse lists all that it does not know: the first one is the culprit.
            option = unknown.split(" ")[0].partition("=")[0]
            # Options of an extra are unknown until it is installed.
            if option in extras.OPTIONS:
                raise extras.not_installed(f"the option {option}", extras.OPTIONS[option])
            message = f"{message}; {suggest(option, self._option_string_actions, cutoff=0.75)}".removesuffix("; ")
            if any(action.dest == "cmd" for action in self._actions):
                hint += "; the command to run, with its own options, stands after '--'"
        raise UsageError(message, hint=hint)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of the choices, and suggest a similar choice."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            close = suggest(str(value), map(str, action.choices or ()), most=1)
            raise argparse.ArgumentError(action, f"{error.message}; {close}".removesuffix("; ")) from None

    def _get_formatter(self, **_: object) -> argparse.HelpFormatter:
        """Return a formatter as wide as the terminal. The default one imports several modules for each argument."""
        return Formatter(prog=f"{self.prog} [OPTIONS]", width=output.width() - 2)

    def _print_message(self, message: str, file: object = None) -> None:  # noqa: ARG002 - it is standard output
        output.print_help(message)


def name_columns(told: Mapping[str, str], width: int = 0) -> str:
    """Write names in one column and their descriptions in another, as wide as the terminal.

    Args:
        told: Descriptions by name.
        width: Least width of the first column.
    """
    width = max(width, *map(len, told))
    return "\n".join(fill(text, f"  {name:<{width}}  ", " " * (width + 4)) for name, text in told.items())


def fill(text: str, first: str = "", further: str = "") -> str:
    """Break a text into lines as wide as the terminal.

    Args:
        text: The text.
        first: Beginning of the first line.
        further: Beginning of the other lines.
    """
    import textwrap

    room = max(40, output.width() - 2)
    # Options such as --no-wait would be broken at their hyphens.
    return textwrap.fill(text, room, initial_indent=first, subsequent_indent=further, break_on_hyphens=False)
