"""Start a command that carries a mark from its first instruction on.

A ``preexec_fn`` could put the mark on, but makes :mod:`subprocess` fork a parent that may be large and have threads. So
a small program puts the mark on itself and becomes the command: ``prlimit(1)``, or this interpreter where that is
missing.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache

from anyaccel.ledger.mark import Mark, limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any

_BECOME = (
    "import os,resource,signal,sys\n"
    "mark=int(sys.argv[1])\n"
    "resource.setrlimit(10,(mark,mark))\n"
    "for number in (signal.SIGPIPE,signal.SIGXFSZ): signal.signal(number,signal.SIG_DFL)\n"
    "try: os.execvp(sys.argv[2],sys.argv[3:])\n"
    "except OSError as error:\n"
    " os.write(2,f'{sys.argv[2]}: {error.strerror}\\n'.encode())\n"
    " os._exit(127 if error.errno==2 else 126)\n"
)


def start(command: Sequence[str] | str, mark: Mark, **options: Any) -> subprocess.Popen[Any]:
    """Start a command like :class:`subprocess.Popen`, so that it carries a mark with all that it starts.

    Args:
        command: The command and its arguments.
        mark: The mark; empty for none.
        options: As of :class:`subprocess.Popen`.

    Raises:
        OSError: When the command cannot be started.
    """
    import subprocess

    if not mark:
        return subprocess.Popen(command, **options)
    arguments = [os.fspath(command)] if isinstance(command, (str, bytes, os.PathLike)) else list(command)
    program = options.pop("executable", None)
    if options.pop("shell", False):
        program, arguments = program or "/bin/sh", ["/bin/sh", "-c", *arguments]
    check(program or arguments[0], options.get("env"), options.get("cwd"))
    if (tool := _prlimit()) and program in (None, arguments[0]):
        value = limit(mark)
        before = [tool, f"--locks={value}:{value}", "--"]
    else:
        before = [sys.executable, "-I", "-S", "-c", _BECOME, str(limit(mark)), program or arguments[0]]
    return subprocess.Popen([*before, *arguments], **options)


@cache
def _prlimit() -> str | None:
    import shutil

    return shutil.which("prlimit")


def check(program: str, environ: Mapping[str, str] | None = None, directory: str | None = None) -> None:
    """Raise what :class:`subprocess.Popen` would raise for a program that cannot be started.

    Raises:
        OSError: When it is not there, or not executable.
    """
    name = os.fsdecode(program)
    paths = [""] if "/" in name else os.get_exec_path(environ)
    found = [os.path.join(directory or "", path, name) for path in paths]
    if any(os.path.isfile(path) and os.access(path, os.X_OK) for path in found):
        return
    code = errno.EACCES if any(os.path.exists(path) for path in found) else errno.ENOENT
    raise OSError(code, os.strerror(code), program)
