"""``%load_ext anyaccel`` for IPython and Jupyter: the magic comes from an extra, which extends ``notebook``."""

from __future__ import annotations

from anyaccel import extras
from anyaccel.cli import output
from anyaccel.cli.commands import extensions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EXTRA = "notebook"


def load_ipython_extension(shell: Any) -> None:
    """Register the magic ``%accel`` with IPython, which ``pip install 'anyaccel[notebook]'`` brings.

    Raises:
        UsageError: If that is not installed.
        CommandNotRunnableError: If it cannot be imported.
    """
    found = extensions(EXTRA)
    if not found:
        error = extras.not_installed("the magic %accel", EXTRA)
        output.drop_traceback(error)
        raise error
    for extension in found:
        extension.load_ipython_extension(shell)
