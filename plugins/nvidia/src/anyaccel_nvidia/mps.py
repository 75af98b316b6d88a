"""CUDA MPS: the control daemon of a user, asked in both of its protocols.

Protocol 2 reads commands from standard input and prints numbers
(https://docs.nvidia.com/deploy/mps/latest/mpsv2-interface.html); protocol 3, of release 615, takes a module and a verb
as arguments and prints tables (https://docs.nvidia.com/deploy/mps/latest/mpsv3-interface.html). The tool follows the
protocol of the daemon that runs.
"""

from __future__ import annotations

import csv
import os
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from anyaccel.plugin import ProbeContext

TOOL = "nvidia-cuda-mps-control"
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
LOG = "CUDA_MPS_LOG_DIRECTORY"
DIRECTORIES = ("/run/nvidia-mps", "/tmp/nvidia-mps")  # noqa: S108 - of root since 615, and of all others
ANSWER_SECONDS = 3.0


def directories(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Where a daemon may listen: the place that is named, else those that are usual, one's own first."""
    if named := environ.get(PIPE):
        return (named,)
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    return (*((f"{runtime}/nvidia-mps",) if runtime.startswith("/") else ()), *DIRECTORIES)


def listening(ctx: ProbeContext) -> str | None:
    """The directory in which a daemon seems to listen."""
    return next((each for each in directories(ctx.environ) if ctx.exists(f"{each}/control")), None)


def look(pipe: str) -> dict[str, Any]:
    """Ask the daemon of a directory what it serves.

    Returns:
        ``protocol``, 2 or 3, and the process ids of its ``servers`` and ``clients``.

    Raises:
        OSError: When there is no tool, or no daemon answers it in time.
    """
    rows = _table(_ask(pipe, "server", "list", "--format=csv", check=False))
    if rows is not None:
        clients = _table(_ask(pipe, "client", "list", "--all", "--format=csv"))
        return {"protocol": 3, "servers": sorted(_pids(rows)), "clients": sorted(_pids(clients or [], but="server"))}
    servers = _numbers(_ask(pipe, command="get_server_list"))
    found = {pid for server in servers for pid in _numbers(_ask(pipe, command=f"get_client_list {server}"))}
    return {"protocol": 2, "servers": servers, "clients": sorted(found)}


def start(pipe: str, log: str, environ: Mapping[str, str], protocol: int) -> None:
    """Start a daemon in the background, which serves programs of this user.

    Raises:
        OSError: When there is no tool, or it does not start one.
    """
    own = {**environ, PIPE: pipe, LOG: log, "CUDA_MPS_PROTOCOL_VERSION": str(protocol)}
    if protocol == 2:  # noqa: PLR2004 - which all versions speak, also those that do not know the variable
        del own["CUDA_MPS_PROTOCOL_VERSION"]
    _run([TOOL, "-d"], own)


def stop(pipe: str) -> None:
    """End the daemon of a directory, and with it its clients' use of the GPU.

    Raises:
        OSError: When there is no tool, or no daemon answers it.
    """
    if look(pipe)["protocol"] == 2:  # noqa: PLR2004
        _ask(pipe, command="quit")
    else:
        _ask(pipe, "--quit")


def _ask(pipe: str, *arguments: str, command: str = "", check: bool = True) -> str:
    return _run([TOOL, *arguments], {**os.environ, PIPE: pipe}, f"{command}\n" if command else "", check=check)


def _run(argv: list[str], environ: Mapping[str, str], text: str = "", *, check: bool = True) -> str:
    try:
        done = subprocess.run(
            argv, env=dict(environ), input=text, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{TOOL} did not answer within {ANSWER_SECONDS:g} s") from error
    if check and done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:200]
        raise OSError(f"{TOOL} ended with status {done.returncode}: {said or 'it said nothing'}")
    return done.stdout if not done.returncode else ""


def _table(text: str) -> list[dict[str, str]] | None:
    """Rows of a table by the names of its columns; None where the text is no table, as in protocol 2."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines or lines[0].strip().isdecimal():
        return None
    return list(csv.DictReader(lines, skipinitialspace=True))


def _pids(rows: list[dict[str, str]], but: str = "") -> Iterator[int]:
    """Process ids: the first column that is called so, and not that of something else."""
    for row in rows:
        for name, content in row.items():
            words = (name or "").lower().replace("_", " ").split()
            if "pid" in words and but not in words and str(content).strip().isdecimal():
                yield int(content)
                break


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdecimal()]
