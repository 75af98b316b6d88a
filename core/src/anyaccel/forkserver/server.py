"""The fork server: a small process that forks, guards and tears down processes for its caller.

:mod:`anyaccel.forkserver.start` starts the server. The server imports the requested modules and runs only this module.
It refuses to fork when it has several threads, or a device open or mapped: two processes must not share what a driver
set up for one.

The control socket carries JSON packets. ``{"spawn": n, "target": "module:name", "argument": a, "alone": b}``, with
descriptors, forks process ``n``, which calls the function with both and then exits. With ``alone``, the process gets a
parent of its own that only waits for it, so that signals to the parent harm nothing else. ``{"hold": n, "grace": s}``
passes descriptors that stay open until the process and its descendants have gone. ``{"stop": n, "grace": s, "by":
signal}`` ends these: by the signal at first, by SIGKILL in the end. Once all have left the kernel, the server sends
``{"kind": "gone", "number": n, "pid": p, "status": s, "reason": text}``; for a process that ignores SIGKILL,
``{"kind": "stuck", "number": n, "reason": text}``.

Orphans of its processes become children of the server. When the caller exits, for any reason, all of these processes
are ended, by SIGTERM and then by SIGKILL.
"""

from __future__ import annotations

import _socket
import contextlib
import gc
import io
import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence

from anyaccel.forkserver.start import CONTROL, PACKET_LIMIT
from anyaccel.linux import (
    Teardown,
    adopt_orphans,
    children,
    die_with_parent,
    find_tree,
    list_descriptors,
    set_name,
    signal,
    start_time,
    touched_devices,
    waits_in,
)
from anyaccel.linux.process import state, threads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


MOST_DESCRIPTORS = 253
"""Most descriptors that the kernel passes in one packet."""
FIRST_LOOK_SECONDS = 0.02
"""Pause after a SIGKILL, since most processes leave no descendants to look for."""
LOOK_SECONDS = 1.0
"""Pause between two scans for processes that ignore SIGKILL."""
MOST_TRIAL = 10.0
"""Longest life of a process that is forked for nothing."""
MOST_WORDS = 4096
"""Most characters of a reason, which may be the error of a user's module."""
LONGEST_SECONDS = 86_400.0
"""Longest wait: ``epoll_wait(2)`` takes 24 days at most."""


def main(config: Mapping[str, Any]) -> None:
    """Serve one caller; exit once the caller and every process have gone.

    Args:
        config: Plain data: ``caller``, process id of the caller; ``own``, names of modules of ours that the processes
            need; ``preload``, names of a user's modules, or None to skip the check that the process is fit to fork;
            ``argv``, ``sys.argv`` of the processes; ``grace``, seconds between SIGTERM and SIGKILL when the caller has
            gone; ``stuck``, seconds after SIGKILL until a process counts as stuck; ``idle``, seconds after which a
            server without processes ends, or None.
    """
    sys.argv[:] = config["argv"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where the caller has closed it
            stream.reconfigure(line_buffering=True)  # so that lines of processes and of what they start stay in order
    Server(config).serve()
    os._exit(0)


class Family:
    """A forked process, with the descendants.

    Attributes:
        number: Number of the process.
        pid: Id of the forked process.
        grace: Seconds between SIGTERM and SIGKILL for orphans.
        leases: Descriptors that stay open until the whole family has gone.
        status: Exit status of the forked process once it has ended, or the negative number of a signal.
        members: Start times of the family's children of the fork server, by id: the forked process until its end, and
            orphans.
        find: Finder of all living processes of the family.
        rest: Teardown of the family; None until it begins.
        due: Time of the next step of the teardown, by ``time.monotonic()``.
        told_stuck: Whether the caller knows that the family is stuck.
    """

    __slots__ = ("due", "find", "grace", "leases", "members", "number", "pid", "rest", "status", "told_stuck")

    def __init__(self, number: int, pid: int) -> None:
        self.number = number
        self.pid = pid
        self.grace = 0.0
        self.leases: list[int] = []
        self.status: int | None = None
        self.members: dict[int, int] = {}
        self.find = find_tree(self.members)
        self.adopt(pid)
        self.rest: Teardown | None = None
        self.due = 0.0
        self.told_stuck = False

    def adopt(self, pid: int) -> None:
        """Add a child of the fork server to :attr:`members`; no descriptor or list of the server changes."""
        self.members[pid] = start_time(pid) or 0


def _describe_stuck(rest: Teardown) -> str:
    """Return a sentence with each process that a teardown has left: id, state, and the kernel function it waits in.

    Processes that have ended by now are left out.
    """
    shown = [
        f"process {pid} (state {letter}, in {waits_in(pid) or 'the kernel'})"
        for pid in {**rest.own, **rest.others}
        if (letter := state(pid))
    ]
    return f"{', '.join(shown)} did not end {rest.patience:g} s after SIGKILL"


def leave_no_core(pid: int) -> None:
    """Lower a process's limit of core files, so that an abort leaves none; errors are ignored.

    The limit is 1 byte, or 0 if the hard limit is 0: a limit of 0 would not keep the kernel from a pipe for core files.
    """
    import resource

    with contextlib.suppress(OSError, ValueError):
        _, most = resource.prlimit(pid, resource.RLIMIT_CORE)
        resource.prlimit(pid, resource.RLIMIT_CORE, (1 if most else 0, most))


class Server:
    """The fork server of a caller; the constructor imports the preloaded modules.

    An import that fails, a device that is open afterwards and more than one thread become the ``fault``, with which the
    server refuses to fork. The process exits at once if the caller has ended already.

    Args:
        config: As for :func:`main`.

    Attributes:
        families: Living families by number.
        owners: The families to which each child of the server may belong, by process id.
        fault: Why no process is forked; empty for none. The caller gets it as the reason of each process.
        outbox: Messages that the caller has not taken yet.
        closing: Whether the caller has gone, so that all families are being ended.
        private: Descriptors that a forked process closes.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.pid = os.getpid()
        self.grace: float = config["grace"]
        self.stuck_after: float = config["stuck"]
        self.idle: float | None = config["idle"]
        self.control = _socket.socket(fileno=CONTROL)
        self.caller = _pin_caller(config["caller"])
        self.families: dict[int, Family] = {}
        self.owners: dict[int, frozenset[Family]] = {}
        self.outbox: deque[bytes] = deque()
        self.closing = False
        adopt_orphans()
        set_name("accel-forksrv")
        self.wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.private = [CONTROL, self.caller, self.wake, wake_end]
        _arrange_signals(wake_end)
        self.fault = _import((*config["own"], *(config["preload"] or ())))
        if os.getpid() != self.pid:  # forked by a module at its import
            os._exit(0)
        if config["preload"] is not None:
            _arrange_signals(wake_end)  # again: modules may block signals, or handle them, at their import
            if not self.fault and len(threads()) > 1 and not touched_devices():
                _end_threads()
            self.fault = self.fault or _find_fault()
            gc.collect()
        self.poll = select.epoll()
        self.private.append(self.poll.fileno())
        for descriptor in (CONTROL, self.caller, self.wake):
            self.poll.register(descriptor, select.EPOLLIN)
        gc.disable()
        gc.freeze()  # the collector would write to every page that the processes share

    def serve(self) -> None:
        """Fork, watch and tear down until the caller and all families have gone, or ``idle`` passes without a family.

        After the caller has gone, families that ignore SIGKILL are not waited for, unless they hold leases.
        """
        while not (self.closing and all(each.told_stuck and not each.leases for each in self.families.values())):
            ready = self.poll.poll(self._patience())
            if not ready and not self.families:
                return
            for descriptor, _ in ready:
                if descriptor == self.wake:
                    self._on_signal()
                elif descriptor == CONTROL:
                    self._on_control()
                else:
                    self._close()
            self._press()
            self._flush()

    def _on_control(self) -> None:
        """Receive and carry out the pending messages of the caller; end every family if the caller has gone.

        A ``stop`` for a family that has gone is ignored.
        """
        while True:
            try:
                data, ancillary, _, _ = self.control.recvmsg(
                    PACKET_LIMIT,
                    _socket.CMSG_SPACE(MOST_DESCRIPTORS * 4),
                    _socket.MSG_DONTWAIT | _socket.MSG_CMSG_CLOEXEC,
                )
            except BlockingIOError:
                return
            except ConnectionResetError:
                data, ancillary = b"", []
            if not data:
                self._close()
                return
            descriptors = memoryview(b"".join(content for _, _, content in ancillary)).cast("i").tolist()
            message = json.loads(data)
            if "spawn" in message:
                self._spawn(message["spawn"], descriptors, message)
            elif "hold" in message:
                self._hold(message["hold"], message["grace"], descriptors)
            elif message["stop"] in self.families:
                self._end(self.families[message["stop"]], message["grace"], message["by"])

    def _spawn(self, number: int, descriptors: list[int], order: Mapping[str, Any]) -> None:
        """Fork a process for a function, and close this process's copies of its descriptors.

        If the server is unfit to fork, or the kernel refuses, the caller gets a ``gone`` with the reason and no process
        id. While the server is closing, nothing is forked and nothing is sent.

        Args:
            number: Number of the process.
            descriptors: Descriptors for the process.
            order: The message of the caller.
        """
        reason = self.fault or (_find_fault() if len(os.listdir("/proc/self/task")) > 1 else "")
        if not reason and not self.closing:
            # SIGTERM stays pending until the worker has its handler: the default action would skip its clean-up.
            masked = set() if order["alone"] else {signal.SIGTERM}
            signal.pthread_sigmask(signal.SIG_BLOCK, masked)
            try:
                pid = os.fork()
            except OSError as error:
                reason = f"the kernel refused to fork: {error.strerror}"
            else:
                if pid == 0:
                    self._become(order, descriptors)
                self.families[number] = family = Family(number, pid)
                self.owners[pid] = frozenset((family,))
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, masked)
        for descriptor in descriptors:  # the child has copies
            os.close(descriptor)
        if reason:
            self._post("gone", number, pid=0, status=None, reason=reason)

    def _hold(self, number: int, grace: float, leases: list[int]) -> None:
        """Keep lease descriptors open until the whole family of a process has gone; close them now if it has.

        Args:
            number: Number of the process.
            grace: Seconds between SIGTERM and SIGKILL for orphans of the process.
            leases: The descriptors.
        """
        family = self.families.get(number)
        if family is not None:
            family.grace = grace
            family.leases += leases
            return
        for lease in leases:  # the family has gone already
            os.close(lease)

    def _become(self, order: Mapping[str, Any], descriptors: list[int]) -> None:
        """Set up the forked child, call the target function there, and exit: 0 after a return, 70 after an exception.

        An exception is printed on standard error. The child has a session of its own, the default signals, and dies
        with its parent. SIGTERM is blocked until the function unblocks it, unless ``alone``.
        """
        try:
            die_with_parent(self.pid)
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if order["alone"]:
                _get_parent()
            adopt_orphans()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGABRT):
                signal.signal(number, signal.SIG_DFL)
            for descriptor in self.private:
                os.close(descriptor)
            for family in self.families.values():
                for lease in family.leases:  # leases of other families must not depend on this process
                    os.close(lease)
            gc.enable()
            module, _, name = order["target"].partition(":")
            __import__(module)
            getattr(sys.modules[module], name)(descriptors, order["argument"])
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - nothing above may go on as if this were the fork server
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(70)

    def _on_signal(self) -> None:
        """Handle the pending signals: end every family after SIGTERM or SIGHUP, then reap dead processes."""
        numbers: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.wake, 512):
                numbers.update(chunk)
        if numbers - {signal.SIGCHLD}:  # SIGTERM or SIGHUP
            self._close()
        self._look_after_families()

    def _look_after_families(self) -> None:
        """Reap dead processes, adopt their orphans, and report families that have gone.

        The kernel makes an orphan our child before the dead parent can be reaped. So an orphan that is seen before a
        round of reaping belongs to a family that lost a process up to that round. The last round finds no dead process,
        so no orphan remains unseen. If several families lost a process meanwhile, the orphan may belong to any of
        these: then all of these families live until the orphan has gone.
        """
        bereaved: frozenset[Family] = frozenset()
        dead = {0: 0}
        while dead:
            orphans = [child for child in children(self.pid) if child not in self.owners]
            dead = _reap()
            for pid, status in dead.items():
                for family in self.owners.get(pid, ()):
                    family.members.pop(pid, None)
                    if pid == family.pid:
                        family.status = status
                bereaved |= self.owners.pop(pid, frozenset())
            for orphan in orphans:
                if orphan not in dead:
                    # Without a loss, a worker has given up adopting orphans: this one may be of any family.
                    self.owners[orphan] = bereaved or frozenset(self.families.values())
                    for family in self.owners[orphan]:
                        family.adopt(orphan)
        for family in bereaved:
            self._look_after(family)

    def _look_after(self, family: Family) -> None:
        """Report a family without processes, and close its leases; or tear down the orphans of an ended process.

        While the forked process lives, it adopts its own orphans, so orphans in its family belong to another family.
        """
        if family.status is None:
            return
        if not family.members:
            del self.families[family.number]
            for lease in family.leases:
                os.close(lease)
            self._post("gone", family.number, pid=family.pid, status=family.status, reason="")
        elif family.rest is None or not family.rest.killing:
            self._end(family, family.grace, signal.SIGTERM)

    def _end(self, family: Family, grace: float, by: int) -> None:
        """Begin the teardown of a family, or shorten its grace; the main loop takes the steps.

        With a grace of 0, the forked process is killed at once, unless it has ended.

        Args:
            family: The family.
            grace: Seconds until SIGKILL.
            by: The signal that asks each process to end; 0 for none. SIGABRT also lowers the limit of core files. A
                teardown in progress keeps its own signal.
        """
        if family.rest is None:
            family.rest = Teardown(family.find, grace=grace, patience=self.stuck_after, ask=by)
            if by == signal.SIGABRT:
                family.find(lambda pid, _: leave_no_core(pid))
        else:
            family.rest.allow(grace)
        family.due = 0.0
        if grace <= 0 and family.status is None:
            family.rest.kill()
            os.kill(family.pid, signal.SIGKILL)  # the id cannot be reused before it is reaped here
            family.due = time.monotonic() + FIRST_LOOK_SECONDS

    def _press(self) -> None:
        """Take the due steps of every teardown, and send ``stuck``, once, for a family that survives SIGKILL."""
        now = time.monotonic()
        for family in tuple(self.families.values()):
            if (rest := family.rest) is None or family.due > now:
                continue
            pause = rest.step()
            family.due = time.monotonic() + (LOOK_SECONDS if pause is None else pause)
            if pause is None and rest.killing and (rest.expired or rest.others) and not family.told_stuck:
                family.told_stuck = True
                self._post("stuck", family.number, reason=_describe_stuck(rest))

    def _close(self) -> None:
        """End every family, since the caller has gone; no more messages are read. A second call does nothing."""
        if self.closing:
            return
        self.closing = True
        self.poll.unregister(CONTROL)
        self.poll.unregister(self.caller)
        for family in self.families.values():
            self._end(family, self.grace, signal.SIGTERM)

    def _patience(self) -> float | None:
        """Return the seconds until the next step of a teardown; without teardowns, ``idle`` or None for no limit."""
        due = [family.due for family in self.families.values() if family.rest is not None]
        if not due:
            return None if self.families else self.idle
        return min(max(0.0, min(due) - time.monotonic()), LONGEST_SECONDS)

    def _post(self, kind: str, number: int, *, reason: str, **more: int | None) -> None:
        """Queue a message for the caller, with at most ``MOST_WORDS`` characters of the reason, and send what can be.

        Args:
            kind: ``gone`` or ``stuck``.
            number: Number of the process.
            reason: The reason.
            more: Further fields.
        """
        self.outbox.append(json.dumps({"kind": kind, "number": number, "reason": reason[:MOST_WORDS], **more}).encode())
        self._flush()

    def _flush(self) -> None:
        """Send pending messages without blocking, since the caller may be stopped; the rest waits in the outbox.

        If the caller has gone, all families are ended.
        """
        try:
            while self.outbox and not self.closing:
                self.control.send(self.outbox[0], _socket.MSG_DONTWAIT)
                self.outbox.popleft()
            writable = 0
        except BlockingIOError:
            writable = select.EPOLLOUT
        except OSError:
            self._close()
            return
        if not self.closing:
            self.poll.modify(CONTROL, select.EPOLLIN | writable)


def _get_parent() -> None:
    """Fork again and return in the child alone; the parent only waits, and exits as the child does, signal included.

    The child has a session of its own and dies with the parent.

    The parent does little, since the kernel copies each page of memory that a forked process writes to.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(own)
        os.setsid()
        return
    os.closerange(0, max(list_descriptors()) + 1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:
        leave_no_core(own)
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(own, -status)
    os._exit(status)


def _find_fault() -> str:
    """Return the reason why this process must not fork, with the way out: open hardware or threads; empty for none."""
    if touched := touched_devices():
        return (
            f"a preloaded module has opened {', '.join(touched)}, and a process with an open device must not fork;"
            " do not preload modules that use a device at their import"
        )
    names = threads()
    if len(names) > 1:
        return (
            f"preloaded modules have started threads, so the fork server has {len(names)} ({', '.join(names)}) and must"
            " not fork; preload fewer modules, or start no thread at their import"
        )
    return ""


def _reap() -> dict[int, int]:
    """Reap all dead children without waiting; return the exit statuses by id, the negative number for a signal."""
    dead = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            dead[pid] = os.waitstatus_to_exitcode(status)
    return dead


def _pin_caller(pid: int) -> int:
    """Return a pidfd of the caller, the parent of this process; exit with status 0 if the caller has ended already."""
    try:
        pinned = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(0)
    if os.getppid() != pid:
        os._exit(0)
    return pinned


def _arrange_signals(wake: int) -> None:
    """Unblock all signals, ignore SIGINT and SIGABRT, and have SIGCHLD, SIGTERM and SIGHUP written to a descriptor."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that started the server may have blocked signals
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGABRT):  # a process that waits for one that aborts must not do so itself
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


def _end_threads() -> None:
    """Fork once for nothing: libraries with fork handlers then end the threads from their import.

    A library that expects forks ends its threads before each fork, and starts threads again on demand: OpenBLAS does so
    by ``pthread_atfork`` (its function ``openblas_fork_handler``). So this process has a single thread after a fork,
    unless a library does not handle forks. The fork is killed after ``MOST_TRIAL`` seconds; if the kernel refuses it,
    the threads stay.
    """
    try:
        import warnings

        with warnings.catch_warnings(action="ignore"):  # of a fork with threads, which is what this is
            pid = os.fork()
    except OSError:
        return
    if pid == 0:
        os._exit(0)
    end = time.monotonic() + MOST_TRIAL
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:  # the child waits for a lock that a thread held
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _import(modules: Sequence[str]) -> str:
    """Import modules in order, up to the first that fails; return a sentence about the failure, empty for none.

    No exception passes through, SystemExit included.
    """
    for module in modules:
        try:
            __import__(module)
        except BaseException as error:  # noqa: BLE001 - whatever a module does on import, the caller should hear of it
            text = type(error).__name__
            with contextlib.suppress(Exception):  # its __str__ is code of the module
                text += f": {error}"
            return f"the module {module!r} cannot be preloaded: {text}"
    return ""
