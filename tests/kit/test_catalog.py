"""Products in a TOML file."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from anyaccel.kit import Catalog, Fault, pci_name, tag
from anyaccel.kit.catalog import look_up

TEXT = """
pci_names = '''
2000 c8 Acme Old XT
2000 -  Acme Old
'''
[defaults]
counts = [1, 4]
id_template = "acme-{pci}"
node_templates = ["/dev/acme{index}"]
link = 2

[[products]]
key = "ONE"
tags = ["Acme-One", "ONE"]
aliases = ["A1"]
model = "Acme One"
names = 'Acme One.*'
memory = "16GiB"
pci = [0x1000]
virtual = [0x1900]
lanes = 8
attributes = { family = "ONE" }
constants = ["ACME_ONE"]
instance_types = { "a1.large" = 1 }
slots = 4
parts = { Acme-One-Half = 2 }

[[products]]
like = "ONE"
model = "Acme One Server"
pci = [0x1001]
listed = false

[[products]]
tags = ["Acme-Two"]
model = "Acme Two"
memory = 34359738368
counts = [2]
pci = [0x1002]
revisions = [0xc0]
constants = { ACME_TWO = "Acme-Two", ACME_2 = "Acme-Two" }

[[products]]
tags = ["Acme-Two-S"]
model = "Acme Two S"
pci = [0x1002]
subsystems = [0x4e]

[[products]]
tags = ["Acme-Two-Any"]
model = "Acme Two of some kind"
pci = [0x1002]

[ignored]
0x0001 = "an audio function"

[resets]
2 = ["its state is invalid", "restart it"]
"""


ROOT = Path(__file__).parents[2]
CATALOGS = sorted(ROOT.glob("plugins/*/src/*/*.toml"))


@pytest.fixture(params=["as it is written", "kept"])
def catalog(tmp_path, request, monkeypatch):
    (tmp_path / "products.toml").write_text(TEXT)
    catalog = Catalog(str(tmp_path / "__init__.py"))
    if request.param == "kept":
        catalog.keep()
        monkeypatch.setitem(sys.modules, "tomllib", None)
    return catalog


def test_a_product_has_what_the_file_says_and_the_defaults(catalog):
    one = catalog.products()[0]

    assert (one.name, one.aliases, one.memory_bytes) == ("Acme-One", ("ONE", "A1"), 16 << 30)
    assert (one.counts, one.id_template, one.link) == ((1, 4), "acme-{pci}", 2)
    assert (one.constants, one.instance_types) == ({"ACME_ONE": "Acme-One"}, {"a1.large": 1})
    assert one.attributes == {"family": "ONE"}
    assert (one.slots, one.parts) == (4, {"Acme-One-Half": 2})


def test_what_is_not_listed_is_no_product_and_is_found_all_the_same(catalog):
    assert [product.model for product in catalog.products()].count("Acme One Server") == 0
    server = catalog.by_pci(0x1001)
    assert (server.key, server.model, server.tags, server.facts["lanes"]) == (
        "ONE",
        "Acme One Server",
        ("Acme-One", "ONE"),
        8,
    )
    assert catalog.get("ONE").model == "Acme One"


def test_a_table_of_faults_is_one_of_reasons_and_remedies(catalog):
    assert catalog.faults("resets") == {"2": Fault("its state is invalid", "restart it")}


def test_constants_may_be_named_one_by_one(catalog):
    assert catalog.products()[1].constants == {"ACME_TWO": "Acme-Two", "ACME_2": "Acme-Two"}


@pytest.mark.parametrize(
    ("device", "more", "model"),
    [
        (0x1000, {}, "Acme One"),
        (0x1900, {}, "Acme One"),
        (0x1002, {"revision": 0xC0}, "Acme Two"),
        (0x1002, {"subsystem": 0x4E}, "Acme Two S"),
        (0x1002, {"revision": 0xC1}, "Acme Two of some kind"),
        (0x1002, {}, "Acme Two of some kind"),
        (0x7777, {}, None),
    ],
)
def test_a_pci_id_names_a_product(catalog, device, more, model):
    found = catalog.by_pci(device, **more)

    assert (found and found.model) == model


@pytest.mark.parametrize(
    ("name", "key"), [("Acme One", "ONE"), ("Acme One rev B", "ONE"), ("Acme Two S", "Acme-Two-S"), ("Acme", None)]
)
def test_a_name_names_a_product(catalog, name, key):
    found = catalog.by_name(name)

    assert (found and found.key) == key


@pytest.mark.parametrize(
    ("memory", "key"), [(16 << 30, "ONE"), ((16 << 30) - (512 << 20), "ONE"), (24 << 30, None), (None, None)]
)
def test_memory_names_a_product_where_one_fits(catalog, memory, key):
    found = catalog.by_memory(memory)

    assert (found and found.key) == key


def test_ids_that_are_no_products_have_names(catalog):
    assert catalog.ignored == {1: "an audio function"}
    assert catalog.pci_name(0x2000, 0xC8) == "Acme Old XT"
    assert catalog.pci_name(0x2000, 0xC9) == catalog.pci_name(0x2000) == "Acme Old"
    assert catalog.pci_name(0x2001) == ""


@pytest.mark.parametrize(
    "spoil",
    [
        lambda toml, _: toml.write_text(TEXT.replace("Acme One Server", "Acme Uno")),
        lambda toml, kept: (toml.write_text(TEXT.replace("Acme One Server", "Acme Uno")), kept.write_text("{")),
        lambda toml, kept: (toml.write_text(TEXT.replace("Acme One Server", "Acme Uno")), kept.write_text("[1]")),
        lambda toml, kept: (toml.write_text(TEXT.replace("Acme One Server", "Acme Uno")), kept.unlink()),
    ],
    ids=["another catalog", "no JSON", "other JSON", "none"],
)
def test_a_copy_that_is_not_of_this_catalog_is_ignored(tmp_path, spoil):
    toml = tmp_path / "products.toml"
    toml.write_text(TEXT)
    Catalog(str(tmp_path / "__init__.py")).keep()

    spoil(toml, tmp_path / "products.json")

    assert Catalog(str(tmp_path / "__init__.py")).by_pci(0x1001).model == "Acme Uno"


@pytest.mark.parametrize("path", CATALOGS, ids=lambda path: f"{path.parts[-2]}-{path.stem}")
def test_the_copy_of_a_catalog_says_what_the_catalog_says(path, monkeypatch):
    """``python scripts/write_names.py`` writes the copies."""
    written = tomllib.loads(path.read_text(encoding="utf-8"))
    monkeypatch.setitem(sys.modules, "tomllib", None)

    assert Catalog(str(path), path.name).data == written


def test_a_size_that_is_none_is_refused(tmp_path):
    (tmp_path / "products.toml").write_text('[[products]]\ntags=["X"]\nmodel="X"\nmemory="16 gigs"\n')

    with pytest.raises(ValueError, match=r"memory must be bytes, or text .* \(got '16 gigs'\)"):
        Catalog(str(tmp_path / "x.py")).products()


@pytest.mark.parametrize(
    ("text", "cleaned"), [("Acme One (TM)", "Acme-One-TM"), ("1g.5gb", "1g.5gb"), ("-a_b-", "a_b"), ("()", "")]
)
def test_a_name_becomes_a_tag(text, cleaned):
    assert tag(text) == cleaned


PCI_IDS = """# a comment
0fff  Before
	1000  not this
1000  Acme Inc
	1000  One
		1000 0001  One by Other
# a comment
	1001  Two [Server]
1001  After
	1002  not this
"""


@pytest.mark.parametrize(("device", "name"), [(0x1000, "One"), (0x1001, "Two [Server]"), (0x1002, ""), (0x0001, "")])
def test_the_list_of_the_machine_names_what_no_catalog_does(tmp_path, device, name):
    path = tmp_path / "pci.ids"
    path.write_text(PCI_IDS)

    assert look_up(0x1000, device, (str(tmp_path / "none"), str(path))) == name


def test_without_a_list_there_is_no_name(tmp_path, machine):
    assert look_up(0x1000, 0x1000, (str(tmp_path / "none"),)) == ""
    assert pci_name(machine(), 0x1000, 0x1000) == ""


@pytest.mark.parametrize("name", ["Acme One", "AC102 [Acme One]"])
def test_the_product_is_what_stands_in_brackets_behind_the_chip(machine, name):
    assert pci_name(machine(queries={"pci.ids/1000:1000": {"value": name}}), 0x1000, 0x1000) == "Acme One"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[products]]\ntags = ["A"]\nmodel = A\n', r"products\.toml: Invalid value \(at line 3, column 9\)"),
        ('[[products]]\ntag = ["A"]\nmodel = "A"\n', r"products\.toml: product 1 must have 'tags' \(got tag, model\)"),
        ('[[products]]\ntags = ["A"]\n', r"products\.toml: product 1 must have 'model' \(got tags\)"),
        (
            '[[products]]\ntags = ["A"]\nmodel = "A"\nmemory = "16 gigs"\n',
            r"products\.toml: product 1: memory must be bytes, or text such as '96GiB' .* \(got '16 gigs'\)",
        ),
        ('[[products]]\nlike = "B"\n', r"products\.toml: product 1 is like 'B', which is the key of none further up"),
    ],
)
def test_a_mistake_names_the_file_and_the_product(tmp_path, text, message):
    (tmp_path / "products.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        _ = Catalog(str(tmp_path / "__init__.py")).entries
