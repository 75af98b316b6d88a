"""Mobilint's own library opens the nodes that the plug-in looks for. It counts cards by ioctl, which no testbed has."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("mbltml") is None:
    pytest.skip("tox -e real-mobilint installs mobilint-ml", allow_module_level=True)
from anyaccel_mobilint import plugin

NODES = ("/dev/aries", "/dev/regulus-npu")


def test_the_library_opens_the_nodes_of_the_plugin(report):
    (folder,) = find_spec("mbltml").submodule_search_locations
    (library,) = Path(folder).glob("libmbltml.so*")
    data = library.read_bytes()
    source = Path(find_spec(type(plugin).__module__).origin).read_text()
    faults = {}
    for name in NODES:
        faults[name] = [] if name.encode() + b"\0" in data else ["not in the library"]
        faults[name] += [] if name in source else ["not in the plug-in"]
    report("mobilint", "mobilint-ml", "device nodes", faults, cases="names")
