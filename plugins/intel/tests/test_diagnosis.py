"""Findings, each with one way out."""

from __future__ import annotations

import anyaccel_intel as plugin
import pytest
from anyaccel.plugin import Severity

WINDOW = "/sys/bus/pci/devices/0000:00:10.0/resource"


def findings(ctx) -> list[tuple[Severity, str, str]]:
    return [(found.severity, found.reason, found.remedy) for found in plugin.anyaccel_diagnose(ctx)]


def test_nothing_is_said_where_nothing_of_intel_is(machine):
    assert findings(machine("no-intel", environ={"ZE_AFFINITY_MASK": ""})) == []


def test_all_is_well_on_a_good_machine(machine):
    assert findings(machine("max1550-4card")) == [(Severity.OK, "8 GPUs or tiles can be used", "")]


@pytest.mark.parametrize(
    ("name", "severity", "part", "cure"),
    [
        ("b580-old-kernel", Severity.FAIL, "no kernel driver is bound", "Linux 6.12"),
        ("flex170-no-permission", Severity.FAIL, "may not be opened", "join the group"),
        ("b580-wedged", Severity.FAIL, "wedged", "/sys/bus/pci/drivers/xe"),
        ("flex170-sriov-4vf", Severity.WARN, "4 virtual functions", "sriov_numvfs"),
        ("flex170-container-one-of-two", Severity.WARN, "/dev/dri/by-path is missing", "-v /dev/dri/by-path"),
    ],
)
def test_trouble_with_a_device_comes_with_its_cure(name, severity, part, cure, machine):
    assert any(
        found_severity is severity and part in message and cure in fix
        for found_severity, message, fix in findings(machine(name))
    )


@pytest.mark.parametrize(
    ("environ", "severity", "part"),
    [
        ({"ZE_AFFINITY_MASK": ""}, Severity.WARN, "shows every GPU"),
        ({"ZE_AFFINITY_MASK": "GPU0"}, Severity.FAIL, "comma list of device numbers"),
        ({"XPU_VISIBLE_DEVICES": "0"}, Severity.WARN, "nothing has read it"),
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:gpu:0"}, Severity.FAIL, "one colon"),
        ({"ONEAPI_DEVICE_SELECTOR": "!level_zero:0"}, Severity.WARN, "hides the whole backend"),
        ({"ZE_AFFINITY_MASK": "2,3", "ONEAPI_DEVICE_SELECTOR": "level_zero:2,3"}, Severity.WARN, "no GPU visible"),
    ],
)
def test_variables_that_do_not_mean_what_they_seem_are_named(environ, severity, part, machine):
    assert any(
        found_severity is severity and part in message and fix
        for found_severity, message, fix in findings(machine("max1550-4card", environ=environ))
    )


def test_small_window_to_the_memory_is_named_and_a_large_one_is_not(machine):
    head = "0x0000000081000000 0x0000000081ffffff 0x0000000000140204\n0x0 0x0 0x0\n"
    small = {WINDOW: {"text": head + "0x0000004000000000 0x000000400fffffff 0x000000000014220c\n"}}
    large = {WINDOW: {"text": head + "0x0000004000000000 0x00000043ffffffff 0x000000000014220c\n"}}
    assert "Resizable BAR" in findings(machine("b580-in-vm", changes=small))[0][2]
    assert findings(machine("b580-in-vm", changes=large)) == [(Severity.OK, "1 GPUs or tiles can be used", "")]


def test_runtime_that_sees_fewer_gpus_than_sysfs_is_reported_with_both_numbers(machine):
    queries = {"dpctl/level_zero_gpus": {"value": []}}
    found = findings(machine("flex140-uhd770", queries=queries))
    assert found[0][0] is Severity.FAIL
    assert "sysfs shows 2 GPUs or tiles that should work, dpctl shows 0" in found[0][1]


def test_runtime_under_a_mask_is_compared_with_what_the_mask_leaves(machine):
    listed = [{"name": "Intel(R) Data Center GPU Flex 140", "memory_bytes": 1, "driver_version": "1"}]
    queries = {"dpctl/level_zero_gpus": {"value": listed}}
    environ = {"ZE_AFFINITY_MASK": "1"}
    assert findings(machine("flex140-uhd770", environ=environ, queries=queries))[0][0] is Severity.OK


def test_damaged_output_of_sycl_ls_is_a_finding(machine):
    commands = [{"argv": ["sycl-ls"], "returncode": 0, "stdout": "[level_zero:gpu] what\n"}]
    assert "sycl-ls must print" in findings(machine("two-a770-uhd770", commands=commands))[0][1]
