"""Messages between a pool and its hosts on the nodes."""

from __future__ import annotations

from typing import NamedTuple

from anyaccel.errors import RemoteError
from anyaccel.model import Allocation, Request, Value
from anyaccel.pool.engine import PoolSettings
from anyaccel.pool.messages import Message, dumps_whole, loads

FAILED = 0
"""Kind of an answer that no worker gave: the host could not run the call to its end. The data is the error."""


class PoolSpec(Value):
    """What the hosts of a pool must know.

    Attributes:
        pool: Name of the pool, unique on the cluster.
        path: Module path of the pool's process.
        settings: Settings of the workers on each node.
    """

    pool: str
    path: tuple[str, ...]
    settings: PoolSettings


class Order(Value):
    """How a call or an actor is to be run. Compared by identity: hosts unpickle each order once.

    Attributes:
        name: Name of the call in messages.
        request: The request, or None for the CPU alone.
        resources: For each term of the request, the resource of the cluster; empty where the node chooses the devices.
        max_calls: Calls after which a process is replaced; 0 for never.
        timeout: Seconds that the call may run, or None.
        concurrency: Number of methods of an actor that may run at the same time.
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
    """The notice of a running call.

    Attributes:
        node: Name of its node.
        allocation: The devices that it holds; None if not known yet.
    """

    node: str
    allocation: Allocation | None


class Answer(NamedTuple):
    """The answer to a call.

    Attributes:
        kind: Kind of the worker's message, or :data:`FAILED`.
        data: The pickled value or error.
        buffers: Memory that the pickle refers to.
        started: Where the call ran, if it did.
    """

    kind: int
    data: bytes
    buffers: tuple[bytearray, ...] = ()
    started: Started | None = None

    def message(self, number: int = 0) -> Message:
        """Return the worker's message, with the number of the call in this process."""
        return Message(self.kind, self.data, [memoryview(each) for each in self.buffers], [], number)


def make_failure(error: BaseException) -> Answer:
    """Make the answer of a call after a failure of the host: of the kind :data:`FAILED`, with the pickled error.

    An error that cannot be pickled or unpickled becomes a :class:`RemoteError` with its text.
    """
    try:
        data = dumps_whole(error)
        loads(data)
    except Exception:  # noqa: BLE001 - an error whose class cannot be unpickled travels as text
        data = dumps_whole(RemoteError(f"{type(error).__name__}: {error}"))
    return Answer(FAILED, data)
