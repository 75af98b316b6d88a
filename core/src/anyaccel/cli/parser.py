"""The command line: find the command, parse its arguments, call it, and turn each error into a message and a status."""

from __future__ import annotations

import os

from anyaccel.cli import output
from anyaccel.cli.commands import COMMANDS, module_of, of_plugins
from anyaccel.cli.options import seconds
from anyaccel.errors import AnyaccelError, ConfigurationError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

DEFAULT = "status"
RUNS = {"run", "sweep", "testbed"}
"""Commands that take a command to run, after ``--``."""
HELP = {"-h", "--help"}
VERSION = {"-V", "--version"}
PASSES_ON = {"ray"}
"""Commands that pass unknown options on to another program."""
UNCONFIGURED = {"config", "setup", "completion", "help"}
"""Commands that ignore the files of configuration."""
DIAGNOSES = {"doctor"}
"""Commands that take defaults from these files and report errors in them themselves."""
ABOUT_PLUGINS = {"plugins", "doctor", "check", "record"}
"""Commands that examine plug-ins."""
APART = UNCONFIGURED | {"release", "new", "testbed", "jobs", "logs", "cancel", "wait", "redo"}
"""Commands that have no ``--machine``."""
UNLISTED = {"check": "--machine", "help": "--json", "metrics": "--json", "top": "--json"}
"""By command, the common option that its help does not show: the command refuses it, or has no use for it."""


def dispatch(arguments: Sequence[str]) -> int:
    """Run the command in the arguments; return the exit status."""
    # The first "--" counts: the command to run, which follows it, may have a "--" of its own.
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    own = arguments[:at]
    command = None if at == len(arguments) else list(arguments[at + 1 :])

    def perform() -> int:
        name, rest = _find_command(own)
        return _perform(name, rest, command)

    return report_errors(perform, as_json="--json" in own or "-j" in own)


def report_errors(perform: Callable[[], int], *, as_json: bool) -> int:
    """Call a function and report errors.

    Args:
        perform: The function, which returns an exit status.
        as_json: Report errors as JSON.

    Returns:
        The function's exit status, or that of the error.
    """
    try:
        return perform()
    except AnyaccelError as error:
        output.report_error(error, as_json=as_json)
        return error.exit_code
    except BrokenPipeError:  # the reader has closed the pipe, as 'head' does
        return 0


def _perform(name: str, arguments: list[str], command: list[str] | None) -> int:
    module = module_of(name)
    # The command that people type most has no parser: see Defaults.
    if name == DEFAULT and not arguments:
        args: Any = Defaults()
        add_common(args)
        module.add_arguments(args)
        vars(args).update(defaults(name))
    else:
        args = parse(name, module, arguments)
    args.typed = [name, *arguments, *(["--", *command] if command is not None else [])]
    if name in RUNS:
        args.command = command
    elif command is not None:
        raise UsageError(f"a command after '--' belongs to 'anyaccel run', 'sweep' and 'testbed' (got {name!r})")
    status: int = module.main(args)
    return status


def parse(name: str, module: ModuleType, arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments of a command.

    Args:
        name: The command.
        module: Its module.
        arguments: The command line without the command's name.

    Raises:
        UsageError: When an argument is wrong.
    """
    from anyaccel.cli.arguments import Parser

    parser = Parser(prog=f"anyaccel {name}", description=module.__doc__, allow_abbrev=False)
    parser.examples = module.EXAMPLES
    module.add_arguments(parser)
    add_common(parser, name)  # the last group of the help
    if name not in UNCONFIGURED and HELP.isdisjoint(arguments):
        dests = {action.dest for action in parser._actions}  # noqa: SLF001 - argparse has no other way to name them
        parser.set_defaults(**{name: value for name, value in defaults(name).items() if name in dests})
    if name in PASSES_ON:
        args, passed_on = parser.parse_known_args(arguments)
        args.passed_on = passed_on
        return args
    # Options may stand between the terms of a request.
    return parser.parse_intermixed_args(arguments)


def defaults(command: str) -> dict[str, Any]:
    """Return the defaults of options from the user's file of configuration, by the name of the option.

    Args:
        command: The command with the options.

    Raises:
        ConfigurationError: When the file is wrong, unless the command reports that itself.
    """
    from anyaccel import configuration

    # Most users have no file: the module that reads TOML is not imported for them.
    path = configuration.user_file()
    if not path or not os.path.exists(path):
        return {}
    try:
        values = configuration.user().values
    except ConfigurationError:
        if command not in DIAGNOSES:
            raise
        return {}
    found = {key.removeprefix("defaults."): value for key, value in values.items() if key.startswith("defaults.")}
    if os.environ.get("ANYACCEL_MACHINE"):  # the environment precedes the file
        found.pop("machine", None)
    return found


class Defaults:
    """The parsed arguments of a command without any: a stand-in for a parser.

    Importing argparse and building a parser takes longer than ``status`` takes to parse no arguments.
    """

    def add_argument(self, *names: str, default: object = None, action: str = "", **_: object) -> None:
        """Declare an option: the attribute of the option's name gets the default."""
        # As argparse does: the long form names the attribute.
        name = max(names, key=len).removeprefix("--").replace("-", "_")
        setattr(self, name, False if action == "store_true" else default)

    def add_argument_group(self, _: str) -> Defaults:
        """Declare a group of options of the help; a group has no effect here."""
        return self


def add_common(parser: argparse.ArgumentParser, command: str = DEFAULT) -> None:
    """Declare the options of every command, and of the commands with devices.

    Commands about plug-ins do not take declared devices. A command that passes options on to another program leaves the
    short ones to that program.
    """
    group = parser.add_argument_group("common options")

    def about(option: str, text: str) -> str:
        if UNLISTED.get(command) != option:
            return text
        from argparse import SUPPRESS

        return SUPPRESS

    group.add_argument("-j", "--json", action="store_true", help=about("--json", "print JSON"))
    # Commands of plug-ins declare what they need themselves.
    if command in APART or command not in COMMANDS:
        return
    group.add_argument(
        "--machine",
        metavar="MACHINE",
        help=about(
            "--machine", "'host', 'sim:PRODUCT:COUNT,...' or a recording (default: $ANYACCEL_MACHINE, or this host)"
        ),
    )
    group.add_argument(
        "--probe-timeout",
        metavar="DURATION",
        type=seconds(0.001, 3600),
        default=10.0,
        help="longest detection of a vendor (default: 10s)",
    )
    if command in ABOUT_PLUGINS:
        return
    group.add_argument(
        "--declare",
        metavar="NAME=COUNT",
        action="append",
        default=[],
        help="assume so many devices of a resource",
    )
    group.add_argument(
        *(() if command in PASSES_ON else ("-v",)),
        "--verbose",
        action="store_true",
        help="print how each vendor's detection went, and more",
    )


VALUED = ("--machine", "--declare", "--probe-timeout", "--columns", "-w", "--watch")
"""Options of the default command that take the next argument as their value."""


def _find_command(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command's name, which is the first word that names a command, and the rest of the arguments.

    Options may stand before the command. Without a command, a word that is no value of an option is a wrong name.
    """
    words = [at for at, argument in enumerate(arguments) if not argument.startswith("-")]
    # Names of commands are identifiers: no distribution is read for a machine such as sim:H100:8.
    names = (at for at in words if arguments[at].isidentifier())
    named = (at for at in names if arguments[at] in COMMANDS or arguments[at] in of_plugins())
    wrong = next((at for at in words if not at or arguments[at - 1] not in VALUED), None)
    position = next(named, wrong)
    if position is not None:
        return arguments[position], [*arguments[:position], *arguments[position + 1 :]]
    if not HELP.isdisjoint(arguments):
        return "help", []
    if not VERSION.isdisjoint(arguments):
        if len(arguments) > 1:
            raise UsageError("--version stands alone", hint="leave the other arguments out")
        from anyaccel._version import __version__

        output.print_line(f"anyaccel {__version__}")
        raise SystemExit(0)
    return DEFAULT, list(arguments)
