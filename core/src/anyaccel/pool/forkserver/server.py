"""The fork server: a small process that forks workers, watches them, and outlives nobody.

It is started by :mod:`anyaccel.pool.forkserver.client` as a fresh interpreter, never as a fork of the caller, and runs
nothing but this module after the modules that it was asked to preload. It has one thread and no device open or mapped:
otherwise it refuses to fork, since what a driver set up for one process must not be used by two.

It is the guardian too. Orphans of its workers become its children; when the caller goes, for whatever reason,
everything that was started is ended, and what does not end when asked is killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import select
import signal
import socket
import sys
import time
import warnings
from collections import deque
from typing import Any

import cloudpickle  # type: ignore[import-untyped, unused-ignore]  # noqa: F401 - workers need it, and they should not each load it

from anyaccel.interpreter import CONTROL
from anyaccel.linux.descriptors import touched_devices
from anyaccel.linux.process import (
    adopt_orphans,
    children,
    descendants,
    die_with_parent,
    set_name,
    signal_child,
    state,
    threads,
    waits_in,
)
from anyaccel.pool.channel import GONE, HOLD, LONGEST_SECONDS, NUMBER, SPAWN, STOP, Kind, receive, send
from anyaccel.pool.forkserver.child import serve


class Family:
    """A worker and everything that descends from it.

    Attributes:
        number: Number of the worker.
        pid: Its process id.
        grace: Seconds that what it leaves behind has between being asked to end and being killed.
        leases: Descriptors that are kept until all have gone.
        status: Exit status of the worker once it has ended, or the negative number of a signal.
        orphans: What it left behind, as far as these are children of the fork server.
        deadline: Time of ``time.monotonic()`` at which all are killed; None as long as nothing ends them.
        killing_since: Time since which that is tried.
        told_stuck: Whether the caller knows that it does not help.
    """

    __slots__ = ("deadline", "grace", "killing_since", "leases", "number", "orphans", "pid", "status", "told_stuck")

    def __init__(self, number: int, pid: int) -> None:
        self.number = number
        self.pid = pid
        self.grace = 0.0
        self.leases: list[int] = []
        self.status: int | None = None
        self.orphans: set[int] = set()
        self.deadline: float | None = None
        self.killing_since: float | None = None
        self.told_stuck = False

    def processes(self, server: int) -> list[tuple[int, int]]:
        """All its processes, each with its parent."""
        roots = [*([self.pid] if self.status is None else []), *self.orphans]
        return [member for root in roots for member in ((root, server), *descendants(root))]


def stuck(members: list[tuple[int, int]], seconds: float) -> str:
    """Say which processes ignore SIGKILL, and where they are."""
    shown = [
        f"process {pid} (state {letter}, in {waits_in(pid) or 'the kernel'})"
        for pid, _ in members
        if (letter := state(pid))
    ]
    return f"{', '.join(shown)} did not end {seconds:g} s after SIGKILL"


def signal_each(members: list[tuple[int, int]], number: int) -> None:
    """Signal some processes, each given with its parent."""
    for pid, parent in members:
        signal_child(pid, parent, number)


LAST_GRACE = 0.5
"""Seconds between asking and killing when the caller has gone: nobody is left to wait for a clean end."""
KILL_EVERY = 0.02
STUCK_AFTER = 60.0
MOST_TRIAL = 10.0
"""Seconds that a process has that is forked for nothing, and ends at once."""


def main(config: dict[str, Any]) -> None:
    """Serve one caller until it has gone and nothing is left of what it started."""
    sys.argv = config["argv"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where the caller has closed it
            stream.reconfigure(line_buffering=True)  # so that lines of workers and of what they start stay in order
    Server(config).serve()
    os._exit(0)


class Server:
    """The state of the process: families by number, and of which families each child may be."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.pid = os.getpid()
        self.grace = LAST_GRACE
        self.control = socket.socket(fileno=CONTROL)
        self.caller = _caller(config["caller"])
        self.families: dict[int, Family] = {}
        self.owners: dict[int, frozenset[Family]] = {}
        self.outbox: deque[tuple[Kind, bytes]] = deque()
        self.closing = False
        adopt_orphans()
        set_name("accel-forksrv")
        self.wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.private = [self.control.fileno(), self.caller, self.wake, wake_end]
        _arrange_signals(wake_end)
        self.fault = _preload(config["preload"])
        if not self.fault and len(threads()) > 1 and not touched_devices():
            _end_threads()
        self.fault = self.fault or self._unfit()
        self.poll = select.epoll()
        self.private.append(self.poll.fileno())
        for descriptor in (self.control.fileno(), self.caller, self.wake):
            self.poll.register(descriptor, select.EPOLLIN)
        gc.collect()
        gc.disable()
        gc.freeze()  # the collector would write to every page that the workers share

    def serve(self) -> None:
        """Fork, watch and end until the caller has gone and nothing is left."""
        while not (self.closing and not self.families):
            for descriptor, _ in self.poll.poll(self._patience()):
                if descriptor == self.wake:
                    self._on_signal()
                elif descriptor == self.control.fileno():
                    self._on_control()
                else:
                    self._close()
            self._press()
            self._flush()

    def _on_control(self) -> None:
        while True:
            try:
                message = receive(self.control, wait=False)
            except BlockingIOError:
                return
            if message is None:
                self._close()
                return
            if message.kind == Kind.SPAWN:
                number, ahead = SPAWN.unpack(message.data)
                self._spawn(number, *message.descriptors, ahead=ahead)
            elif message.kind == Kind.HOLD:
                number, grace = HOLD.unpack(message.data)
                self._hold(number, grace, message.descriptors)
            elif message.kind == Kind.STOP:
                number, grace = STOP.unpack(message.data)
                if number in self.families:
                    self._ask_to_end(self.families[number], grace)

    def _spawn(self, number: int, channel: int, *, ahead: bool) -> None:
        """Fork a worker that serves a channel."""
        reason = self.fault or self._threads()
        if not reason and not self.closing:
            # A worker that is asked to end before it knows how would not: it hears once it does.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            try:
                pid = os.fork()
            except OSError as error:
                reason = f"the kernel refused to fork: {error.strerror}"
            else:
                if pid == 0:
                    self._become_worker(channel, ahead=ahead)
                self.families[number] = family = Family(number, pid)
                self.owners[pid] = frozenset((family,))
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.close(channel)
        if reason:
            self._post(Kind.REFUSED, NUMBER.pack(number) + reason.encode())

    def _hold(self, number: int, grace: float, leases: list[int]) -> None:
        """Keep the leases of a worker, so that they do not end before everything that it started has."""
        family = self.families.get(number)
        if family is not None:
            family.grace = grace
            family.leases += leases
            return
        for lease in leases:  # it has gone already
            os.close(lease)

    def _become_worker(self, channel: int, *, ahead: bool) -> None:
        """What the child does after the fork; never returns."""
        try:
            die_with_parent(self.pid)
            signal.set_wakeup_fd(-1)
            for descriptor in self.private:
                os.close(descriptor)
            for family in self.families.values():
                for lease in family.leases:  # of others: they must not end with this worker
                    os.close(lease)
            os.setsid()
            adopt_orphans()
            set_name("accel-worker")
            gc.enable()
            serve(channel, ahead=ahead)
        except BaseException as error:  # noqa: BLE001 - nobody above us must go on as if we were the fork server
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
        """Reap who has died, adopt whom they leave, and say which families have gone.

        What a dead process leaves is our child before it can be reaped itself. So whoever is seen before a round of
        reaping is of a family that lost somebody up to that round; the last round finds nobody dead, which tells that
        there is nobody left to be seen. Where several families lost somebody meanwhile, nobody can say whose it is:
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
                family.orphans.add(orphan)

    def _look_after(self, family: Family) -> None:
        """A family lost somebody: say so when nobody is left, and have the orphans end once the worker has.

        While it lives, orphans that are counted among its family are none that it left, but somebody else's perhaps.
        """
        if family.status is None:
            return
        if not family.orphans:
            del self.families[family.number]
            for lease in family.leases:
                os.close(lease)
            self._post(Kind.GONE, GONE.pack(family.number, family.pid, family.status))
        elif family.killing_since is None:
            self._ask_to_end(family, family.grace)

    def _forget(self, pid: int, status: int) -> frozenset[Family]:
        """Take a dead process out of the families that it may be of; returns these."""
        families = self.owners.pop(pid, frozenset())
        for family in families:
            if pid == family.pid:
                family.status = status
            family.orphans.discard(pid)
        return families

    def _ask_to_end(self, family: Family, grace: float) -> None:
        """Ask every process of a family to end, and set the time at which it is not asked any more."""
        deadline = time.monotonic() + grace
        if family.deadline is None and grace > 0:
            members = family.processes(self.pid)
            signal_each(members, signal.SIGTERM)
            signal_each(members, signal.SIGCONT)  # a stopped process hears only once it goes on
        family.deadline = deadline if family.deadline is None else min(deadline, family.deadline)

    def _press(self) -> None:
        """Kill families whose time is up, again and again: a process may fork while it is being killed."""
        now = time.monotonic()
        for family in list(self.families.values()):
            if family.deadline is None or family.deadline > now:
                continue
            if family.killing_since is None:
                family.killing_since = now
            family.deadline = now + KILL_EVERY
            members = family.processes(self.pid)
            signal_each(members, signal.SIGKILL)
            if now - family.killing_since > STUCK_AFTER and not family.told_stuck:
                family.told_stuck = True
                self._post(Kind.STUCK, NUMBER.pack(family.number) + stuck(members, STUCK_AFTER).encode())

    def _close(self) -> None:
        """The caller has gone: end everything."""
        if self.closing:
            return
        self.closing = True
        self.poll.unregister(self.control.fileno())
        self.poll.unregister(self.caller)
        for family in self.families.values():
            self._ask_to_end(family, self.grace)

    def _patience(self) -> float | None:
        deadlines = [family.deadline for family in self.families.values() if family.deadline is not None]
        return min(max(0.0, min(deadlines) - time.monotonic()), LONGEST_SECONDS) if deadlines else None

    def _post(self, kind: Kind, body: bytes) -> None:
        self.outbox.append((kind, body))
        self._flush()

    def _flush(self) -> None:
        """Tell the caller what it can take now. It may be stopped: never wait for it."""
        try:
            while self.outbox and not self.closing:
                send(self.control, *self.outbox[0], wait=False)
                self.outbox.popleft()
            writable = 0
        except BlockingIOError:
            writable = select.EPOLLOUT
        except OSError:
            self._close()
            return
        if not self.closing:
            self.poll.modify(self.control.fileno(), select.EPOLLIN | writable)

    def _threads(self) -> str:
        names = os.listdir("/proc/self/task")
        return "" if len(names) == 1 else self._unfit()

    def _unfit(self) -> str:
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


def _end_threads() -> None:
    """Have libraries end the threads that they started when they were imported.

    What is made to be forked ends its threads before each fork and starts them again where they are needed: OpenBLAS
    does, by ``pthread_atfork`` (its function ``openblas_fork_handler``). So a fork of which nothing is wanted leaves
    this process with one thread, unless a library does not know of forks.
    """
    try:
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


def _preload(modules: list[str]) -> str:
    """Import modules for all workers; returns why that failed, or an empty string."""
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:  # noqa: BLE001 - whatever a module does on import, the caller should hear of it
            return f"the module {module!r} cannot be preloaded: {type(error).__name__}: {error}"
    return ""
