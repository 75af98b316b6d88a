"""A plug-in on the machines that were recorded for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anyaccel.plugin import Detected, ProbeContext, Stats
from anyaccel_testing import context, load_recording


class Recorded:
    """What a plug-in says of machines.

    Args:
        plugin: The plug-in.
        test: File of a test of the plug-in: its recordings are in the directory beside that of the tests.
    """

    def __init__(self, plugin: Any, test: str) -> None:
        self._plugin = plugin
        self._directory = Path(test).parent.parent / "recordings"

    def load(self, name: str, **changed: object) -> dict[str, Any]:
        """A recording, with some paths changed."""
        recording = load_recording(self._directory / name)
        recording["paths"] |= changed
        return recording

    def replay(self, name: str, environ: dict[str, str] | None = None, **changed: object) -> ProbeContext:
        """The machine of a recording, with some paths changed."""
        return context(self.load(name, **changed), environ=environ)

    def detect(self, machine: str | ProbeContext) -> Detected:
        """What is found on a machine, or on that of a recording."""
        detected = self._plugin.anyaccel_detect(self.replay(machine) if isinstance(machine, str) else machine)
        assert isinstance(detected, Detected)
        return detected

    def stats(self, machine: str | ProbeContext) -> dict[str, Stats]:
        """How the devices are that are found there, by their ids."""
        ctx = self.replay(machine) if isinstance(machine, str) else machine
        return dict(self._plugin.anyaccel_stats(self.detect(ctx).devices, ctx))
