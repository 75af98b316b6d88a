"""The caller's side of the nursery: start it, have workers forked, hear of their end."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Collection, Sequence
from functools import partial
from itertools import count

from anyaccel.errors import NurseryError
from anyaccel.interpreter import Interpreter, start
from anyaccel.ledger import mark as marks
from anyaccel.ledger.mark import Mark
from anyaccel.workers.ending import ending
from anyaccel.workers.handle import Gone, Owner, Worker
from anyaccel.workers.loop import loop
from anyaccel.workers.wire import GONE, HOLD, NUMBER, SPAWN, STOP, Kind, Message, receive, send

CLOSE_SECONDS = 5.0
SWEEP_SECONDS = 0.01
BUFFER = 1 << 18


class Nursery:
    """One nursery process and its workers, by number. Every method may be called by any thread.

    Args:
        preload: Modules that it imports for all its workers.

    Raises:
        NurseryError: When it cannot be started.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self.preload = tuple(preload)
        self.environ = dict(os.environ)
        self.path = list(sys.path)
        self.alive = True
        self.users = 0
        self._spare: Worker | None = None
        self._workers: dict[int, Worker] = {}
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._loop = loop()
        self._process = self._start()
        self._control = socket.socket(fileno=self._process.control)
        self._loop.watch(self._control.fileno(), self._on_control)

    @property
    def pid(self) -> int:
        """Process id of the nursery."""
        return self._process.pid

    def spawn(self, owner: Owner, *, grace: float, leases: Sequence[int] = ()) -> Worker:
        """Have a worker forked, or take the one that was forked ahead.

        Args:
            owner: Who wants to hear of it.
            grace: Seconds that what it leaves behind has between being asked to end and being killed.
            leases: Descriptors that are kept until it and whatever it started have gone.

        Raises:
            BrokenPipeError: When the nursery has died.
            OSError: When there are no descriptors left.
        """
        with self._lock:
            worker, self._spare = self._spare, None
            if worker is not None:
                worker.owner = owner
        worker = worker or self._fork(owner, ahead=False)
        self._tell(worker, Kind.HOLD, HOLD.pack(worker.number, grace), leases)
        return worker

    def fork_ahead(self) -> None:
        """Have one worker forked before it is needed: that is most of the time that a fresh one takes."""
        with self._lock:
            if self._spare is not None or not self.users or not self.alive:
                return
        with contextlib.suppress(OSError):
            spare = self._fork(_Spare(), ahead=True)
            with self._lock:
                # Another thread may have done the same, and the last user may have left.
                extra, self._spare = (self._spare, spare) if self.users else (spare, self._spare)
            if extra is not None:
                extra.finish()

    def use(self) -> None:
        """Say that a pool uses it."""
        with self._lock:
            self.users += 1

    def leave(self) -> None:
        """Say that a pool does not use it any more: without users, nothing is forked ahead."""
        with self._lock:
            self.users -= 1
            spare = self._spare if not self.users else None
            if spare is not None:
                self._spare = None
        if spare is not None:
            spare.finish()

    def _fork(self, owner: Owner, *, ahead: bool) -> Worker:
        channel, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        number = next(self._numbers)
        worker = Worker(number, owner, channel, end, self._loop, stop=partial(self._stop, number))
        with self._lock:
            alive = self.alive
            if alive:
                self._workers[number] = worker
        if not alive:
            worker.forget()
            raise BrokenPipeError("the nursery has died")
        worker.listen()
        self._tell(worker, Kind.SPAWN, SPAWN.pack(number, ahead), (end.fileno(),))
        return worker

    def _tell(self, worker: Worker, kind: Kind, body: bytes, descriptors: Sequence[int]) -> None:
        """Send something about a worker. If that fails, the worker is none of ours, and its owner hears nothing."""
        try:
            send(self._control, kind, body, descriptors)
        except OSError:
            with self._lock:
                mine = self._workers.pop(worker.number, None)
            if mine is not None:  # else the nursery's death was noticed meanwhile, and the owner is told of it
                worker.forget()
                raise

    def close(self) -> None:
        """End it and whatever is left of its workers."""
        self.alive = False
        self._loop.unwatch(self._control.fileno())
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        if self._process.wait(CLOSE_SECONDS) is None:
            self._process.kill()  # something of it is stuck in the kernel, and nobody can help that
        self._control.close()
        with self._lock:
            workers, self._workers, self._spare = self._workers, {}, None
        for worker in workers.values():
            worker.ended(Gone(reason="its nursery was closed"))

    def abandon(self) -> None:
        """Forget it: we are a fork of the process that it belongs to."""
        self.alive = False
        self._control.close()

    def _start(self) -> Interpreter:
        config = {"argv": [str.__str__(str(word)) for word in sys.argv], "caller": os.getpid(), "preload": self.preload}
        try:
            return start("anyaccel.workers.nursery", config, env=self.environ)
        except OSError as error:
            raise NurseryError(f"the nursery cannot be started: {error}") from error

    def _stop(self, number: int, grace: float) -> None:
        with contextlib.suppress(OSError):
            send(self._control, Kind.STOP, STOP.pack(number, grace))

    def _on_control(self) -> None:
        try:
            message = receive(self._control, wait=False)
            if message is not None:
                self._hear(message)
        except BlockingIOError:
            return
        except (OSError, ValueError, LookupError, struct.error):
            self._process.kill()  # it has lost its mind; what it guards ends with it, and its calls are told
            return
        if message is None:
            self._on_death()

    def _hear(self, message: Message) -> None:
        data = bytes(message.data)
        if message.kind == Kind.GONE:
            number, pid, status = GONE.unpack(data)
            gone = Gone(pid, status)
        else:
            (number,), reason = NUMBER.unpack_from(data), data[NUMBER.size :].decode()
            if message.kind == Kind.STUCK:
                worker = self._workers[number]
                worker.owner.on_stuck(worker, reason)
                return
            gone = Gone(reason=reason, forked=False)
        with self._lock:
            worker = self._workers.pop(number)
            if self._spare is worker:
                self._spare = None
        worker.ended(gone)

    def _on_death(self) -> None:
        """End what its workers started in its place, and tell the owners when that is done."""
        self._loop.unwatch(self._control.fileno())
        with self._lock:
            self.alive = False
            workers, self._workers, self._spare = self._workers, {}, None
        code = self._process.wait()
        reason = f"its nursery {ending(code)}"
        self._sweep(workers, Gone(reason=reason))

    def _sweep(self, workers: dict[int, Worker], gone: Gone) -> None:
        if _kill_carriers({worker.mark for worker in workers.values() if worker.mark}):
            self._loop.call_later(SWEEP_SECONDS, partial(self._sweep, workers, gone))
            return
        self._control.close()
        for worker in workers.values():
            worker.ended(gone)


def _kill_carriers(wanted: Collection[Mark]) -> bool:
    """Kill every process that carries one of some marks; False when there is none that can be killed."""
    found = marks.carriers(wanted)
    if found is None:
        return True
    killed = 0
    for mark, pids in found.items():
        for pid in pids:
            with contextlib.suppress(OSError):  # it has gone, or has become another user's
                pinned = os.pidfd_open(pid)
                try:
                    if marks.carries(pid, mark):
                        signal.pidfd_send_signal(pinned, signal.SIGKILL)
                        killed += 1
                finally:
                    os.close(pinned)
    return killed > 0


class _Spare:
    """Owner of a worker that nobody has use for yet. Nothing that becomes of it matters."""

    def on_message(self, _: Worker, message: Message) -> None:
        """Not before it was asked."""

    def on_gone(self, _: Worker, gone: Gone) -> None:
        """The next one will be forked when it is needed."""

    def on_stuck(self, _: Worker, reason: str) -> None:
        """It holds nothing."""

    def on_fault(self, _: Worker, reason: str) -> None:
        """It has run nothing yet."""


_nurseries: dict[tuple[str, ...], Nursery] = {}
_lock = threading.Lock()


def nursery(preload: Sequence[str] = ()) -> Nursery:
    """The nursery of this process that has preloaded exactly these modules; started when there is none.

    Raises:
        NurseryError: When it cannot be started.
    """
    key = tuple(preload)
    with _lock:
        found = _nurseries.get(key)
        if found is None or not found.alive:
            found = _nurseries[key] = Nursery(key)
        return found


def spawn(owner: Owner, preload: Sequence[str], *, grace: float, leases: Sequence[int] = ()) -> tuple[Nursery, Worker]:
    """Have a worker forked, by a new nursery where the last one has died.

    Raises:
        NurseryError: When no nursery can be started, or it cannot be reached.
    """
    for _ in range(2):
        found = nursery(preload)
        try:
            return found, found.spawn(owner, grace=grace, leases=leases)
        except (BrokenPipeError, ConnectionResetError):
            found.alive = False
        except OSError as error:
            raise NurseryError(f"no worker can be started: {error.strerror}") from error
    raise NurseryError("no worker can be started: the nursery dies as soon as it has been started")


@atexit.register
def _close_all() -> None:
    while _nurseries:
        _nurseries.popitem()[1].close()


def _abandon_all() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threading.Lock()
    while _nurseries:
        _nurseries.popitem()[1].abandon()


os.register_at_fork(after_in_child=_abandon_all)
