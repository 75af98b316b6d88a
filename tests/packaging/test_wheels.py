"""The distributions as a user gets them: built, looked into, and installed into an empty environment."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest
from anyaccel import __version__
from distributions import FOLDERS, QUIET, ROOT, VENDORS, check, copy_project

pytestmark = [pytest.mark.xdist_group("packaging"), pytest.mark.timeout(300)]


WHEELS_INSTALLED = pytest.mark.full  # all tests of the README's command run on wheels that are built and installed


@pytest.fixture(scope="session")
def bin_of_user(dist, tmp_path_factory):
    """An environment in which a user installed anyaccel[nvidia,tpu] from that folder, and nothing else."""
    where = tmp_path_factory.mktemp("user") / "venv"
    venv.create(where)  # without a pip of its own, which would take longer to install than the rest
    pip = [sys.executable, "-m", "pip", "--python", where, "install", "--quiet", "--find-links", dist]
    check(*pip, "anyaccel[nvidia,tpu]", env=QUIET, cwd=where)
    return where / "bin"


@pytest.fixture
def bare(bin_of_user, tmp_path):
    """Run a command of that environment, away from the source."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ANYACCEL_", "PYTHON"))}
    environ["ANYACCEL_STATE_DIR"] = str(tmp_path / "state")  # what others hold on this machine does not matter

    def run(command, *arguments, **more):
        return check(bin_of_user / command, *arguments, cwd=tmp_path, env={**environ, **more})

    return run


def members(dist, name):
    (wheel,) = dist.glob(f"{name}-[0-9]*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_holds_the_package_and_nothing_else(dist, name):
    inside = members(dist, name)
    man = {part for part in inside if ".data/data/share/man/man1/" in part}
    assert {part.rpartition("/")[2] for part in man} == {path.name for path in FOLDERS[name].glob("man/*.1")}
    inside = [part for part in inside if part not in man]
    deployed = {part.rpartition("/")[2] for part in inside if ".data/data/share/anyaccel-kubernetes/" in part}
    assert deployed == {path.name for path in FOLDERS[name].glob("deploy/*")}
    assert {part.split("/")[0].split("-")[0] for part in inside} == {name}
    assert f"{name}/py.typed" in inside
    assert [part for part in inside if part.endswith(".dist-info/licenses/LICENSE")]
    source = FOLDERS[name] / "src"
    wanted = {str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in {".py", ".pyi"}}
    assert {part for part in inside if part.endswith((".py", ".pyi"))} == wanted
    own = [part for part in inside if "/scaffold/" not in part]  # the template of a project has tests of its own
    assert not [part for part in own if "tests/" in part]
    recordings = {f"{name}/{path.relative_to(FOLDERS[name])}" for path in FOLDERS[name].glob("recordings/*/*.json")}
    assert {part for part in own if "recordings/" in part} == recordings


@pytest.mark.parametrize("vendor", VENDORS)
def test_an_sdist_holds_what_a_packager_tests_with(dist, vendor):
    (sdist,) = dist.glob(f"anyaccel_{vendor}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    for wanted in ("/recordings/", "/tests/test_", "/README.md", "/LICENSE", f"/src/anyaccel_{vendor}/"):
        assert any(wanted in name for name in names), wanted


def test_a_plugin_of_another_version_than_the_core_is_not_released(tmp_path):
    for path in ("scripts/build.py", "core/src/anyaccel/_version.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        shutil.copy(ROOT / path, tmp_path / path)
    copy_project(ROOT / "plugins" / "tpu", tmp_path / "plugins" / "tpu")
    project = tmp_path / "plugins" / "tpu" / "pyproject.toml"
    project.write_text(project.read_text().replace(f'version = "{__version__}"', 'version = "9.9.9"'))
    command = [sys.executable, tmp_path / "scripts" / "build.py", "tpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=QUIET, check=False)
    assert done.returncode == 1
    told = f"anyaccel_tpu-9.9.9-py3-none-any.whl: its version must be that of the core, {__version__}"
    assert told in done.stderr.splitlines()


@WHEELS_INSTALLED
def test_extras_bring_the_plugins_that_were_asked_for(bare):
    lines = bare("anyaccel", "plugins").splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["nvidia", "ok", "GPU", "anyaccel-nvidia", __version__],
        ["tpu", "ok", "TPU", "anyaccel-tpu", __version__],
    ]


@WHEELS_INSTALLED
def test_a_command_that_is_not_installed_names_the_extra_that_brings_it(bare, bin_of_user):
    for command, extra in (("check", "testing"), ("new", "testing"), ("ray", "ray")):
        done = subprocess.run([bin_of_user / "anyaccel", command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines()[-1] == f"anyaccel: pip install 'anyaccel[{extra}]'"
    shown = bare("anyaccel", "--help")
    assert "new (anyaccel[testing])" in " ".join(shown.split())
    assert "\n  new " not in shown


@WHEELS_INSTALLED
def test_an_installed_plugin_is_checked_on_the_recordings_that_it_brings(bare, bin_of_user, dist):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--find-links", dist]
    check(*pip, "--target", bin_of_user.parent / "suite", "anyaccel-testing", env=QUIET)
    document = json.loads(bare("anyaccel", "check", "tpu", "--json", PYTHONPATH=bin_of_user.parent / "suite"))
    machines = {result["machine"] for result in document["results"] if result["check"] == "C07"}
    assert (document["passed"], machines) == (True, {path.name for path in ROOT.glob("plugins/tpu/recordings/*")})


@pytest.mark.full
def test_all_is_installed_from_a_folder_without_a_network(dist, tmp_path):
    """What a machine without a network needs is in one folder: what was built, and what that depends on."""
    wanted = f"anyaccel[{','.join((*VENDORS, 'testing'))}]"
    house = tmp_path / "house"
    pip = [sys.executable, "-m", "pip"]
    check(*pip, "download", "--quiet", "--dest", house, "--find-links", dist, wanted, env=QUIET)
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    nowhere = {name: value for name, value in QUIET.items() if not name.startswith(("PIP_", "HTTP", "http"))}
    offline = ["--no-index", "--find-links", house]
    check(python, "-m", "pip", "--isolated", "install", "--quiet", *offline, wanted, env=nowhere)
    shown = check(tmp_path / "venv" / "bin" / "anyaccel", "plugins", cwd=tmp_path)
    assert [line.split()[0] for line in shown.splitlines()[1:]] == VENDORS


@WHEELS_INSTALLED
def test_the_installed_command_gives_devices_to_a_program(bare):
    out = bare("anyaccel", "--machine", "sim:H100:8", "run", "H100:2", "--", "printenv", "CUDA_VISIBLE_DEVICES")
    assert len(out.split(",")) == 2
    out = bare("anyaccel", "--machine", "sim:TPU-V4:4", "run", "TPU:4", "--", "printenv", "ANYACCEL_DEVICES")
    assert len(out.split(",")) == 4


@WHEELS_INSTALLED
def test_the_installed_library_finds_devices(bare):
    code = "import anyaccel; print(len(anyaccel.detect('sim:H100:8,TPU-V4:4').devices))"
    assert bare("python", "-W", "error", "-c", code) == "12\n"


@WHEELS_INSTALLED
def test_a_recording_of_this_checkout_is_replayed(bare):
    recording = ROOT / "plugins" / "nvidia" / "recordings" / "h100-8gpu-nvswitch"
    assert "8 devices" in bare("anyaccel", "--machine", str(recording))
