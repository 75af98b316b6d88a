"""CUDA MPS: query, start and stop a user's control daemon, in both of its protocols.

Protocol 2 reads commands from standard input and prints numbers
(https://docs.nvidia.com/deploy/mps/latest/mpsv2-interface.html); protocol 3, of release 615, takes a module and a verb
as arguments and prints tables (https://docs.nvidia.com/deploy/mps/latest/mpsv3-interface.html). The tool follows the
protocol of the running daemon.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

TOOL = "nvidia-cuda-mps-control"
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
LOG = "CUDA_MPS_LOG_DIRECTORY"
DIRECTORIES = ("/run/nvidia-mps", "/tmp/nvidia-mps")  # noqa: S108 - of root since 615, and of all others
ANSWER_SECONDS = 3.0


def directories(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the directories where a daemon may listen: the named one, else the usual ones, the user's own first."""
    if named := environ.get(PIPE):
        return (os.path.normpath(named),)  # as recordings write paths
    # normpath turns an empty or relative path into ".", which the check below rejects.
    runtime = os.path.normpath(environ.get("XDG_RUNTIME_DIR", ""))
    return (*((f"{runtime}/nvidia-mps",) if runtime.startswith("/") else ()), *DIRECTORIES)


def listening(environ: Mapping[str, str], exists: Callable[[str], bool]) -> list[str]:
    """Return the directories with a daemon's control socket, which a daemon leaves behind when it ends."""
    return [each for each in directories(environ) if exists(f"{each}/control")]


def query_daemon(pipe: str) -> dict[str, Any] | None:
    """Ask the daemon in a directory for its servers and clients.

    Returns:
        ``protocol``, 2 or 3, and the process ids of its ``servers`` and ``clients``; None if no daemon listens, as
        after one that has ended (driver 580 removes neither ``control`` nor its locks).

    Raises:
        OSError: The tool is missing, no daemon answers in time, or the daemon belongs to another user except root.
    """
    if not _has_listener(f"{pipe}/control"):
        return None
    # A daemon of another user would answer, and then serve none of our programs.
    owner = os.stat(f"{pipe}/control").st_uid
    if owner not in (0, os.geteuid()):
        raise OSError(f"{pipe}/control belongs to user {owner}, and a daemon serves programs of its own user alone")
    rows = _table(_ask(pipe, "server", "list", "--format=csv", check=False))
    if rows is not None:
        clients = _table(_ask(pipe, "client", "list", "--all", "--format=csv"))
        return {"protocol": 3, "servers": sorted(_pids(rows)), "clients": sorted(_pids(clients or [], but="server"))}
    answer = _ask(pipe, command="get_server_list")
    servers = _numbers(answer)
    # An old tool prints usage or errors on the same stream with status 0.
    if len(servers) < len(answer.split()):
        raise OSError(f"{TOOL} answered {' '.join(answer.split())[:200]!r}, which is no list of processes")
    found = {pid for server in servers for pid in _numbers(_ask(pipe, command=f"get_client_list {server}"))}
    return {"protocol": 2, "servers": servers, "clients": sorted(found)}


def start(pipe: str, environ: Mapping[str, str], protocol: int) -> None:
    """Start a daemon in the background, in a new directory, for programs of this user.

    Raises:
        OSError: The tool is missing or fails, or the directory belongs to another user.
    """
    log = f"{pipe}/log"
    for directory in (pipe, log):
        os.makedirs(directory, mode=0o700, exist_ok=True)
        if os.lstat(directory).st_uid not in (0, os.geteuid()):
            raise OSError(f"{directory} belongs to another user")
    own = {**environ, PIPE: pipe, LOG: log, "CUDA_MPS_PROTOCOL_VERSION": str(protocol)}
    if protocol == 2:  # noqa: PLR2004 - which all versions speak, also those that do not know the variable
        del own["CUDA_MPS_PROTOCOL_VERSION"]
    import tempfile

    # A file, not a pipe: the daemon may keep a pipe open, and reading it would never end.
    with tempfile.TemporaryFile(dir=log) as said:
        _run([TOOL, "-d"], own, said=said)


def stop(pipe: str, protocol: int) -> None:
    """Stop the daemon in a directory; its clients lose the GPU.

    Raises:
        OSError: The tool is missing, or no daemon answers.
    """
    if protocol == 2:  # noqa: PLR2004
        _ask(pipe, command="quit")
    else:
        _ask(pipe, "--quit")


def _has_listener(path: str) -> bool:
    """Return whether a process listens at a Unix socket; the connection is closed at once, without a word."""
    import socket  # which every detection would wait for

    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a socket of another kind, or a full queue: a process has bound it
            return True
    return True


def _ask(pipe: str, *arguments: str, command: str = "", check: bool = True) -> str:
    return _run([TOOL, *arguments], {**os.environ, PIPE: pipe}, f"{command}\n" if command else "", check=check)


def _run(
    argv: list[str], environ: Mapping[str, str], text: str = "", *, check: bool = True, said: IO[bytes] | None = None
) -> str:
    """Run the tool; return its output, unless ``said`` receives the output."""
    import subprocess  # which every detection would wait for

    output = subprocess.PIPE if said is None else said
    try:
        done = subprocess.run(
            argv,
            env=dict(environ),
            input=text.encode(),
            stdout=output,
            stderr=output,
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{TOOL} did not answer within {ANSWER_SECONDS:g} s") from error
    if check and done.returncode:
        if said is not None:
            said.seek(0)
        words = (said.read() if said is not None else done.stderr or done.stdout).decode(errors="replace").split()
        raise OSError(f"{TOOL} ended with status {done.returncode}: {' '.join(words)[:200] or 'it said nothing'}")
    return (done.stdout or b"").decode(errors="replace") if not done.returncode else ""


def _table(text: str) -> list[dict[str, str]] | None:
    """Parse a table into rows by column name; None for a text without columns, as in protocol 2."""
    import csv

    try:
        names, *rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
    except (csv.Error, ValueError):
        return None
    if len(names) == 1 or any(len(row) != len(names) for row in rows):
        return None
    return [dict(zip(names, row, strict=True)) for row in rows]


def _pids(rows: list[dict[str, str]], but: str = "") -> Iterator[int]:
    """Yield process ids from the first column named PID; skip columns named after ``but``."""
    for row in rows:
        for name, content in row.items():
            words = name.lower().replace("_", " ").split()
            if "pid" in words and but not in words:
                yield from _numbers(content)
                break


def _numbers(text: str) -> list[int]:
    """Parse process ids, each on a line of its own."""
    return [int(line) for line in text.splitlines() if re.fullmatch(r"\s*[0-9]{1,10}\s*", line)]
