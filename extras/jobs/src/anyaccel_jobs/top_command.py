"""Watch the devices of this machine, their holders and waiting requests, until 'q' is pressed."""

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
"""Samples between two detections of devices."""


EXAMPLES = (
    ("anyaccel top", "devices, holders and waiters as they are now"),
    ("anyaccel top --machine sim:H100:8", "a machine that you do not have"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_looks(parser, default=INTERVAL, help="time between two looks (default: 2s)")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.json or not output.is_terminal():
        raise UsageError(
            "'anyaccel top' needs a terminal", hint="'anyaccel --watch' writes to a pipe or a file, also as JSON"
        )
    try:
        # The extra brings Textual only on demand: jobs need none of it.
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
    """Samples a machine repeatedly, and detects its devices now and then.

    Args:
        inventory: The devices found at first.
        options: Arguments of :func:`anyaccel.detect`.
        stats: Whether vendors measure their devices.
    """

    def __init__(self, inventory: Inventory, options: dict[str, Any], *, stats: bool = True) -> None:
        self._inventory = inventory
        self._options = options
        self._stats = stats
        self._looks = 0

    def __call__(self) -> samples.Sample:
        """Return a sample."""
        self._looks += 1
        # Detection starts a process for each vendor: too slow for every sample.
        if self._looks % _DETECT_EVERY == 0:
            self._inventory = anyaccel.detect(**self._options)
        timeout = self._options.get("timeout") or 10.0
        return samples.take_sample(self._inventory, stats=self._stats, timeout=timeout)
