"""Calls that run together, one on each of several machines, and the future of all their results."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from anyaccel.errors import UsageError
from anyaccel.pool.call import AwaitableFuture, Call, CallFuture
from anyaccel.pool.messages import loads

T = TypeVar("T")


class GangFuture(AwaitableFuture[list[T]]):
    """The future of the results of all calls of a gang, by rank.

    Its exception is that of the first call that failed; the others are ended then. It can be cancelled while they run,
    too, and is cancelled when a call is.

    Attributes:
        members: The futures of the calls, by rank; each has its devices and its log.
    """

    def __init__(self, members: Sequence[CallFuture[T]]) -> None:
        super().__init__()
        self.members = tuple(members)
        self._left = len(members)
        self._decided = False
        self._step = threading.Lock()
        for rank, member in enumerate(members):
            member.add_done_callback(lambda done, rank=rank: self._on_done(done, rank))  # type: ignore[misc]

    def cancel(self) -> bool:
        """Cancel every call, waiting or running, unless the gang is over; return whether it is or was cancelled.

        In a forked child only this copy of the future is cancelled; the calls go on.
        """
        if not self._decide():
            return self.cancelled()
        self._end_others()  # before waiters wake and perhaps start the next gang
        super().cancel()
        self.set_running_or_notify_cancel()
        return True

    def running(self) -> bool:
        """Return whether a worker runs one of the calls."""
        return any(member.running() for member in self.members)

    def _on_done(self, member: Future[Any], rank: int) -> None:
        """Count a result; the last result sets the results. The first failure or cancellation ends the gang.

        The first exception gets a note with its rank; later failures are ignored. Runs in the thread that ends or
        cancels the call; of a call that has ended before, in the thread that makes the gang.
        """
        if member.cancelled():
            self.cancel()
        elif (error := member.exception()) is not None:
            if self._decide():
                error.add_note(f"It is rank {rank} of a gang of {len(self.members)}; the others were ended.")
                self._end_others()
                self.set_exception(error)
        else:
            with self._step:
                self._left -= 1
                last = self._left == 0
            if last and self._decide():
                self.set_result([each.result() for each in self.members])

    def _decide(self) -> bool:
        """Return True to the first caller alone, which sets the outcome: calls end in several threads."""
        with self._step:
            first, self._decided = not self._decided, True
        return first

    def _end_others(self) -> None:
        """Cancel every call, waiting or running; no effect on finished calls."""
        for member in self.members:
            member.cancel()


def make_ranked_call(
    rank: int, count: int, rendezvous: Mapping[str, str], work: bytes
) -> tuple[Any, tuple[Any, ...], Any]:
    """Make the call of a single member of a gang.

    Args:
        rank: Rank of the member, from 0.
        count: Number of members.
        rendezvous: Variables with the address where the members meet.
        work: A pickled function, with its arguments.

    Returns:
        The work of a call, for an engine's ``enter``: :func:`run_ranked`, the tuple of its arguments, and an empty dict
        of keyword arguments. None in place of the dict would mean a batch.
    """
    from anyaccel.launcher.rendezvous import make_rank_variables

    return run_ranked, ({**make_rank_variables(rank, count, local=(0, 1)), **rendezvous}, work), {}


def run_alone(call: Call, hosts: int, work: bytes, enter: Callable[[Call, tuple[Any, ...]], None]) -> GangFuture[Any]:
    """Queue a call as a gang of one, on this machine; return the future, whose end frees the meeting address.

    Args:
        call: The call.
        hosts: Number of machines that were asked for.
        work: The pickled function, with its arguments.
        enter: Queues the call with its function and arguments.

    Raises:
        UsageError: When ``hosts`` is more than 1.
        AnyaccelError: When no port is free for the meeting address.
        Exception: An exception of ``enter``; the address is freed.
    """
    from anyaccel.launcher.rendezvous import Rendezvous

    if hosts > 1:
        raise UsageError(
            f"hosts must be 1 with engine='local', which has this machine alone (got {hosts}); engine='ray' has those"
            " of a cluster"
        )
    rendezvous = Rendezvous()
    future: GangFuture[Any] = GangFuture([call.future])
    future.add_done_callback(lambda _: rendezvous.close())
    try:
        enter(call, make_ranked_call(0, 1, rendezvous.variables, work))
    except BaseException:
        rendezvous.close()
        raise
    return future


def run_ranked(variables: Mapping[str, str], work: bytes) -> Any:
    """Set the variables of a rank in the worker, then unpickle the function, call it, and return its result.

    In this order, because modules that the pickle imports may read the variables, which stay set.
    """
    os.environ.update(variables)
    function, args, kwargs = loads(work)
    return function(*args, **kwargs)
