"""Sweeps on a cluster: each command on devices of its own, its output and its end brought back."""

import signal
import subprocess
import sys

import pytest
from waiting import until

SECONDS = 120
"""For whatever takes a second or two, unless the machine has other things to do."""
pytestmark = pytest.mark.timeout(300)


def rows(folder):
    """The job log: number and exit status of each command."""
    lines = [line.split("\t") for line in (folder / "jobs.tsv").read_text().splitlines()[1:]]
    return sorted((line[0], line[6]) for line in lines)


def test_commands_run_on_the_nodes_and_what_they_print_comes_back(cluster, anyaccel, tmp_path):
    done = anyaccel(
        "sweep", "A1:1", "--out", "anyaccel-sweep", *cluster, "--retries", "1", "--each", "n=0..2",
        "--", "sh", "-c", 'echo "{n} $ACME_VISIBLE"; exit {n}', cwd=tmp_path, timeout=SECONDS,
    )  # fmt: skip
    assert (done.returncode, "1 of 3 done, 2 failed" in done.stderr) == (1, True), done.stderr
    logs = [(tmp_path / "anyaccel-sweep" / f"n={number}.log").read_text().split() for number in (0, 1, 2)]
    assert [words[0::2] for words in logs] == [["0"], ["1", "1"], ["2", "2"]]
    assert all(len(words) == (2 if words[0] == "0" else 4) for words in logs)
    assert rows(tmp_path / "anyaccel-sweep") == [("1", "0"), ("2", "1"), ("3", "2")]


def test_commands_that_run_at_once_have_devices_of_their_own(cluster, anyaccel, tmp_path):
    """Four of six at once, on four devices; a wait for the others in each shows that they do run at once."""
    together = f'd={tmp_path}; echo "$ACME_VISIBLE" > $d/{{#}}.here; [ {{#}} -gt 4 ] || until [ $(ls $d/*.here | wc -l) -ge 4 ]; do sleep 0.05; done'  # noqa: E501
    done = anyaccel(
        "sweep",
        "A1:1",
        "--out",
        "anyaccel-sweep",
        *cluster,
        "--each",
        "n=1..6",
        "--",
        "sh",
        "-c",
        together,
        cwd=tmp_path,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    first = {(tmp_path / f"{number}.here").read_text() for number in range(1, 5)}
    assert len(first) == 4
    assert rows(tmp_path / "anyaccel-sweep") == [(str(number), "0") for number in range(1, 7)]
    again = anyaccel(
        "sweep", "A1:1", "--out", "anyaccel-sweep", *cluster, "--resume", "--each", "n=1..6",
        "--", "sh", "-c", together, cwd=tmp_path, timeout=SECONDS,
    )  # fmt: skip
    assert (again.returncode, "6 of 6 done (6 of them before)" in again.stderr) == (0, True), again.stderr


def test_a_sweep_that_is_stopped_leaves_nothing_running(cluster, tmp_path):
    """A sweep that is stopped ends by SIGINT; what runs on the nodes is ended."""
    script = f"echo $$ > {tmp_path}/{{n}}.pid; exec sleep 1000"
    command = [
        sys.executable,
        "-m",
        "anyaccel",
        "sweep",
        "A1:1",
        *cluster,
        "--each",
        "n=1..3",
        "--",
        "sh",
        "-c",
        script,
    ]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as sweep:
        files = [tmp_path / f"{number}.pid" for number in (1, 2, 3)]
        until(lambda: all(file.exists() and file.read_text() for file in files), "the commands", SECONDS)
        sweep.send_signal(signal.SIGINT)
        _, told = sweep.communicate(timeout=SECONDS)
    assert sweep.returncode == -signal.SIGINT, told
    until(lambda: not any(runs(int(file.read_text())) for file in files), "their end")


def runs(pid):
    """Whether a process runs what the test has started."""
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8") as file:
            return file.read().startswith("sleep")
    except OSError:
        return False
