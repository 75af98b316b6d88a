"""Print the script by which a shell completes commands, options, requests and devices of this machine."""

from __future__ import annotations

import argparse

from anyaccel.cli import output

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = (
    ('eval "$(anyaccel completion bash)"', "in ~/.bashrc; the same with zsh in ~/.zshrc, after compinit"),
    ("anyaccel completion fish > ~/.config/fish/completions/anyaccel.fish", "for fish, once"),
)


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
