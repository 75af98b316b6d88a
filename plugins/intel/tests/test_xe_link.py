"""Outputs of xpu-smi, through detection."""

from __future__ import annotations

import json

import pytest

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
NEAR, FAR = "intel-0000:1a:00.0", "intel-0000:8a:00.0"


def xpu_smi(discovery: str = DISCOVERY, topology: str = MATRIX, returncode: int = 0) -> list[dict[str, object]]:
    return [
        {"argv": ["xpu-smi", "discovery", "-j"], "returncode": returncode, "stdout": discovery},
        {"argv": ["xpu-smi", "topology", "-m"], "returncode": returncode, "stdout": topology},
    ]


def test_tiles_rank_by_card_then_by_lanes_then_by_detour(devices):
    links = devices("max1550-2card-xelink", commands=xpu_smi())[0].links
    assert links == {f"{NEAR}-tile1": 100, f"{FAR}-tile1": 66, f"{FAR}-tile0": 50}


def test_cards_take_the_best_link_of_their_tiles(devices):
    left, right = devices("max1550-2card-xelink-composite", commands=xpu_smi())
    assert (left.links, right.links) == ({FAR: 66}, {NEAR: 66})


@pytest.mark.parametrize(("word", "strength"), [("PIX", 12), ("PXB", 11), ("SYS", None)])
def test_matrix_of_cards_in_the_words_of_version_2_is_parsed(word, strength, devices):
    text = f"       GPU 0|GPU 1|CPU Affinity\nGPU 0 |S |{word} |0-7\nGPU 1 |{word} |S |0-7\n"
    left, _ = devices("max1550-2card-xelink-composite", commands=xpu_smi(topology=text))
    assert left.links.get(FAR) == strength


@pytest.mark.parametrize(
    ("answers", "note"),
    [
        (xpu_smi(topology=""), "must name GPUs"),
        (xpu_smi(topology="No device discovered\n"), "a line and a column for each GPU"),
        (xpu_smi(topology=MATRIX.replace("MDF", "???")), "'???'"),
        (xpu_smi(topology="\n".join(line[:20] for line in MATRIX.splitlines())), "must"),
        (xpu_smi(topology=MATRIX[: MATRIX.rindex("GPU")]), "a line and a column for each GPU"),
        (xpu_smi(discovery="No device discovered"), "must answer JSON"),
        (xpu_smi(discovery="[]"), "device_list"),
        (xpu_smi(discovery='{"device_list": [{"device_id": "x"}]}'), "device_list"),
        (xpu_smi(returncode=3), "exit status 3"),
        ([{"argv": ["xpu-smi", "discovery", "-j"], "timeout": True}], "did not end within"),
    ],
)
def test_tool_that_fails_costs_the_links_and_says_so(answers, note, detected):
    found = detected("max1550-2card-xelink", commands=answers)
    assert found.devices[0].links == {f"{NEAR}-tile1": 100}
    (told,) = found.notes
    assert told.startswith("Xe Links are unknown: ")
    assert note in told


def test_machine_without_the_tool_has_no_links_between_cards_and_no_note(detected):
    found = detected("max1550-4card")
    assert found.notes == ()
    assert set(found.devices[0].links) == {"intel-0000:1a:00.0-tile1"}


def test_tool_is_not_asked_where_no_card_can_have_xe_links(detected):
    assert detected("flex140-uhd770", commands=xpu_smi(returncode=3)).notes[1:] == ()
