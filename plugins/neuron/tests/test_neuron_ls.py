"""The vendor's tool: real executables that answer, print garbage, hang, fail, or are missing."""

import json
import time

import pytest
from anyaccel_neuron import neuron_ls, plugin
from hypothesis import given, settings
from hypothesis import strategies as st
from neuron_machine import TOOL

CHIP = {
    "neuron_device": 0,
    "bdf": "0000:00:1e.0",
    "connected_to": None,
    "nc_count": 2,
    "memory_size": 32 << 30,
    "neuroncore_ids": [0, 1],
    "neuron_processes": [],
}


def printing(*elements, **changes):
    chips = elements or [{**CHIP, **changes}]
    return f"cat <<'END'\n{json.dumps(chips)}\nEND\n"


def detect(machine, seconds=10.0):
    return plugin.anyaccel_detect(machine.context(seconds))


def test_the_installed_tool_is_asked_before_that_on_the_path(machine):
    machine.chip(0)
    machine.tool(TOOL, printing(memory_size=4 << 30))
    machine.tool("/bin/neuron-ls", printing(memory_size=8 << 30))
    assert [device.memory_bytes for device in detect(machine).devices] == [2 << 30, 2 << 30]


def test_the_tool_on_the_path_is_asked_where_none_is_installed(machine):
    machine.chip(0)
    machine.tool("/bin/neuron-ls", printing(memory_size=8 << 30))
    assert [device.memory_bytes for device in detect(machine).devices] == [4 << 30, 4 << 30]


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
        ("true", "must print JSON (got nothing)"),
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
    start = time.monotonic()
    found = detect(machine, seconds=1.0)
    assert time.monotonic() - start < 0.9
    assert len(found.devices) == 2
    assert "did not end within 0.5 s" in found.notes[0]


def test_a_tool_that_cannot_be_executed_is_named(machine):
    machine.chip(0)
    machine.write(TOOL, "\x7fELF damaged")
    (machine.directory / TOOL.lstrip("/")).chmod(0o755)
    found = detect(machine)
    assert len(found.devices) == 2
    assert "neuron-ls gave no list" in found.notes[0]


def test_a_tool_that_knows_only_the_short_option_is_asked_again(machine):
    machine.chip(0)
    machine.tool(TOOL, 'if [ "$1" != -j ]; then echo "unknown flag: $1"; exit 1; fi\n' + printing())
    assert detect(machine).notes == ()


def test_a_tool_that_knows_only_the_new_option_is_asked_again(machine):
    machine.chip(0, "Trainium2")
    new = {
        "instance_type": "trn2.3xlarge",
        "logical_neuroncore_config": 2,
        "devices": [{**CHIP, "nc_count": 4, "neuroncore_ids": [0, 1, 2, 3]}],
    }
    script = f"[ $# -eq 2 ] || {{ echo removed >&2; exit 1; }}\ncat <<'END'\n{json.dumps(new, indent=2)}\nEND\n"
    machine.tool(TOOL, script)
    found = detect(machine)
    assert found.notes == ()
    assert [device.attributes["instance_type"] for device in found.devices] == ["trn2.3xlarge"] * 4


def test_a_tool_that_fails_beside_others_is_asked_once_more(machine):
    machine.chip(0)
    lock = machine.directory / "busy"
    lock.touch()
    machine.tool(TOOL, f"if [ -e {lock} ]; then rm {lock}; echo busy >&2; exit 1; fi\n" + printing())
    assert detect(machine).notes == ()


def test_nothing_that_tells_the_cores_is_an_error_and_no_guess(machine):
    entry = machine.chip(0)
    machine.write(f"{entry}/info/architecture/device_name", "Trainium9")
    machine.tool(TOOL, "echo garbage\n")
    with pytest.raises(RuntimeError, match=r"/dev/neuron0.*must print JSON \(got 'garbage'\)"):
        detect(machine)


def test_the_tool_alone_is_enough_for_a_chip_that_nobody_knows(machine):
    entry = machine.chip(0)
    machine.write(f"{entry}/info/architecture/device_name", "Trainium9")
    machine.tool(TOOL, printing(nc_count=3, neuroncore_ids=[0, 1, 2], memory_size=3 << 30))
    devices = detect(machine).devices
    assert [(device.model, device.memory_bytes) for device in devices] == [("NeuronDevice", 1 << 30)] * 3


def test_the_tool_is_not_asked_where_no_device_node_is(machine):
    machine.tool(TOOL, printing())
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
        ({"neuroncore_ids": [1, 2]}, "core 1 for device 1 and for device 0"),
        ({"logical_neuroncore_config": 7}, "must be 1 or 2"),
        ({"neuron_device": 0}, "twice"),
    ],
)
def test_a_device_that_makes_no_sense_is_set_aside_and_the_others_kept(changes, reason):
    second = {**CHIP, "neuron_device": 1, "bdf": "0000:00:1f.0", "neuroncore_ids": [2, 3], **changes}
    third = {**CHIP, "neuron_device": 2, "neuroncore_ids": [4, 5]}
    listing = neuron_ls.parse(json.dumps([CHIP, second, third]))
    assert reason in next(iter(listing.faults.values()))
    assert 2 in listing.chips
    assert not set(listing.chips) & set(listing.faults)


def test_a_device_without_an_index_is_skipped_and_told():
    listing = neuron_ls.parse(json.dumps([{"bdf": "00:1f.0"}, CHIP, "text"]))
    assert set(listing.chips) == {0}
    assert "without a device index" in listing.problem


def test_unknown_and_missing_fields_do_no_harm():
    listing = neuron_ls.parse('[{"neuron_device": 3, "nc_count": 2, "future": {"a": [1]}}]')
    chip = listing.chips[3]
    assert (chip.cores, chip.memory_bytes, chip.bdf, chip.numa_node, chip.lnc) == (None, None, None, None, None)
    assert chip.connected == frozenset()


@pytest.mark.parametrize(
    "banner", ["", "Neuron tools 1.7\n", "INFO[0000] found devices\n", "warning: ", "instance-type: [x]\n\n"]
)
def test_text_before_the_list_is_skipped(banner):
    assert set(neuron_ls.parse(banner + json.dumps([CHIP])).chips) == {0}


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
    assert neuron_ls.pci_address(text) == address


def test_the_physical_count_of_older_tools_is_not_taken_for_logical_cores(machine):
    machine.chip(0, "Trainium2")
    chip = {key: value for key, value in CHIP.items() if key != "neuroncore_ids"}
    machine.tool(TOOL, printing({**chip, "nc_count": 8, "logical_neuroncore_config": 2}))
    assert [device.index for device in detect(machine).devices] == [0, 1, 2, 3]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(CHIP)), inner, max_size=7),
    max_leaves=12,
)


@settings(deadline=None)  # how long one example takes depends on what else runs
@given(
    st.lists(
        st.builds(lambda changes: {**CHIP, **changes}, st.dictionaries(st.sampled_from(sorted(CHIP)), json_values)),
        max_size=3,
    )
)
def test_any_list_is_understood_or_told(elements):
    listing = neuron_ls.parse(json.dumps(elements))
    ids = [core for chip in listing.chips.values() for core in chip.cores or ()]
    assert len(ids) == len(set(ids))
    assert all(chip.count > 0 for chip in listing.chips.values())


@given(st.text(max_size=40))
def test_any_text_is_understood_or_refused(text):
    try:
        said = str(neuron_ls.parse(text)) and "JSON"
    except ValueError as error:
        said = str(error)
    assert "JSON" in said
