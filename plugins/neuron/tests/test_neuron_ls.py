"""The vendor's tool as real executables: valid, garbled, hanging, failing, missing."""

import json
import re

import pytest
from anyaccel_neuron import plugin
from anyaccel_testing import context
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import length

TOOL = "/opt/aws/neuron/bin/neuron-ls"
CHIP = {
    "neuron_device": 0,
    "bdf": "0000:00:1e.0",
    "connected_to": None,
    "nc_count": 2,
    "memory_size": 32 << 30,
    "neuroncore_ids": [0, 1],
    "neuron_processes": [],
}


def detect(machine, seconds=None):
    return plugin.anyaccel_detect(machine.context(seconds))


def answered(text, chips=3):
    """Detect on a trn1 machine with chips and a printed text of the tool."""
    paths = {f"/dev/neuron{index}": {"char": [243, index]} for index in range(chips)}
    paths["/sys/devices/virtual/dmi/id/product_name"] = {"text": "trn1.32xlarge\n"}
    command = {"argv": [TOOL, "--json-output"], "returncode": 0, "stdout": text, "stderr": ""}
    facts = {"schema": "anyaccel.recording/1", "paths": paths, "commands": [command], "environ": {}}
    return plugin.anyaccel_detect(context(facts))


def test_the_installed_tool_is_asked_before_that_on_the_path(machine):
    machine.chip(0)
    machine.lists({**CHIP, "memory_size": 4 << 30})
    machine.tool("/bin/neuron-ls", f"echo '{json.dumps([{**CHIP, 'memory_size': 8 << 30}])}'\n")
    assert [device.memory_bytes for device in machine.devices()] == [2 << 30, 2 << 30]


def test_the_tool_on_the_path_is_asked_where_none_is_installed(machine):
    machine.chip(0)
    machine.tool("/bin/neuron-ls", f"echo '{json.dumps([{**CHIP, 'memory_size': 8 << 30}])}'\n")
    assert [device.memory_bytes for device in machine.devices()] == [4 << 30, 4 << 30]


def test_without_the_tool_sysfs_tells_the_cores(machine):
    machine.chip(0)
    found = detect(machine)
    assert [(device.index, device.memory_bytes) for device in found.devices] == [(0, 16 << 30), (1, 16 << 30)]
    assert found.notes == ("neuron-ls is not installed: install the package aws-neuronx-tools",)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo Segmentation fault", "must print JSON (got 'Segmentation fault')"),
        ("echo '[{\"neuron_device\": 0,'", "must print JSON"),
        ("true", "must print JSON (got '')"),
        ("echo '{\"neuron_runtime_data\": 1}'", "one list of devices"),
        ("head -c 200000 /dev/zero | tr '\\0' '['", "must print JSON"),
        ("echo boom >&2; exit 3", "exited with status 3 and said: boom"),
        ("echo 'unknown flag: --json-output'; exit 1", "said: unknown flag"),
        ("exit 127", "status 127 and said: nothing"),
        ("kill -SEGV $$", "exited with status -11"),
    ],
)
def test_a_tool_that_fails_is_named_and_sysfs_tells_the_cores(machine, script, said):
    machine.chip(0)
    machine.tool(TOOL, script + "\n")
    found = detect(machine)
    assert len(found.devices) == 2
    assert said in found.notes[0]
    assert found.notes[0].startswith("neuron-ls gave no list of devices")


def test_a_tool_that_hangs_costs_half_the_time_and_no_device(machine):
    machine.chip(0)
    machine.tool(TOOL, "exec sleep 600\n")
    found = detect(machine, seconds=1.0)
    assert len(found.devices) == 2
    assert float(re.search(r"did not end within (\d\.\d) s", found.notes[0])[1]) <= 0.5


def test_a_tool_that_cannot_be_executed_is_named(machine):
    machine.chip(0)
    machine.write(TOOL, "\x7fELF damaged")
    (machine.tree / TOOL.lstrip("/")).chmod(0o755)
    found = detect(machine)
    assert len(found.devices) == 2
    assert "neuron-ls gave no list" in found.notes[0]


def test_a_tool_that_knows_only_the_short_option_is_asked_again(machine):
    machine.chip(0)
    answer = f"echo '{json.dumps([CHIP])}'\n"
    machine.tool(TOOL, 'if [ "$1" != -j ]; then echo "unknown flag: $1"; exit 1; fi\n' + answer)
    assert detect(machine).notes == ()


def test_a_tool_that_knows_only_the_new_option_is_asked_again(machine):
    machine.chip(0, "Trainium2")
    new = {
        "instance_type": "trn2.3xlarge",
        "logical_neuroncore_config": 2,
        "devices": [{**CHIP, "nc_count": 4, "neuroncore_ids": [0, 1, 2, 3]}],
    }
    machine.tool(TOOL, f"[ $# -eq 2 ] || {{ echo removed >&2; exit 1; }}\necho '{json.dumps(new)}'\n")
    found = detect(machine)
    assert found.notes == ()
    assert [device.attributes["instance_type"] for device in found.devices] == ["trn2.3xlarge"] * 4


def test_a_tool_that_fails_beside_others_is_asked_once_more(machine):
    machine.chip(0)
    lock = machine.tree / "busy"
    lock.touch()
    answer = f"echo '{json.dumps([CHIP])}'\n"
    machine.tool(TOOL, f"if [ -e {lock} ]; then rm {lock}; echo busy >&2; exit 1; fi\n" + answer)
    assert detect(machine).notes == ()


def test_nothing_that_tells_the_cores_is_an_error_and_no_guess(machine):
    machine.chip(0, "Trainium9")
    machine.tool(TOOL, "echo garbage\n")
    with pytest.raises(ValueError, match=r"nothing tells how many.*/dev/neuron0.*must print JSON \(got 'garbage'\)"):
        detect(machine)


def test_the_tool_alone_is_enough_for_an_unknown_chip(machine):
    machine.chip(0, "Trainium9")
    machine.lists({**CHIP, "nc_count": 3, "neuroncore_ids": [0, 1, 2], "memory_size": 3 << 30})
    assert [(device.model, device.memory_bytes) for device in machine.devices()] == [("NeuronDevice", 1 << 30)] * 3


def test_the_tool_is_not_asked_where_no_device_node_is(machine):
    machine.lists(CHIP)
    assert detect(machine) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nc_count": "2"}, "nc_count must be the number of cores"),
        ({"nc_count": 0}, "nc_count"),
        ({"nc_count": True}, "nc_count"),
        ({"nc_count": -1}, "nc_count"),
        ({"nc_count": None}, "nc_count"),
        ({"neuroncore_ids": [2, 3, 4]}, "must name the 2 cores"),
        ({"neuroncore_ids": [2, 2]}, "list of core ids"),
        ({"neuroncore_ids": "2-3"}, "list of core ids"),
        ({"neuroncore_ids": [2, -3]}, "list of core ids"),
        ({"neuroncore_ids": [2, 65535]}, "list of core ids"),
        ({"neuroncore_ids": [2, True]}, "list of core ids"),
        ({"neuroncore_ids": [2, 1 << 70]}, "list of core ids"),
        ({"neuroncore_ids": [1, 2]}, "core 1 for device 1 and for device 0"),
        ({"logical_neuroncore_config": 7}, "must be 1 or 2"),
        ({"logical_neuroncore_config": True}, "must be 1 or 2"),
    ],
)
def test_a_device_that_makes_no_sense_is_unfit_and_the_others_are_kept(changes, reason):
    second = {**CHIP, "neuron_device": 1, "bdf": "0000:00:1f.0", "neuroncore_ids": [2, 3], **changes}
    third = {**CHIP, "neuron_device": 2, "bdf": "0000:00:1d.0", "neuroncore_ids": [4, 5]}
    devices = answered(json.dumps([CHIP, second, third])).devices
    assert [(device.index, device.usable) for device in devices] == [
        (0, True),
        (1, True),
        (2, False),
        (3, False),
        (4, True),
        (5, True),
    ]
    assert reason in devices[2].health_reason
    assert devices[2].health_remedy


def test_a_device_that_is_listed_twice_is_unfit():
    devices = answered(json.dumps([CHIP, CHIP]), chips=1).devices
    assert {device.health_reason for device in devices} == {"neuron-ls lists device 0 twice"}


def test_a_device_without_an_index_is_skipped_and_told():
    found = answered(json.dumps([{"bdf": "00:1f.0"}, CHIP, "text"]), chips=1)
    assert [device.pci_bus_id for device in found.devices] == ["0000:00:1e.0"] * 2
    assert "without a device index" in found.notes[0]


def test_unknown_and_missing_fields_do_no_harm():
    devices = answered('[{"neuron_device": 0, "nc_count": 2, "future": {"a": [1]}}]', chips=1).devices
    assert [(one.index, one.memory_bytes, one.pci_bus_id, one.numa_node) for one in devices] == [
        (index, 16 << 30, None, None) for index in range(2)
    ]


@pytest.mark.parametrize(
    "banner", ["", "Neuron tools 1.7\n", "INFO[0000] found devices\n", "warning: ", "instance-type: [x]\n\n"]
)
def test_text_before_the_list_is_skipped(banner):
    assert answered(banner + json.dumps([CHIP]), chips=1).notes == ()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("cc:00.0", "0000:cc:00.0"),
        ("0000:CC:00.0", "0000:cc:00.0"),
        ("10000:cc:00.0", "10000:cc:00.0"),
        ("junk", None),
        (None, None),
        (7, None),
    ],
)
def test_pci_addresses_are_written_in_full(text, address):
    devices = answered(json.dumps([{**CHIP, "bdf": text}]), chips=1).devices
    assert {device.pci_bus_id for device in devices} == {address}


def test_the_physical_count_of_older_tools_is_not_taken_for_logical_cores(machine):
    machine.chip(0, "Trainium2")
    chip = {key: value for key, value in CHIP.items() if key != "neuroncore_ids"}
    machine.lists({**chip, "nc_count": 8, "logical_neuroncore_config": 2})
    assert [device.index for device in machine.devices()] == [0, 1, 2, 3]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(CHIP)), inner, max_size=7),
    max_leaves=12,
)


@settings(deadline=None, max_examples=length(20, 60))  # how long one example takes depends on what else runs
@given(
    st.lists(
        st.builds(lambda changes: {**CHIP, **changes}, st.dictionaries(st.sampled_from(sorted(CHIP)), json_values)),
        max_size=3,
    )
)
def test_any_list_leaves_every_chip_with_cores_of_its_own(elements):
    devices = answered(json.dumps(elements)).devices
    assert {device.nodes for device in devices} == {(f"/dev/neuron{index}",) for index in range(3)}
    assert len({device.index for device in devices}) == len({device.id for device in devices}) == len(devices)


@settings(deadline=None, max_examples=length(20, 60))
@given(st.text(max_size=40))
def test_any_text_leaves_the_cores_that_sysfs_tells(text):
    found = answered(text)
    assert len(found.devices) == 6
    assert found.notes == () or "neuron-ls" in found.notes[0]
