"""Processes as the kernel knows them: a process id alone is only a label, since it is given out again."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from _thread import get_native_id
from collections.abc import Callable, Container, Iterable, Iterator
from functools import cache

from anyaccel.linux import system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

_EXITING = 0x4
"""PF_EXITING of the flags in ``/proc/PID/stat``, in all versions of the kernel."""

_ME: tuple[int, int] | None = None

UNSEEN = (FileNotFoundError, ProcessLookupError, PermissionError)
"""What the kernel answers of what is not there, has ended, or is closed to us. Anything else is no answer: who takes it
for one gives out what is held."""
_LONGEST_POLL = 86_400.0
"""Seconds; ``poll(2)`` takes 24 days at most."""
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say nothing of what was asked for: the one who asks has no descriptor left, or the kernel no memory."""


def exists(pid: int) -> bool:
    """Whether there is a process of this number here: the cheapest question; the number may be another's by now."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def me() -> tuple[int, int]:
    """Process id and start time of this process."""
    global _ME  # noqa: PLW0603 -- asked for by every lease, and reading /proc is dear
    pid = os.getpid()
    if _ME is None or _ME[0] != pid or not _ME[1]:
        _ME = (pid, start_time(pid) or 0)
    return _ME


def start_time(pid: int) -> int | None:
    """When a process was started, in ticks since the boot; None when there is none, or none that we may see.

    The number is the same for all who ask, also in a time namespace, where the kernel shifts what it says.
    """
    fields = stat_fields(pid)
    return int(fields[19]) - _ahead("boottime") * os.sysconf("SC_CLK_TCK") // 10**9 if fields else None


def started_at(pid: int, start: int) -> bool:
    """Whether there is a process of this id that was started then."""
    return start_time(pid) == start


def monotonic_ns() -> int:
    """The machine's monotonic clock in nanoseconds: the same for all who ask, also in a time namespace."""
    return time.monotonic_ns() - _ahead("monotonic")


def boot_seconds() -> float:
    """Seconds since the boot, those asleep among them: the same for all who ask, also in a time namespace."""
    return (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - _ahead("boottime")) / 1e9


def state(pid: int) -> str:
    """Letter of a process's state: ``R``, ``S``, ``D``, ``T`` for stopped, ``Z`` ...; empty when unknown."""
    fields = stat_fields(pid)
    return fields[0] if fields else ""


def ending(pid: int) -> bool:
    """Whether a process has begun to leave the kernel, or is gone: it runs no program any more."""
    fields = stat_fields(pid)
    return not fields or bool(int(fields[6]) & _EXITING)


def waits_in(pid: int) -> str:
    """Name of the kernel function that a process waits in; empty when it does not or we may not know."""
    try:
        with open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:
            name = file.read(128)
    except OSError:
        return ""
    return "" if name == "0" else name


def gone(pid: int, start: int) -> bool:
    """Whether a process has left the kernel, with all of its threads and all that it had open.

    Only the kernel's own answer counts: ``/proc`` calls a process a zombie as soon as its first thread has ended. In
    doubt it is not gone.

    Args:
        pid: Its id.
        start: Its start time; 0 when unknown.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # forbidden, the number is that of a thread, or no descriptor is to be had
        found = start_time(pid)
        return not exists(pid) or bool(start and found is not None and found != start)
    try:
        found = start_time(pid)
        return bool(start and found is not None and found != start) or ended(descriptor)
    finally:
        os.close(descriptor)


def ended(pidfd: int) -> bool:
    """Whether the process of a process file descriptor has left the kernel."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def wait_for_end(pids: Iterable[int], seconds: float) -> bool:
    """Wait until one of some processes has ended, at most for some seconds.

    Returns:
        Whether one has.
    """
    poll, descriptors = select.poll(), []
    until = time.monotonic() + seconds
    try:
        for pid in pids:
            try:
                descriptors.append(os.pidfd_open(pid))
            except ProcessLookupError:
                return True
            poll.register(descriptors[-1], select.POLLIN)
        while not poll.poll(max(0.0, min(until - time.monotonic(), _LONGEST_POLL)) * 1000):
            if time.monotonic() >= until:
                return False
        return True
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def describe_end(status: int | None) -> str:
    """Say how a process ended.

    Args:
        status: Its exit status, or the negative number of a signal; None where that is unknown.
    """
    if status is None:
        return "ended"
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"


def send(pid: int, number: int, still: Callable[[], bool]) -> bool:
    """Send a signal to a process, and not to one that was given its id since it was looked at.

    Args:
        pid: Its id.
        number: The signal.
        still: Asked once no other process can get the id: whether it is the process that was meant.

    Returns:
        Whether it was sent.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not still():
            return False
        signal.pidfd_send_signal(descriptor, number)
    except OSError:  # it has ended, or has become another user's
        return False
    finally:
        os.close(descriptor)
    return True


def die_with_parent(parent: int) -> None:
    """Have this process killed when the one that forked it ends; end now if it has ended already."""
    system.prctl(system.SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def live_on() -> None:
    """Take :func:`die_with_parent` back."""
    system.prctl(system.SET_PARENT_DEATH_SIGNAL, 0)


def adopt_orphans(*, adopt: bool = True) -> None:
    """Become the parent of descendants whose own parent ends, so that none of them escapes; or leave them to others."""
    system.prctl(system.SET_CHILD_SUBREAPER, int(adopt))


def reap(child: int) -> int:
    """Wait for a child; return its exit status as a shell has it: 128 and the number of the signal that ended it."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 128 - status


def reap_children(spared: Container[int] = ()) -> None:
    """Reap the children of this process that have ended, such as orphans that it has adopted.

    Args:
        spared: Those that are reaped elsewhere.
    """
    for child in children(os.getpid()):
        if child not in spared:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def set_name(name: str) -> None:
    """Be called so, by at most 15 characters, in lists of processes."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(name)


def user(pid: int) -> int | None:
    """Real user id of a process; None when it has gone or cannot be seen."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("Uid:")), None)
    except OSError:
        return None


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False when it has gone or cannot be seen."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
    except OSError:
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; None when it has gone or cannot be seen."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else None


def group_of(pid: int) -> int:
    """Return the process group of a process; 0 when it has gone."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def is_ancestor(pid: int, start: int) -> bool:
    """Whether a process is one that this process descends from."""
    return pid in _ancestors(os.getpid()) and start_time(pid) == start


def descends(pid: int) -> bool:
    """Return whether a process descends from this one, by the parents that the kernel names now."""
    return os.getpid() in _ancestors(pid)


def _ancestors(pid: int) -> Iterator[int]:
    parent: int | None = pid
    while parent and parent > 1:
        parent = parent_of(parent)
        if parent:
            yield parent


def children(pid: int) -> list[int]:
    """Return the living and the dead but unreaped children of a process; none when it has gone itself."""
    if not _lists_children():
        return [other for other in map(int, filter(str.isdecimal, os.listdir("/proc"))) if parent_of(other) == pid]
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found.extend(map(int, file.read().split()))
    return found


def _lists_children() -> bool:
    """Return whether the kernel was built with lists of children (CONFIG_PROC_CHILDREN)."""
    return os.path.exists(f"/proc/self/task/{get_native_id()}/children")


def threads() -> list[str]:
    """Return the names of the threads of this process, the first one first."""
    found = []
    for thread in sorted(map(int, os.listdir("/proc/self/task"))):
        with open(f"/proc/self/task/{thread}/comm") as file:
            found.append(file.read().strip())
    return found


def may_signal(pid: int) -> bool:
    """Return whether the kernel lets this process signal another one, or that one has gone."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True


@cache
def pid_namespace() -> int:
    """Number of the namespace in which process ids of this process mean something; 0 when unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


@cache
def _ahead(clock: str) -> int:
    """Nanoseconds by which a clock of this process's time namespace is ahead of the machine's: ``time_namespaces(7)``.

    Args:
        clock: ``monotonic`` or ``boottime``.
    """
    try:
        with open("/proc/self/timens_offsets", encoding="ascii") as file:
            offsets = {name: (int(seconds), int(rest)) for name, seconds, rest in map(str.split, file)}
        # The file tells of the namespace of our children, which is ours unless we have just asked for a new one.
        if os.readlink("/proc/self/ns/time") == os.readlink("/proc/self/ns/time_for_children"):
            seconds, nanoseconds = offsets[clock]
            return seconds * 10**9 + nanoseconds
    except (OSError, ValueError, KeyError):  # a kernel without time namespaces
        pass
    return 0


def stat_fields(pid: int) -> list[str]:
    """Fields of ``/proc/<pid>/stat`` from the third on; the second may contain anything."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode("ascii").split()
    except OSError:
        return []


def call_apart(function: Callable[[], T]) -> T:
    """Call a function in a thread of its own, with which ends what the function does to its thread for good."""
    import threading

    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - it is raised below, in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="anyaccel-apart")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
