"""Several vendors on one machine: one request, everyone's variables, the rest hidden. Needs the vendors' plug-ins."""

import json
import random
from importlib.metadata import entry_points

import anyaccel as aa
import pytest
from lengths import length

MIXED = "sim:H100:4,TPU-V4:4"
ALL = {
    "nvidia": "H100:4",
    "amd": "AMD-Instinct-MI300X-OAM:4",
    "intel": "Intel-GPU-Max-1550:4",
    "neuron": "aws-neuron-core:4",
    "tpu": "TPU-V4:4",
    "gaudi": "Intel-GAUDI2:4",
    "ascend": "Ascend910B4:4",
    "hygon": "K100_AI:4",
    "iluvatar": "BI-V150:4",
    "metax": "MXC500:4",
    "moorethreads": "MTT-S4000:4",
    "cambricon": "MLU590:4",
    "enflame": "Enflame-S60:4",
    "furiosa": "RNGD:4",
    "kunlunxin": "P800:4",
    "mobilint": "MLA100:4",
    "qualcomm": "AIC100:4",
    "rebellions": "RBLN-CA25:4",
    "tenstorrent": "n150:4",
}


def environment(request, machine, **options):
    return aa.prepare(request, machine=machine, environ={}, **options).environment


def test_one_request_gets_both_vendors_variables():
    made = environment(["GPU:1", "TPU:4"], MIXED)
    gpu, *chips = made.allocation.devices
    assert (gpu.vendor, [chip.vendor for chip in chips]) == ("nvidia", ["tpu"] * 4)
    assert made.set["CUDA_VISIBLE_DEVICES"] == gpu.id
    assert made.set["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "TPU_VISIBLE_CHIPS" not in made.values  # all chips of a host: the runtime wants no mask


def test_the_other_vendor_is_hidden():
    assert environment("GPU:1", MIXED).set["TPU_VISIBLE_CHIPS"] == ""
    assert environment("TPU:1", MIXED).set["CUDA_VISIBLE_DEVICES"] == ""


def test_masks_hold_indexes_with_the_order_beside_them():
    made = environment("GPU:2", MIXED, mask="index")
    assert (made.set["CUDA_VISIBLE_DEVICES"], made.set["CUDA_DEVICE_ORDER"]) == ("0,1", "PCI_BUS_ID")


@pytest.mark.parametrize(
    ("mask", "status", "chosen", "warning"),
    [
        ("3,1", 0, "3\n1\n", ""),
        ("0,1,", 0, "0\n1\n", "CUDA_VISIBLE_DEVICES='0,1,' leaves 2 of its 3 entries visible"),
        ("0,0", 3, "", "CUDA_VISIBLE_DEVICES='0,0' names a GPU twice, which hides every GPU."),
    ],
)
def test_a_mask_of_our_own_is_respected(mask, status, chosen, warning, anyaccel):
    done = anyaccel(
        "--machine", "sim:H100:4", "select", "GPU:2", "--format", "index", env={"CUDA_VISIBLE_DEVICES": mask}
    )
    assert (done.returncode, done.stdout) == (status, chosen)
    assert warning in done.stderr


def test_all_share_a_machine():
    inventory = aa.detect("sim:" + ",".join(ALL.values()))
    assert {report.vendor: report.state.value for report in inventory.vendors} == dict.fromkeys(sorted(ALL), "ok")
    assert {vendor: len(inventory.of_vendor(vendor)) for vendor in ALL} == dict.fromkeys(ALL, 4)


@pytest.mark.timeout(300)  # it begins before others
def test_any_disjoint_allocations_agree_on_their_variables():
    """Whatever combination one worker may have, no two vendors disagree about a variable."""
    inventory = aa.detect("sim:" + ",".join(ALL.values()))
    chance = random.Random(7)
    for _ in range(length(8, 40)):
        vendors = chance.sample(sorted(ALL), chance.randint(1, 8))
        request = [f"{vendor}:{chance.choice((1, 2, 4))}" for vendor in vendors]
        if any(rival in vendors for vendor in vendors for rival in inventory.excluded_vendors(vendor)):
            with pytest.raises(aa.NeverFitsError, match="both obey the variable"):
                aa.prepare(request, inventory=inventory, environ={})
            continue
        made = aa.prepare(request, inventory=inventory, environ={}).environment
        assert {device.vendor for device in made.allocation.devices} == set(vendors)


@pytest.mark.parametrize("broken", sorted(ALL)[:: length(6, 1)])
def test_one_vendor_that_fails_costs_the_others_nothing(broken, install, monkeypatch):
    install(broken, "import ctypes; ctypes.string_at(0)", distribution=f"broken-{broken}")
    points = entry_points(group="anyaccel")
    others = ",".join(f"{vendor}={points[vendor].value}" for vendor in ALL if vendor != broken)
    monkeypatch.setenv("ANYACCEL_PLUGINS", f"{others},{broken}=plug_broken_{broken}")
    inventory = aa.detect("sim:" + ",".join(product for vendor, product in ALL.items() if vendor != broken))
    states = {report.vendor: report.state.value for report in inventory.vendors}
    assert states == {vendor: "failed" if vendor == broken else "ok" for vendor in ALL}


def test_a_crashing_third_party_is_listed_beside_real_devices(install, monkeypatch, anyaccel):
    install("acme", "import os; os._exit(3)", distribution="acme-accelerator", version="0.3")
    monkeypatch.delenv("ANYACCEL_PLUGINS")
    done = anyaccel("--json", "--machine", "sim:H100:2")
    found = json.loads(done.stdout)
    assert [device["vendor"] for device in found["devices"]] == ["nvidia", "nvidia"]
    acme = next(vendor for vendor in found["vendors"] if vendor["vendor"] == "acme")
    assert (acme["state"], acme["distribution"]) == ("failed", "acme-accelerator")
    assert acme["reason"] == "its process ended with exit status 3 before it answered."


@pytest.mark.parametrize(
    ("vendor", "variable", "value", "indexes"),
    [
        ("nvidia", "CUDA_VISIBLE_DEVICES", "2,0", [2, 0]),
        ("amd", "HIP_VISIBLE_DEVICES", "2,0", [2, 0]),
        ("amd", "ROCR_VISIBLE_DEVICES", "2,0", [2, 0]),
        ("intel", "ZE_AFFINITY_MASK", "2,0", [0, 2]),  # Level Zero never reorders
        ("neuron", "NEURON_RT_VISIBLE_CORES", "2,0", []),  # the runtime refuses what is not an increasing run
        ("tpu", "TPU_VISIBLE_CHIPS", "2,0", [0, 2]),
        ("gaudi", "HABANA_VISIBLE_MODULES", "2,0", [2, 0]),
        ("ascend", "ASCEND_RT_VISIBLE_DEVICES", "2,0", []),  # ids that do not ascend show no device
        ("hygon", "HIP_VISIBLE_DEVICES", "2,0", [0, 2]),  # these four are written, and read, in ascending order
        ("iluvatar", "CUDA_VISIBLE_DEVICES", "2,0", [0, 2]),
        ("metax", "CUDA_VISIBLE_DEVICES", "2,0", [0, 2]),
        ("metax", "MACA_VISIBLE_DEVICES", "2,0", [0, 2]),
        ("moorethreads", "MUSA_VISIBLE_DEVICES", "2,0", [0, 2]),
        ("hygon", "HIP_VISIBLE_DEVICES", "0,0", []),  # what their runtimes make of others is unknown
        ("iluvatar", "CUDA_VISIBLE_DEVICES", "0,9", []),
        ("metax", "CUDA_VISIBLE_DEVICES", "0,0", []),
        ("moorethreads", "MUSA_VISIBLE_DEVICES", "9", []),
        ("hygon", "HIP_VISIBLE_DEVICES", "", []),
        ("iluvatar", "CUDA_VISIBLE_DEVICES", "", []),
        ("metax", "CUDA_VISIBLE_DEVICES", "", []),
        ("moorethreads", "MUSA_VISIBLE_DEVICES", "", []),
        ("nvidia", "CUDA_VISIBLE_DEVICES", "", []),
        ("amd", "HIP_VISIBLE_DEVICES", "", [0, 1, 2, 3]),  # HIP takes the empty value for none given
        ("amd", "ROCR_VISIBLE_DEVICES", "", []),
        ("intel", "ZE_AFFINITY_MASK", "", [0, 1, 2, 3]),  # so does Level Zero
        ("neuron", "NEURON_RT_VISIBLE_CORES", "", []),
        ("tpu", "TPU_VISIBLE_CHIPS", "", []),
        ("gaudi", "HABANA_VISIBLE_MODULES", "", []),
        ("ascend", "ASCEND_RT_VISIBLE_DEVICES", "", []),
    ],
)
def test_each_vendors_own_mask_means_what_its_runtime_makes_of_it(vendor, variable, value, indexes, monkeypatch):
    monkeypatch.setenv("ANYACCEL_PLUGINS", vendor)
    monkeypatch.setenv(variable, value)
    inventory = aa.detect(f"sim:{ALL[vendor]}")
    visible = [device for device in inventory.devices if device.visible]
    assert [device.index for device in visible] == indexes
    if visible:
        allocation = aa.prepare(f"{vendor}:1", inventory=inventory).environment.allocation
        assert allocation.devices[0] in visible
    else:
        with pytest.raises(aa.NeverFitsError):
            aa.prepare(f"{vendor}:1", inventory=inventory)
