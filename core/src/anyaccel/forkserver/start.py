"""Start the process of a fork server.

Everybody on the machine can read a command line, and the caller's arguments and module path may hold what others must
not see. So the command line is the same for everybody, and what the interpreter needs comes as a file without a name,
which is its standard input.

It takes an interpreter as long to start as the caller to import what it needs meanwhile. So nothing is imported here
that takes long: :mod:`_socket` is what :mod:`socket` makes its own of, and :mod:`subprocess` would be the largest part.
"""

from __future__ import annotations

import _socket
import fcntl
import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

CONTROL = 3
"""Descriptor of the server's end of the socket between it and its caller, of the kind ``SOCK_SEQPACKET``."""
PACKET_LIMIT = 1 << 15
"""Bytes of one message."""
SERVER = "anyaccel.forkserver.server"
BOOTSTRAP = (
    "import os;p='/proc/self/fd';"
    "o=os.listdir(p)if os.path.isdir(p)else range(os.sysconf('SC_OPEN_MAX'));"
    f"[os.closerange(int(d),int(d)+1)for d in o if int(d)>{CONTROL}];"
    "import gc,marshal,site,sys;gc.disable();sys.flags.no_site and site.main();"
    "path,module,config=marshal.load(sys.stdin.buffer);"
    "os.ftruncate(0,0);sys.path[:]=path;__import__(module);sys.modules[module].main(config)"
)
"""What it runs first. It closes what the caller has opened for its own children, one by one, since the limit may be a
thousand million and not every system closes a range at once. What is imported at start is no garbage, so the collector
does not look for it."""

_forks = [False]


def allow_fork() -> None:
    """Say that this process is a command of ours that has just begun: the first server may be a fork of it.

    It has no thread, no device and nothing of a user's yet. So a fork is as good as a fresh interpreter, and is there
    at once.
    """
    _forks[0] = None not in (sys.stdout, sys.stderr) and not (sys.gettrace() or sys.getprofile())


def start_server(
    config: Mapping[str, Any], *, env: Mapping[str, str] | None = None, apart: bool = False
) -> tuple[int, int]:
    """Start an interpreter with the caller's module path that runs a fork server.

    Args:
        config: Plain data for :func:`anyaccel.forkserver.server.main`.
        env: Its environment; that of the caller when None.
        apart: Whether what it prints is lost, and it closes what it has inherited before the code of the site's
            packages runs, too. It says so to all Python processes that it starts, by its flags, so it must start none
            for others.

    Returns:
        Its process id, and the descriptor of our end of the socket between us.

    Raises:
        OSError: When it cannot be started.
    """
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        if apart and _forks[0] and len(os.listdir("/proc/self/task")) == 1:
            _forks[0] = False
            pid = _fork(config, theirs.detach())
        else:
            pid = _spawn(config, theirs.detach(), env, apart=apart)
        return pid, fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, CONTROL)
    finally:
        ours.close()


def _spawn(config: Mapping[str, Any], control: int, env: Mapping[str, str] | None, *, apart: bool) -> int:
    opened: list[int] = []

    def out_of_the_way(descriptor: int) -> int:
        """Move a descriptor above those that it is to become: the caller may have closed its streams."""
        opened.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, CONTROL + 1))
        os.close(descriptor)
        return opened[-1]

    try:
        actions = [(os.POSIX_SPAWN_DUP2, out_of_the_way(control), CONTROL)]
        if not sys.executable:
            raise OSError("there is no Python interpreter to start: sys.executable names none")
        path: list[object] = [*sys.path]
        words = marshal.dumps([[str.__str__(entry) for entry in path if isinstance(entry, str)], SERVER, config])
        told = out_of_the_way(os.memfd_create("told"))
        with open(told, "wb", closefd=False) as file:
            file.write(words)
        os.lseek(told, 0, os.SEEK_SET)
        actions.append((os.POSIX_SPAWN_DUP2, told, 0))
        if apart:
            null = out_of_the_way(os.open(os.devnull, os.O_WRONLY))
            actions += [(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
        # -I: the caller's module path is passed on as it is, so nothing else should add to it.
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", *(["-S"] if apart else []), "-c", BOOTSTRAP],
            os.environ if env is None else env,
            file_actions=actions,
            setsid=True,  # Ctrl-C at the terminal is the caller's business
        )
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _fork(config: Mapping[str, Any], control: int) -> int:
    try:
        pid = os.fork()
        if pid == 0:
            _become_server(config, control)
        return pid
    finally:
        os.close(control)


def _become_server(config: Mapping[str, Any], control: int) -> None:
    """What the fork does; never returns."""
    try:
        import gc

        gc.disable()
        os.setsid()
        control = fcntl.fcntl(control, fcntl.F_DUPFD, CONTROL + 1)  # the caller may have closed its streams
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.dup2(control, CONTROL)
        os.closerange(CONTROL + 1, os.sysconf("SC_OPEN_MAX"))
        __import__(SERVER)
        sys.modules[SERVER].main(config)
    finally:
        os._exit(70)
