"""Set up a process with leased devices, before the user's code runs.

The steps serve a worker of a pool, the process that becomes a command, a process that uses devices itself, and the
parent of a command. The fork server imports this module for its workers, so the module imports next to nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence

from anyaccel._typing import NamedTuple, TypeVar
from anyaccel.linux import mark as marks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.launcher.sandbox import Sandbox

T = TypeVar("T")

NO_VARIABLES: Mapping[str, str] = {}


class ProcessSetup(NamedTuple):
    """The steps of a start plan inside the process; see :class:`anyaccel.launcher.launch.Launch`.

    Attributes:
        mark: The mark to put on the process; empty for none, or if the process carries the mark already.
        group: Directory of the cgroup to enter; None to stay.
        set: Variables to set.
        unset: Variables to remove.
        directory: The working directory; None to stay.
        path: The module path; None to keep it.
        cap: Whether frameworks are capped when they are imported.
        processors: The processors to run on; empty for all.
        sandbox: The device nodes that the process may not open; None for no confinement.
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
        """Take all steps on this process, the mark first and the sandbox last; steps before an error stay.

        The processors are set for this thread and its later children; a refusal by the kernel is ignored.

        Raises:
            EnforcementError: If the process cannot be confined, as with several threads.
            OSError, ValueError: If the kernel refuses the mark, the cgroup or the directory.
        """
        marks.put(self.mark)  # first: whatever happens later, the lease knows of this process
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
        bind_thread(self.processors)
        if self.sandbox is not None:
            self.sandbox.apply()

    def start(self, begin: Callable[[], T], undo: Callable[[T], object]) -> T:
        """Start a process by a function, in a thread from which the process inherits processors and sandbox.

        The other steps are not taken. Without a sandbox, the function runs in this thread, whose processors are
        restored afterwards. A sandbox cannot be taken off again: with one, the function runs in a thread of its own,
        which then ends. Do not tie the life of the process to its parent by a parent-death signal in that case: the
        parent is that thread.

        Args:
            begin: Starts the process.
            undo: Ends the process that ``begin`` returned, if an interrupt keeps it from the caller.

        Returns:
            The result of ``begin``, whose exceptions pass through.

        Raises:
            EnforcementError: If the process cannot be confined.
        """

        def run() -> T:
            bind_thread(self.processors)
            return begin()

        if self.sandbox is not None:
            return self.sandbox.start(run, undo)
        before = os.sched_getaffinity(0) if self.processors else ()
        try:
            return run()
        finally:
            bind_thread(before)


def bind_thread(processors: Collection[int]) -> None:
    """Bind this thread, and later children of the thread, to processors; does nothing for an empty collection.

    An error is ignored: a processor may be offline by now, or outside the cgroup, and the start goes on without it.
    """
    if processors:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, processors)
