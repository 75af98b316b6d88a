"""The output of workers: of this process, or a log file for each call."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from itertools import count

_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_NUMBER = re.compile(r"\d{6,12}(?=-)")
LONGEST = 80


class Logs:
    """A directory with a log file per call, numbered on from existing files.

    Args:
        directory: The directory; made if it does not exist.

    Raises:
        OSError: When the directory cannot be made.
    """

    def __init__(self, directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        self.directory = os.path.abspath(directory)
        earlier = (_NUMBER.match(name) for name in os.listdir(self.directory))
        self._numbers = count(1 + max((int(found[0]) for found in earlier if found), default=0))

    def path_for(self, name: str) -> str:
        """Make an empty log file for the next started call, and return the absolute path.

        Its name is the next number and the call's name, with unfit characters replaced and cut to :data:`LONGEST`
        characters. If the file exists already, the number after that is tried.

        Raises:
            OSError: When the file cannot be made.
        """
        # O_EXCL below, not a check before: another process may make the same file in between.
        while True:
            file = f"{next(self._numbers):06d}-{_UNFIT.sub('_', name)[:LONGEST]}.log"
            path = os.path.join(self.directory, file)
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            except FileExistsError:  # of another pool with the same directory
                continue
            return path


@contextlib.contextmanager
def open_outputs(log: str | None = None) -> Iterator[tuple[int, int]]:
    """Open descriptors for a worker's standard output and error, as a context: a log file, or those of this process.

    The log file is made if needed, and appended to. An output that this process has closed becomes ``/dev/null``.
    Opened descriptors are closed when the context ends.

    Raises:
        OSError: When the file cannot be opened.
    """
    made = os.O_CREAT | os.O_APPEND if log else 0
    # A program may have closed its own output, as daemons do: then the worker's is discarded.
    opened = os.open(log or os.devnull, os.O_WRONLY | os.O_CLOEXEC | made, 0o666)
    try:
        yield (opened, opened) if log else (1 if _is_open(1) else opened, 2 if _is_open(2) else opened)
    finally:
        os.close(opened)


def _is_open(descriptor: int) -> bool:
    """Return whether this process has a descriptor of this number."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
