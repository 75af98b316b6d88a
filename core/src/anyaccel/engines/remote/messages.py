"""What a pool and its hosts on the nodes say to each other."""

from __future__ import annotations

from typing import NamedTuple

from anyaccel.errors import RemoteError
from anyaccel.model import Allocation, Request, Value
from anyaccel.pool.channel import Message
from anyaccel.pool.engine import PoolSettings
from anyaccel.pool.payload import dumps_whole, loads

FAILED = 0
"""MessageKind of an answer that no worker gave: the call was not run to its end, and why."""


class PoolSpec(Value):
    """What the calls of a pool have in common.

    Attributes:
        pool: Its name.
        path: Where its process finds modules.
        settings: What its workers on each node are to do.
    """

    pool: str
    path: tuple[str, ...]
    settings: PoolSettings


class Order(Value):
    """How one call, or an actor, is to be run; a key in itself, since hosts load each one once.

    Attributes:
        name: What to call it in messages.
        request: What it was to be given, or None for the CPU alone.
        resources: For each term of the request, the resource that the cluster was asked for; empty where the node
            chooses the devices.
        max_calls: Calls after which a process is replaced.
        timeout: Seconds that it may run, or None.
        concurrency: Methods of an actor that may run at the same time.
    """

    name: str
    request: Request | None
    resources: tuple[str, ...]
    max_calls: int
    timeout: float | None
    concurrency: int

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class Started(NamedTuple):
    """A call runs.

    Attributes:
        node: Name of its node.
        allocation: What it holds; None as long as that is not known.
    """

    node: str
    allocation: Allocation | None


class Answer(NamedTuple):
    """What became of a call: a message of a worker, or :data:`FAILED`; and a pickled notice of where it ran."""

    kind: int
    data: bytes
    buffers: tuple[bytearray, ...] = ()
    started: bytes | None = None

    def message(self, number: int = 0) -> Message:
        """It as the worker gave it to its host."""
        return Message(self.kind, self.data, [memoryview(each) for each in self.buffers], [], number)


def failure(error: BaseException) -> Answer:
    """The answer that a call was not run to its end."""
    try:
        data = dumps_whole(error)
        loads(data)
    except Exception:  # noqa: BLE001 - then its text travels
        data = dumps_whole(RemoteError(f"{type(error).__name__}: {error}"))
    return Answer(FAILED, data)
