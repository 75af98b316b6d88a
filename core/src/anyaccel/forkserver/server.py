"""The fork server: a small process that forks others for its caller, watches them, and outlives nothing.

:mod:`anyaccel.forkserver.start` starts it, and it runs nothing but this module after the modules that it was asked to
import. It has one thread and no device open or mapped: otherwise it refuses to fork, since what a driver set up for one
process must not be used by two.

It serves a control socket of JSON packets. ``{"spawn": n, "target": "module:name", "argument": a, "alone": b}`` comes
with descriptors, and forks process ``n``, which calls the function with both and ends with it. One that is alone has a
parent of its own, which does nothing but wait for it: what it does to its parent costs nothing else. ``{"hold": n,
"grace": s}`` comes with descriptors that are kept until the process and everything that it started have gone.
``{"stop": n, "grace": s, "by": signal}`` ends these: asked at first, killed in the end. When all of them have left the
kernel, the server says ``{"kind": "gone", "number": n, "pid": p, "status": s, "reason": text}``; of what ignores
SIGKILL, ``{"kind": "stuck", "number": n, "reason": text}``.

It is the guardian too. Orphans of what it forked become its children; when the caller goes, for whatever reason,
everything that was started is ended, and what does not end when asked is killed.
"""

from __future__ import annotations

import _socket
import contextlib
import gc
import io
import json
import os
import select
import signal
import sys
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence

from anyaccel.forkserver.start import CONTROL, PACKET_LIMIT
from anyaccel.linux.descriptors import touched_devices
from anyaccel.linux.process import (
    adopt_orphans,
    children,
    die_with_parent,
    set_name,
    start_time,
    state,
    threads,
    waits_in,
)
from anyaccel.linux.teardown import Teardown, find_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


MOST_DESCRIPTORS = 253
"""The kernel passes no more in one packet."""
FIRST_LOOK_SECONDS = 0.02
"""How long a process that was killed is left alone: most leave nothing that would have to be looked for."""
LOOK_SECONDS = 1.0
"""Pause between two looks at what is left of a process, where nothing can be done about it."""
MOST_TRIAL = 10.0
"""Seconds that a process has that is forked for nothing, and ends at once."""
MOST_WORDS = 4096
"""Characters of a reason, which may be what a module of a user has raised."""
LONGEST_SECONDS = 86_400.0
"""Of one wait: the kernel takes no more than some weeks."""


def main(config: Mapping[str, Any]) -> None:
    """Serve one caller until it has gone and nothing is left of what it started.

    Args:
        config: What the server is to be, as plain data: ``caller``, the process id of that; ``own``, names of modules
            of ours that the processes need; ``preload``, names of a user's modules, or None where it is not checked
            whether they leave the process fit to fork; ``argv``, their ``sys.argv``; ``grace``, seconds between asking
            and killing when the caller has gone; ``stuck``, seconds after which what was killed counts as stuck;
            ``idle``, seconds after which a server without processes ends, or None.
    """
    sys.argv[:] = config["argv"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where the caller has closed it
            stream.reconfigure(line_buffering=True)  # so that lines of processes and of what they start stay in order
    Server(config).serve()
    os._exit(0)


class Family:
    """A process that was asked for, and everything that descends from it.

    Attributes:
        number: Its number.
        pid: Process id of the first.
        grace: Seconds that what it leaves behind has between being asked to end and being killed.
        leases: Descriptors that are kept until all have gone.
        status: Exit status of the first once it has ended, or the negative number of a signal.
        members: Start times of the children of the fork server that are of it, by id: the first, until that has ended,
            and orphans that it left.
        find: Finds all its living processes; what it has found once is of the family for good.
        rest: Its end; None as long as nothing ends it.
        due: Time of ``time.monotonic()`` of the next step of that.
        told_stuck: Whether the caller knows that it does not help.
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
        """Count a child of the fork server among the family."""
        self.members[pid] = start_time(pid) or 0


def stuck(rest: Teardown) -> str:
    """Say which processes ignore SIGKILL, or may not be killed, and where they are."""
    shown = [
        f"process {pid} (state {letter}, in {waits_in(pid) or 'the kernel'})"
        for pid in {**rest.own, **rest.others}
        if (letter := state(pid))
    ]
    return f"{', '.join(shown)} did not end {rest.patience:g} s after SIGKILL"


def leave_no_core(pid: int) -> None:
    """Have no core written of a process that is about to abort; a limit of 1 byte keeps it from programs, too."""
    import resource

    with contextlib.suppress(OSError, ValueError):
        _, most = resource.prlimit(pid, resource.RLIMIT_CORE)
        resource.prlimit(pid, resource.RLIMIT_CORE, (1 if most else 0, most))


class Server:
    """The state of the process: families by number, and of which families each child may be."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.pid = os.getpid()
        self.grace: float = config["grace"]
        self.stuck_after: float = config["stuck"]
        self.idle: float | None = config["idle"]
        self.control = _socket.socket(fileno=CONTROL)
        self.caller = _caller(config["caller"])
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
        if config["preload"] is not None:
            if not self.fault and len(threads()) > 1 and not touched_devices():
                _end_threads()
            self.fault = self.fault or _unfit()
            gc.collect()
        self.poll = select.epoll()
        self.private.append(self.poll.fileno())
        for descriptor in (CONTROL, self.caller, self.wake):
            self.poll.register(descriptor, select.EPOLLIN)
        gc.disable()
        gc.freeze()  # the collector would write to every page that the processes share

    def serve(self) -> None:
        """Fork, watch and end until the caller has gone and nothing is left, or no process was needed for long."""
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
            descriptors = array("i", b"".join(content for _, _, content in ancillary)).tolist()
            message = json.loads(data)
            if "spawn" in message:
                self._spawn(message["spawn"], descriptors, message)
            elif "hold" in message:
                self._hold(message["hold"], message["grace"], descriptors)
            elif message["stop"] in self.families:
                self._end(self.families[message["stop"]], message["grace"], message["by"])

    def _spawn(self, number: int, descriptors: list[int], order: Mapping[str, Any]) -> None:
        """Fork a process that calls a function."""
        reason = self.fault or (_unfit() if len(os.listdir("/proc/self/task")) > 1 else "")
        if not reason and not self.closing:
            # A process that is asked to end before it knows how would not: it hears once it does.
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
        for descriptor in descriptors:
            os.close(descriptor)
        if reason:
            self._post("gone", number, pid=0, status=None, reason=reason)

    def _hold(self, number: int, grace: float, leases: list[int]) -> None:
        """Keep the leases of a process, so that they do not end before everything that it started has."""
        family = self.families.get(number)
        if family is not None:
            family.grace = grace
            family.leases += leases
            return
        for lease in leases:  # it has gone already
            os.close(lease)

    def _become(self, order: Mapping[str, Any], descriptors: list[int]) -> None:
        """What the child does after the fork; never returns. The function unblocks SIGTERM, unless it is alone."""
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
                for lease in family.leases:  # of others: they must not end with this process
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
        numbers: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.wake, 512):
                numbers.update(chunk)
        if numbers - {signal.SIGCHLD}:
            self._close()
        self._look_after_families()

    def _look_after_families(self) -> None:
        """Reap the processes that have died, adopt the orphans that they leave, and say which families have gone.

        What a dead process leaves is our child before it can be reaped itself. So an orphan that is seen before a round
        of reaping is of a family that lost a process up to that round. The last round finds no dead process, so no
        orphan is left to be seen. Where several families lost a process meanwhile, the orphan may be of any of them:
        then none of them has gone before it has.
        """
        bereaved: frozenset[Family] = frozenset()
        dead = {0: 0}
        while dead:
            left = [child for child in children(self.pid) if child not in self.owners]
            dead = _reap()
            for pid, status in dead.items():
                bereaved |= self._forget(pid, status)
            self._adopt([orphan for orphan in left if orphan not in dead], bereaved)
        for family in bereaved:
            self._look_after(family)

    def _adopt(self, orphans: list[int], families: frozenset[Family]) -> None:
        """Count orphans among some families; among all where a worker gave up being the parent of its orphans."""
        for orphan in orphans:
            self.owners[orphan] = families or frozenset(self.families.values())
            for family in self.owners[orphan]:
                family.adopt(orphan)

    def _look_after(self, family: Family) -> None:
        """A family lost a process: say so when none is left, and have the orphans end once the first process has.

        While that lives, orphans that are counted among its family are none that it left; another family may have.
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

    def _forget(self, pid: int, status: int) -> frozenset[Family]:
        """Take a dead process out of the families that it may be of; returns these."""
        families = self.owners.pop(pid, frozenset())
        for family in families:
            if pid == family.pid:
                family.status = status
            family.members.pop(pid, None)
        return families

    def _end(self, family: Family, grace: float, by: int) -> None:
        """Ask every process of a family to end, by a signal if any, and have it killed after the grace."""
        if family.rest is None:
            family.rest = Teardown(family.find, grace=grace, patience=self.stuck_after, ask=by)
            if by == signal.SIGABRT:
                family.find(lambda pid, _: leave_no_core(pid))
        else:
            family.rest.allow(grace)
        family.due = 0.0
        if grace <= 0 and family.status is None:
            family.rest.kill()
            os.kill(family.pid, signal.SIGKILL)  # the number is its own as long as it has not been reaped
            family.due = time.monotonic() + FIRST_LOOK_SECONDS

    def _press(self) -> None:
        """End families as far as that is due."""
        now = time.monotonic()
        for family in tuple(self.families.values()):
            if (rest := family.rest) is None or family.due > now:
                continue
            pause = rest.step()
            family.due = time.monotonic() + (LOOK_SECONDS if pause is None else pause)
            if pause is None and rest.killing and (rest.expired or rest.others) and not family.told_stuck:
                family.told_stuck = True
                self._post("stuck", family.number, reason=stuck(rest))

    def _close(self) -> None:
        """The caller has gone: end everything."""
        if self.closing:
            return
        self.closing = True
        self.poll.unregister(CONTROL)
        self.poll.unregister(self.caller)
        for family in self.families.values():
            self._end(family, self.grace, signal.SIGTERM)

    def _patience(self) -> float | None:
        due = [family.due for family in self.families.values() if family.rest is not None]
        if not due:
            return None if self.families else self.idle
        return min(max(0.0, min(due) - time.monotonic()), LONGEST_SECONDS)

    def _post(self, kind: str, number: int, *, reason: str, **more: int | None) -> None:
        self.outbox.append(json.dumps({"kind": kind, "number": number, "reason": reason[:MOST_WORDS], **more}).encode())
        self._flush()

    def _flush(self) -> None:
        """Tell the caller what it can take now. It may be stopped: never wait for it."""
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
    """Fork once more, and return in the new process; this one waits for that, and ends as it does.

    It does so at once, and does little: every page of memory that a process writes to is copied for it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(own)
        os.setsid()
        return
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:
        leave_no_core(own)
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(own, -status)
    os._exit(status)


def _unfit() -> str:
    """Why this process must not fork; empty when it may."""
    if touched := touched_devices():
        return (
            f"the fork server has {', '.join(touched)} open, because of a preloaded module, and must not fork then;"
            " do not preload what uses a device when it is imported"
        )
    names = threads()
    if len(names) > 1:
        return (
            f"the fork server has {len(names)} threads ({', '.join(names)}), which preloaded modules started,"
            " which do not end at a fork, and must not fork then; preload less, or keep the module from starting"
            " threads when it is imported"
        )
    return ""


def _reap() -> dict[int, int]:
    """The children that have died, each with its exit status or the negative number of a signal."""
    dead = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            dead[pid] = os.waitstatus_to_exitcode(status)
    return dead


def _caller(pid: int) -> int:
    """Pin the process that started us; if it has gone already, end."""
    try:
        pinned = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(0)
    if os.getppid() != pid:
        os._exit(0)
    return pinned


def _arrange_signals(wake: int) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whatever the thread that started us had blocked
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGABRT):  # a process that waits for one that aborts must not do so itself
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


def _end_threads() -> None:
    """Have libraries end the threads that they started when they were imported.

    What is made to be forked ends its threads before each fork and starts them again where they are needed: OpenBLAS
    does, by ``pthread_atfork`` (its function ``openblas_fork_handler``). So a fork of which nothing is wanted leaves
    this process with one thread, unless a library does not know of forks.
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
        if time.monotonic() > end:  # it stands at a lock that a thread held
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _import(modules: Sequence[str]) -> str:
    """Import modules for all processes; returns why that failed, or an empty string."""
    for module in modules:
        try:
            __import__(module)
        except BaseException as error:  # noqa: BLE001 - whatever a module does on import, the caller should hear of it
            return f"the module {module!r} cannot be preloaded: {type(error).__name__}: {error}"
    return ""
