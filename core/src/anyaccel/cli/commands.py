"""The commands: those of this distribution and its extras, those of plug-ins, and what distributions add to a command.

A distribution brings commands by entry points of the group ``anyaccel.commands``, and extends commands of ours by entry
points of the group ``anyaccel.options``, each with the name of a command and a module. For ``run`` the module has
``add_arguments(parser)``, which declares options, and ``main(args)``, which returns an exit status, or None if none of
its options was given. For ``cancel`` it has ``list_own(leases)``, which takes identities of the user's active leases,
and returns identities of waiting things, of running things, ids of the processes that wait or hold leases for them, and
their leases, and ``cancel(what, grace)``, which returns a message for the user, or None for an identity of another
kind. For ``notebook``, which is no command, it has ``load_ipython_extension(shell)``.
"""

from __future__ import annotations

import contextlib
from importlib import import_module

from anyaccel import extras
from anyaccel.cli import output
from anyaccel.errors import CommandNotRunnableError, UsageError
from anyaccel.text import suggest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

GROUP = "anyaccel.commands"
"""Group of the entry points of commands that distributions bring: ``mps = "anyaccel_acme.mps_command"``."""
OPTIONS_GROUP = "anyaccel.options"
"""Group of the entry points of modules that extend a command of ours."""
NOTEBOOK = "notebook"
"""The extra with the magic of IPython, and the name that it extends."""
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
        "report": "show the usage of devices, from the journal of ended leases",
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
    if target:
        return _import(distribution, target, f"the command {name!r} of {distribution}")
    if name in extras.COMMANDS:
        raise extras.not_installed(f"the command {name!r}", extras.COMMANDS[name])
    close = suggest(name, COMMANDS, f"the commands are {', '.join(COMMANDS)}")
    raise UsageError(f"there is no command {name!r}; {close}", hint="see 'anyaccel --help'")


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
    further = {name: _summary(*place) for name, place in found.items() if name not in COMMANDS}
    return ours | ({"Commands of plug-ins": further} if further else {})


def commands() -> dict[str, str]:
    """Return the installed commands with their descriptions."""
    return {name: text for group in groups().values() for name, text in group.items()}


def _summary(target: str, distribution: str) -> str:
    """Describe a command of a plug-in by the first sentence of its module, else by the summary of its distribution."""
    from importlib.metadata import PackageNotFoundError, metadata

    told = _read_first_sentence(target)
    if not told:
        # A distribution without a name has no metadata.
        with contextlib.suppress(PackageNotFoundError, ValueError):
            told = " ".join(metadata(distribution).get_all("Summary") or ())
    return f"{told} ({distribution})" if told else f"a command of {distribution}"


def _read_first_sentence(target: str) -> str:
    """Return what a module says of itself first, without a capital and a full stop; empty for nothing.

    The module is not imported: its source is read.
    """
    import ast
    from importlib.util import find_spec

    package, *rest = target.split(".")
    # Whatever is wrong with the files of a plug-in costs the description alone.
    with contextlib.suppress(Exception):
        spec = find_spec(package)  # of a package, not of a module in it: nothing is imported
        folders = spec.submodule_search_locations if spec else None
        path = f"{folders[0]}/{'/'.join(rest)}.py" if folders and rest else spec.origin if spec else None
        with open(path or "", "rb") as file:
            words = " ".join((ast.get_docstring(ast.parse(file.read())) or "").split())
        first = words.partition(". ")[0].rstrip(".")
        return first[:1].lower() + first[1:]
    return ""


def extensions(command: str) -> list[Any]:
    """Return the extension modules of a command, or of ``notebook``.

    Raises:
        CommandNotRunnableError: When a module cannot be imported.
    """
    from anyaccel.vendors.entry_points import entry_points

    return [
        _import(distribution, target, f"what {distribution} adds to {command!r}")
        for name, target, distribution, _ in entry_points(OPTIONS_GROUP)
        if name == command
    ]


def load_ipython_extension(shell: Any) -> None:
    """Register the magic ``%accel`` with IPython, for ``%load_ext anyaccel``: an extra extends ``notebook``.

    Raises:
        UsageError: If the extra is not installed.
        CommandNotRunnableError: If it cannot be imported.
    """
    found = extensions(NOTEBOOK)
    if not found:
        error = extras.not_installed("the magic %accel", NOTEBOOK)
        output.drop_traceback(error)
        raise error
    for extension in found:
        extension.load_ipython_extension(shell)


def _import(distribution: str, target: str, what: str) -> ModuleType:
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
