"""Findings, each with a remedy."""

from __future__ import annotations

import pytest
from anyaccel.plugin import Severity
from anyaccel_intel import plugin

WINDOW = "/sys/bus/pci/devices/0000:00:10.0/resource"


def findings(ctx) -> list[tuple[Severity, str, str]]:
    return [(found.severity, found.reason, found.remedy) for found in plugin.anyaccel_diagnose(ctx)]


@pytest.mark.parametrize("name", ["no-intel", "max1550-4card", "b580-in-vm"])
def test_nothing_is_said_where_intel_is_absent_or_all_is_well(name, machine):
    assert findings(machine(name)) == []


def test_a_driver_without_gpu_is_a_finding(machine):
    ((severity, reason, remedy),) = findings(machine("driver-without-card"))
    assert (severity, "no Intel device is on the PCI bus" in reason, "lspci -d 8086:" in remedy) == (
        Severity.WARN,
        True,
        True,
    )


def test_a_missing_folder_of_links_is_a_finding(machine):
    ((_, reason, remedy),) = findings(machine("flex170-container-one-of-two"))
    assert reason.startswith("/dev/dri/by-path is missing")
    assert "-v /dev/dri/by-path" in remedy


@pytest.mark.parametrize(
    ("environ", "severity", "part"),
    [
        ({"ZE_AFFINITY_MASK": ""}, Severity.WARN, "shows every GPU"),
        ({"XPU_VISIBLE_DEVICES": "0"}, Severity.WARN, "nothing has read it"),
        ({"ONEAPI_DEVICE_SELECTOR": "!level_zero:0"}, Severity.WARN, "hides the whole backend"),
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
    assert findings(machine("b580-in-vm", changes=large)) == []


def test_runtime_that_sees_fewer_gpus_than_sysfs_is_reported_with_both_numbers(machine):
    queries = {"dpctl/level_zero_gpus": {"value": []}}
    found = findings(machine("flex140-uhd770", queries=queries))
    assert found[0][0] is Severity.FAIL
    assert "sysfs shows 2 GPUs or tiles that should work, dpctl shows 0" in found[0][1]


def test_runtime_under_a_mask_is_compared_with_what_the_mask_leaves(machine):
    listed = [{"name": "Intel(R) Data Center GPU Flex 140", "memory_bytes": 1, "driver_version": "1"}]
    queries = {"dpctl/level_zero_gpus": {"value": listed}}
    environ = {"ZE_AFFINITY_MASK": "1"}
    assert findings(machine("flex140-uhd770", environ=environ, queries=queries)) == []


def test_damaged_output_of_sycl_ls_is_a_finding(machine):
    commands = [{"argv": ["sycl-ls"], "returncode": 0, "stdout": "[level_zero:gpu] what\n"}]
    assert "sycl-ls must print" in findings(machine("two-a770-uhd770", commands=commands))[0][1]


def test_gpu_whose_generation_only_old_releases_serve_is_a_finding(machine):
    changes = {"/sys/bus/pci/devices/0000:00:02.0/device": {"text": "0x3e98\n"}}
    ((severity, reason, remedy),) = findings(machine("uhd770-alone", changes=changes))
    assert severity is Severity.WARN
    assert "whether the runtime serves Intel(R) UHD Graphics 630 (0000:00:02.0)" in reason
    assert "legacy1" in remedy
