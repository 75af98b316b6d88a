"""Devices and health on recorded machines."""

from __future__ import annotations

import pytest
from anyaccel.kit import FaultError
from anyaccel.plugin import DeviceProcess, Fractional, Health
from anyaccel_furiosa import plugin
from anyaccel_testing import context
from recorded import Recorded

MACHINES = Recorded(plugin, __file__)
load, replay, detect, stats = MACHINES.load, MACHINES.replay, MACHINES.detect, MACHINES.stats
CLASS = "/sys/class/rngd_mgmt/rngd!npu0mgmt"
FIRST = "furiosa-RNG26040100181Q"


def test_a_card_is_the_same_one_when_the_driver_gives_it_another_number() -> None:
    before, after = (
        {device.id: device.index for device in detect(replay(name)).devices}
        for name in ("rngd-4card", "rngd-2card-renumbered")
    )

    assert [before[FIRST], after[FIRST]] == [0, 1]
    assert after.keys() <= before.keys()


def test_without_a_serial_number_the_uuid_names_a_card_and_without_one_the_address() -> None:
    detected = detect(replay("warboy-2card"))

    assert [(device.id, device.index) for device in detected.devices] == [
        ("furiosa-E3B0C442-98FC-1C14", 0),
        ("furiosa-0000:cb:00.0", 10),
    ]


def test_a_number_of_two_digits_is_no_node_of_another_card() -> None:
    first, other = detect(replay("warboy-2card", **{"/dev/npu1pe0": {"char": [234, 99], "access": "rw"}})).devices

    assert first.nodes[:2] == ("/dev/npu0pe0", "/dev/npu0pe1")
    assert other.nodes[:2] == ("/dev/npu10pe0", "/dev/npu10pe1")
    assert all("npu10" in node for node in other.nodes)


def test_a_container_with_some_cores_of_a_card_has_no_card() -> None:
    first, _ = detect(replay("rngd-container-4-of-8-cores")).devices

    assert first.health_reason == "its device node /dev/rngd/npu0pe4 is missing"


@pytest.mark.parametrize("state", ["1", "2", "dead"])
def test_only_a_card_that_is_alive_is_healthy(state: str) -> None:
    """``furiosa_smi.Device.liveness()`` of 2026.4.0 is True for 0 and False for 1, in this very file."""
    other, first = detect(replay("rngd-2card-renumbered", **{f"{CLASS}/device_state": {"text": f"{state}\n"}})).devices

    assert (other.health, other.health_remedy) == (Health.UNHEALTHY, "look in 'dmesg', then restart it")
    assert other.health_reason == f"the driver reports device_state {state!r}, and 0 is alive"
    assert first.health is Health.HEALTHY


@pytest.mark.parametrize(
    ("state", "liveness", "reason"),
    [
        ("0", "alive", None),
        ("1", "dead", "the driver reports device_state '1', and 0 is alive"),
        ("0", "dead", "furiosa-smi calls it dead, and its driver alive"),
        ("1", "alive", "furiosa-smi calls it alive, and the driver reports device_state '1', and 0 is alive"),
        (None, "dead", None),
    ],
)
def test_where_driver_and_tool_contradict_each_other_the_health_is_unknown(
    state: str | None, liveness: str, reason: str | None
) -> None:
    recording = load("rngd-4card")
    recording["paths"][f"{CLASS}/device_state"]["text"] = f"{state}\n"
    if state is None:
        del recording["paths"][f"{CLASS}/device_state"]
    status = recording["commands"][1]
    status["stdout"] = status["stdout"].replace('"liveness": "alive"', f'"liveness": "{liveness}"', 1)
    contradicts = reason is not None and "furiosa-smi" in reason
    health = Health.UNKNOWN if contradicts or state is None else Health.HEALTHY if state == "0" else Health.UNHEALTHY

    first, *others = detect(context(recording)).devices
    assert (first.health, first.health_reason) == (health, reason or "")
    assert {other.health for other in others} == {Health.HEALTHY}
    observed = plugin.anyaccel_stats([first], context(recording))[first.id]
    assert (observed.health, observed.health_reason) == (health, reason or "")
    warned = [finding for finding in plugin.anyaccel_diagnose(context(recording)) if first.id in finding.reason]
    # The core itself reports unhealthy devices, never unknown ones.
    assert len(warned) == contradicts


def test_a_card_that_tells_no_state_is_neither_healthy_nor_broken() -> None:
    recording = load("rngd-4card")
    del recording["paths"][f"{CLASS}/device_state"]

    assert detect(context(recording)).devices[0].health is Health.UNKNOWN


def test_an_rngd_plus_is_given_out_by_cores() -> None:
    recording = load("rngd-2card-renumbered")
    for path in [path for path in recording["paths"] if path.endswith("/device")]:
        recording["paths"][path] = {"text": "0x0002\n"}
    devices = detect(context(recording)).devices

    assert {(device.model, device.slots, len(device.nodes) >= 8) for device in devices} == {("RNGD+", 8, True)}
    assert {plugin.anyaccel_fractional(device) for device in devices} == {Fractional.PARTITIONED}
    assert plugin.anyaccel_tags(devices[0])[:2] == ("FURIOSA_RNGDPLUS", "RNGD-Plus")


def test_cards_with_unpublished_cores_are_given_out_whole() -> None:
    detected = detect(replay("rngd-no-driver"))

    assert [device.slots for device in detected.devices if device.model == "RNGD-S"] == [1]
    assert not plugin.fractional(detected.devices[-1])


def test_the_tool_tells_load_memory_temperature_and_power() -> None:
    found = stats(replay("rngd-4card"))
    idle, busy = found[FIRST], found["furiosa-RNG26040100182Q"]

    assert (idle.memory_used_bytes, idle.utilization, idle.temperature_celsius, idle.power_watts) == (0, 0, 40.98, 38)
    assert (busy.memory_used_bytes, busy.utilization, busy.power_watts) == (25501368320, 0.5, 121)
    assert (idle.processes, busy.processes) == ((), (DeviceProcess(pid=4242),))


def test_the_older_tool_is_asked_in_its_own_way() -> None:
    found = stats(replay("warboy-2card"))

    assert found["furiosa-0000:cb:00.0"].utilization == 0.2
    assert found["furiosa-0000:cb:00.0"].memory_used_bytes is None


@pytest.mark.parametrize(
    ("name", "message"),
    [("rngd-2card-hangs-not-permitted", "did not end"), ("rngd-4card-faults", "must answer JSON")],
)
def test_a_broken_tool_costs_measures_and_no_device(name: str, message: str) -> None:
    with pytest.raises(FaultError, match=message):
        stats(replay(name))
    assert any(device.health is Health.HEALTHY for device in detect(replay(name)).devices)


@pytest.mark.parametrize("answer", ["[1]", '{"npu0": 1}', '[{"arch": "rngd"}]'])
def test_json_of_another_form_is_told(answer: str) -> None:
    recording = load("rngd-4card")
    recording["commands"][0]["stdout"] = answer

    with pytest.raises(FaultError, match="must answer a list of devices"):
        stats(context(recording))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("rngd-2card-renumbered", "furiosa-smi is not on the PATH"),
        ("driver-without-card", "the FuriosaAI driver is loaded and no FuriosaAI device is on the PCI bus"),
        ("rngd-4card-faults", "must answer JSON"),
    ],
)
def test_what_is_wrong_is_found(name: str, reason: str) -> None:
    assert any(reason in finding.reason for finding in plugin.anyaccel_diagnose(replay(name)))


def test_a_sound_machine_has_no_findings() -> None:
    assert plugin.anyaccel_diagnose(replay("rngd-4card")) == ()
