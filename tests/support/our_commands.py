"""The commands of ours that are installed here: those of the core, and those of the extras that are there."""

from anyaccel.cli.commands import COMMANDS, commands

INSTALLED = [name for name in COMMANDS if name in commands()]
