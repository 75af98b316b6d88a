"""Processes of the command line that an interpreter forks which has imported it.

``python -m anyaccel`` imports for most of its processor time. Here an interpreter imports once, and forks for each
command a process that has the arguments, streams, environment and folder that a new interpreter would have. What an
interpreter does when it starts is not tested so: whatever depends on that, and each command once (tests/docs runs the
commands of all pages), is started as users start it.

The process is no child of the test, so its end is awaited here; else it is as any other: it can be seen and signalled.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pkgutil
import resource
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MESSAGE = 1 << 20
PACKAGES = ("anyaccel", "anyaccel_jobs")
SEEN_AT_START = ("PYTHON", "LC_", "LANG")
"""How variables begin that an interpreter reads when it starts."""
OPTIONS = {"cwd", "env", "stdin", "stdout", "stderr", "text"}
"""Of ``subprocess.Popen``, with which a process can be forked."""
RARE = {"top_app", "pool", "engines"}
"""Modules and rooms that few commands need: each imported one makes a fork dearer."""
INHERITED = ("Uid", "Gid", "Groups", "Umask", "SigBlk", "SigIgn", "Cpus_allowed", "CapEff", "CapBnd", "NoNewPrivs")
"""What a process has from its parent, besides limits, control groups and namespaces."""
LOCKS = 10
"""The limit by which processes of a lease are marked."""
START = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class _Forked(subprocess.Popen[Any]):
    """A process that runs a command, the program of which is ``anyaccel``."""

    def _execute_child(self, args: Sequence[str], *settings: Any) -> None:
        """Have it forked, where a new interpreter would be started."""
        cwd, environ = settings[4:6]
        read, _, _, out, _, err = settings[9:15]
        request = {
            "arguments": [*map(os.fspath, args[1:])],
            "environ": {**(os.environ if environ is None else environ)},
            "cwd": os.getcwd() if cwd is None else os.fspath(cwd),
            "locks": resource.getrlimit(LOCKS),
        }
        self._server = _server()
        streams = [number if side == -1 else side for number, side in enumerate((read, out, err))]
        self.pid = self._server.ask(request, streams)
        self._ended = os.pidfd_open(self.pid)
        self._child_created = True
        self._close_pipe_fds(*settings[9:15])

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Return what ``os.waitpid`` would; the process is a child of the server."""
        if not select.select([self._ended], [], [], 0 if wait_flags & os.WNOHANG else None)[0]:
            return 0, 0
        os.close(self._ended)
        return self.pid, self._server.ask({"reap": self.pid})

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._wait(timeout=0)
        return self.returncode


def start(arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start the command line, as ``subprocess.Popen`` does with these options.

    What ``hold`` holds ends with the process that has started it, so that is never the server.
    """
    environ = options.get("env") or os.environ
    if not options.keys() - OPTIONS and "hold" not in arguments and stands_for_a_new_one(environ):
        return _Forked(["anyaccel", *arguments], **options)
    return subprocess.Popen([sys.executable, "-m", "anyaccel", *arguments], **options)


def run(arguments: Sequence[str], *, timeout: float = 200, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end, as ``subprocess.run`` does with these options; capture its output as text."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if "input" in options:
        streams["stdin"] = subprocess.PIPE
    given = options.pop("input", None)
    with start(arguments, **streams, **options) as process:
        try:
            out, err = process.communicate(given, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def stands_for_a_new_one(environ: Mapping[str, str]) -> bool:
    """Return whether a process with this environment would be as one of a new interpreter that this test starts."""
    paths = environ.get("PYTHONPATH", "").split(os.pathsep)
    return (
        _at_start(environ) == _at_start(START)
        and not any((Path(path) / "sitecustomize.py").exists() for path in paths if path)
        and _inherited() == _server().inherited
    )


def _at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(SEEN_AT_START) and name != "PYTHONPATH"}


def _inherited() -> str:
    """Return what a new process would have from this one, but the mark."""
    lines = Path("/proc/self/status").read_text().splitlines()
    own = [line for line in lines if line.partition(":")[0] in INHERITED]
    own += [line for line in Path("/proc/self/limits").read_text().splitlines() if "file locks" not in line]
    more = [Path(f"/proc/self/{name}").read_text() for name in ("cgroup", "oom_score_adj")]
    return "\n".join([*own, *more, *(os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid"))])


class _Server:
    """The interpreter that forks."""

    def __init__(self) -> None:
        self.inherited = _inherited()
        self._one_at_a_time = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE)
        with theirs:
            environ = {name: value for name, value in START.items() if not name.startswith("ANYACCEL_")}
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], env=environ,
            )  # fmt: skip
        self.ask({})

    def ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> int:
        """Send a request; the number that the server answers.

        Raises:
            RuntimeError: When the server has ended: a test has killed it, which fails; the next test has a new one.
        """
        with self._one_at_a_time:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
                answer = self._control.recv(64)
            except OSError:
                answer = b""
        if not answer:
            _servers.pop(os.getpid(), None)
            self._control.close()
            raise RuntimeError(f"the interpreter that runs commands has ended: exit status {self._process.wait()}")
        return int(answer)

    def stop(self) -> None:
        """End the interpreter."""
        self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        self._process.wait()


_servers: dict[int, _Server] = {}
_making = threading.Lock()


def _server() -> _Server:
    """Return the server of this process."""
    with _making:
        if os.getpid() not in _servers:
            _servers[os.getpid()] = _Server()
        return _servers[os.getpid()]


def stop() -> None:
    """End the server of this process, if it has one."""
    server = _servers.pop(os.getpid(), None)
    if server:
        server.stop()


def _import_all() -> None:
    """Import what commands import."""
    wanted = [package for package in PACKAGES if find_spec(package)]
    while wanted:
        module = import_module(wanted.pop())
        below = (found.name for found in pkgutil.iter_modules(getattr(module, "__path__", ())))
        wanted += [f"{module.__name__}.{name}" for name in below if name not in RARE]


def _serve(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request; returns in the forked process."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MESSAGE, 3)
        if not data:
            os._exit(0)
        request = json.loads(data)
        answer = 0
        if "reap" in request:
            answer = os.waitpid(request["reap"], 0)[1]
        elif request:
            answer = os.fork()
            if not answer:
                # Never the server's: what ends all carriers of a mark would end it as well.
                resource.setrlimit(LOCKS, tuple(request["locks"]))
                control.close()
                return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(str(answer).encode())


def _become(request: Mapping[str, Any], descriptors: Sequence[int], path: Sequence[str]) -> None:
    """Make this process what a new interpreter would be that runs ``-m anyaccel``."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    before = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [request["cwd"], *(before.split(os.pathsep) if before else ()), *path]
    invalidate_caches()
    main = find_spec("anyaccel.__main__")
    assert main is not None
    sys.argv[:] = [str(main.origin), *request["arguments"]]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        started = getattr(sys, name)
        binary = open(number, "wb" if number else "rb", closefd=False)  # noqa: SIM115 - it stays open
        at_once = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(binary, started.encoding, started.errors, newline="\n", line_buffering=at_once)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    SEARCHED = sys.path[1:]
    ours = {*os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    SEARCHED = [entry for entry in SEARCHED if entry not in ours]
    _import_all()
    import atexit
    import gc

    from anyaccel.cli import program
    from anyaccel.forkserver import client

    # A command with exit handlers of others would finalize its interpreter, and so copy every page of this one.
    atexit._clear()
    atexit.register(client._end)
    gc.freeze()
    _become(*_serve(socket.socket(fileno=int(sys.argv[1]))), SEARCHED)
    program()
