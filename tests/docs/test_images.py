"""The pictures of a shared machine are on pages, and the script that draws them runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
IMAGE = re.compile(r"!\[[^\]]+\]\(([^)]+)\)")
PICTURES = [f"{name}-{width}.svg" for name in ("jobs", "queue", "status", "top") for width in (120, 80)]


def test_the_pictures_of_a_machine_are_on_pages():
    readme, *pages = ROOT / "README.md", *(ROOT / "docs" / "how-to").glob("*.md")
    images = {(each.parent / name).resolve() for each in (readme, *pages) for name in IMAGE.findall(each.read_text())}
    assert IMAGE.search("\n".join(readme.read_text().splitlines()[:30])), "the README begins with a picture"
    assert images >= {IMAGES / name for name in PICTURES}
    for image in images:
        assert image.read_text().startswith("<svg"), image


@pytest.mark.full
def test_the_script_draws_them(tmp_path):
    pytest.importorskip("textual", reason="needs Textual: pip install 'anyaccel[top]'")
    pytest.importorskip("anyaccel_nvidia", reason="needs the plug-in of the vendor of the simulated machine")
    environ = {name: text for name, text in os.environ.items() if name != "ANYACCEL_STATE_DIR"}
    command = [sys.executable, str(ROOT / "scripts" / "screenshots.py"), str(tmp_path / "drawn")]
    subprocess.run(command, check=True, env=environ, timeout=280)
    drawn = {file.name: file.read_text() for file in (tmp_path / "drawn").iterdir()}
    assert sorted(drawn) == PICTURES
    shown = {
        "status": ("alice", "bob", "carol", "nvidia/0", "H100", "drained"),
        "queue": ("GPU:4", "carol", "GPU:2", "alice", "drained"),
        "jobs": ("done", "running", "waiting", "nvidia/0-1"),
        "top": ("alice", "bob", "carol", "nvidia/0", "H100", "drained", "GPU:4", "reserved"),
    }
    for name, picture in drawn.items():
        for text in shown[name.partition("-")[0]]:
            assert text in picture, (name, text)
