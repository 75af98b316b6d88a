"""Show a command's description, options and examples, like 'anyaccel COMMAND --help'."""

from __future__ import annotations

import argparse

from anyaccel import extras
from anyaccel.cli import output
from anyaccel.cli.arguments import fill, name_columns
from anyaccel.cli.commands import groups, module_of
from anyaccel.cli.parser import parse
from anyaccel.scheduler import FILTERS

EXAMPLES = (("anyaccel help", "all commands"), ("anyaccel help run", "one of them"))
EXIT_STATUSES = (
    "exit status: 0 done, 1 failed, 2 the request or an argument is wrong, 3 the request can never fit on this machine,"
    " 4 not free now, 6 not permitted, 75 busy: try again, 124 a job reached its time limit, 126 the command cannot be"
    " run, 127 it was not found, 130 interrupted; 'run' returns the command's own"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="the command; all of them when there is none")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.command is None:
        _print_all()
    else:
        parse(args.command, module_of(args.command), ["--help"])
    return 0


def _print_all() -> None:
    """Print what ``anyaccel --help`` shows, as wide as the terminal."""
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
