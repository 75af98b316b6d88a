"""Write the project of a new plug-in, that installs, passes the conformance suite and type-checks as it is.

What it says about the hardware is made up; every place to change is marked TODO.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import chain

from anyaccel.cli import output
from anyaccel.errors import UsageError
from anyaccel.vendors import RESOURCE, VENDOR

TEMPLATE = "scaffold"
COMMON = "common"
VARIANTS = ("sysfs", "tool")
SUFFIX = ".in"
"""Behind the names of the template's files, so that no tool takes them for parts of anyaccel."""


EXAMPLES = (
    ("anyaccel new acme --resource NPU", "a project that reads the files of a driver"),
    ("anyaccel new acme --from tool", "one that asks the vendor's command"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("vendor", metavar="VENDOR", help="key of the vendor, such as acme")
    parser.add_argument("--resource", metavar="NAME", help="what schedulers count, such as NPU (default: the vendor)")
    parser.add_argument(
        "--kind", metavar="KIND", default="npu", help="kind of accelerator in lower case (default: npu)"
    )
    parser.add_argument(
        "--from",
        dest="variant",
        choices=VARIANTS,
        default="sysfs",
        help="where facts come from: files of the driver, or the vendor's command-line tool (default: sysfs)",
    )
    parser.add_argument("--directory", metavar="DIR", help="where to write it (default: anyaccel-VENDOR)")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    words = _words(args.vendor, args.resource or args.vendor.upper(), args.kind)
    directory: str = args.directory or words["anyaccel-acme"]
    if os.path.isdir(directory) and os.listdir(directory):
        raise UsageError(f"{directory} exists and is not empty; choose another one with --directory")
    written = []
    template = files("anyaccel_testing").joinpath(TEMPLATE)
    for path, text in chain(*(_files(template.joinpath(part)) for part in (COMMON, args.variant))):
        target = os.path.join(directory, _replaced(path, words))
        _write(target, _replaced(text, words))
        written.append(target)
    if args.json:
        output.print_json("new/1", {"vendor": args.vendor, "path": directory, "files": written})
        return 0
    output.print_line(directory)
    output.say(f"next: cd {directory} && pip install -e '.[test]' && pytest; then look for TODO")
    return 0


def _words(vendor: str, resource: str, kind: str) -> dict[str, str]:
    """What the template's words become, those that contain others first."""
    for what, pattern, text in (
        ("a vendor", VENDOR, vendor),
        ("a resource", RESOURCE, resource),
        ("a kind", VENDOR, kind),
    ):
        if not pattern.fullmatch(text):
            raise UsageError(f"{what} must match {pattern.pattern} (got {text!r})")
    return {
        "anyaccel-acme": f"anyaccel-{vendor.replace('_', '-')}",
        "APU": resource,
        '"apu"': f'"{kind}"',
        "ACME": vendor.upper(),
        "Acme": "".join(part.title() for part in vendor.split("_")),
        "acme": vendor,
    }


def _replaced(text: str, words: Mapping[str, str]) -> str:
    pattern = "|".join(map(re.escape, words))
    return re.sub(pattern, lambda match: words[match[0]], text)


def _files(directory: Traversable, above: str = "") -> Iterator[tuple[str, str]]:
    """The template's files: path and text."""
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _files(entry, f"{above}{entry.name}/")
        elif entry.name.endswith(SUFFIX):
            name = entry.name.removesuffix(SUFFIX)
            yield above + (".gitignore" if name == "gitignore" else name), entry.read_text(encoding="utf-8")


def _write(path: str, text: str) -> None:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; choose another directory") from error
