"""Show the settings of the machine's administrator and your own defaults, and the file of each.

With --check the exit status is 1 when the file has a warning or a failure.
"""

from __future__ import annotations

import argparse
import os

from anyaccel import configuration, settings
from anyaccel.cli import output
from anyaccel.cli.doctor import diagnose_file, finding_json, line
from anyaccel.cli.table import print_table
from anyaccel.errors import UsageError
from anyaccel.text import printable

EXAMPLES = (
    ("anyaccel config", "every setting, its value and its file"),
    ("anyaccel config --template user > ~/.config/anyaccel/config.toml", "a file of your own, all in comments"),
    ("anyaccel config --check new.toml", "the faults of a file, before it is put in its place"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--template", choices=("machine", "user"), help="print a file of all settings, each explained in a comment"
    )
    group.add_argument(
        "--check",
        metavar="FILE",
        help="report the faults of a file; its tables tell whether it is the machine's or a user's",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.template and args.json:
        raise UsageError("--template prints TOML, which has no form in JSON", hint="leave --json out")
    if args.template:
        output.print_help(settings.template(args.template))
        return 0
    if args.check is not None:
        return _check(args)
    files = (configuration.machine(), configuration.user())
    rows: list[tuple[str, object, str]] = []
    for file, whose in zip(files, ("machine", "user"), strict=True):
        # Keys with a star stand for a name, such as that of a user: those that are set are shown.
        known = [each.key for each in settings.settings_of(whose) if "*" not in each.key]
        keys = dict.fromkeys([*known, *file.values])
        rows += [(key, file.get(key), file.path if key in file.values else "default") for key in keys]
    if args.json:
        values = [{"key": key, "value": value, "from": source} for key, value, source in rows]
        places = [{"path": file.path, "found": file.found} for file in files]
        output.print_json("config/1", {"files": places, "settings": values})
        return 0
    print_table(
        ("SETTING", "VALUE", "FROM"), [(key, settings.written(key, value), source) for key, value, source in rows]
    )
    for file in files:
        if not file.found and file.path:
            output.say(f"{file.path} does not exist")
    for finding in diagnose_file(lambda: files[0]):
        output.say(line(finding))
    return 0


def _check(args: argparse.Namespace) -> int:
    """Report the faults of a file."""
    if not os.path.exists(args.check):
        raise UsageError(f"--check must be a file (got {printable(args.check)!r}, which cannot be found)")
    path = os.path.abspath(args.check)
    kind, read = configuration.find_reader(path)
    found = tuple(diagnose_file(read))
    if args.json:
        findings = [finding_json(each) for each in found]
        output.print_json("config_check/1", {"path": path, "whose": kind, "well": not found, "findings": findings})
        return 1 if found else 0
    for each in found:
        output.print_folded(line(each))
    if not found:
        whose = "the machine's file" if kind == "machine" else "a file of your own"
        output.print_line(f"{printable(path)!r} is valid, as {whose}")
    return 1 if found else 0
