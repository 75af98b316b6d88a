"""Entry points are read as importlib.metadata reads them, and without it where possible."""

import importlib.metadata
import sys
import zipfile
from importlib.machinery import PathFinder

import pytest
from anyaccel.vendors.discovery import Source, scan


def by_importlib():
    return [
        Source(vendor=point.name, target=point.value, distribution=point.dist.name, version=point.dist.version)
        for point in importlib.metadata.entry_points(group="anyaccel")
    ]


@pytest.fixture(autouse=True)
def usual(monkeypatch):
    """Remove all finders except for Python's own: the package importlib_metadata replaces that finder."""
    own = [each for each in sys.meta_path if each is PathFinder or not hasattr(each, "find_distributions")]
    monkeypatch.setattr(sys, "meta_path", own)
    if not hasattr(PathFinder, "find_distributions"):
        find = staticmethod(importlib.metadata.MetadataPathFinder.find_distributions)
        monkeypatch.setattr(PathFinder, "find_distributions", find, raising=False)


@pytest.fixture
def path(monkeypatch, tmp_path):
    """A module path of two directories, before which comes nothing."""
    directories = [tmp_path / "first", tmp_path / "second"]
    for directory in directories:
        directory.mkdir()
    monkeypatch.setattr(sys, "path", [*map(str, directories), *sys.path])
    return directories


@pytest.fixture
def alone(monkeypatch):
    """Importlib is not asked."""

    def fail(**_):
        raise AssertionError("importlib.metadata was asked")

    monkeypatch.setattr(importlib.metadata, "entry_points", fail)


def install(directory, name, text, *, kind="dist-info", version="1.0", metadata="METADATA", headers=None):
    info = directory / f"{name}-{version}.{kind}"
    info.mkdir(parents=True)
    content = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: in the description\n"
    (info / metadata).write_text(content if headers is None else headers)
    (info / "entry_points.txt").write_bytes(text.encode() if isinstance(text, str) else text)
    return info


PLAIN = "[console_scripts]\nanyaccel = no:one\n\n[anyaccel]\n# ours\nacme = acme_plugin:attribute [extra]\n"

ODD = {
    "two entries": "[anyaccel]\n\nacme=a\n  zeta   =   b.c:d = e\n",
    "other groups": "[anyaccel.extra]\nacme = a\n[ anyaccel ]\nbeta = b\n[Anyaccel]\ngamma = c\n",
    "a group twice": "[anyaccel]\nacme = a\n[other]\nx = y\n[anyaccel]\nzeta = b\n",
    "double brackets": "[[anyaccel]]\nacme = a\n",
    "lines of Windows": "[anyaccel]\r\nacme = a\r\n",
    "a separator of lines in a value": "[anyaccel]\nacme = a\x0czeta = b\n",
    "names of a group": "[other]\nanyaccel = a\n",
    "before any group": "anyaccel = a\n",
    "no newline at the end": "[anyaccel]\nacme = a",
    "nothing": "",
}


@pytest.mark.usefixtures("alone")
def test_plain_distributions_need_no_importlib(path):
    install(path[0], "acme_accelerators", PLAIN)
    assert [source for source in scan() if source.vendor == "acme"] == [
        Source(vendor="acme", target="acme_plugin:attribute [extra]", distribution="acme_accelerators", version="1.0")
    ]


def test_what_is_installed_here_is_read_alike():
    assert scan() == by_importlib()


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_odd_files_are_read_alike(path, text):
    install(path[0], "acme", text)
    assert scan() == by_importlib()


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["acme", "acme"], 1),
        (["Acme.One", "acme_one"], 1),
        (["acme-one", "acme__one"], 2),  # what follows a dash is the version
        (["acme", "acmes"], 2),
    ],
)
def test_the_first_of_one_name_counts(path, names, kept):
    for directory, name, vendor in zip(path, names, ("one", "two"), strict=True):
        install(directory, name, f"[anyaccel]\n{vendor} = m\n")
    found = scan()
    assert found == by_importlib()
    assert len([source for source in found if source.target == "m"]) == kept


def test_the_first_of_one_name_counts_also_without_entry_points(path):
    (path[0] / "acme-2.0.dist-info").mkdir()
    install(path[1], "acme", "[anyaccel]\nacme = a\n")
    assert "acme" not in {source.vendor for source in scan()}
    assert scan() == by_importlib()


def test_two_versions_in_one_directory(path):
    for version in ("1.0", "2.0"):
        install(path[0], "acme", f"[anyaccel]\nacme = a{version[0]}\n", version=version)
    assert scan() == by_importlib()
    assert sum(source.vendor == "acme" for source in scan()) == 1


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("metadata", ["PKG-INFO", "METADATA"])
def test_projects_in_development_are_read(path, metadata):
    """``setup.py develop`` and an ``.egg-link`` put the project's own directory on the module path."""
    install(path[0], "acme", "[anyaccel]\nacme = a\n", kind="egg-info", metadata=metadata)
    (path[1] / "old-1.0.egg-info").write_text("Metadata-Version: 1.0\nName: old\n")  # a file, as distutils wrote it
    assert Source(vendor="acme", target="a", distribution="acme", version="1.0") in scan()


def test_projects_in_development_are_read_alike(path):
    install(path[0], "acme", "[anyaccel]\nacme = a\n", kind="egg-info", metadata="PKG-INFO")
    (path[1] / "old-1.0.egg-info").write_text("Metadata-Version: 1.0\nName: old\n")
    assert scan() == by_importlib()


def archive(path, place):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{place}/METADATA", "Name: acme\nVersion: 3\n")
        file.writestr(f"{place}/PKG-INFO", "Name: acme\nVersion: 3\n")
        file.writestr(f"{place}/entry_points.txt", "[anyaccel]\nacme = a\n")
    return str(path)


@pytest.mark.parametrize("name", ["bundle.zip", "acme-3.egg"])
def test_archives_are_read(tmp_path, monkeypatch, name):
    place = "EGG-INFO" if name.endswith(".egg") else "acme-3.dist-info"
    monkeypatch.syspath_prepend(archive(tmp_path / name, place))
    assert Source(vendor="acme", target="a", distribution="acme", version="3") in scan()
    assert scan() == by_importlib()


def test_eggs_that_are_directories_are_read(tmp_path, monkeypatch):
    install(tmp_path / "acme-3.egg", "x", "[anyaccel]\nacme = a\n", metadata="PKG-INFO").rename(
        tmp_path / "acme-3.egg" / "EGG-INFO"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "acme-3.egg"))
    assert "acme" in {source.vendor for source in scan()}
    assert scan() == by_importlib()


def test_names_that_say_nothing_are_read_alike(path):
    for name in ("", ".", "_"):
        install(path[0], name, "[anyaccel]\nacme = a\n", version=f"1{name}", headers="Name: acme\nVersion: 7\n")
    install(path[0], "zeta", "[anyaccel]\nzeta = z\n", kind="Dist-Info")
    assert scan() == by_importlib()


def test_other_finders_are_asked(monkeypatch):
    class Elsewhere(importlib.metadata.Distribution):
        def read_text(self, name):
            return {"METADATA": "Name: acme\nVersion: 5\n", "entry_points.txt": "[anyaccel]\nacme = a\n"}.get(name)

        def locate_file(self, path):
            raise NotImplementedError

    class Finder(importlib.metadata.DistributionFinder):
        def find_spec(self, *_):
            return None

        def find_distributions(self, context=None):
            return [Elsewhere()]

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert Source(vendor="acme", target="a", distribution="acme", version="5") in scan()
    assert scan() == by_importlib()


def test_places_that_cannot_be_read_are_left_out(path, tmp_path, monkeypatch):
    (tmp_path / "a file").write_text("no archive")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "missing"), "", *sys.path])
    install(path[0], "acme", "[anyaccel]\nacme = a\n")
    assert scan() == by_importlib()
    sys.path.insert(0, str(tmp_path / "a file"))
    assert scan() == by_importlib()


@pytest.mark.parametrize("headers", ["", "Version: 1\n", "name: N\nVERSION:  2\nVersion: 3\n", "\nName: late\n"])
def test_odd_metadata_leaves_names_empty_and_entries_in(path, headers):
    install(path[0], "acme", "[anyaccel]\nacme = a\n", headers=headers)
    (source,) = [source for source in scan() if source.vendor == "acme"]
    (point,) = importlib.metadata.entry_points(group="anyaccel", name="acme")
    told = point.dist.metadata
    assert (source.distribution, source.version) == (told.get("Name", ""), told.get("Version", ""))


@pytest.mark.parametrize("text", [b"\xff\xfe broken", b"[other]\nno equals sign\n"])
def test_what_is_wrong_with_others_is_none_of_our_business(path, text):
    install(path[0], "other", text)
    install(path[0], "acme", "[anyaccel]\nacme = a\n")
    assert "acme" in {source.vendor for source in scan()}


def test_an_entry_without_a_target_costs_its_vendor_only(path):
    install(path[0], "acme", b"[anyaccel]\nacme\nzeta = \xff\n")
    found = {source.vendor: source.target for source in scan()}
    assert (found["acme"], found["zeta"]) == ("", "\N{REPLACEMENT CHARACTER}")
