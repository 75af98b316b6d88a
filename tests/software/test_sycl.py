"""Intel's SYCL runtime reads ONEAPI_DEVICE_SELECTOR as the plug-in does, with CPUs as its OpenCL devices."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("dpctl") is None:
    pytest.skip("tox -e real-sycl installs dpctl and Intel's runtimes", allow_module_level=True)
from anyaccel_intel import selector

LIBRARIES = Path(sys.prefix) / "lib"
ASK = """
import json, os, sys
import dpctl

answers = []
for value in json.load(sys.stdin):
    reader, writer = os.pipe()
    child = os.fork()  # the runtime reads the variable once per process
    if child == 0:
        os.dup2(writer, 1), os.dup2(writer, 2)
        if value is not None:
            os.environ["ONEAPI_DEVICE_SELECTOR"] = value
        names = [device.name for device in dpctl.get_devices()]
        os.write(writer, b"\\n#" + json.dumps(names).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read().decode(errors="replace")
    os.waitpid(child, 0)
    printed, _, names = text.rpartition("\\n#")
    answers.append([json.loads(names), "[ERR]" in printed])  # dpctl prints what the runtime throws
json.dump(answers, sys.stdout)
"""
CASES = [
    *("opencl:*", "*:*", "*:0", "*:cpu", "*:gpu", "opencl:0", "OPENCL:0", "OpenCL:1,2", "opencl:3,1", "opencl:1,1"),
    *("opencl:1,99", "opencl:0;", ";;opencl:0", "opencl:0,", "opencl:0,,1", "opencl:00", "opencl:010", "opencl:0x1"),
    *("opencl:0-1", "opencl:1 2", "opencl:1, 2", "opencl:-1", "opencl:-1,1", "opencl: 0", "opencl:CPU", "OPENCL:CPU"),
    *("opencl:gpu,1", "opencl:host", "opencl:0.0", "opencl:*.*", "level_zero:0;opencl:1", "level_zero:*;opencl:cpu"),
    *("level_zero:0,1", "level_zero:0,1;opencl:0", "opencl:,", ";", "", "*", "gpu", "opencl", "opencl:", "level_zero:"),
    *("level_zero:;opencl:0", ":0", "foo:0", "ext_oneapi_level_zero:gpu", ",opencl:0", "opencl:0; opencl:1"),
    *("level_zero:0,opencl:0", "opencl:cpu:0", "opencl:foo", "opencl:acc", "opencl:[1,2]", "opencl:2147483648"),
    *("opencl:cpu ", "opencl:1.", "opencl:.1", "opencl:*.0", "opencl:cpu.0", "opencl:1.0.0.0", "!opencl:1;opencl:1,2"),
    *("!level_zero:*", "!level_zero:0", "!opencl:gpu", "!opencl:cpu", "!opencl:*", "!*:*", "opencl:0;!*:*"),
]
DISCARDING = (
    "!opencl:0",
    "opencl:*;!opencl:0",
    "*:*;!opencl:1",
    "opencl:1;!opencl:0",
    "!*:1",
    "!opencl:1.0",
    "!OPENCL:0",
)


def invented(count: int) -> list[str]:
    """Random values, the same in every run."""
    chance = random.Random(20261)
    heads = ["opencl:", "opencl:", "OpenCL:", "*:", "level_zero:", "!opencl:", "!level_zero:", "foo:", "opencl"]
    items = ["0", "1", "3", "*", "cpu", "gpu", "CPU", "1.0", "*.*", "-1", " 1", "0-1", "", "+2", "1.*", "cpu.0", "foo"]
    return [
        ";".join(
            chance.choice(heads) + ",".join(chance.choice(items) for _ in range(chance.choice([1, 1, 2, 3])))
            for _ in range(chance.choice([1, 1, 2]))
        )
        for _ in range(count)
    ]


def ask(values: list[str | None], *, preload_filter: bool) -> list[tuple[list[str], bool]]:
    """Ask the runtime for the devices or the exception of each value."""
    pocl = sorted((Path(p) for p in _pocl()), key=str)
    environ = {
        "PATH": os.environ.get("PATH", os.defpath),
        "LD_LIBRARY_PATH": str(LIBRARIES),
        "OCL_ICD_FILENAMES": ":".join(map(str, [LIBRARIES / "libintelocl.so", *pocl])),
        "POCL_DEVICES": "basic pthread pthread",
        "DPCTL_VERBOSITY": "warning",
        "UR_LOADER_PRELOAD_FILTER": str(int(preload_filter)),
        "HOME": os.environ.get("HOME", "/tmp"),
    }
    done = subprocess.run(
        [sys.executable, "-I", "-c", ASK],
        input=json.dumps(values),
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
        check=True,
        timeout=100,
    )
    return [(names, threw) for names, threw in json.loads(done.stdout)]


def _pocl() -> list[str]:
    try:
        files = importlib.metadata.files("pocl-binary-distribution") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [str(file.locate()) for file in files if file.name.startswith("libpocl")]


@pytest.fixture(scope="module")
def everything() -> list[str]:
    """Names of the devices without a selector."""
    if not (LIBRARIES / "libintelocl.so").exists():
        pytest.skip("there is no OpenCL CPU device: pip install intel-opencl-rt")
    ((names, threw),) = ask([None], preload_filter=True)
    assert names
    assert not threw
    return names


def test_parser_accepts_refuses_and_counts_as_the_runtime_does(everything, report):
    faults = {}
    for values, preload_filter in ((CASES, True), (DISCARDING, True), (DISCARDING, False), (invented(60), True)):
        environ = {} if preload_filter else {"UR_LOADER_PRELOAD_FILTER": "0"}
        for value, answer in zip(values, ask(list(values), preload_filter=preload_filter), strict=True):
            try:
                left = selector.admitted(value, [0] * len(everything), backend="opencl", kind="cpu", environ=environ)
                ours = ([everything[position] for position, _ in left], False)
            except ValueError:
                ours = ([], True)
            faults[f"{value!r} {environ}"] = [] if ours == answer else [ours, answer]
    report("intel", "intel-sycl-rt", "devices left by ONEAPI_DEVICE_SELECTOR", faults, cases="values")


def test_dpctl_answers_our_question_in_plain_data(everything):
    from anyaccel_intel.runtime import ask_dpctl

    assert everything
    assert json.loads(json.dumps(ask_dpctl())) == ask_dpctl()
