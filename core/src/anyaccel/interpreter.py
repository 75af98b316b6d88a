"""Start a fresh Python interpreter that runs a module of ours.

Everybody on the machine can read a command line, and the caller's arguments and module path may hold what others must
not see. So the command line is the same for everybody, and what the interpreter needs comes through a pipe, which is
its standard input.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Collection, Mapping
from typing import Any

BOOTSTRAP = (
    "import sys,json,importlib;path,module,config=json.loads(sys.stdin.buffer.readline());sys.path[:]=path;"
    "importlib.import_module(module).main(config)"
)


def start(
    module: str,
    config: Any,
    *,
    env: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    pass_fds: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start an interpreter with the caller's module path that calls the function ``main`` of a module.

    Args:
        module: Name of the module.
        config: JSON data that ``main`` is called with.
        env: Its environment; that of the caller when None.
        stdout: As :class:`subprocess.Popen` takes it.
        stderr: As :class:`subprocess.Popen` takes it.
        pass_fds: Descriptors that it inherits.

    Returns:
        The process. Its standard input is open: see :func:`tell`.

    Raises:
        OSError: When it cannot be started.
    """
    # -I: the caller's module path is passed on as it is, so nothing else should add to it.
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", BOOTSTRAP],
        bufsize=0,
        env=env,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        start_new_session=True,  # Ctrl-C at the terminal is the caller's business
    )
    path: list[object] = [*sys.path]
    tell(process, [[entry for entry in path if isinstance(entry, str)], module, config])
    return process


def tell(process: subprocess.Popen[bytes], data: Any) -> None:
    """Write one line of JSON to a process; nothing happens when it has died, which its end tells."""
    stream = process.stdin
    assert stream is not None  # noqa: S101 - it was asked for
    view = memoryview(json.dumps(data).encode() + b"\n")
    try:
        while view:
            view = view[stream.write(view) or 0 :]
    except BrokenPipeError:
        return


def wait(pid: int, seconds: float) -> bool:
    """Wait until a child has ended, and reap it; False when it has not, or somebody else has reaped it."""
    try:
        pinned = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        poll = select.poll()
        poll.register(pinned, select.POLLIN)
        return bool(poll.poll(seconds * 1000)) and os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False
    finally:
        os.close(pinned)
