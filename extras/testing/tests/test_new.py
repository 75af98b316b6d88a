"""``anyaccel new`` writes a project; the project installs, passes the suite and type-checks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from distributions import copy_project

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "anyaccel-lumen"
FILES = [
    ".gitignore",
    "README.md",
    "pyproject.toml",
    *(
        f"recordings/{name}/{file}"
        for name in ("driver-without-device", "faults", "no-{}", "two-devices")
        for file in ("expected.json", "machine.json")
    ),
    "src/anyaccel_{}/__init__.py",
    "src/anyaccel_{}/presence.json",
    "src/anyaccel_{}/products.toml",
    "src/anyaccel_{}/py.typed",
    "tests/test_mask.py",
    "tests/test_plugin.py",
]

# One of each template and the example of the documentation, installed together.
PROJECTS = ("anyaccel-my-npu", "anyaccel-other", "anyaccel-lumen", "anyaccel-open")


def new(anyaccel, *arguments, **options):
    done = anyaccel("new", *arguments, **options)
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.full  # an installation and three suites: fifteen seconds of processor time
@pytest.mark.timeout(390)  # less than the longest that faulthandler permits
def test_a_new_project_and_the_example_work_in_a_clean_environment(anyaccel, tmp_path):
    """Install the projects into a clean environment, run their tests and check their types, as a new vendor does."""
    status, out, err = new(anyaccel, "my_npu", "--resource", "NPU", cwd=tmp_path)
    assert (status, out) == (0, "anyaccel-my-npu\n"), err
    status, out, err = new(anyaccel, "other", "--from", "tool", cwd=tmp_path)
    assert (status, out) == (0, "anyaccel-other\n"), err
    # Facts that an author knows from the start reach the recordings, too; no variable hides these devices.
    facts = ("--brand", "Open", "--driver", "opendrv", "--pci", "1022", "--mask", "none")
    status, out, err = new(anyaccel, "open", *facts, cwd=tmp_path)
    assert (status, out) == (0, "anyaccel-open\n"), err
    copy_project(EXAMPLE, tmp_path / "anyaccel-lumen")
    python = str(tmp_path / "venv" / "bin" / "python")
    # pytest of the inner run must not inherit options or plug-ins of this one.
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "ANYACCEL"))}

    environ["ANYACCEL_STATE_DIR"] = str(tmp_path / "state")  # what others hold on this machine does not matter
    (tmp_path / "state").mkdir(mode=0o700)  # a directory open to other users is refused

    def run(*command, **options):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, **{"cwd": tmp_path, "env": environ, **options}
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run(sys.executable, "-m", "venv", "venv")
    install = (python, "-m", "pip", "install", "-q")
    run(*install, ROOT / "core", ROOT / "extras" / "testing", *(f"./{name}[test]" for name in PROJECTS))
    for project, rival in zip(PROJECTS, ("other", "my_npu", "", ""), strict=True):
        # Both new projects have the made-up PCI id of the template: beside each other they would claim the same cards.
        alone = environ | {"ANYACCEL_DISABLE": rival}
        tests = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path / project, env=alone)
        # The checks of optional hooks are skipped.
        assert re.search(r"^\d+ passed(, \d+ skipped)? in", tests, re.MULTILINE), tests
        cache = f"--cache-dir={tmp_path / 'types'}"  # the stubs of the standard library are read once for all projects
        assert "Success" in run(python, "-m", "mypy", cache, "src", "tests", cwd=tmp_path / project)
    cli = (python, "-m", "anyaccel")
    listed = json.loads(run(*cli, "plugins", "--json"))["plugins"]
    assert [(plugin["vendor"], plugin["state"], plugin["resource"]) for plugin in listed] == [
        ("lumen", "ok", "LUX"),
        ("my_npu", "ok", "NPU"),
        ("open", "ok", "OPEN"),
        ("other", "ok", "OTHER"),
    ]
    shown = run(*cli, "--machine", "sim:MyNpu-One:4", "run", "NPU:2", "--", "printenv", "MY_NPU_VISIBLE_DEVICES")
    assert shown == "0,1\n"
    assert run(*cli, "new", "zeta") == "anyaccel-zeta\n"  # the template is in the wheel
    checked = json.loads(run(*cli, "check", "my_npu", "--json", env=environ | {"ANYACCEL_DISABLE": "other"}))
    assert checked["passed"] is True
    assert "two-devices" in {result["machine"] for result in checked["results"]}  # the recordings are installed, too


def test_no_word_of_the_template_is_left(anyaccel, tmp_path):
    status, out, _ = new(anyaccel, "zeta9", "--kind", "dpu", "--directory", str(tmp_path / "p"), "--json")
    answer = json.loads(out)
    assert (status, answer["schema"], answer["vendor"]) == (0, "anyaccel.new/1", "zeta9")
    written = sorted(str(path.relative_to(tmp_path / "p")) for path in (tmp_path / "p").rglob("*") if path.is_file())
    assert written == sorted(file.format("zeta9") for file in FILES)
    assert sorted(answer["files"]) == [str(tmp_path / "p" / path) for path in written]
    text = "".join((tmp_path / "p" / path).read_text() for path in written)
    # A word of the template in capitals, or a suffix, would show in the first file that an author opens.
    assert re.findall(r"(?i)acme|\bAPU\b|\.in\b", text) == []
    assert 'key, resource, kind, brand = "zeta9", "ZETA9", "dpu", "Zeta9"' in text
    assert 'Mask("ZETA9_VISIBLE_DEVICES"' in text


def test_a_project_without_a_mask_has_the_driver_and_the_ids_everywhere(anyaccel, tmp_path):
    facts = ("--driver", "zdrv", "--pci", "0afe", "--mask", "none")
    status, _, err = new(anyaccel, "zeta9", *facts, "--directory", str(tmp_path / "p"), cwd=tmp_path)
    assert status == 0, err
    files = {str(path.relative_to(tmp_path / "p")): path.read_text() for path in (tmp_path / "p").rglob("*.*")}
    assert "tests/test_mask.py" not in files
    text = "".join(files.values())
    assert re.findall(r"(?i)ace0|/sys/module/zeta9|/drivers/zeta9|visible_devices", text) == []
    assert "Mask" not in text
    assert 'driver = "zdrv"' in text
    assert "pci_vendors, pci_known = (0x0AFE,), True" in text
    assert "    mask = None\n" in text
    driver_only = files["recordings/driver-without-device/machine.json"]
    assert "/sys/module/zdrv" in driver_only


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Acme",), "a vendor must match [a-z][a-z0-9_]{0,31} (got 'Acme')"),
        (("../x",), "a vendor must match"),
        (("acme", "--resource", "a b"), "a resource must match"),
        (("acme", "--kind", "GPU"), "a kind must match"),
        (("acme", "--brand", 'A"'), "a brand must match"),
        (("acme", "--driver", "a/b"), "a driver must match"),
        (("acme", "--pci", "0x1022"), "a PCI vendor id must match [0-9a-f]{4} (got '0x1022')"),
        (("acme", "--mask", "a-b"), "a mask must match"),
        (("acme", "--directory", "/proc/x"), "cannot be written: No such file or directory; choose another"),
        (("acme", "--directory", "full"), "full exists and is not empty; choose another one with --directory"),
        ((), "the following arguments are required: VENDOR"),
    ],
)
def test_what_cannot_be_written_is_refused(arguments, message, anyaccel, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("kept")
    status, out, err = new(anyaccel, *arguments, cwd=tmp_path)
    assert (status, out) == (2, "")
    assert message in err
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]


def test_a_brand_of_its_own_names_devices_and_tags(anyaccel, tmp_path):
    status, _, err = new(anyaccel, "zeta9", "--brand", "Zeta & Co.", cwd=tmp_path)
    assert status == 0, err
    source = tmp_path / "anyaccel-zeta9" / "src" / "anyaccel_zeta9"
    assert 'key, resource, kind, brand = "zeta9", "ZETA9", "npu", "Zeta & Co."' in (source / "__init__.py").read_text()
    catalog = (source / "products.toml").read_text()
    assert 'model = "Zeta & Co. One"' in catalog
    assert 'tags = ["Zeta-Co.-One", "Zeta-Co"]' in catalog


@pytest.mark.parametrize("variant", ["sysfs", "tool"])
def test_a_new_plug_in_is_small(anyaccel, tmp_path, variant):
    status, _, err = new(anyaccel, "zeta9", "--from", variant, cwd=tmp_path)
    assert status == 0, err
    modules = [path.read_text() for path in (tmp_path / "anyaccel-zeta9" / "src").rglob("*.py")]
    assert len(modules) == 1
    assert len(modules[0].splitlines()) <= 100


def test_an_empty_directory_is_filled(anyaccel, tmp_path):
    (tmp_path / "anyaccel-acme").mkdir()
    status, out, err = new(anyaccel, "acme", cwd=tmp_path)
    assert (status, out) == (0, "anyaccel-acme\n")
    assert "pip install -e '.[test]' && pytest" in err
