"""AMD's ROCm SMI of Debian finds the GPUs of a recording as the plug-in does: addresses, ids, memory, NUMA, XGMI."""

import json
import os
import re
import sys
from itertools import combinations
from pathlib import Path

import anyaccel
import pytest

if "ANYACCEL_TEST_ROCM" not in os.environ:
    pytest.skip("tox -e real-rocm fetches Debian's rocm-smi", allow_module_level=True)

# Read once: tests run without variables of ours.
TOOL = Path(os.environ["ANYACCEL_TEST_ROCM"]) / "root" / "usr" / "libexec" / "rocm_smi" / "rocm_smi.py"
RELEASE = "5.2.3-2"
OPTIONS = ("--showbus", "--showuniqueid", "--showmeminfo", "vram", "--showtopotype", "--showtoponuma", "--json")
NODES = "/sys/class/kfd/kfd/topology/nodes"
PROPERTIES = {"hive_id": 0, "domain": 0, "array_count": 1, "simd_arrays_per_engine": 1, "cu_per_simd_array": 1}
"""What the tool demands of each node, and old kernels or short recordings do not have."""


def with_display_nodes(recording, directory):
    """Write a recording with the DRM directories that the tool begins with, made from facts that KFD tells.

    A card is ``/sys/class/drm/cardN``, a link below its PCI device. Returns the new recording, or None without a GPU.
    """
    machine = json.loads((recording / "machine.json").read_text())
    paths = machine["paths"]
    cards = []
    for name, entry in list(paths.items()):
        node = re.fullmatch(rf"{NODES}/(\d+)/properties", name)
        if not node or "text" not in entry:
            continue
        facts = dict(line.split(None, 1) for line in entry["text"].splitlines() if " " in line)
        for links in ("io_links", "p2p_links"):
            paths.setdefault(f"{NODES}/{node[1]}/{links}/.directory", {"text": ""})
        if int(facts.get("simd_count", 0)):
            absent = "".join(f"{key} {value}\n" for key, value in PROPERTIES.items() if key not in facts)
            paths[name] = {"text": entry["text"] + absent}
            cards.append((int(facts["drm_render_minor"]), int(node[1]), facts))
        else:
            paths[f"{NODES}/{node[1]}/gpu_id"] = {"text": "0\n"}
    for number, (_, node, facts) in enumerate(sorted(cards, key=lambda card: card[:2])):
        domain, place = int(facts.get("domain", 0)), int(facts["location_id"])
        address = f"{domain:04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"
        home, listed = f"/sys/devices/pci{domain:04x}:00/{address}", f"/sys/bus/pci/devices/{address}/"
        paths |= {home + "/" + name[len(listed) :]: entry for name, entry in paths.items() if name.startswith(listed)}
        paths[f"{home}/vbios_version"] = {"text": "none\n"}  # by which the tool knows a card of AMD's driver
        if int(facts.get("unique_id", 0)):
            paths[f"{home}/unique_id"] = {"text": f"{int(facts['unique_id']):016x}\n"}
        paths[f"{home}/drm/card{number}/device"] = {"link": f"../../../{address}"}
        paths[f"/sys/class/drm/card{number}"] = {"link": f"../../{home.removeprefix('/sys/')}/drm/card{number}"}
        paths.setdefault(f"{NODES}/{node}/gpu_id", {"text": f"{node + 1}\n"})
    paths["/sys/class/hwmon/.directory"] = {"text": ""}
    (directory / "machine.json").write_text(json.dumps(machine))
    return directory if cards else None


def ours(devices):
    """Return what the plug-in says of each GPU, by PCI address, and the pairs that XGMI joins."""
    facts = {
        device.pci_bus_id: {
            "memory": device.memory_bytes,
            "numa": device.numa_node,
            "unique": device.attributes.get("unique_id"),
        }
        for device in devices
    }
    return facts, {
        frozenset((one.pci_bus_id, other.pci_bus_id))
        for one, other in combinations(devices, 2)
        if other.id in one.links
    }


def theirs(answer):
    """Return the same from the tool's JSON, in which what it cannot tell is absent, ``N/A`` or the unsigned -1."""
    system = answer.pop("system", {})
    address = {name: card["PCI Bus"].lower() for name, card in answer.items()}
    facts = {}
    for name, card in answer.items():
        memory, unique = card.get("VRAM Total Memory (B)"), card.get("Unique ID", "N/A")
        numa = int(card.get("(Topology) Numa Affinity", -1))
        facts[address[name]] = {
            "memory": int(memory) if memory else None,
            "numa": numa if 0 <= numa < 2**31 else None,
            "unique": None if unique == "N/A" else unique.removeprefix("0x").rjust(16, "0"),
        }
    joined = {
        frozenset(address[f"card{number}"] for number in re.findall(r"\d+", pair))
        for pair, link in system.items()
        if link == "XGMI"
    }
    return facts, joined


def test_rocm_smi_finds_what_the_plugin_finds(recordings, accel_testbed, tmp_path, report):
    agreeing = {}
    for name, path in recordings("amd").items():
        # A card that has left the bus has no address. This release knows no partitions: the first stands for the card.
        listed = anyaccel.detect(str(path)).of_vendor("amd")
        devices = [device for device in listed if "kfd_node" in device.attributes and device.pci_bus_id]
        if not devices or len({device.pci_bus_id for device in devices}) < len(devices):
            continue
        (tmp_path / name).mkdir()
        machine = with_display_nodes(path, tmp_path / name)
        done = accel_testbed(machine, sys.executable, "-W", "ignore", str(TOOL), *OPTIONS)
        wanted, found = ours(devices), theirs(json.loads(done.stdout.splitlines()[-1]))
        # What a recording does not have, the plug-in may know of the product.
        agreeing[name] = [
            [address, key, fact, found[0].get(address, {}).get(key)]
            for address, facts in wanted[0].items()
            for key, fact in facts.items()
            if address not in found[0] or found[0][address][key] not in (None, fact)
        ]
        agreeing[name] += [] if wanted[0].keys() == found[0].keys() else [[*wanted[0]], [*found[0]]]
        agreeing[name] += [["XGMI", *pair] for pair in wanted[1] ^ found[1]]
    report("amd", "rocm-smi", "GPUs, addresses, ids, memory, NUMA nodes, XGMI", agreeing, RELEASE)
