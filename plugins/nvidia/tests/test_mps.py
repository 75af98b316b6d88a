"""Daemons of MPS in both protocols: started, asked who their clients are, believed only where they answer."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from copy import deepcopy
from pathlib import Path

import pytest
from anyaccel.errors import CommandNotRunnableError
from anyaccel.plugin import EnvContext, Severity, Share
from anyaccel.testing import context, load_recording
from anyaccel_nvidia import mps, plugin

HERE = Path(__file__).parent
FAKE = HERE / "fake_mps"
GIB = 1 << 30


@pytest.fixture
def place(monkeypatch):
    """A short directory for a daemon's socket; what listens there is ended after the test."""
    directory = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))
    monkeypatch.setenv("PATH", f"{FAKE}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(directory))
    monkeypatch.delenv("CUDA_MPS_PROTOCOL_VERSION", raising=False)
    yield directory
    if (directory / "control").exists() and (noted := directory / "nvidia-cuda-mps-control.pid").exists():
        os.kill(int(noted.read_text()), signal.SIGKILL)
    shutil.rmtree(directory)


def command(*arguments, **environ):
    return subprocess.run(
        [sys.executable, "-m", "anyaccel", "mps", *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_daemon_is_started_looked_at_and_stopped(place, protocol):
    done = command("start", "--protocol", str(protocol))
    assert (done.returncode, done.stdout) == (0, f"MPS daemon in {place}, protocol {protocol}, clients: none\n")
    (place / "clients").write_text("11 12")
    seen = json.loads(command("status", "--json").stdout)
    assert {name: seen[name] for name in ("schema", "directory", "protocol", "servers", "clients")} == {
        "schema": "anyaccel.mps/1",
        "directory": str(place),
        "protocol": protocol,
        "servers": [7001],
        "clients": [11, 12],
    }
    again = command("start")
    assert (again.returncode, "listens" in again.stderr) == (0, True)
    assert command("stop").returncode == 0
    assert not (place / "control").exists()
    assert command("status").returncode == 1
    assert command("stop").returncode == 0, "nothing is there, as was wanted"


def test_a_daemon_of_ones_own_is_for_oneself(place, tmp_path):
    """Without a named place it lies where no other user may look."""
    runtime = place / "run"
    environ = {"XDG_RUNTIME_DIR": str(runtime), "CUDA_MPS_PIPE_DIRECTORY": ""}
    done = command("start", **environ)
    pipe = runtime / "nvidia-mps"
    try:
        assert done.returncode == 0, done.stderr
        assert f"in {pipe}, protocol 2" in done.stdout
        assert pipe.stat().st_mode & 0o777 == 0o700
        assert mps.directories(environ)[0] == str(pipe)
    finally:
        assert command("stop", **environ).returncode == 0


def test_without_the_tool_people_are_told_where_it_comes_from(place, tmp_path):
    done = command("start", PATH=str(tmp_path))
    assert done.returncode == CommandNotRunnableError.exit_code
    assert "nvidia-cuda-mps-control is not on PATH" in done.stderr


def test_what_an_ended_daemon_left_does_not_answer(place):
    (place / "control").touch()
    done = command("status")
    assert done.returncode == CommandNotRunnableError.exit_code
    assert "Cannot find MPS control daemon process" in done.stderr


def detected(place, *, answer=None, processes=()):
    """Show a recorded machine on which something listens for programs, and detect its GPU."""
    recording = deepcopy(load_recording(HERE.parent / "recordings" / "h100-1gpu"))
    recording["paths"][f"{place}/control"] = {}
    recording["environ"] = {"CUDA_MPS_PIPE_DIRECTORY": str(place)}
    if answer:
        recording["queries"][f"mps/{place}"] = {"value": answer}
    for name, question in recording["queries"].items():
        if name.startswith("nvml/stats/"):
            question["value"]["processes"] = [[pid, GIB] for pid in processes]
    return recording, plugin.anyaccel_detect(context(recording)).devices


def half(device, **environ):
    share = Share(device=device, units=5_000, memory_bytes=40 * GIB)
    return plugin.anyaccel_env([device], EnvContext(devices=(device,), shares={device.id: share}, environ=environ))


@pytest.mark.parametrize(("protocol", "compute"), [(2, "CUDA MPS"), (3, "")])
def test_a_daemon_that_answers_is_believed(place, protocol, compute):
    assert command("start", "--protocol", str(protocol)).returncode == 0
    answer = mps.look(str(place))
    _, (device,) = detected(place, answer=answer)
    edits = half(device)
    assert edits.set["CUDA_MPS_PIPE_DIRECTORY"] == str(place)
    assert (edits.memory_by, edits.compute_by) == ("CUDA MPS", compute), "a namespace's percentage wins in protocol 3"


def test_one_that_does_not_answer_is_not_believed(place):
    (place / "control").touch()
    with pytest.raises(OSError, match="Cannot find MPS"):
        mps.look(str(place))
    recording, (device,) = detected(place)
    assert "mps_protocol" not in device.attributes
    edits = half(device)
    assert edits.set["CUDA_MPS_PIPE_DIRECTORY"] == str(place), "it may serve us all the same"
    assert edits.memory_by == edits.compute_by == ""
    (finding,) = [each for each in plugin.anyaccel_diagnose(context(recording)) if "MPS" in each.reason]
    assert "does not answer" in finding.reason
    assert "anyaccel mps start" in finding.remedy


def test_memory_of_unknown_size_is_not_held(place):
    _, (device,) = detected(place, answer={"protocol": 2, "servers": [], "clients": []})
    share = Share(device=device, units=5_000)
    edits = plugin.anyaccel_env([device], EnvContext(devices=(device,), shares={device.id: share}))
    assert (edits.memory_by, edits.compute_by) == ("", "CUDA MPS")


def test_a_process_that_is_no_client_is_told(place):
    """A wrong pipe directory makes a plain program of it, without a message from CUDA."""
    answer = {"protocol": 2, "servers": [7001], "clients": [11]}
    recording, (device,) = detected(place, answer=answer, processes=[11, 12, 7001])
    found = [each for each in plugin.anyaccel_diagnose(context(recording)) if "MPS" in each.reason]
    assert [(each.severity, each.reason.split(" uses ")[0]) for each in found] == [(Severity.WARN, "process 12")]
    assert device.id in found[0].reason
