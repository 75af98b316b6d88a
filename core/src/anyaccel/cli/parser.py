"""The command line: find the command, parse its arguments, call it, and turn each error into a message and a status."""

from __future__ import annotations

import os
from importlib import import_module

from anyaccel import extras
from anyaccel.cli import output
from anyaccel.cli.extensions import import_from
from anyaccel.cli.quantities import seconds
from anyaccel.errors import AnyaccelError, ConfigurationError, UsageError
from anyaccel.text import suggest

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any, NoReturn

GROUP = "anyaccel.commands"
"""Group of the entry points of commands that distributions bring: ``mps = "anyaccel_acme.mps_command"``."""
GROUPS = {
    "See devices": {
        "status": "show the accelerators of this machine (the default command)",
        "top": "watch devices, holders and waiting requests; release or cancel your own",
        "queue": "show the requests that wait for devices, in order",
        "why": "say whether a request fits, why not, and what would fit",
        "select": "print the ids of devices that would serve a request, without holding them",
        "doctor": "look for what is wrong, and say how to mend it",
    },
    "Run programs": {
        "run": "run a command that sees exactly the devices that it asked for",
        "sweep": "run many commands, as many at once as there are devices",
        "hold": "hold devices without a command, until they are released",
        "adopt": "hold the devices that a running process of yours has open, until it ends",
        "release": "release a lease, and end the processes that run with it",
        "cancel": "cancel jobs, waiting requests and leases of yours",
        "env": "print the variables by which a shell sees the devices of a request",
        "ray": "make this machine a node of a Ray cluster",
    },
    "Jobs": {
        "jobs": "list the jobs that run without a terminal",
        "logs": "print the output of a job",
        "wait": "wait until jobs have ended",
        "redo": "submit a job again",
    },
    "Administer a machine": {
        "report": "show who used which devices, from the journal of ended leases",
        "metrics": "print or serve measurements in OpenMetrics, for a monitoring system",
        "drain": "withhold devices from new requests, as for maintenance",
        "undrain": "give drained devices out again",
        "reserve": "reserve devices for a user or a group; list and remove reservations",
        "setup": "make the files that all users of this machine share, as root",
        "config": "show the settings of this machine and of this user",
        "export": "describe the devices for another scheduler or a container engine",
        "kubernetes": "give the devices of this machine to a Kubernetes cluster",
    },
    "Plug-ins and recordings": {
        "plugins": "list the installed plug-ins, and their faults",
        "check": "check that a plug-in keeps the contract",
        "new": "write the project of a new plug-in",
        "record": "record this machine, to replay it anywhere",
        "testbed": "run a vendor's own software on the machine of a recording",
    },
    "Help": {
        "help": "show what a command does, with examples",
        "completion": "print the script by which a shell completes commands, types and devices",
    },
}
"""The commands under the titles of ``anyaccel --help``, each with what it does."""
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}
DEFAULT = "status"
RUNS = {"run", "sweep", "testbed"}
"""Commands that take a command to run, after ``--``."""
EXIT_STATUSES = (
    "exit status: 0 done, 1 failed, 2 the request or an argument is wrong, 3 the request can never fit on this machine,"
    " 4 not free now, 6 not permitted, 124 a job reached its time limit, 126 the command cannot be run, 127 it was not"
    " found, 130 interrupted; 'run' returns the command's own"
)
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


def dispatch(arguments: Sequence[str]) -> int:
    """Run the command in the arguments; return the exit status."""
    own, command = _split(arguments)

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
    except KeyboardInterrupt:
        return 130


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


def module_of(name: str) -> ModuleType:
    """Import the module of a command of ours or of a plug-in.

    Raises:
        UsageError: When there is no such command.
        CommandNotRunnableError: When the module of a plug-in cannot be imported.
    """
    # A distribution must not replace a command of ours: an entry point of the name "run" is ignored.
    if name in COMMANDS and name not in extras.COMMANDS:
        return import_module(f"anyaccel.cli.{name}")
    target, distribution = of_plugins().get(name, ("", ""))
    if not target and name in extras.COMMANDS:
        raise extras.not_installed(f"the command {name!r}", extras.COMMANDS[name])
    if not target:
        close = suggest(name, COMMANDS, f"the commands are {', '.join(COMMANDS)}")
        raise UsageError(f"there is no command {name!r}; {close}", hint="see 'anyaccel --help'")
    return import_from(distribution, target, f"the command {name!r} of {distribution}")


def of_plugins() -> dict[str, tuple[str, str]]:
    """Return the module and the distribution of each command that installed distributions bring."""
    from anyaccel.vendors.entry_points import entry_points

    return {
        name: (target, distribution)
        for name, target, distribution, _ in entry_points(GROUP)
        # A name with a blank or a leading dash could not be typed as a command.
        if name.isidentifier() and _may_bring(name, distribution)
    }


def _may_bring(name: str, distribution: str) -> bool:
    """Return whether a distribution may bring a command of this name; our names are reserved for our extras."""
    if extra := extras.COMMANDS.get(name):
        return distribution.lower().replace("_", "-") == extras.distribution(extra)
    return name not in COMMANDS


def groups() -> dict[str, dict[str, str]]:
    """Return the installed commands with their descriptions, by the titles of the help."""
    found = of_plugins()
    ours = {
        title: {name: text for name, text in group.items() if name not in extras.COMMANDS or name in found}
        for title, group in GROUPS.items()
    }
    further = {name: _summary(place[1]) for name, place in found.items() if name not in COMMANDS}
    return ours | ({"Commands of plug-ins": further} if further else {})


def commands() -> dict[str, str]:
    """Return the installed commands with their descriptions."""
    return {name: text for group in groups().values() for name, text in group.items()}


def _summary(distribution: str) -> str:
    """Describe a command of a plug-in by the summary of its distribution; its module is not imported."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        told = " ".join(metadata(distribution).get_all("Summary") or ())
    except (PackageNotFoundError, ValueError):  # a distribution without a name
        told = ""
    return f"{told} ({distribution})" if told else f"a command of {distribution}"


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
    group.add_argument("-j", "--json", action="store_true", help="print JSON")
    # Commands of plug-ins declare what they need themselves.
    if command in APART or command not in COMMANDS:
        return
    group.add_argument(
        "--machine",
        metavar="MACHINE",
        help="'host', 'sim:PRODUCT:COUNT,...' or a recording (default: $ANYACCEL_MACHINE, or this host)",
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


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split the arguments at ``--`` into those of this program and the command to run."""
    listed = list(arguments)
    if "--" not in listed:
        return listed, None
    # The first one counts: the command to run may have a "--" of its own.
    at = listed.index("--")
    return listed[:at], listed[at + 1 :]


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
        print_help()
    if not VERSION.isdisjoint(arguments):
        if len(arguments) > 1:
            raise UsageError("--version stands alone", hint="leave the other arguments out")
        from anyaccel._version import __version__

        output.print_line(f"anyaccel {__version__}")
        raise SystemExit(0)
    return DEFAULT, list(arguments)


def print_help() -> NoReturn:
    """Print what ``anyaccel --help`` shows, as wide as the terminal, and end the process."""
    from anyaccel.cli.arguments import fill, name_columns
    from anyaccel.scheduler.filters import FILTERS

    request = (
        "A request is one or more terms such as GPU, GPU:2, GPU:0.5, 'H100|A100:4,linked', GPU:1,mem=40GiB or"
        " TPU:4,else=cpu. Options stand before or after the request. A term may ask of its devices:"
    )
    found = groups()
    width = max(len(name) for group in found.values() for name in group)
    listed = "\n\n".join(f"{title}:\n{name_columns(group, width)}" for title, group in found.items() if group)
    installed = {name for group in found.values() for name in group}
    absent = [f"{name} (anyaccel[{extra}])" for name, extra in extras.COMMANDS.items() if name not in installed]
    missing = f"\n{fill('Not installed: ' + ', '.join(absent))}\n" if absent else ""
    output.print_help(
        f"""{fill("usage: anyaccel [OPTIONS] [COMMAND] [REQUEST ...] [-- CMD ...]", further="    ")}

{fill("Find the accelerators of a machine, hand them out, start commands that see exactly theirs.")}

{listed}
{missing}
{fill(request)}
{name_columns({each.form: f"each device {each.summary}" for each in FILTERS.values()})}

{fill("Options and examples of a command: 'anyaccel COMMAND --help'. The version: 'anyaccel --version'.")}

{fill(EXIT_STATUSES)}"""
    )
    raise SystemExit(0)
