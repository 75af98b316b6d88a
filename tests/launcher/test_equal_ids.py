"""Two vendors that use the same ids: each device is held for itself, also where a process sees one of the two alone."""

import json
import os
import subprocess
import sys

import anyaccel as aa
import pytest
from anyaccel.model import VendorState
from holders import end, hold_and_show
from waiting import PATIENCE

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
        assert done.returncode in (0, 4), done.stderr
        return done.stdout.strip() if done.returncode == 0 else None

    return take


@pytest.mark.parametrize(("holder", "other"), [("left", BOTH), (BOTH, "left"), (BOTH, BOTH), ("left", "left")])
def test_a_device_is_one_whatever_other_vendors_a_process_sees(holder, other, hold, take):
    assert hold("LEFT:1", holder)[1] == "card-0"
    assert take("LEFT:1", other) == "card-1"
    assert take("LEFT:2", other) is None


@pytest.mark.parametrize(("holder", "other"), [("left", BOTH), (BOTH, "right"), (BOTH, BOTH), ("left", "right")])
def test_equal_ids_of_two_vendors_are_two_devices(holder, other, hold, take):
    assert hold("LEFT:2", holder)[1] == "card-0,card-1"
    assert take("RIGHT:2", other) == "card-0,card-1"


def test_shares_add_up_over_all_who_see_the_device(hold, take):
    hold("LEFT:0.5", "left")
    hold("LEFT:0.25", BOTH)
    assert take("LEFT:2", BOTH) is None
    assert take("LEFT:0.25", "left") == "card-0"


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


def test_a_waiter_that_sees_more_vendors_is_woken(hold):
    holder, _ = hold("LEFT:2", "left")
    command = [*RUN.split(), "LEFT:1", "--", "printenv", "LEFT"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiter:
        said = waiter.stderr.readline()
        holder.communicate(timeout=PATIENCE)
        printed, _ = waiter.communicate(timeout=PATIENCE)
    assert said.startswith("anyaccel: waiting, place 1 in line: left/0, left/1 held by")
    assert (waiter.returncode, printed.strip()) in {(0, "card-0"), (0, "card-1")}  # whichever was free first


def test_a_pool_that_sees_one_vendor_and_a_command_that_sees_both_exclude_each_other():
    program = f"""
import anyaccel, os, subprocess
def other():
    environ = {{name: value for name, value in os.environ.items() if not name.startswith("ANYACCEL_")}}
    environ |= {{"ANYACCEL_STATE_DIR": os.environ["ANYACCEL_STATE_DIR"], "ANYACCEL_PLUGINS": "{BOTH}"}}
    def run(request):
        return subprocess.run([*"{RUN}".split(), request, "--no-wait", "--", "true"], env=environ).returncode
    return os.environ["LEFT"], run("LEFT:2"), run("LEFT:1"), run("RIGHT:2")
if __name__ == "__main__":
    with anyaccel.Pool("LEFT:1") as pool:
        print(*pool.submit(other).result(60))
"""
    environ = {**os.environ, "ANYACCEL_PLUGINS": "left"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["card-0", "4", "0", "0"], done.stderr


@pytest.mark.parametrize(
    ("outer", "inner", "request_inside", "expected"),
    [
        ("right", "left", "LEFT:1", (3, "")),
        ("right", BOTH, "LEFT:1", (3, "")),
        ("right", BOTH, "RIGHT:1", (0, "card-0")),
        (BOTH, "right", "RIGHT:1", (0, "card-0")),
        (BOTH, "left", "LEFT:1", (3, "")),
    ],
)
def test_a_worker_has_what_it_was_given_whatever_vendors_it_sees(outer, inner, request_inside, expected, anyaccel):
    script = f"ANYACCEL_PLUGINS={inner} {RUN} {request_inside} -- printenv {request_inside.partition(':')[0]}"
    done = anyaccel("run", "RIGHT:1", "--", "sh", "-c", script, env={"ANYACCEL_PLUGINS": outer})
    assert (done.returncode, done.stdout.strip()) == expected, done.stderr


@pytest.fixture
def broken(vendors):
    return vendors["left"].with_name(vendors["left"].name + ".broken")


def test_a_vendor_that_fails_while_somebody_watches_costs_no_other_its_devices(broken):
    before = aa.detect()
    scheduler = aa.open_scheduler(before)
    right = scheduler.allocate("RIGHT:2")
    with aa.watch(since=before, every=0.001) as watch:
        broken.touch()
        change = next(watch)
        assert (str(change), change.inventory.devices) == ("detection failed: left", before.devices)
        scheduler.update(change.inventory)
        assert not scheduler.why("RIGHT:0.5").fits_now
        scheduler.release(right)
        environment = aa.worker_environment(scheduler.allocate("RIGHT"), scheduler.inventory, environ={})
        assert (environment.values["RIGHT"], environment.values["LEFT"]) == ("card-0", "")
        report = change.inventory.report("left")
        assert (report.state, report.resource, report.problem.vendor) == (VendorState.FAILED, "LEFT", "left")


def test_a_vendor_that_comes_while_somebody_watches_takes_no_id_of_another(broken):
    broken.touch()
    alone = aa.detect()
    assert [device.id for device in alone.devices] == ["card-0", "card-1"]
    with aa.watch(since=alone, every=0.001) as watch:
        broken.unlink()
        change = next(watch)
        assert str(change) == "added: left/card-0, left/card-1"
        assert [device.id for device in change.inventory.devices[2:]] == ["card-0", "card-1"]
