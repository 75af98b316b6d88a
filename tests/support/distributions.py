"""The distributions of this workspace that tests build, and commands that must succeed."""

import os
import shutil
import subprocess
from pathlib import Path

from lengths import length

ROOT = Path(__file__).parents[2]
INSTALLED = ["nvidia", "tpu"]
# Those that are installed below, and at full length all.
VENDORS = length(INSTALLED, sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")))
EXTRAS = length(["testing"], sorted(path.parent.name for path in ROOT.glob("extras/*/pyproject.toml")))
FOLDERS = (
    {"anyaccel": ROOT / "core"}
    | {f"anyaccel_{vendor}": ROOT / "plugins" / vendor for vendor in VENDORS}
    | {f"anyaccel_{extra}": ROOT / "extras" / extra for extra in EXTRAS}
)
QUIET = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def copy_project(source, target):
    """Copy a project without what other processes write into it meanwhile: the interpreter's compiled modules."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))


def check(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout
