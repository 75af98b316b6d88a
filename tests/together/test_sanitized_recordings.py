"""What is taken out of a recording changes ids and nothing else: every plug-in finds the same on its own recordings."""

from __future__ import annotations

import json
import warnings
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from anyaccel.probe.sanitize import replace_in, sanitize
from anyaccel_testing import context, describe, load_recording
from lengths import length

PLUGINS = Path(__file__).parents[2] / "plugins"
VENDORS = sorted(path.parent.name for path in PLUGINS.glob("*/recordings"))


def found(plugin, recording):
    """What a plug-in makes of a machine, a refusal included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return describe(plugin, context(recording))
        except (RuntimeError, ValueError, OSError) as error:
            return {"refused": str(error)}


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_sanitized_recording_replays_to_the_same_inventory_under_other_ids(vendor):
    plugin = entry_points(group="anyaccel")[vendor].load()
    replaced = 0
    directories = sorted((PLUGINS / vendor / "recordings").iterdir())
    for directory in length(directories[::3], directories):
        recording = load_recording(directory)
        clean, replacements = sanitize(recording)
        wanted = replace_in(found(plugin, recording), replacements)
        assert json.loads(json.dumps(found(plugin, clean))) == json.loads(json.dumps(wanted)), directory.name
        assert sanitize(clean)[0] == clean, directory.name
        replaced += len(replacements)
    shows_none = {"ascend", "mobilint", "moorethreads", "tpu"}  # no serial number and no UUID
    assert replaced or vendor in shows_none or length(short=True, full=False)
