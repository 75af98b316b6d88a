"""A machine for tests: files below a directory, and real executables for the vendor's tools."""

import os
import stat
import time
from pathlib import Path

from anyaccel.plugin import ProbeContext
from anyaccel.probe.context import ask
from anyaccel.probe.host import HostFacts

TOOL = "/opt/aws/neuron/bin/neuron-ls"


class Machine:
    """Facts of a made-up machine: its files by ``HostFacts`` of a root directory, its commands by real processes.

    ``HostFacts`` runs nothing below another root, so commands with a path are looked up below it here; a name
    without one goes through the ``PATH``, which is the directory ``bin``.
    """

    def __init__(self, root: Path, **environ: str) -> None:
        self.directory = root
        self.environ = {"PATH": f"{root}/bin:/usr/bin:/bin", **environ}
        self._files = HostFacts(self.environ, str(root))
        self._commands = HostFacts(self.environ)

    def __getattr__(self, name):
        return getattr(self._files, name)

    def run(self, argv, timeout):
        program = str(self.directory) + argv[0] if argv[0].startswith("/") else argv[0]
        return self._commands.run([program, *argv[1:]], timeout)

    def query(self, name, fn):
        return ask(fn)

    def write(self, path: str, text: str) -> None:
        where = self.directory / path.lstrip("/")
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)

    def tool(self, path: str, script: str) -> None:
        """Install an executable shell script."""
        self.write(path, "#!/bin/sh\n" + script)
        os.chmod(self.directory / path.lstrip("/"), 0o755)

    def chip(self, index: int, name: str = "Trainium1", *, node: str | None = None, number: str | None = None) -> str:
        """Add a chip: its node is a link to a character device of this machine; returns its sysfs directory."""
        where = self.directory / f"dev/neuron{index}" if node is None else self.directory / node.lstrip("/")
        where.parent.mkdir(parents=True, exist_ok=True)
        where.symlink_to(CHARACTER_DEVICES[index])
        status = os.stat(where)
        assert stat.S_ISCHR(status.st_mode)
        entry = f"/sys/class/neuron_device/neuron{index}"
        self.write(f"{entry}/dev", number or f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}\n")
        self.write(f"{entry}/info/architecture/device_name", f"{name}\n")
        return entry

    def context(self, seconds: float = 10.0) -> ProbeContext:
        return ProbeContext(self, time.monotonic() + seconds)


CHARACTER_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")
