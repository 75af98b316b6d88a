"""The fork server of vendors' processes starts ahead of need, without descriptors of its caller."""

import os
import subprocess
import sys

import anyaccel as aa
import psutil
from anyaccel import vendors
from waiting import PATIENCE

FORK = """
import os, sys
from anyaccel.vendors import begin
begin()
import anyaccel as aa
child = os.fork()
found = [device.id for device in aa.detect(sys.argv[1]).devices]
if child == 0:
    os._exit(0 if found == ["acme-s0", "acme-s1"] else 1)
print(found, os.waitpid(child, 0)[1])
"""
CLOSED = """
import os, sys
os.closerange(0, 3)
import anyaccel as aa
found = [device.id for device in aa.detect(sys.argv[1]).devices]
with open(sys.argv[2], "w") as file:
    print(found, file=file)
"""


def test_a_fork_before_the_first_call_uses_an_interpreter_of_its_own(acme, record):
    command = [sys.executable, "-c", FORK, record({}, {})]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "['acme-s0', 'acme-s1'] 0\n"


def test_a_caller_may_have_closed_its_streams(acme, record, tmp_path):
    command = [sys.executable, "-c", CLOSED, record({}), tmp_path / "found"]
    subprocess.run(command, check=True, timeout=60)
    assert (tmp_path / "found").read_text() == "['acme-s0']\n"


def test_what_the_caller_leaves_open_for_its_children_does_not_reach_it(acme, record, tmp_path):
    vendors.close()
    before = set(psutil.Process().children())
    with open(tmp_path / "lease", "w") as lease:
        os.set_inheritable(lease.fileno(), True)
        assert aa.detect(record({})).devices
        (interpreter,) = set(psutil.Process().children()) - before
        processes = (interpreter, *interpreter.children(recursive=True))
        opened = [file.path for process in processes for file in process.open_files()]
    assert [path for path in opened if "libffi" not in path] == []  # which keeps itself open on some systems


def test_what_was_started_ahead_and_not_used_ends_with_the_others():
    vendors.close()
    before = set(psutil.Process().children())
    vendors.begin()
    (interpreter,) = set(psutil.Process().children()) - before
    vendors.close()
    psutil.wait_procs([interpreter], timeout=PATIENCE)  # it is told to end, and may not have begun yet
    assert not interpreter.is_running()
