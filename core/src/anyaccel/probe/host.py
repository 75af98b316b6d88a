"""Facts of this host, or of another root directory such as ``/host`` in a container."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence

from anyaccel.errors import CommandTimeoutError, QueryError
from anyaccel.probe.context import CommandResult, DeviceNode, ask
from anyaccel.probe.paths import find_paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    from anyaccel.probe.context import Json

READ_LIMIT = 1 << 20
OUTPUT_LIMIT = 8 << 20
GRACE_SECONDS = 0.5
"""How long to wait for a killed command: a process that is stuck in the kernel ignores even SIGKILL."""


class HostFacts:
    """Facts below a root directory. Commands and libraries are called only for the root of this host."""

    def __init__(self, environ: Mapping[str, str], root: str = "/") -> None:
        self.environ = environ
        self.root = root
        self._prefix = root.rstrip("/")

    def read(self, path: str) -> str | None:
        try:
            # Unbuffered: some files of sysfs have another content at each read(2).
            with open(self._prefix + path, "rb", buffering=0) as file:
                return file.read(READ_LIMIT).decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def glob(self, pattern: str) -> list[str]:
        return list(filter(self.exists, find_paths(pattern, self._list_names)))

    def _list_names(self, path: str) -> list[str]:
        try:
            return os.listdir(f"{self._prefix}{path}/")
        except OSError:
            return []

    def readlink(self, path: str) -> str | None:
        try:
            return os.readlink(self._prefix + path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.EINVAL:  # the path exists, and is no link
                return None
            raise

    def exists(self, path: str) -> bool:
        return os.path.lexists(self._prefix + path)  # without the target: sysfs has links into other mounts

    def is_dir(self, path: str) -> bool:
        return os.path.isdir(self._prefix + path)

    def node(self, path: str) -> DeviceNode | None:
        where = self._prefix + path
        try:
            status = os.stat(where)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not (stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)):
            return None
        return DeviceNode(
            path=path,
            major=os.major(status.st_rdev),
            minor=os.minor(status.st_rdev),
            readable=os.access(where, os.R_OK),  # open(2) would wake or occupy some devices
            writable=os.access(where, os.W_OK),
            group=status.st_gid,
        )

    def run(self, argv: Sequence[str], timeout: float) -> CommandResult | None:
        import shutil
        import signal
        import subprocess

        program = shutil.which(argv[0], path=self.environ.get("PATH", os.defpath))
        if program is None or self._prefix:  # a tool would report this host, not the root below the prefix
            return None
        # Files in place of pipes: a background process of the tool would keep a pipe open, and block the reader.
        with open(os.memfd_create("stdout"), "w+b") as out, open(os.memfd_create("stderr"), "w+b") as err:
            process = subprocess.Popen(
                [program, *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**self.environ, "LC_ALL": "C"},  # parsers of tools expect English and decimal points
                start_new_session=True,  # a process group of its own, for killpg()
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECONDS)
                raise CommandTimeoutError(f"{argv[0]} did not end within {timeout:.1f} s and was killed") from None
            return CommandResult(returncode=process.returncode, stdout=_text(out), stderr=_text(err))

    def write(self, path: str, text: str) -> None:
        if self._prefix:
            raise PermissionError(errno.EPERM, f"only this host is changed, not {self.root}", path)
        # Without O_CREAT: a file in sysfs exists, or the driver has no such setting.
        with open(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC), "wb", buffering=0) as file:
            file.write(text.encode())

    def query(self, name: str, fn: Callable[[], Json]) -> Json:
        if self._prefix:
            raise QueryError("NotThisMachine", f"{name}: a library cannot be asked about {self.root}")
        return ask(fn)


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read(OUTPUT_LIMIT).decode(errors="replace")
