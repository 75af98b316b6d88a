"""Man pages: made from the declarations of the commands, and read by the tools that show them."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from anyaccel.cli.commands import COMMANDS

ROOT = Path(__file__).parents[2]
MAN = {path.stem: path for folder in ("core", "extras/*") for path in ROOT.glob(f"{folder}/man/*.1")}


def made():
    spec = importlib.util.spec_from_file_location("write_man", ROOT / "scripts" / "write_man.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pages()


def test_the_pages_are_those_of_the_commands():
    assert {path: path.read_text(encoding="utf-8") for path in MAN.values()} == made(), (
        "run: python scripts/write_man.py"
    )


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_a_page_is_shown_without_a_warning(command):
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed here")
    page = MAN[f"anyaccel{'-' * bool(command)}{command}"]
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Tascii", "-P-c", page], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    shown = " ".join(re.sub(".\x08", "", done.stdout).split())  # bold is a letter twice, with a step back between
    assert f"SYNOPSIS anyaccel {command}".strip() in shown
