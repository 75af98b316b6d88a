"""A testbed: the kernel shows the files of a recording to every program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ACME = (Path(__file__).parents[3] / "tests" / "vendors" / "acme.py").read_text()
WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-sys_admin")
"""Root without the right to mount, as in a container."""


@pytest.fixture
def bed(tmp_path, accel_testbed):
    """Run a shell in the testbed of a recording with these paths and commands."""

    def run(paths, script, commands=(), environ=(), **options):
        recording = {
            "schema": "anyaccel.recording/1",
            "paths": paths,
            "commands": [*commands],
            "environ": dict(environ),
        }
        (tmp_path / "machine.json").write_text(json.dumps(recording))
        return accel_testbed(tmp_path, "sh", "-c", script, **options)

    return run


def test_detection_live_finds_what_a_replay_finds(anyaccel, install, recordings, accel_testbed):
    install("acme", ACME)
    pair = recordings(ACME) / "quad"
    live = accel_testbed(pair, sys.executable, "-m", "anyaccel", "status", "--json", "--no-stats")
    replay = anyaccel("status", "--json", "--no-stats", "--machine", str(pair))
    found, wanted = (json.loads(done.stdout)["devices"] for done in (live, replay))
    assert found == wanted
    assert {device["id"] for device in found} == {f"acme-s{number}" for number in range(4)}


def test_files_links_nodes_and_variables_are_the_recorded_ones(bed):
    paths = {
        "/sys/bus/pci/devices/0000:01:00.0": {"link": "../../../devices/pci0000:00/0000:01:00.0"},
        "/sys/bus/pci/devices/0000:01:00.0/vendor": {"text": "0xace0\n"},
        "/sys/class/acme": {"dir": True},
        "/dev/acme0": {"char": [511, 3], "access": "r"},
        "/opt/acme/version": {"text": "7\n"},
        "/.dockerenv": {},
    }
    script = """
        cat /sys/devices/pci0000:00/0000:01:00.0/vendor /opt/acme/version
        ls /sys/class; stat -c '%A %Hr:%Lr' /dev/acme0; ls /.dockerenv; echo $ACME
    """
    done = bed(paths, script, environ={"ACME": "1,0", "PATH": "/nowhere"})
    assert done.stdout.splitlines() == ["0xace0", "7", "acme", "cr--r--r-- 511:3", "/.dockerenv", "1,0"], done.stderr
    assert not os.path.lexists("/dev/acme0")
    assert not os.path.lexists("/dev/.anyaccel")  # the mounts are of the child's namespace


def test_what_the_recorded_user_may_not_open_is_closed_to_root(bed):
    paths = {
        "/sys/acme/secret": {"errno": "EACCES"},
        "/sys/acme/broken": {"errno": "EIO"},
        "/dev/acme0": {"char": [1, 3], "access": ""},
        # The numbers of /dev/null, which root could open anywhere else.
        "/dev/acme1": {"char": [1, 3], "access": "rw"},
    }
    done = bed(paths, "cat /sys/acme/secret; test -r /dev/acme0 || echo closed; cat /dev/acme1")
    assert done.stdout == "closed\n"
    assert "/sys/acme/secret: Permission denied" in done.stderr
    assert "/sys/acme/broken: opening it fails with EACCES instead of EIO" in done.stderr
    # A node with the numbers of /dev/null: nothing that is recorded leads to a device of this host.
    assert "/dev/acme1: Permission denied" in done.stderr


def test_tools_that_are_missing_answer_as_recorded(bed, tmp_path):
    # Arguments with spaces, and output with characters that a shell would expand.
    commands = [
        {"argv": ["acme-smi", "-L", "a b"], "returncode": 3, "stdout": "it's $HOME\n", "stderr": "warned\n"},
        {"argv": ["env", "ACME=1", "/opt/acme/bin/tool", "-x"], "returncode": 0, "stdout": "from opt\n"},
        {"argv": ["ls", "-Z"], "returncode": 0, "stdout": "never\n"},
    ]
    script = "acme-smi -L 'a b'; echo $?; acme-smi -L; echo $?; env ACME=1 /opt/acme/bin/tool -x; ls -d /"
    done = bed({}, script, commands)
    assert done.stdout == "it's $HOME\n3\n127\nfrom opt\n/\n"
    assert done.stderr == "warned\nacme-smi: the recording has no answer to these arguments\n"


def test_a_link_of_a_stranger_leads_nowhere(bed, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    up = "../" * 9  # more than there are directories: the root is its own parent
    paths = {
        "/sys/a": {"link": str(tmp_path)},
        "/sys/a/victim": {"text": "theirs"},
        "/sys/b": {"link": f"{up}{victim}"},
        "/sys/loop": {"link": "loop"},
        "/sys/loop/x": {"text": "theirs"},
        f"{victim}": {"text": "theirs"},
    }
    done = bed(paths, f"cat {victim}")
    assert done.stdout == "theirs"
    assert victim.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up root's rights")
def test_without_root_a_user_namespace_will_do(bed, tmp_path):
    bed({"/sys/acme/name": {"text": "One\n"}, "/dev/acme0": {"char": [511, 0]}}, "true")
    command = [sys.executable, "-m", "anyaccel", "testbed", str(tmp_path), "--", "cat", "/sys/acme/name"]
    done = subprocess.run([*WITHOUT_RIGHTS, *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "One\n"), done.stderr
    assert "/dev/acme0: it has the numbers of /dev/null, since only root can make nodes" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take away user namespaces")
def test_without_either_it_says_so_and_the_test_is_skipped(tmp_path):
    (tmp_path / "machine.json").write_text('{"schema": "anyaccel.recording/1"}')
    (tmp_path / "test_it.py").write_text(f"def test_it(accel_testbed): accel_testbed({str(tmp_path)!r}, 'true')\n")
    pytest_run = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", str(tmp_path))
    command = (sys.executable, "-m", "anyaccel", "testbed", str(tmp_path), "--", "true")
    # The limit counts for namespaces below that of the shell alone, so the machine keeps its own.
    script = textwrap.dedent(f"""
        echo 0 > /proc/sys/user/max_user_namespaces
        {" ".join(WITHOUT_RIGHTS)} {" ".join(command)}
        echo "status $?"
        exec {" ".join(WITHOUT_RIGHTS)} {" ".join(pytest_run)}
    """)
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", script], capture_output=True, text=True, check=False
    )
    assert "status 1" in done.stdout, done.stderr
    assert "a testbed needs a mount namespace, and the kernel refuses one" in done.stderr
    assert "run as root" in done.stderr
    assert "1 skipped" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("{bed}",), 2, "'anyaccel testbed' needs a command behind '--'"),
        (("{bed}/none", "--", "true"), 2, "none/machine.json cannot be read"),
        (("{bed}", "--", "no-such-command"), 127, "the command 'no-such-command' was not found"),
        (("{bed}", "--", ""), 126, "the command '' cannot be run"),
    ],
)
def test_arguments_that_make_no_sense(anyaccel, tmp_path, arguments, status, said):
    (tmp_path / "machine.json").write_text('{"schema": "anyaccel.recording/1"}')
    done = anyaccel("testbed", *(argument.format(bed=tmp_path) for argument in arguments), timeout=200)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr


def test_a_working_directory_that_has_gone_is_told(anyaccel, tmp_path):
    (tmp_path / "machine.json").write_text('{"schema": "anyaccel.recording/1"}')
    script = 'mkdir gone; cd gone; rmdir ../gone; exec "$0" -m anyaccel testbed "$1" -- true'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "anyaccel: a testbed needs its working directory, which has gone" in done.stderr
