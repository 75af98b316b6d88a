"""Recorded machines for the tests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from anyaccel.plugin import Detected, Device, ProbeContext
from anyaccel_intel import plugin
from anyaccel_testing import context, load_recording

RECORDINGS = Path(__file__).parents[1] / "recordings"


@pytest.fixture
def machine() -> Callable[..., ProbeContext]:
    """Open a recording by name, optionally with another environment and with changed files."""

    def opened(
        name: str,
        environ: Mapping[str, str] | None = None,
        changes: Mapping[str, object] | None = None,
        **parts: object,
    ) -> ProbeContext:
        content = load_recording(RECORDINGS / name)
        content["paths"] = {**content["paths"], **(changes or {})}
        return context({**content, **parts}, environ=environ)

    return opened


@pytest.fixture
def detected(machine: Callable[..., ProbeContext]) -> Callable[..., Detected]:
    def found(name: str, *args: object, **kwargs: object) -> Detected:
        answer = plugin.anyaccel_detect(machine(name, *args, **kwargs))
        assert answer is not None
        return answer

    return found


@pytest.fixture
def devices(detected: Callable[..., Detected]) -> Callable[..., tuple[Device, ...]]:
    return lambda *args, **kwargs: detected(*args, **kwargs).devices


@pytest.fixture
def materialized(tmp_path: Path) -> Callable[[str], Path]:
    """Write the files of a recording below a real directory, with real links."""

    def written(name: str) -> Path:
        paths = json.loads((RECORDINGS / name / "machine.json").read_text())["paths"]
        moved = {
            path: os.path.normpath(os.path.join(os.path.dirname(path), entry["link"]))
            for path, entry in paths.items()
            if "link" in entry and os.path.dirname(path) == "/sys/bus/pci/devices"
        }
        for path, entry in paths.items():
            real = next((new + path[len(old) :] for old, new in moved.items() if path.startswith(old + "/")), path)
            where = tmp_path / real.lstrip("/")
            where.parent.mkdir(parents=True, exist_ok=True)
            if "text" in entry:
                where.write_text(entry["text"])
            elif "link" in entry:
                where.symlink_to(entry["link"])
            elif "dir" in entry:
                where.mkdir(exist_ok=True)
        for target in moved.values():
            (tmp_path / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
        return tmp_path

    return written
