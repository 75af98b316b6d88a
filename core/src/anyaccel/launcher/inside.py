"""What a process that has its devices puts on itself, before code of the user runs in it.

A worker of a pool, the process that becomes a command, and one that uses devices itself do it by the same function. The
fork server imports this module for its workers: it imports next to nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from anyaccel.ledger import mark as marks

NO_VARIABLES: Mapping[str, str] = {}


class Inside(NamedTuple):
    """The part of a plan that a process carries out on itself; see :class:`anyaccel.launcher.launch.Launch`.

    Attributes:
        mark: The mark that it is to carry; empty where it carries that already, or there is none.
        group: Directory of the cgroup that it enters; None to stay.
        set: Variables to set.
        unset: Variables to remove.
        directory: The working directory; None to stay.
        path: The module path; None to keep it.
        processors: The processors to run on; empty for all.
        cap: Whether frameworks are capped when they are imported.
    """

    mark: marks.Mark = ()
    group: str | None = None
    set: Mapping[str, str] = NO_VARIABLES
    unset: Sequence[str] = ()
    directory: str | None = None
    path: Sequence[str] | None = None
    processors: tuple[int, ...] = ()
    cap: bool = False

    def apply(self) -> None:
        """Put all of it on this process.

        Raises:
            OSError: When the kernel refuses the cgroup or the directory.
        """
        marks.put(self.mark)
        if self.group is not None:
            from anyaccel.launcher.limits import enter

            enter(self.group)
        for name in self.unset:
            os.environ.pop(name, None)
        os.environ.update(self.set)
        if self.directory is not None:
            os.chdir(self.directory)
        if self.path is not None:
            sys.path[:] = self.path
        put(self.processors)
        if self.cap:
            from anyaccel.launcher.caps import install

            install()


def put(processors: Collection[int]) -> None:
    """Let this thread, and what it starts from here on, run on some processors; does nothing for none.

    Processors that went away meanwhile, or that a cgroup does not leave us, are no reason not to start.
    """
    if processors:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, processors)
