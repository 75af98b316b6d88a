import json
from pathlib import Path

import jsonschema
import podman_runtime
import pytest
from anyaccel.errors import AnyaccelError
from anyaccel.model import Health
from anyaccel_export.cdi import export
from export_machines import READ_ONLY, WRITABLE, device, machines, source
from hypothesis import given, settings
from lengths import length

SCHEMA = jsonschema.Draft7Validator(json.loads((Path(__file__).parent / "cdi.schema.json").read_text()))


def written(*devices, **changes):
    specification = json.loads(export(source(*devices, **changes)).text)
    SCHEMA.validate(specification)
    return {entry["name"]: entry["containerEdits"] for entry in specification["devices"]}


def test_one_entry_for_each_device_each_vendor_and_all():
    found = written(device(0), device(1), device(2, id="other-2", vendor="other"))
    assert list(found) == ["acme-0", "acme-1", "other-2", "acme", "other", "all"]
    assert found["acme"]["deviceNodes"] == [{"path": "/dev/null"}, {"path": "/dev/zero"}]
    assert found["acme"]["env"] == ["ACME_VISIBLE=acme-0,acme-1", "ACME_RUNTIME=acme-0,acme-1", "ACME_ALWAYS=1"]
    assert len(found["all"]["env"]) == 6


def test_a_mask_for_one_device_stays_out_of_a_container_that_may_hold_two():
    exported = export(source(device(0), device(1)))
    found = written(device(0), device(1))
    assert found["acme-0"]["env"] == ["ACME_RUNTIME=acme-0", "ACME_ALWAYS=1"]
    assert any("acme-0 goes without ACME_VISIBLE" in note and "acme has it" in note for note in exported.notes)


def test_a_mask_stays_where_nothing_else_limits_the_device():
    """Parts of a card share its node: without the mask, a container would get the whole card."""
    found = written(device(0, nodes=("/dev/null",)), device(1, nodes=("/dev/null",)))
    assert "ACME_VISIBLE=acme-0" in found["acme-0"]["env"]


def test_mounts_say_whether_they_may_be_written():
    found = written(device(0), mounts=[READ_ONLY, WRITABLE])["acme-0"]["mounts"]
    assert found == [
        {"hostPath": "/etc", "containerPath": "/host etc", "options": ["rbind", "nosuid", "nodev", "ro"]},
        {"hostPath": "/tmp", "containerPath": "/scratch", "options": ["rbind", "nosuid", "nodev", "rw"]},
    ]


def test_groups_need_a_newer_version():
    found = json.loads(export(source(device(0), groups=(44, 109))).text)
    SCHEMA.validate(found)
    assert found["cdiVersion"] == "0.7.0"
    assert [entry["containerEdits"]["additionalGids"] for entry in found["devices"]] == [[44, 109]] * 3


def test_the_version_is_the_lowest_that_fits():
    """Readers refuse versions that are newer than they are."""
    assert json.loads(export(source(device(0))).text)["cdiVersion"] == "0.3.0"
    assert json.loads(export(source(device(0, id="0000:07:00.0"))).text)["cdiVersion"] == "0.5.0"


def test_unusable_devices_are_not_in_it():
    found = written(device(0), device(1, visible=False), device(2, health=Health.UNHEALTHY))
    assert list(found) == ["acme-0", "acme", "all"]


def test_vendors_that_contradict_each_other_share_no_entry():
    exported = source(device(0), device(1, id="other-1", vendor="other"))
    clashing = {
        vendor: type(edits)(nodes=edits.nodes, env={"X": vendor}) for vendor, edits in exported.together.items()
    }
    exported = export(source(device(0), device(1, id="other-1", vendor="other"), together=clashing))
    assert "all" not in [entry["name"] for entry in json.loads(exported.text)["devices"]]
    assert any("acme and other set the variable X differently" in note for note in exported.notes)


def test_a_device_that_is_named_like_a_group_stays_a_device():
    found = written(device(0, id="all"), device(1))
    assert found["all"]["deviceNodes"] == [{"path": "/dev/null"}]


def test_nothing_to_write():
    with pytest.raises(AnyaccelError, match="no device here that a container could be given"):
        export(source())


@settings(max_examples=length(15, 40), deadline=None)
@given(machines())
def test_the_schema_takes_whatever_plugins_may_report(devices):
    assert len(written(*devices)) >= len(devices)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda spec: spec.update(cdiVersion="9.0.0"),
        lambda spec: spec.update(kind="device"),
        lambda spec: spec.update(extra=1),
        lambda spec: spec["devices"][0].update(name="a/b"),
        lambda spec: spec["devices"][0].update(name="0"),
        lambda spec: spec["devices"][0].update(containerEdits={}),
        lambda spec: spec["devices"][0]["containerEdits"]["deviceNodes"][0].update(mode="rw"),
    ],
)
def test_the_schema_refuses_what_is_wrong(wrong):
    specification = json.loads(export(source(device(0))).text)
    wrong(specification)
    assert not SCHEMA.is_valid(specification)


@pytest.fixture
def podman(needs, as_root):
    needs("podman", "unshare", packages="apt-get install podman")


def test_podman_injects_the_devices(podman, tmp_path):
    text = export(source(device(0), device(1), device(2), shared_nodes=("/dev/tty",), mounts=[READ_ONLY])).text
    asked = podman_runtime.request(
        tmp_path / "p", "--device=anyaccel/device=acme-0", "--device=anyaccel/device=acme-2", specification=text
    )
    assert sorted(podman_runtime.devices(asked)) == ["/dev/full", "/dev/null", "/dev/tty"]
    assert podman_runtime.environment(asked)["ACME_ALWAYS"] == "1"
    assert "ACME_VISIBLE" not in podman_runtime.environment(asked)
    assert podman_runtime.mounts(asked)["/host etc"] == ("/etc", ["rbind", "nosuid", "nodev", "ro"])


def test_podman_injects_all(podman, tmp_path):
    text = export(source(device(0, id="0000:07:00.0"), device(1))).text
    asked = podman_runtime.request(tmp_path / "p", "--device=anyaccel/device=all", specification=text)
    assert sorted(podman_runtime.devices(asked)) == ["/dev/null", "/dev/zero"]
    assert podman_runtime.environment(asked)["ACME_VISIBLE"] == "0000:07:00.0,acme-1"


def test_podman_knows_no_other_device(podman, tmp_path):
    """What the tests above look for is there to be found."""
    text = export(source(device(0))).text
    said = podman_runtime.request(tmp_path / "p", "--device=anyaccel/device=acme-1", specification=text)
    assert "acme-1" in said
