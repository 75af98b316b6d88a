"""Every recorded machine is described as its ``expected.json`` says."""

import json
import subprocess
import sys
from pathlib import Path

import anyaccel_nvidia as plugin
import pytest
from anyaccel.testing import context, describe, load_recording

RECORDINGS = sorted((Path(__file__).parent.parent / "recordings").iterdir())


@pytest.mark.parametrize("directory", RECORDINGS, ids=lambda directory: directory.name)
def test_a_recorded_machine_is_described_as_expected(directory):
    described = describe(plugin, context(load_recording(directory)))
    assert described == json.loads((directory / "expected.json").read_text())


@pytest.mark.parametrize("directory", RECORDINGS, ids=lambda directory: directory.name)
def test_indexes_count_from_zero_and_ids_are_unique(directory):
    detected = plugin.anyaccel_detect(context(load_recording(directory)))
    devices = detected.devices if detected else ()
    assert [device.index for device in devices] == list(range(len(devices)))
    assert len({device.id for device in devices}) == len(devices)


def test_a_replay_loads_no_vendor_library():
    code = (
        "import sys; from pathlib import Path; import anyaccel_nvidia as plugin;"
        "from anyaccel.testing import context, describe, load_recording;"
        "describe(plugin, context(load_recording(Path(sys.argv[1])))); print('pynvml' in sys.modules)"
    )
    argv = [sys.executable, "-c", code, str(next(path for path in RECORDINGS if path.name == "h100-1gpu"))]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "False\n"
