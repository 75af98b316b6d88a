"""What doctor says about AMD, one way out each."""

from __future__ import annotations

import anyaccel_amd
import pytest
from anyaccel.plugin import Finding, Severity
from anyaccel.testing import context
from anyaccel.vendors.contract import listed_faults

CARD = "/sys/bus/pci/devices/0000:05:00.0"


def findings(recording, environ=None):
    found = anyaccel_amd.anyaccel_diagnose(context(recording, environ=environ))
    assert list(listed_faults(found, Finding)) == []
    assert all(finding.remedy for finding in found if finding.severity is not Severity.OK)
    return found


def test_a_machine_in_order_gets_one_line(recorded):
    (finding,) = findings(recorded("mi300x-8gpu"))
    assert (finding.severity, finding.reason) == (Severity.OK, "AMD: 8 devices, all of them usable.")
    assert findings(recorded("no-amd")) == []


@pytest.mark.parametrize(
    ("environ", "severity", "message", "fix"),
    [
        (
            {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3"},
            Severity.FAIL,
            "together hide every GPU",
            "unset",
        ),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, Severity.WARN, "Ray refuses to start so", "unset ROCR_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "0,,1"}, Severity.FAIL, "empty entry", "unset ROCR_VISIBLE_DEVICES"),
        ({"HIP_VISIBLE_DEVICES": ""}, Severity.WARN, "hides nothing", "set HIP_VISIBLE_DEVICES=-1"),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, Severity.WARN, "vLLM refuses", "unset CUDA"),
    ],
)
def test_variables_that_quarrel_are_named(recorded, environ, severity, message, fix):
    (finding,) = findings(recorded("mi300x-8gpu"), environ)
    assert finding.severity is severity
    assert message in finding.reason
    assert finding.remedy.startswith(fix)


def test_hiding_everything_on_purpose_is_no_finding(recorded):
    environ = {"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "CUDA_VISIBLE_DEVICES": "-1"}
    assert [finding.severity for finding in findings(recorded("mi300x-8gpu"), environ)] == [Severity.OK]


def test_a_mask_meant_for_another_vendor_is_named(recorded):
    recording = recorded("rx7900xtx-beside-cuda")
    (finding,) = findings(recording)
    assert "also filters the AMD GPUs" in finding.reason
    assert findings(recording, {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"})[0].severity is Severity.OK


def test_devices_with_one_reason_make_one_finding(recorded):
    (finding,) = findings(recorded("mi210-no-permission"))
    assert finding.severity is Severity.FAIL
    assert finding.reason.count("amd-0000:") == 8
    assert finding.remedy.startswith("add the user to the group")


def test_uncorrectable_errors_are_counted_and_corrected_ones_are_not(recorded):
    assert findings(recorded("mi300x-8gpu", {f"{CARD}/ras/umc_err_count": "ue: 0\nce: 12\n"}))[0].remedy == ""
    (finding,) = findings(recorded("mi300x-8gpu", {f"{CARD}/ras/umc_err_count": "ue: 3\nce: 12\n"}))
    assert "3 uncorrectable memory errors" in finding.reason


def test_a_card_that_lacks_a_partition_is_named(recorded):
    (finding,) = findings(recorded("mi300x-8gpu-cpx"))
    assert finding.reason == "AMD amd-0000:e5:00.0: 7 partitions are to be seen where other cards have 8."
