"""The caller's side of a fork server: start processes, end processes, and get the end of each exactly once.

The caller never forks, since it may have threads or an open device. This module is imported before the server starts,
so it imports little.
"""

from __future__ import annotations

import _socket
import atexit
import os
from _thread import RLock, allocate_lock
from itertools import count

from anyaccel.forkserver.start import PACKET_LIMIT, start_server
from anyaccel.linux import renew_in_child, tidy_in_child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from typing import Any, Protocol, TypeVar

    class ProcessOwner(Protocol):
        """The owner of a process of a fork server."""

        def ended(self, gone: Gone) -> object:
            """Handle the end of the process and the last descendant. No call follows."""

        def on_stuck(self, reason: str) -> object:
            """Handle a process of the family that ignores even SIGKILL."""

    Server = TypeVar("Server", bound="ForkServer")

DEFAULTS = {"preload": None, "argv": ["-c"], "grace": 0.0, "idle": None}
"""Default arguments of :func:`anyaccel.forkserver.server.main`."""
END_SECONDS = 1.0
"""How long to wait for the end of a server, which may still be starting."""


class Gone:
    """The end of a process of a fork server.

    Attributes:
        pid: Process id, or 0 when the process was never forked.
        status: Exit status, the negative number of a signal, or None when unknown.
        reason: Why the process is gone, unless it ended by itself.
        forked: Whether there was a process at all.
        carried: Whether processes of other users carry its mark. The process may have started these, so the mark keeps
            its devices.
    """

    def __init__(
        self, pid: int = 0, status: int | None = None, reason: str = "", *, forked: bool = True, carried: bool = False
    ) -> None:
        self.pid = pid
        self.status = status
        self.reason = reason
        self.forked = forked
        self.carried = carried


class ForkServer:
    """A fork server, which is a child of this process, with its processes by number.

    Any thread may call any method.

    Args:
        config: Arguments of :func:`anyaccel.forkserver.server.main` beside :data:`DEFAULTS`.
        env: Environment of the server; the environment of this process when None.
        apart: See :func:`~anyaccel.forkserver.start.start_server`.

    Attributes:
        pid: Process id of the server.
        alive: Whether the server takes orders, as far as known.
        children: Owners of processes that have not ended, by number.
        lock: Guards ``children``.
        hearing: Held by the thread that waits for messages.

    Raises:
        OSError: When the server cannot be started.
    """

    def __init__(self, config: Mapping[str, Any], *, env: Mapping[str, str] | None = None, apart: bool = False) -> None:
        self.alive = True
        self.lock = RLock()
        self.hearing = RLock()
        self._numbers = count(1)  # numbers in place of process ids, which are reused
        self.children: dict[int, Any] = {}
        self._status: int | None = None
        self.pid, control = start_server({**DEFAULTS, **config, "caller": os.getpid()}, env=env, apart=apart)
        self._control = _socket.socket(fileno=control)

    def fileno(self) -> int:
        """Return the descriptor that is readable when :meth:`hear` has a message."""
        return self._control.fileno()

    def spawn(
        self,
        child: ProcessOwner,
        target: str,
        descriptors: Sequence[int],
        *,
        argument: Any = None,
        alone: bool = False,
    ) -> int:
        """Have the server fork a process for a function, and return its number before the fork.

        If the server cannot fork, the owner's ``ended`` is called with the reason.

        Args:
            child: Owner, which is called at the end of the process.
            target: The function, as ``module:name``. Its arguments are the descriptors and ``argument``; the process
                ends when it returns.
            descriptors: Descriptors for the process.
            argument: JSON data.
            alone: Whether the process gets a parent of its own, to which it may send signals.

        Raises:
            BrokenPipeError: When the server has died.
            OSError: When there is no descriptor or no memory left.
        """
        number = next(self._numbers)
        with self.lock:
            if not self.alive:
                raise BrokenPipeError("the fork server has died")
            self.children[number] = child
        self.send_or_drop(
            number, {"spawn": number, "target": target, "argument": argument, "alone": alone}, descriptors
        )
        return number

    def send_or_drop(self, number: int, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message for a process; upon failure, drop the process without a call of the owner.

        Args:
            number: Number of the process.
            message: The message, JSON data.
            descriptors: Descriptors that the message carries; the caller keeps its own.

        Raises:
            OSError: When the message cannot be sent, unless the process was dropped before.
        """
        try:
            self._send(message, descriptors)
        except OSError:
            with self.lock:
                child = self.children.pop(number, None)
            if child is not None:
                raise

    def stop(self, number: int, grace: float, *, by: int = 0) -> None:
        """Have a process and the descendants ended, and return before; the owner is called at the end.

        Does nothing if the process, or the server, has gone.

        Args:
            number: The process.
            grace: Seconds until SIGKILL.
            by: Signal that asks the process to end; 0 when the process ends by itself.
        """
        try:
            self._send({"stop": number, "grace": grace, "by": by})
        except OSError:  # the server has ended, and its processes with it
            return

    def hear(self) -> bool:
        """Receive one message, if any, and call the owner of the process; does not wait.

        A process that was dropped gets no call.

        Returns:
            False once the server has gone; True otherwise, also without a message.
        """
        import json

        try:
            data = self._control.recv(PACKET_LIMIT, _socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            self.alive = False
            return False
        message = json.loads(data)
        number, reason, stuck = message["number"], message["reason"], message["kind"] == "stuck"
        with self.lock:
            child = self.children.get(number) if stuck else self.children.pop(number, None)
        if child is None:  # a process that send_or_drop() has dropped
            return True
        if stuck:
            child.on_stuck(reason)
        else:
            child.ended(Gone(message["pid"], message["status"], reason, forked=message["pid"] != 0))
        return True

    def take_children(self) -> list[Any]:
        """Remove and return the owners of the remaining processes, and call the server dead: no message follows."""
        with self.lock:
            self.alive = False
            children, self.children = list(self.children.values()), {}
        return children

    def close(self, seconds: float = END_SECONDS) -> bool:
        """Close the connection, upon which the server ends the processes and exits; no owner is called.

        Args:
            seconds: Longest wait for the end of the server; 0 not to wait.

        Returns:
            Whether the server ended in time; True without a wait.
        """
        self.alive = False
        try:  # noqa: SIM105 - contextlib takes long to import
            self._control.shutdown(_socket.SHUT_RDWR)
        except OSError:
            pass
        self._control.close()
        return not seconds or self.wait(seconds) is not None

    def abandon(self) -> None:
        """Close this process's copy of the connection, in a fork of the owner of the server; the server goes on."""
        self.lock = RLock()
        self.hearing = RLock()
        self.alive = False
        self._control.close()

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until the server has ended, without a limit when None.

        Returns:
            Exit status, negative for the number of a signal; None when the server has not ended; 0 when other code of
            the program has reaped the server.
        """
        if self._status is None:
            try:
                from anyaccel.linux.process import wait_for_end  # late: most servers outlive their callers

                if seconds is not None and not wait_for_end([self.pid], seconds):
                    return None
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except (ChildProcessError, ProcessLookupError):
                self._status = 0
        return self._status

    def kill(self) -> None:
        """Send SIGKILL to the server unless it has ended; the kernel then kills the processes. Does not wait."""
        if self.wait(0) is None:
            import signal

            os.kill(self.pid, signal.SIGKILL)

    def _send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message, with descriptors; waits if the socket is full.

        Raises:
            OSError: When the server has gone, the connection is closed, or the message is too long.
        """
        import json
        from array import array

        passed = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        self._control.sendmsg([json.dumps(message).encode()], passed)


_servers: dict[Hashable, ForkServer] = {}
_lock = renew_in_child(allocate_lock())


def find_server(key: Hashable, make: Callable[[], Server]) -> Server:
    """Return this process's live fork server of a kind; make one, kept for later calls, if there is none.

    A server that has died is replaced.

    Args:
        key: The kind.
        make: Starts a server; its exceptions pass through.
    """
    with _lock:
        found: Any = _servers.get(key)
        if found is None or not found.alive:
            found = _servers[key] = make()
        server: Server = found
        return server


def close_all(kind: type[ForkServer] | None = None, seconds: float = END_SECONDS) -> None:
    """Forget and end the fork servers of this process, with the forked processes, one after the other.

    Args:
        kind: Class of the servers to end; all when None.
        seconds: How long to wait for each server; 0 not to wait, which a later call may do.
    """
    with _lock:
        ended = {key: server for key, server in _servers.items() if kind is None or type(server) is kind}
        for key in ended if seconds else ():
            del _servers[key]
    for server in ended.values():
        server.close(seconds)


@atexit.register  # runs after the exit functions of later imports, which may need processes of the servers
def _end() -> None:
    """End all fork servers when this process exits."""
    close_all(ForkServer, seconds=0.0)  # processes of vendors hold no lease, so no caller waits for their end
    close_all()


@tidy_in_child
def _abandon_all() -> None:
    """Forget the parent's fork servers in a forked child, and close the connections."""
    while _servers:
        _servers.popitem()[1].abandon()
