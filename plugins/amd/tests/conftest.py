"""Fixtures of this plug-in's tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from anyaccel.plugin import Detected, Device, ProbeContext
from anyaccel.probe.host import HostFacts
from anyaccel_amd import plugin
from anyaccel_testing import context, load_recording

RECORDINGS = Path(__file__).parent.parent / "recordings"


@pytest.fixture
def detected() -> Callable[[str], Detected]:
    """Detect on a recorded machine."""

    def detect(name: str) -> Detected:
        found: Detected | None = plugin.anyaccel_detect(context(load_recording(RECORDINGS / name)))
        assert found is not None
        return found

    return detect


@pytest.fixture
def recorded() -> Callable[..., dict[str, Any]]:
    """A recorded machine with changed paths; None removes a path with everything below."""

    def load(name: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        recording = load_recording(RECORDINGS / name)
        for path, entry in (changes or {}).items():
            if entry is None:
                for known in [p for p in recording["paths"] if p == path or p.startswith(path + "/")]:
                    del recording["paths"][known]
            else:
                recording["paths"][path] = {"text": entry} if isinstance(entry, str) else entry
        return recording

    return load


@pytest.fixture
def gpus() -> list[Device]:
    """Four GPUs with ids; the last two are partitions of a card with the same id."""
    ids = ["1901ead3a2ecd4a6", "51276ac12ce05db3", "e3aa140f9a5f9e31", "e3aa140f9a5f9e31"]
    return [Device(id=f"gpu{n}", index=n, model="", attributes={"unique_id": uid}) for n, uid in enumerate(ids)]


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[Mapping[str, str]], ProbeContext]:
    """A real directory tree, seen through the facts of a host."""

    def make(files: Mapping[str, str], environ: Mapping[str, str] | None = None) -> ProbeContext:
        for path, content in files.items():
            where = tmp_path / path.lstrip("/")
            where.parent.mkdir(parents=True, exist_ok=True)
            if content.startswith("-> "):
                os.symlink(content[3:], where)
            else:
                where.write_text(content)
        return ProbeContext(HostFacts(environ or {}, root=str(tmp_path)), time.monotonic() + 10)

    return make
