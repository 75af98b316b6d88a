"""Constants and instance types come from the installed plug-ins, asked once, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import anyaccel
import pytest
from anyaccel import accelerators
from anyaccel.accelerators import instance_type

NAMED = """
from dataclasses import replace

_plain = anyaccel_products()

@hookimpl
def anyaccel_products():
    one, whole = _plain
    types = {"a1.large": 2, "a1.xlarge": 8}
    return [
        replace(one, constants={"ACME_FIRST": "Acme-One", "ACME_A1": "A1"}, instance_types=types),
        replace(whole, instance_types={"whole.metal": 4}),
    ]
"""


@pytest.fixture(autouse=True)
def ask_anew():
    accelerators._installed.cache_clear()
    yield
    accelerators._installed.cache_clear()


@pytest.fixture
def named(install, acme_source):
    install("acme", acme_source + NAMED)


@pytest.fixture
def acme_source():
    from pathlib import Path

    return (Path(__file__).parents[1] / "vendors/acme.py").read_text()


def test_a_product_has_the_names_that_its_plugin_gives_or_one_that_is_made(named):
    assert accelerators.ACME_FIRST == "Acme-One"
    assert accelerators.ACME_A1 == "A1"
    assert accelerators.ACME_WHOLE == "Acme-Whole"
    assert dir(accelerators) == ["ACME_A1", "ACME_FIRST", "ACME_WHOLE", "InstanceType", "instance_type"]
    names = {}
    exec("from anyaccel.accelerators import *", names)
    assert names["ACME_FIRST"] == "Acme-One"


def test_a_constant_is_a_request(named):
    allocation = anyaccel.prepare(f"{accelerators.ACME_FIRST}:2", machine="sim:A1:4").environment.allocation
    assert {device.type for device in allocation.devices} == {"Acme-One"}


def test_an_unknown_name_says_what_is_close_and_where_names_come_from(named, install):
    with pytest.raises(AttributeError) as caught:
        accelerators.ACME_FRIST  # noqa: B018
    assert str(caught.value) == (
        "no installed plug-in knows the accelerator ACME_FRIST; did you mean ACME_FIRST? (names come from the installed"
        " plug-ins (acme); pip install 'anyaccel[all]' adds those of anyaccel)"
    )
    with pytest.raises(AttributeError, match="has no attribute 'acme_first'"):
        accelerators.acme_first  # noqa: B018
    accelerators._installed.cache_clear()
    install("bad", "import os; os._exit(9)")
    with pytest.raises(AttributeError, match=r"anyaccel-bad 1.2.3 \(vendor 'bad'\): .* ended with exit status 9"):
        accelerators.BAD_ONE  # noqa: B018
    assert accelerators.ACME_FIRST == "Acme-One"


def test_plugins_that_disagree_about_a_name_are_both_named(named, install, acme_source):
    rival = (acme_source + NAMED).replace('vendor="acme"', 'vendor="omega"')
    install("omega", rival.replace('"ACME_FIRST": "Acme-One"', '"ACME_FIRST": "A1"'))
    with pytest.raises(AttributeError, match="ACME_FIRST means 'A1' for omega and 'Acme-One' for acme"):
        accelerators.ACME_FIRST  # noqa: B018
    assert "ACME_FIRST" not in dir(accelerators)
    assert accelerators.ACME_A1 == "A1"


def test_a_node_is_known_before_it_exists(named):
    found = instance_type("a1.xlarge")
    assert (found.vendor, found.resource, found.tag, found.count, found.memory_bytes) == (
        "acme", "APU", "Acme-One", 8, 16 << 30,
    )  # fmt: skip
    inventory = anyaccel.detect(found.machine)
    assert [device.type for device in inventory.devices] == ["Acme-One"] * 8
    assert {device.memory_bytes for device in inventory.devices} == {found.memory_bytes}
    with pytest.raises(anyaccel.UnknownNameError, match=r"'a1.xlarg'; did you mean a1.xlarge or a1.large\?\n") as error:
        instance_type("a1.xlarg")
    assert error.value.hint.startswith("names come from the installed plug-ins (acme)")


def test_importing_the_module_asks_no_vendor(install):
    install("bad", "raise SystemExit('asked')")
    code = "import anyaccel.accelerators as a, sys; a.instance_type; print('anyaccel.inventory.detect' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
