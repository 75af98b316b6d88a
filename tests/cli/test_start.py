"""How the command line starts and ends: what it does not import, and what it does not leave undone."""

import os
import signal
import subprocess
import sys

import preloaded
import pytest
from anyaccel.cli import status
from anyaccel.cli.parser import Defaults, add_common, parse
from installed import ACME

SLOW = {
    "import anyaccel": {"collections", "enum", "re", "typing"},
    "--version": {"collections", "contextlib", "enum", "re", "typing"},
    "": {"argparse", "selectors", "socket", "subprocess", "threading", "typing", "anyaccel.vendors.guarded"},
    "status --declare NPU=1": {"anyaccel.launcher.hold", "anyaccel.ledger.journal"},
    "select GPU": set(),
    "env GPU": set(),
    "run GPU -- true": {"logging"},
}
"""What a command must not import besides what none may."""
NEVER = {"dataclasses", "datetime", "importlib.metadata", "inspect", "pluggy", "random", "shutil", "unicodedata"}
PROGRAM = "import sys; from anyaccel.cli import program; sys.argv[1:] = {!r}; program()"


def imported(code):
    """Every module that an interpreter imports on its own, up to its end or to the command that takes its place."""
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("what", SLOW)
def test_a_command_imports_nothing_slow_that_it_does_not_need(what):
    arguments = what.replace("GPU", "GPU --declare GPU=1").split()
    code = what if what.startswith("import") else PROGRAM.format(arguments)
    # What a site's own start-up brings in, such as a .pth file, is nothing that we could keep out; nor is what Python's
    # parser of arguments needs for its messages, from 3.14 on dataclasses and inspect.
    own = imported("pass" if SLOW[what] else "import argparse; argparse.HelpFormatter('', width=80)")
    assert (imported(code) - own) & (SLOW[what] | NEVER) == set()


def test_a_process_that_detects_imports_no_typing(install, record):
    install("acme", ACME)
    detects = f"import anyaccel; assert anyaccel.detect({record({})!r}).report('acme').state.value == 'ok'"
    assert "typing" not in imported(detects) - imported("pass")


BEGINS = """
import os, sys
def start(*_, **__):
    print(*sys.modules)
    sys.stdout.flush()
    os._exit(0)
os.posix_spawn = os.fork = start
sys.argv = ["anyaccel", "select", "--machine", "nowhere", "GPU"]
import anyaccel
{}
"""
BEFORE_IT_BEGINS = {"argparse", "collections", "enum", "json", "re", "socket", "subprocess", "threading", "typing"}


@pytest.mark.parametrize("call", ["anyaccel.detect('nowhere')", "from anyaccel.cli import program; program()"])
def test_what_forks_vendors_processes_starts_before_what_takes_as_long_is_imported(call):
    command = [sys.executable, "-I", "-c", BEGINS.format(call)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split()) - imported("pass")
    assert loaded & (NEVER | BEFORE_IT_BEGINS) == set()


def test_a_command_without_devices_starts_no_process():
    code = "import os; os.fork = os.posix_spawn = None\n" + PROGRAM.format(["config"])
    environ = {**os.environ, "ANYACCEL_MACHINE": "sim:H100:2"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_vendors_process_imports_nothing_slow_that_only_few_hooks_need():
    loaded = imported(
        "import anyaccel.forkserver.server, anyaccel.vendors.guarded, anyaccel.vendors.tasks, anyaccel.kit"
    )
    loaded -= imported("import ctypes")  # with threading from Python 3.14 on
    slow = {"datetime", "difflib", "selectors", "socket", "subprocess", "threading", "tomllib", "traceback", "uuid"}
    assert loaded & (slow | NEVER - {"inspect", "pluggy"}) == set()


def test_without_arguments_all_is_as_a_parser_has_it():
    args = Defaults()
    add_common(args)
    status.add_arguments(args)
    assert vars(args) == vars(parse("status", status, []))


@pytest.fixture(autouse=True)
def usual(monkeypatch):
    """Nothing that is set here to look into Python."""
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)


def ended(before, *arguments, **options):
    code = f"import sys\n{before}\n{PROGRAM.format(list(arguments))}"
    return subprocess.run([sys.executable, "-c", code], text=True, check=False, timeout=60, **options)


LAST = "last = open(1, 'w', closefd=False); last.write('at the end\\n')"
"""What an interpreter writes when it takes itself apart, and not before."""


def test_the_process_ends_without_being_taken_apart():
    done = ended(LAST, "plugins", capture_output=True, env={"ANYACCEL_PLUGINS": ","})
    assert "at the end" not in done.stdout
    assert (done.returncode, done.stdout != "") == (0, True)


@pytest.mark.parametrize(
    "before",
    [
        "import atexit; atexit.register(print, 'at the end')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.5), print('at the end'))).start()",
        f"{LAST}; sys.setprofile(lambda *_: None)",
    ],
    ids=["a function at exit", "a thread", "a profiler"],
)
def test_what_a_caller_waits_for_is_done(before):
    done = ended(before, "nonsense", capture_output=True)
    assert done.stdout == "at the end\n"
    assert done.returncode == 2


def test_what_others_have_printed_is_written():
    done = ended("sys.stdout.write('before'); sys.stderr.write('too')", "nonsense", capture_output=True)
    assert done.stdout == "before"
    assert done.stderr.startswith("tooanyaccel: there is no command 'nonsense'")
    assert done.returncode == 2


def test_what_cannot_be_written_at_the_end_is_told():
    with open("/dev/full", "w") as full:
        done = ended("sys.stdout.write('before')", "nonsense", stdout=full, stderr=subprocess.PIPE)
    assert "No space left on device" in done.stderr
    assert done.returncode == 120  # as Python says it


WAITS = """
def wait():
    import os, time
    while not os.path.exists({path!r}):
        time.sleep(0.01)
"""
TELLS = """
class Tells:
    def find_spec(name, *_):
        if name == "{module}":
            open({path!r}, "w").close()
sys.meta_path.insert(0, Tells)
"""


@pytest.mark.parametrize(
    ("command", "module"),  # the last of the modules
    [([], "anyaccel.cli.table"), (["run", "APU:1", "--", "true"], "ctypes")],
    ids=["status", "run"],
)
def test_what_a_command_needs_after_detection_is_imported_while_the_vendors_answer(
    install, record, tmp_path, command, module
):
    path = str(tmp_path / "imported")
    detect = "def anyaccel_detect(ctx: ProbeContext) -> Detected | None:\n"
    assert detect in ACME
    install("acme", ACME.replace(detect, detect + "    wait()\n") + WAITS.format(path=path))
    common = ["--machine", record({}), "--probe-timeout", "300"]
    done = ended(TELLS.format(path=path, module=module), *command[:1], *common, *command[1:], capture_output=True)
    assert (done.returncode, "did not answer" in done.stderr) == (0, False)


MARKED = f"""
import sys; sys.path.append({os.path.dirname(preloaded.__file__)!r})
import preloaded, resource
server = preloaded._server()._process.pid
before = resource.prlimit(server, 10)
most = resource.getrlimit(10)[1]  # a mark of its own, or none
resource.setrlimit(10, (4550161745783554047 if most == resource.RLIM_INFINITY else most - 1,) * 2)
assert preloaded.run(["--version"]).returncode == 0
assert resource.prlimit(server, 10) == before
preloaded.stop()
"""


def test_the_interpreter_that_forks_commands_for_tests_gets_no_mark_and_its_end_is_told():
    subprocess.run([sys.executable, "-c", MARKED], check=True)
    server = preloaded._server()
    server._process.kill()
    with pytest.raises(RuntimeError, match=f"ended: exit status {-signal.SIGKILL}"):
        server.ask({})
    assert preloaded._server().ask({}) == 0


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test may run where a shell has it ignored
class Interrupt:
    def find_spec(self, name, *_):
        if name == {!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["env", "GPU:1", "--declare", "GPU=1"]
from anyaccel.cli import program
program()
"""


@pytest.mark.parametrize(
    "module",
    ["anyaccel.forkserver.start", "anyaccel.cli.output", "anyaccel.cli.parser", "anyaccel.cli.env", "anyaccel.shell"],
)
def test_ctrl_c_at_any_import_ends_a_command_by_the_signal_without_a_word(module):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(module)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_command_with_threads_and_exit_handlers_finishes_them_and_ends_by_the_signal(tmp_path):
    """As where an engine runs in it; with ``-m``, the interpreter itself would end with status 1."""
    (tmp_path / "interrupted.py").write_text(
        "import atexit, threading, time\n"
        "atexit.register(print, 'handler')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        + INTERRUPTED.format("anyaccel.cli.env")
    )
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "thread\nhandler\n", "")


def test_an_interrupted_command_ends_the_loop_of_a_shell():
    # A shell goes on after a command that exits with 130: it has dealt with the interrupt itself.
    loop = 'for each in 1 2 3; do echo begun; "$@"; done; echo after'
    words = [
        "bash",
        "-c",
        loop,
        "bash",
        sys.executable,
        "-c",
        INTERRUPTED.format("anyaccel.cli.env").replace("os.getpid(), ", "0, "),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, start_new_session=True)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "begun\n")
