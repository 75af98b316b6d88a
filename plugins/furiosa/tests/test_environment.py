"""The variable: cards, cores, and values that stop the runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
from anyaccel.plugin import EnvContext, Share, Term, VisiblePart
from anyaccel_furiosa import plugin
from anyaccel_testing import context, load_recording

NAME = "FURIOSA_DEVICES"
RECORDING = load_recording(Path(__file__).parent.parent / "recordings" / "rngd-4card")
DEVICES = plugin.detect(context(RECORDING)).devices  # type: ignore[union-attr]


def written(*shares: tuple[int, tuple[int, ...]]) -> str:
    devices = [DEVICES[number] for number, _ in shares]
    ctx = EnvContext(
        devices=DEVICES,
        shares={
            DEVICES[number].id: Share(device=DEVICES[number], units=1250 * (len(slots) or 8), slots=slots)
            for number, slots in shares
        },
    )
    return plugin.anyaccel_env(devices, ctx).set[NAME]


def part(number: int, *slots: int) -> VisiblePart:
    return VisiblePart(id=DEVICES[number].id, slots=slots)


@pytest.mark.parametrize(
    ("shares", "value"),
    [
        ([], "npu:255"),
        ([(3, ())], "npu:3"),
        ([(2, ()), (0, ())], "npu:2,npu:0"),
        ([(0, (0, 1, 2, 3))], "npu:0:0-3"),
        ([(1, (6, 7))], "npu:1:6-7"),
        ([(1, (5,))], "npu:1:5"),
        ([(1, (1, 2))], "npu:1:1,npu:1:2"),  # a pair that no hardware fuses
        ([(1, (2, 3, 4, 5, 6, 7))], "npu:1:2-3,npu:1:4-7"),
        ([(0, ()), (1, (0, 1))], "npu:0,npu:1:0-1"),
    ],
)
def test_cards_and_cores_are_named_as_the_runtime_names_them(
    shares: list[tuple[int, tuple[int, ...]]], value: str
) -> None:
    assert written(*shares) == value


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("npu:1,npu:0", [DEVICES[1].id, DEVICES[0].id]),
        ("npu:0:*", [DEVICES[0].id]),
        ("npu:0:0-7", [DEVICES[0].id]),
        ("npu:2:4-7", [part(2, 4, 5, 6, 7)]),
        ("npu2pe4-7", [part(2, 4, 5, 6, 7)]),
        ("npu:1:3, npu:0, npu:1:0-1", [part(1, 0, 1, 3), DEVICES[0].id]),
        ("npu:0:0-3,npu:0:4-7", [DEVICES[0].id]),
        ("0,1", [DEVICES[0].id, DEVICES[1].id]),  # read by Ray alone, which writes it anew
        ("", []),
        ("npu:255", []),
    ],
)
def test_an_environment_shows_what_the_runtime_would_take(value: str, seen: list[object]) -> None:
    assert plugin.anyaccel_visible({NAME: value}, DEVICES) == seen


@pytest.mark.parametrize(
    "value",
    [
        "npu:9",
        "npu:0,npu:0",
        "npu:0,npu:0:1",
        "npu:0:1-0",
        "npu:0:1-2",
        "npu:0:0-2",
        "npu:0:8",
        "npu:0:0-",
        "npu:0,",
        "warboy(2)*1",
        "npu0",
        "all",
        "npu:-1",
    ],
)
def test_what_stops_the_runtime_or_leaves_it_the_choice_is_refused(value: str) -> None:
    # device-api reports each of these as an error, or leaves the choice to the runtime.
    with pytest.raises(ValueError, match="FURIOSA_DEVICES must be devices and cores that are here, each once"):
        plugin.anyaccel_visible({NAME: value}, DEVICES)


def test_without_the_variable_nothing_is_hidden() -> None:
    assert plugin.anyaccel_visible({}, DEVICES) is None


@pytest.mark.parametrize(
    ("units", "refused"), [(1_250, False), (2_500, False), (3_000, True), (5_000, False), (7_500, True), (9_000, False)]
)
def test_a_share_is_a_partition(units: int, refused: bool) -> None:
    reason = plugin.anyaccel_validate(Term(names=("FURIOSA",), units=units), DEVICES[:1])

    assert (reason is not None) is refused
    assert reason is None or reason.endswith("ask for 0.125 or 0.25 or 0.5")


def test_a_card_without_a_number_cannot_be_given_to_a_process() -> None:
    recording = load_recording(Path(__file__).parent.parent / "recordings" / "rngd-4card-faults")
    lost = plugin.detect(context(recording)).devices[3]  # type: ignore[union-attr]

    with pytest.raises(ValueError, match="cannot be given to a process: no driver is bound to it"):
        plugin.anyaccel_env([lost], EnvContext(devices=(lost,)))
    with pytest.raises(ValueError, match="must be devices and cores that are here"):
        plugin.anyaccel_visible({NAME: f"npu:{lost.index}"}, [*DEVICES[:1], lost])
