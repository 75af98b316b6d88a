"""Print the script by which a shell completes commands, options, requests and devices of this machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Callable
from typing import NoReturn

from anyaccel.cli import output
from anyaccel.cli.commands import commands, module_of
from anyaccel.cli.parser import add_common
from anyaccel.errors import AnyaccelError

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = (
    ('eval "$(anyaccel completion bash)"', "in ~/.bashrc; the same with zsh in ~/.zshrc, after compinit"),
    ("anyaccel completion fish > ~/.config/fish/completions/anyaccel.fish", "for fish, once"),
)
_SECONDS = 1.0
_WORD = re.compile(r"[\w.+/:-]+")
"""Names that a shell takes as one word; other names of devices are not offered."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from argcomplete.shell_integration import shellcode

    script = shellcode(["anyaccel"], shell=args.shell)
    if args.json:
        output.print_json("completion/1", {"shell": args.shell, "script": script})
    else:
        # A script has tabs and lines of its own.
        output.print_help(script)
    return 0


def complete() -> NoReturn:
    """Print the completions at the cursor, and end the process.

    The shell's function, which the command prints, starts this program with ``_ARGCOMPLETE`` set and the line in
    ``COMP_LINE``, and reads from descriptor 8. Only the command on the line is imported. Types and devices are those
    that a detection of one second finds; nothing is offered of a machine or of leases that cannot be read.
    """
    import argcomplete

    line = os.environ.get("COMP_LINE", "")
    parser = argparse.ArgumentParser(prog="anyaccel", allow_abbrev=False)
    parser.add_argument("-V", "--version", action="store_true", help="print the version")
    add_common(parser)
    _offer(parser)
    subparsers = parser.add_subparsers()
    # To import each command would take longer than the shell waits for.
    words = set(line.split())
    for name, summary in commands().items():
        command = subparsers.add_parser(name, help=summary, allow_abbrev=False)
        if name in words:
            add_common(command, name)
            module = module_of(name)
            module.add_arguments(command)
            _offer(command, **getattr(module, "COMPLETERS", {}))
    with contextlib.suppress(AnyaccelError):
        argcomplete.autocomplete(parser, always_complete_options="long")
    raise SystemExit(0)


def _offer(parser: argparse.ArgumentParser, **own: Callable[..., list[str]]) -> None:
    """Attach completers to the arguments of a command: its module's own, by the name of the argument, or the usual."""
    completers = {**_COMPLETERS, **own}
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to name them
        if action.dest in completers:
            action.completer = completers[action.dest]  # type: ignore[attr-defined]


def _requests(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return beginnings of a request: resources, vendors, types and devices; after a comma filters."""
    import anyaccel
    from anyaccel.scheduler.filters import FILTERS
    from anyaccel.scheduler.grammar import forms

    head, comma, _last = prefix.rpartition(",")
    if comma:
        parts = (form.partition("=") for form in forms())
        # Values in capitals stand for something, such as SIZE; the others are typed as they are.
        return [f"{head},{key}{equals}{value if value.islower() else ''}" for key, equals, value in parts]
    # A driver that hangs must not make the shell hang.
    inventory = anyaccel.detect(getattr(parsed_args, "machine", None), timeout=_SECONDS)
    found = {name for device in inventory.devices for name in device.names}
    signs = [(sign, each) for sign, each in FILTERS.items() if not sign.isalpha()]
    found |= {
        f"{device.vendor}{sign}{each.fact(device, inventory)}" for device in inventory.devices for sign, each in signs
    }
    return sorted(name for name in found if _WORD.fullmatch(name))


def _machines(prefix: str, **_: object) -> list[str]:
    """Return simulations of known products, or directories of recordings."""
    from argcomplete.completers import DirectoriesCompleter

    if not prefix.startswith("sim:"):
        return ["host", "sim:", *DirectoriesCompleter()(prefix)]
    from anyaccel import accelerators

    head, comma, _last = prefix.rpartition(",")
    start = f"{head}," if comma else "sim:"
    found = {getattr(accelerators, name) for name in dir(accelerators)}
    tags = sorted(tag for tag in found if isinstance(tag, str) and _WORD.fullmatch(tag))
    return [f"{start}{tag}:" for tag in tags]


def _leases(**_: object) -> list[str]:
    from anyaccel.ledger import Ledger

    return sorted({record.id for record in Ledger.open().leases()})


def _own(**_: object) -> list[str]:
    """Return the jobs, tickets and leases of this user."""
    from anyaccel.cli.cancel import list_own
    from anyaccel.ledger import Ledger

    found, own = list_own(Ledger.open())
    return found + own


def _commands(**_: object) -> list[str]:
    return list(commands())


def _engines(**_: object) -> list[str]:
    from anyaccel.pool.engine import engines

    return sorted(engines())


_COMPLETERS: dict[str, Callable[..., list[str]]] = {
    "request": _requests,
    "machine": _machines,
    "lease": _leases,
    "what": _own,
    "command": _commands,
    "engine": _engines,
}
"""Completers by the name of the argument."""
