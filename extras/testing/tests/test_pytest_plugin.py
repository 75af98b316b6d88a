"""The fixtures for users' own tests, in real pytest runs, with real xdist workers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points

import anyaccel
import pytest

pytestmark = pytest.mark.timeout(300)  # a run with several workers takes its time on a busy machine

PLUGIN = "anyaccel_testing.pytest_plugin"
# In a source tree that is not installed there is no entry point: then the plug-in is named by -p.
REGISTERED = any(point.value == PLUGIN for point in entry_points(group="pytest11"))

SEES = """
    import json, os, pathlib, pytest, time

    @pytest.fixture(scope="session")
    def together(request):
        # A worker that is done gives its device back: all must have asked before the first one is.
        try:
            request.getfixturevalue("accel")
        finally:
            pathlib.Path("asked-" + os.environ.get("PYTEST_XDIST_WORKER", "")).touch()
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        until = time.monotonic() + 200
        while len(list(pathlib.Path().glob("asked-*"))) < workers and time.monotonic() < until:
            time.sleep(0.01)

    @pytest.mark.parametrize("number", range(4))
    def test_sees_its_device(number, together, accel):
        with open("seen.jsonl", "a") as file:
            worker = os.environ.get("PYTEST_XDIST_WORKER", "")
            file.write(json.dumps([worker, accel.devices[0].id, os.environ["ACME_VISIBLE"]]) + "\\n")
"""


@pytest.fixture
def run(tmp_path, monkeypatch, acme):
    """Run pytest on a file in a child process."""
    monkeypatch.chdir(tmp_path)

    def run(source, *options, machine="sim:Acme-One:4", as_users=False, **variables):
        (tmp_path / "test_it.py").write_text(textwrap.dedent(source))
        argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rsf", *options, "test_it.py"]
        environ = {**os.environ, "ANYACCEL_MACHINE": machine, **variables}
        if not as_users:  # no other plug-ins, for speed
            argv[3:3] = ["-p", PLUGIN, *(["-p", "xdist"] if "-n" in options else [])]
            environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        elif not REGISTERED:
            argv[3:3] = ["-p", PLUGIN]
        return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=250, check=False)

    return run


def seen(tmp_path):
    return [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]


def test_a_test_sees_exactly_one_device(run, tmp_path):
    done = run(SEES, as_users=True)
    assert done.returncode == 0, done.stdout
    ids = {(device, mask) for _, device, mask in seen(tmp_path)}
    assert len(ids) == 1
    device, mask = ids.pop()
    assert mask == device


def test_every_worker_has_a_device_of_its_own(run, tmp_path):
    done = run(SEES, "-n", "3")
    assert done.returncode == 0, done.stdout
    by_worker = {}  # xdist gives no guarantee how tests are spread
    for worker, device, mask in seen(tmp_path):
        assert mask == device
        by_worker.setdefault(worker, set()).add(device)
    assert len(by_worker) > 1
    assert all(len(devices) == 1 for devices in by_worker.values())
    # No device twice: workers overlap in time, which the fixture "together" enforces.
    assert len(set.union(*by_worker.values())) == len(by_worker)


def test_a_worker_without_a_device_says_why(run):
    with anyaccel.acquire("acme:1", machine="sim:Acme-One:1", note="the others"):
        done = run("def test_it(accel): pass", machine="sim:Acme-One:1")
    assert done.returncode == 0, done.stdout
    assert "no accelerator for this test worker: acme:1 does not fit now" in done.stdout
    assert "the others" in done.stdout


@pytest.mark.full  # shares are given in tests/launcher
def test_a_share_is_given_twice(run, tmp_path):
    done = run(SEES, "-n", "2", "--accel", "APU:0.5", machine="sim:Acme-One:1")
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
    assert len({device for _, device, _ in seen(tmp_path)}) == 1


@pytest.mark.parametrize(
    ("options", "machine", "status", "said"),
    [
        ((), "host", 0, "SKIPPED [1] test_it.py:1: no accelerator for this test worker: this machine has no"),
        (("--accel-required",), "host", 1, "no accelerator for this test worker: this machine has no accelerator"),
        (("--accel", "APU:9"), "sim:Acme-One:4", 0, "no accelerator for this test worker: "),
        (("--accel", "APU:1.5"), "sim:Acme-One:4", 1, "--accel APU:1.5: "),
    ],
)  # fmt: skip
def test_a_machine_that_cannot_serve(run, options, machine, status, said):
    done = run("def test_it(accel): pass", *options, machine=machine)
    assert done.returncode == status, done.stdout
    assert said in done.stdout
    assert "Traceback" not in done.stdout


def test_a_hidden_device_is_no_device_and_says_so(run):
    done = run("def test_it(accel): pass", machine="sim:Acme-One:1", ACME_VISIBLE="")
    assert "is hidden by the environment" in done.stdout


def test_a_runtime_that_is_loaded_already_would_see_all_devices(run, acme, tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler is installed here")
    # A real shared library with the name of a runtime: the kernel's list of mappings is what is read.
    acme.write_text(acme.read_text().replace('kind="apu",', 'kind="apu", runtimes=("libacmert.so",),', 1))
    (tmp_path / "runtime.c").write_text("int acme_start(void) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "libacmert.so.1", "runtime.c"], check=True, cwd=tmp_path)
    done = run(f"import ctypes; ctypes.CDLL('{tmp_path}/libacmert.so.1')\ndef test_it(accel): pass")
    assert (
        "no accelerator for this test worker: libacmert.so.1 of acme is loaded in this process already" in done.stdout
    )


def test_several_devices_and_the_environment_is_as_it_was_when_the_session_ends(run):
    done = run(
        """
        import os
        import pytest

        @pytest.fixture(scope="session", autouse=True)
        def outer():
            yield
            print("AFTER", os.environ.get("ACME_VISIBLE"), os.environ.get("ANYACCEL_ALLOCATION"))

        def test_it(accel):
            import anyaccel
            assert len(accel.devices) == 2
            assert [device.id for device in anyaccel.current().devices] == [device.id for device in accel.devices]
        """,
        *("--accel", "APU:2,linked", "-s"),
    )
    assert done.returncode == 0, done.stdout
    assert "AFTER None None" in done.stdout


def test_another_machine_for_one_test(run, record):
    done = run(
        f"""
        import os
        import anyaccel

        def test_simulated(accel_machine):
            found = accel_machine("sim:Acme-Whole:4")
            assert [device.type for device in found.devices] == ["Acme-Whole"] * 4
            assert anyaccel.detect().devices == found.devices

        def test_recorded(accel_machine, tmp_path):
            found = accel_machine({record({}, {})!r})
            assert [device.id for device in found.devices] == ["acme-s0", "acme-s1"]

        def test_beside_a_device_of_its_own(accel, accel_machine):
            assert os.environ["ACME_VISIBLE"] == accel.devices[0].id
            assert all(device.visible for device in accel_machine("sim:Acme-One:2").devices)

        def test_afterwards(accel):
            assert os.environ["ACME_VISIBLE"] == accel.devices[0].id
            assert os.environ["ANYACCEL_MACHINE"] == "sim:Acme-One:4"
        """
    )
    assert done.returncode == 0, done.stdout


def test_other_runs_load_nothing(run):
    done = run(
        """
        import sys

        def test_it():
            # Every pytest run of a user pays for imports of this plug-in.
            ours = {name for name in sys.modules if name.startswith(("anyaccel", "rich", "psutil"))}
            assert ours == {"anyaccel_testing", "anyaccel_testing.pytest_plugin"}
        """,
        as_users=True,
    )
    assert done.returncode == 0, done.stdout
