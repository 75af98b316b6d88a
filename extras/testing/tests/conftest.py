"""Recorded machines of the vendor acme, with the inventories of its correct plug-in."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from anyaccel_testing import context, describe

sys.path.append(str(Path(__file__).parent))

TOOL = {"argv": ["acme-smi", "-L"], "returncode": 0, "stdout": "s0\ns1\ns2\ns3\n", "stderr": ""}
# The serials of "quad" are out of order, so that an index is not mistaken for an identity.
MACHINES = {"pair": ("s0", "s1"), "quad": ("s3", "s1", "s2", "s0"), "driver-only": ()}

Recordings = Callable[[str], Path]


@pytest.fixture
def recordings(tmp_path: Path) -> Recordings:
    """Write recordings with the inventories of a plug-in's source, and return their directory."""

    def write(source: str) -> Path:
        # Not imported: several sources of one test would share an entry in sys.modules.
        plugin = ModuleType("acme_described")
        exec(compile(source, "acme.py", "exec"), vars(plugin))
        for name, serials in MACHINES.items():
            directory = tmp_path / "recordings" / name
            directory.mkdir(parents=True)
            recording = {"schema": "anyaccel.recording/1", "paths": _paths(serials), "commands": [TOOL]}
            (directory / "machine.json").write_text(json.dumps(recording))
            (directory / "expected.json").write_text(json.dumps(describe(plugin, context(recording))))
        return tmp_path / "recordings"

    return write


def _paths(serials: tuple[str, ...]) -> dict[str, dict[str, str]]:
    facts = {"model": "Acme One", "memory": 1 << 34}
    paths = {
        f"/sys/class/acme/{index}/facts": {"text": json.dumps(facts | {"serial": serial})}
        for index, serial in enumerate(serials)
    }
    return {"/sys/class/acme/version": {"text": "7.1\n"}, **paths}
