"""A tag is no other vendor's key, resource or product."""

import json

import anyaccel as aa
import pytest
from two_plugins import plugin


@pytest.fixture
def tags(install):
    """Install a stranger with the given tags, and return the remaining tags and the notes."""

    def tags(*tags, **more):
        install("stranger", plugin("stranger", 'id="s-0"', tags=tags, **more))
        inventory = aa.detect()
        (device,) = inventory.of_vendor("stranger")
        return device.tags, " ".join(inventory.report("stranger").notes)

    return tags


@pytest.fixture
def owner(install):
    """Install an absent vendor whose presence data lists a product called Big."""
    source = plugin("owner", resource="CARD", products=[("Big", "B1")])
    path = install("owner", source)
    presence = {"resource": "CARD", "paths": ["/dev/none-such"], "names": ["Big", "B1"]}
    path.with_suffix(".presence.json").write_text(json.dumps(presence))
    return path


@pytest.mark.parametrize(
    ("tag", "what"),
    [("OWNER", "the key"), ("card", "the resource"), ("Big", "a product"), ("b1", "a product")],
)
def test_a_name_of_a_vendor_that_is_not_here_is_its_own(tag, what, owner, tags):
    found, note = tags("Small", tag)
    assert found == ("Small",)
    assert f"{tag!r} is {what} of owner; " in note
    with pytest.raises(aa.NeverFitsError):
        aa.prepare(f"{tag}:1", environ={})


def test_products_are_asked_of_a_plugin_whose_data_does_not_name_them(install, tags):
    install("owner", plugin("owner", 'id="o-0"', tags=["Big"], products=[("Big",)]))
    assert tags("Big")[0] == ()
    allocation = aa.prepare("Big:1", environ={}).environment.allocation
    assert [device.vendor for device in allocation.devices] == ["owner"]


def test_what_is_ones_own_stays(owner, tags):
    assert tags("stranger", "mine", "CARD", resource="CARD", products=[("mine",)]) == (("stranger", "mine", "CARD"), "")


def test_a_tag_that_no_vendor_lists_as_a_product_means_devices_of_both(install, tags):
    install("owner", plugin("owner", 'id="o-0"', tags=["Both"]))
    assert tags("Both") == (("Both",), "")
    assert {device.vendor for device in aa.prepare("Both:2,mixed", environ={}).environment.allocation.devices} == {
        "owner",
        "stranger",
    }


def test_a_product_that_two_vendors_list_belongs_to_the_one_that_anyaccel_offers(install, tags, anyaccel):
    install("nvidia", plugin("nvidia", 'id="n-0"', resource="GPU", tags=["Big"], products=[("Big",)]))
    assert tags("Big", "nvidia", products=[("Big", "nvidia"), ("Small",)])[0] == ()
    simulated = aa.detect("sim:Big:2")
    assert [device.vendor for device in simulated.devices] == ["nvidia", "nvidia"]
    assert [device.model for device in aa.detect("sim:Big:1,Small:1").devices] == ["Big", "Small"]
    for request in ("nvidia:1", "Big:1"):
        done = anyaccel("run", request, "--", "sh", "-c", 'echo "$NVIDIA_VISIBLE$STRANGER_VISIBLE"')
        assert (done.returncode, done.stdout) == (0, "n-0\n")
    done = anyaccel("doctor")
    assert "'Big' is a product of nvidia, 'nvidia' is the key of nvidia" in done.stdout
    assert "have the authors of anyaccel-stranger rename them in anyaccel_tags" in done.stdout


def test_a_product_that_two_strangers_list_is_refused_in_a_simulation(install):
    for vendor in ("one", "two"):
        install(vendor, plugin(vendor, products=[("Big",)]))
    with pytest.raises(aa.MachineError, match="'Big' is a product of one and two"):
        aa.detect("sim:Big:2")
