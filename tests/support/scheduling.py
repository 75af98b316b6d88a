"""Tests are given to the workers of pytest-xdist one by one, at a cost that does not grow with those that have run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdist.scheduler import LoadGroupScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController


class Scheduling(LoadGroupScheduling):
    """``--dist loadgroup``, which forgets the tests that have run.

    xdist counts after each test what each earlier one has left: thousands of tests cost seconds of a processor.
    """

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """Note that a test has run, and give its worker another one."""
        super().mark_test_complete(node, item_index, duration)
        work = self.assigned_work[node]
        for scope in [scope for scope, tests in work.items() if all(tests.values())]:
            del work[scope]
