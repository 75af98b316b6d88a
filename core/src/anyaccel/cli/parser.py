"""Understand a command line, call the command, and turn every error into one message and an exit status."""

from __future__ import annotations

import os
from importlib import import_module

from anyaccel import extras
from anyaccel.cli import VERSION, output
from anyaccel.cli.extensions import import_from
from anyaccel.cli.quantities import seconds
from anyaccel.errors import AnyaccelError, ConfigurationError, UsageError
from anyaccel.vendors import begin_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType
    from typing import Any, NoReturn

GROUP = "anyaccel.commands"
"""Entry points by which distributions bring commands of their own: ``mps = "anyaccel_acme.mps_command"``."""
COMMANDS = {
    "status": "show the accelerators of this machine (what 'anyaccel' alone does)",
    "top": "watch devices, holders and waiters, and end what is yours (needs 'anyaccel[top]')",
    "run": "run a command that sees exactly the accelerators it asked for",
    "sweep": "run many commands, as many at once as there are devices",
    "jobs": "list the jobs that run without a terminal",
    "logs": "print what a job has printed",
    "cancel": "end jobs, waits and leases of yours",
    "wait": "wait until jobs have ended",
    "hold": "hold devices without a command, until they are released or the time is over",
    "release": "give back what a lease holds",
    "queue": "show who waits for devices",
    "report": "say who used what, from the journal of leases that have ended",
    "metrics": "print what a monitoring system collects, in OpenMetrics, or serve it",
    "select": "print the ids of devices that would serve a request, without holding them",
    "why": "say whether a request fits, why not, and what would",
    "env": "print the variables that make a shell see what a request gets",
    "plugins": "list the installed plug-ins and what is wrong with them",
    "doctor": "look for what is wrong, and say what to do about it",
    "check": "check that a plug-in keeps the contract",
    "new": "write the project of a new plug-in",
    "testbed": "run a vendor's own software on the machine of a recording",
    "record": "record this machine, so that it can be replayed anywhere",
    "export": "print the devices in another scheduler's or container engine's own form",
    "ray": "make this machine a node of a Ray cluster",
    "config": "show what is configured, and where",
    "setup": "make what all users of this machine share, as root",
    "completion": "print the script by which a shell completes commands, types and devices",
    "help": "show what a command does, with examples",
}
DEFAULT = "status"
SURVEYS = {"status", "top", "metrics", "run", "sweep", "hold", "select", "why", "env", "doctor", "export"}
"""Commands that look at the machine."""
RUNS = {"run", "sweep", "testbed"}
"""Commands that take a command to run, behind ``--``."""
EPILOG = (
    "exit status: 0 done, 1 failed, 2 the request or an argument is wrong, 3 the request can never fit on this machine,"
    " 4 not free now, 6 not permitted, 126 the command cannot be run, 127 it was not found; 'run' returns the"
    " command's own"
)


HELP = {"-h", "--help"}
PASSES_ON = {"ray"}
"""Commands that pass options which they do not know on to another program."""
UNCONFIGURED = {"config", "setup", "completion", "help"}
"""Commands that work whatever the files of configuration say."""
DIAGNOSES = {"doctor"}
"""Commands that take defaults from them, and say themselves what is wrong with them."""
ABOUT_PLUGINS = {"plugins", "doctor", "check", "record"}
"""Commands that look at what plug-ins do."""
APART = UNCONFIGURED | {"release", "queue", "new", "testbed", "jobs", "logs", "cancel", "wait", "report"}
"""Commands that look at no machine."""


def dispatch(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name."""
    own, command = _split(arguments)

    def perform() -> int:
        name, rest = _find_command(own)
        return _perform(name, rest, command)

    return told(perform, as_json="--json" in own or "-j" in own)


def told(perform: Callable[[], int], *, as_json: bool) -> int:
    """Do something, and tell people, or programs, what goes wrong; returns the exit status."""
    try:
        return perform()
    except AnyaccelError as error:
        output.report_error(error, as_json=as_json)
        return error.exit_code
    except BrokenPipeError:  # the reader has enough
        return 0
    except KeyboardInterrupt:
        return 130


def _perform(name: str, arguments: list[str], command: list[str] | None) -> int:
    if name in SURVEYS and HELP.isdisjoint(arguments):
        begin_for(_machine(arguments) or defaults(name).get("machine", ""), os.environ)
    module = module_of(name)
    if name == DEFAULT and not arguments:
        args: Any = Defaults()
        add_common(args)
        module.add_arguments(args)
        vars(args).update(defaults(name))
    else:
        from anyaccel.cli.arguments import parse

        args = parse(name, module, arguments)
    if name in RUNS:
        args.command = command
    elif command is not None:
        raise UsageError(f"'--' and a command belong to 'anyaccel run', 'sweep' and 'testbed' (got them with {name!r})")
    status: int = module.main(args)
    return status


def module_of(name: str) -> ModuleType:
    """The module of a command: ours, or that of a plug-in, which has the same parts.

    Raises:
        UsageError: When there is no such command.
        CommandNotRunnableError: When the module of a plug-in cannot be imported.
    """
    if name in COMMANDS and name not in extras.COMMANDS:
        return import_module(f"anyaccel.cli.{name}")
    target, distribution = of_plugins().get(name, ("", ""))
    if not target and name in extras.COMMANDS:
        raise extras.not_installed(f"the command {name!r}", extras.COMMANDS[name])
    if not target:
        raise UsageError(f"there is no command {name!r}; {_close_command(name)}", hint="see 'anyaccel --help'")
    return import_from(distribution, target, f"the command {name!r} of {distribution}")


def of_plugins() -> dict[str, tuple[str, str]]:
    """Commands that installed distributions bring: the module of each, and the distribution. Ours come first."""
    from anyaccel.vendors.entry_points import entry_points

    return {
        name: (target, distribution)
        for name, target, distribution, _ in entry_points(GROUP)
        if name.isidentifier() and _may_bring(name, distribution)
    }


def _may_bring(name: str, distribution: str) -> bool:
    """Whether a distribution may bring a command of this name: one of ours comes from its extra alone."""
    if extra := extras.COMMANDS.get(name):
        return distribution.lower().replace("_", "-") == extras.distribution(extra)
    return name not in COMMANDS


def commands() -> dict[str, str]:
    """Find the commands that are installed, ours first, each with what it does."""
    found = of_plugins()
    ours = {name: text for name, text in COMMANDS.items() if name not in extras.COMMANDS or name in found}
    return ours | {name: f"a command of {whose}" for name, (_, whose) in found.items() if name not in ours}


def defaults(command: str) -> dict[str, Any]:
    """Defaults of options, by the name of the option, that the user has configured.

    Args:
        command: The command that has the options.

    Raises:
        ConfigurationError: When the user's file says something wrong, and the command does not say so itself.
    """
    from anyaccel import configuration

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
    if os.environ.get("ANYACCEL_MACHINE"):
        found.pop("machine", None)
    return found


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


def add_common(parser: argparse.ArgumentParser, command: str = DEFAULT) -> None:
    """Options that every command understands, before or after its name, and those of all that look at a machine.

    Plug-ins are asked in their own ways by commands about plug-ins, which take no declared devices. A command that
    passes options on to another program leaves it the short ones.
    """
    group = parser.add_argument_group("common options")
    group.add_argument("-j", "--json", action="store_true", help="print JSON")
    if command in APART or command not in COMMANDS:
        return
    group.add_argument(
        "--machine",
        metavar="MACHINE",
        help="'host', 'sim:PRODUCT:COUNT,...' or a directory that 'anyaccel record' wrote (default: $ANYACCEL_MACHINE,"
        " or this host)",
    )
    group.add_argument(
        "--probe-timeout",
        metavar="SECONDS",
        type=seconds(0.001, 3600),
        default=10.0,
        help="seconds for the detection of each vendor (default: 10)",
    )
    if command in ABOUT_PLUGINS:
        return
    group.add_argument(
        "--declare",
        metavar="NAME=COUNT",
        action="append",
        default=[],
        help="count this many devices of a resource, whatever was found",
    )
    group.add_argument(
        *(() if command in PASSES_ON else ("-v",)),
        "--verbose",
        action="store_true",
        help="say how each vendor's detection ended, and how long it took",
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
    "--columns",
)
"""Options that may stand before the command and take the next argument as their value."""
NUMBERED = ("-w", "--watch")
"""Options that take the next argument as their value where it is a number."""


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
        if argument[:1].isdigit() and position and arguments[position - 1] in NUMBERED:
            continue
        return argument, [*arguments[:position], *arguments[position + 1 :]]
    if not HELP.isdisjoint(arguments):
        print_help()
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


def columns(told: Mapping[str, str]) -> str:
    """Write names, each with what it is beside it, as wide as the terminal."""
    width = max(map(len, told))
    return "\n".join(_filled(text, f"  {name:<{width}}  ", " " * (width + 4)) for name, text in told.items())


def _filled(text: str, first: str = "", further: str = "") -> str:
    """A text in lines that are no longer than the terminal is wide; the first and further ones begin with these."""
    from textwrap import fill

    room = max(40, output.width() - 2)
    return fill(text, room, initial_indent=first, subsequent_indent=further, break_on_hyphens=False)


def _told_of_extras(found: Mapping[str, str]) -> str:
    """Say which of our commands are not installed, and what brings them; nothing where all are."""
    missing = [f"{name!r} (anyaccel[{extra}])" for name, extra in extras.COMMANDS.items() if name not in found]
    return f"\n{_filled('not installed: ' + ', '.join(missing))}\n" if missing else ""


def print_help() -> NoReturn:
    """Print what ``anyaccel --help`` does, as wide as the terminal, and end."""
    from anyaccel.scheduler.filters import FILTERS

    request = (
        "A request is one or more terms such as GPU, GPU:2, GPU:0.5, 'H100|A100:4,linked', GPU:1,mem=40GiB or"
        " TPU:4,else=cpu. Options stand before or after the request; see 'anyaccel COMMAND --help' for them, and"
        " 'anyaccel --version' for the version. A term may ask of its devices:"
    )
    found = commands()
    output.print_help(
        f"""{_filled("usage: anyaccel [OPTIONS] [COMMAND] [REQUEST ...] [-- CMD ...]", further="    ")}

{_filled("Find the accelerators of a machine, hand them out, start commands that see exactly theirs.")}

commands:
{columns(found)}
{_told_of_extras(found)}
{_filled(request)}
{columns({each.form: f"each device {each.summary}" for each in FILTERS.values()})}

{_filled(EPILOG)}"""
    )
    raise SystemExit(0)
