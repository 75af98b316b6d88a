"""The program ``anyaccel``: how its process starts and ends."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Sequence
    from typing import NoReturn
else:
    import _signal as signal  # without enumerations, whose modules '--version' does not import

ALLOCATIONS = 50_000
"""Allocations between two runs of the garbage collector. Imported modules are never garbage; a run after each 700, the
default of Python, takes a tenth of the processor time of ``anyaccel`` on a machine of eight devices.
"""
EARLY = {"--machine", "status", "run", "hold", "sweep", "select", "why", "env", "doctor"}
"""First words of command lines that ask the vendors of a machine for devices; others may become another program."""


def program() -> NoReturn:
    """Run the command line of this process, and end the process.

    The interpreter is not finalized unless threads, exit handlers, a tracer or a profiler depend on that: finalizing
    takes a fifth of the time of an interpreter's start. SIGCHLD gets its default action: a parent may have it ignored,
    which exec keeps, and then no exit status of a child can be read.

    SIGINT has its default action but while a command runs: Ctrl-C during an import would print a traceback. After an
    interrupted command this process ends by SIGINT, not with status 130: a loop of a shell would go on after that.
    """
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # ignored in a shell's background
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    import gc

    from anyaccel.forkserver.start import allow_fork

    def begin() -> None:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gc.set_threshold(ALLOCATIONS)
    allow_fork()
    status: int | None = None
    try:
        status = _run(sys.argv[1:], begin)
        if interruptible:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends this process at once
    _end(status)


def _end(status: int | None) -> NoReturn:
    """End this process with an exit status, or by SIGINT where that is None."""
    import atexit

    client = sys.modules.get("anyaccel.forkserver.client")
    if client:
        client.close_all(client.ForkServer, seconds=0.0)
    ours = int(client is not None)  # its exit handler, which was called just now
    threading = sys.modules.get("threading")
    alone = threading is None or threading.active_count() == 1
    watched = sys.gettrace() or sys.getprofile() or sys.flags.inspect
    quick = alone and not watched and atexit._ncallbacks() == ours and _flush()  # noqa: SLF001 - there is no public count
    if status is not None:
        os._exit(status) if quick else sys.exit(status)
    if not quick:
        # What the interpreter does at its end; after a KeyboardInterrupt it ends by SIGINT itself, but not with "-m".
        if threading is not None:
            threading._shutdown()  # noqa: SLF001 - waits for threads
        atexit._run_exitfuncs()  # noqa: SLF001
        _flush()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a command may have blocked it
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(130)  # never reached


def _flush() -> bool:
    """Flush the standard streams. Returns False on failure: the usual exit then reports the error."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments after the program's name; None for those of this process.

    Returns:
        The exit status: see :data:`anyaccel.cli.help.EXIT_STATUSES`.

    Raises:
        KeyboardInterrupt: When the command was interrupted.
    """
    return _run(sys.argv[1:] if argv is None else list(argv), lambda: None)


def _run(arguments: Sequence[str], begin: Callable[[], object]) -> int:
    """Run a command like :func:`main`; ``begin`` is called once the imports are done."""
    if arguments in (["--version"], ["-V"]) and sys.stdout is not None:
        from anyaccel._version import __version__

        # Before any import, and unbuffered. If this fails, the usual path below prints it or reports the error.
        try:
            os.write(sys.stdout.fileno(), f"anyaccel {__version__}\n".encode())
        except OSError:
            pass
        else:
            return 0
    if "_ARGCOMPLETE" in os.environ:
        from anyaccel.cli.completion import complete

        complete()
    if (arguments[0] if arguments else "status").partition("=")[0] in EARLY:
        from anyaccel.vendors import begin_for

        # The fork server starts before the imports that follow, which take as long.
        begin_for(_find_machine(arguments), os.environ)
    from anyaccel.cli import output
    from anyaccel.cli.parser import dispatch

    output.prepare_streams()
    begin()
    return dispatch(arguments)


def _find_machine(arguments: Sequence[str]) -> str:
    """Return the value of ``--machine`` in arguments that are not parsed yet; empty when it is not given."""
    for position, argument in enumerate(arguments):
        option, equals, text = argument.partition("=")
        if option == "--":  # the arguments of another program follow
            return ""
        if option == "--machine":
            return text if equals else "".join(arguments[position + 1 : position + 2])
    return ""
