"""Machines on disk: sysfs and /dev as a directory tree, and hl-smi as a real program on a real PATH."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from anyaccel.plugin import CommandResult, Device, ProbeContext, Product
from anyaccel.probe.host import HostFacts
from waiting import PATIENCE

RECORDINGS = Path(__file__).parent.parent / "recordings"


class Machine(HostFacts):
    """Files below a directory, commands from this host: HostFacts alone runs no command for another root.

    A command is waited for, unless a context without much time was asked for last.
    """

    def __init__(self, root: Path) -> None:
        super().__init__({"PATH": f"{root}/usr/bin:/usr/bin:/bin"}, str(root))
        self.tree = root
        self._hangs = False
        (root / "usr/bin").mkdir(parents=True)

    def run(self, argv: Sequence[str], timeout: float) -> CommandResult | None:
        return HostFacts(self.environ).run(argv, timeout if self._hangs else PATIENCE)

    def write(self, path: str, text: str) -> None:
        file = self.tree / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def link(self, path: str, target: str) -> None:
        file = self.tree / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(target)

    def hpu(self, address: str, device: str = "0x1020", minor: int | None = 0, **attributes: str) -> str:
        """Add a device as the kernel shows it: files under /sys/devices, links to them elsewhere."""
        folder = f"/sys/devices/pci0000:15/{address}"
        values = {"vendor": "0x1da3", "device": device, "class": "0x120000", "status": "operational", **attributes}
        for name, value in values.items():
            self.write(f"{folder}/{name}", f"{value}\n")
        self.link(f"{folder}/driver", "../../../bus/pci/drivers/habanalabs")
        self.link(f"/sys/bus/pci/devices/{address}", f"../../../devices/pci0000:15/{address}")
        if minor is not None:
            for node in (f"accel{minor}", f"accel_controlD{minor}"):
                (self.tree / f"{folder}/accel/{node}".lstrip("/")).mkdir(parents=True)
                self.link(f"/dev/accel/{node}", "/dev/null")  # any character device will do
        return folder

    def hl_smi(self, script: str) -> None:
        program = self.tree / "usr/bin/hl-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def context(self, seconds: float | None = None) -> ProbeContext:
        self._hangs = seconds is not None
        return ProbeContext(self, time.monotonic() + (seconds or PATIENCE))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "root")


@pytest.fixture
def simulate() -> Callable[[Product, int], tuple[Device, ...]]:
    """Simulate the devices of a product."""

    def build(product: Product, count: int) -> tuple[Device, ...]:
        ids = [product.id_template.format(uuid=f"uuid{i}", index=i, pci=f"0000:{i + 1:02x}:00.0") for i in range(count)]
        return tuple(
            Device(
                id=ids[index],
                index=index,
                model=product.model,
                memory_bytes=product.memory_bytes,
                links={other: product.link for other in ids if other != ids[index]},
                nodes=tuple(template.format(index=index) for template in product.node_templates),
                attributes=product.attributes,
            )
            for index in range(count)
        )

    return build
