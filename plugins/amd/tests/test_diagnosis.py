"""Doctor's findings from this plug-in alone, each with a remedy."""

from __future__ import annotations

import pytest
from anyaccel.plugin import Severity
from anyaccel_amd import plugin
from anyaccel_testing import context

CARD = "/sys/bus/pci/devices/0000:05:00.0"


def findings(recording, environ=None):
    return plugin.anyaccel_diagnose(context(recording, environ=environ))


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
        ({"HIP_VISIBLE_DEVICES": ""}, Severity.WARN, "hides nothing", "set HIP_VISIBLE_DEVICES=-1"),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, Severity.WARN, "vLLM refuses", "unset CUDA"),
    ],
)
def test_variables_that_quarrel_are_named(recorded, environ, severity, message, fix):
    (finding,) = findings(recorded("mi300x-8gpu"), environ)
    assert finding.severity is severity
    assert message in finding.reason
    assert finding.remedy.startswith(fix)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "CUDA_VISIBLE_DEVICES": "-1"},  # on purpose
        {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0,1"},  # as it is written on request
        {"ROCR_VISIBLE_DEVICES": "0,,1"},  # refused where masks are read
    ],
)
def test_variables_in_order_are_no_finding(recorded, environ):
    assert findings(recorded("mi300x-8gpu"), environ) == ()


def test_a_mask_meant_for_another_vendor_is_named(recorded):
    recording = recorded("rx7900xtx-beside-cuda")
    (finding,) = findings(recording)
    assert "also filters the AMD GPUs" in finding.reason
    assert findings(recording, {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"}) == ()


def test_uncorrectable_errors_are_counted_and_corrected_ones_are_not(recorded):
    assert findings(recorded("mi300x-8gpu", {f"{CARD}/ras/umc_err_count": "ue: 0\nce: 12\n"})) == ()
    (finding,) = findings(recorded("mi300x-8gpu", {f"{CARD}/ras/umc_err_count": "ue: 3\nce: 12\n"}))
    assert finding.reason.startswith("0000:05:00.0 has had 3 uncorrectable memory errors")


def test_a_card_that_lacks_a_partition_is_named(recorded):
    (finding,) = findings(recorded("mi300x-8gpu-cpx"))
    assert finding.reason == "7 partitions of amd-0000:e5:00.0 are to be seen where other cards have 8"
