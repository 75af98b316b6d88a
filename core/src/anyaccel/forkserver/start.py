"""Start the process of a fork server.

Every user of the machine can read a command line, and the caller's arguments and module path may be private. So the
command line is constant, and the interpreter reads its data from an unnamed file at its standard input.

The interpreter starts while the caller imports other modules. So this module imports little: :mod:`_socket` in place
of :mod:`socket`, and not :mod:`subprocess`, which would be the largest part.
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
"""Most bytes of one message."""
SERVER = "anyaccel.forkserver.server"
BOOTSTRAP = f"""
import os
os.closerange({CONTROL} + 1, max(map(int, os.listdir("/proc/self/fd"))) + 1)
import gc, marshal, site, sys
gc.disable()
path, prefixes, module, config = marshal.load(sys.stdin.buffer)
os.ftruncate(0, 0)
if sys.flags.no_site and prefixes:
    sys.prefix, sys.exec_prefix = site.PREFIXES[:] = prefixes
    site.setquit()
    site.setcopyright()
    site.sethelper()
elif sys.flags.no_site:
    site.main()
sys.path[:] = path
__import__(module)
sys.modules[module].main(config)
"""
"""First code of the interpreter. It closes inherited descriptors up to the highest that is open, not up to their limit,
which may be a thousand million: not every system closes a range at once. The garbage collector is off, since imported
modules are no garbage. ``site`` would search the module path, which is passed on as it is, and run the ``.pth`` files
again: 5 to 9 ms."""
_FINDERS = {"BuiltinImporter", "FrozenImporter", "PathFinder", "DistutilsMetaFinder"}
"""Finders that need no ``site``: those of the interpreter, and the one that prefers the distutils of setuptools."""
_PATH_HOOKS = 2
"""Number of the interpreter's own hooks for entries of the module path: zip files and directories."""

_forks = [False]


def allow_fork() -> None:
    """Declare this process to be a fresh command of ours: its next fork server may be a fork of this process.

    Only a server whose output is discarded is forked, and only while this process has one thread. The call has no
    effect under a tracer or a profiler, and without standard output or error.

    The process has no thread, no open device and no code of the user yet. So a fork is as good as a fresh interpreter,
    and 14 ms faster.
    """
    _forks[0] = None not in (sys.stdout, sys.stderr) and not (sys.gettrace() or sys.getprofile())


def start_server(
    config: Mapping[str, Any], *, env: Mapping[str, str] | None = None, apart: bool = False
) -> tuple[int, int]:
    """Start a fork server with the caller's module path, in a new interpreter or a fork, and return before it is ready.

    Args:
        config: Plain data for :func:`anyaccel.forkserver.server.main`.
        env: Environment of the server; the environment of the caller when None.
        apart: Whether to discard its output, and to close inherited descriptors before ``site`` runs. Python passes the
            flag ``-S`` on to its child processes, so such a server must start no Python of a user.

    Returns:
        Process id of the server, and the descriptor of our end of the socket.

    Raises:
        OSError: When the server cannot be started.
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
    """Start the server in a new interpreter, in a session of its own; return its process id.

    Args:
        config: As for :func:`start_server`, like the last two.
        control: The server's end of the socket; closed here in any case.
        env: The environment.
        apart: Whether to discard the output.

    Raises:
        OSError: When there is no interpreter, or it cannot be started.
    """
    opened: list[int] = []

    def out_of_the_way(descriptor: int) -> int:
        """Move a descriptor above 3, since the caller may have closed its streams; return the new number.

        The old number is closed; the new one is closed at the end of :func:`_spawn`.
        """
        opened.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, CONTROL + 1))
        os.close(descriptor)
        return opened[-1]

    try:
        actions = [(os.POSIX_SPAWN_DUP2, out_of_the_way(control), CONTROL)]
        if not sys.executable:
            raise OSError("there is no Python interpreter to start: sys.executable names none")
        path: list[object] = [*sys.path]
        entries = [str.__str__(entry) for entry in path if isinstance(entry, str)]
        words = marshal.dumps([entries, _prefixes(), SERVER, config])
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
            setsid=True,  # Ctrl-C at the terminal must reach the caller alone
        )
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _prefixes() -> list[str] | None:
    """Return the prefixes of this interpreter, or None where ``site`` has installed finders of modules.

    A finder of an editable installation, or of a tool for import hooks, must be installed in the server as well: only
    ``site`` can do so.
    """
    found = {getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path}
    return [sys.prefix, sys.exec_prefix] if found <= _FINDERS and len(sys.path_hooks) <= _PATH_HOOKS else None


def _fork(config: Mapping[str, Any], control: int) -> int:
    """Start the server in a fork of this process; return its process id, and close ``control`` here in any case.

    Raises:
        OSError: When the kernel refuses to fork.
    """
    try:
        pid = os.fork()
        if pid == 0:
            _become_server(config, control)
        return pid
    finally:
        os.close(control)


def _become_server(config: Mapping[str, Any], control: int) -> None:
    """Run the server in the fork, with discarded output and without inherited descriptors, and exit.

    The exit status is 70 if the server fails; an exception is not printed.
    """
    try:
        import gc

        gc.disable()
        os.setsid()
        control = fcntl.fcntl(control, fcntl.F_DUPFD, CONTROL + 1)  # the caller may have closed its streams
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.dup2(control, CONTROL)
        os.closerange(CONTROL + 1, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        __import__(SERVER)
        sys.modules[SERVER].main(config)
    finally:
        os._exit(70)
