"""Worker processes of the fork server: fork them, also ahead of need, and report their end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import sys
import termios
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from anyaccel.errors import WorkerStartError
from anyaccel.forkserver import client
from anyaccel.forkserver.client import Gone
from anyaccel.linux import Mark, Teardown, describe_end, describe_left, find_carriers
from anyaccel.linux import mark as marks
from anyaccel.pool.messages import Message, MessageKind, Pickled, receive, send
from anyaccel.pool.reactor import find_reactor

if TYPE_CHECKING:
    from typing import Protocol

    from anyaccel.forkserver.client import ProcessOwner

    class WorkerOwner(ProcessOwner, Protocol):
        """The owner of a worker: the dispatcher's class of workers.

        Attributes:
            mark: The mark of the process and of everything that it starts; empty before it was sent.
        """

        mark: Mark

        def read(self) -> None:
            """Handle messages that have arrived, or the end of the channel."""


TARGET = "anyaccel.pool.worker:serve"
OWN = ("cloudpickle", "anyaccel.pool.worker")
"""Modules that every worker needs, imported once by the fork server."""
LAST_GRACE = 0.5
"""Seconds between SIGTERM and SIGKILL when the caller has died."""
STUCK_SECONDS = 60.0
"""Seconds after SIGKILL after which a process counts as stuck in the kernel."""
STUCK_LOOK_SECONDS = 5.0
"""Interval in seconds between two attempts to end stuck processes of a dead fork server."""
_GONE = {errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.ENOTCONN}
"""Errors of a send to a process that has exited. EBADF: our end was closed when that was noticed."""
BUFFER = 1 << 18
"""Size of a channel's buffer in bytes: all pipelined calls of an actor fit into it."""
ROOM_SECONDS = 0.05
"""Interval in seconds between two attempts to send to a process that does not read its messages."""


class Process:
    """A process of a fork server, and the channel to it. Receives its own events while it is a spare.

    Args:
        server: The fork server.
        ahead: Whether the process is forked ahead of need.

    Attributes:
        server: The fork server.
        number: Number of the process at the fork server.
        channel: Our end of the channel.
        unread: Whether the process is known to have exited before it had read all messages.
        mark: The mark of a spare, which has had no setup: none.

    Raises:
        BrokenPipeError, ConnectionResetError: When the fork server has died.
        OSError: When there are no descriptors left.
    """

    mark: Mark = ()

    def __init__(self, server: WorkerServer, *, ahead: bool) -> None:
        self.server = server
        self._open = True
        self.unread = False
        self.channel, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        # The kernel's own number: it doubles ours, and cuts it to net.core.wmem_max.
        self._most_unread = self.channel.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
        self._retrying = False
        with end:
            try:
                self.number = server.spawn(self, TARGET, (end.fileno(),), argument=ahead)
            except OSError:
                self.close()
                raise

    def send(
        self, kind: MessageKind, body: Pickled | bytes = b"", descriptors: Sequence[int] = (), *, number: int = 0
    ) -> bool:
        """Send a message to the process, and wait while the channel is full; return False if the channel is closed.

        Closed also means shut by :meth:`shut`, or by the exit of the process. True does not say that the process reads.

        Raises:
            OSError: When no memory or descriptor is left for the message.
        """
        try:
            send(self.channel, kind, body, descriptors, number=number)
        except OSError as error:
            if error.errno in _GONE:
                return False
            raise
        return True

    def has_room(self, retry: Callable[[], object]) -> bool:
        """Return whether a message can be sent without waiting for the process, which may be stopped, to read others.

        Args:
            retry: Called once after :data:`ROOM_SECONDS` if there is no room now.
        """
        unread = array("i", (0,))
        fcntl.ioctl(self.channel, termios.TIOCOUTQ, unread)
        if unread[0] <= self._most_unread:
            return True
        if not self._retrying:
            self._retrying = True

            def try_again() -> None:
                self._retrying = False
                retry()

            find_reactor().call_later(ROOM_SECONDS, try_again)
        return False

    def receive(self, *, last: bool) -> Message | None:
        """Receive a message without waiting; at the end of the channel, stop watching the channel.

        Args:
            last: Whether the process has exited, so that an empty channel is at its end.

        Returns:
            The message; None if none has arrived, or the channel is at its end.

        Raises:
            ValueError, OSError: When the message cannot be read or passes descriptors along; the channel is at its end
                then.
        """
        if not self._open:
            return None
        self._open = False
        try:
            try:
                message = receive(self.channel, wait=False, passes=False)
            except ConnectionResetError:  # reported once after an exit with unread messages; its own come after
                self.unread = True
                message = receive(self.channel, wait=False, passes=False)
            self._open = message is not None
        except BlockingIOError:
            message, self._open = None, not last
        finally:
            if not self._open:
                find_reactor().unwatch(self.channel.fileno())
        return message

    def stop(self, grace: float) -> None:
        """Have the fork server end the process and its descendants, and return at once.

        No effect if the fork server is dead.

        Args:
            grace: Seconds between SIGTERM and SIGKILL.
        """
        self.server.stop(self.number, grace, by=signal.SIGTERM)

    def shut(self, directions: int) -> None:
        """Shut down our end of the channel: ``socket.SHUT_RD``, ``SHUT_WR`` or ``SHUT_RDWR``; errors are ignored."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(directions)

    def close(self) -> None:
        """Close our end of the channel, which the reactor must not watch any more."""
        self.channel.close()

    def ended(self, gone: Gone) -> None:  # noqa: ARG002
        """Close the channel of a spare that has ended, which has no other consequences."""
        self.close()

    def on_stuck(self, reason: str) -> None:
        """Do nothing: a spare has no devices."""


class WorkerServer(client.ForkServer):
    """A fork server of workers. All methods but :meth:`close` are for the thread of the reactor.

    Args:
        preload: Modules that it imports once for all its workers.

    Attributes:
        environ: The environment that it was started with; its workers have a copy until their setup.
        path: The module path of this process at the start; its workers have a copy until their setup.

    Raises:
        WorkerStartError: When it cannot be started.
    """

    def __init__(self, preload: tuple[str, ...]) -> None:
        self.environ = dict(os.environ)
        self.path = list(sys.path)
        self._spare: Process | None = None
        self._reactor = find_reactor()
        config = {
            "own": OWN,
            "preload": preload,
            "argv": [str.__str__(str(word)) for word in sys.argv],
            "grace": LAST_GRACE,
            "stuck": STUCK_SECONDS,
        }
        try:
            super().__init__(config, env=self.environ)
        except OSError as error:
            raise WorkerStartError(f"the fork server cannot be started: {error}") from error
        self._reactor.watch(self.fileno(), self._on_control)

    def start_worker(self, owner: WorkerOwner, *, grace: float, leases: Sequence[int], ahead: bool) -> Process:
        """Fork a worker, or take the spare; have the fork server keep the leases, and watch the channel.

        Args:
            owner: The receiver of its events from now on, which closes the channel at the end; ``owner.read`` is called
                whenever the channel is readable.
            grace: Seconds between SIGTERM and SIGKILL for processes that it leaves behind.
            leases: Descriptors that are kept until it and everything that it started have exited.
            ahead: Whether the worker that was forked ahead may be taken; no other is forked in its place.

        Raises:
            BrokenPipeError, ConnectionResetError: When the fork server has died.
            OSError: When there are no descriptors left. A forked process exits after any of these errors.
        """
        process = (self._take_spare() if ahead else None) or Process(self, ahead=False)
        try:
            self.send_or_drop(process.number, {"hold": process.number, "grace": grace}, leases)
        except OSError:
            process.close()
            raise
        with self.lock:
            self.children[process.number] = owner
        self._reactor.watch(process.channel.fileno(), owner.read)
        return process

    def fork_ahead(self) -> None:
        """Fork a spare worker ahead of need, unless there is a spare: forking is most of the start-up time.

        A spare that has exited is replaced. No effect with a dead fork server, or without descriptors left.
        """
        self._spare = self._take_spare()
        if self._spare is None and self.alive:
            with contextlib.suppress(OSError):
                self._spare = Process(self, ahead=True)

    def close(self, seconds: float = client.END_SECONDS) -> bool:
        """End the fork server and the workers, and report their end to the owners, also if not all have ended.

        Args:
            seconds: How long to wait; then the fork server is killed. 0 does not wait, kill, or return False.

        Returns:
            Whether the fork server ended in time; it does not while a process is stuck in the kernel.
        """
        self._reactor.unwatch(self.fileno())
        ended = super().close(seconds)
        if not ended:
            self.kill()
        for child in self.take_children():
            child.ended(Gone(reason="its fork server was closed"))
        return ended

    def _take_spare(self) -> Process | None:
        """Remove and return the spare; None if there is none, or the spare has exited."""
        spare, self._spare = self._spare, None
        return spare if spare is not None and self.children.get(spare.number) is spare else None

    def _on_control(self) -> None:
        """Handle a message of the fork server: call the owner of the worker that has ended or is stuck.

        After the death of the server, wait for its exit, and kill the processes of all its workers. The owners are told
        once the kill is over, perhaps after the return. No other server is started here.
        """
        if not self.hear():
            self._on_death()

    def _on_death(self) -> None:
        """Wait for the exit of the fork server, close the connection, and begin to kill the processes of its workers.

        The end of the workers is reported once the kill is over: before the return if no process is left, else later.
        """
        self._reactor.unwatch(self.fileno())
        children = self.take_children()
        code = self.wait()
        self._control.close()
        self._end(children, Gone(reason=f"its fork server {describe_end(code)}"))

    def _end(self, children: list[WorkerOwner], gone: Gone) -> None:
        """Kill the processes with the marks of some workers; :meth:`_continue` reports each worker as gone or stuck.

        The first scan is done before the return: if no process is left to kill, the owners are told before the return,
        too, else later by a timer of the reactor. A worker without a mark is reported like the others.
        """
        rest = Teardown(find_carriers(child.mark for child in children), grace=0)
        self._continue(rest, children, gone)

    def _continue(self, rest: Teardown, children: list[WorkerOwner], gone: Gone) -> None:
        """Do a step of the teardown, and schedule the next; after the last, call ``on_stuck`` or ``ended`` of workers.

        A worker is stuck if a process of this user still carries its mark; the teardown begins anew for these after
        :data:`STUCK_LOOK_SECONDS`.

        Args:
            rest: The teardown.
            children: The workers.
            gone: The end that ``ended`` gets, which also says whether processes of other users carry the mark.
        """
        pause = rest.step()
        if pause is not None:
            self._reactor.call_later(pause, partial(self._continue, rest, children, gone))
            return
        stuck = [child for child in children if any(marks.carries(pid, child.mark) for pid in rest.own)]
        for child in children:
            if child in stuck:
                child.on_stuck("; ".join(describe_left(rest, "a worker")))
            else:
                carried = any(marks.carries(pid, child.mark) for pid in rest.others)
                child.ended(Gone(reason=gone.reason, carried=carried))
        if stuck:
            self._reactor.call_later(STUCK_LOOK_SECONDS, partial(self._end, stuck, gone))


def fork_server(preload: Sequence[str] = ()) -> WorkerServer:
    """Return the living fork server that has preloaded exactly these modules, or start a new server.

    With another module path, such a module may be another one. Servers with other modules are left running.

    Raises:
        WorkerStartError: When it cannot be started.
    """
    modules = tuple(preload)
    path = tuple(map(str, sys.path)) if modules else ()
    return client.find_server((WorkerServer, modules, path), lambda: WorkerServer(modules))


def spawn(owner: WorkerOwner, preload: Sequence[str], *, grace: float, leases: Sequence[int], ahead: bool) -> Process:
    """Fork a worker, or take the spare if ``ahead`` and there is one; replace a fork server that has died.

    See :meth:`WorkerServer.start_worker` for the arguments; ``preload`` names the modules of the fork server. If the
    new server dies as well, no third is started.

    Raises:
        WorkerStartError: When no fork server can be started or reached, or no descriptors are left.
    """
    for _ in range(2):
        found = fork_server(preload)
        try:
            return found.start_worker(owner, grace=grace, leases=leases, ahead=ahead)
        except (BrokenPipeError, ConnectionResetError):
            found.alive = False
        except OSError as error:
            raise WorkerStartError(f"no worker can be started: {error.strerror}") from error
    raise WorkerStartError("no worker can be started: the fork server dies as soon as it has been started")


@contextlib.contextmanager
def open_outputs(log: str | None = None) -> Iterator[tuple[int, int]]:
    """Open descriptors for a worker's standard output and error, as a context: a log file, or those of this process.

    The log file is made if needed, and appended to. An output that this process has closed becomes ``/dev/null``.
    Opened descriptors are closed when the context ends.

    Raises:
        OSError: When the file cannot be opened.
    """
    made = os.O_CREAT | os.O_APPEND if log else 0
    # A program may have closed its own output, as daemons do: then the worker's is discarded.
    opened = os.open(log or os.devnull, os.O_WRONLY | os.O_CLOEXEC | made, 0o666)
    try:
        yield (opened, opened) if log else (1 if _is_open(1) else opened, 2 if _is_open(2) else opened)
    finally:
        os.close(opened)


def _is_open(descriptor: int) -> bool:
    """Return whether this process has a descriptor of this number."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
