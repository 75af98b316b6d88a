"""Devices for this very process: what it sees, who else gets them, and when they go back."""

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import anyaccel
import pytest
from anyaccel.launcher.use import find_loaded, get_process_lease
from anyaccel.ledger import Ledger

MACHINE = "sim:A1:2"


@pytest.fixture
def library(tmp_path):
    """A shared library that stands for a vendor's runtime."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler is installed here")
    source = tmp_path / "runtime.c"
    source.write_text("int acme_start(void) { return 0; }\n")
    path = tmp_path / "libacmert.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    return str(path)


@pytest.fixture
def acme_runtime(install):
    """Acme, which says what its runtime library is called."""
    acme = (Path(__file__).parents[1] / "vendors" / "acme.py").read_text()
    return install("acme", acme.replace('kind="apu",', 'kind="apu", runtimes=("libacmert.so",),', 1))


def in_a_process(code, *arguments, **options):
    """Run a program of its own, in which loading a library does no harm."""
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def test_this_process_sees_what_it_holds_and_others_do_not_get_it(acme):
    before = dict(os.environ)
    with anyaccel.use("APU:1", machine=MACHINE, note="here") as devices:
        (device,) = devices.devices
        assert os.environ["ACME_VISIBLE"] == device.raw_id
        assert anyaccel.current().devices[0].id == device.id
        child = subprocess.run(["printenv", "ACME_VISIBLE"], capture_output=True, text=True, check=True)
        assert child.stdout.strip() == device.raw_id
        (record,) = Ledger.open().leases()
        assert (record.id, record.note) == (devices.id, "here")
        environ = {name: value for name, value in before.items() if name != "ANYACCEL_MACHINE"}
        other = subprocess.run(
            [sys.executable, "-m", "anyaccel", "--machine", MACHINE, "run", "APU:2", "--no-wait", "--", "true"],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert other.returncode == 4
        assert "here" in other.stderr
        assert devices.id in repr(devices)
        assert "<td>acme/" in devices._repr_html_()
    assert dict(os.environ) == before
    assert Ledger.open().leases() == ()


def test_other_devices_are_refused_until_the_first_are_released(acme):
    first = anyaccel.use("APU:1", machine=MACHINE)
    with pytest.raises(anyaccel.UsageError, match=r"this process uses .* already") as told:
        anyaccel.use("APU:2", machine=MACHINE)
    assert "release that first" in told.value.hint
    first.release()
    first.release()
    anyaccel.use("APU:2", machine=MACHINE).release()


def test_the_same_request_once_more_changes_nothing(acme):
    first = anyaccel.use("APU:1", machine=MACHINE)
    assert anyaccel.use("APU:1", machine=MACHINE) is first
    again = anyaccel.use("APU:1", machine=MACHINE)
    with pytest.raises(anyaccel.UsageError, match=r"this process uses .* already"), again:
        pytest.fail("the end of the statement would take the devices from the first caller")
    assert os.environ["ACME_VISIBLE"] == first.devices[0].raw_id
    first.release()
    assert Ledger.open().leases() == ()


def test_a_with_statement_shares_its_devices_with_no_other_call(acme):
    already = pytest.raises(anyaccel.UsageError, match=r"this process uses .* already")
    with anyaccel.use("APU:1", machine=MACHINE), already:
        anyaccel.use("APU:1", machine=MACHINE)
    assert Ledger.open().leases() == ()


@pytest.mark.parametrize("function", [anyaccel.use, anyaccel.acquire])
def test_a_released_lease_begins_no_with_statement(acme, function):
    devices = function("APU:1", machine=MACHINE)
    devices.release()
    with pytest.raises(anyaccel.UsageError, match="the lease of APU:1 was released"), devices:
        pytest.fail("its body would run without the devices")


def test_what_nothing_refers_to_is_held_until_it_is_released(acme):
    def begin():
        devices = anyaccel.use("APU:1", machine=MACHINE)
        return devices.devices[0].raw_id

    seen = begin()
    gc.collect()
    assert os.environ["ACME_VISIBLE"] == seen
    anyaccel.use("APU:1", machine=MACHINE).release()
    assert "ACME_VISIBLE" not in os.environ
    assert Ledger.open().leases() == ()


def test_what_was_started_keeps_the_devices_after_they_are_released(acme):
    devices = anyaccel.use("APU:1", machine=MACHINE)
    with devices.popen(["cat"], stdin=subprocess.PIPE) as running:
        devices.release()
        assert [record.id for record in Ledger.open().leases()] == [devices.id]
        running.stdin.close()
        running.wait(60)
    assert Ledger.open().leases() == ()


def test_a_statement_of_its_own_lasts_until_the_process_has_ended(acme):
    ran = in_a_process(
        f"""
        import anyaccel, gc, os
        anyaccel.use("APU:1", machine={MACHINE!r})
        anyaccel.use(
            "APU:1",
            machine={MACHINE!r},
        )
        gc.collect()
        print(os.environ["ACME_VISIBLE"], len(anyaccel.current().devices))
        try:
            anyaccel.use("APU:2", machine={MACHINE!r})
        except anyaccel.UsageError as error:
            print(*error.__notes__)
        """
    )
    assert ran.stderr == ""
    seen, way_out = ran.stdout.splitlines()
    assert seen.endswith(" 1")
    assert "release that first" in way_out
    assert Ledger.open().leases() == ()


def test_a_statement_at_the_prompt_lasts_when_others_are_shown(acme):
    lines = f"import anyaccel, os\nanyaccel.use('APU:1', machine={MACHINE!r})\n1 + 1\nos.environ['ACME_VISIBLE']\n"
    ran = subprocess.run(
        [sys.executable, "-q", "-i"], input=lines, capture_output=True, text=True, timeout=60, check=True
    )
    assert "<ProcessLease " in ran.stdout
    assert "Warning" not in ran.stderr
    assert "Error" not in ran.stderr


def test_a_variable_that_was_changed_meanwhile_is_left_alone(acme, monkeypatch):
    monkeypatch.setenv("ACME_VISIBLE", "")
    monkeypatch.delenv("ACME_VISIBLE")  # so that it is gone again after the test
    monkeypatch.setenv("ACME_ORDER", "mine")
    devices = anyaccel.use("APU:1", machine=MACHINE)
    outer = devices.outer_environ()
    assert "ACME_VISIBLE" not in outer
    monkeypatch.setenv("ACME_VISIBLE", "changed")
    assert devices.outer_environ() == outer | {"ACME_VISIBLE": "changed"}
    devices.release()
    assert os.environ["ACME_VISIBLE"] == "changed"
    assert os.environ["ACME_ORDER"] == "mine"


def test_a_request_that_cannot_be_served_changes_nothing(acme):
    before = dict(os.environ)
    with pytest.raises(anyaccel.NeverFitsError):
        anyaccel.use("APU:9", machine=MACHINE)
    with anyaccel.acquire("APU:2", machine=MACHINE), pytest.raises(anyaccel.NotFreeError):
        anyaccel.use("APU:1", machine=MACHINE, wait=0)
    assert dict(os.environ) == before


def test_a_child_of_a_fork_gives_nothing_back(acme):
    devices = anyaccel.use("APU:1", machine=MACHINE)
    child = os.fork()
    if not child:
        devices.release()
        os._exit(0 if "ACME_VISIBLE" in os.environ else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [record.id for record in Ledger.open().leases()] == [devices.id]
    devices.release()


def test_a_child_of_a_fork_may_use_a_part_of_what_it_inherits(acme):
    devices = anyaccel.use("APU:2", machine=MACHINE)
    child = os.fork()
    if not child:
        try:
            with anyaccel.use("APU:1", machine=MACHINE) as part:
                inside = len(anyaccel.current().devices) == 1 and {part.devices[0].id} < {d.id for d in devices.devices}
            os._exit(0 if inside and len(anyaccel.current().devices) == 2 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(anyaccel.current().devices) == 2
    devices.release()


def test_a_thread_that_waits_keeps_others_from_waiting_for_it(acme):
    errors = []
    begun = threading.Event()

    def wait():
        try:
            anyaccel.use("APU:1", machine=MACHINE, wait=60, on_wait=lambda *_: begun.set())
        except anyaccel.AnyaccelError as error:
            errors.append(error)

    with anyaccel.acquire("APU:2", machine=MACHINE):
        thread = threading.Thread(target=wait)
        thread.start()
        assert begun.wait(60)
        with pytest.raises(anyaccel.UsageError, match="another thread of this process is about to use devices"):
            anyaccel.use("APU:1", machine=MACHINE)
    thread.join(60)
    assert errors == []
    get_process_lease().release()


def test_what_is_for_processes_that_are_started_is_refused(acme):
    for name, value in (("memory", "1GiB"), ("confined", True), ("environ", {"HOME": "/"})):
        with pytest.raises(
            anyaccel.UsageError,
            match=f"{name} applies to a process that is about to start; this process runs already",
        ):
            anyaccel.use("APU:1", machine=MACHINE, **{name: value})
    assert Ledger.open().leases() == ()


def test_a_pool_that_is_made_later_hands_out_what_this_process_uses(acme):
    with anyaccel.Pool("APU:1", machine=MACHINE) as before:
        assert before.submit(abs, -1).result(timeout=60) == 1
        with anyaccel.use("APU:2", machine=MACHINE), anyaccel.Pool("APU:1", machine=MACHINE) as inside:
            assert inside.submit(abs, -2).result(timeout=60) == 2
        assert before.submit(abs, -3).result(timeout=60) == 3


def test_a_pool_hands_out_nothing_that_this_process_has_given_back(acme):
    with anyaccel.use("APU:2", machine=MACHINE):
        pool = anyaccel.Pool("APU:1", machine=MACHINE)
        assert pool.submit(abs, -1).result(timeout=60) == 1
    with pytest.raises(anyaccel.AnyaccelError, match="has given back what it used when this pool was made"):
        pool.submit(abs, -2).result(timeout=60)
    pool.shutdown()


def test_frameworks_of_this_process_are_capped(acme, tmp_path):
    (tmp_path / "torch.py").write_text(
        """
class _Backend:
    fractions = []
    def __init__(self):
        self._lazy_call = lambda call: call()
        self.set_per_process_memory_fraction = lambda fraction, device: self.fractions.append(fraction)
    def device_count(self): return 1
device = _Backend()
"""
    )
    program = f"""
        import anyaccel, sys
        sys.path.insert(0, {str(tmp_path)!r})
        devices = anyaccel.use("APU:0.5", machine={MACHINE!r}, cap=True)
        import torch
        print(torch.device.fractions)
        """
    assert in_a_process(program).stdout == "[0.5]\n"


def test_this_process_runs_near_its_devices_as_long_as_it_uses_them(acme, monkeypatch):
    before = os.sched_getaffinity(0)
    one = min(before)
    monkeypatch.setattr("anyaccel.probe.processors.by_node", lambda: {0: (one,), 1: (one,)})
    with anyaccel.use("APU:1", machine=MACHINE, bind=True):
        assert anyaccel.current().processors == (one,)
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == before


def test_the_devices_are_free_once_the_process_has_ended(acme):
    ran = in_a_process(f"import anyaccel; devices = anyaccel.use('APU:2', machine={MACHINE!r}); print(devices.id)")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    anyaccel.acquire("APU:2", machine=MACHINE, wait=0).release()


def test_a_runtime_that_is_loaded_already_is_refused(acme_runtime, library):
    ran = in_a_process(
        f"""
        import ctypes, sys, anyaccel
        ctypes.CDLL(sys.argv[1])
        try:
            anyaccel.use("APU:1", machine={MACHINE!r})
        except anyaccel.AlreadyLoadedError as error:
            print(error, "|", error.hint)
        """,
        library,
    )
    assert "libacmert.so.1 of acme is loaded in this process already" in ran.stdout, ran.stderr
    assert "and reads ACME_VISIBLE once" in ran.stdout
    assert "restart the kernel" in ran.stdout
    assert Ledger.open().leases() == ()


def test_a_runtime_that_was_loaded_meanwhile_is_told_when_devices_are_given_back(acme_runtime, library):
    released = in_a_process(
        f"""
        import ctypes, sys, anyaccel
        devices = anyaccel.use("APU:1", machine={MACHINE!r})
        ctypes.CDLL(sys.argv[1])
        devices.release()
        """,
        library,
    )
    assert "<string>:5: RuntimeWarning: " in released.stderr
    assert "keeps its part of them until the process exits" in released.stderr


def test_a_library_is_found_by_the_beginning_of_its_name(library):
    assert find_loaded(()) == ""
    assert find_loaded(("libnosuch.so",)) == ""
    handle = ctypes.CDLL(library)
    assert handle.acme_start() == 0
    assert find_loaded(("libacmert.so",)) == library
