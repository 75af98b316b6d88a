"""The protocol as a model, in which every interleaving of some processes is tried, with death at every step.

The model is small enough to be read beside ``anyaccel/ledger/acquisition.py``, and each of its rules has a variant
without it, which must be found wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

CAPACITY = 2
"""Units of each device."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the protocol consists of; the product keeps all of it."""

    mutex: bool = True  # look again and publish with the directory locked
    lock_first: bool = True  # lock the file before it counts
    look_again: bool = True  # what was chosen without the lock is verified with it
    wait_for_exit: bool = True  # a lock that is free does not mean that its process has left
    inherit: bool = True  # what a holder starts carries the lock
    lease_goes_last: bool = False  # a killed process closes its devices before it drops the lock


@dataclass(frozen=True, slots=True)
class File:
    """A file of one process for one device."""

    device: str
    units: int
    published: bool = False
    locked: bool = False


@dataclass(frozen=True, slots=True)
class Process:
    """A process and what it has made. A stopped one is one whose turn does not come."""

    at: str = "idle"
    turns: int = 1
    files: tuple[File, ...] = ()
    over: frozenset[tuple[int, int, int]] = frozenset()
    child: bool = False
    uses: bool = False


State = tuple[tuple[Process, ...], int]
"""The processes, and who has the directory locked; -1 for none."""


class Model:
    """All that can happen to processes that want something each: units by device."""

    def __init__(self, wants: list[dict[str, int]], rules: Rules, turns: int = 1) -> None:
        self.wants, self.rules = wants, rules
        self.start: State = (tuple(Process(turns=turns) for _ in wants), -1)

    def explore(self) -> tuple[int, list[str]]:
        """Visit every state; the number of them, and the shortest way to a wrong one."""
        came: dict[State, tuple[State, str] | None] = {self.start: None}
        todo = deque([self.start])
        while todo:
            state = todo.popleft()
            nexts = list(self.steps(state))
            if self.wrong(state) or (not nexts and self.unfinished(state)):
                return len(came), self.way(came, state)
            for label, following in nexts:
                if following not in came:
                    came[following] = (state, label)
                    todo.append(following)
        return len(came), []

    def way(self, came: dict, state: State) -> list[str]:
        labels = []
        while (link := came[state]) is not None:
            state, label = link
            labels.append(label)
        return labels[::-1]

    def wrong(self, state: State) -> bool:
        """Whether a device is used beyond its capacity."""
        used: dict[str, int] = {}
        for process, want in zip(state[0], self.wants, strict=True):
            for device, units in want.items() if process.uses else ():
                used[device] = used.get(device, 0) + units
        return any(units > CAPACITY for units in used.values())

    def unfinished(self, state: State) -> bool:
        """In a state without a next one: whether a process is stuck, or something is lost for later ones."""
        processes, mutex = state
        stuck = any(process.at not in ("done", "gone") for process in processes)
        lost = any(self.counts(state, number, at) for number, at, _ in self.names(state))
        return stuck or lost or mutex != -1

    def names(self, state: State) -> Iterator[tuple[int, int, File]]:
        for number, process in enumerate(state[0]):
            for at, file in enumerate(process.files):
                if file.published:
                    yield number, at, file

    def counts(self, state: State, number: int, at: int) -> bool:
        """Whether a file is active for a process that tests its lock."""
        process = state[0][number]
        return process.files[at].locked or (self.rules.wait_for_exit and process.at != "gone")

    def fits(self, state: State, number: int, over: frozenset[tuple[int, int, int]]) -> bool:
        taken: dict[str, int] = {}
        for other, at, file in self.names(state):
            if (other, state[0][other].turns, at) not in over:
                taken[file.device] = taken.get(file.device, 0) + file.units
        return all(taken.get(device, 0) + units <= CAPACITY for device, units in self.wants[number].items())

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        for number, process in enumerate(state[0]):
            for label, following, mutex in self.step(state, number, process):
                processes = (*state[0][:number], following, *state[0][number + 1 :])
                yield f"{number} {label}", (processes, mutex)

    def step(self, state: State, number: int, me: Process) -> Iterator[tuple[str, Process, int]]:  # noqa: C901, PLR0912
        _, mutex = state
        rules = self.rules
        if me.at not in ("done", "gone", "dying"):
            uses = me.uses and (me.child or not rules.lease_goes_last)
            yield "dies", replace(me, at="dying", uses=uses), mutex
        match me.at:
            case "idle":
                over = frozenset(
                    (other, state[0][other].turns, at)
                    for other, at, _ in self.names(state)
                    if not self.counts(state, other, at)
                )
                if self.fits(state, number, over):
                    yield "looks and chooses", replace(me, at="make", over=over), mutex
            case "make":
                files = tuple(
                    File(device, units, published=not rules.lock_first) for device, units in self.wants[number].items()
                )
                yield "makes its files", replace(me, at="lock", files=files), mutex
            case "lock":
                files = tuple(replace(file, locked=True) for file in me.files)
                yield "locks them", replace(me, at="enter", files=files), mutex
            case "enter" if not rules.mutex:
                yield "does not lock the directory", replace(me, at="verify"), mutex
            case "enter" if mutex == -1:
                yield "locks the directory", replace(me, at="verify"), number
            case "verify":
                own = frozenset((number, me.turns, at) for at in range(len(me.files)))
                fits = not rules.look_again or self.fits(state, number, me.over | own)
                yield "looks again", replace(me, at="publish" if fits else "withdraw"), mutex
            case "publish":
                hidden = [at for at, file in enumerate(me.files) if not file.published]
                if hidden:
                    files = list(me.files)
                    files[hidden[0]] = replace(files[hidden[0]], published=True)
                    yield "publishes one", replace(me, files=tuple(files)), mutex
                else:
                    yield "unlocks the directory", replace(me, at="hold", uses=True), -1 if mutex == number else mutex
            case "withdraw":
                yield "withdraws", self.rest(me), -1 if mutex == number else mutex
            case "hold":
                yield "stops using", replace(me, at="release", uses=me.child), mutex
                if not me.child:
                    yield "starts a worker", replace(me, child=True), mutex
            case "release" if me.child:
                yield "ends its worker", replace(me, child=False, uses=False), mutex
            case "release":
                yield "removes its files and closes them", self.rest(me), mutex
            case "dying":
                yield from self.die(number, me, mutex)
        if me.at == "gone" and me.child:
            files = tuple(replace(file, locked=False) for file in me.files)
            yield "worker ends", replace(me, child=False, uses=False, files=files), mutex

    def die(self, number: int, me: Process, mutex: int) -> Iterator[tuple[str, Process, int]]:
        """What the kernel does to a killed process, in any order, before it is gone."""
        carried = me.child and self.rules.inherit
        if mutex == number:
            yield "drops the directory's lock", me, -1
        for at, file in enumerate(me.files):
            if file.locked and not carried:
                files = (*me.files[:at], replace(file, locked=False), *me.files[at + 1 :])
                yield "drops a lock", replace(me, files=files), mutex
        if mutex != number and (carried or not any(file.locked for file in me.files)):
            yield "is gone", replace(me, at="gone", uses=me.child), mutex

    def rest(self, me: Process) -> Process:
        turns = me.turns - 1
        return Process(at="idle" if turns else "done", turns=turns)


SCENES = {
    "three want all of one": ([{"a": 2}, {"a": 2}, {"a": 2}], 1),
    "three share one": ([{"a": 1}, {"a": 1}, {"a": 2}], 1),
    "two come twice": ([{"a": 2}, {"a": 2}], 2),
    "several devices at once": ([{"a": 2, "b": 2}, {"a": 2}, {"b": 1}], 1),
}


@pytest.mark.parametrize("scene", SCENES)
def test_no_interleaving_gives_a_device_twice_or_loses_it(scene):
    wants, turns = SCENES[scene]
    states, way = Model(wants, Rules(), turns).explore()
    assert way == []
    assert states > 1000


def test_containers_that_do_not_see_each_others_processes():
    """There the lock alone decides: a process must drop it last, and a file must be locked before it counts."""
    wants, turns = SCENES["two come twice"]
    blind = Rules(wait_for_exit=False, lease_goes_last=True)
    assert Model(wants, blind, turns).explore()[1] == []
    assert Model(wants, replace(blind, lock_first=False), turns).explore()[1]


@pytest.mark.parametrize("missing", ["mutex", "look_again", "wait_for_exit", "inherit"])
def test_each_rule_is_needed(missing):
    wants, turns = SCENES["two come twice"]
    _, way = Model(wants, Rules(**{missing: False}), turns).explore()
    assert way, f"the model does not need the rule {missing!r}"
