"""The caller's side of a fork server: have processes forked, end them, hear once what became of each.

The caller never forks: it may have threads, or a device open. This module is imported before the server is started, so
it imports next to nothing.
"""

from __future__ import annotations

import _socket
import atexit
import os
from _thread import RLock, allocate_lock
from itertools import count

from anyaccel.forkserver.start import PACKET_LIMIT, start_server
from anyaccel.linux.fork import renew_in_child, tidy_in_child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from typing import Any, Protocol, TypeVar

    class ProcessOwner(Protocol):
        """What owns a process of a fork server."""

        def ended(self, gone: Gone) -> object:
            """Take notice that the process and everything that it started have left the kernel. Nothing follows."""

        def on_stuck(self, reason: str) -> object:
            """Take notice that something of it ignores even SIGKILL."""

    Server = TypeVar("Server", bound="ForkServer")
    Tidy = TypeVar("Tidy", bound=Callable[[], object])

DEFAULTS = {"preload": None, "argv": ["-c"], "grace": 0.0, "idle": None}
"""What a server is called with where nothing else is said; see :func:`anyaccel.forkserver.server.main`."""
END_SECONDS = 1.0
"""How long a server is waited for that is to end, and may still be starting."""


class Gone:
    """How a process of a fork server ended.

    Attributes:
        pid: Its process id, or 0 when it never had one.
        status: Its exit status, the negative number of a signal, or None when that is unknown.
        reason: Why there is no process any more, where its own end is not the reason.
        forked: Whether there was a process at all.
        carried: Whether processes of other users carry its mark, which it may have started: then its devices are left
            to the mark.
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
    """One fork server, which is a child of this process, and what it forks, by number.

    Every method may be called by any thread.

    Args:
        config: What :func:`anyaccel.forkserver.server.main` is called with, beside :data:`DEFAULTS`.
        env: Its environment; that of this process when None.
        apart: As of :func:`~anyaccel.forkserver.start.start_server`.

    Attributes:
        pid: Its process id.
        alive: Whether it takes orders, as far as is known.
        children: Owners of processes that have not ended, by number.
        lock: Held while that changes.
        hearing: Held by a thread that waits for messages.

    Raises:
        OSError: When it cannot be started.
    """

    def __init__(self, config: Mapping[str, Any], *, env: Mapping[str, str] | None = None, apart: bool = False) -> None:
        self.alive = True
        self.lock = RLock()
        self.hearing = RLock()
        self._numbers = count(1)
        self.children: dict[int, Any] = {}
        self._status: int | None = None
        self.pid, control = start_server({**DEFAULTS, **config, "caller": os.getpid()}, env=env, apart=apart)
        self._control = _socket.socket(fileno=control)

    def fileno(self) -> int:
        """Descriptor that can be read when :meth:`hear` has something to take."""
        return self._control.fileno()

    def draw(self) -> int:
        """Return the number of a process that is to be forked."""
        return next(self._numbers)

    def spawn(
        self,
        number: int,
        child: ProcessOwner,
        target: str,
        descriptors: Sequence[int],
        *,
        argument: Any = None,
        alone: bool = False,
    ) -> None:
        """Have a process forked that calls a function.

        Args:
            number: Its number.
            child: What hears of its end.
            target: The function, as ``module:name``. It is called with the descriptors and the argument, and the
                process ends with it.
            descriptors: Descriptors that it gets.
            argument: JSON data.
            alone: Whether it has a parent that is no other process's.

        Raises:
            BrokenPipeError: When the server has died.
            OSError: When there is no descriptor or no memory left.
        """
        with self.lock:
            if not self.alive:
                raise BrokenPipeError("the fork server has died")
            self.children[number] = child
        self.send_or_drop(
            number, {"spawn": number, "target": target, "argument": argument, "alone": alone}, descriptors
        )

    def send_or_drop(self, number: int, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send something that the process needs. If that fails, there is none, and its owner hears nothing.

        Raises:
            OSError: When it fails, unless the owner has heard of the server's death meanwhile.
        """
        try:
            self._send(message, descriptors)
        except OSError:
            with self.lock:
                child = self.children.pop(number, None)
            if child is not None:
                raise

    def stop(self, number: int, grace: float, *, by: int = 0) -> None:
        """End a process and everything that it started.

        Args:
            number: The process.
            grace: Seconds until it is killed.
            by: Signal that asks it to end before; 0 when it ends by itself.
        """
        try:
            self._send({"stop": number, "grace": grace, "by": by})
        except OSError:  # the server has ended, and all that it forked with it
            return

    def hear(self) -> bool:
        """Take one message, if there is one, and tell the owner of the process that it is about.

        Returns:
            False once the server has gone.
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
        try:
            message = json.loads(data)
            number, reason = int(message["number"]), str(message["reason"])
            gone = None if message["kind"] == "stuck" else Gone(message["pid"], message["status"], reason)
        except (ValueError, LookupError, TypeError):
            self.kill()  # what it guards ends with it, and the owners are told
            return True
        with self.lock:
            child = self.children.get(number) if gone is None else self.children.pop(number, None)
        if child is not None:
            if gone is None:
                child.on_stuck(reason)
            else:
                gone.forked = gone.pid != 0
                child.ended(gone)
        return True

    def take_children(self) -> list[Any]:
        """Return the owners that have not heard of an end, which the server tells no more."""
        with self.lock:
            self.alive = False
            children, self.children = list(self.children.values()), {}
        return children

    def close(self, seconds: float = END_SECONDS) -> bool:
        """End the server and every process that it forked; return whether it ends within some seconds."""
        self.alive = False
        try:  # noqa: SIM105 - contextlib takes long to import
            self._control.shutdown(_socket.SHUT_RDWR)
        except OSError:
            pass
        self._control.close()
        return not seconds or self.wait(seconds) is not None

    def abandon(self) -> None:
        """Leave it alone: this process is a fork of the one that it belongs to."""
        self.lock = RLock()
        self.hearing = RLock()
        self.alive = False
        self._control.close()

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until the server has ended, without a limit when None.

        Returns:
            Its exit status, negative for the number of a signal; None when it has not ended. It is 0 where something
            else has taken it.
        """
        if self._status is None:
            try:
                if seconds is not None and not self._ends_within(seconds):
                    return None
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except (ChildProcessError, ProcessLookupError):
                self._status = 0
        return self._status

    def kill(self) -> None:
        """Kill the server."""
        if self.wait(0) is None:
            import signal

            os.kill(self.pid, signal.SIGKILL)

    def _ends_within(self, seconds: float) -> bool:
        from anyaccel.linux.process import wait_for_end  # late: most servers outlive their callers

        return wait_for_end([self.pid], seconds)

    def _send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        import json
        from array import array

        passed = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        self._control.sendmsg([json.dumps(message).encode()], passed)


_servers: dict[Hashable, ForkServer] = {}
_lock = renew_in_child(allocate_lock())


def find_server(key: Hashable, make: Callable[[], Server]) -> Server:
    """Return the fork server of this process of one kind; a new one where there is none that lives.

    Args:
        key: The kind.
        make: Starts one.
    """
    with _lock:
        found: Any = _servers.get(key)
        if found is None or not found.alive:
            found = _servers[key] = make()
        server: Server = found
        return server


def close_all(kind: type[ForkServer] | None = None, seconds: float = END_SECONDS) -> None:
    """End the fork servers of this process.

    Args:
        kind: Class of those that end; all when None.
        seconds: How long to wait for each; 0 for not at all.
    """
    with _lock:
        ended = {key: server for key, server in _servers.items() if kind is None or type(server) is kind}
        for key in ended:
            del _servers[key]
    for server in ended.values():
        server.close(seconds)


_tidies: list[Callable[[], object]] = []


def tidy_at_exit(tidy: Tidy) -> Tidy:
    """Have a function called at exit, before the fork servers end; return it."""
    _tidies.append(tidy)
    return tidy


@atexit.register  # when what was imported later has ended, which may need what the servers fork
def _end() -> None:
    for tidy in _tidies:
        tidy()
    close_all()


@tidy_in_child
def _abandon_all() -> None:
    while _servers:
        _servers.popitem()[1].abandon()
