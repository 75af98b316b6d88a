"""Two vendors that use the same ids: each device is held for itself, also where a process sees one of the two alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from anyaccel.ledger import names
from anyaccel.ledger.process import start_time
from holders import end, hold_and_show

VENDOR = """
from anyaccel.plugin import Detected, Device, EnvEdits, Fractional, PluginInfo, hookimpl


@hookimpl
def anyaccel_info():
    return PluginInfo(vendor={vendor!r}, resource={resource!r}, kind="card", env_vars=({resource!r},))


@hookimpl
def anyaccel_detect(ctx):
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
    for vendor in ("left", "right"):
        install(vendor, VENDOR.format(vendor=vendor, resource=vendor.upper()))


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
        holder.communicate(timeout=30)
        printed, _ = waiter.communicate(timeout=30)
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
def older(take):
    """Make a lease as an older version writes it, by ids alone, of a process that lives until it is ended."""
    assert take("LEFT:1", "left")  # so that there is a state directory
    holder = subprocess.Popen(["sleep", "60"])

    def older(form):
        owner = f"{holder.pid}.{start_time(holder.pid)}"
        name = form.format(owner=owner, mark="0" * 16, nonce=names.new_nonce())
        (Path(os.environ["ANYACCEL_STATE_DIR"]) / name).touch()
        return holder

    yield older
    holder.kill()
    holder.wait()


@pytest.mark.parametrize("plugins", ["left", BOTH])
@pytest.mark.parametrize("form", ["v1.card-0.10000.{owner}.{nonce}", "v2.card-0.10000.{owner}.{mark}.{nonce}"])
def test_a_lease_of_an_older_version_takes_the_device_of_whichever_vendor(form, plugins, older, take, anyaccel):
    holder = older(form)
    assert take("LEFT:1", plugins) == "card-1"
    assert take("LEFT:2", plugins) is None
    assert take("RIGHT:2", BOTH) is None
    status = json.loads(anyaccel("status", "--json", env={"ANYACCEL_PLUGINS": plugins}).stdout)
    held = {each["id"].removeprefix("left/"): each["free"] for each in status["devices"] if each["vendor"] == "left"}
    assert held == {"card-0": 0, "card-1": 1}
    assert f"process {holder.pid}" in anyaccel("why", "LEFT:2", env={"ANYACCEL_PLUGINS": plugins}).stdout
    holder.kill()
    holder.wait()
    assert take("LEFT:2", plugins) == "card-0,card-1"


def test_a_lease_that_an_older_version_wrote_of_clashing_ids_is_its_vendors_alone(older, take):
    older("v2.left%2Fcard-0.10000.{owner}.{mark}.{nonce}")
    assert take("LEFT:2", "left") is None
    assert take("RIGHT:2", "right") == "card-0,card-1"


def test_shares_of_older_versions_and_of_this_one_add_up(older, take, hold):
    older("v1.card-0.5000.{owner}.{nonce}")
    assert hold("LEFT:0.5", "left")[1] == "card-0"
    assert take("LEFT:0.5", BOTH) == "card-1"
