"""Write the project of a new plug-in. The project installs, passes the conformance suite and type-checks unchanged.

Its facts about the hardware are invented; TODO marks every place to change.
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
from anyaccel.kit import tag
from anyaccel.vendors import RESOURCE, VENDOR

TEMPLATE = "scaffold"
COMMON = "common"
VARIANTS = ("sysfs", "tool")
BRAND = r"[A-Za-z0-9][A-Za-z0-9 .&+-]{0,62}"
DRIVER = r"[a-z0-9_-]{1,56}"
PCI_ID = r"[0-9a-f]{4}"
MASK = r"[A-Z_][A-Z0-9_]*|none"
NO_MASK = "none"
DRIVER_BEHIND = ('driver = "', "/sys/module/", "/drivers/", "install the ", "modprobe ")
"""Texts before each name of the driver in the template, where other words are the name of the vendor."""
SUFFIX = ".in"
"""Suffix of the template's files, so that no tool takes them for parts of anyaccel."""
MASK_TEST = "tests/test_mask.py"
WITHOUT_MASK = {
    "Catalog, Mask, ": "Catalog, ",
    "TODO: the variable that the runtime reads, and what it does with a value that it does not know": (
        "no variable hides these devices, so each launch that does not get them names the vendor"
    ),
    'Mask("ACME_VISIBLE_DEVICES", nothing="", unknown="error")': "None",
    " -- printenv ACME_VISIBLE_DEVICES": " -- printenv ANYACCEL_DEVICES",
}
"""Replacements for a vendor without a mask."""


EXAMPLES = (
    ("anyaccel new acme --resource NPU", "a project that reads the files of a driver"),
    ("anyaccel new acme --from tool", "a project that asks the vendor's command"),
    ("anyaccel new acme --driver acmedrv --pci 1d0f --mask none", "a vendor whose devices no variable hides"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("vendor", metavar="VENDOR", help="key of the vendor, such as acme")
    parser.add_argument("--resource", metavar="NAME", help="resource in requests, such as NPU (default: the vendor)")
    parser.add_argument(
        "--kind", metavar="KIND", default="npu", help="kind of accelerator in lower case (default: npu)"
    )
    parser.add_argument(
        "--from",
        dest="variant",
        choices=VARIANTS,
        default="sysfs",
        help="source of the facts: files of the driver, or the vendor's command-line tool (default: sysfs)",
    )
    parser.add_argument("--brand", metavar="NAME", help="name of the vendor in messages (default: made of VENDOR)")
    parser.add_argument("--driver", metavar="NAME", help="kernel module and PCI driver (default: VENDOR)")
    parser.add_argument("--pci", metavar="ID", default="ace0", help="PCI vendor id, such as 1022 (default: invented)")
    parser.add_argument(
        "--mask",
        metavar="VARIABLE",
        help="variable that shows a process certain devices; none if there is none (default: VENDOR_VISIBLE_DEVICES)",
    )
    parser.add_argument("--directory", metavar="DIR", help="directory of the project (default: anyaccel-VENDOR)")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    words = _map_words(args)
    left_out = MASK_TEST if args.mask == NO_MASK else None
    directory: str = args.directory or words["anyaccel-acme"]
    if os.path.isdir(directory) and os.listdir(directory):
        raise UsageError(f"{directory} exists and is not empty; choose another one with --directory")
    written = []
    template = files("anyaccel_testing").joinpath(TEMPLATE)
    for path, text in chain(*(_list_files(template.joinpath(part)) for part in (COMMON, args.variant))):
        if path == left_out:
            continue
        target = os.path.join(directory, _replace_words(path, words))
        _write_file(target, _replace_words(text, words))
        written.append(target)
    if args.json:
        output.print_json("new/1", {"vendor": args.vendor, "path": directory, "files": written})
        return 0
    # The directory alone on stdout, so that 'cd "$(anyaccel new acme)"' works; advice goes to stderr.
    output.print_line(directory)
    output.say(f"next: cd {directory} && pip install -e '.[test]' && pytest; then look for TODO")
    return 0


def _map_words(args: argparse.Namespace) -> dict[str, str]:
    """Map words of the template to their replacements, a word before the word's parts."""
    vendor, kind = args.vendor, args.kind
    resource = args.resource or vendor.upper()
    name = "".join(part.title() for part in vendor.split("_"))
    brand, driver = args.brand or name, args.driver or vendor
    mask = args.mask or f"{vendor.upper()}_VISIBLE_DEVICES"
    for what, pattern, text in (
        ("a vendor", VENDOR, vendor),
        ("a resource", RESOURCE, resource),
        ("a kind", VENDOR, kind),
        ("a brand", BRAND, brand),
        ("a driver", DRIVER, driver),
        ("a PCI vendor id", PCI_ID, args.pci),
        ("a mask", MASK, mask),
    ):
        if not re.fullmatch(pattern, text):
            raise UsageError(f"{what} must match {pattern} (got {text!r})")
    return {
        **(WITHOUT_MASK if mask == NO_MASK else {}),
        "anyaccel-acme": f"anyaccel-{vendor.replace('_', '-')}",
        '"apu", "Acme"': f'"{kind}", "{brand}"',
        "APU": resource,
        "ACME_VISIBLE_DEVICES": mask,
        **{f"Acme{behind}": f"{brand}{behind}" for behind in (" accelerators", " One", " Two", "'s")},
        # The kit makes the same tags of model and brand.
        "Acme-One": tag(f"{brand} One"),
        "Acme-Two": tag(f"{brand} Two"),
        '"Acme"': f'"{tag(brand)}"',
        "Acme": name,
        **{f"{before}acme": f"{before}{driver}" for before in DRIVER_BEHIND},
        "ACE0": args.pci.upper(),
        "ace0": args.pci,
        "acme": vendor,
    }


def _replace_words(text: str, words: Mapping[str, str]) -> str:
    # In one pass: replacements may contain other words of the template, such as a resource named 'acme'.
    pattern = "|".join(map(re.escape, words))
    return re.sub(pattern, lambda match: words[match[0]], text)


def _list_files(directory: Traversable, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and text of each file below a directory of the template."""
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _list_files(entry, f"{above}{entry.name}/")
        elif entry.name.endswith(SUFFIX):
            name = entry.name.removesuffix(SUFFIX)
            yield above + (".gitignore" if name == "gitignore" else name), entry.read_text(encoding="utf-8")


def _write_file(path: str, text: str) -> None:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; choose another directory") from error
