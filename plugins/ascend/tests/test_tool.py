"""A real executable as npu-smi: valid, garbled, hanging, failing, missing."""

from __future__ import annotations

import re

import pytest
from anyaccel.plugin import Health
from anyaccel_ascend import plugin

GOOD = """#!/bin/sh
[ "$LC_ALL" = C ] || exit 9
case "$*" in
"info -m") cat <<EOF ;;
        NPU ID   Chip ID   Chip Logic ID   Chip Name
        0        0         0               Ascend 910B4
        1        0         1               Ascend 910B4
EOF
"info") cat <<EOF
| npu-smi 25.5.3                   Version: 25.5.3                                               |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 0     910B4               | OK            | 85.9        47                0    / 0             |
| 0                         | 0000:02:00.0  | 40          0    / 0          2859 / 32768         |
| 1     910B4               | OK            | 89.7        48                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          2659 / 32768         |
EOF
;;
*) echo "unknown option"; exit 1 ;;
esac
"""


def test_a_working_npu_smi_gives_the_inventory_in_its_order(machine):
    found = plugin.anyaccel_detect(machine(GOOD))
    assert [device.id for device in found.devices] == ["ascend-0000:02:00.0", "ascend-0000:01:00.0"]
    assert [device.index for device in found.devices] == [0, 1]
    assert {device.health for device in found.devices} == {Health.HEALTHY}
    assert found.driver_version == "25.5.3"


def test_garbage_is_an_error_and_never_an_inventory(machine):
    with pytest.raises(ValueError, match=r"must print 'NPU ID' \(got 'hello world'\)"):
        plugin.anyaccel_detect(machine("#!/bin/sh\necho hello world\n"))


def test_silence_is_an_error_too(machine):
    with pytest.raises(ValueError, match=r"\(got 'nothing'\)"):
        plugin.anyaccel_detect(machine("#!/bin/sh\n"))


def test_bytes_that_are_no_text_are_an_error(machine):
    with pytest.raises(ValueError, match="must print"):
        plugin.anyaccel_detect(machine("#!/bin/sh\nhead -c 4096 /dev/urandom | tr -d 'N'\n"))


def test_a_truncated_mapping_is_an_error(machine):
    script = "#!/bin/sh\nprintf '\\tNPU ID   Chip ID   Chip Logic ID   Chip Name\\n\\t0 0\\n'; echo '| Bus-Id |'\n"
    with pytest.raises(ValueError, match="must have a number in each column"):
        plugin.anyaccel_detect(machine(script))


def test_a_hanging_npu_smi_is_reported_before_the_deadline(machine):
    found = plugin.anyaccel_detect(machine("#!/bin/sh\nexec sleep 60\n", seconds=2.0))
    assert len(found.devices) == 2
    assert {device.health for device in found.devices} == {Health.UNHEALTHY}
    given = re.search(r"did not end within (\d\.\d) s", found.devices[0].health_reason)
    # Half of the two seconds at most, so that the rest can still be reported.
    assert float(given[1]) <= 1.0


def test_one_that_hangs_in_its_second_answer_is_reported_too(machine):
    found = plugin.anyaccel_detect(machine(GOOD.replace('"info") ', '"info") sleep 60;'), seconds=1.0))
    assert {device.health for device in found.devices} == {Health.UNHEALTHY}


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ("dcmi module initialize failed. ret is -8005", 187, "did not initialize"),
        ("dcmi model initialized failed, because the device is used. ret is -8020", 172, "occupied"),
        ("npu get board type failed. ret is -9005", 0, "does not answer"),
        # An exit status alone: npu-smi printed nothing.
        ("", 203, "inside a container"),
        ("", 172, "occupied"),
        ("Segmentation fault", 139, "status 139"),
        ("error while loading shared libraries: libdrvdsmi_host.so", 127, "libdrvdsmi_host.so"),
    ],
)
def test_a_failing_npu_smi_leaves_the_npus_listed_with_its_reason(machine, said, status, words):
    found = plugin.anyaccel_detect(machine(f"#!/bin/sh\necho '{said}'\nexit {status}\n"))
    assert len(found.devices) == 2
    assert {device.health for device in found.devices} == {Health.UNHEALTHY}
    assert words in found.devices[0].health_reason


def test_one_killed_by_a_signal_leaves_the_npus_listed(machine):
    found = plugin.anyaccel_detect(machine("#!/bin/sh\nkill -SEGV $$\n"))
    assert "status -11" in found.devices[0].health_reason


def test_one_that_fails_after_a_good_answer_is_believed_and_the_inventory_partial(machine):
    found = plugin.anyaccel_detect(machine(GOOD + "exit 203\n"))
    assert {device.health for device in found.devices} == {Health.HEALTHY}
    assert found.partial


def test_a_chip_that_the_mapping_leaves_out_is_listed_as_lost(machine):
    found = plugin.anyaccel_detect(
        machine(GOOD.replace("        1        0         1               Ascend 910B4\n", ""))
    )
    assert [(device.id, device.health) for device in found.devices] == [
        ("ascend-0000:02:00.0", Health.HEALTHY),
        ("ascend-0000:01:00.0", Health.UNHEALTHY),
    ]


def test_no_card_on_the_server_means_that_pci_has_lost_ones(machine):
    found = plugin.anyaccel_detect(machine("#!/bin/sh\necho 'There is no NPU card on this server.'\n"))
    assert ["lost it" in device.health_reason for device in found.devices] == [True, True]


def test_a_missing_npu_smi_leaves_usable_npus_of_unknown_health(machine):
    found = plugin.anyaccel_detect(machine(None))
    assert {device.health for device in found.devices} == {Health.UNKNOWN}
    assert [device.nodes for device in found.devices] == [("/dev/davinci0",), ("/dev/davinci1",)]


def test_a_single_npu_without_npu_smi_goes_by_its_address(machine):
    (only,) = plugin.anyaccel_detect(machine(None, cards=1)).devices
    assert only.id == "ascend-0000:01:00.0"


def test_an_npu_smi_that_may_not_be_executed_counts_as_missing(machine, tmp_path):
    ctx = machine(GOOD)
    # Found on the PATH, but not executable: the shell would say "permission denied".
    (tmp_path / "bin/npu-smi").chmod(0o644)
    assert plugin.anyaccel_detect(ctx).partial


def test_npu_smi_is_not_run_on_a_machine_without_npus(machine, tmp_path):
    ctx = machine(f"#!/bin/sh\ntouch {tmp_path}/ran\n", cards=0, nodes=0)
    assert plugin.anyaccel_detect(ctx).devices == ()
    assert not (tmp_path / "ran").exists()


def test_stats_come_from_one_call(machine):
    ctx = machine(GOOD)
    found = plugin.anyaccel_detect(ctx)
    stats = plugin.anyaccel_stats(found.devices, ctx)
    busy = stats["ascend-0000:02:00.0"]
    assert (busy.utilization, busy.temperature_celsius, busy.power_watts) == (0.4, 47.0, 85.9)
    assert busy.memory_used_bytes == 2859 << 20


def test_stats_of_a_failing_npu_smi_say_why(machine):
    ctx = machine("#!/bin/sh\nexit 172\n")
    devices = plugin.anyaccel_detect(ctx).devices
    with pytest.raises(ValueError, match="occupied"):
        plugin.anyaccel_stats(devices, ctx)


def test_stats_without_npu_smi_are_empty(machine):
    ctx = machine(None)
    assert plugin.anyaccel_stats(plugin.anyaccel_detect(ctx).devices, ctx) == {}
