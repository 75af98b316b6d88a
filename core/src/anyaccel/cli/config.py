"""Show what is configured, and where: settings of the machine's administrator, and defaults of your own."""

from __future__ import annotations

import argparse

from anyaccel import configuration
from anyaccel.cli import output

EXAMPLES = (
    ("anyaccel config", "every setting, its value, and the file that says so"),
    ("anyaccel config --template user > ~/.config/anyaccel/config.toml", "a file of your own, all in comments"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--template", choices=("machine", "user"), help="print a file of all settings, each explained in a comment"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.template:
        output.print_help(configuration.template(machine=args.template == "machine"))
        return 0
    files = (configuration.machine(), configuration.user())
    rows: list[tuple[str, object, str]] = []
    for file, whose in zip(files, ("machine", "user"), strict=True):
        known = {key: each for key, each in configuration.SETTINGS.items() if getattr(each, whose)}
        keys = dict.fromkeys([*(key for key in known if "*" not in key), *file.values])
        rows += [(key, file.get(key), file.path if key in file.values else "default") for key in keys]
    if args.json:
        settings = [{"key": key, "value": value, "from": source} for key, value, source in rows]
        places = [{"path": file.path, "found": file.found} for file in files]
        output.print_json("config/1", {"files": places, "settings": settings})
        return 0
    output.print_table(
        ("SETTING", "VALUE", "FROM"), [(key, configuration.written(key, value), source) for key, value, source in rows]
    )
    for file in files:
        if not file.found and file.path:
            output.say(f"there is no {file.path}")
    return 0
