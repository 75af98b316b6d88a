"""Watch the devices of this machine, who holds them and who waits, until 'q' is pressed."""

from __future__ import annotations

import argparse
import os

import anyaccel
from anyaccel.cli import INTERVAL, add_looks, machine_options, output, survey
from anyaccel.cli import sample as samples
from anyaccel.errors import AnyaccelError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from anyaccel.model import Inventory

_DETECT_EVERY = 15
"""Looks between two at which devices there are."""


EXAMPLES = (
    ("anyaccel top", "devices, holders and waiters as they are now"),
    ("anyaccel top --machine sim:H100:8", "a machine that you do not have"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_looks(parser, default=INTERVAL, help="look again after so many seconds (default: 2)")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.json or not output.is_terminal():
        raise UsageError(
            "'anyaccel top' needs a terminal", hint="'anyaccel --watch' writes to a pipe or a file, also as JSON"
        )
    try:
        import textual  # noqa: F401
    except ImportError as error:
        raise AnyaccelError("'anyaccel top' needs Textual", hint="pip install 'anyaccel[top]'") from error
    if not output.can_move_cursor():
        term = os.environ.get("TERM", "")
        raise UsageError(
            f"'anyaccel top' needs a terminal whose cursor can be moved (TERM is {term!r})",
            hint="'anyaccel --watch' shows one table below the other",
        )
    from anyaccel_jobs.jobs import active_jobs
    from anyaccel_jobs.top_app import Top

    inventory = survey(args)
    Top(Looks(inventory, machine_options(args), stats=not args.no_stats), active_jobs, interval=args.watch).run()
    return 0


class Looks:
    """Looks at a machine again and again; now and then also at which devices there are.

    Args:
        inventory: What was found at first.
        options: As of :func:`anyaccel.detect`, to find them again.
        stats: Whether vendors are asked how their devices fare.
    """

    def __init__(self, inventory: Inventory, options: dict[str, Any], *, stats: bool = True) -> None:
        self._inventory = inventory
        self._options = options
        self._stats = stats
        self._looks = 0

    def __call__(self) -> samples.Sample:
        """Look now."""
        self._looks += 1
        if self._looks % _DETECT_EVERY == 0:
            self._inventory = anyaccel.detect(**self._options)
        timeout = self._options.get("timeout") or 10.0
        return samples.take_sample(self._inventory, stats=self._stats, timeout=timeout)
