"""Fixtures that give this host NUMA nodes, and commands that tell on which processors they run."""

import os
import subprocess
import sys

import pytest
from anyaccel.probe import processors

OURS = sorted(os.sched_getaffinity(0))
SHOW = (
    "import anyaccel, json, os;"
    "found = [sorted(os.sched_getaffinity(0)), list(anyaccel.current().processors)];"
    "os.write(1, json.dumps(found).encode() + b'\\n')"  # at once: ranks share a pipe
)
two_processors = pytest.mark.skipif(len(OURS) < 2, reason="one processor cannot be divided")


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Give this host the NUMA nodes that a test wants; ``cores`` has processors that are threads of one core."""

    def nodes(lists, cores=()):
        for node, found in lists.items():
            folder = tmp_path / "system" / "node" / f"node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(",".join(map(str, found)) + "\n")
        for core in cores:
            for processor in core:
                topology = tmp_path / "system" / "cpu" / f"cpu{processor}" / "topology"
                topology.mkdir(parents=True)
                (topology / "thread_siblings_list").write_text(",".join(map(str, core)) + "\n")
        monkeypatch.setattr(processors, "SYSTEM", str(tmp_path / "system"))

    return nodes


@pytest.fixture
def two_nodes(acme, nodes):
    """Half of our processors near each of the two devices, and one that is not ours."""
    half = len(OURS) // 2
    nodes({0: [*OURS[:half], 4095], 1: OURS[half:]})
    return OURS[:half], OURS[half:]


CLI = "import sys; from anyaccel.probe import processors; processors.SYSTEM = sys.argv.pop(1); \
from anyaccel.cli import main; sys.exit(main())"


def run_on_nodes(*arguments):
    """Run a command line on a host with the nodes of a test."""
    program = [sys.executable, "-c", CLI, processors.SYSTEM]
    return subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=60, check=False)
