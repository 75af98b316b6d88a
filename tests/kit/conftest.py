"""Machines for the kit: recordings written as Python data, and programs on a real PATH."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from anyaccel.kit import files
from anyaccel.plugin import CommandResult, ProbeContext
from anyaccel.probe.host import HostFacts
from anyaccel_testing import context
from waiting import PATIENCE


@pytest.fixture
def machine() -> Callable[..., ProbeContext]:
    """Make a machine of the parts of a recording."""

    def make(
        paths: dict[str, Any] | None = None,
        *,
        environ: dict[str, str] | None = None,
        queries: dict[str, Any] | None = None,
        commands: Sequence[dict[str, Any]] = (),
    ) -> ProbeContext:
        return context(
            {
                "schema": "anyaccel.recording/1",
                "environ": environ or {},
                "paths": paths or {},
                "commands": list(commands),
                "queries": queries or {},
            }
        )

    return make


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ProbeContext]:
    """Put a shell script named ``acme-tool`` on the PATH of a machine; seconds are for one that hangs."""
    monkeypatch.setattr(files, "KERNEL_LOG_SECONDS", PATIENCE)

    def make(script: str, seconds: float | None = None) -> ProbeContext:
        class Host(HostFacts):
            def run(self, argv: Sequence[str], timeout: float) -> CommandResult | None:
                return HostFacts(self.environ).run(argv, PATIENCE if seconds is None else timeout)

        path = tmp_path / "acme-tool"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return ProbeContext(
            Host({"PATH": f"{tmp_path}:/usr/bin:/bin"}, "/"), time.monotonic() + (seconds or 2 * PATIENCE)
        )

    return make
