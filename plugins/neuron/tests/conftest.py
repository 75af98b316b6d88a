"""Machines for tests: files below a directory, and real executables as the vendor's tools."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from anyaccel.kit import files
from anyaccel.plugin import CommandResult, Device, ProbeContext
from anyaccel.probe.context import ask
from anyaccel.probe.host import HostFacts
from anyaccel_neuron import plugin
from waiting import PATIENCE

TOOL = "/opt/aws/neuron/bin/neuron-ls"
CHARACTER_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")
"""What nodes of chips are links to; each has other numbers."""


class Machine(HostFacts):
    """Facts of a made-up machine: its files below a directory, its commands by real processes of this host.

    ``HostFacts`` runs nothing below another root, so commands with a path are looked up below it here; a name
    without one goes through the ``PATH``, which begins with the directory ``bin``. They are waited for, unless a
    context without much time was asked for last.
    """

    def __init__(self, root: Path, **environ: str) -> None:
        self.tree = root
        self.given = 0.0  # seconds that the command had which was run last
        self._hangs = False
        self.variables = {"PATH": f"{root}/bin:/usr/bin:/bin", **environ}
        super().__init__(self.variables, str(root))

    def run(self, argv: Sequence[str], timeout: float) -> CommandResult | None:
        self.given = timeout
        program = str(self.tree) + argv[0] if argv[0].startswith("/") else argv[0]
        return HostFacts(self.variables).run([program, *argv[1:]], timeout if self._hangs else PATIENCE)

    def query(self, name: str, fn: Callable[[], Any]) -> Any:
        return ask(fn)

    def write(self, path: str, text: str) -> None:
        where = self.tree / path.lstrip("/")
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)

    def tool(self, path: str, script: str) -> None:
        """Install an executable shell script."""
        self.write(path, "#!/bin/sh\n" + script)
        os.chmod(self.tree / path.lstrip("/"), 0o755)

    def lists(self, *chips: Any) -> None:
        """Make ``neuron-ls`` list chips."""
        self.tool(TOOL, f"cat <<'END'\n{json.dumps(chips)}\nEND\n")

    def chip(self, index: int, name: str = "Trainium1", *, node: str | None = None) -> str:
        """Add a chip: its node is a link to a character device of this machine; returns its sysfs directory."""
        where = self.tree / (node or f"/dev/neuron{index}").lstrip("/")
        where.parent.mkdir(parents=True, exist_ok=True)
        where.symlink_to(CHARACTER_DEVICES[index])
        numbers = os.stat(where).st_rdev
        entry = f"/sys/class/neuron_device/neuron{index}"
        self.write(f"{entry}/dev", f"{os.major(numbers)}:{os.minor(numbers)}\n")
        self.write(f"{entry}/info/architecture/device_name", f"{name}\n")
        return entry

    def function(self, address: str, device: int, driver: str = "") -> None:
        """Add a PCI function of Amazon's."""
        folder = f"/sys/bus/pci/devices/{address}"
        facts = {"vendor": "0x1d0f", "device": f"0x{device:04x}", "class": "0x088000", "numa_node": "-1"}
        for name, value in facts.items():
            self.write(f"{folder}/{name}", value + "\n")
        if driver:
            (self.tree / f"{folder}/driver".lstrip("/")).symlink_to(f"../../drivers/{driver}")

    def context(self, seconds: float | None = None) -> ProbeContext:
        self._hangs = seconds is not None
        return ProbeContext(self, time.monotonic() + (seconds or 2 * PATIENCE))

    def devices(self) -> tuple[Device, ...]:
        found = plugin.anyaccel_detect(self.context())
        return found.devices if found else ()


@pytest.fixture
def new_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """Make machines without any Neuron device, by a name and the environment."""
    monkeypatch.setattr(files, "KERNEL_LOG_SECONDS", PATIENCE)
    return lambda name, **environ: Machine(tmp_path / name, **environ)


@pytest.fixture
def machine(new_machine: Callable[..., Machine]) -> Machine:
    """A machine without any Neuron device."""
    return new_machine("machine")
