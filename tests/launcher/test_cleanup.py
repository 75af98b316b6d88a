"""A device is given to the next worker once it is as the last one got it."""

import json
import os
import subprocess
import time

import anyaccel as aa
import pytest
from anyaccel.launcher.cleanup import dirt, take_baseline, wait_until_clean
from anyaccel.model import DeviceProcess

GIB = 1 << 30
PLUGIN = """
import json, time
from anyaccel.plugin import *
@hookimpl
def anyaccel_info(): return PluginInfo(vendor="acme", resource="APU", kind="apu", env_vars=())
@hookimpl
def anyaccel_detect(ctx): return None
@hookimpl
def anyaccel_fractional(device): return Fractional.NO
@hookimpl
def anyaccel_tags(device): return ()
@hookimpl
def anyaccel_env(devices, ctx): return EnvEdits()
@hookimpl
def anyaccel_stats(devices, ctx):
    seen = {}
    for device in devices:
        facts = json.loads(ctx.read(device.attributes["facts"]))
        time.sleep(facts.get("sleep", 0))
        if facts.get("raise"): raise OSError(facts["raise"])
        if facts.get("silent"): continue
        alive = [pid for pid in facts.get("pids", ()) if ctx.exists(f"/proc/{pid}")]
        seen[device.id] = Stats(
            memory_used_bytes=facts["used"], processes=tuple(DeviceProcess(pid=pid, memory_bytes=0) for pid in alive)
        )
    return seen
"""


def share(*, units=10_000, memory=80 * GIB, index=0, **attributes) -> aa.Share:
    device = aa.Device(
        id=f"acme-{index}", index=index, model="A", vendor="acme", memory_bytes=memory, attributes=attributes
    )
    return aa.Share(device=device, units=units)


def seen(used=None, processes=None, **fields) -> aa.Stats:
    listed = None if processes is None else tuple(DeviceProcess(pid=p, memory_bytes=m) for p, m in processes)
    return aa.Stats(memory_used_bytes=used, processes=listed, **fields)


WHOLE, HALF = share(), share(units=5_000)


@pytest.mark.parametrize(
    ("held", "before", "now"),
    [
        pytest.param(WHOLE, seen(), seen(), id="the vendor cannot tell"),
        pytest.param(WHOLE, seen(GIB, []), seen(GIB, []), id="as it was"),
        pytest.param(WHOLE, seen(0, []), seen(700 << 20, []), id="the driver kept less than a hundredth"),
        pytest.param(share(memory=None), seen(0), seen(64 << 20), id="little, on a device of unknown size"),
        pytest.param(WHOLE, seen(9 * GIB), seen(GIB), id="less than before"),
        pytest.param(WHOLE, seen(0, []), seen(30 * GIB, [(99, 30 * GIB)]), id="another's process holds it"),
        pytest.param(WHOLE, seen(0, []), seen(30 * GIB, [(99, None)]), id="another's process holds an unknown part"),
        pytest.param(WHOLE, seen(9 * GIB, [(9, None)]), seen(9 * GIB, []), id="who held it before is not known"),
        pytest.param(WHOLE, seen(None, []), seen(30 * GIB, []), id="what was used before is not known"),
        pytest.param(HALF, seen(0), seen(30 * GIB), id="shared, and nobody knows whose it is"),
        pytest.param(HALF, seen(9 * GIB, [(9, 9 * GIB)]), seen(20 * GIB, [(9, 20 * GIB)]), id="the other half grew"),
        pytest.param(share(unified_memory=True), seen(GIB, []), seen(60 * GIB, []), id="it is the host's memory"),
        pytest.param(WHOLE, seen(health=aa.Health.HEALTHY), seen(health=aa.Health.UNKNOWN), id="health is not known"),
    ],
)
def test_clean(held, before, now):
    assert dirt(held, before, now, pids=[7, 8]) is None


MEMORY = "{} GiB more are in use than before the worker, and no process accounts for them"


@pytest.mark.parametrize(
    ("held", "before", "now", "reason"),
    [
        pytest.param(WHOLE, seen(0), seen(2 * GIB), MEMORY.format("2.0"), id="memory"),
        pytest.param(share(memory=None), seen(0), seen(65 << 20), MEMORY.format("0.1"), id="little memory"),
        pytest.param(WHOLE, seen(0, []), seen(9 * GIB, [(99, 4 * GIB)]), MEMORY.format("5.0"), id="beside another's"),
        pytest.param(
            WHOLE, seen(9 * GIB, [(9, 9 * GIB)]), seen(9 * GIB, []), MEMORY.format("9.0"), id="another's has ended"
        ),
        pytest.param(HALF, seen(0, []), seen(9 * GIB, [(9, 4 * GIB)]), MEMORY.format("5.0"), id="shared"),
        pytest.param(WHOLE, seen(), seen(None, [(7, None)]), "process 7 of the worker still uses it", id="process"),
        pytest.param(
            HALF, seen(), seen(9, [(7, 0), (9, 0), (8, 9)]), "processes 7 and 8 of the worker still use it", id="two"
        ),
        pytest.param(
            WHOLE, seen(), seen(health=aa.Health.UNHEALTHY, health_reason="it fell off the bus; reboot"),
            "it fell off the bus", id="broken",
        ),
        pytest.param(
            WHOLE, seen(), seen(health=aa.Health.UNHEALTHY), "it is broken", id="broken without a reason",
        ),
    ],
)  # fmt: skip
def test_not_clean(held, before, now, reason):
    found = dirt(held, before, now, pids=[7, 8])
    assert found.device is held.device
    assert found.reason == reason
    assert found.fix


def test_the_way_out_names_what_is_in_the_way():
    found = dirt(WHOLE, seen(), seen(1, [(7, 0), (8, 0)]), pids=[7, 8])
    assert found.fix.startswith("end them (kill -9 7 8); when no process is left that uses the device, reset it")
    broken = seen(health=aa.Health.UNHEALTHY, health_reason="it fell off the bus; reboot")
    assert dirt(WHOLE, seen(), broken).fix == "reboot"


# With a vendor that is asked, and real processes


@pytest.fixture
def card(install, tmp_path):
    """A device whose vendor tells what stands in a file; called, it writes that file."""
    install("acme", PLUGIN)
    made = share(facts=str(tmp_path / "facts"))

    def write(**facts):
        (tmp_path / "new").write_text(json.dumps({"used": 0} | facts))
        os.replace(tmp_path / "new", tmp_path / "facts")
        return made

    return write


def test_a_worker_that_lingers_is_waited_for(card):
    worker = subprocess.Popen(["sleep", "60"])
    held = card(pids=[worker.pid], used=GIB)
    baseline = {"acme-0": seen(GIB, [])}
    (found,) = wait_until_clean([held], baseline, pids=[worker.pid], seconds=0)
    assert found.reason == f"process {worker.pid} of the worker still uses it"
    with subprocess.Popen(["sh", "-c", f"sleep 0.2; kill {worker.pid}"]):
        worker.wait()
        assert wait_until_clean([held], baseline, pids=[worker.pid], poll=0.05) == []


def test_memory_that_comes_back_late_is_waited_for(card, tmp_path):
    held = card(used=GIB)
    baseline = take_baseline([held])
    assert baseline["acme-0"].memory_used_bytes == GIB
    card(used=9 * GIB)
    (tmp_path / "later").write_text(json.dumps({"used": GIB}))
    with subprocess.Popen(["sh", "-c", f"sleep 0.3; mv {tmp_path}/later {tmp_path}/facts"]):
        assert wait_until_clean([held], baseline, poll=0.05) == []


def test_waiting_ends(card):
    baseline = take_baseline([card()])
    held = card(used=9 * GIB)
    start = time.monotonic()
    (found,) = wait_until_clean([held], baseline, seconds=0.5, poll=0.1)
    assert time.monotonic() - start >= 0.4  # it did wait
    assert (found.device.id, found.reason) == ("acme-0", MEMORY.format("9.0"))
    assert "anyaccel doctor" in found.fix


def test_a_vendor_that_can_no_longer_tell_is_not_taken_for_clean(card):
    held = card()
    baseline = take_baseline([held])
    for facts, reason in (
        ({"raise": "no driver"}, "nobody can tell: it raised OSError: no driver"),
        ({"silent": True}, "its vendor tells nothing of it any more"),
        ({"sleep": 60}, "nobody can tell: it did not answer within 0.3 s"),
    ):
        card(**facts)
        (found,) = wait_until_clean([held], baseline, seconds=0, timeout=0.3 if "sleep" in facts else 20)
        assert found.reason.startswith(reason)
        assert found.fix


def test_what_a_vendor_cannot_tell_of_is_clean_at_once(card):
    for facts in ({"silent": True}, {"raise": "no driver"}):
        assert take_baseline([card(**facts)]) == {}
    assert wait_until_clean([card(used=9 * GIB)], {}) == []
    assert take_baseline([card()], machine="sim:A1") == {}


def test_each_device_is_judged_by_itself(card, tmp_path):
    card(used=9 * GIB)
    (tmp_path / "other").write_text(json.dumps({"used": 0}))
    shares = [share(facts=str(tmp_path / "other")), share(index=1, facts=str(tmp_path / "facts"))]
    baseline = {"acme-0": seen(0, []), "acme-1": seen(0, [])}
    assert [found.device.id for found in wait_until_clean(shares, baseline, seconds=0)] == ["acme-1"]
