"""The amdsmi library: stand-ins are real packages over real shared libraries, in real processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from anyaccel.plugin import Detected, ProbeContext, QueryError, Severity
from anyaccel.probe.host import HostFacts
from anyaccel.probe.recording import RecordedFacts, Recorder
from anyaccel_amd import plugin, smi

PACKAGE = '''
"""A stand-in with the relevant behavior of amdsmi 7.0.2."""
import ctypes, enum, os
try:
    _library = ctypes.CDLL(os.path.join(os.environ["ROCM_PATH"], "lib", "libamd_smi.so"))
    _libraries = {"libamd_smi.so": _library}
except OSError as error:
    print(error)
    print("Unable to find libamd_smi.so library try installing amd-smi-lib from your package manager")
    _libraries = {}
_init = _libraries["libamd_smi.so"].amdsmi_init
_chatter = _libraries["libamd_smi.so"].amdsmi_chatter

class AmdSmiInitFlags(enum.IntEnum):
    INIT_AMD_GPUS = 2

class AmdSmiTemperatureType(enum.IntEnum):
    EDGE = 0
    JUNCTION = 1

class AmdSmiTemperatureMetric(enum.IntEnum):
    CURRENT = 0

class AmdSmiLibraryException(Exception):
    def __init__(self, err_code):
        self.err_code = err_code
        super().__init__(f"Error code: {err_code}")

class AmdSmiRetryException(AmdSmiLibraryException):
    pass

def amdsmi_init(flag):
    status = _init(flag)
    if status:
        raise AmdSmiLibraryException(status)

def amdsmi_shut_down():
    pass

def amdsmi_get_processor_handles():
    return [0, 1]

def amdsmi_get_gpu_device_bdf(handle):
    return ["0000:05:00.0", "0000:27:00.0"][handle]

def amdsmi_get_gpu_asic_info(handle):
    _chatter()
    return {"market_name": ["AMD Instinct MI399X", "N/A"][handle]}

def amdsmi_get_gpu_vram_usage(handle):
    return {"vram_total": 196592, "vram_used": 283}

def amdsmi_get_gpu_bad_page_info(handle):
    return [{}] * [0, 300][handle]

def amdsmi_get_gpu_bad_page_threshold(handle):
    return 256

tries = []

def amdsmi_get_temp_metric(handle, sensor, metric):
    tries.append(handle)
    if len(tries) == 1:
        raise AmdSmiRetryException(9)
    if sensor == AmdSmiTemperatureType.JUNCTION and handle == 1:
        raise AmdSmiLibraryException(2)
    return 45

def amdsmi_get_power_info(handle):
    return {"current_socket_power": "N/A", "average_socket_power": 138}

def amdsmi_get_gpu_kfd_info(handle):
    return {"current_partition_id": 0xFFFFFFFF}

def amdsmi_get_gpu_activity(handle):
    return {"gfx_activity": [7, 0xFFFF][handle]}
'''

LIBRARY = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int amdsmi_chatter(void) { puts("a line from C"); fflush(stdout); return 0; }
int amdsmi_init(unsigned long flags) {
    const char *how = getenv("STANDIN") ? getenv("STANDIN") : "";
    if (*how == 'c') abort();
    if (*how == 's') *(volatile int *)0 = 1;
    if (*how == 'e') exit(3);
    if (*how == 'q') _exit(0);
    if (*how == 'h') { pause(); }
    return *how == 'f' ? 34 : 0;
}
"""


def compiled(source: Path, code: str) -> None:
    source.with_suffix(".c").write_text(code)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", source, source.with_suffix(".c")], check=True)


@pytest.fixture(scope="session")
def package(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("standin")
    (root / "amdsmi").mkdir()
    (root / "amdsmi" / "__init__.py").write_text(PACKAGE)
    (root / "rocm" / "lib").mkdir(parents=True)
    compiled(root / "rocm" / "lib" / "libamd_smi.so", LIBRARY)
    return root


@pytest.fixture
def library(package, monkeypatch):
    """Install the stand-in with a behavior."""

    def install(how: str = "", rocm: Path | None = None) -> None:
        monkeypatch.setenv("PYTHONPATH", str(package))
        monkeypatch.syspath_prepend(str(package))
        monkeypatch.setenv("ROCM_PATH", str(rocm or package / "rocm"))
        monkeypatch.setenv("STANDIN", how)

    return install


LONG = 200.0
"""Seconds beyond any answer, on any machine: half of them are for the library."""


def ask(question: str, seconds: float = LONG):
    return smi.ask(ProbeContext(HostFacts(os.environ), time.monotonic() + seconds), question)


class Unnamed(RecordedFacts):
    """A recorded machine with the library of this machine."""

    def query(self, name, fn):
        return HostFacts(os.environ).query(name, fn)

    def run(self, argv, timeout):
        return HostFacts(os.environ).run(argv, timeout)


def machine(recording, seconds: float = LONG) -> ProbeContext:
    return ProbeContext(Unnamed(recording), time.monotonic() + seconds)


def detect(ctx: ProbeContext) -> Detected:
    found = plugin.anyaccel_detect(ctx)
    assert found is not None
    return found


def test_names_come_through_whatever_the_library_prints(library):
    library()
    assert ask("names") == [
        {"bdf": "0000:05:00.0", "market_name": "AMD Instinct MI399X"},
        {"bdf": "0000:27:00.0", "market_name": None},
    ]


def test_metrics_that_a_chip_lacks_are_none(library):
    library()
    first, second = ask("metrics")
    assert first == {
        "bdf": "0000:05:00.0",
        "partition": None,
        "memory_used_bytes": 283 << 20,
        "busy_percent": 7,
        "temperature_celsius": 45,
        "power_watts": 138,
        "bad_pages": 0,
        "bad_page_threshold": 256,
    }
    assert (second["busy_percent"], second["temperature_celsius"], second["bad_pages"]) == (None, 45, 300)


def test_the_wheel_without_rocm_is_an_error_and_not_a_crash(library, tmp_path, capfd):
    library(rocm=tmp_path)
    with pytest.raises(QueryError, match=r"libamd_smi\.so") as error:
        ask("names")
    assert error.value.kind == "KeyError"
    assert capfd.readouterr().out == ""


def test_a_library_that_is_no_library_is_the_same_error(library, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libamd_smi.so").write_text("not a library")
    library(rocm=tmp_path)
    with pytest.raises(QueryError) as error:
        ask("names")
    assert error.value.kind == "KeyError"


def test_a_library_older_than_the_package_is_told_by_its_symbol(library, tmp_path):
    (tmp_path / "lib").mkdir()
    compiled(tmp_path / "lib" / "libamd_smi.so", "int amdsmi_init(unsigned long flags) { return 0; }")
    library(rocm=tmp_path)
    with pytest.raises(QueryError, match=r"undefined symbol: amdsmi_chatter") as error:
        ask("names")
    assert error.value.kind == "AttributeError"


def test_an_error_of_the_library_keeps_its_name_and_code(library):
    library("fail")
    with pytest.raises(QueryError, match="Error code: 34") as error:
        ask("names")
    assert (error.value.kind, error.value.value) == ("AmdSmiLibraryException", 34)


@pytest.mark.parametrize(
    ("how", "words"),
    [("segfault", "signal 11"), ("crash", "signal 6"), ("exit", "status 3"), ("quit", "status 0")],
)
def test_a_library_that_ends_its_process_ends_only_its_own(library, how, words):
    library(how)
    with pytest.raises(QueryError, match=f"amdsmi ended its process with {words}") as error:
        ask("names")
    assert error.value.kind == "SmiDiedError"


def test_a_library_that_hangs_is_killed_and_the_mutex_is_named(library):
    library("hang")
    with pytest.raises(QueryError, match=r"did not answer within .* s; .* /dev/shm/rocm_smi\*") as error:
        ask("names", seconds=0.6)
    assert error.value.kind == "SmiTimeoutError"


def test_without_the_package_nothing_is_started(monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    with pytest.raises(QueryError) as error:
        ask("names")
    assert error.value.kind == "ModuleNotFoundError"


@pytest.mark.parametrize("how", ["segfault", "exit", "hang", "fail"])
def test_devices_are_found_whatever_the_library_does(library, recorded, how):
    library(how)
    ctx = machine(recorded("unknown-chip-named-by-amdsmi"), seconds=1.0)
    found = detect(ctx)
    assert [(device.id, device.model) for device in found.devices] == [("amd-0000:05:00.0", "AMD GPU 0x74ff")]
    assert "amdsmi could not name" in found.notes[0]


def test_an_unknown_chip_is_named_by_the_library_and_replays_so(library, recorded):
    library()
    recorder = Recorder(Unnamed(recorded("unknown-chip-amdsmi-without-rocm")))
    found = detect(ProbeContext(recorder, time.monotonic() + LONG))
    assert found.devices[0].model == "AMD Instinct MI399X"
    replayed = ProbeContext(RecordedFacts(recorder.recording()), time.monotonic() + LONG)
    assert detect(replayed) == found


def test_a_known_chip_is_never_asked_about(library, recorded):
    library("hang")
    ctx = machine(recorded("mi300x-8gpu"))
    begin = time.monotonic()
    assert len(detect(ctx).devices) == 8
    assert time.monotonic() - begin < LONG / 2, "the library hangs until then"


def test_a_card_with_more_retired_pages_than_allowed_is_unhealthy(library, recorded):
    library()
    pages = {"/sys/bus/pci/devices/0000:27:00.0/ras/gpu_vram_bad_pages": "0x00000001 : 0x00001000 : R\n"}
    ctx = machine(recorded("mi300x-8gpu", pages))
    devices = detect(ctx).devices
    stats = plugin.anyaccel_stats(devices, ctx)
    assert stats["amd-0000:05:00.0"].health_reason == ""
    worn = stats["amd-0000:27:00.0"]
    assert (worn.health_reason, worn.health_remedy) == (
        "300 pages of its memory are retired and AMD's limit is 256",
        "have the card replaced",
    )


def test_doctor_warns_of_the_wheel_without_rocm(library, tmp_path, recorded):
    library(rocm=tmp_path)
    (finding,) = plugin.anyaccel_diagnose(machine(recorded("mi300x-8gpu")))
    assert finding.severity is Severity.WARN
    assert "cannot load ROCm's libamd_smi.so (KeyError" in finding.reason
    assert "pip uninstall amdsmi" in finding.remedy


def test_no_module_of_the_plugin_imports_the_library(tmp_path):
    (tmp_path / "amdsmi.py").write_text("raise SystemExit('amdsmi was imported')")
    modules = [path.stem for path in Path(smi.__file__).parent.glob("*.py")]
    code = "import sys\n" + "".join(f"import anyaccel_amd.{name}\n" for name in modules if name != "__init__")
    code += "assert 'amdsmi' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})


def real_package() -> Path | None:
    found = importlib.util.find_spec("amdsmi")
    return Path(found.origin).parent if found and found.origin else None


REAL = real_package()

# Fields of the structs as amdsmi 7.0.2 lays them out; every other function answers NOT_SUPPORTED.
REAL_LIBRARY = """
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef void *handle;
int amdsmi_init(uint64_t flags) { return 0; }
int amdsmi_shut_down(void) { return 0; }
int amdsmi_get_socket_handles(uint32_t *n, handle *s) { *n = 1; if (s) s[0] = (handle)1; return 0; }
int amdsmi_get_processor_handles(handle s, uint32_t *n, handle *p) { *n = 1; if (p) p[0] = (handle)2; return 0; }
int amdsmi_get_gpu_device_bdf(handle p, uint64_t *bdf) { *bdf = 0x0500; return 0; }
int amdsmi_get_gpu_asic_info(handle p, char *info) { strcpy(info, "AMD Instinct MI300X"); return 0; }
int amdsmi_get_gpu_vram_usage(handle p, uint32_t *u) { u[0] = 196592; u[1] = 283; return 0; }
int amdsmi_get_gpu_activity(handle p, uint32_t *a) { a[0] = 42; a[1] = a[2] = 0xFFFF; return 0; }
int amdsmi_get_temp_metric(handle p, int sensor, int metric, int64_t *t) { *t = 45; return sensor == 0 ? 2 : 0; }
"""


@pytest.mark.skipif(REAL is None, reason="the package amdsmi is not installed (extra 'amdsmi')")
def test_the_real_package_over_a_made_up_library(tmp_path, monkeypatch):
    assert REAL is not None
    names = set(re.findall(r"libamd_smi\.so'\]\.(\w+)", (REAL / "amdsmi_wrapper.py").read_text()))
    written = set(re.findall(r"^int (\w+)", REAL_LIBRARY, re.MULTILINE))
    others = "".join(f"int {name}(void) {{ return 2; }}\n" for name in sorted(names - written))
    (tmp_path / "lib").mkdir()
    compiled(tmp_path / "lib" / "libamd_smi.so", REAL_LIBRARY + others)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    assert ask("names") == [{"bdf": "0000:05:00.0", "market_name": "AMD Instinct MI300X"}]
    (facts,) = ask("metrics")
    assert {name: value for name, value in facts.items() if value is not None} == {
        "bdf": "0000:05:00.0",
        "memory_used_bytes": 283 << 20,
        "busy_percent": 42,
        "temperature_celsius": 45,
    }


@pytest.mark.skipif(REAL is None, reason="the package amdsmi is not installed (extra 'amdsmi')")
def test_the_real_package_without_rocm(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    with pytest.raises(QueryError) as error:
        ask("names")
    assert error.value.kind == "KeyError"
    assert capfd.readouterr().out == ""
