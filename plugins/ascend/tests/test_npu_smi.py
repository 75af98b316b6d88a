"""The output of npu-smi, valid and malformed, instead of a recording's."""

from __future__ import annotations

import pytest
from anyaccel.plugin import Health
from anyaccel_ascend import plugin

MIB = 1 << 20
MAPPING = "NPU ID    Chip ID    Chip Logic ID    Chip Name\n0    0    0    Ascend 910B4\n1    0    1    Ascend 910B4\n"
TABLE = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.5.3                   Version: 25.5.3                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B4               | OK            | 85.9        47                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          2859 / 32768         |
+===========================+===============+====================================================+
| 1     910B4               | OK            | 89.7        48                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          2659 / 32768         |
+===========================+===============+====================================================+
"""
"""Verbatim from Project-HAMi/HAMi#1941."""
WIDE = """\
| npu-smi 26.0.rc1                            Version: 26.0.rc1                                                    |
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU   Name                | Health        | Power(W)             Temp(C)                 Hugepages-Usage(page)   |
| Chip                      | Bus-Id        | AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)           |
+===========================+===============+======================================================================+
| 0     910B4               | OK            | 82.6                 32                      0    / 0                |
| 0                         | 0000:C1:00.0  | 0                    0    / 0                2871 / 32768            |
+===========================+===============+======================================================================+
| NPU     Chip              | Process id    | Process name       | Process memory(MB)    | Process id in container |
+===========================+===============+======================================================================+
| 0       0                 | 1406630       | mindie_llm_back    | 21835                 | 77                      |
"""
"""npu-smi 26 has wider columns, and another column in its list of processes."""


@pytest.fixture
def observe(answering):
    """Detect and observe two NPUs, with a table and a mapping of npu-smi."""

    def show(table=TABLE, mapping=MAPPING):
        ctx = answering("910b4-container-2-of-8", {"info": table, "info -m": mapping})
        found = plugin.anyaccel_detect(ctx)
        return found, plugin.anyaccel_stats(found.devices, ctx)

    return show


def test_a_published_table_is_read(observe):
    found, stats = observe()
    assert [device.pci_bus_id for device in found.devices] == ["0000:c1:00.0", "0000:01:00.0"]
    assert [device.memory_bytes for device in found.devices] == [32768 * MIB] * 2
    assert [seen.memory_used_bytes for seen in stats.values()] == [2859 * MIB, 2659 * MIB]
    assert [seen.power_watts for seen in stats.values()] == [85.9, 89.7]
    assert {seen.processes for seen in stats.values()} == {None}
    assert not found.partial


def test_a_wider_table_with_another_column_is_read(observe):
    found, stats = observe(WIDE)
    seen = stats[found.devices[0].id]
    assert seen.temperature_celsius == 32
    assert [(held.pid, held.memory_bytes) for held in seen.processes] == [(1406630, 21835 * MIB)]


def test_full_usage_without_a_blank_is_read(observe):
    found, stats = observe(TABLE.replace("2859 / 32768", "32768/ 32768"))
    assert stats[found.devices[0].id].memory_used_bytes == found.devices[0].memory_bytes


def test_error_codes_of_the_sensor_are_no_temperature(observe):
    assert [seen.temperature_celsius for seen in observe(TABLE.replace("47   ", "32765"))[1].values()] == [None, 48]


@pytest.mark.parametrize("gone", ["| 0     910B4", "| 0                         | 0000:C1"])
def test_a_chip_of_which_half_is_missing_does_not_hide_the_others(observe, gone):
    found, stats = observe("".join(line for line in TABLE.splitlines(keepends=True) if not line.startswith(gone)))
    assert [device.health for device in found.devices] == [Health.UNHEALTHY, Health.HEALTHY]
    assert [*stats] == [found.devices[1].id]
    assert found.partial


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("| 0                         | 0000:C1:00.0", "| x                         | 0000:C1:00.0"),
        ("2859 / 32768", "2859"),
        ("| 85.9        47                0    / 0             |", "| 85.9 |"),
        ("| OK            | 85.9        47                0    / 0             |", "| OK            |"),
    ],
)
def test_a_row_that_does_not_fit_its_header_is_an_error_that_shows_it(observe, old, new):
    assert old in TABLE
    with pytest.raises(ValueError, match=r"a row of 'npu-smi info' must .* \(got .*\); report this output"):
        observe(TABLE.replace(old, new, 1))


@pytest.mark.parametrize(("health", "words"), [("Offline", "'Offline'"), ("       ", "cannot read its health")])
def test_a_health_that_is_new_or_missing_makes_one_chip_unusable(observe, health, words):
    found, stats = observe(TABLE.replace("| OK     ", f"| {health}", 1))
    for seen in (found.devices, list(stats.values())):
        assert [each.health for each in seen] == [Health.UNHEALTHY, Health.HEALTHY]
        assert words in seen[0].health_reason
        assert "npu-smi info -t health -i 0" in seen[0].health_remedy


def test_rows_of_controllers_are_no_chips(observe):
    assert len(observe(mapping=MAPPING + "1    1    -    Mcu\n")[0].devices) == 2


@pytest.mark.parametrize("row", ["0 0 x Ascend 910B3", "0 0", "0 zero 1 Ascend"])
def test_a_mapping_row_without_numbers_is_an_error(observe, row):
    with pytest.raises(ValueError, match="npu-smi info -m"):
        observe(mapping=f"NPU ID    Chip ID    Chip Logic ID    Chip Name\n{row}\n")


def test_a_mapping_without_a_column_that_counts_is_an_error(observe):
    with pytest.raises(ValueError, match="npu-smi info -m"):
        observe(mapping="NPU ID    Chip Name\n0    Ascend\n")


def test_two_chips_with_one_logic_id_are_an_error(observe):
    with pytest.raises(ValueError, match="a number of its own"):
        observe(mapping=MAPPING.replace("1    0    1", "1    0    0"))


def test_two_chips_at_one_address_are_an_error(observe):
    with pytest.raises(ValueError, match="an address of its own"):
        observe(TABLE.replace("0000:01:00.0", "0000:C1:00.0"))


def test_a_topology_with_network_cards_and_without_affinity_is_read(answering):
    text = (
        "\t   Phy-ID0    Phy-ID1    Phy-ID2    NIC0\n"
        "Phy-ID0    X          SIO        HCCS_SW    PIX\n"
        "Phy-ID1    SIO        X          HCCS_SW    PIX\n"
        "Phy-ID2    HCCS_SW    HCCS_SW    X          PHB\n"
        "NIC0       PIX        PIX        PHB        X\n"
        "\nLegend:\n\n  X    = Self\n"
    )
    found = plugin.anyaccel_detect(answering("910c-16die", {"info -t topo": text})).devices
    assert found[0].links == {found[1].id: 3, found[2].id: 1}
    assert {len(device.links) for device in found[3:]} == {0}


@pytest.mark.parametrize("text", ["", "Legend:\n", "Legend:\n\tNPU0 NPU1\nNPU0\n"])
def test_a_topology_that_says_nothing_links_nothing(answering, text):
    found = plugin.anyaccel_detect(answering("910b4-8npu", {"info -t topo": text})).devices
    assert {len(device.links) for device in found} == {0}
    assert {device.health for device in found} == {Health.HEALTHY}
