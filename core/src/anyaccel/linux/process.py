"""Processes of the kernel. A process id alone is only a label, since the kernel assigns it again."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from _thread import get_native_id
from collections.abc import Container, Iterable, Iterator
from functools import cache

from anyaccel.linux import system
from anyaccel.linux.system import signal

_EXITING = 0x4
"""PF_EXITING of the flags in ``/proc/PID/stat``, in all versions of the kernel."""

_ME: tuple[int, int] | None = None

UNSEEN = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Errors of the kernel for a process that is gone or closed to us. No other error says so: a caller that took EMFILE
for "gone" would give out devices that are in use."""
_LONGEST_POLL = 86_400.0
"""Seconds; ``poll(2)`` takes 24 days at most."""
_ALL_USERS = 1 << 32
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors about the caller, not about the target: no descriptor is left, or the kernel has no memory."""


def exists(pid: int) -> bool:
    """Return whether a process with this id exists, of any user, zombies included; False for 0 and below.

    Cheapest of all checks; the id may have been reused. A number too large for an id counts as existing.
    """
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # a process of another user; a number that no kernel gives
        return True
    return True


def me() -> tuple[int, int]:
    """Return process id and start time of this process; the time is 0 if unknown.

    Both are kept from the first call, and read anew in a forked child.
    """
    global _ME  # noqa: PLW0603 -- asked for by every lease, and reading /proc is dear
    pid = os.getpid()
    if _ME is None or _ME[0] != pid or not _ME[1]:
        _ME = (pid, start_time("self") or 0)  # by number, the /proc of an outer pid namespace shows another process
    return _ME


def sees_itself() -> bool:
    """Return whether ``/proc`` shows this process by its id.

    It does not in a pid namespace without a ``/proc`` of its own: there, ids in ``/proc`` are of other processes.
    """
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except UNSEEN:
        return False


def start_time(pid: int | str) -> int | None:
    """Return the start of a process in ticks since the boot; None for a process that is gone or hidden.

    Every process gets the same number, also in a time namespace, where the kernel shifts its clocks.

    Args:
        pid: Process id, or ``self`` for this process.
    """
    fields = stat_fields(pid)
    return int(fields[19]) - _ahead("boottime") * os.sysconf("SC_CLK_TCK") // 10**9 if fields else None


def started_at(pid: int, start: int) -> bool:
    """Return whether a process with this id and start time exists, zombies included; False for a hidden process."""
    return start_time(pid) == start


def monotonic_ns() -> int:
    """Return the machine's monotonic clock in nanoseconds, without the shift of a time namespace."""
    return time.monotonic_ns() - _ahead("monotonic")


def boot_seconds() -> float:
    """Return the seconds since the boot, suspended time included, without the shift of a time namespace."""
    return (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - _ahead("boottime")) / 1e9


def state(pid: int) -> str:
    """Return the letter of a process's state: ``R``, ``S``, ``D``, ``T`` for stopped, ``Z`` ...; empty when unknown."""
    fields = stat_fields(pid)
    return fields[0] if fields else ""


def ending(pid: int) -> bool:
    """Return whether a process runs no program any more: it is exiting, or gone. True for a hidden process as well."""
    fields = stat_fields(pid)
    return not fields or bool(int(fields[6]) & _EXITING)


def waits_in(pid: int) -> str:
    """Return the kernel function in which a process waits; empty when none, or unknown."""
    try:
        with open(f"/proc/{pid}/wchan", encoding="utf-8", errors="replace") as file:
            name = file.read(128)
    except OSError:
        return ""
    return "" if name == "0" else name


def gone(pid: int, start: int) -> bool:
    """Return whether a process has exited, with all threads and open files; reaped or not, and of any user.

    In doubt the process is not gone.

    Args:
        pid: Process id.
        start: Start time; 0 when unknown.
    """
    return bool(start and start_time(pid) not in (None, start)) or exited(pid)


def exited(pid: int) -> bool:
    """Return whether no process with this id runs any more: it has exited with all threads, reaped or not.

    The id may have been reused: then the other process counts. In doubt a process runs. Only the pidfd tells: ``/proc``
    calls a process a zombie as soon as its first thread has ended.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # forbidden, the number is the id of a thread, or no descriptor is left
        return not exists(pid)
    try:
        return is_readable(descriptor)  # once the process has exited with all threads, reaped or not
    finally:
        os.close(descriptor)


def is_readable(descriptor: int) -> bool:
    """Return whether a read would not block, also at the end of a pipe; does not wait."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def wait_for_end(pids: Iterable[int], seconds: float) -> bool:
    """Wait until any of several processes ends, or the time is up; nothing is reaped.

    Args:
        pids: The processes; a process that is gone has ended. Without processes, the whole time passes.
        seconds: The time.

    Returns:
        Whether a process has ended.

    Raises:
        OSError: When a process cannot be watched, such as without a free descriptor.
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
    """Return how a process ended, as a clause.

    Args:
        status: Exit status, or the negative number of a signal; None when unknown.
    """
    if status is None:
        return "ended"
    if status >= 0:
        return f"ended with exit status {status}"
    from signal import Signals

    try:
        return f"was killed by {Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"


def send(pid: int, start: int, number: int) -> bool:
    """Send a signal to a process, unless its id was reused in the meantime.

    Args:
        pid: Process id.
        start: Start time of the process.
        number: The signal.

    Returns:
        Whether the signal was sent; False after any error of the kernel, such as a missing permission.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not started_at(pid, start):  # asked once the descriptor keeps the id from being reused
            return False
        signal.pidfd_send_signal(descriptor, number)
    except OSError:  # it has ended, or has become another user's
        return False
    finally:
        os.close(descriptor)
    return True


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process with the thread that forked it; exit with 1 if the parent has ended already.

    Args:
        parent: Process id of the parent.

    Raises:
        OSError: When the kernel refuses.
    """
    system.prctl(system.SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def live_on() -> None:
    """Undo :func:`die_with_parent`: this process survives its parent.

    Raises:
        OSError: When the kernel refuses.
    """
    system.prctl(system.SET_PARENT_DEATH_SIGNAL, 0)


def adopt_orphans(*, adopt: bool = True) -> None:
    """Become the parent of descendants that are orphaned later, so that none escapes; or stop doing so.

    Args:
        adopt: False to leave later orphans to the next reaper above; adopted orphans stay children.

    Raises:
        OSError: When the kernel refuses.
    """
    system.prctl(system.SET_CHILD_SUBREAPER, int(adopt))


def reap(child: int) -> int:
    """Wait for a child; return the exit status as a shell does: 128 plus the signal number after a signal.

    Raises:
        ChildProcessError: When this process has no such child.
    """
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 128 - status


def reap_children(spared: Container[int] = ()) -> None:
    """Reap the children of this process that have ended, such as adopted orphans, and drop their exit statuses.

    Does not wait.

    Args:
        spared: Children that are reaped elsewhere.
    """
    for child in children(os.getpid()):
        if child not in spared:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def set_name(name: str) -> None:
    """Set the name of this process in process lists, at most 15 characters; errors are ignored."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="utf-8") as file:
        file.write(name)


def read_name(pid: int) -> str:
    """Return the name of the program of a process; empty when it cannot be read. A program may name itself anything."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read(64).removesuffix("\n")
    except OSError:
        return ""


def user(pid: int) -> int | None:
    """Return the real user id of a process; None for a process that is gone or hidden."""
    found = _status_field(pid, "Uid:")
    return int(found) if found else None


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal; False for a process that is gone or hidden."""
    return bool(int(_status_field(pid, "SigCgt:") or "0", 16) >> (number - 1) & 1)


def _status_field(pid: int, name: str) -> str:
    """Return the first word of a line of ``/proc/PID/status``; empty for a process that is gone or hidden."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return next((line.split()[1] for line in file if line.startswith(name)), "")
    except OSError:
        return ""


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; 0 if outside of our pid namespace; None for a process that is gone or hidden."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else None


def group_of(pid: int) -> int:
    """Return the process group of a process; 0 for a process that is gone."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def is_ancestor(pid: int, start: int) -> bool:
    """Return whether this process descends from another, given by id and start time; False for this process."""
    return pid in _ancestors(os.getpid()) and start_time(pid) == start


def descends(pid: int) -> bool:
    """Return whether a process descends from this process, by the present parents; False for this process itself.

    A process that an ancestor outside of this process has adopted does not count.
    """
    return os.getpid() in _ancestors(pid)


def _ancestors(pid: int) -> Iterator[int]:
    """Yield the ancestors of a process, the parent first; ends at process 1, or where the kernel hides a parent."""
    parent: int | None = pid
    while parent and parent > 1:
        parent = parent_of(parent)
        if parent:
            yield parent


def children(pid: int) -> list[int]:
    """Return the children of a process, zombies included; none for a process that is gone."""
    if not os.path.exists(f"/proc/self/task/{get_native_id()}/children"):  # without CONFIG_PROC_CHILDREN
        return [other for other in map(int, filter(str.isdecimal, os.listdir("/proc"))) if parent_of(other) == pid]
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found.extend(map(int, file.read().split()))
    return found


def threads() -> list[str]:
    """Return the names of the threads of this process, sorted by thread id.

    Raises:
        OSError: When a thread ends meanwhile.
    """
    found = []
    for thread in sorted(map(int, os.listdir("/proc/self/task"))):
        with open(f"/proc/self/task/{thread}/comm") as file:
            found.append(file.read().strip())
    return found


def may_signal(pid: int) -> bool:
    """Return whether the kernel lets this process signal a process; True as well for a process that is gone."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True


@cache
def pid_namespace() -> int:
    """Return the number of the pid namespace of this process; 0 when unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def find_outer_user(uid: int) -> int:
    """Return the number of a user outside of our user namespace, which is the same for processes inside and outside.

    See ``user_namespaces(7)``.

    Args:
        uid: The number inside; without a mapping, the number stays the same.
    """
    for inside, start, count in _users():
        if inside <= uid < inside + count:
            return start + uid - inside
    return uid


def is_user_unmapped(uid: int) -> bool:
    """Return whether a file owner that the kernel shows may stand for any user without a mapping.

    Args:
        uid: The owner that the kernel shows.
    """
    return uid == _unmapped_user() and sum(count for _, _, count in _users()) < _ALL_USERS - 1


@cache
def _users() -> tuple[tuple[int, int, int], ...]:
    """Return the mapped ranges of users: first number inside, first number outside, count.

    If the kernel's map cannot be read, every number stands for itself.
    """
    try:
        with open("/proc/self/uid_map", encoding="utf-8") as file:
            found = [tuple(map(int, line.split())) for line in file]
    except (*UNSEEN, ValueError):
        found = []
    return tuple((first, second, count) for first, second, count in found) or ((0, 0, _ALL_USERS - 1),)


@cache
def _unmapped_user() -> int:
    """Return the number that the kernel shows for users without a mapping; 65534 if unknown."""
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="utf-8") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65534


@cache
def _ahead(clock: str) -> int:
    """Return the nanoseconds by which a clock of our time namespace is ahead of the machine: ``time_namespaces(7)``.

    Args:
        clock: ``monotonic`` or ``boottime``.
    """
    try:
        with open("/proc/self/timens_offsets", encoding="utf-8") as file:
            offsets = {name: (int(seconds), int(rest)) for name, seconds, rest in map(str.split, file)}
        # The file describes the namespace of our children, which is ours unless unshare(2) has just made a new one.
        if os.readlink("/proc/self/ns/time") == os.readlink("/proc/self/ns/time_for_children"):
            seconds, nanoseconds = offsets[clock]
            return seconds * 10**9 + nanoseconds
    except (OSError, ValueError, KeyError):  # a kernel without time namespaces
        pass
    return 0


def stat_fields(pid: int | str) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` from the third on; empty for a process that is gone or hidden.

    ``self`` stands for this process. The second field, the name, may contain any text.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode("ascii").split()
    except OSError:
        return []
