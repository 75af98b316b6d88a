"""Files for the output of calls, one each."""

from __future__ import annotations

import os
import re
from itertools import count

_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
LONGEST = 80


class Logs:
    """A directory with one file per call.

    Args:
        directory: The directory; made when it is not there.

    Raises:
        OSError: When it cannot be made.
    """

    def __init__(self, directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        self.directory = os.path.abspath(directory)
        self._numbers = count(1)

    def path_for(self, name: str) -> str:
        """The file for the next call, by the order in which calls start."""
        return os.path.join(self.directory, f"{next(self._numbers):06d}-{_UNFIT.sub('_', name)[:LONGEST]}.log")
