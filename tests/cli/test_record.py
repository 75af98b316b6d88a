"""A recording tells nothing about its owner, replays anywhere to the same inventory, and says which that is."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from anyaccel.inventory.detect import detect
from anyaccel.inventory.record import collect_private_names
from anyaccel.model.value import decode
from anyaccel.plugin import Detected

HOST_PLUGIN = '''
import json
from anyaccel.plugin import *

@hookimpl
def anyaccel_info():
    return PluginInfo(vendor="acme", resource="APU", kind="apu", env_vars=("ACME_VISIBLE",))

@hookimpl
def anyaccel_detect(ctx):
    """Devices made of what any Linux machine has: an identity that is as good as a serial number, names, nodes."""
    boot = ctx.read("/proc/sys/kernel/random/boot_id").strip()
    chips = ctx.query("acme/chips", lambda: [{"serial": f"7QX{n}0042{n}", "owner": "kathleenqz"} for n in (2, 1)])
    shown = ctx.run(["echo", f"Serial Number: {chips[0]['serial']} in {ctx.environ.get('ACME_PLACE')}"])
    if "ACME_BROKEN" in ctx.environ:
        raise ValueError(f"no such chip: {boot}")
    return Detected(
        devices=tuple(
            Device(
                id=f"acme-{chip['serial']}",
                index=index,
                model=f"Acme of {ctx.read('/proc/sys/kernel/hostname').strip()}",
                nodes=tuple(ctx.glob("/dev/[nz]u[l]l")),
                attributes={"boot": boot, "shown": shown.stdout.strip(), "place": ctx.environ.get("ACME_PLACE", "")},
            )
            for index, chip in enumerate(chips)
        )
    )

@hookimpl
def anyaccel_fractional(device):
    return Fractional.SHARED

@hookimpl
def anyaccel_tags(device):
    return ("Acme",)

@hookimpl
def anyaccel_env(devices):
    return EnvEdits(set={"ACME_VISIBLE": ",".join(d.id for d in devices)})

@hookimpl
def anyaccel_visible(environ, devices):
    mask = environ.get("ACME_VISIBLE")
    return None if mask is None else [d.id for name in mask.split(",") for d in devices if d.id == name]

@hookimpl
def anyaccel_stats(devices, ctx):
    used = ctx.query("acme/memory", lambda: 5)
    return {d.id: Stats(memory_used_bytes=used) for d in devices}

@hookimpl
def anyaccel_diagnose(ctx):
    level = ctx.query("acme/noise", lambda: 3)
    return [Finding(severity=Severity.WARN, reason=f"The acme fan hums at {level}", remedy="dust it")]
'''


@pytest.fixture
def host(install, monkeypatch):
    """This host, with devices that are made of its own facts, the second hidden."""
    install("acme", HOST_PLUGIN)
    monkeypatch.setenv("ACME_VISIBLE", "acme-7QX100421")
    monkeypatch.setenv("ACME_PLACE", "/home/kathleenqz/rack 10.77.3.4")


def record(anyaccel, directory, *options, status=0, **more):
    done = anyaccel("record", str(directory), *options, **more)
    assert (done.returncode, done.stdout) == (status, f"{directory}/machine.json\n"), done.stderr
    return json.loads((directory / "machine.json").read_text()), json.loads((directory / "expected.json").read_text())


def test_a_recording_of_this_host_replays_to_the_same_inventory_under_other_ids(host, anyaccel, tmp_path, monkeypatch):
    here = detect()
    record(anyaccel, tmp_path / "r")
    monkeypatch.delenv("ACME_VISIBLE")  # what the recording shows does not depend on where it is replayed
    monkeypatch.setenv("ACME_PLACE", "elsewhere")
    there = detect(str(tmp_path / "r"))
    assert [(d.index, d.visible, d.order, d.nodes) for d in here.devices] == [
        (d.index, d.visible, d.order, d.nodes) for d in there.devices
    ]
    assert [(d.index, d.visible) for d in there.devices] == [(1, True), (0, False)]
    ids = [device.id for device in there.devices]
    assert ids == sorted(ids)  # as before: device 1 has the smaller serial number
    assert not set(ids) & {device.id for device in here.devices}
    assert {d.attributes["shown"] for d in there.devices} == {
        f"Serial Number: {ids[1].removeprefix('acme-')} in /home/user-1/rack 10.0.0.1"
    }
    assert {d.attributes["place"] for d in there.devices} == {"/home/user-1/rack 10.0.0.1"}


def test_nothing_in_it_tells_whose_it_is_unless_asked_for(host, anyaccel, tmp_path):
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    record(anyaccel, tmp_path / "clean")
    text = "".join(path.read_text() for path in (tmp_path / "clean").iterdir()).lower()
    secrets = [boot_id, "7qx200422", "7qx100421", "kathleenqz", "10.77.3.4", socket.gethostname().lower()]
    assert [secret for secret in secrets if secret in text] == []
    raw, _ = record(anyaccel, tmp_path / "raw", "--raw")
    assert raw["environ"]["ACME_VISIBLE"] == "acme-7QX100421"
    assert [secret for secret in secrets if secret not in json.dumps(raw).lower()] == []


def test_the_expected_inventory_lies_beside_it(host, anyaccel, tmp_path):
    _, expected = record(anyaccel, tmp_path / "r")
    assert (expected["schema"], expected["failed"]) == ("anyaccel.expected/1", {})
    detected = decode(Detected, expected["vendors"]["acme"])
    assert [device.index for device in detected.devices] == [0, 1]
    assert expected["visible"] == {"acme": [detected.devices[1].id]}
    assert "visible" not in expected["vendors"]["acme"]["devices"][0]
    assert anyaccel("record", "--verify", str(tmp_path / "r"), env={"ACME_VISIBLE": ""}).returncode == 0
    expected["vendors"]["acme"]["devices"][0]["model"] = "other"
    (tmp_path / "r" / "expected.json").write_text(json.dumps(expected))
    done = anyaccel("record", "--verify", str(tmp_path / "r"))
    assert (done.returncode, done.stdout) == (
        1, f"acme: {tmp_path}/r replays to other devices than in its expected.json\n",
    )  # fmt: skip
    done = anyaccel("record", "--verify", str(tmp_path / "r"), "--json")
    assert json.loads(done.stdout)["differences"] == ["acme"]


def test_what_status_and_doctor_show_replays_too(host, anyaccel, tmp_path, monkeypatch):
    record(anyaccel, tmp_path / "r")
    machine = str(tmp_path / "r")
    monkeypatch.delenv("ACME_VISIBLE")
    done = anyaccel("--machine", machine, "--json")
    assert [device["memory_used_bytes"] for device in json.loads(done.stdout)["devices"]] == [5, 5]
    done = anyaccel("doctor", "--machine", machine, "-q")
    assert (done.returncode, done.stdout) == (1, "warn  The acme fan hums at 3  ->  dust it\n")


def test_a_vendor_that_fails_is_recorded_as_it_failed(host, anyaccel, tmp_path):
    _, expected = record(anyaccel, tmp_path / "r", env={"ACME_BROKEN": "1"})
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert expected["vendors"] == {}
    assert expected["failed"]["acme"].startswith("anyaccel_detect: it raised ValueError: no such chip: ")
    assert boot_id not in expected["failed"]["acme"]
    (report,) = detect(str(tmp_path / "r")).vendors
    assert report.problem is not None


def test_a_recording_can_be_recorded_again_to_sanitize_it(host, anyaccel, tmp_path):
    record(anyaccel, tmp_path / "raw", "--raw")
    first, _ = record(anyaccel, tmp_path / "first", "--machine", str(tmp_path / "raw"))
    second, _ = record(anyaccel, tmp_path / "second", "--machine", str(tmp_path / "first"))
    assert "kathleenqz" not in json.dumps(first)
    assert second == first


def test_a_plugin_that_depends_on_its_ids_is_reported(install, anyaccel, tmp_path):
    """Ids that mean something cannot be replaced; the recording says so instead of replaying to something else."""
    picky = HOST_PLUGIN.replace(
        "for index, chip in enumerate(chips)", "for index, chip in enumerate(chips) if '7QX' in chip['serial']"
    )
    install("acme", picky)
    done = anyaccel("record", str(tmp_path / "r"))
    assert done.returncode == 1
    assert "acme: the replay has other devices than the machine" in done.stderr
    assert anyaccel("record", str(tmp_path / "raw"), "--raw").returncode == 0


def test_a_plugin_that_dies_is_named_and_the_others_are_recorded(host, install, anyaccel, tmp_path):
    install("bad", "import os; os._exit(9)")
    done = anyaccel("record", str(tmp_path / "r"), "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["vendors"] == ["acme", "bad"]
    assert "anyaccel-bad 1.2.3 (vendor 'bad'): its process ended with exit status 9" in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("[]", 'must say "schema": "anyaccel.expected/1" (got None)'),
        ("[" * 100_000, "cannot be read: "),
        ('{"schema": "x"}', 'must say "schema": "anyaccel.expected/1" (got \'x\')'),
        ('{"schema": "anyaccel.expected/1", "vendors": {}, "visible": []}', "'visible' must be an object (got [])"),
    ],
)
def test_an_expectation_that_is_missing_or_damaged_is_a_usage_error(content, message, host, anyaccel, tmp_path):
    record(anyaccel, tmp_path / "r")
    path = tmp_path / "r" / "expected.json"
    path.unlink() if content is None else path.write_text(content)
    done = anyaccel("record", "--verify", str(tmp_path / "r"))
    assert (done.returncode, done.stdout, message in done.stderr) == (2, "", True), done.stderr


def test_names_of_this_host_are_known():
    names = collect_private_names()
    assert socket.gethostname() in names.hosts
    assert "127.0.0.1" in names.addresses
    if os.environ.get("USER"):
        assert os.environ["USER"] in names.users
