"""The outputs of xpu-smi, from a recording and from a program that is really run."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from anyaccel.plugin import ProbeContext
from anyaccel.probe.host import HostFacts
from anyaccel_intel import topology

MATRIX = """\
         GPU 0/0|GPU 0/1|GPU 1/0|GPU 1/1|CPU Affinity
GPU 0/0 |S      |MDF    |XL*    |XL16   |0-23,48-71
GPU 0/1 |MDF    |S      |XL16   |XL*    |0-23,48-71
GPU 1/0 |XL*    |XL16   |S      |MDF    |24-47,72-95
GPU 1/1 |XL16   |XL*    |MDF    |S      |24-47,72-95
"""
DISCOVERY = json.dumps(
    {
        "device_list": [
            {"device_id": 0, "pci_bdf_address": "0000:1A:00.0"},
            {"device_id": 1, "pci_bdf_address": "0000:8a:00.0"},
        ]
    }
)


def tool(directory: Path, name: str, script: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def live(directory: Path) -> ProbeContext:
    return ProbeContext(HostFacts({"PATH": f"{directory}{os.pathsep}{os.defpath}"}), deadline=float("inf"))


def test_matrix_of_tiles_is_parsed():
    found = topology.parse_matrix(MATRIX)
    assert found[(0, 0), (0, 1)] == topology.SAME_CARD
    assert found[(0, 0), (1, 1)] == topology.XE_LINK + 16
    assert found[(0, 0), (1, 0)] == topology.XE_LINK
    assert found[(0, 0), (0, 0)] == 0
    assert len(found) == 16


def test_matrix_of_cards_in_the_words_of_version_2_is_parsed():
    text = "       GPU 0|GPU 1|CPU Affinity\nGPU 0 |S |PIX |0-7\nGPU 1 |SYS |S |0-7\n"
    found = topology.parse_matrix(text)
    assert found[(0, 0), (1, 0)] > topology.SAME_SWITCH
    assert found[(1, 0), (0, 0)] == 0


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "must name GPUs"),
        ("No device discovered\n", "must name GPUs"),
        (MATRIX.replace("MDF", "???"), "'???'"),
        ("\n".join(line[:20] for line in MATRIX.splitlines()), "must"),
    ],
)
def test_damaged_matrix_is_refused(text, rule):
    with pytest.raises(ValueError, match="xpu-smi topology -m") as error:
        topology.parse_matrix(text)
    assert rule in str(error.value)


@pytest.mark.parametrize("text", ["", "No device discovered", "[]", '{"device_list": [{"device_id": "x"}]}', "{}"])
def test_damaged_discovery_is_refused(text):
    with pytest.raises(ValueError, match="device_list"):
        topology.parse_discovery(text)


def test_pre_production_card_with_a_short_id_is_found(machine):
    result = machine("unknown-product-020a").run(["xpu-smi", "discovery", "-j"])
    assert topology.parse_discovery(result.stdout) == {0: "0000:4d:00.0"}


def test_links_come_from_the_tool_that_is_run(tmp_path, devices):
    tool(tmp_path, "xpu-smi", f"case $1 in discovery) echo '{DISCOVERY}';; topology) cat <<'E'\n{MATRIX}E\n;; esac")
    found, notes = topology.links(devices("max1550-2card-xelink-composite"), {}, live(tmp_path))
    assert found == {"intel-0000:1a:00.0": {"intel-0000:8a:00.0": 66}, "intel-0000:8a:00.0": {"intel-0000:1a:00.0": 66}}
    assert notes == []


@pytest.mark.parametrize(
    ("script", "note"),
    [("exit 3", "ended with 3"), ("echo No device discovered", "device_list"), ("kill -BUS $$", "ended with -7")],
)
def test_tool_that_fails_costs_the_links_and_says_so(script, note, tmp_path, devices):
    tool(tmp_path, "xpu-smi", script)
    found, notes = topology.links(devices("max1550-2card-xelink"), {}, live(tmp_path))
    assert found["intel-0000:1a:00.0-tile0"] == {"intel-0000:1a:00.0-tile1": topology.SAME_CARD}
    assert len(notes) == 1
    assert note in notes[0]


def test_machine_without_the_tool_has_no_links_between_cards_and_no_note(detected):
    found = detected("max1550-4card")
    assert found.notes == ()
    assert set(found.devices[0].links) == {"intel-0000:1a:00.0-tile1"}


def test_tool_is_not_asked_where_no_card_can_have_xe_links(tmp_path, devices):
    tool(tmp_path, "xpu-smi", f"touch {tmp_path}/asked")
    topology.links(devices("flex140-uhd770"), {}, live(tmp_path))
    assert not (tmp_path / "asked").exists()
