"""Leases on behalf of processes that another program starts: they outlive the program that took them."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.cli.doctor import diagnose_leases
from anyaccel.ledger import Ledger, entries
from anyaccel.linux import groups

pytestmark = pytest.mark.needs("nvidia", "tpu")
MACHINE = "sim:H100:2"
HIERARCHY = "/sys/fs/cgroup" if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else "/sys/fs/cgroup/unified"


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("ANYACCEL_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def inventory():
    return aa.detect(MACHINE)


@pytest.fixture
def group():
    """A control group with one process, and the function that ends the process."""
    path = Path(HIERARCHY, f"anyaccel-test-{os.getpid()}")
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    process = subprocess.Popen(["sleep", "600"])
    try:
        try:
            (path / "cgroup.procs").write_text(str(process.pid))
        except OSError as error:
            pytest.skip(f"no process can be moved here: {error}")

        def end():
            process.kill()
            process.wait()

        yield f"/{path.name}", end
    finally:
        process.kill()
        process.wait()
        path.rmdir()


@pytest.fixture
def later(monkeypatch):
    """Let the tenures of this process have begun some seconds ago."""
    now = entries.process.boot_seconds

    def later(seconds):
        monkeypatch.setattr(entries.process, "boot_seconds", lambda: now() + seconds)

    return later


def run(code, **options):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **options)


def free(inventory):
    """How many devices a request would get now."""
    for count in (2, 1):
        try:
            aa.acquire(f"GPU:{count}", inventory=inventory, wait=0).release()
        except aa.NotFreeError:
            continue
        return count
    return 0


TAKE = f"""
import anyaccel, os, signal
anyaccel.acquire_on_behalf("GPU:1", "pod 7", seconds=600, machine="{MACHINE}", note="pod train")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_outlives_a_taker_that_is_killed(inventory):
    assert run(TAKE).returncode == -9
    assert free(inventory) == 1
    (record,) = aa.leases(inventory)
    assert (record.state, record.key, record.note, record.pid) == ("on behalf", "pod 7", "pod train", 0)
    # Another process of the user finds it by its key, instead of taking a second device.
    again = aa.acquire_on_behalf("GPU:1", "pod 7", seconds=600, inventory=inventory)
    assert again.id == record.id
    assert [device.id for device in again.devices] == [record.device]
    again.release()
    again.release()
    assert free(inventory) == 2


def test_it_ends_unless_renewed(inventory, later):
    lease = aa.acquire_on_behalf("GPU:2", "pod 7", seconds=600, inventory=inventory)
    later(300)
    lease.renew(600)
    later(800)
    assert free(inventory) == 0
    later(901)
    assert aa.leases(inventory) == ()
    with pytest.raises(aa.LeaseNotFoundError, match="has ended"):
        lease.renew(600)
    assert free(inventory) == 2
    assert aa.find_on_behalf(inventory) == ()


def test_a_lease_that_a_process_holds_is_not_renewed_and_goes_on(inventory):
    with aa.acquire("GPU:1", inventory=inventory) as held:
        with pytest.raises(aa.LedgerError, match=f"lease {held.id} is held by a process") as caught:
            Ledger.open().renew(held.id, entries.make_tenure("pod 7", 600))
        assert not isinstance(caught.value, aa.LeaseNotFoundError)
        assert free(inventory) == 1
    with pytest.raises(aa.LeaseNotFoundError, match="has ended"):
        Ledger.open().renew(held.id, entries.make_tenure("pod 7", 600))


def test_without_a_state_directory_no_lease_is_found(inventory, state):
    lease = aa.acquire_on_behalf("GPU:1", "pod 7", seconds=600, inventory=inventory)
    shutil.rmtree(state)
    ledger = Ledger.open()
    for call in (lambda: lease.renew(600), lambda: ledger.drop_lease(lease.id), lambda: ledger.end_lease(lease.id)):
        with pytest.raises(aa.LeaseNotFoundError):
            call()
    lease.release()


def test_a_control_group_with_processes_keeps_it(inventory, later, group):
    path, end = group
    lease = aa.acquire_on_behalf("GPU:1", "pod 7", seconds=600, groups=[path, "/none"], inventory=inventory)
    later(601)
    (record,) = aa.leases(inventory)
    assert "while control group" in record.reason
    assert free(inventory) == 1
    assert any("not renewed" in reason.message for reason in aa.why("GPU:2", inventory=inventory).reasons)
    lease.renew(600, [path])  # the program is back
    later(1300)
    assert free(inventory) == 1
    end()
    assert free(inventory) == 2


def test_doctor_names_a_lease_that_is_not_renewed(inventory, later, group):
    path, _ = group
    aa.acquire_on_behalf("GPU:1", "pod 7", seconds=600, groups=[path], inventory=inventory)
    assert not [finding for finding in diagnose_leases(inventory) if "on behalf" in finding.reason]
    later(601)
    (finding,) = (finding for finding in diagnose_leases(inventory) if "on behalf" in finding.reason)
    assert "pod 7" in finding.reason
    assert "--forget" in finding.remedy


def test_a_group_of_the_same_path_is_another_one(inventory, group):
    path, _ = group
    inode = groups.group_inode(path)
    assert groups.is_populated(path, inode)
    assert not groups.is_populated(path, inode + 1)
    for odd in ("/../etc", "relative", "/a//b", "/", "", "/a\0b"):
        assert groups.group_inode(odd) is None
        assert not groups.is_populated(odd, 1)


def test_a_share_keeps_its_part(inventory):
    device = inventory.devices[1]
    request = aa.request_devices([device], {device.id: 0.25})
    lease = aa.acquire_on_behalf(request, "pod 7", seconds=600, inventory=inventory)
    (found,) = aa.find_on_behalf(inventory)
    assert (found.id, found.shares) == (lease.id, lease.shares)
    assert found.shares[0].units == 2500
    with aa.acquire(aa.request_devices([device], {device.id: 0.75}), inventory=inventory, wait=0):
        assert free(inventory) == 1


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"another": 0.5}, "shares must be of the given devices \\(got one of 'another'\\)"),
        ({"GPU": math.inf}, "must be more than 0, and finite \\(got inf\\)"),
        ({"GPU": 0}, "must be more than 0, and finite \\(got 0\\)"),
    ],
)
def test_a_share_is_of_a_given_device_and_a_number(inventory, shares, message):
    device = inventory.devices[1]
    with pytest.raises(aa.UsageError, match=message):
        aa.request_devices([device], {device.id if name == "GPU" else name: share for name, share in shares.items()})


def test_who_sees_it_and_how_it_is_released(inventory):
    lease = aa.acquire_on_behalf("GPU:1", "pod 7", seconds=600, inventory=inventory, note="pod train")
    shown = subprocess.run(
        [sys.executable, "-m", "anyaccel", "--machine", MACHINE], capture_output=True, text=True, check=True
    )
    assert "pod train" in shown.stdout
    told = subprocess.run(
        [sys.executable, "-m", "anyaccel", "release", lease.id], capture_output=True, text=True, check=False
    )
    assert told.returncode != 0
    assert "on behalf of pod 7" in told.stderr
    assert "--forget" in told.stderr
    assert Ledger.open().drop_lease(lease.id) == ()
    assert free(inventory) == 2


def test_another_user_can_neither_renew_nor_take_it_over(inventory, state, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.geteuid() and str(parent) not in ("/", "/tmp"):
            parent.chmod(0o755)
    lease = aa.acquire_on_behalf("GPU:1", "pod 7", seconds=600, inventory=inventory)
    state.chmod(0o1777)
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            assert aa.find_on_behalf(inventory) == ()
            lease.renew(600)
        except aa.AnyaccelError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    "body",
    [
        {"until": "1e30"},
        {"until": float("nan")},
        {"until": 1e30},
        {"key": ["x"], "until": 1e9, "groups": [[1, 2], "x", ["/" + "a" * 5000, 1]]},
        [],
        "x",
    ],
)
def test_whatever_a_file_says_is_read(inventory, state, body):
    lease = aa.acquire_on_behalf("GPU:1", "pod 7", seconds=600, inventory=inventory)
    (file,) = (path for path in state.iterdir() if lease.id in path.name)
    file.write_text(json.dumps({"tenure": body}))
    for record in aa.leases(inventory):
        assert record.key == ""
    free(inventory)


def test_what_it_refuses(inventory):
    for key, seconds in (("", 1), ("a\nb", 1), ("x" * 251, 1), ("x", 0), ("x", float("inf")), ("x", 2.0**40)):
        with pytest.raises(aa.UsageError, match="must be"):
            aa.acquire_on_behalf("GPU:1", key, seconds=seconds, inventory=inventory)
    with pytest.raises(aa.UnknownOptionError):
        aa.acquire_on_behalf("GPU:1", "x", seconds=1, inventory=inventory, renew=3)
    for limits in ({"memory": "1GiB"}, {"enforce": True}):  # a group of its own would stay, and hold no process
        with pytest.raises(aa.UsageError, match="another program starts those of this lease"):
            aa.acquire_on_behalf("GPU:1", "x", seconds=1, inventory=inventory, **limits)
    with pytest.raises(aa.UsageError, match="at most 16 control groups, with 2048 characters in all"):
        entries.make_tenure("x", 1, (("\N{SNOWMAN}" * 700, 1),))  # three bytes each, six in the lease
    assert free(inventory) == 2


def test_leases_are_watched(inventory):
    watch = aa.watch_leases(inventory, every=0.01)
    assert next(watch) == ()
    with aa.acquire("GPU:1", inventory=inventory) as lease:
        (record,) = next(watch)
        assert record.id == lease.id
    assert next(watch) == ()
    watch.close()
    assert list(watch) == []


def test_devices_are_chosen_around_given_ones():
    devices = aa.detect("sim:H100:8").devices
    ids = [device.id for device in devices]
    assert [each.id for each in aa.choose_devices(devices[4:], 4)] == ids[4:]
    assert ids[5] in [each.id for each in aa.choose_devices(devices, 3, including=[ids[5]])]
    assert aa.choose_devices(devices, 0) == ()
    for count, including in ((9, []), (1.5, []), (0, ids[:1]), (1, ["x"])):
        with pytest.raises(aa.UsageError):
            aa.choose_devices(devices, count, including)


def test_a_container_gets_what_all_vendors_ask_for():
    inventory = aa.detect("sim:H100:2,TPU-V4:4")
    tpus = inventory.of_vendor("tpu")
    edits = aa.container([inventory.of_vendor("nvidia")[0], tpus[1]])
    assert "/dev/accel1" in edits.nodes
    assert any(node.startswith("/dev/nvidia") for node in edits.nodes)
    assert aa.container([]).nodes == ()
