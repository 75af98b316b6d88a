"""The plug-in keeps the contract on every recording and for every product."""

from pathlib import Path

from anyaccel_testing import AcceleratorPluginTests


class TestNeuron(AcceleratorPluginTests):
    vendor = "neuron"
    recordings = Path(__file__).parent.parent / "recordings"
