import importlib.util
import sys
from pathlib import Path

import pytest

# The suite imports by file name, without putting its directory on the path.
_spec = importlib.util.spec_from_file_location("neuron_machine", Path(__file__).with_name("machine.py"))
assert _spec
assert _spec.loader
neuron_machine = importlib.util.module_from_spec(_spec)
sys.modules["neuron_machine"] = neuron_machine
_spec.loader.exec_module(neuron_machine)


@pytest.fixture
def machine(tmp_path):
    """A machine without any Neuron device."""
    return neuron_machine.Machine(tmp_path)
