"""The output of npu-smi, good and bad."""

from __future__ import annotations

import pytest
from anyaccel_ascend import npu_smi, npu_table

MIB = 1 << 20
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
+------------------------------------------------------------------------------------------------------------------+
| npu-smi 26.0.rc1                            Version: 26.0.rc1                                                    |
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU   Name                | Health        | Power(W)             Temp(C)                 Hugepages-Usage(page)   |
| Chip                      | Bus-Id        | AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)           |
+===========================+===============+======================================================================+
| 0     910B4               | OK            | 82.6                 32                      0    / 0                |
| 0                         | 0000:C1:00.0  | 0                    0    / 0                2871 / 32768            |
+===========================+===============+======================================================================+
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU     Chip              | Process id    | Process name       | Process memory(MB)    | Process id in container |
+===========================+===============+======================================================================+
| 0       0                 | 1406630       | mindie_llm_back    | 21835                 | 77                      |
"""
"""The columns of npu-smi 26 are wider, and its list of processes has one more."""
DASHES = """\
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
| 7       310Pvir04             | OK              | NA           33                3092 / 3092           |
| 0       0                     | 0000:00:07.0    | 0            10763/ 10763                            |
"""


def test_a_published_table_is_read():
    table = npu_table.parse_table(TABLE)
    assert table.version == "25.5.3"
    assert [chip.bus_id for chip in table.chips] == ["0000:c1:00.0", "0000:01:00.0"]
    assert [chip.memory_bytes for chip in table.chips] == [32768 * MIB] * 2
    assert [chip.memory_used_bytes for chip in table.chips] == [2859 * MIB, 2659 * MIB]
    assert [chip.power_watts for chip in table.chips] == [85.9, 89.7]
    assert table.processes is None
    assert not table.partial


def test_a_wider_table_with_another_column_is_read():
    table = npu_table.parse_table(WIDE)
    assert table.chips[0].temperature_celsius == 32
    assert [(held.pid, held.memory_bytes) for held in table.processes[0, 0]] == [(1406630, 21835 * MIB)]


def test_full_usage_without_a_blank_and_missing_power_are_read():
    (chip,) = npu_table.parse_table(DASHES).chips
    assert (chip.memory_used_bytes, chip.memory_bytes, chip.power_watts) == (10763 * MIB, 10763 * MIB, None)


def test_error_codes_of_the_sensor_are_no_temperature():
    table = npu_table.parse_table(TABLE.replace("47   ", "32765"))
    assert [chip.temperature_celsius for chip in table.chips] == [None, 48]


@pytest.mark.parametrize("gone", ["| 0     910B4", "| 0                         | 0000:C1"])
def test_a_chip_of_which_half_is_missing_does_not_hide_the_others(gone):
    text = "".join(line for line in TABLE.splitlines(keepends=True) if not line.startswith(gone))
    table = npu_table.parse_table(text)
    assert [chip.card for chip in table.chips] == [1]
    assert table.partial


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("| 0                         | 0000:C1:00.0", "| x                         | 0000:C1:00.0"),
        ("2859 / 32768", "2859"),
        ("| 85.9        47                0    / 0             |", "| 85.9 |"),
        ("| OK            | 85.9        47                0    / 0             |", "| OK            |"),
    ],
)
def test_a_row_that_does_not_fit_its_header_is_an_error_that_shows_it(old, new):
    assert old in TABLE
    with pytest.raises(ValueError, match=r"a row of 'npu-smi info' must .* \(got .*\); report this output"):
        npu_table.parse_table(TABLE.replace(old, new, 1))


@pytest.mark.parametrize(("health", "words"), [("Offline", "'Offline'"), ("       ", "cannot read its health")])
def test_a_health_that_is_new_or_missing_makes_one_chip_unusable(health, words):
    chips = npu_table.parse_table(TABLE.replace("| OK     ", f"| {health}", 1)).chips
    assert words in chips[0].fault
    assert chips[1].fault == ""


def test_a_mapping_with_mcu_rows_is_read():
    text = (
        "\tNPU ID                         Chip ID                        Chip Logic ID                  Chip Name\n"
        "\t8                              0                              0                              Ascend\n"
        "\t9                              0                              1                              Ascend 910B3\n"
        "\t9                              1                              -                              Mcu\n"
    )
    chips, unavailable = npu_smi.parse_mapping(text)
    assert [(chip.card, chip.chip, chip.logic_id, chip.name) for chip in chips] == [
        (8, 0, 0, "Ascend"),
        (9, 0, 1, "Ascend 910B3"),
    ]
    assert unavailable == 0


@pytest.mark.parametrize("row", ["0 0 x Ascend 910B3", "0 0", "0 zero 1 Ascend"])
def test_a_mapping_row_without_numbers_is_an_error(row):
    with pytest.raises(ValueError, match="npu-smi info -m"):
        npu_smi.parse_mapping(f"NPU ID    Chip ID    Chip Logic ID    Chip Name\n{row}\n")


def test_two_chips_with_one_logic_id_are_an_error():
    text = "NPU ID    Chip ID    Chip Logic ID    Chip Name\n0 0 0 Ascend 910B3\n1 0 0 Ascend 910B3\n"
    with pytest.raises(ValueError, match="a number of its own"):
        npu_smi.parse_mapping(text)


def test_a_topology_with_network_cards_and_without_affinity_is_read():
    text = (
        "\t   Phy-ID0    Phy-ID1    Phy-ID2    NIC0\n"
        "Phy-ID0    X          SIO        HCCS_SW    PIX\n"
        "Phy-ID1    SIO        X          HCCS_SW    PIX\n"
        "Phy-ID2    HCCS_SW    HCCS_SW    X          PHB\n"
        "NIC0       PIX        PIX        PHB        X\n"
        "\nLegend:\n\n  X    = Self\n"
    )
    matrix = npu_smi.parse_topology(text)
    assert matrix["Phy-ID0"] == {"Phy-ID0": "X", "Phy-ID1": "SIO", "Phy-ID2": "HCCS_SW"}
    assert set(matrix) == {"Phy-ID0", "Phy-ID1", "Phy-ID2"}
