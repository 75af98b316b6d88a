"""The plug-in keeps the contract on every recorded machine and for every product."""

from pathlib import Path

from anyaccel_testing import AcceleratorPluginTests


class TestCambricon(AcceleratorPluginTests):
    vendor = "cambricon"
    recordings = Path(__file__).parent.parent / "recordings"
