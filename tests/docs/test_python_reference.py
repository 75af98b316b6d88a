"""The reference of Python names: each public name has one place and a docstring, and its examples are true."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import anyaccel
import anyaccel_testing
import pytest
from anyaccel import kit, plugin

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted(REFERENCE.glob("python*.md"))
DIRECTIVES = [
    name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]
EXAMPLES = """
import doctest, pkgutil, sys, anyaccel
failed = tried = 0
for name in sys.argv[1:]:
    item = pkgutil.resolve_name(name)
    names = {"anyaccel": anyaccel, "__name__": "__main__"}
    for test in doctest.DocTestFinder().find(item, name, globs=names):
        result = doctest.DocTestRunner().run(test)
        failed, tried = failed + result.failed, tried + result.attempted
print(failed, "of", tried, "failed")
"""


def resolved(name):
    """What a dotted name means."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def in_tables(page):
    """Names of the rows and headings that scripts/write_reference.py writes, or that describe a hook."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    return set(re.findall(r"^(?:\| `|### |## `|\| `@)(\w+)", text, re.MULTILINE))


def test_each_public_name_of_the_package_has_one_place():
    here = [name.removeprefix("anyaccel.") for name in DIRECTIVES if re.fullmatch(r"anyaccel\.\w+", name)]
    errors = in_tables("errors.md")
    names = set(anyaccel.__all__) - {"__version__"}
    assert sorted(here) == sorted(set(here))
    assert names - set(here) - errors == set()
    assert set(here) - names == set()
    assert set(here) & errors <= {"AnyaccelError"}  # the table lists what all errors are, too


@pytest.mark.parametrize(
    ("module", "page"), [(plugin, "hooks.md"), (kit, "kit.md"), (anyaccel_testing, "conformance.md")], ids=str
)
def test_each_public_name_for_authors_has_a_place(module, page):
    here = {name.removeprefix(f"{module.__name__}.") for name in DIRECTIVES if name.startswith(f"{module.__name__}.")}
    assert here <= set(module.__all__)
    others = {name for name in module.__all__ if re.search(rf"`{name}\b|### {name}\n", (REFERENCE / page).read_text())}
    assert set(module.__all__) - here - others == set()


def test_what_pages_import_is_in_the_reference():
    """Or, as a constant of ``anyaccel.accelerators``, comes from the plug-ins."""
    public = set(DIRECTIVES)
    public |= {
        f"{module.__name__}.{name}" for module in (anyaccel, kit, plugin, anyaccel_testing) for name in module.__all__
    }
    missing = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        lines = re.findall(r"^ *from (anyaccel[\w.]*) import (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        names = {f"{module}.{name}" for module, imported in lines for name in imported.split(", ")}
        missing += [f"{page.name}: {name}" for name in names - public if not name.startswith(NOT_LISTED)]
    assert missing == []


def test_what_the_reference_shows_is_documented():
    bare = []
    for name in DIRECTIVES:
        item = resolved(name)
        if isinstance(item, type) and "__doc__" in vars(item):
            own = {f"{name}.{key}": value for key, value in vars(item).items() if not key.startswith("_")}
            functions = {
                key: each for key, each in own.items() if inspect.isfunction(each) or isinstance(each, property)
            }
            bare += [key for key, value in functions.items() if not inspect.getdoc(value)]
        if (inspect.isfunction(item) or isinstance(item, type)) and not inspect.getdoc(item):
            bare.append(name)
    assert bare == []


OTHER_NAMES = {
    *("anyaccel.commands", "anyaccel.engines", "anyaccel.options"),  # groups of entry points
    *("anyaccel.dev", "anyaccel.devices"),  # the domain of attributes, a label of containers
    *("anyaccel.json", "anyaccel.wait"),  # a file, a logger
    "anyaccel_acme.command",
}


NOT_LISTED = ("anyaccel.accelerators.", "anyaccel_lumen.")
"""Constants that the plug-ins bring, and the plug-in of the tutorial."""


def is_there(name):
    """Whether a dotted name means something. A module that needs what is not installed, such as Dask, is only found."""
    try:
        resolved(name)
    except (AttributeError, ImportError):
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False
    return True


def test_names_of_ours_on_pages_are_there():
    """Modules too, wherever they stand: ``anyaccel.detect(...)``, ``--preload anyaccel_dask.node``."""
    missing = []
    for page in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("*/*/README.md"),
    ]:
        if page.name == "CHANGELOG.md" or page.parent.name == "decisions":
            continue  # they tell of what once was
        text = page.read_text(encoding="utf-8")
        names = set(re.findall(r"(?<![\w./-])(anyaccel(?:_[a-z]+)?(?:\.[A-Za-z_]\w*)+)(?![\w/-])", text))
        missing += [f"{page.relative_to(ROOT)}: {name}" for name in names - OTHER_NAMES if not is_there(name)]
    assert missing == []


def test_the_examples_of_docstrings_are_true(tmp_path):
    pytest.importorskip("anyaccel_nvidia", reason="needs the plug-in of the vendor of the simulated machine")
    names = [name for name in DIRECTIVES if ">>> " in (inspect.getdoc(resolved(name)) or "")]
    assert len(names) > 20
    command = [sys.executable, "-c", EXAMPLES, *names]
    # python3 is the one that has the package, as where its environment is activated.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=100, env=environ)
    assert re.fullmatch(r"0 of \d\d failed\n", done.stdout), done.stdout + done.stderr
