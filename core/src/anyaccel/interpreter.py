"""Start a fresh Python interpreter that runs a module of ours.

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
"""Descriptor of the interpreter's end of the socket between it and its caller."""
BOOTSTRAP = (
    "import os;p='/proc/self/fd';"
    "o=os.listdir(p)if os.path.isdir(p)else range(os.sysconf('SC_OPEN_MAX'));"
    f"[os.closerange(int(d),int(d)+1)for d in o if int(d)>{CONTROL}];"
    "import gc,marshal,site,sys;gc.disable();sys.flags.no_site and site.main();"
    "path,module,config=marshal.load(sys.stdin.buffer);"
    "os.ftruncate(0,0);sys.path[:]=path;__import__(module);sys.modules[module].main(config)"
)
"""What it runs first. It closes what the caller has opened for its own children, one by one, since the limit may be a
thousand million and not every system closes a range at once. What is imported at start is no garbage, so nobody looks
for it."""


class Interpreter:
    """A fresh interpreter, which is a child of this process.

    Attributes:
        pid: Its process id.
        control: Descriptor of our end of the socket between us, of the kind ``SOCK_SEQPACKET``. It is the caller's.
    """

    def __init__(self, pid: int, control: int) -> None:
        self.pid = pid
        self.control = control
        self._status: int | None = None

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until it has ended, without a limit when None.

        Returns:
            Its exit status, negative for the number of a signal; None when it has not ended. It is 0 where somebody
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

    def _ends_within(self, seconds: float) -> bool:
        from anyaccel.linux.process import wait_for_end  # late: most interpreters outlive what started them

        return wait_for_end([self.pid], seconds)

    def kill(self) -> None:
        """Kill it."""
        if self.wait(0) is None:
            import signal

            os.kill(self.pid, signal.SIGKILL)


def start(
    module: str, config: Any, *, env: Mapping[str, str] | None = None, quiet: bool = False, first: bool = False
) -> Interpreter:
    """Start an interpreter with the caller's module path that calls the function ``main`` of a module.

    Args:
        module: Name of the module. It finds the socket at the descriptor :data:`CONTROL`, and its collector disabled.
        config: Plain data that ``main`` is called with.
        env: Its environment; that of the caller when None.
        quiet: Whether what it prints is lost; otherwise it prints where the caller does.
        first: Whether it closes what it has inherited before the code of the site's packages runs, too. It says so to
            all Python processes that it starts, by its flags, so it must start none for others.

    Raises:
        OSError: When it cannot be started.
    """
    if not sys.executable:
        raise OSError("there is no Python interpreter to start: sys.executable names none")
    path: list[object] = [*sys.path]
    words = marshal.dumps([[str.__str__(entry) for entry in path if isinstance(entry, str)], module, config])
    opened: list[int] = []

    def out_of_the_way(descriptor: int) -> int:
        """Move a descriptor above those that it is to become: the caller may have closed its streams."""
        opened.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, CONTROL + 1))
        os.close(descriptor)
        return opened[-1]

    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, out_of_the_way(theirs.detach()), CONTROL)]
        told = out_of_the_way(os.memfd_create("told"))
        with open(told, "wb", closefd=False) as file:
            file.write(words)
        os.lseek(told, 0, os.SEEK_SET)
        actions.append((os.POSIX_SPAWN_DUP2, told, 0))
        if quiet:
            null = out_of_the_way(os.open(os.devnull, os.O_WRONLY))
            actions += [(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
        # -I: the caller's module path is passed on as it is, so nothing else should add to it.
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", *(["-S"] if first else []), "-c", BOOTSTRAP],
            os.environ if env is None else env,
            file_actions=actions,
            setsid=True,  # Ctrl-C at the terminal is the caller's business
        )
        return Interpreter(pid, fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, CONTROL))
    finally:
        ours.close()
        for descriptor in opened:
            os.close(descriptor)
