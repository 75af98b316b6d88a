"""A lease on the devices that a running process has open: real processes, real device nodes, real users."""

import os
import shutil
import stat
import subprocess

import anyaccel as aa
import pytest
from anyaccel.ledger import Ledger
from anyaccel.model import Inventory
from anyaccel_jobs.adopted import AdoptedProcess

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make device nodes and become another user")
PLUGIN = """
from anyaccel.plugin import *
@hookimpl
def anyaccel_info(): return PluginInfo(vendor="acme", resource="A", kind="x", env_vars=("ACME_VISIBLE",))
@hookimpl
def anyaccel_detect(ctx):
    nodes = {nodes!r}
    return Detected(devices=tuple(
        Device(id=f"s{{index}}", index=index, model="A1", vendor="acme", nodes=(node, {shared!r}))
        for index, node in enumerate(nodes)
    ))
@hookimpl
def anyaccel_fractional(device): return Fractional.NO
@hookimpl
def anyaccel_tags(device): return ("A1",)
@hookimpl
def anyaccel_env(devices, ctx):
    return EnvEdits(set={{"ACME_VISIBLE": ",".join(device.id for device in devices)}})
"""


@pytest.fixture
def nodes(install, monkeypatch):
    """The nodes of three devices of this host, and the one that they share."""
    folder = f"/dev/anyaccel-adopt-{os.getpid()}"
    os.mkdir(folder)
    paths = []
    for number, original in enumerate(("/dev/full", "/dev/zero", "/dev/random", "/dev/urandom")):
        path = f"{folder}/a{number}"
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.stat(original).st_rdev)
        except PermissionError:
            shutil.rmtree(folder)
            pytest.skip("root may not make device nodes in this container")
        os.chmod(path, 0o666)
        paths.append(path)
    install("acme", PLUGIN.format(nodes=paths[:3], shared=paths[3]))
    monkeypatch.setenv("ANYACCEL_MACHINE", "host")
    yield paths
    shutil.rmtree(folder)


@pytest.fixture
def start():
    """Start a process that opens paths, as a user; return it once it has."""
    started = []

    def begin(*paths, user=None):
        opens = "".join(f"exec {number}<{path}; " for number, path in enumerate(paths, 3))
        command = ["sh", "-c", f"{opens}echo; read forever"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=user)
        started.append(process)
        process.stdout.read(1)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def held():
    return {record.device: record.note for record in aa.leases(aa.detect())}


@ROOT
def test_devices_are_held_until_the_process_that_has_them_open_ends(nodes, start, anyaccel):
    process = start(nodes[0], nodes[2], nodes[3])
    done = anyaccel("adopt", str(process.pid))
    assert done.returncode == 0, done.stderr
    (lease,) = done.stdout.split()
    assert held() == dict.fromkeys(("s0", "s2"), f"adopted process {process.pid}, sh")
    with pytest.raises(aa.NotFreeError):
        aa.acquire("A:2", wait=0)
    again = anyaccel("adopt", str(process.pid))
    assert again.returncode == 4, "the devices have a lease already"
    process.kill()
    process.wait()
    with aa.acquire("A:3", wait=None):
        assert Ledger.open().find_carriers(lease) is None


@ROOT
def test_a_shared_node_alone_adopts_nothing_and_a_process_without_devices_is_told_so(nodes, start, anyaccel):
    for opened, told in (((nodes[3],), "has no device open"), ((), "has no device open")):
        process = start(*opened)
        done = anyaccel("adopt", str(process.pid))
        assert (done.returncode, done.stdout) == (2, "")
        assert f"process {process.pid} (" in done.stderr
        assert told in done.stderr
    assert held() == {}


@ROOT
def test_the_process_of_another_user_is_refused(nodes, start, anyaccel):
    process = start(nodes[0], user=65534)
    done = anyaccel("adopt", str(process.pid))
    assert done.returncode == 6
    assert f"process {process.pid} belongs to " in done.stderr
    assert held() == {}


@ROOT
def test_hardware_that_is_no_device_is_named(nodes, start, anyaccel):
    misc = next((path for path in ("/dev/fuse", "/dev/net/tun", "/dev/kvm", "/dev/loop-control")
                 if os.path.exists(path) and os.access(path, os.R_OK)), None)  # fmt: skip
    if misc is None:
        pytest.skip("no other hardware can be opened here")
    try:
        os.close(os.open(misc, os.O_RDONLY))
    except OSError as error:
        pytest.skip(f"no other hardware can be opened here: {error}")
    done = anyaccel("adopt", str(start(misc).pid))
    assert done.returncode == 2
    assert f"has no device open: {misc} belongs to no listed device" in done.stderr


@ROOT
def test_a_refused_process_leaves_no_descriptor_open(start):
    process = start(user=65534)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(aa.LeasePermissionError):
        AdoptedProcess(process.pid)
    assert os.listdir("/proc/self/fd") == before


def test_what_is_no_process_is_refused(anyaccel):
    ended = subprocess.Popen(["true"])
    ended.wait()
    done = anyaccel("adopt", str(ended.pid))
    assert done.returncode == 2
    assert f"no process has the id {ended.pid}" in done.stderr
    assert anyaccel("adopt", "0").returncode == 2


def test_a_process_that_exits_meanwhile_is_refused():
    process = subprocess.Popen(["sleep", "1000"])
    adopted = AdoptedProcess(process.pid)
    process.kill()
    process.wait()
    with pytest.raises(aa.UsageError, match=rf"process {process.pid} \(.*\) does not show its open files"):
        adopted.find_devices(Inventory(machine="host", devices=()))
    os.close(adopted.pidfd)
