"""Two vendors that use the same ids: given to no request where both are seen, and apart where one is seen alone."""

import json
import sys

import anyaccel as aa
import pytest
from anyaccel.model import VendorState
from holders import end, hold_and_show

VENDOR = """
import os

from anyaccel.plugin import Detected, Device, EnvEdits, Fractional, PluginInfo, hookimpl


@hookimpl
def anyaccel_info():
    return PluginInfo(vendor={vendor!r}, resource={resource!r}, kind="card", env_vars=({resource!r},))


@hookimpl
def anyaccel_detect(ctx):
    if os.path.exists(__file__ + ".broken"):
        raise OSError("it does not answer")
    return Detected(devices=tuple(Device(id=f"card-{{index}}", index=index, model="Card") for index in range(2)))


@hookimpl
def anyaccel_fractional(device):
    return Fractional.SHARED


@hookimpl
def anyaccel_tags(device):
    return ()


@hookimpl
def anyaccel_env(devices, ctx):
    return EnvEdits(set={{{resource!r}: ",".join(device.id for device in devices)}})
"""
RUN = f"{sys.executable} -m anyaccel run"
BOTH = "left,right"


@pytest.fixture(autouse=True)
def vendors(install):
    return {
        vendor: install(vendor, VENDOR.format(vendor=vendor, resource=vendor.upper())) for vendor in ("left", "right")
    }


@pytest.fixture
def hold():
    """Hold devices in a process that sees some vendors, until the test is over."""
    holders = []

    def hold(request, plugins):
        holder, shown = hold_and_show(request.partition(":")[0], request, ANYACCEL_PLUGINS=plugins)
        holders.append(holder)
        return holder, shown

    yield hold
    end(*holders)


@pytest.fixture
def take(anyaccel):
    """What a process that sees some vendors gets without waiting: the ids that its vendor knows, or None."""

    def take(request, plugins):
        show = ("printenv", request.partition(":")[0])
        done = anyaccel("run", request, "--no-wait", "--", *show, env={"ANYACCEL_PLUGINS": plugins})
        assert done.returncode in (0, 3, 4), done.stderr
        return done.stdout.strip() if done.returncode == 0 else None

    return take


def test_a_device_is_held_once_and_another_vendors_of_the_same_id_is_another_device(hold, take):
    assert hold("LEFT:1", "left")[1] == "card-0"
    assert take("LEFT:1", "left") == "card-1"
    assert take("LEFT:2", "left") is None
    assert take("RIGHT:2", "right") == "card-0,card-1"


def test_where_both_are_seen_neither_is_given_to_a_request(take):
    assert take("LEFT:1", BOTH) is None
    assert take("RIGHT:0.5", BOTH) is None
    left, _, right, _ = aa.detect().devices
    for device in (left, right):
        assert not device.usable
        assert device.health_reason == "the plug-ins left and right both list id card-0"
        assert "ANYACCEL_DISABLE=right or ANYACCEL_DISABLE=left" in device.health_remedy


def test_who_holds_what_is_shown_by_the_ids_of_each_view(hold, anyaccel):
    holder, _ = hold("LEFT:1", "left")

    def shown(plugins):
        done = anyaccel("status", "--json", env={"ANYACCEL_PLUGINS": plugins})
        return {
            each["id"]: [holder["pid"] for holder in each["holders"]] for each in json.loads(done.stdout)["devices"]
        }

    assert shown("left") == {"card-0": [holder.pid], "card-1": []}
    assert shown("right") == {"card-0": [], "card-1": []}
    assert shown(BOTH) == {"left/card-0": [holder.pid], "left/card-1": [], "right/card-0": [], "right/card-1": []}


@pytest.mark.parametrize(
    ("outer", "inner", "request_inside", "expected"),
    [
        ("right", "left", "LEFT:1", (3, "")),
        ("right", BOTH, "LEFT:1", (3, "")),
        ("right", BOTH, "RIGHT:1", (3, "")),
        ("right", "right", "RIGHT:1", (0, "card-0")),
    ],
)
def test_a_worker_has_what_it_was_given_whatever_vendors_it_sees(outer, inner, request_inside, expected, anyaccel):
    script = f"ANYACCEL_PLUGINS={inner} {RUN} {request_inside} -- printenv {request_inside.partition(':')[0]}"
    done = anyaccel("run", "RIGHT:1", "--", "sh", "-c", script, env={"ANYACCEL_PLUGINS": outer})
    assert (done.returncode, done.stdout.strip()) == expected, done.stderr


@pytest.fixture
def broken(vendors):
    return vendors["left"].with_name(vendors["left"].name + ".broken")


def test_when_a_vendor_fails_during_a_watch_the_ids_of_the_other_need_its_name_no_more(broken):
    before = aa.detect()
    ids = ["left/card-0", "left/card-1", "right/card-0", "right/card-1"]
    assert [device.id for device in before.devices] == ids
    with aa.watch(since=before, every=0.001) as watch:
        broken.touch()
        change = next(watch)
        assert str(change) == "added: card-0, card-1; lost: right/card-0, right/card-1; detection failed: left"
        assert {each.id: each.usable for each in change.inventory.devices} == {
            **dict.fromkeys(ids[:2], False),
            **dict.fromkeys(["card-0", "card-1"], True),
        }
        report = change.inventory.report("left")
        assert (report.state, report.resource, report.problem.vendor) == (VendorState.FAILED, "LEFT", "left")


def test_when_a_vendor_comes_during_a_watch_equal_ids_get_the_names_of_the_vendors(broken):
    broken.touch()
    alone = aa.detect()
    assert [device.id for device in alone.devices] == ["card-0", "card-1"]
    with aa.watch(since=alone, every=0.001) as watch:
        broken.unlink()
        change = next(watch)
        assert str(change) == "added: left/card-0, left/card-1, right/card-0, right/card-1; lost: card-0, card-1"
