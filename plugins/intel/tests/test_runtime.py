"""The compute runtime as a source: dpctl and sycl-ls, recorded and run."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
from anyaccel.plugin import Health, ProbeContext
from anyaccel.probe.host import HostFacts
from anyaccel_intel import runtime

QUERY = "dpctl/level_zero_gpus"


def answer(*gpus: tuple[str, int]) -> dict[str, object]:
    listed = [{"name": name, "memory_bytes": size, "driver_version": "1.6.0"} for name, size in gpus]
    return {QUERY: {"value": listed}}


@pytest.fixture
def dpctl(tmp_path, monkeypatch):
    """A real package dpctl with a single function."""

    def installed(body: str) -> ProbeContext:
        package = tmp_path / "site" / "dpctl"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(body)
        monkeypatch.syspath_prepend(str(package.parent))
        monkeypatch.delitem(sys.modules, "dpctl", raising=False)
        return live(tmp_path)

    yield installed
    sys.modules.pop("dpctl", None)


def live(directory: Path) -> ProbeContext:
    return ProbeContext(HostFacts({"PATH": f"{directory}{os.pathsep}{os.defpath}"}), deadline=float("inf"))


LISTING = """
from types import SimpleNamespace
def get_devices(backend, device_type):
    assert (backend, device_type) == ("level_zero", "gpu")
    return [SimpleNamespace(name="Intel(R) Arc(TM) C770 Graphics", global_mem_size=1 << 34, driver_version="1.6")]
"""


def test_dpctl_is_asked_for_level_zero_gpus(dpctl):
    assert runtime.list_gpus(dpctl(LISTING)) == ("dpctl", ["Intel(R) Arc(TM) C770 Graphics"])


@pytest.mark.parametrize(
    "body", ["raise OSError('libsycl.so.8: cannot open')", "def get_devices(**_): raise RuntimeError"]
)
def test_broken_dpctl_gives_way_to_sycl_ls(body, dpctl, tmp_path):
    path = tmp_path / "sycl-ls"
    path.write_text(
        "#!/bin/sh\necho '[level_zero:gpu][level_zero:0] P, Intel(R) Arc(TM) B580 Graphics 20.1.0 [1.6.3]'\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    assert runtime.list_gpus(dpctl(body)) == ("sycl-ls", ["Intel(R) Arc(TM) B580 Graphics"])


@pytest.mark.parametrize("script", ["kill -BUS $$", "exit 1"])
def test_crash_of_sycl_ls_means_unknown_not_none(script, tmp_path, dpctl):
    path = tmp_path / "sycl-ls"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    assert runtime.list_gpus(dpctl("raise ImportError")) is None


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("two-a770-uhd770", ["Intel(R) Arc(TM) A770 Graphics"] * 2),
        ("panther-lake-b390-7vf", ["Intel(R) Arc(TM) B390 GPU"]),
    ],
)
def test_labels_of_both_styles_count_each_gpu_once(name, gpus, machine):
    assert runtime.list_gpus(machine(name)) == ("sycl-ls", gpus)


def test_every_line_of_sycl_ls_is_understood(machine):
    lines = runtime.parse_sycl_ls(machine("two-a770-uhd770").run(["sycl-ls"]).stdout)
    assert [(backend, kind) for backend, kind, _ in lines] == [
        ("opencl", "acc"),
        ("opencl", "cpu"),
        ("opencl", "gpu"),
        ("opencl", "gpu"),
        ("opencl", "gpu"),
        ("level_zero", "gpu"),
        ("level_zero", "gpu"),
    ]
    assert lines[1][2] == "Intel(R) Core(TM) i7-14700K"


def test_line_of_another_form_is_refused():
    with pytest.raises(ValueError, match="sycl-ls must print"):
        runtime.parse_sycl_ls("[level_zero:gpu] nothing else\n")


def test_dpctl_names_a_product_that_is_newer_than_the_table(devices):
    (only,) = devices("unknown-product-020a", queries=answer(("Intel(R) Arc(TM) C770 Graphics", 1)))
    assert only.model == "Intel(R) Arc(TM) C770 Graphics"
    # The driver's file wins over the runtime's answer.
    assert only.memory_bytes == 8 << 30
    assert only.health is Health.UNKNOWN


def test_dpctl_tells_memory_that_files_do_not(devices):
    path = "/sys/bus/pci/devices/0000:4d:00.0/drm/card0/lmem_total_bytes"
    changes = {path: {"dir": True}}
    assert devices("unknown-product-020a", changes=changes)[0].memory_bytes is None
    told = answer(("Intel(R) Graphics [0x020a]", 7 << 30))
    assert devices("unknown-product-020a", changes=changes, queries=told)[0].memory_bytes == 7 << 30


@pytest.mark.parametrize("gpus", [(), (("Intel(R) Arc(TM) A770 Graphics", 1),)])
def test_dpctl_is_not_believed_where_its_list_is_not_ours(gpus, detected):
    found = detected("unknown-product-020a", queries=answer(*gpus))
    assert found.devices[0].model == "Intel(R) Graphics [0x020a]"
    assert "was not believed" in found.notes[0]


def test_dpctl_is_not_asked_under_a_mask_or_where_nothing_is_missing(detected):
    lie = answer(("Intel(R) Arc(TM) C770 Graphics", 1))
    masked = detected("unknown-product-020a", environ={"ZE_AFFINITY_MASK": "0"}, queries=lie)
    assert masked.devices[0].model == "Intel(R) Graphics [0x020a]"
    assert detected("flex170-b580", queries=lie).notes == ()


def test_missing_dpctl_costs_nothing(detected):
    error = {QUERY: {"error": {"kind": "ModuleNotFoundError", "message": "No module named 'dpctl'"}}}
    assert detected("unknown-product-020a", queries=error).notes == ()
