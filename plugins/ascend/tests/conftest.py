"""Machines for the tests: recorded, or a tree of files with a real executable npu-smi."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from anyaccel.plugin import CommandResult, Detected, Device, ProbeContext
from anyaccel.probe.host import HostFacts
from anyaccel_ascend import plugin
from anyaccel_testing import context, load_recording
from waiting import PATIENCE

RECORDINGS = Path(__file__).parent.parent / "recordings"


@pytest.fixture(scope="session")
def recorded() -> Callable[..., ProbeContext]:
    def show(name: str, environ: Mapping[str, str] | None = None) -> ProbeContext:
        return context(load_recording(RECORDINGS / name), environ=environ)

    return show


@pytest.fixture(scope="session")
def detected(recorded) -> Callable[[str], Detected]:
    def detect(name: str) -> Detected:
        found = plugin.anyaccel_detect(recorded(name))
        assert found is not None
        return found

    return detect


@pytest.fixture(scope="session")
def devices(detected) -> Callable[[str], tuple[Device, ...]]:
    return lambda name: detected(name).devices


@pytest.fixture(scope="session")
def answering() -> Callable[..., ProbeContext]:
    """A recorded machine with other answers of npu-smi: texts by arguments, as in ``{"info": TABLE}``."""

    def show(name: str, answers: Mapping[str, str]) -> ProbeContext:
        recording = load_recording(RECORDINGS / name)
        recording["commands"] = [
            {**entry, "stdout": answers.get(" ".join(entry["argv"][1:]), entry.get("stdout", ""))}
            for entry in recording["commands"]
        ]
        return context(recording)

    return show


class FilesAndTool(HostFacts):
    """Files below a directory; commands of this machine, which a recording of files alone could not run.

    Only one that is to hang is not waited for.
    """

    def __init__(self, environ: Mapping[str, str], root: str, *, hangs: bool) -> None:
        super().__init__(environ, root)
        self._hangs = hangs

    def run(self, argv: Sequence[str], timeout: float) -> CommandResult | None:
        return HostFacts(self.environ).run(argv, timeout if self._hangs else PATIENCE)


@pytest.fixture
def machine(tmp_path) -> Callable[..., ProbeContext]:
    """A tree with 910B4 cards, and an executable ``npu-smi`` whose text is given; None leaves it out.

    Seconds are for one that hangs.
    """

    def build(
        script: str | None,
        *,
        cards: int = 2,
        nodes: int | None = None,
        seconds: float | None = None,
        device: str = "0xd802",
    ) -> ProbeContext:
        root = tmp_path / "root"
        for number in range(cards):
            function = root / f"sys/bus/pci/devices/0000:0{number + 1}:00.0"
            function.mkdir(parents=True)
            for name, text in {"vendor": "0x19e5", "device": device, "class": "0x120000", "numa_node": "0"}.items():
                (function / name).write_text(f"{text}\n")
        (root / "dev").mkdir(parents=True, exist_ok=True)
        for name in ("davinci_manager", *(f"davinci{number}" for number in range(cards if nodes is None else nodes))):
            (root / "dev" / name).symlink_to("/dev/null")  # a character device, as the real ones are
        tools = tmp_path / "bin"
        tools.mkdir()
        if script is not None:
            (tools / "npu-smi").write_text(script)
            (tools / "npu-smi").chmod(0o755)
        environ = {"PATH": f"{tools}:{os.defpath}"}
        facts = FilesAndTool(environ, str(root), hangs=seconds is not None)
        return ProbeContext(facts, time.monotonic() + (seconds or PATIENCE))

    return build
