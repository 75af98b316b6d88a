"""The README's first command: it installs a copy, which other users run and which outlives the clone."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from distributions import QUIET, ROOT, check, copy_project

pytestmark = pytest.mark.timeout(400)

SCRIPT = ROOT / "tests" / "support" / "users.py"
RUN = "run H100:2 --machine sim:H100:8 -- true"


@pytest.fixture
def clone(tmp_path):
    """A clone of this workspace in a directory that other users cannot read."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    path = closed / "clone"
    for part in ("core", "extras", "plugins"):
        copy_project(ROOT / part, path / part)
    shutil.copy(ROOT / "pyproject.toml", path)
    yield path
    shutil.rmtree(closed, ignore_errors=True)


@pytest.fixture
def install(clone, tmp_path):
    """Type the README's first command in the clone, or the end of it again; returns its environment, put elsewhere."""
    shown = check(sys.executable, ROOT / "scripts" / "readme_command.py", "main").splitlines()[0]
    where = tmp_path / "environment"
    make, activate, *further = shown.replace(".venv", str(where)).split(" && ")
    assert str(where) in make
    assert str(where) in activate
    # An empty cache, and nothing that says where to install; the index is that of this machine.
    left_out = ("ANYACCEL_", "PYTHON", "VIRTUAL_ENV", "CONDA")
    environ = {name: value for name, value in QUIET.items() if not name.startswith(left_out)}
    environ |= {
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "PATH": f"{Path(sys.executable).parent}:{environ['PATH']}",
    }

    def install(*, again=False):
        parts = ["umask 022", activate, further[-1]] if again else ["umask 022", make, activate, *further]
        check("bash", "-c", " && ".join(parts), cwd=clone, env=environ)
        return where

    return install


def do_as_other_user(command, *readable):
    """Do something as another user, in a mount namespace where that user can read these paths."""
    given = {
        "users": {"other": 61_104},
        "keep": sorted({*map(str, readable), sys.base_prefix}),
        "environ": {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
        "check": "true",
        "commands": [("other", command)],
    }
    inner = ["bash", "-c", '"$@"; exit $?', "bash", sys.executable, str(SCRIPT)]  # bash reaps orphans
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *inner]
    done = subprocess.run(namespaces, input=json.dumps(given), capture_output=True, text=True, timeout=100, check=False)
    if done.stderr.startswith("unshare:"):
        pytest.skip(f"no namespaces can be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    if "skip" in answer:
        pytest.skip(answer["skip"])
    (result,) = answer["results"]
    return result


@pytest.mark.full  # uv is downloaded, and an environment made
def test_the_first_command_installs_a_copy_that_other_users_run_when_the_clone_is_gone(clone, install, tmp_path):
    where = install()
    for path in ("core/src/anyaccel/text.py", "plugins/tpu/src/anyaccel_tpu/__init__.py"):
        with open(clone / path, "a") as file:
            file.write("\nCHANGED = True\n")
    install(again=True)  # what was built before the change is not installed again
    shutil.rmtree(clone.parent)
    shutil.rmtree(tmp_path / "cache")
    code = "import anyaccel.text, anyaccel_tpu; assert anyaccel.text.CHANGED and anyaccel_tpu.CHANGED"
    check(where / "bin" / "python", "-I", "-c", code, cwd=tmp_path)
    environ = {**os.environ, "ANYACCEL_STATE_DIR": str(tmp_path / "state")}
    check(where / "bin" / "anyaccel", *RUN.split(), cwd=tmp_path, env=environ)
    if os.geteuid() != 0:
        pytest.skip("it runs for this user; only root can act as another one")
    assert stat.S_IMODE(where.stat().st_mode) & 0o005 == 0o005
    assert do_as_other_user(f"{where}/bin/anyaccel {RUN}", where) == [0, ""]
