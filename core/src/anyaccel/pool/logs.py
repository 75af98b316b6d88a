"""Files for the output of calls, one each."""

from __future__ import annotations

import os
import re
from itertools import count

_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_NUMBER = re.compile(r"\d{6,12}(?=-)")
LONGEST = 80


class Logs:
    """A directory with one file per call, numbered on from those that are there.

    Args:
        directory: The directory; made when it is not there.

    Raises:
        OSError: When it cannot be made.
    """

    def __init__(self, directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        self.directory = os.path.abspath(directory)
        earlier = (_NUMBER.match(name) for name in os.listdir(self.directory))
        self._numbers = count(1 + max((int(found[0]) for found in earlier if found), default=0))

    def path_for(self, name: str) -> str:
        """Make the file for the next call, by the order in which calls start.

        Raises:
            OSError: When it cannot be made.
        """
        while True:
            file = f"{next(self._numbers):06d}-{_UNFIT.sub('_', name)[:LONGEST]}.log"
            path = os.path.join(self.directory, file)
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            except FileExistsError:  # another pool writes here, too
                continue
            return path
