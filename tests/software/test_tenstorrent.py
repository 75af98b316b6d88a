"""tt-umd lists the chips of a recording, and the chips that a mask leaves, as the plug-in does."""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import anyaccel
import pytest

pytest.importorskip("tt_umd", reason="tox -e real-tenstorrent installs tt-umd")
from anyaccel_tenstorrent import plugin

SHIM = Path(__file__).parent / "tenstorrent_shim.c"
# The chips of each mask, by PCI address; None where tt-umd refuses the mask.
PROGRAM = """
import json, os, sys
from tt_umd import PCIDevice
found = []
for mask in json.loads(sys.argv[1]):
    os.environ.pop("TT_VISIBLE_DEVICES", None)
    if mask is not None:
        os.environ["TT_VISIBLE_DEVICES"] = mask
    try:
        chips = PCIDevice.enumerate_devices_info().values()
        found.append(sorted(f"{c.pci_domain:04x}:{c.pci_bus:02x}:{c.pci_device:02x}.{c.pci_function}" for c in chips))
    except Exception as error:
        found.append(None)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """Build the library that answers for the driver."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is installed here")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SHIM, "-ldl"], check=True)
    return str(library)


def masks(devices):
    """Masks to try: none, valid and wrong ones, the same each time."""
    draw = random.Random(len(devices))
    ids = [device.pci_bus_id for device in devices]
    parts = [id_[5:] for id_ in ids] + [id_[5:8] for id_ in ids]
    entries = [*ids, *parts, *map(str, range(len(ids) + 2)), "nonsense", "", " ", "00:", ids[0].upper(), "-1", "0x1"]
    mixed = [",".join(draw.choices(entries[: len(ids) * 4], k=draw.randint(2, 4))) for _ in range(20)]
    return [None, *dict.fromkeys([*entries, *mixed, f" {ids[0]} , {ids[-1]} "])]


def visible(mask, devices, opened):
    try:
        ids = plugin.anyaccel_visible({} if mask is None else {"TT_VISIBLE_DEVICES": mask}, devices)
    except ValueError:
        return None
    by_id = {device.id: device.pci_bus_id for device in devices}
    return sorted(opened.intersection(by_id.values() if ids is None else map(by_id.get, ids)))


def test_a_mask_leaves_the_chips_that_tt_umd_opens(recordings, ask, shim, report):
    agreeing, machines = {}, set()
    for name, path in recordings("tenstorrent").items():
        found = anyaccel.detect(str(path)).devices
        # tt-umd skips a chip whose node is missing or closed, and counts it when the node is closed.
        devices = [device for device in found if device.nodes and "/dev/" not in device.health_reason]
        if not devices:
            continue
        tried = masks(devices)
        theirs = ask(path, PROGRAM, json.dumps(tried), env={**os.environ, "LD_PRELOAD": shim})
        for mask, chips in zip(tried, theirs, strict=True):
            ours = visible(mask, found, {device.pci_bus_id for device in devices})
            machines.add(name)
            agreeing[f"{name} {mask!r}"] = [] if ours == chips else [ours, chips]
    report(
        "tenstorrent",
        "tt-umd",
        f"chips left by TT_VISIBLE_DEVICES, on {len(machines)} recordings",
        agreeing,
        cases="values",
    )
