"""Devices that users see divided differently: a held physical part keeps each device that contains it."""

import json
import os
import subprocess
import sys

import pytest
from holders import end, hold_and_show, in_line
from sysfs import any_directories
from waiting import PATIENCE

# Four physical parts, of which a user's variable makes one device each, or one of two neighbours.
HALVES = """
from anyaccel.plugin import Detected, Device, EnvEdits, Fractional, PluginInfo, hookimpl

PARTS = {parts!r}


@hookimpl
def anyaccel_info():
    return PluginInfo(vendor="halves", resource="HALF", kind="half", env_vars=("HALVES",))


@hookimpl
def anyaccel_detect(ctx):
    size = int(ctx.environ.get("SIZE", "1"))
    return Detected(devices=tuple(
        Device(
            id="half-" + "-".join(map(str, range(first, first + size))),
            index=first // size,
            model="Half",
            occupies=tuple(PARTS[first : first + size]),
        )
        for first in range(0, len(PARTS), size)
    ))


@hookimpl
def anyaccel_fractional(device):
    return Fractional.NO


@hookimpl
def anyaccel_tags(device):
    return ("Half",)


@hookimpl
def anyaccel_env(devices, ctx):
    return EnvEdits(set={{"HALVES": ",".join(device.id for device in devices)}})
"""
ABSENT = [f"/sys/class/halves/half{number}" for number in range(4)]
SHOW = [sys.executable, "-c", "import os; print(os.environ['HALVES'])"]


@pytest.fixture
def halves(install):
    return install("halves", HALVES.format(parts=ABSENT))


def user(size, **changes):
    return {"SIZE": str(size), **changes}


def hold(request, size, **changes):
    return hold_and_show("HALVES", request, **user(size, **changes))


def shown(anyaccel, size):
    """By device, the leases that a user sees on it."""
    document = json.loads(anyaccel("status", "--json", env=user(size)).stdout)
    return {device["id"]: [each["lease"] for each in device["holders"]] for device in document["devices"]}


def test_who_holds_two_parts_as_one_device_holds_both_of_them_for_others(halves, anyaccel):
    holder, seen = hold("HALF:1", 2)
    assert seen == "half-0-1"
    (lease,) = shown(anyaccel, 2)["half-0-1"]
    assert shown(anyaccel, 1) == {"half-0": [lease], "half-1": [lease], "half-2": [], "half-3": []}
    free = anyaccel("run", "HALF:2", "--no-wait", "--", *SHOW, env=user(1))
    assert (free.returncode, free.stdout.strip()) == (0, "half-2,half-3"), free.stderr
    refused = anyaccel("run", "HALF:3", "--no-wait", "--", *SHOW, env=user(1))
    assert refused.returncode == 4
    assert f"you have halves/0-1 (HALF:1, lease {lease})" in refused.stderr
    end(holder)


def test_who_holds_one_part_keeps_others_from_the_device_that_it_belongs_to(halves, anyaccel):
    holder, seen = hold("HALF:1", 1)
    assert seen == "half-0"
    (lease,) = shown(anyaccel, 1)["half-0"]
    assert shown(anyaccel, 2) == {"half-0-1": [lease], "half-2-3": []}
    assert anyaccel("run", "HALF:1", "--no-wait", "--", *SHOW, env=user(2)).stdout.strip() == "half-2-3"
    assert anyaccel("run", "HALF:2", "--no-wait", "--", *SHOW, env=user(2)).returncode == 4
    assert json.loads(anyaccel("why", "HALF:2", "--json", env=user(2)).stdout)["fits_now"] is False
    end(holder)


def test_who_waits_gets_the_device_when_the_last_of_its_parts_is_free(halves):
    first, _ = hold("HALF:1", 1)
    second, seen = hold("HALF:3", 1)
    assert seen == "half-1,half-2,half-3"
    command = [sys.executable, "-m", "anyaccel", "run", "HALF:1", "--", *SHOW]
    waiter = subprocess.Popen(command, env={**os.environ, **user(2)}, stdout=subprocess.PIPE, text=True)
    in_line(1)
    end(first)
    with pytest.raises(subprocess.TimeoutExpired):
        waiter.wait(0.5)
    end(second)
    printed, _ = waiter.communicate(timeout=PATIENCE)
    # Its holder gives one after the other back, so either may be free first.
    assert (waiter.returncode, printed.strip()) in {(0, "half-0-1"), (0, "half-2-3")}


def test_a_lease_inside_of_a_lease_never_gets_a_part_more(halves, anyaccel):
    """A program that changes the variable inside of a lease sees devices that it does not hold, so none is left."""
    inner = f"{sys.executable} -m anyaccel run HALF:1 --no-wait -- true"
    done = anyaccel("run", "HALF:1", "--", "sh", "-c", f"SIZE=1 {inner}", env=user(2))
    assert done.returncode == 3, done.stderr
    assert anyaccel("run", "HALF:1", "--", "sh", "-c", inner, env=user(2)).returncode == 0


def test_a_pool_and_a_command_exclude_each_other(halves, anyaccel):
    program = """
import anyaccel, os, subprocess, sys
def take():
    one = [sys.executable, "-m", "anyaccel", "run", "HALF:4", "--no-wait", "--", "true"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ANYACCEL_")}
    kept = {name: os.environ[name] for name in ("ANYACCEL_STATE_DIR", "ANYACCEL_PLUGINS")}
    return os.environ["HALVES"], subprocess.run(one, env={**environ, **kept, "SIZE": "1"}).returncode
if __name__ == "__main__":
    with anyaccel.Pool("HALF:1") as pool:
        print(*pool.submit(take).result(60))
    again = [sys.executable, "-m", "anyaccel", "run", "HALF:4", "--no-wait", "--", "true"]
    print(subprocess.run(again, env={**os.environ, "SIZE": "1"}).returncode)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **user(2)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.split() == ["half-0-1", "4", "0"], done.stderr


def test_users_without_a_common_directory_exclude_each_other_too(install, anyaccel, tmp_path):
    """The parts are directories of the kernel's own, which everybody can lock: any four of them do here."""
    found = any_directories(4)
    if len(found) < 4:
        pytest.skip(f"needs four directories in sysfs, and here are {len(found)}")
    install("halves", HALVES.format(parts=found))
    holder, seen = hold("HALF:1", 2)
    assert seen == "half-0-1"
    elsewhere = user(1, ANYACCEL_STATE_DIR=str(tmp_path / "elsewhere"))
    assert anyaccel("run", "HALF:2", "--no-wait", "--", *SHOW, env=elsewhere).stdout.strip() == "half-2,half-3"
    refused = anyaccel("run", "HALF:3", "--no-wait", "--", *SHOW, env=elsewhere)
    assert refused.returncode == 4
    end(holder)
    assert anyaccel("run", "HALF:4", "--no-wait", "--", *SHOW, env=elsewhere).returncode == 0


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (["/etc/passwd", *ABSENT[1:]], "(got '/etc/passwd')"),
        (["/sys/../etc", *ABSENT[1:]], "(got '/sys/../etc')"),
        (["/sys/class//a", *ABSENT[1:]], "(got '/sys/class//a')"),
        (["/sys/" + "a" * 130, *ABSENT[1:]], "Device.occupies must match"),
        ([ABSENT[1], *ABSENT[1:]], f"must be unique (got {ABSENT[1]!r} more than once)"),
    ],
    ids=["elsewhere", "upward", "twice a slash", "long", "one part of two devices"],
)
def test_parts_that_cannot_be_are_refused(parts, reason, install, anyaccel):
    install("halves", HALVES.format(parts=parts))
    (vendor,) = json.loads(anyaccel("status", "--json").stdout)["vendors"]
    assert vendor["state"] == "failed"
    assert "Device.occupies" in vendor["reason"]
    assert reason in vendor["reason"]
