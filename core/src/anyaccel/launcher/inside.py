"""What a process that has its devices puts on itself, before code of the user runs in it.

A worker of a pool, the process that becomes a command, one that uses devices itself, and what starts a command have
their aspects from here. The fork server imports this module for its workers: it imports next to nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

from anyaccel.linux import mark as marks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.launcher.sandbox import Sandbox

T = TypeVar("T")

NO_VARIABLES: Mapping[str, str] = {}


class ProcessSetup(NamedTuple):
    """The part of a plan that a process carries out on itself; see :class:`anyaccel.launcher.launch.Launch`.

    An option of a start that has a field here by its name is carried out by it.

    Attributes:
        mark: The mark that it is to carry; empty where it carries that already, or there is none.
        group: Directory of the cgroup that it enters; None to stay.
        set: Variables to set.
        unset: Variables to remove.
        directory: The working directory; None to stay.
        path: The module path; None to keep it.
        cap: Whether frameworks are capped when they are imported.
        processors: The processors to run on; empty for all.
        sandbox: What it may not open; None where it is not confined.
    """

    mark: marks.Mark = ()
    group: str | None = None
    set: Mapping[str, str] = NO_VARIABLES
    unset: Sequence[str] = ()
    directory: str | None = None
    path: Sequence[str] | None = None
    cap: bool = False
    processors: Collection[int] = ()
    sandbox: Sandbox | None = None

    def apply(self) -> None:
        """Put all of it on this process, the sandbox last.

        Raises:
            EnforcementError: When the process cannot be confined.
            OSError: When the kernel refuses the cgroup or the directory.
        """
        marks.put(self.mark)
        if self.group is not None:
            from anyaccel.linux.cgroup import enter

            enter(self.group)
        for name in self.unset:
            os.environ.pop(name, None)
        os.environ.update(self.set)
        if self.directory is not None:
            os.chdir(self.directory)
        if self.path is not None:
            sys.path[:] = self.path
        if self.cap:
            from anyaccel.launcher.caps import install

            install()
        self._put_on_thread()
        if self.sandbox is not None:
            self.sandbox.apply()

    def start(self, begin: Callable[[], T]) -> T:
        """Call what starts a process, in a thread from which the process inherits the rest: processors, sandbox.

        Where that cannot be taken back, it is a thread of its own, which ends then. Do not tie the life of what it
        starts to its parent by a parent-death signal in that case.

        Args:
            begin: Starts the process.

        Raises:
            EnforcementError: When it cannot be confined.
        """

        def run() -> T:
            self._put_on_thread()
            return begin()

        if self.sandbox is not None:
            return self.sandbox.start(run)
        before = os.sched_getaffinity(0) if self.processors else ()
        try:
            return run()
        finally:
            put(before)

    def _put_on_thread(self) -> None:
        """Put on this thread what it alone has, and what it starts inherits."""
        put(self.processors)


def put(processors: Collection[int]) -> None:
    """Let this thread, and what it starts from here on, run on some processors; does nothing for none.

    Processors that went away meanwhile, or that a cgroup does not leave us, are no reason not to start.
    """
    if processors:
        with contextlib.suppress(OSError):
            # No set_mempolicy: the kernel takes pages from the node of the processor that touches them first.
            os.sched_setaffinity(0, processors)
