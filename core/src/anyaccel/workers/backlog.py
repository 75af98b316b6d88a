"""The calls of a pool that wait, each behind those that came before it.

Calls that need no device wait for a processor, in one line. Calls that need devices wait for them in lines of those
that may share a process. In a line of which the workers are used again, only the first has a place in the queue for
devices as long as nobody else wants any; the others inherit it. When somebody else comes, everybody gets a place.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyaccel.workers.leases import Claim, Held
    from anyaccel.workers.tasks import Task


class Place:
    """A place in the queue for devices, for the call that has it now.

    Attributes:
        task: The call; None when nobody wants the place any more.
        claim: The claim; None as long as it is being made.
    """

    __slots__ = ("claim", "task")

    def __init__(self, task: Task) -> None:
        self.task: Task | None = task
        self.claim: Claim | None = None

    @property
    def alone(self) -> bool:
        """Whether nobody else waits for one of the same devices."""
        return self.claim is not None and self.claim.alone()


class Backlog:
    """Calls that wait. Whoever uses it holds the pool's lock.

    Attributes:
        cpu: Calls that wait for a processor.
        gate: Calls that need devices and may not ask for them yet, since the number of processes is limited.
        placed: Calls that have their devices and wait for a process.
    """

    def __init__(self) -> None:
        self.cpu: deque[Task] = deque()
        self.gate: deque[Task] = deque()
        self.placed: deque[tuple[Task, Held]] = deque()
        self._lines: dict[object, OrderedDict[Task, None]] = {}

    def __bool__(self) -> bool:
        return bool(self.cpu or self.gate or self.placed or self._lines)

    def __iter__(self) -> Iterator[Task]:
        yield from self.cpu
        yield from self.gate
        yield from (task for task, _ in self.placed)
        for line in self._lines.values():
            yield from line

    def add(self, task: Task) -> Place | None:
        """Let a call wait for devices; returns a place for which a claim is to be made, if it has one of its own."""
        line = self._lines.setdefault(task.options.reuse, OrderedDict())
        first = next(iter(line), None) if task.options.reuse is not None else None
        heir = first is not None and first.place is not None and first.place.alone
        line[task] = None
        return None if heir else self._give_place(task)

    def put_back(self, tasks: list[Task]) -> list[Place]:
        """Let calls of one kind wait again, in front of their like, in whose places they stand.

        Returns:
            Places for which claims are to be made.
        """
        line = self._lines.setdefault(tasks[0].options.reuse, OrderedDict())
        waiting = list(line)
        places = [task.place for task in waiting if task.place is not None]
        line.clear()
        for task in (*tasks, *waiting):
            line[task] = None
            task.place = None
        for task, place in zip(line, places, strict=False):
            task.place, place.task = place, task
        without = list(line)[len(places) :]
        if tasks[0].options.reuse is not None and (not places or places[0].alone):
            without = [] if places else without[:1]  # the others inherit it
        return [self._give_place(task) for task in without]

    def first(self, reuse: object) -> Task | None:
        """The first that waits for devices among calls that may share a process."""
        return next(iter(self._lines.get(reuse, ())), None)

    def claiming(self, reuse: object) -> bool:
        """Whether a claim is being made for the first of them."""
        first = self.first(reuse)
        return first is not None and first.place is not None and first.place.claim is None

    def remove(self, task: Task) -> Place | None:
        """Let a call wait no more; returns a place that is to be given up."""
        if not self._leave(task):
            return None
        place, task.place = task.place, None
        heir = self.first(task.options.reuse)
        if place is not None and heir is not None and heir.place is None:
            place.task, heir.place = heir, place
            return None
        if place is not None:
            place.task = None
        return place

    def grant(self, place: Place, held: Held) -> tuple[bool, Place | None]:
        """Give a place's call its devices.

        Returns:
            Whether there was such a call, and a place for which a claim is to be made.
        """
        task, place.task = place.task, None
        if task is None:
            return False, None
        self._leave(task)
        task.place = None
        self.placed.append((task, held))
        heir = self.first(task.options.reuse)
        return True, self._give_place(heir) if heir is not None and heir.place is None else None

    def line_up(self) -> list[Place]:
        """Give everybody a place: those for which claims are to be made, in the order of arrival."""
        without = [task for line in self._lines.values() for task in line if task.place is None]
        return [self._give_place(task) for task in sorted(without, key=lambda task: task.number)]

    @property
    def admitted(self) -> int:
        """Calls that wait for devices or have them, and will need a process each."""
        return len(self.placed) + sum(map(len, self._lines.values()))

    @property
    def waits_for_room(self) -> bool:
        """Whether a call waits for others to end, not for devices."""
        return self.next_cpu() is not None or self.next_gated() is not None

    def next_cpu(self) -> Task | None:
        """The first that waits for a processor; it stays."""
        return _first(self.cpu)

    def next_gated(self) -> Task | None:
        """The first that waits to ask for devices; it stays."""
        return _first(self.gate)

    def _leave(self, task: Task) -> bool:
        line = self._lines.get(task.options.reuse)
        if line is None or task not in line:
            return False
        del line[task]
        if not line:
            del self._lines[task.options.reuse]
        return True

    @staticmethod
    def _give_place(task: Task) -> Place:
        task.place = Place(task)
        return task.place


def _first(line: deque[Task]) -> Task | None:
    while line and line[0].future.done():  # cancelled
        line.popleft()
    return line[0] if line else None
