"""The far side of guarded calls: an interpreter that forks one process per client and looks after each.

:mod:`anyaccel.probe.guard` starts it. It imports what the processes need once, then serves a control socket of JSON
packets. ``{"start": n}`` comes with a socket and forks process ``n``, which answers calls on that socket.
``{"end": n, "trace": bool}`` kills it, once it has printed where it is if it shall. ``{"tell": n}`` asks for the end of
what it has printed. When process ``n`` has ended, the server kills what it left behind and says ``{"ended": n,
"status": s, "printed": text}``; so it does of one that it has killed and that does not end, with the status null. When
the caller goes away, everything is killed.

A vendor's code may signal its parent. So each process has a parent of its own, which the server forks, which forks the
process, and which does nothing else.
"""

from __future__ import annotations

import _socket
import contextlib
import errno
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

from anyaccel.interpreter import CONTROL
from anyaccel.linux.process import adopt_orphans, children, die_with_parent, state
from anyaccel.probe.protocol import ANSWER, BEGUN, CHUNK, DESCRIPTOR, HEADER, IDLE_SECONDS, PACKET_LIMIT, PRINTED_LIMIT

REAP_SECONDS = 0.5
"""How long a killed process is waited for: one that is stuck in the kernel ignores even SIGKILL."""

TRACE = signal.SIGUSR2
"""Signal by which a process prints where it is."""
TRACE_SECONDS = 0.5
"""How long a process is waited for that does not print it."""
BUSY_SECONDS = 5.0
"""Likewise, where it only waits for a processor."""
_BOTTOM = b'"<string>", line 1 in <module>\n'
"""What is printed last: the command line of this interpreter."""

_FORKED = struct.Struct("i")
"""What a parent says: the process id of what it has forked, or the negative number of the error when it could not."""


def main(preload: Sequence[str]) -> None:
    """Import some modules and serve the caller until it has gone.

    Args:
        preload: Their names.
    """
    for module in preload:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    server = Server(_socket.socket(fileno=CONTROL))
    gc.freeze()  # the collector, which the processes enable, would write to every page that they share
    server.serve()
    os._exit(0)


class Child:
    """One forked process, and the pipe with what it prints.

    Attributes:
        number: Its number.
        parent: Process id of its parent, which is a child of the server.
        said: The end of the pipe on which the parent says what it has forked.
        pid: Its process id; 0 until it is known.
        ended: A descriptor that can be read once it has ended, from when its process id is known.
        output: The pipe's end.
        printed: The end of what it has printed.
        told: Whether the caller knows of its end.
    """

    def __init__(self, number: int, calls: _socket.socket) -> None:
        self.number = number
        self.printed = bytearray()
        self.told = False
        self.output, output = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.said, say = os.pipe2(os.O_CLOEXEC)
        server = os.getpid()
        self.parent = os.fork()
        if self.parent == 0:
            _become_parent(calls, output, say, server)
        self.pid = 0
        os.close(output)
        os.close(say)
        calls.close()

    def learn(self) -> None:
        """Learn its process id: wait for the parent to say it.

        Raises:
            OSError: When the parent could not fork, or has ended before.
        """
        with open(self.said, "rb", buffering=0) as file:
            data = file.read(_FORKED.size)
        number = _FORKED.unpack(data)[0] if len(data) == _FORKED.size else -errno.ESRCH
        if number < 0:
            raise OSError(-number, os.strerror(-number))
        self.ended = os.pidfd_open(number)
        self.pid = number

    def drain(self) -> bool:
        """Take what it has printed out of the pipe, a part of it where it prints without end.

        Returns:
            False once nothing more can come, since nobody has the pipe's other end.
        """
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):
                chunk = os.read(self.output, 1 << 16)
                if not chunk:
                    return False
                self.printed += chunk
                del self.printed[:-PRINTED_LIMIT]
        return True

    def trace(self) -> None:
        """Let it print where it is, which is how a hang is found."""
        self.drain()
        before = bytes(self.printed)
        self.printed.clear()
        with contextlib.suppress(OSError):
            os.kill(self.pid, TRACE)
            begin = time.monotonic()
            while _BOTTOM not in self.printed and time.monotonic() < begin + self._patience():
                if select.select([self.output], [], [], TRACE_SECONDS / 10)[0] and not self.drain():
                    break
        self.printed[:0] = before
        del self.printed[:-PRINTED_LIMIT]

    def kill(self) -> None:
        """End it and its process group; while its process id is not known, its parent, which ends it as well."""
        with contextlib.suppress(OSError):
            os.kill(self.pid or self.parent, signal.SIGKILL)
            os.killpg(self.pid or self.parent, signal.SIGKILL)

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether it has ended, or does so within some seconds: a killed one does not that is stuck in the kernel."""
        return bool(select.select([self.ended], [], [], seconds)[0])

    def reap(self) -> int | None:
        """Reap the process, which has ended, and its parent.

        Returns:
            The exit status of the process, or of the parent where that has ended first, of which the process died; None
            where there was no process.
        """
        if self.pid:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)  # before its number can be another's
        first, status = os.waitpid(self.parent, os.WNOHANG)
        if not first:
            os.kill(self.parent, signal.SIGKILL)
            os.waitpid(self.parent, 0)  # the process is a child of the server from here on
        if not self.pid:
            return None
        _, own = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status if first else own)

    def _patience(self) -> float:
        """How long to wait for what it prints: it may have had no processor yet, or print without end."""
        return BUSY_SECONDS if state(self.pid) == "R" and len(self.printed) < PRINTED_LIMIT else TRACE_SECONDS

    def close(self) -> None:
        """Close the server's descriptors."""
        os.close(self.output)
        if self.pid:
            os.close(self.ended)


class Server:
    """The server's state: its processes by number, and whose each descriptor is."""

    def __init__(self, control: _socket.socket) -> None:
        self.control = control
        self.children: dict[int, Child] = {}
        self.owners: dict[int, Child] = {}
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)
        adopt_orphans()  # what a process leaves behind becomes ours, and is killed

    def serve(self) -> None:
        """Fork and watch until the caller has gone, or nobody has used a process for long."""
        while True:
            ready = self.poll.poll(None if self.children else IDLE_SECONDS * 1000)
            if not ready:
                return
            for descriptor, _ in ready:
                if descriptor == self.control.fileno():
                    if not self._on_control():
                        self._end_all()
                        return
                elif (child := self.owners.get(descriptor)) is None:
                    continue
                elif descriptor == child.said and not child.pid:
                    self._on_forked(child)
                elif child.pid and descriptor == child.ended:
                    if child.has_ended():  # the descriptor may have been another's when it could be read
                        self._on_end(child)
                else:
                    self._on_output(child)

    def _on_control(self) -> bool:
        try:
            data, ancillary, _, _ = self.control.recvmsg(PACKET_LIMIT, _socket.CMSG_LEN(DESCRIPTOR.size))
        except OSError:
            return False
        if not data:
            return False
        message = json.loads(data)
        if "start" in message:
            (descriptor,) = DESCRIPTOR.unpack(ancillary[0][2])
            os.set_inheritable(descriptor, False)
            self._on_start(message["start"], _socket.socket(fileno=descriptor))
        elif "end" in message and message["end"] in self.children:
            self._end(self.children[message["end"]], trace=message["trace"])
        elif "tell" in message and message["tell"] in self.children:
            child = self.children[message["tell"]]
            child.drain()
            self._say({"told": child.number, "printed": child.printed.decode(errors="replace")})
        return True

    def _on_start(self, number: int, calls: _socket.socket) -> None:
        try:
            child = self.children[number] = Child(number, calls)
        except OSError as error:  # no process or descriptor is left
            calls.close()
            self._say({"ended": number, "status": None, "printed": f"no process can be started: {error}\n"})
            return
        self._watch(child, child.output)
        self._watch(child, child.said)

    def _end(self, child: Child, *, trace: bool) -> None:
        if not child.pid:
            self._on_forked(child)
        if not child.pid:
            return
        if trace:
            child.trace()
        child.kill()
        if not child.has_ended(REAP_SECONDS):
            self._tell_end(child, None)

    def _on_forked(self, child: Child) -> None:
        self._unwatch(child.said)
        try:
            child.learn()
        except OSError as error:
            child.printed += f"no process can be started: {error}\n".encode()
            self._on_end(child)
        else:
            self._watch(child, child.ended)

    def _on_output(self, child: Child) -> None:
        if not child.drain():  # poll would tell of the end again and again
            self.poll.unregister(child.output)

    def _on_end(self, child: Child) -> None:
        status = child.reap()
        self._kill_orphans()
        child.drain()
        self._unwatch(child.output)
        if child.pid:
            self._unwatch(child.ended)
        child.close()
        del self.children[child.number]
        self._tell_end(child, status)

    def _watch(self, child: Child, descriptor: int) -> None:
        self.owners[descriptor] = child
        self.poll.register(descriptor, select.POLLIN)

    def _unwatch(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self.poll.unregister(descriptor)
        del self.owners[descriptor]

    def _tell_end(self, child: Child, status: int | None) -> None:
        """Say once that a process has ended, or that it is stuck."""
        if not child.told:
            child.told = True
            self._say({"ended": child.number, "status": status, "printed": child.printed.decode(errors="replace")})

    def _kill_orphans(self) -> None:
        """Kill what an ended process left behind: every process of ours that the caller did not ask for."""
        known = {pid for child in self.children.values() for pid in (child.parent, child.pid)}
        deadline = time.monotonic() + REAP_SECONDS
        while (orphans := set(children(os.getpid())) - known) and time.monotonic() < deadline:
            for pid in orphans:
                with contextlib.suppress(PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.001)

    def _end_all(self) -> None:
        for child in self.children.values():
            child.kill()
        self.children.clear()
        self._kill_orphans()

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the caller has gone, which the control socket tells
            self.control.send(json.dumps(message).encode(), _socket.MSG_DONTWAIT)


def _become_parent(calls: _socket.socket, output: int, say: int, server: int) -> None:
    """Fork the process and live as long as it does; never returns."""
    try:
        die_with_parent(server)
        os.setsid()  # a process that signals the group of its parent does not reach the server
        me = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            _become_child(calls, output, me)
        os.write(say, _FORKED.pack(pid))
        os.closerange(0, os.sysconf("SC_OPEN_MAX"))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        while pid > 0:
            signal.pause()
    finally:
        os._exit(70)


def _become_child(calls: _socket.socket, output: int, parent: int) -> None:
    """What the child does after the fork; never returns."""
    try:
        die_with_parent(parent)
        os.setsid()
        adopt_orphans()  # so that the server knows whose orphans it gets: those of the one that ended
        os.set_blocking(output, True)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, calls.fileno())
        os.closerange(calls.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        gc.enable()
        faulthandler.enable(2)
        faulthandler.register(TRACE, 2)
        _answer_calls(calls)
    except BaseException as error:  # noqa: BLE001 - nobody above us must go on as if it were the server
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(70)


def _answer_calls(calls: _socket.socket) -> None:
    """Answer calls until the caller has gone, or has not called for long."""
    calls.setsockopt(_socket.SOL_SOCKET, _socket.SO_RCVTIMEO, struct.pack("ll", int(IDLE_SECONDS), 0))
    while True:
        call = json.loads(_receive(calls))
        if call["begun"]:  # it took a while to get here, and the time that it may take begins now
            calls.sendall(HEADER.pack(BEGUN, 0))
        me = os.getpid()
        answer = _answer(call)
        if os.getpid() != me:  # a hook forked and returned twice
            os._exit(0)
        with contextlib.suppress(Exception):  # a plug-in may have closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        calls.sendall(HEADER.pack(ANSWER, len(answer)) + answer)


def _answer(call: dict[str, Any]) -> bytes:
    try:
        module, _, name = call["function"].partition(":")
        value = getattr(importlib.import_module(module), name)(call["payload"])
        return json.dumps({"value": value}).encode()
    except BaseException as error:  # noqa: BLE001 - SystemExit of a vendor's tool is no reason to vanish
        import traceback

        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        fault = {"kind": "raised", "reason": reason, "details": traceback.format_exc()}
        return json.dumps({"fault": fault}).encode()


def _receive(calls: _socket.socket) -> bytearray:
    """Receive a call; ends this process when the caller has gone, or nothing comes for long."""
    data = bytearray()
    while len(data) < HEADER.size or len(data) < HEADER.size + HEADER.unpack_from(data)[1]:
        try:
            chunk = calls.recv(CHUNK)
        except BlockingIOError:
            os._exit(0)
        if not chunk:
            os._exit(0)
        data += chunk
    return data[HEADER.size :]
