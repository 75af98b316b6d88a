"""MPS daemons in both protocols: start, status, stop; claims only after an answer."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from copy import deepcopy
from pathlib import Path

import pytest
from anyaccel.errors import CommandNotRunnableError
from anyaccel.plugin import EnvContext, Severity, Share
from anyaccel_nvidia import mps, plugin
from anyaccel_testing import context, load_recording

HERE = Path(__file__).parent
FAKE = HERE / "fake_mps.py"
GIB = 1 << 30


@pytest.fixture
def place(monkeypatch, tmp_path):
    """A short directory for a daemon's socket; a daemon there is killed after the test."""
    # Paths of Unix sockets hold 107 characters; pytest's directories are longer.
    directory = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))
    tool = tmp_path / "mps" / mps.TOOL
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {FAKE} "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(directory))
    monkeypatch.delenv("CUDA_MPS_PROTOCOL_VERSION", raising=False)
    monkeypatch.setattr(mps, "ANSWER_SECONDS", 120)
    yield directory
    if (noted := directory / "nvidia-cuda-mps-control.pid").exists():
        os.kill(int(noted.read_text()), signal.SIGKILL)
    shutil.rmtree(directory)


PATIENT = """
import sys
from anyaccel.cli import main
from anyaccel_nvidia import mps, mps_command
mps.ANSWER_SECONDS = mps_command.START_SECONDS = 120  # a busy machine starts a stand-in slowly
"""


def command(*arguments, before="", **environ):
    return subprocess.run(
        [sys.executable, "-c", f"{PATIENT}{before}\nsys.exit(main())", "mps", *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    "protocol", [pytest.param(2, marks=pytest.mark.full), 3]
)  # 2 is in test_a_daemon_that_answers_is_believed
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
    assert (place / "control").exists(), "NVIDIA's daemon leaves it behind"
    ended = command("status")
    assert (ended.returncode, ended.stderr) == (1, f"anyaccel: no MPS daemon listens in {place}\n")
    assert command("stop").returncode == 0, "nothing is there, as was wanted"
    assert command("start").returncode == 0, "another one takes the directory"
    assert command("stop").returncode == 0


def test_a_daemon_that_keeps_the_output_of_its_starter_is_not_waited_for(place):
    with (place / "said").open("w+") as said:  # a pipe of ours would be kept as well
        environ = {**os.environ, "KEEPS_OUTPUT": "1"}
        program = [sys.executable, "-c", f"{PATIENT}\nsys.exit(main())", "mps", "start"]
        done = subprocess.run(program, env=environ, stdout=said, timeout=100, check=False)  # less than its patience
    assert (done.returncode, "protocol 2" in (place / "said").read_text()) == (0, True)
    assert command("stop").returncode == 0


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


def test_what_an_ended_daemon_left_is_no_daemon(place):
    """Shares would name its directory, and containers would mount it."""
    assert command("start").returncode == 0
    assert command("stop").returncode == 0
    assert mps.query_daemon(str(place)) is None
    _, (device,) = detected(place, answer=None, ended=True)
    assert not {"mps_pipe", "mps_protocol"} & device.attributes.keys()
    assert not any(name.startswith("CUDA_MPS") for name in half(device).set)


@pytest.fixture
def silent(place, tmp_path):
    """A process listens at the socket, in a place of its own, and the tool does not get an answer."""
    (tmp_path / "mps" / mps.TOOL).write_text("#!/bin/sh\necho 'Cannot find MPS control daemon process' >&2\nexit 1\n")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place / "control"))
        listening.listen()
        yield place


@pytest.mark.parametrize("name", ["CUDA_MPS_PIPE_DIRECTORY", "XDG_RUNTIME_DIR"])
def test_a_place_may_be_written_with_more_slashes(place, name):
    """Such a path in a recording would be refused when it is read."""
    (first, *_) = mps.directories({name: f"{place.parent}//./{place.name}/"})
    assert first == str(place if name == "CUDA_MPS_PIPE_DIRECTORY" else place / "nvidia-mps")


def test_a_daemon_that_does_not_answer_keeps_none_from_starting(place, tmp_path):
    """Doctor's remedy is to start a daemon of your own."""
    usual = place / "other"
    usual.mkdir()
    environ = {"XDG_RUNTIME_DIR": str(place / "own"), "CUDA_MPS_PIPE_DIRECTORY": ""}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(usual / "control"))
        listening.listen()
        tool, before = tmp_path / "mps" / mps.TOOL, f"mps.DIRECTORIES = ({str(usual)!r},) * 2"
        tool.write_text(tool.read_text().replace("exec", f'[ "$CUDA_MPS_PIPE_DIRECTORY" = {usual} ] && exit 1\nexec'))
        failed, started = (command(action, before=before, **environ) for action in ("status", "start"))
    assert failed.returncode == CommandNotRunnableError.exit_code
    assert f"the MPS daemon in {usual} cannot be used" in failed.stderr
    assert "end its daemon, or name another directory with CUDA_MPS_PIPE_DIRECTORY" in failed.stderr
    assert started.returncode == 0, started.stderr
    for action in ("start", "status", "stop"):
        done = command(action, before=before, **environ)
        assert done.returncode == 0, done.stderr
        assert f"MPS daemon in {place}/own/nvidia-mps" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "answer",
    [
        "usage: nvidia-cuda-mps-control [-d | -f]\\n  -h, --help  this\\n",
        "Cannot find MPS control daemon process\\n",
        "\\377\\376 name, pid\\000\\n1\\n2, 3, 4\\n",
        "9" * 5000,
    ],
    ids=["usage", "error", "bytes", "digits"],
)
@pytest.mark.usefixtures("silent")
def test_a_text_that_is_no_answer_is_not_believed(place, tmp_path, answer):
    # Old tools print usage and errors on standard output, with status 0.
    (tmp_path / "mps" / mps.TOOL).write_text(f"#!/bin/sh\nprintf '{answer}'\n")
    with pytest.raises(OSError, match="which is no list of processes"):
        mps.query_daemon(str(place))
    done = command("status")
    assert done.returncode == CommandNotRunnableError.exit_code
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_daemon_of_another_user_serves_us_not(place):
    assert command("start").returncode == 0
    os.chown(place / "control", 4711, -1)
    with pytest.raises(OSError, match="belongs to user 4711"):
        mps.query_daemon(str(place))
    os.chown(place / "control", 0, -1)
    assert command("stop").returncode == 0
    # Another user's directory: its owner could replace the socket after the check.
    os.chown(place, 4711, -1)
    assert "belongs to another user" in command("start").stderr


def detected(place, *, answer=None, processes=(), ended=False):
    """Detect the GPU of a recorded machine with a daemon's socket."""
    recording = deepcopy(load_recording(HERE.parent / "recordings" / "h100-1gpu"))
    recording["paths"][f"{place}/control"] = {}
    recording["environ"] = {"CUDA_MPS_PIPE_DIRECTORY": str(place)}
    if answer or ended:
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
    answer = mps.query_daemon(str(place))
    _, (device,) = detected(place, answer=answer)
    edits = half(device)
    assert edits.set["CUDA_MPS_PIPE_DIRECTORY"] == str(place)
    assert (edits.memory_by, edits.compute_by) == ("CUDA MPS", compute), "a namespace's percentage wins in protocol 3"


@pytest.mark.usefixtures("silent")
def test_one_that_does_not_answer_is_not_believed(place):
    with pytest.raises(OSError, match="Cannot find MPS"):
        mps.query_daemon(str(place))
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
