"""The plug-in keeps anyaccel's contract, and its runtime's rules."""

from pathlib import Path

import pytest
from anyaccel_lumen import plugin
from anyaccel_testing import AcceleratorPluginTests, context, load_recording

RECORDINGS = Path(__file__).parent.parent / "recordings"


class TestLumen(AcceleratorPluginTests):
    """Everything that anyaccel demands, on each recorded and each simulated machine."""

    vendor = "lumen"
    recordings = RECORDINGS


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        ("0000:0a:00.0,0000:02:00.0", ["0000:02:00.0", "0000:0a:00.0"]),
        ("1, 0000:02:00.0", ["0000:02:00.0", "0000:0a:00.0"]),
        ("0000:0", ["0000:02:00.0", "0000:03:00.0", "0000:0a:00.0"]),
        ("", []),
    ],
)
def test_the_mask_means_what_the_runtime_makes_of_it(mask: str, seen: list[str]) -> None:
    detected = plugin.detect(context(load_recording(RECORDINGS / "lm300-2-of-3-in-container")))
    assert detected is not None
    ids = plugin.visible({"LUMEN_VISIBLE_DEVICES": mask}, detected.devices)
    assert ids == [f"lumen-{address}" for address in seen]


@pytest.mark.parametrize("mask", ["2", "-1", "0000:99", "all", "0,,1"])
def test_a_mask_that_stops_the_runtime_is_refused(mask: str) -> None:
    detected = plugin.detect(context(load_recording(RECORDINGS / "lm300-2-of-3-in-container")))
    assert detected is not None
    with pytest.raises(ValueError, match="LUMEN_VISIBLE_DEVICES must be PCI addresses or indexes"):
        plugin.visible({"LUMEN_VISIBLE_DEVICES": mask}, detected.devices)
