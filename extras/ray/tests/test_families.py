"""Each of Ray's families that run on Linux, through our plug-in: names, switches, masks, quantities, types."""

import os
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
from anyaccel_ray import accelerator_manager
from anyaccel_ray.interface import METHODS
from ray_nodes import forget_masks, needs_ray

FAMILIES = {
    "amd": ("amd_gpu.AMDGPUAcceleratorManager", "MI300X:8"),
    "ascend": ("npu.NPUAcceleratorManager", "910B4:8"),
    "furiosa": ("furiosa.FuriosaAcceleratorManager", "RNGD:8"),
    "gaudi": ("hpu.HPUAcceleratorManager", "Gaudi2:8"),
    "intel": ("intel_gpu.IntelGPUAcceleratorManager", "Max-1550:8"),
    "metax": ("metax_gpu.MetaxGPUAcceleratorManager", "MXC500:8"),
    "mobilint": ("mblt.MBLTAcceleratorManager", "MLA100:8"),
    "neuron": ("neuron.NeuronAcceleratorManager", "trn1:32"),
    "nvidia": ("nvidia_gpu.NvidiaGPUAcceleratorManager", "H100:8"),
    "rebellions": ("rbln.RBLNAcceleratorManager", "RBLN-CA25:8"),
    "tenstorrent": ("ttnpu.TTNPUAcceleratorManager", "n150:8"),
    "tpu": ("tpu.TPUAcceleratorManager", "TPU-V6E:8"),
}
"""Ray's class for each vendor of ours, and a machine of that vendor. Apple's Metal GPUs are not on Linux."""

pytestmark = needs_ray


@pytest.fixture(params=[pytest.param(each, marks=pytest.mark.needs(each)) for each in sorted(FAMILIES)])
def vendor(request, monkeypatch):
    """One vendor after the other, in an environment without masks that is put back."""
    forget_masks(monkeypatch)
    monkeypatch.setenv("ANYACCEL_PLUGINS", request.param)  # no other vendor needs to be asked
    before = dict(os.environ)
    yield request.param
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def pair(vendor):
    """Our class and Ray's, for one vendor."""
    path, machine = FAMILIES[vendor]
    module, _, name = path.partition(".")
    try:
        rays = getattr(import_module(f"ray._private.accelerators.{module}"), name)
    except ImportError:
        pytest.skip(f"needs a Ray that has a family for {vendor} (2.60 has)")
    return accelerator_manager(vendor, f"sim:{machine}"), rays


def test_every_family_of_ray_is_compared():
    from ray._private.accelerators import get_all_accelerator_managers

    ours = {path.partition(".")[2] for path, _ in FAMILIES.values()}
    assert {manager.__name__ for manager in get_all_accelerator_managers()} <= {*ours, "AppleGPUAcceleratorManager"}


def test_it_is_a_class_of_rays(pair):
    ours, rays = pair
    assert set(METHODS) == {name for name in vars(rays.__mro__[1]) if name.startswith(("get_", "set_", "validate_"))}
    assert issubclass(ours, rays.__mro__[1])
    ours()  # no method is left abstract, unlike in most of Ray's


def test_names_are_rays(pair):
    ours, rays = pair
    assert ours.get_resource_name() == rays.get_resource_name()
    assert ours.get_visible_accelerator_ids_env_var() == rays.get_visible_accelerator_ids_env_var()


def test_a_mask_of_rays_is_read_as_ray_reads_it(pair, monkeypatch):
    ours, rays = pair
    monkeypatch.setattr(rays, "get_current_node_num_accelerators", staticmethod(lambda: 8))
    before = dict(os.environ)
    for ids in (None, ["0"], ["0", "1"], ["2", "3"], ["0", "1", "2", "3"]):
        os.environ.clear()
        os.environ.update(before)
        if ids is not None:
            rays.set_current_process_visible_accelerator_ids(ids)
        assert rays.get_current_process_visible_accelerator_ids() == ids
        assert ours.get_current_process_visible_accelerator_ids() == ids


@pytest.mark.parametrize("ids", [["0"], ["1"], ["0", "1", "2", "3"]])
def test_a_mask_is_written_as_ray_writes_it(ids, pair, monkeypatch):
    ours, rays = pair
    monkeypatch.setattr(rays, "get_current_node_num_accelerators", staticmethod(lambda: 8))
    before = dict(os.environ)
    rays.set_current_process_visible_accelerator_ids(ids)
    expected = {name: value for name, value in os.environ.items() if before.get(name) != value}
    os.environ.clear()
    os.environ.update(before)
    ours.set_current_process_visible_accelerator_ids(ids)
    written = {name: value for name, value in os.environ.items() if before.get(name) != value}
    assert {name: written.get(name) for name in expected} == expected
    assert ours.get_current_process_visible_accelerator_ids() == ids


def test_a_user_who_keeps_ray_from_masks_keeps_us_from_them(pair, monkeypatch):
    ours, rays = pair
    module = import_module(rays.__module__)
    [switch] = [value for name, value in vars(module).items() if name.startswith("NOSET_") and name.endswith("ENV_VAR")]
    monkeypatch.setenv(switch, "1")
    ours.set_current_process_visible_accelerator_ids(["1"])
    rays.set_current_process_visible_accelerator_ids(["1"])
    assert ours.get_current_process_visible_accelerator_ids() is None
    assert rays.get_current_process_visible_accelerator_ids() is None


def test_quantities_that_exist_are_judged_as_by_ray(pair):
    ours, rays = pair
    for quantity in (1, 2, 2.0, 4, 8, 0.5, 0.25):
        valid, reason = ours.validate_resource_request_quantity(quantity)
        assert (valid, reason is None) == (rays.validate_resource_request_quantity(quantity)[0], valid), quantity


def library(**members):
    found = ModuleType("library")
    vars(found).update(members)
    return found


def habana():
    hpu = library(get_device_name=lambda: "GAUDI2")
    torch = library(hpu=hpu)
    names = ("habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.hpu")
    return dict(zip(names, (library(torch=torch), torch, hpu), strict=True))


def metax():
    calls = {"mxSmlExDeviceGetCount": lambda: 8, "mxSmlExDeviceGetHandleByIndex": lambda index: index}
    calls |= {"mxSmlExDeviceGetName": lambda handle: b"MXC500", "MXSMLEXError": OSError}
    calls |= dict.fromkeys(("mxSmlExInit", "mxSmlExShutdown"), lambda: None)
    extension = library(**calls)
    return {"pymxsml": library(mxsml_extension=extension), "pymxsml.mxsml_extension": extension}


def furiosa():
    device = SimpleNamespace(device_info=lambda: SimpleNamespace(arch=lambda: "Arch.Rngd"))
    return {"furiosa_smi_py": library(init=lambda: None, list_devices=lambda: [device])}


LIBRARIES = {
    "ascend": lambda: {"acl": library(get_soc_name=lambda: "Ascend910B4")},
    "furiosa": furiosa,
    "gaudi": habana,
    "intel": lambda: {
        "dpctl": library(SyclDevice=lambda name: SimpleNamespace(name="Intel(R) Data Center GPU Max 1550"))
    },
    "metax": metax,
    "rebellions": lambda: {"rebel": library(get_npu_name=lambda: "RBLN-CA25")},
}
"""What the libraries that Ray asks for a type say of the machines above."""


def test_a_type_is_rays(vendor, pair, monkeypatch):
    ours, rays = pair
    for name, module in LIBRARIES.get(vendor, dict)().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v6e-8")
    patched = {
        "amd": ("_get_amd_device_ids", lambda: ["0x74a1"]),
        "gaudi": ("is_initialized", lambda: True),
        "nvidia": (
            "get_current_node_accelerator_type",
            lambda: rays._gpu_name_to_accelerator_type("NVIDIA H100 80GB HBM3"),
        ),
    }
    if vendor in patched:
        name, method = patched[vendor]
        monkeypatch.setattr(rays, name, staticmethod(method))
    if vendor == "mobilint":
        found = SimpleNamespace(glob=lambda pattern: ["/dev/aries0"] if "aries" in pattern else [])
        monkeypatch.setattr(import_module(rays.__module__), "glob", found)
    told = rays.get_current_node_accelerator_type()
    if vendor == "tenstorrent":
        assert told is None  # Ray tells none of this family
        assert ours.get_current_node_accelerator_type()
    else:
        assert ours.get_current_node_accelerator_type() == told
