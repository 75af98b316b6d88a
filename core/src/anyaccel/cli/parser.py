"""Understand a command line, call the command, and turn every error into one message and an exit status."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module

from anyaccel.cli import VERSION, output
from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.vendors import begin_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any, NoReturn

COMMANDS = {
    "status": "show the accelerators of this machine (what 'anyaccel' alone does)",
    "run": "run a command that sees exactly the accelerators it asked for",
    "hold": "hold devices without a command, until they are released or the time is over",
    "release": "give back what a lease holds",
    "queue": "show who waits for devices",
    "select": "print the ids of devices that would serve a request, without holding them",
    "why": "say whether a request fits, why not, and what would",
    "env": "print the variables that make a shell see what a request gets",
    "plugins": "list the installed plug-ins and what is wrong with them",
    "doctor": "look for what is wrong, and say what to do about it",
    "check": "check that a plug-in keeps the contract",
    "new": "write the project of a new plug-in",
    "record": "record this machine, so that it can be replayed anywhere",
    "export": "print the devices in another scheduler's or container engine's own form",
    "ray": "make this machine a node of a Ray cluster",
}
DEFAULT = "status"
SURVEYS = {"status", "run", "hold", "select", "why", "env", "doctor", "export"}
"""Commands that look at the machine."""
EPILOG = """exit status: 0 done, 1 failed, 2 the request or an argument is wrong, 3 the request can never fit on this
machine, 4 not free now, 126 the command cannot be run, 127 it was not found; 'run' returns the command's own"""


HELP = {"-h", "--help"}


def dispatch(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name."""
    own, command = _split(arguments)
    as_json = "--json" in own or "-j" in own
    try:
        name, rest = _find_command(own)
        return _perform(name, rest, command)
    except AnyaccelError as error:
        output.report_error(error, as_json=as_json)
        return error.exit_code
    except BrokenPipeError:  # the reader has enough
        return 0
    except KeyboardInterrupt:
        return 130


def _perform(name: str, arguments: list[str], command: list[str] | None) -> int:
    if name in SURVEYS and HELP.isdisjoint(arguments):
        begin_for(_machine(arguments), os.environ)
    module = import_module(f"anyaccel.cli.{name}")
    if name == DEFAULT and not arguments:
        args: Any = Defaults()
        add_common(args)
        module.add_arguments(args)
    else:
        from anyaccel.cli.arguments import parse

        args = parse(name, module, arguments)
    if command is not None and name != "run":
        raise UsageError(f"'--' and a command belong to 'anyaccel run' (got them with {name!r})")
    if name == "run":
        args.command = command
    status: int = module.main(args)
    return status


def _machine(arguments: Sequence[str]) -> str:
    """The machine that arguments name, before they are parsed; empty when they name none."""
    for position, argument in enumerate(arguments):
        option, equals, text = argument.partition("=")
        if option == "--machine":
            return text if equals else "".join(arguments[position + 1 : position + 2])
    return ""


class Defaults:
    """The arguments of a command that was given none, without a parser, which takes longer than all that they do.

    It takes the declarations that a parser takes.
    """

    def add_argument(self, *names: str, default: object = None, action: str = "", **_: object) -> None:
        """Declare an option: its attribute is its default."""
        name = max(names, key=len).removeprefix("--").replace("-", "_")
        setattr(self, name, False if action == "store_true" else default)

    def add_argument_group(self, _: str) -> Defaults:
        """Declare options that stand together in the help."""
        return self


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options that every command understands, before or after its name."""
    group = parser.add_argument_group("common options")
    group.add_argument("-j", "--json", action="store_true", help="print JSON")
    group.add_argument(
        "--machine",
        metavar="MACHINE",
        help="'host', 'sim:PRODUCT:COUNT,...' or a directory that 'anyaccel record' wrote (default: $ANYACCEL_MACHINE,"
        " or this host)",
    )
    group.add_argument(
        "--declare",
        metavar="NAME=COUNT",
        action="append",
        default=[],
        help="count this many devices of a resource, whatever was found",
    )
    group.add_argument(
        "--probe-timeout", metavar="SECONDS", type=_seconds, default=10.0, help="time for each vendor (default: 10)"
    )


VALUED = (
    "--machine",
    "--declare",
    "--probe-timeout",
    "--mask",
    "--unallocated",
    "--out",
    "--node",
    "--shards",
    "--instance",
)
"""Options that may stand before the command and take the next argument as their value."""


def _seconds(text: str) -> float:
    import argparse

    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:  # noqa: PLR2004 - also refuses nan
        raise argparse.ArgumentTypeError(f"must be seconds, more than 0 and at most 3600 (got {text!r})")
    return value


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Take the command to run, behind ``--``, from our own arguments."""
    listed = list(arguments)
    if "--" not in listed:
        return listed, None
    at = listed.index("--")
    return listed[:at], listed[at + 1 :]


def _find_command(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Find the command's name: the first argument that is neither an option nor the value of one."""
    value_next = False
    for position, argument in enumerate(arguments):
        if value_next or argument.startswith("-"):
            value_next = not value_next and argument in VALUED
            continue
        if argument not in COMMANDS:
            raise UsageError(
                f"there is no command {argument!r}; {_close_command(argument)}", hint="see 'anyaccel --help'"
            )
        return argument, [*arguments[:position], *arguments[position + 1 :]]
    if not HELP.isdisjoint(arguments):
        _print_help()
    if list(arguments) in VERSION:
        from anyaccel._version import __version__

        output.print_line(f"anyaccel {__version__}")
        raise SystemExit(0)
    if "-V" in arguments or "--version" in arguments:
        raise UsageError("--version stands alone")
    return DEFAULT, list(arguments)


def _close_command(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, COMMANDS, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"the commands are {', '.join(COMMANDS)}"


def _columns(told: Mapping[str, str]) -> str:
    width = max(map(len, told))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in told.items())


def _print_help() -> NoReturn:
    from anyaccel.scheduler.filters import FILTERS

    commands = _columns(COMMANDS)
    filters = _columns({each.form: f"each device {each.summary}" for each in FILTERS.values()})
    output.print_help(
        f"""usage: anyaccel [OPTIONS] [COMMAND] [REQUEST ...] [-- CMD ...]

Find the accelerators of a machine, hand them out, start commands that see exactly theirs.

commands:
{commands}

A request is one or more terms such as GPU, GPU:2, GPU:0.5, H100|A100:4,linked, GPU:1,mem=40GiB or TPU:4,else=cpu.
Options stand before or after the request; see 'anyaccel COMMAND --help' for them. A term may ask of its devices:
{filters}

{EPILOG}"""
    )
    raise SystemExit(0)
