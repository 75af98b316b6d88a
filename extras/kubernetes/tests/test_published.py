"""Everything that goes to an API server, against the published schemas of several releases and the rules of slices."""

import copy
import re
from pathlib import Path

import anyaccel
import jsonschema
import published_schemas
import pytest
import slice_rules
import yaml
from anyaccel.plugin import replace
from anyaccel.vendors.process import known
from anyaccel_export.slices import Features, Obstacle, make_slices
from export_machines import inventory as machine_of
from export_machines import machines
from hypothesis import given, settings

pytestmark = pytest.mark.skipif(not published_schemas.INSTALLED, reason=published_schemas.WHERE)
ROOT = Path(__file__).parents[3]
RECORDINGS = sorted(ROOT.glob("plugins/*/recordings/*/machine.json"))
MANIFESTS = sorted(ROOT.glob("extras/kubernetes/deploy/*.yaml"))
PAGES = sorted(path for path in ROOT.glob("docs/**/*.md") if "\nkind: " in path.read_text())


def check(inventory, *, chosen=None, **options):
    slices = make_slices(inventory, "n1", **options)
    for each in slices:
        published_schemas.check(each, chosen)
    slice_rules.check_all(slices)
    return slices


def obstacles(inventory):
    reasons = ("", "ada: training, 3 h!", "é" * 200, "-" * 70, "a" * 100)
    kinds = ("held", "drained", "reserved", "unhealthy", "held")
    return {
        device.id: Obstacle(kind=kind, reason=reason)
        for device, reason, kind in zip(inventory.devices, reasons, kinds, strict=False)
    }


@pytest.mark.parametrize("vendor", sorted({path.parts[-4] for path in RECORDINGS}))
def test_recordings_of_a_vendor_are_valid_slices(vendor):
    for path in RECORDINGS:
        if path.parts[-4] == vendor:
            inventory = anyaccel.detect(str(path.parent))
            check(inventory, obstacles=obstacles(inventory), features=Features(shares=True))
            # Fewer fields of the same kinds: for one release.
            check(inventory, chosen=published_schemas.NAMED[:1], features=Features(taints=False, counters=False))


@pytest.mark.parametrize("machine", ["sim:H100:128", "sim:TPU-V4:4,H100:2", "sim:none"])
def test_simulated_machines_are_valid_slices(machine):
    if machine == "sim:none":
        inventory = replace(anyaccel.detect("sim:H100:1"), devices=())
    else:
        inventory = anyaccel.detect(machine)
    assert sum(len(each["spec"].get("devices", ())) for each in check(inventory)) == len(inventory.devices)


def test_products_of_all_vendors_are_valid_slices():
    products = [product.name for each in known()[0] for product in each.products]
    assert len(products) > 100
    classes = (ROOT / "extras/kubernetes/deploy/classes.yaml").read_text()
    for product in products:
        [device] = (inventory := anyaccel.detect(f"sim:{product}:1")).devices
        check(inventory, features=Features(shares=True))
        assert f'.type == \\"{device.type}\\"' in classes


@given(machines())
@settings(deadline=None)
def test_odd_machines_are_valid_slices(found):
    inventory = machine_of(*found)
    check(inventory, obstacles=obstacles(inventory), features=Features(shares=True))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_valid(path):
    documents = list(yaml.safe_load_all(path.read_text()))
    assert documents
    for document in documents:
        published_schemas.check(document)


def test_objects_on_pages_are_valid():
    blocks = [
        block
        for path in PAGES
        for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
        if "\nkind: " in block
    ]
    assert len(blocks) > 2
    for block in blocks:
        for document in yaml.safe_load_all(block):
            published_schemas.check(document)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda found: found.update(status={}),
        lambda found: found["spec"].pop("pool"),
        lambda found: found["spec"]["devices"][0].update(basic={}),
        lambda found: found["spec"]["devices"][0].pop("name"),
        lambda found: found["spec"]["devices"][0]["attributes"]["index"].update(int="1"),
        lambda found: found["spec"]["devices"][0]["capacity"]["memory"].update(size="1Gi"),
    ],
)
def test_the_schemas_refuse_what_they_should(wrong):
    found = copy.deepcopy(make_slices(anyaccel.detect("sim:H100:1"), "n1")[0])
    for release in published_schemas.releases():
        published_schemas.check(found, [release])
    wrong(found)
    for release in published_schemas.releases():
        with pytest.raises(jsonschema.ValidationError):
            published_schemas.check(found, [release])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda spec: spec.update(driver="Any_Accel"),
        lambda spec: spec.update(allNodes=True),
        lambda spec: spec["pool"].update(resourceSliceCount=2),
        lambda spec: spec["devices"].append(copy.deepcopy(spec["devices"][0])),
        lambda spec: spec["devices"].extend({"name": f"d{index}"} for index in range(128)),
        lambda spec: spec["devices"][0].update(name="GPU-0"),
        lambda spec: spec["devices"][0]["attributes"].update(two={"string": "", "int": 1}),
        lambda spec: spec["devices"][0]["attributes"].update({"a-b": {"int": 1}}),
        lambda spec: spec["devices"][0]["attributes"].update(long={"string": "m" * 65}),
        lambda spec: spec["devices"][0]["attributes"].update({f"a{index}": {"int": 1} for index in range(30)}),
        lambda spec: spec["devices"][0]["capacity"]["memory"].update(value="16 GiB"),
        lambda spec: spec["devices"][0].update(
            consumesCounters=[{"counterSet": "none", "counters": {"none": {"value": "1"}}}]
        ),
    ],
)
def test_the_rules_refuse_what_a_schema_cannot_say(wrong):
    [found] = make_slices(anyaccel.detect("sim:H100:1"), "n1")
    wrong(found["spec"])
    published_schemas.check(found)
    with pytest.raises(slice_rules.InvalidError):
        slice_rules.check_all([found])
