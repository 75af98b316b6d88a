"""Ray's interface to accelerators on top of plug-ins: beside Ray's own managers, and for a vendor Ray does not know."""

import json
import os
from decimal import Decimal
from pathlib import Path

import pytest
from anyaccel.errors import MachineError, PluginError, UnknownNameError
from anyaccel.vendors.process import vendor_process
from anyaccel_ray import accelerator_manager
from ray_nodes import environment, forget_masks, needs_ray, run_program, short_directory, uses_ray

ROOT = Path(__file__).parents[3]


def test_every_recorded_type_is_the_one_that_ray_tells():
    rays = pytest.importorskip("ray._private.accelerators.nvidia_gpu", reason="needs Ray").NvidiaGPUAcceleratorManager
    pytest.importorskip("anyaccel_nvidia", reason="needs the plug-in anyaccel-nvidia")
    products = vendor_process("nvidia").ask("products")
    names = {product.name: rays._gpu_name_to_accelerator_type(product.model) for product in products}
    # Where one of Ray's strings means cards of different kinds, or cannot be a label, ours says more.
    assert {name: ray for name, ray in names.items() if name != ray and not name.startswith(ray or "")} == {}


@needs_ray
@pytest.mark.parametrize("recording", ["v6e-16-gke-worker-0", "tpu7x-16-gke-worker-1", "v5litepod-8", "v4-8-gvisor"])
def test_a_host_of_a_slice_has_rays_resources_and_labels(recording, tmp_path, monkeypatch):
    pytest.importorskip("anyaccel_tpu", reason="needs the plug-in anyaccel-tpu")
    from ray._private.accelerators.tpu import TPUAcceleratorManager

    forget_masks(monkeypatch)
    facts = json.loads((ROOT / "plugins" / "tpu" / "recordings" / recording / "machine.json").read_text())
    facts["environ"]["TPU_NAME"] = "slice-7"
    (tmp_path / "machine.json").write_text(json.dumps(facts))
    ours = accelerator_manager("tpu", str(tmp_path))
    found = (
        ours.get_current_node_accelerator_type(),
        ours.get_current_node_additional_resources(),
        ours.get_current_node_accelerator_labels(),
    )
    for name, value in facts["environ"].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        TPUAcceleratorManager, "get_current_node_num_accelerators", staticmethod(ours.get_current_node_num_accelerators)
    )
    assert found == (
        TPUAcceleratorManager.get_current_node_accelerator_type(),
        TPUAcceleratorManager.get_current_node_additional_resources(),
        TPUAcceleratorManager.get_current_node_accelerator_labels(),
    )


@needs_ray
def test_instance_types_are_rays():
    pytest.importorskip("anyaccel_neuron", reason="needs the plug-in anyaccel-neuron")
    from ray._private.accelerators.neuron import AWS_NEURON_INSTANCE_MAP, NeuronAcceleratorManager

    ours = accelerator_manager("neuron")
    for name, count in AWS_NEURON_INSTANCE_MAP.items():
        if (found := ours.get_ec2_instance_num_accelerators(name, {})) is not None:
            assert (found, ours.get_ec2_instance_accelerator_type(name, {})) == (
                count,
                NeuronAcceleratorManager.get_ec2_instance_accelerator_type(name, {}),
            )
    assert ours.get_ec2_instance_num_accelerators("m5.large", {}) is None


class TestAVendorThatRayDoesNotKnow:
    @pytest.fixture
    def manager(self, acme, record):
        return accelerator_manager("acme", record({}, {}, {"health": "unhealthy", "reason": "it is lost."}, {}))

    def test_the_node(self, manager):
        assert manager.get_resource_name() == "APU"
        assert manager.get_visible_accelerator_ids_env_var() == "ACME_VISIBLE"
        assert manager.get_current_node_num_accelerators() == 4
        assert manager.get_current_node_accelerator_type() == "Acme-One"
        assert manager.get_current_node_additional_resources() is None
        assert manager.get_current_node_accelerator_labels() is None
        assert manager.get_ec2_instance_num_accelerators("m5.large", {}) is None

    def test_a_broken_device_is_not_among_the_visible_ones_and_the_others_keep_their_numbers(self, manager):
        assert manager.get_current_process_visible_accelerator_ids() == ["0", "1", "3"]

    @pytest.mark.parametrize(
        ("mask", "ids"), [("3,0", ["3", "0"]), ("acme-s1,0", ["acme-s1", "0"]), ("", []), ("nonsense", []), ("9", [])]
    )
    def test_masks(self, mask, ids, manager, monkeypatch):
        monkeypatch.setenv("ACME_VISIBLE", mask)
        assert manager.get_current_process_visible_accelerator_ids() == ids

    def test_whatever_is_read_can_be_written(self, manager, monkeypatch):
        monkeypatch.setenv("ACME_ORDER", "stale")
        monkeypatch.setenv("ACME_VISIBLE", "0")  # so that it is as it was in the end
        for ids, mask in ((["3", "1"], "3,1"), (["acme-s0", "1"], "acme-s0,acme-s1"), ([1], "1"), ([], "")):
            manager.set_current_process_visible_accelerator_ids(ids)
            assert os.environ["ACME_VISIBLE"] == mask
            assert "ACME_ORDER" not in os.environ

    def test_what_cannot_be_is_not_written(self, manager):
        with pytest.raises(UnknownNameError, match="acme has no device 7 on this node; there are 0, 1, 2, 3"):
            manager.set_current_process_visible_accelerator_ids(["0", "7"])
        with pytest.raises(ValueError, match="never 3"):
            manager.set_current_process_visible_accelerator_ids(["0", "1", "2"])
        assert "ACME_VISIBLE" not in os.environ

    @pytest.mark.parametrize(
        ("quantity", "reason"),
        [
            (0, None),
            (1, None),
            (Decimal("0.5"), None),
            (0.0001, None),
            (2.0, None),
            (3, "an Acme bus connects 1, 2 or 4 devices, never 3"),
            (1.5, "a quantity of APU above 1 must be a whole number (got 1.5)"),
            (-1, "a quantity of APU must be 0 or more (got -1)"),
            (float("nan"), "a quantity of APU must be 0 or more (got nan)"),
            (float("inf"), "a quantity of APU must be 0 or more (got inf)"),
        ],
    )
    def test_quantities_are_judged_by_the_hardware_wherever_it_is(self, quantity, reason, acme):
        here = accelerator_manager("acme", "sim:A1:1")
        assert here.validate_resource_request_quantity(quantity) == (reason is None, reason)

    def test_devices_of_several_types_have_none_in_common(self, acme):
        assert accelerator_manager("acme", "sim:A1:2,Acme-Whole:1").get_current_node_accelerator_type() is None

    def test_a_plugin_that_fails_costs_its_devices_and_says_so(self, install, caplog):
        source = (ROOT / "tests" / "vendors" / "acme.py").read_text()
        install("acme", source.replace("def anyaccel_detect(", "def anyaccel_detect(ctx):\n    1 / 0\ndef unused("))
        manager = accelerator_manager("acme", "host")
        assert manager.get_current_node_num_accelerators() == 0
        assert "its devices are not counted" in caplog.text

    def test_names_that_do_not_exist(self, acme):
        with pytest.raises(PluginError, match="no plug-in of that name"):
            accelerator_manager("zeta")
        with pytest.raises(MachineError, match="there is no machine"):
            accelerator_manager("acme", "elsewhere")


REGISTER = """
import importlib.util

if importlib.util.find_spec("ray"):
    import ray
    import ray._private.accelerators as rays
    from anyaccel_ray.interface import accelerator_manager

    found, ours = rays.get_all_accelerator_managers(), accelerator_manager("acme")
    rays.get_all_accelerator_managers = lambda: {*found, ours}
    # 'import ray' has looked already.
    del rays.get_accelerator_manager_for_resource._resource_name_to_accelerator_manager
    worker = ray._private.worker.global_worker
    worker.original_visible_accelerator_ids = ray._private.utils.get_visible_accelerator_ids()
"""
PROGRAM = """
import json, os, ray
ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", _temp_dir=os.environ["RAY_FILES"])

@ray.remote(resources={"APU": 2})
def see():
    return ray.get_runtime_context().get_accelerator_ids()["APU"], os.environ["ACME_VISIBLE"]

node = ray.nodes()[0]
print(json.dumps([node["Resources"]["APU"], node["Resources"]["accelerator_type:Acme-One"],
    node["Labels"]["ray.io/accelerator-type"], ray.get(see.remote(), timeout=150)]))
ray.shutdown()
"""


@uses_ray
def test_ray_runs_on_it_once_it_is_registered(acme, record, tmp_path):
    """Detection, resources, types, ids and masks, all by Ray itself, for a vendor of which it has never heard."""
    (acme.parent / "sitecustomize.py").write_text(REGISTER)
    machine = {"ANYACCEL_MACHINE": record({}, {}, {}, {}), "ACME_VISIBLE": "3,1"}
    with short_directory() as files:
        environ = environment(**machine, RAY_custom_unit_instance_resources="APU", RAY_FILES=files)
        printed = run_program(PROGRAM, environ=environ, log=tmp_path / "log")
    count, of_type, label, (ids, mask) = json.loads(printed.splitlines()[-1])
    assert (count, of_type, label) == (2, 1, "Acme-One")
    assert sorted(ids) == ["1", "3"]
    assert sorted(mask.split(",")) == ["1", "3"]
