"""A command that :func:`anyaccel.run` has run."""

from __future__ import annotations

import subprocess
from typing import Any


class Completed(subprocess.CompletedProcess[Any]):
    """What :class:`subprocess.CompletedProcess` says, and whether the time limit has ended the command.

    Attributes:
        timed_out: Whether the command was ended by its time limit, whatever its ``returncode`` is.
    """

    timed_out: bool = False
