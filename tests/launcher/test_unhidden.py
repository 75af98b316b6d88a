"""Devices that no variable hides from a worker are named wherever one is started, and by ``why``."""

import json
import subprocess
import sys

import anyaccel as aa
import pytest

OPEN = """
from anyaccel.plugin import *
@hookimpl
def anyaccel_info():
    return PluginInfo(vendor="open", resource="OPU", kind="opu", env_vars=(), maskable=False)
@hookimpl
def anyaccel_detect(ctx):
    return Detected(devices=tuple(Device(id=f"o{index}", index=index, model="Open") for index in range(2)))
@hookimpl
def anyaccel_fractional(device): return Fractional.NO
@hookimpl
def anyaccel_tags(device): return ("Open",)
@hookimpl
def anyaccel_env(devices, ctx): return EnvEdits()
"""
UNHIDDEN = (
    "devices of open may be open to the worker: no variable hides {}; confine the worker (--enforce, or"
    " enforce=True) to close their nodes"
)
FAILED = (
    "devices of open may be open to the worker: {}; see 'anyaccel plugins open', or set ANYACCEL_DISABLE=open where"
    " there are none"
)
SOURCES = {
    "no mask": (OPEN, UNHIDDEN.format("them")),
    "no mask, and not declared": (OPEN.replace(", maskable=False", ""), UNHIDDEN.format("them")),
    "a mask for some software": (
        OPEN.replace("env_vars=(), maskable=False", 'env_vars=("OPEN_VISIBLE",), masked_software="the old runtime"')
        + 'anyaccel_env = hookimpl(lambda devices, ctx: EnvEdits(set={"OPEN_VISIBLE": str(len(devices))}))\n',
        UNHIDDEN.replace("no variable hides {}", "its variable binds the old runtime alone"),
    ),
    "no import": (
        "raise ImportError('no libopen')",
        FAILED.format("importing 'plug_anyaccel_open' raised ImportError: no libopen (plug_anyaccel_open.py, line 1)"),
    ),
    "no info": (
        OPEN.replace("    return PluginInfo(", "    raise OSError('no info')\n    return PluginInfo("),
        FAILED.format("it raised OSError: no info (plug_anyaccel_open.py, line 5)"),
    ),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_vendor_that_cannot_be_hidden_is_named_by_commands(kind, install, acme, record, anyaccel):
    source, gap = SOURCES[kind]
    install("open", source)
    machine = record({}, {})
    started = anyaccel("run", "APU:1", "--machine", machine, "--", "printenv", "ACME_VISIBLE")
    assert (started.returncode, started.stdout) == (0, "acme-s0\n")
    assert started.stderr.splitlines().count(f"anyaccel: {gap}") == 1
    told = anyaccel("why", "APU:1", "--machine", machine)
    assert (told.returncode, gap in told.stdout.splitlines()) == (0, True)
    for command in ("why", "env"):
        assert json.loads(anyaccel(command, "APU:1", "--machine", machine, "--json").stdout)["gaps"] == [gap]
    assert f"anyaccel: {gap}" in anyaccel("env", "APU:1", "--machine", machine).stderr.splitlines()


EVERYWHERE = """
import json, sys, anyaccel as aa
machine, told = sys.argv[1], {}
told["why"] = aa.why("APU:1", machine=machine).gaps
told["run"] = aa.prepare("APU:1", machine=machine).environment.allocation.gaps
aa.run("APU:1", ["true"], machine=machine)
with aa.acquire("APU:1", machine=machine) as hold:
    told["acquire"] = hold.allocation.gaps
with aa.use("APU:1", machine=machine) as used:
    told["use"] = aa.current().gaps
with aa.Pool("APU:1", machine=machine) as pool:
    told["Pool"] = pool.submit(lambda: aa.current().gaps).result()
print(json.dumps(told))
"""


def test_a_vendor_that_cannot_be_hidden_is_named_in_python(install, acme, record):
    install("open", OPEN)
    done = subprocess.run(
        [sys.executable, "-c", EVERYWHERE, record({}, {})], capture_output=True, text=True, check=False, timeout=90
    )
    gap = UNHIDDEN.format("them")
    assert done.stderr.splitlines() == [f"anyaccel: {gap}"]  # once in a process
    assert json.loads(done.stdout) == {each: [gap] for each in ("why", "run", "acquire", "use", "Pool")}


def test_the_other_devices_of_a_vendor_without_a_mask_are_named(install, acme, record):
    install("open", OPEN)
    inventory = aa.detect(record({}))
    assert aa.why("OPU:1", inventory=inventory).gaps == (UNHIDDEN.format("its other devices"),)
    for request in ("OPU:2", ["OPU:2", "APU:1"]):
        assert aa.prepare(request, inventory=inventory).environment.allocation.gaps == ()
    assert aa.why("OPU:3", inventory=inventory).gaps == ()
