"""A worker and everything that descends from it, as its nursery sees them."""

from __future__ import annotations

import contextlib

from anyaccel.workers import tree


class Family:
    """A worker and everything that descends from it.

    Attributes:
        number: Number of the worker.
        pid: Its process id.
        grace: Seconds that what it leaves behind has between being asked to end and being killed.
        leases: Descriptors that are kept until all have gone.
        status: Exit status of the worker once it has ended, or the negative number of a signal.
        orphans: What it left behind, as far as these are children of the nursery.
        deadline: Time of ``time.monotonic()`` at which all are killed; None as long as nothing ends them.
        killing_since: Time since which that is tried.
        told_stuck: Whether the caller knows that it does not help.
    """

    __slots__ = ("deadline", "grace", "killing_since", "leases", "number", "orphans", "pid", "status", "told_stuck")

    def __init__(self, number: int, pid: int) -> None:
        self.number = number
        self.pid = pid
        self.grace = 0.0
        self.leases: list[int] = []
        self.status: int | None = None
        self.orphans: set[int] = set()
        self.deadline: float | None = None
        self.killing_since: float | None = None
        self.told_stuck = False

    def members(self, nursery: int) -> list[tuple[int, int]]:
        """All its processes, each with its parent."""
        roots = [*([self.pid] if self.status is None else []), *self.orphans]
        return [member for root in roots for member in ((root, nursery), *tree.descendants(root))]


def stuck(members: list[tuple[int, int]], seconds: float) -> str:
    """Say which processes ignore SIGKILL, and where they are."""
    shown = []
    for pid, _ in members:
        fields = tree.status_fields(pid)
        if fields:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
                shown.append(f"process {pid} (state {fields[0]}, in {file.read() or 'the kernel'})")
    return f"{', '.join(shown)} did not end {seconds:g} s after SIGKILL"
