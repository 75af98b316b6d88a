"""What is written down once per plug-in and per extra agrees with the folders in plugins/ and extras/."""

import re
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
from anyaccel import extras

ROOT = Path(__file__).parents[2]
VENDORS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
EXTRAS = sorted(path.parent.name for path in ROOT.glob("extras/*/pyproject.toml"))
BESIDE = {vendor: f"plugins/{vendor}" for vendor in VENDORS} | {extra: f"extras/{extra}" for extra in EXTRAS}
"""The folder of each distribution beside the core."""
BRINGS = {"dask": ["distributed"], "ray": ["ray"]}
"""What an extra of the core brings beside ours: what the distribution is for, and does not depend on by itself."""
OTHER_EXTRAS = {
    "extras/dask": {"anyaccel-cluster"},
    "extras/kubernetes": {"anyaccel-export"},
    "extras/ray": {"anyaccel-cluster", "anyaccel-export"},
}
"""Other extras on which one depends: CDI, and Ray's labels, are what the exports write."""
VERSION = re.findall(r'^__version__ = "(.+)"', (ROOT / "core/src/anyaccel/_version.py").read_text(), re.MULTILINE)[0]
MAJOR, MINOR = map(int, VERSION.split(".")[:2])
BOUNDS = f">={MAJOR}.{MINOR},<{MAJOR}.{MINOR + 1}"


def project(folder):
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


def uv(folder):
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["tool"]["uv"]


def tox_section(name):
    parser = ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini")
    return parser[name]


def test_every_distribution_is_an_extra_of_the_core():
    extras = project("core")["optional-dependencies"]
    for name in BESIDE:
        own, *others = extras[name]
        assert own == f"anyaccel-{name}{BOUNDS}"
        assert [re.split("[<>=]", other)[0] for other in others] == BRINGS.get(name, [])
    for name, framework in {"joblib": "joblib", "notebook": "ipython", "optuna": "optuna"}.items():
        own, other = extras[name]
        assert own == f"anyaccel-integrations{BOUNDS}"
        assert other.startswith(f"{framework}>=")
    assert extras["all"] == [f"anyaccel[{','.join(BESIDE)}]"]


def test_uv_finds_every_distribution_beside_the_core():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras == {name: [f"anyaccel[{name}]"] for name in (*BESIDE, "all")}
    assert {f"anyaccel-{name}" for name in BESIDE} <= set(uv("core")["sources"])
    for folder in BESIDE.values():
        assert set(uv(folder)["sources"]) == {"anyaccel"} | OTHER_EXTRAS.get(folder, set())


def test_uv_installs_copies_of_what_is_in_the_workspace_and_builds_them_anew_after_a_change():
    """Of a member, and of whatever member it depends on: an installation outlives the clone."""
    members = [str(path.parent.relative_to(ROOT)) for each in uv(".")["workspace"]["members"] for path in
               sorted(ROOT.glob(f"{each}/pyproject.toml"))]  # fmt: skip
    assert {"core", *BESIDE.values()} <= set(members)
    for member in (".", *members):
        for name, source in uv(member).get("sources", {}).items():
            assert source == {"workspace": True, "editable": False}, (member, name)
    for member in members:
        assert uv(member)["cache-keys"] == [{"file": "**/*"}], member


def test_every_distribution_has_its_tox_environment():
    assert f"{{{','.join(VENDORS)}}}" in tox_section("tox")["env_list"]
    names = re.findall(r"^(\w+): TESTS = plugins/(\w+)/tests$", tox_section("testenv")["set_env"], re.MULTILINE)
    assert names == [(vendor, vendor) for vendor in VENDORS]
    names = re.findall(r"^(\w+): -e plugins/(\w+)$", tox_section("testenv")["deps"], re.MULTILINE)
    assert names == [(vendor, vendor) for vendor in VENDORS]
    assert f"{{{','.join(EXTRAS)}}}" in tox_section("tox")["env_list"]
    names = re.findall(r"^(\w+): TESTS = extras/(\w+)/tests\b", tox_section("testenv")["set_env"], re.MULTILINE)
    assert names == [(extra, extra) for extra in EXTRAS]
    listed = (ROOT / "tests" / "extras.txt").read_text()
    assert re.findall(r"^-e extras/(\w+)$", listed, re.MULTILINE) == EXTRAS
    together = (ROOT / "tests" / "plugins.txt").read_text()
    assert re.findall(r"^-e plugins/(\w+)$", together, re.MULTILINE) == VENDORS


def test_ci_runs_the_environment_of_every_extra():
    (listed,) = re.findall(r'"([\w,-]+),\$software\$\{plugins', (ROOT / ".ci/run").read_text())
    assert set(EXTRAS) <= set(listed.split(","))


def test_every_plugin_is_in_the_table_of_support():
    page = (ROOT / "docs" / "reference" / "vendors.md").read_text()
    rows = re.findall(r"^\| \[([^]]+)\]\(\.\./\.\./plugins/(\w+)/README\.md\) \|", page, re.MULTILINE)
    assert sorted(vendor for _, vendor in rows) == VENDORS
    short = (ROOT / "README.md").read_text().partition("| state | vendors |")[2].partition("\n\n")[0]
    named = [name.strip() for line in short.splitlines()[3:] for name in line.split("|")[2].split(",")]
    assert sorted(named) == sorted(name for name, _ in rows)


def test_every_plugin_is_in_the_list_of_pages():
    """Its page on the site is made of that line."""
    lines = re.findall(
        r"^- \[[^]]+\]\(\.\./plugins/(\w+)/README\.md\)$", (ROOT / "docs/README.md").read_text(), re.MULTILINE
    )
    assert sorted(lines) == VENDORS


def test_every_distribution_has_an_owner():
    owned = re.findall(r"^/((?:plugins|extras)/\w+)/ @", (ROOT / "CODEOWNERS").read_text(), re.MULTILINE)
    assert sorted(owned) == sorted(BESIDE.values())


def test_commands_and_engines_that_are_not_in_the_core_name_the_extra_that_brings_them():
    for table, group in ((extras.COMMANDS, "anyaccel.commands"), (extras.ENGINES, "anyaccel.engines")):
        points = {extra: project(f"extras/{extra}").get("entry-points", {}).get(group, {}) for extra in EXTRAS}
        brought = {name: extra for extra, names in points.items() for name in names}
        assert table == brought


@pytest.mark.parametrize("name", BESIDE)
def test_a_distribution_is_described_alike(name):
    core, plugin = project("core"), project(BESIDE[name])
    assert plugin["name"] == f"anyaccel-{name}"
    targets = [target for group in plugin.get("entry-points", {}).values() for target in group.values()]
    assert {target.partition(":")[0].partition(".")[0] for target in targets} <= {f"anyaccel_{name}"}
    assert name not in VENDORS or name in plugin["entry-points"]["anyaccel"]
    assert plugin["version"] == VERSION
    assert f"anyaccel{BOUNDS}" in plugin["dependencies"]
    for key in ("requires-python", "license", "license-files", "authors", "readme"):
        assert plugin[key] == core[key], key
    pythons = [line for line in core["classifiers"] if "Python :: 3." in line]
    assert [line for line in plugin["classifiers"] if "Python :: 3." in line] == pythons
    folder = ROOT / BESIDE[name]
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (folder / "src" / f"anyaccel_{name}" / "py.typed").is_file()
    assert name not in VENDORS or list(folder.glob("recordings/*/machine.json"))
    assert list(folder.glob("tests/test_*.py"))
    assert len((folder / "README.md").read_text().splitlines()) > 15


def test_whatever_names_the_version_names_this_one():
    assert f"version: {VERSION}" in (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nARG VERSION={MAJOR}.{MINOR}.*\n" in (ROOT / "examples/container/Containerfile").read_text()
    for path in (
        "extras/testing/src/anyaccel_testing/scaffold/common/pyproject.toml.in",
        "docs/how-to/write-a-plugin.md",
        "docs/tutorial-plugin.md",
        "examples/anyaccel-lumen/pyproject.toml",
    ):
        assert f'"anyaccel{BOUNDS}"' in (ROOT / path).read_text(), path


def test_all_that_the_globs_of_the_install_command_match_is_a_distribution():
    """A module there would leave a __pycache__ beside them, and the command would fail the second time."""
    for folder in ("plugins", "extras"):
        assert [path.name for path in (ROOT / folder).iterdir() if not (path / "pyproject.toml").is_file()] == []
