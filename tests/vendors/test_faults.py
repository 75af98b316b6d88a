"""A faulty hook of a plug-in affects its own vendor only."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading

import anyaccel as aa
import psutil
import pytest
from anyaccel.hookspecs import HOOKS
from anyaccel.inventory.observe import stats
from anyaccel.vendors import close
from anyaccel.vendors.process import find_process, vendor_process
from lengths import length
from waiting import PATIENCE, until


@contextlib.contextmanager
def signalled(number, begun):
    """Send this process a signal, once a file says that the call in the context has begun."""

    def send():
        until(begun.exists, "the call")
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()


BAD = """
import os
import resource
import signal
from anyaccel.plugin import *

def misbehave(hook):
    if hook == {hook!r}:
        {fault}

@hookimpl
def anyaccel_info():
    misbehave("anyaccel_info")
    return PluginInfo(vendor="bad", resource="BPU", kind="bpu", env_vars=("BAD_VISIBLE",))
@hookimpl
def anyaccel_detect(ctx):
    misbehave("anyaccel_detect")
    return Detected(devices=(Device(id="b0", index=0, model="Bad", nodes=("/dev/bad0",)),))
@hookimpl
def anyaccel_fractional(device):
    misbehave("anyaccel_fractional")
    return Fractional.SHARED
@hookimpl
def anyaccel_tags(device):
    misbehave("anyaccel_tags")
    return ("Bad-1",)
@hookimpl
def anyaccel_env(devices, ctx):
    misbehave("anyaccel_env")
    return EnvEdits(set={{"BAD_VISIBLE": ",".join(str(device.index) for device in devices)}})
@hookimpl
def anyaccel_visible(environ, devices):
    misbehave("anyaccel_visible")
    return None
@hookimpl
def anyaccel_validate(request, devices):
    misbehave("anyaccel_validate")
    return None
@hookimpl
def anyaccel_stats(devices, ctx):
    misbehave("anyaccel_stats")
    return {{device.id: Stats() for device in devices}}
@hookimpl
def anyaccel_container(devices):
    misbehave("anyaccel_container")
    return ContainerEdits()
@hookimpl
def anyaccel_diagnose(ctx):
    misbehave("anyaccel_diagnose")
    return ()
@hookimpl
def anyaccel_products():
    misbehave("anyaccel_products")
    return ()
"""
MARK = f"anyaccel-test-stray-{os.getpid()}"
FAULTS = {
    "sleeps": "__import__('time').sleep(1000)",
    "prints": "print('{\"noise\": 1}', flush=True)",
    "exits": "os._exit(3)",
    "crashes": "__import__('ctypes').string_at(0)",
    "forks": f"os.fork() or os.execvp('sleep', ['{MARK}', '1000'])",
    "kills its parent": "os.kill(os.getppid(), signal.SIGKILL)",
    "edits the environment": "os.environ['STRAY'] = '1'; ctx_environ = os.environ",
}
RUN = """
import json, sys, anyaccel as aa
done = aa.run("APU:1", [sys.executable, "-c", "import os; print(os.environ['ACME_VISIBLE'], 'STRAY' in os.environ)"],
              inventory=aa.detect(sys.argv[1], timeout=float(sys.argv[2])), capture_output=True, text=True)
print(json.dumps({"out": done.stdout, "loaded": [name for name in sys.modules if name.startswith("plug_")]}))
"""


INTERPRETER = "__import__('psutil').Process(os.getppid()).ppid()"
"""In a hook: what has forked the parent of the vendor's process."""


def kill_processes_of(detect):
    """Detect in processes that are all new, and kill them; return what was detected.

    Other children of this process, such as the interpreter that runs commands for all tests, live on.
    """
    close()
    before = psutil.Process().children(recursive=True)
    inventory = detect()
    children = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert children
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with the one before
            child.kill()
    psutil.wait_procs(children, timeout=PATIENCE)
    return inventory


def strays():
    return [process for process in psutil.process_iter() if MARK in " ".join(_command(process))]


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def run(machine):
    seconds = length("4", "10")
    command = [sys.executable, "-c", RUN, machine, seconds]
    # Against half a minute where it waits for what sleeps for 1000 seconds, and this machine may be busy.
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout)


# Every hook and every fault at least once; each fault in each hook where there is time.
CASES = length(
    [(list(FAULTS)[number % len(FAULTS)], hook) for number, hook in enumerate(HOOKS)],
    [(fault, hook) for fault in FAULTS for hook in HOOKS],
)


@pytest.mark.timeout(300)  # they begin before others: one sleeps for seconds
@pytest.mark.parametrize(("fault", "hook"), CASES)
def test_a_fault_in_a_hook_affects_its_own_vendor_only(fault, hook, install, acme, record):
    install("bad", BAD.format(hook=hook, fault=FAULTS[fault]))
    (acme.parent / "plug_anyaccel_bad.presence.json").write_text('{"resource": "BPU", "paths": ["/sys/class/acme"]}')
    done = run(record({}, {}))
    assert done["out"] == "acme-s0 False\n"
    assert done["loaded"] == []
    until(lambda: strays() == [], "the end of the strays")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("os.kill(os.getppid(), signal.SIGTERM), signal.pause()", "its process was killed by SIGTERM"),
        ("os.kill(os.getppid(), signal.SIGKILL), signal.pause()", "its process was killed by SIGKILL"),
        ("os.kill(os.getppid(), signal.SIGINT), signal.pause()", "its process was killed by SIGINT"),
        ("os.killpg(0, signal.SIGTERM), signal.pause()", "its process was killed by SIGTERM"),
        ("os.killpg(os.getpgid(os.getppid()), signal.SIGKILL), signal.pause()", "its process was killed by SIGKILL"),
        ("os.kill(os.getppid(), signal.SIGSTOP)", ""),
    ],
)
def test_a_vendor_that_signals_its_parent_is_alone_in_that(fault, reason, install, acme, record):
    install("bad", BAD.format(hook="anyaccel_detect", fault=fault))
    inventory = aa.detect(record({}), timeout=PATIENCE)
    problem = inventory.report("bad").problem
    assert reason in problem.reason if reason else problem is None
    assert [device.id for device in inventory.devices if device.vendor == "acme"] == ["acme-s0"]
    assert aa.prepare("APU:1", inventory=inventory).environment.values["ACME_VISIBLE"] == "acme-s0"


def test_a_process_ends_whose_parent_is_stopped(install, acme, record):
    before = psutil.Process().children(recursive=True)
    install("bad", BAD.format(hook="anyaccel_detect", fault="os.kill(os.getppid(), signal.SIGSTOP), os._exit(5)"))
    assert "its process ended with exit status 5" in aa.detect(record({})).report("bad").problem.reason
    children = [child for child in psutil.Process().children(recursive=True) if child not in before]
    close()
    psutil.wait_procs(children, timeout=PATIENCE)
    assert [child for child in children if child.is_running()] == []


def test_what_is_printed_is_kept_and_shown(install, acme, record, anyaccel):
    install("bad", BAD.format(hook="anyaccel_detect", fault="print('first line')"))
    done = anyaccel("plugins", "bad", "--machine", record({}))
    assert done.returncode == 0
    assert "first line" in done.stderr
    assert json.loads(anyaccel("--json", "--machine", record({}, name="second")).stdout)["devices"]


def test_a_vendor_is_asked_by_ids_in_one_process(install, acme, record):
    install("bad", BAD.format(hook="", fault="pass"))
    inventory = aa.detect(record({}, {}))
    source = next(report for report in inventory.vendors if report.vendor == "bad")
    assert source.hidden.set == {"BAD_VISIBLE": ""}
    before = {child.pid for child in psutil.Process().children(recursive=True)}  # and some that are about to end
    for _ in range(3):
        assert aa.prepare("bad:1", inventory=inventory).environment.values["BAD_VISIBLE"] == "0"
        assert stats(inventory)[1] == ()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_nothing_is_left_after_close(acme, record):
    before = psutil.Process().children(recursive=True)
    aa.detect(record({}))
    children = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert children
    close()
    psutil.wait_procs(children, timeout=PATIENCE)
    assert [child for child in children if child.is_running()] == []


def test_a_process_that_dies_is_started_again_once_and_then_the_vendor_has_failed(install, acme, record, tmp_path):
    count = tmp_path / "count"
    dies = f"open({str(count)!r}, 'a').write('x'), os._exit(5)"
    install("bad", BAD.format(hook="anyaccel_container", fault=dies))
    inventory = aa.detect(record({}))
    bad = [device for device in inventory.devices if device.vendor == "bad"]
    from anyaccel.vendors.discovery import installed

    vendor = find_process(next(source for source in installed()[0] if source.vendor == "bad"))
    for _ in range(3):
        with pytest.raises(aa.PluginError, match="anyaccel_container: its process ended with exit status 5"):
            vendor.container(bad)
    assert count.read_text() == "xx"
    aa.detect(record({}, name="again"))
    with pytest.raises(aa.PluginError):
        vendor.container(bad)
    assert count.read_text() == "xxxx"


def test_how_a_process_ended_is_heard_also_when_its_fork_server_gets_no_processor(install, acme, record):
    stops = f"os.kill({INTERPRETER}, signal.SIGSTOP), os._exit(5)"
    install("bad", BAD.format(hook="anyaccel_detect", fault=stops))
    ended = threading.Event()

    def let_it_go_on():
        done = False
        while not done:
            done = ended.wait(0.3)
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=let_it_go_on)
    thread.start()
    try:
        inventory = aa.detect(record({}))
    finally:
        ended.set()
        thread.join()
    assert "its process ended with exit status 5" in inventory.report("bad").problem.reason


LATE = """
import faulthandler, time

def late(*_):
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass
    faulthandler.dump_traceback(2)
    os._exit(1)

faulthandler.disable()
signal.signal(signal.SIGABRT, late)
"""


def hangs(machine):
    """Return the problem of a vendor that sleeps, once the hook has begun."""
    for seconds in (1, 10, 60):
        reason = aa.detect(machine, timeout=seconds).report("bad").problem.reason
        assert f"it did not answer within {seconds} s" in reason
        if "(it was at " in reason:
            break
    return reason


@pytest.mark.timeout(300)  # it begins before others
def test_where_a_process_hangs_is_heard_also_when_it_has_to_wait_for_a_processor(install, record):
    """The process runs for a second before it prints its traceback."""
    install("bad", BAD.format(hook="anyaccel_detect", fault=FAULTS["sleeps"]) + LATE)
    assert "(it was at " in hangs(record({}))


def test_a_process_that_was_killed_from_outside_is_no_fault(acme, record):
    inventory = kill_processes_of(lambda: aa.detect(record({}, {})))
    assert aa.prepare("APU:1", inventory=inventory).environment.values["ACME_VISIBLE"] == "acme-s0"


def test_a_fork_of_the_caller_uses_processes_of_its_own(acme, record):
    inventory = aa.detect(record({}, {}))
    pid = os.fork()
    if pid == 0:
        try:
            good = aa.prepare("APU:1", inventory=inventory).environment.values["ACME_VISIBLE"] == "acme-s0"
            close()
            os._exit(0 if good else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert aa.prepare("APU:2", inventory=inventory).environment.values["ACME_VISIBLE"] == "acme-s0,acme-s1"


def test_a_wrong_name_in_the_list_of_plugins_is_an_error(acme, anyaccel):
    done = anyaccel("--machine", "host", env={"ANYACCEL_PLUGINS": "acm"})
    assert done.returncode == 2
    assert "ANYACCEL_PLUGINS must name vendors whose plug-ins are installed (got 'acm'; " in done.stderr
    assert "did you mean acme" in done.stderr


EVERYTHING = """
import json, sys, anyaccel as aa
from anyaccel.cli import main
machine, loaded = sys.argv[1], {}

def note(what):
    loaded[what] = sorted(name for name in sys.modules if name.startswith(("plug_", "anyaccel_")))

aa.detect(machine)
note("detect")
aa.run("APU:1", ["true"], machine=machine)
note("run")
with aa.Pool("APU:1", machine=machine) as pool:
    inside = pool.submit(eval, "sorted(__import__('sys').modules)").result()
    loaded["a worker"] = [name for name in inside if name.startswith(("plug_", "anyaccel_"))]
note("Pool")
aa.why("APU:9", machine=machine)
note("why")
sys.stdout = open("/dev/null", "w")
main(["env", "APU:1", "--machine", machine])
note("env")
print(json.dumps(loaded), file=sys.__stdout__)
"""


def test_no_plugin_is_imported_by_what_schedules(acme, record):
    done = subprocess.run(
        [sys.executable, "-c", EVERYTHING, record({}, {})], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {what: [] for what in ("detect", "run", "a worker", "Pool", "why", "env")}


def test_a_plugin_that_prints_without_end_delays_no_other_vendor(install, acme, record):
    install("bad", BAD.format(hook="anyaccel_detect", fault=f"os.system('exec yes {MARK}')"))
    machine = record({})
    for seconds in (3, 30):  # so that the other one has answered by then
        inventory = aa.detect(machine, timeout=seconds)
        assert f"it did not answer within {seconds} s" in inventory.report("bad").problem.reason
        if inventory.report("acme").problem is None:
            break
    assert aa.prepare("APU:1", inventory=inventory).environment.values["ACME_VISIBLE"] == "acme-s0"
    close()
    until(lambda: strays() == [], "the end of the strays")


def test_an_interrupted_call_leaves_no_answer_for_the_next(install, acme, record, tmp_path):
    begun = tmp_path / "begun"
    install(
        "bad", BAD.format(hook="anyaccel_stats", fault=f"open({str(begun)!r}, 'w'), __import__('time').sleep(1000)")
    )
    inventory = aa.detect(record({}))

    with pytest.raises(KeyboardInterrupt), signalled(signal.SIGINT, begun):
        stats(inventory, timeout=PATIENCE)
    assert aa.prepare("bad:1", inventory=inventory).environment.values["BAD_VISIBLE"] == "0"


def test_a_second_interrupt_while_the_process_is_ended_changes_nothing(install, acme, record, tmp_path):
    begun = tmp_path / "begun"
    write = f"open({str(begun)!r} + '-', 'w').write(str({INTERPRETER}))"
    fault = f"{write}, os.rename({str(begun)!r} + '-', {str(begun)!r}), __import__('time').sleep(1000)"
    install("bad", BAD.format(hook="anyaccel_stats", fault=fault))
    inventory = aa.detect(record({}))
    seen = []

    def interrupt(*_):
        seen.append(1)
        if len(seen) == 1:
            os.kill(int(begun.read_text()), signal.SIGSTOP)  # the fork server cannot end the process now
        raise KeyboardInterrupt

    def go_on():
        until(begun.exists, "the call")
        while len(seen) < 2:
            os.kill(os.getpid(), signal.SIGUSR1)
            threading.Event().wait(0.01)
        os.kill(int(begun.read_text()), signal.SIGCONT)

    former = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            stats(inventory, timeout=PATIENCE)
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert len(seen) == 2
    assert aa.prepare("bad:1", inventory=inventory).environment.values["BAD_VISIBLE"] == "0"


def test_a_process_without_a_caller_ends(acme, record):
    devices = aa.detect(record({})).devices
    process = vendor_process("acme")
    close()  # as another thread may do, between the choice of the process and the call
    process.container(devices)
    gone = process.running.pid
    assert psutil.pid_exists(gone)
    del process
    until(lambda: not psutil.pid_exists(gone), "the end of the process")


PAIR = """
import os, time
from anyaccel.plugin import *

@hookimpl
def anyaccel_info():
    return PluginInfo(vendor="pair", resource="PAIR", kind="pair", env_vars=("PAIR_VISIBLE",))

@hookimpl
def anyaccel_detect(ctx):
    return Detected(devices=tuple(Device(id=f"p{index}", index=index, model="Pair") for index in range(2)))

@hookimpl
def anyaccel_fractional(device):
    return Fractional.NO

@hookimpl
def anyaccel_tags(device):
    return ()

@hookimpl
def anyaccel_env(devices):
    names = ",".join(device.raw_id for device in devices)
    if names == "p0":
        open("BEGUN", "w").close()
        while not os.path.exists("GO"):
            time.sleep(0.001)
    return EnvEdits(set={"PAIR_VISIBLE": names})
"""


def test_a_handler_of_a_signal_does_not_get_the_answer_of_the_call_that_it_interrupts(install, record, tmp_path):
    begun, go = tmp_path / "begun", tmp_path / "go"
    install("pair", PAIR.replace("BEGUN", str(begun)).replace("GO", str(go)))
    inventory = aa.detect(record({}))
    told = []

    def prepare(name):
        return aa.prepare(name, inventory=inventory).environment.values["PAIR_VISIBLE"]

    def handle(*_):
        go.touch()
        try:
            told.append(prepare("pair/1"))
        except aa.AnyaccelError as error:
            told.append(str(error))

    former = signal.signal(signal.SIGUSR1, handle)
    try:
        with signalled(signal.SIGUSR1, begun):
            assert prepare("pair/0") == "p0"
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert "a handler of a signal interrupts a call of its process" in told[0]
    assert prepare("pair/1") == "p1"


def test_a_hook_that_forks_and_returns_twice_answers_once(install, acme, record):
    install("bad", BAD.format(hook="anyaccel_stats", fault="os.fork()"))
    inventory = aa.detect(record({}))
    for _ in range(3):
        assert set(stats(inventory)[0]) == {"acme-s0", "b0"}
        assert aa.prepare("bad:1", inventory=inventory).environment.values["BAD_VISIBLE"] == "0"


def test_the_copy_of_a_process_that_a_hook_forked_calls_no_further_hook(install, acme, record, tmp_path):
    log = tmp_path / "callers"
    text = BAD.format(hook="anyaccel_detect", fault="os.fork()")
    told = f"open({str(log)!r}, 'a').write(f'{{os.getpid()}}\\n')"
    install("bad", text.replace('misbehave("anyaccel_tags")', told))
    machine = record({})
    for _ in range(3):
        assert {device.id for device in aa.detect(machine).devices} == {"acme-s0", "b0"}
    # One call for each detection.
    callers = log.read_text().split()
    assert len(callers) <= 3, callers


def test_threads_that_look_at_different_machines_get_their_own_masks(acme, record):
    machines = [record({"serial": name}, name=name) for name in ("one", "two")]
    wrong = []

    def look(machine, serial):
        for _ in range(30):
            inventory = aa.detect(machine)
            value = aa.prepare("APU:1", inventory=inventory).environment.values["ACME_VISIBLE"]
            wrong.extend([value] * (value != f"acme-{serial}"))

    threads = [threading.Thread(target=look, args=pair) for pair in zip(machines, ("one", "two"), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_when_the_interpreter_is_killed_all_vendors_are_started_again(install, acme, record):
    install("bad", BAD.format(hook="", fault="pass"))
    machine = record({})
    kill_processes_of(lambda: aa.detect(machine))
    for _ in range(2):
        inventory = aa.detect(machine)
        assert [report.problem for report in inventory.vendors] == [None, None]


@pytest.mark.parametrize("value", ["'\\ud800'", "'x' * 200_000", "'a\\0b'"])
def test_a_value_that_the_kernel_would_not_take_costs_its_vendor(value, install, acme, record):
    source = BAD.format(hook="", fault="pass").replace('",".join(str(device.index) for device in devices)', value)
    install("bad", source)
    inventory = aa.detect(record({}))
    assert "anyaccel_env" in str(inventory.report("bad").problem)
    assert aa.prepare("APU:1", inventory=inventory).environment.values["ACME_VISIBLE"] == "acme-s0"


def test_without_descriptors_the_vendors_fail_and_come_back(acme, record):
    machine = record({})
    aa.detect(machine)
    close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        os.close(taken.pop())
        report = aa.detect(machine).report("acme")
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "cannot be started: [Errno 24] Too many open files" in report.problem.reason
    assert aa.detect(machine).report("acme").problem is None


SERVER_IS = f"""raise ValueError(open("/proc/%d/cmdline" % {INTERPRETER}).read().replace("\\0", " "))"""


def test_a_command_forks_what_forks_its_vendors_and_a_program_starts_a_fresh_interpreter(install, record):
    install("bad", BAD.format(hook="anyaccel_detect", fault=SERVER_IS))
    machine = record({})
    (program,) = [report.problem.reason for report in aa.detect(machine).vendors]
    assert "gc.disable()" in program
    # An interpreter of its own: a command that the tests fork would show how theirs was started.
    command = [sys.executable, "-m", "anyaccel", "plugins", "bad", "--machine", machine]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert "gc.disable()" not in done.stdout + done.stderr
    assert "plugins bad --machine" in done.stdout + done.stderr


def test_a_vendor_that_is_too_late_leaves_no_core(install, record, tmp_path, monkeypatch):
    with open("/proc/sys/kernel/core_pattern") as file:
        if file.read(1) in "|/":
            pytest.skip("cores are not written where a process works on this machine")
    monkeypatch.chdir(tmp_path)
    close()
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        install("bad", BAD.format(hook="anyaccel_detect", fault=FAULTS["sleeps"]))
        assert "(it was at " in hangs(record({}))
        close()
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("core")] == []


def test_a_module_path_that_grows_again_and_again_keeps_no_descriptors(acme, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    counts = []
    for number in range(12):
        sys.path.append(str(tmp_path / str(number)))  # as a cell of a notebook does at each run
        assert aa.detect(machine="sim:A1:1").devices
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] == counts[5]
