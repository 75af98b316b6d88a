"""Show a command's description, options and examples, like 'anyaccel COMMAND --help'."""

from __future__ import annotations

import argparse

from anyaccel.cli.parser import module_of, parse, print_help

EXAMPLES = (("anyaccel help", "all commands"), ("anyaccel help run", "one of them"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="the command; all of them when there is none")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.command is None:
        print_help()
    else:
        parse(args.command, module_of(args.command), ["--help"])
    return 0
