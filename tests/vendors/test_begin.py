"""The fork server of vendors' processes starts ahead of need, without descriptors of its caller."""

import os
import subprocess
import sys
import venv

import anyaccel as aa
import psutil
import pytest
from anyaccel import vendors
from installed import ACME
from waiting import PATIENCE

FINDER = """
import sys
from importlib.util import spec_from_file_location

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return spec_from_file_location("nowhere", {path!r}) if name == "nowhere" else None

sys.meta_path.append(Finder)
"""
"""What an editable installation may put into ``site-packages``."""
VERSION = '(ctx.read("/sys/class/acme/version") or "").strip()'
DETECT = "import sys, anyaccel; print(anyaccel.detect(sys.argv[1]).vendors[0].driver_version)"
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


def test_work_for_meanwhile_that_another_thread_takes_is_left_to_it(monkeypatch):
    """Threads that asked different vendors at once got an IndexError."""

    class Works(list):
        def __bool__(self):
            found = len(self) > 0
            self.clear()  # another thread takes the work just after the look
            return found

    monkeypatch.setattr(vendors, "_works", Works())
    vendors.do_meanwhile(pytest.fail)
    vendors.work_meanwhile()


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


@pytest.fixture
def environment(tmp_path):
    """A virtual environment with the path of this one in a ``.pth`` file; return its interpreter and its directory."""
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "here.pth").write_text("".join(f"{entry}\n" for entry in sys.path if os.path.isdir(entry)))
    return tmp_path / "venv/bin/python", site


def test_a_plugin_that_a_finder_of_the_environment_finds_is_loaded(tmp_path, install, record, environment):
    python, site = environment
    install("acme", "", entry="nowhere")
    (tmp_path / "acme.py").write_text(ACME)
    (site / "finder.py").write_text(FINDER.format(path=str(tmp_path / "acme.py")))
    (site / "finder.pth").write_text("import finder\n")
    done = subprocess.run([python, "-c", DETECT, record({})], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "7.1\n"


def test_a_vendors_library_sees_the_environment_and_the_builtins_of_a_program(install, record, environment):
    python, _ = environment
    source = ACME.replace(VERSION, "f'{sys.prefix} {sys.exec_prefix} {callable(exit)} {site.PREFIXES}'")
    install("acme", f"import site, sys\n{source}")
    done = subprocess.run([python, "-c", DETECT, record({})], capture_output=True, text=True, check=True, timeout=60)
    prefix = str(python.parent.parent)
    assert done.stdout == f"{prefix} {prefix} True {[prefix, prefix]}\n"
