"""The pictures of a shared machine are there, and the script that draws them runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGE = re.compile(r"!\[[^\]]+\]\(([^)]+)\)")


def test_the_pictures_of_a_machine_are_on_pages():
    readme, page = ROOT / "README.md", ROOT / "docs" / "how-to" / "shared-machine.md"
    images = {(each.parent / name).resolve() for each in (readme, page) for name in IMAGE.findall(each.read_text())}
    assert IMAGE.search("\n".join(readme.read_text().splitlines()[:30])), "the README begins with a picture"
    assert images >= {
        ROOT / "docs" / "images" / f"{name}-{width}.svg" for name in ("status", "top") for width in (80, 160)
    }
    for image in images:
        assert image.read_text().startswith("<svg"), image


@pytest.mark.full
def test_the_script_draws_them(tmp_path):
    pytest.importorskip("textual", reason="needs Textual: pip install 'anyaccel[top]'")
    pytest.importorskip("anyaccel_nvidia", reason="needs the plug-in of the vendor of the simulated machine")
    environ = {name: text for name, text in os.environ.items() if name != "ANYACCEL_STATE_DIR"}
    command = [sys.executable, str(ROOT / "scripts" / "screenshots.py"), str(tmp_path / "drawn")]
    subprocess.run(command, check=True, env=environ, timeout=110)
    drawn = {file.name: file.read_text() for file in (tmp_path / "drawn").iterdir()}
    assert sorted(drawn) == ["status-160.svg", "status-80.svg", "top-160.svg", "top-80.svg"]
    for name, picture in drawn.items():
        for text in ("alice", "bob", "carol", "nvidia/0", "H100"):
            assert text in picture, (name, text)
    for text in ("GPU:8", "frank", "GPU:4", "erin"):
        assert text in drawn["top-160.svg"], text
    assert "train" in drawn["status-160.svg"]
