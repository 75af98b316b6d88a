"""The plug-in keeps the contract on every recorded machine and for every product."""

from pathlib import Path

from anyaccel_testing import AcceleratorPluginTests


class TestRebellions(AcceleratorPluginTests):
    vendor = "rebellions"
    recordings = Path(__file__).parent.parent / "recordings"
