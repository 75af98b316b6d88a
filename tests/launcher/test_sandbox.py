"""The sandbox of a worker: the kernel refuses it the device nodes of others, and nothing else that it needs.

Device nodes of this machine stand in for accelerators: /dev/full is the device of another holder.
"""

import json
import os
import pickle
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.errors import EnforcementError
from anyaccel.launcher.sandbox import Sandbox, find_nodes, find_obstacle, list_paths_around, make_sandbox, plan_sandbox
from anyaccel.linux.landlock import node_of
from anyaccel.model import Problem, ProblemKind
from anyaccel.model.value import decode, encode
from system_calls import FORBID
from waiting import until

UNPRIVILEGED = 65534
CONFINES = pytest.mark.skipif(bool(find_obstacle()), reason=f"workers cannot be confined here: {find_obstacle()}")
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make device nodes and mounts")
OTHERS = Sandbox(closed=("/dev/full",), kept=("/dev/zero",))

CHILD = """
import array, ctypes, errno, fcntl, json, multiprocessing, os, pathlib, shutil, socket, stat, subprocess, sys, threading
import multiprocessing.synchronize, struct
from anyaccel.errors import AnyaccelError
from anyaccel.launcher import sandbox as reach
from anyaccel.linux import landlock, system
from anyaccel.launcher.sandbox import Sandbox, find_obstacle, make_sandbox
from anyaccel.model.value import decode

def outcome(function, *arguments):
    "The name of the error, or '' for none."
    try:
        function(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
    except AnyaccelError as error:
        return str(error)
    return ""

def opened(path, flags=os.O_RDONLY):
    return outcome(lambda: os.close(os.open(path, flags)))

sandbox = decode(Sandbox, json.loads(sys.argv[1]))
user = int(sys.argv[2])
if user:
    os.setgroups([]), os.setgid(user), os.setuid(user)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # /proc/self belongs to the new user, as it does after an exec
"""


def child(code: str, sandbox: Sandbox = OTHERS, *, user: int = 0, apply: bool = True, prefix: tuple[str, ...] = ()):
    """Run code in a process of its own that is confined; what it assigns to ``seen`` comes back."""
    script = CHILD + ("sandbox.apply()\n" if apply else "") + textwrap.dedent(code) + "\nprint(json.dumps(seen))"
    argv = [*prefix, sys.executable, "-c", script, json.dumps(encode(sandbox)), str(user)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(params=[0, UNPRIVILEGED], ids=["this-user", "nobody"])
def user(request) -> int:
    if request.param and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    return request.param


@pytest.fixture
def dev() -> Iterator[Path]:
    """A directory of device nodes below /dev."""
    path = Path(f"/dev/anyaccel-test-{os.getpid()}")
    path.mkdir()
    yield path
    subprocess.run(["rm", "-r", path], check=True)


def copy_node(original: str, path: Path) -> str:
    path.parent.mkdir(exist_ok=True)
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.stat(original).st_rdev)
    except PermissionError:
        pytest.skip("root may not make device nodes in this container")
    path.chmod(0o666)
    return str(path)


# What a sandbox closes: planned without touching anything


VENDOR = """
from anyaccel.plugin import *
@hookimpl
def anyaccel_info(): return PluginInfo(vendor="{vendor}", resource="{vendor}", kind="x", env_vars=())
@hookimpl
def anyaccel_detect(ctx): return None
@hookimpl
def anyaccel_fractional(device): return Fractional.NO
@hookimpl
def anyaccel_tags(device): return ()
@hookimpl
def anyaccel_env(devices, ctx): return EnvEdits()
"""
SHARED = """
@hookimpl
def anyaccel_container(devices):
    assert devices
    return ContainerEdits(nodes=("/dev/{vendor}ctl", *(node for device in devices for node in device.nodes)))
"""
BROKEN = """
@hookimpl
def anyaccel_container(devices): raise OSError("no container")
"""


@pytest.fixture
def vendors(install):
    install("acme", (VENDOR + SHARED).format(vendor="acme"))
    install("zeta", (VENDOR + SHARED).format(vendor="zeta"))
    install("plain", VENDOR.format(vendor="plain"))
    install("broken", (VENDOR + BROKEN).format(vendor="broken"))


def device(name: str, *nodes: str, **fields) -> aa.Device:
    vendor, _, index = name.partition(":")
    return aa.Device(id=f"{vendor}-{index}", index=int(index), model="M", vendor=vendor, nodes=nodes, **fields)


def planned(*devices: aa.Device, held: str = "", reports=()) -> Sandbox:
    shares = tuple(aa.Share(device=device) for device in devices if device.id in held.split())
    request = aa.parse_request("GPU")
    grants = (aa.Grant(term=request.terms[0], shares=shares),) if shares else ()
    inventory = aa.Inventory(machine="host", devices=devices, vendors=tuple(reports))
    return plan_sandbox(aa.Allocation(id="1", request=request, grants=grants), inventory)


ACME = (device("acme:0", "/dev/acme0"), device("acme:1", "/dev/acme1"))


def test_nodes_of_other_devices_are_closed_and_shared_ones_stay_open(vendors):
    assert planned(*ACME, held="acme-0") == Sandbox(closed=("/dev/acme1",), kept=("/dev/acme0", "/dev/acmectl"))
    assert planned(*ACME, held="acme-0 acme-1").closed == ()


def test_shared_nodes_of_a_vendor_of_which_nothing_is_held_are_closed(vendors):
    sandbox = planned(*ACME, device("zeta:0", "/dev/zeta/0"), held="acme-1")
    assert sandbox.closed == ("/dev/acme0", "/dev/zeta/0", "/dev/zetactl")
    assert planned(*ACME).closed == ("/dev/acme0", "/dev/acmectl", "/dev/acme1")


def test_nodes_that_only_the_vendors_container_hook_names_are_told_apart(install):
    hook = """
@hookimpl
def anyaccel_container(devices):
    return ContainerEdits(nodes=tuple(f"/dev/chip{device.index // 2}" for device in devices))
"""
    install("acme", VENDOR.format(vendor="acme") + hook)
    sandbox = planned(*(device(f"acme:{index}") for index in range(4)), held="acme-0")
    assert (sandbox.closed, sandbox.kept) == (("/dev/chip1",), ("/dev/chip0",))
    assert [gap.partition(" ")[0] for gap in sandbox.gaps] == ["acme/1"]


def test_a_node_that_another_vendors_device_needs_stays_open(vendors):
    sandbox = planned(*ACME, device("zeta:0", "/dev/zeta0", "/dev/acme0"), held="zeta-0")
    assert sandbox.closed == ("/dev/acmectl", "/dev/acme1")


def test_parts_of_one_card_are_told_apart_only_by_nodes_of_their_own(vendors):
    halves = (device("plain:0", "/dev/card", parent="card"), device("plain:1", "/dev/card", parent="card"))
    sandbox = planned(*halves, held="plain-0")
    assert sandbox.closed == ()
    (gap,) = sandbox.gaps
    assert gap.startswith(
        "plain/1 (plain-1) is open to the worker: each of its device nodes is needed by a device that"
    )
    halves = (device("plain:0", "/dev/card", "/dev/cap0"), device("plain:1", "/dev/card", "/dev/cap1"))
    assert planned(*halves, held="plain-0") == Sandbox(closed=("/dev/cap1",), kept=("/dev/card", "/dev/cap0"))


def test_what_is_not_known_is_said(vendors):
    failed = aa.VendorReport(vendor="zeta", state=aa.VendorState.FAILED)
    sandbox = planned(*ACME, device("plain:0"), device("declared:0", declared=True), held="acme-0", reports=[failed])
    assert sandbox.gaps == (
        "plain/0 (plain-0) may be open to the worker: its plug-in names no device node",
        "the detection of zeta failed, so that its device nodes are open to the worker",
    )


def test_a_plug_in_that_cannot_say_costs_its_own_vendor(vendors):
    devices = (*ACME, device("broken:0", "/dev/broken0"))
    sandbox = planned(*devices, held="acme-0")
    assert sandbox.closed == ("/dev/acme1", "/dev/broken0")
    shared = "nodes that devices of broken share may be open to the worker"
    assert sandbox.gaps == (f"{shared}: it raised OSError: no container (plug_anyaccel_broken.py, line 15)",)
    with pytest.raises(aa.PluginError, match="no container"):
        planned(*devices, held="broken-0")


LISTED = """
@hookimpl
def anyaccel_detect(ctx): {body}
"""


def without_hook(vendor: str, body: str, more: str = "") -> str:
    """A plug-in whose detection does something."""
    before, _, after = VENDOR.partition("@hookimpl\ndef anyaccel_detect(ctx): return None\n")
    return (before + LISTED.format(body=body) + after + more).format(vendor=vendor)


FOUND = "return Detected(devices=(Device(id='{vendor}-0', index=0, model='M', nodes=('/dev/{vendor}0',)),))"


@pytest.fixture
def left_out(install):
    """Vendors with devices on this host, with faults, and one that cannot be imported."""
    install("acme", VENDOR.format(vendor="acme"))
    install("hidden", without_hook("hidden", FOUND, SHARED))
    install("half", without_hook("half", FOUND, BROKEN))
    install("slow", without_hook("slow", "raise OSError('no driver')"))
    install("torn", "raise ImportError('no library')")


@CONFINES
@pytest.mark.parametrize("way", ["disable", "plugins"])
def test_vendors_that_the_environment_leaves_out_are_closed_too_or_named(left_out, monkeypatch, way):
    if way == "disable":
        monkeypatch.setenv("ANYACCEL_DISABLE", "hidden,half,slow,torn")
    monkeypatch.setenv("ANYACCEL_PLUGINS", "acme,hidden,half,slow,torn" if way == "disable" else "acme")
    inventory = aa.detect("host")
    assert [report.vendor for report in inventory.vendors] == ["acme"]
    sandbox = make_sandbox(aa.Allocation(id="1", request=aa.parse_request("GPU"), grants=()), inventory)
    assert {"/dev/hidden0", "/dev/hiddenctl", "/dev/half0"} <= set(sandbox.closed)
    gaps = [gap for gap in sandbox.gaps if gap.startswith("the detection of")]
    assert gaps == [
        f"the detection of {vendor} failed, so that its device nodes are open to the worker: {why}"
        for vendor, why in (
            ("slow", "it raised OSError: no driver (plug_anyaccel_slow.py, line 7)"),
            ("torn", "importing 'plug_anyaccel_torn' raised ImportError: no library (plug_anyaccel_torn.py, line 1)"),
        )
    ]
    shared = "nodes that devices of half share may be open to the worker: it raised OSError: no container ("
    assert any(gap.startswith(shared) for gap in sandbox.gaps)
    assert not [name for name in sys.modules if name.startswith("plug_") and "hidden" in name], (
        "and none is loaded here"
    )


@CONFINES
def test_a_simulated_machine_is_asked_nothing_more(left_out, monkeypatch):
    monkeypatch.setenv("ANYACCEL_PLUGINS", "acme")
    inventory = aa.Inventory(machine="sim:A1:2", devices=ACME)
    sandbox = make_sandbox(aa.Allocation(id="1", request=aa.parse_request("GPU"), grants=()), inventory)
    assert sandbox.closed == ("/dev/acme0", "/dev/acme1")


def test_what_a_failed_detection_said_is_told(vendors):
    problem = Problem(vendor="zeta", kind=ProblemKind.TIMEOUT, reason="it did not answer within 10 s.")
    failed = aa.VendorReport(vendor="zeta", state=aa.VendorState.FAILED, problem=problem)
    partial = aa.VendorReport(vendor="acme", state=aa.VendorState.OK, partial=True)
    assert planned(*ACME, held="acme-0", reports=[failed, partial]).gaps == (
        "the detection of zeta failed, so that its device nodes are open to the worker: it did not answer within 10 s",
        "devices of acme that could not be read may be open to the worker",
    )


def test_a_sandbox_travels_as_data():
    sandbox = Sandbox(closed=("/dev/a",), kept=("/dev/b",), gaps=("one",))
    assert decode(Sandbox, json.loads(json.dumps(encode(sandbox)))) == sandbox
    assert pickle.loads(pickle.dumps(sandbox)) == sandbox


def test_the_paths_around_some_are_the_fewest_that_hold_everything_else(tmp_path):
    for name in ("a/one", "a/two", "a/deep/in/it", "b/c/three", "b/c/four", "b/five"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    closed = {f"{tmp_path}/{name}" for name in ("a/one", "b/c/three", "b/not-there", "b/c/four/never")}
    found = [path.removeprefix(f"{tmp_path}/") for path in list_paths_around(closed) if path.startswith(f"{tmp_path}/")]
    assert sorted(found) == ["a/deep", "a/two", "b/c/four", "b/five"]
    assert "/proc" in list_paths_around(closed)
    assert list(list_paths_around(set())) == ["/"]


def test_directories_that_go_away_during_the_walk_around_them_are_passed_over(tmp_path):
    for number in range(4):
        (tmp_path / f"card{number}").mkdir()
        (tmp_path / f"card{number}" / "open").touch()
    seen = []
    for path in list_paths_around({f"{tmp_path}/card{number}/closed" for number in range(4)}):
        if path.startswith(f"{tmp_path}/"):
            seen.append(path)
            subprocess.run(["rm", "-r", *tmp_path.iterdir()], check=True)  # the walk is to list three of them yet
    assert len(seen) == 1


@ROOT
def test_directories_that_go_away_during_the_search_for_a_device_are_passed_over(dev):
    wanted = {node_of(os.stat(copy_node("/dev/full", dev / f"card{number}" / "node"))) for number in range(4)}
    search = find_nodes(str(dev), wanted)
    first = next(search)
    subprocess.run(["rm", "-r", *dev.iterdir()], check=True)
    assert first.startswith(f"{dev}/card")
    assert list(search) == []


# What the kernel then does


@CONFINES
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR], ids=["read", "write", "both"])
def test_anothers_node_is_refused_and_the_own_one_opens(flags, user):
    seen = child(f"seen = [opened(path, {flags}) for path in ('/dev/full', '/dev/zero', '/dev/null')]", user=user)
    assert seen == ["EACCES", "", ""]


@CONFINES
def test_other_ways_to_the_node_are_refused_too(user):
    seen = child(
        """
        os.chdir("/dev")
        number = os.stat("full").st_rdev
        handle = os.open("full", os.O_PATH)
        link = f"/tmp/anyaccel-{os.getpid()}"
        os.symlink("/dev/full", link)
        paths = ["full", "/proc/self/cwd/full", "/proc/self/root/dev/full", f"/proc/self/fd/{handle}", link,
                 f"/proc/{os.getpid()}/root/dev/full", f"/dev/fd/{handle}"]
        seen = {path: opened(path) for path in paths}
        seen["of the parent"] = opened(f"/proc/{os.getppid()}/root/dev/full")
        seen["by number"] = opened(f"/dev/char/{os.major(number)}:{os.minor(number)}")
        os.unlink(link)
        """,
        user=user,
    )
    assert seen.pop("by number") in {"EACCES", "ENOENT"}  # not every container has these links
    assert set(seen.values()) == {"EACCES"}, seen


@CONFINES
def test_control_calls_are_refused_without_reading_or_writing():
    seen = child(
        """
        def count(path, flags):
            handle = os.open(path, flags)
            return outcome(fcntl.ioctl, handle, 0x80045200, array.array("i", [0]))  # RNDGETENTCNT
        neither = 3
        seen = [count("/dev/urandom", 0), count("/dev/urandom", neither), count("/dev/random", neither)]
        seen.append(bool(landlock.gap()))
        """,
        Sandbox(closed=("/dev/random",)),
    )
    if seen.pop():
        pytest.skip("this kernel's Landlock is older than Linux 6.10 and lets control calls through")
    assert seen == ["", "", "EACCES"]


@CONFINES
def test_a_sandbox_holds_for_all_that_the_worker_starts_and_is_never_lifted(user):
    seen = child(
        """
        pid = os.fork()
        if not pid:
            os._exit(opened("/dev/full") == "EACCES")
        forked = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        started = subprocess.run(["cat", "/dev/full"], capture_output=True, text=True)
        again = outcome(Sandbox().apply)
        seen = [forked, started.stderr, again, opened("/dev/full"), opened("/dev/zero")]
        """,
        user=user,
    )
    assert seen == [1, "cat: /dev/full: Permission denied\n", "", "EACCES", ""]


@CONFINES
def test_it_stays_when_the_process_becomes_another_program(tmp_path):
    code = CHILD + "sandbox.apply(); os.execvpe('head', ['head', '-c1', '/dev/zero', '/dev/full'], os.environ)"
    argv = [sys.executable, "-c", code, json.dumps(encode(OTHERS)), "0"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "\0" in done.stdout
    assert done.stderr == "head: cannot open '/dev/full' for reading: Permission denied\n"


@CONFINES
def test_everyday_work_goes_on(user):
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o777)
        seen = everyday_work(home, user)
    assert seen == ["te", "", "", 0, "42\n", True, True]


def everyday_work(home: str, user: int):
    return child(
        f"""
        home = pathlib.Path({home!r})
        (home / "a").mkdir(), (home / "b").mkdir()
        (home / "a" / "file").write_text("text")
        os.rename(home / "a" / "file", home / "b" / "moved")
        os.link(home / "b" / "moved", home / "a" / "linked")
        os.truncate(home / "b" / "moved", 2)
        memory = pathlib.Path(f"/dev/shm/anyaccel-test-{{os.getpid()}}")
        memory.write_bytes(b"shared"), memory.read_bytes(), memory.unlink()
        lock = multiprocessing.Lock()
        handle = os.memfd_create("x")
        reader, writer = os.pipe()
        main, side = os.openpty()
        terminal = os.open(os.ttyname(side), os.O_RDWR | os.O_NOCTTY)
        os.listdir("/"), os.listdir("/dev"), os.listdir("/sys")
        seen = [
            (home / "a" / "linked").read_text(),
            opened(f"/proc/self/fd/{{handle}}", os.O_RDWR),
            opened(f"/proc/self/fd/{{reader}}"),
            os.get_terminal_size(terminal).columns,
            subprocess.run(["sh", "-c", "echo out | cat > /dev/null; echo $((6 * 7)); exit 3"],
                           capture_output=True, text=True).stdout,
            pathlib.Path("/proc/self/stat").read_text().startswith(str(os.getpid())),
            opened("/dev/tty") in ("", "ENXIO"),
        ]
        socket.socketpair()
        """,
        user=user,
    )


@CONFINES
@ROOT
def test_nested_directories_are_closed_node_by_node(dev):
    own, other = copy_node("/dev/zero", dev / "dri" / "card0"), copy_node("/dev/full", dev / "dri" / "card1")
    beside, by_path = copy_node("/dev/null", dev / "ctl"), dev / "dri" / "by-path" / "pci-1"
    by_path.parent.mkdir()
    by_path.symlink_to("../card1")
    paths = [own, beside, other, str(by_path), "/dev/full"]
    for closed in (other, str(by_path)):
        seen = child(f"seen = [opened(path) for path in {paths!r}]", Sandbox(closed=(closed,), kept=(own,)))
        assert seen == ["", "", "EACCES", "EACCES", "EACCES"]  # the last is the same device by another node


@CONFINES
@ROOT
def test_a_second_node_of_the_device_is_found_wherever_it_is_below_dev(dev):
    again = copy_node("/dev/full", dev / "room" / "again")
    assert child(f"seen = [opened({again!r})]") == ["EACCES"]


@CONFINES
@ROOT
def test_a_node_outside_of_dev_is_closed_where_a_link_leads(tmp_path):
    node = copy_node("/dev/full", tmp_path / "a" / "node")
    (tmp_path / "link").symlink_to("a/node")
    (tmp_path / "a" / "beside").touch()
    paths = [node, str(tmp_path / "a" / "beside")]
    seen = child(f"seen = [opened(path) for path in {paths!r}]", Sandbox(closed=(str(tmp_path / "link"),)))
    assert seen == ["EACCES", ""]


@CONFINES
@ROOT
def test_a_device_that_is_held_stays_open_by_whatever_name(dev):
    own, again = copy_node("/dev/zero", dev / "card0"), copy_node("/dev/zero", dev / "more" / "card0")
    seen = child(f"seen = [opened({own!r}), opened({again!r})]", Sandbox(closed=(again, "/dev/full"), kept=(own,)))
    assert seen == ["", ""]


@CONFINES
@ROOT
def test_a_node_that_appears_later_stays_closed(dev):
    own, later = copy_node("/dev/zero", dev / "card0"), str(dev / "card1")
    code = (
        CHILD + "sandbox.apply(); print(flush=True); input(); print(opened(sandbox.closed[0]), opened(sandbox.kept[0]))"
    )
    argv = [sys.executable, "-c", code, json.dumps(encode(Sandbox(closed=(later,), kept=(own,)))), "0"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "\n"
        copy_node("/dev/full", Path(later))
        assert process.communicate("\n", timeout=30)[0] == "EACCES \n"


@CONFINES
@ROOT
def test_root_finds_no_way_around_by_new_names(dev, tmp_path):
    other, room = copy_node("/dev/full", dev / "card1"), dev / "room"
    room.mkdir()
    seen = child(
        f"""
        other, room = {other!r}, {str(room)!r}
        number = os.stat(other).st_rdev
        seen = {{
            "a new node": outcome(os.mknod, room + "/new", 0o666 | stat.S_IFCHR, number),
            "a link": outcome(os.link, other, room + "/link"),
            "a move": outcome(os.rename, other, room + "/moved"),
            "a move in place": outcome(os.rename, other, other + "x") or opened(other + "x"),
            "a mount": subprocess.run(["mount", "--bind", "/dev", {str(tmp_path)!r}], capture_output=True).returncode,
            "a file system": subprocess.run(["mount", "-t", "devtmpfs", "x", {str(tmp_path)!r}],
                                            capture_output=True).returncode,
        }}
        """,
        Sandbox(closed=(other,)),
    )
    assert seen.pop("a mount") != 0
    assert seen.pop("a file system") != 0
    assert seen == dict.fromkeys(["a new node", "a link", "a move", "a move in place"], "EACCES")


@CONFINES
@ROOT
def test_other_mounts_of_a_node_are_closed_too(tmp_path):
    where, file = tmp_path / "with space", tmp_path / "node"
    where.mkdir()
    file.touch()
    (tmp_path / "own").write_text("")
    mounts = f"mount --bind /dev '{where}' && mount --bind /dev/full '{file}' && exec \"$@\""
    prefix = ("unshare", "--mount", "sh", "-c", mounts, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("root may not mount in this container")
    paths = [f"{where}/full", str(file), f"{where}/zero", str(tmp_path / "own")]
    assert child(f"seen = [opened(path) for path in {paths!r}]", prefix=prefix) == ["EACCES", "EACCES", "", ""]


@CONFINES
@ROOT
@pytest.mark.parametrize("before", ["", "mkdir -p {0}/again && mount --bind /dev {0}/again && "], ids=["", "twice"])
def test_nodes_on_what_is_mounted_below_the_directory_of_devices_are_closed_too(dev, tmp_path, before):
    for name in ("memory/deep", "nodev", "disk"):
        (dev / name).mkdir(parents=True)
    (dev / "file").touch()
    number = os.stat("/dev/full").st_rdev
    make = f"mknod -m 666 {{}} c {os.major(number)} {os.minor(number)}"
    mounts = before.format(tmp_path) + " && ".join(
        (
            f"mount -t tmpfs a {dev}/memory && mkdir {dev}/memory/deep && {make.format(f'{dev}/memory/deep/node')}",
            f"touch {dev}/memory/plain",
            f"mount -t tmpfs -o nodev b {dev}/nodev && {make.format(f'{dev}/nodev/node')}",
            f"mount --bind {tmp_path} {dev}/disk && touch {dev}/disk/plain && mount --bind {dev}/disk/plain {dev}/file",
            'exec "$@"',
        )
    )
    prefix = ("unshare", "--mount", "sh", "-c", mounts, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("root may not mount in this container")
    paths = [f"{dev}/{name}" for name in ("memory/deep/node", "memory/plain", "nodev/node", "disk/plain", "file")]
    seen = child(f"seen = [[opened(path) for path in {paths!r}], reach.find_unsearched()]", prefix=prefix)
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True).stdout
    assert seen == [["EACCES", "", "EACCES", "", ""], [] if kind == "tmpfs\n" else [f"{dev}/disk"]]
    unconfined = child(f"seen = [opened(path) for path in {paths!r}]", prefix=prefix, apply=False)
    assert unconfined == ["", "", "EACCES", "", ""], "no device opens where the mount says nodev"


# Errors


@CONFINES
def test_a_process_with_threads_is_refused():
    code = """
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    seen = [outcome(sandbox.apply), opened("/dev/full")]
    release.set()
    """
    message = "a process must have one thread to be confined (this one has 2)"
    refused, still_open = child(code, apply=False)
    assert refused.startswith(message)
    assert still_open == ""


@CONFINES
def test_a_device_that_is_open_already_is_refused():
    seen = child("handle = os.open('/dev/full', 0); seen = [handle, outcome(sandbox.apply)]", apply=False)
    assert seen[1] == (f"/dev/full is open already, as descriptor {seen[0]}; close it before the worker is confined")


@CONFINES
def test_a_plug_in_that_names_a_directory_as_a_node_is_refused(tmp_path):
    (refused,) = child("seen = [outcome(sandbox.apply)]", Sandbox(closed=(str(tmp_path),)), apply=False)
    assert refused.startswith(f"{tmp_path} must be a device node")


@CONFINES
def test_sandboxes_nest_until_the_kernel_has_enough():
    seen = child("seen = [outcome(sandbox.apply) for _ in range(17)]", apply=False)
    assert seen[:16] == [""] * 16
    assert seen[16] == (
        "the worker cannot be confined to its devices: it is inside 16 sandboxes already, the maximum;"
        " do without, or enforce='try' to confine workers only where that is possible"
    )


WAY_OUT = "do without, or enforce='try' to confine workers only where that is possible"
REASONS = {
    "ENOSYS": "this kernel has no Landlock, which came with Linux 5.13",
    "EOPNOTSUPP": "Landlock is switched off in this kernel; boot it with landlock first in the list 'lsm='",
    "EPERM": "a filter on system calls forbids Landlock here; a container needs a seccomp profile that allows it",
    "EIO": "Landlock cannot be asked: Input/output error",
    "0": "this kernel's Landlock has version 0, and version 2 is needed, which came with Linux 5.19",
}


@pytest.mark.skipif(sys.platform != "linux", reason="filters on system calls are a part of Linux")
@pytest.mark.parametrize("error", REASONS)
def test_a_kernel_that_cannot_is_told_apart(error):
    code = f"""
    forbid(system.LANDLOCK_CREATE_RULESET, getattr(errno, {error!r}, 0))
    wanted = lambda enforce: outcome(lambda: make_sandbox(None, None, enforce=enforce))
    seen = [find_obstacle(), outcome(sandbox.apply), outcome(sandbox.start, lambda: 1), wanted(True), wanted("try")]
    """
    reason, *refused, tried = child(FORBID + textwrap.dedent(code), apply=False)
    assert reason == REASONS[error]
    assert len(set(refused)) == 1
    assert refused[0] == f"the worker cannot be confined to its devices: {reason}; {WAY_OUT}"
    assert tried == ""


@CONFINES
def test_an_interrupted_caller_leaves_no_process_behind():
    def begin():
        os.kill(os.getpid(), signal.SIGINT)  # handled by the main thread, which waits for this one
        until(interrupted.is_set, "the interrupt")
        return "a process"

    interrupted, undone = threading.Event(), []

    def handle(*_):
        interrupted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        with pytest.raises(KeyboardInterrupt):
            Sandbox().start(begin, undone.append)
    finally:
        signal.signal(signal.SIGINT, before)
    assert undone == ["a process"]


@CONFINES
def test_a_refusal_half_way_is_an_error():
    code = "forbid(system.LANDLOCK_RESTRICT_SELF, errno.EPERM)\nseen = [outcome(sandbox.apply), opened('/dev/full')]"
    refused, still_open = child(FORBID + code, apply=False)
    assert "cannot be confined to its devices: [Errno 1] Operation not permitted" in refused
    assert still_open == ""


@CONFINES
def test_enforcement_is_a_choice(vendors):
    allocation = aa.Allocation(id="1", request=aa.parse_request("GPU"), grants=())
    inventory = aa.Inventory(machine="host", devices=ACME)
    assert make_sandbox(allocation, inventory, enforce=False) is None
    for enforce in (True, "try"):
        made = make_sandbox(allocation, inventory, enforce=enforce)
        # Beside the nodes of vendors that the inventory leaves out, if this machine has devices of such a vendor.
        assert set(made.closed) >= set(plan_sandbox(allocation, inventory).closed)


# Starting a process from one that goes on as it is


@CONFINES
def test_what_is_started_is_confined_and_the_caller_is_not():
    process = OTHERS.start(lambda: subprocess.Popen(["cat", "/dev/full"], stderr=subprocess.PIPE, text=True))
    assert process.communicate()[1] == "cat: /dev/full: Permission denied\n"
    os.close(os.open("/dev/full", os.O_RDONLY))


@CONFINES
def test_what_goes_wrong_at_the_start_is_raised_in_the_caller():
    with pytest.raises(FileNotFoundError, match="no-such"):
        OTHERS.start(lambda: subprocess.Popen(["no-such"]))
    with pytest.raises(EnforcementError, match="must be a device node"):
        Sandbox(closed=("/proc",)).start(lambda: None)


# The command line


@pytest.fixture
def cards(install):
    """A simulated machine whose device nodes are nodes of this one."""
    products = """
@hookimpl
def anyaccel_products():
    return [Product(name=name, model=name, id_template=name + "-{index}", node_templates=(node,))
            for name, node in (("A", "/dev/zero"), ("B", "/dev/full"))]
"""
    tags = "def anyaccel_tags(device): return (device.model,)"
    install("acme", VENDOR.format(vendor="acme").replace("def anyaccel_tags(device): return ()", tags) + products)


@CONFINES
def test_a_command_opens_its_own_device_alone(cards, anyaccel):
    command = ("sh", "-c", "head -c1 /dev/zero | wc -c; cat /dev/full; exit 7")
    for flag in ("--enforce", "--try-enforce"):
        done = anyaccel("run", flag, "--machine", "sim:A,B", "A", "--", *command)
        assert (done.returncode, done.stdout) == (7, "1\n"), done.stderr
        assert done.stderr.endswith("cat: /dev/full: Permission denied\n")
    free = anyaccel("run", "--machine", "sim:A,B", "A", "--", "sh", "-c", "exec 3< /dev/full")
    assert free.returncode == 0, free.stderr


@CONFINES
def test_what_a_sandbox_cannot_close_is_said(cards, anyaccel):
    done = anyaccel("run", "--enforce", "--machine", "sim:A:2", "A", "--", "true")
    assert done.returncode == 0
    assert "acme/1 (A-1) is open to the worker: each of its device nodes is needed by a device that" in done.stderr


@CONFINES
@pytest.mark.parametrize("enforce", [True, "try"])
def test_a_command_of_a_program_opens_its_own_device_alone(cards, enforce):
    command = ["sh", "-c", "cat; cat /dev/full; exit 7"]
    options = {"machine": "sim:A,B", "input": "in", "capture_output": True, "text": True}
    done = aa.run("A", command, enforce=enforce, **options)
    assert (done.returncode, done.stdout) == (7, "in")
    assert done.stderr == "cat: /dev/full: Permission denied\n"
    assert aa.run("A", ["sh", "-c", "exec 3< /dev/full"], machine="sim:A,B").returncode == 0
    with pytest.raises(subprocess.CalledProcessError):
        aa.run("A", command, enforce=enforce, check=True, **options)
    with pytest.raises(subprocess.TimeoutExpired):
        aa.run("A", ["sleep", "1000"], machine="sim:A,B", enforce=enforce, timeout=0.2)
    with pytest.raises(aa.CommandNotFoundError):
        aa.run("A", ["no-such-command"], machine="sim:A,B", enforce=enforce)
    assert aa.leases(aa.detect("sim:A,B")) == ()


@CONFINES
def test_what_a_hold_starts_opens_its_own_device_alone_and_knows_what_is_left_open(cards):
    command = ["sh", "-c", "head -c1 /dev/zero | wc -c; cat /dev/full"]
    with aa.acquire("A", machine="sim:A,B", enforce=True) as hold:
        assert hold.allocation.confined
        with hold.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.communicate() == ("1\n", "cat: /dev/full: Permission denied\n")
    os.close(os.open("/dev/full", os.O_RDONLY))
    program = "import anyaccel; held = anyaccel.current(); print(held.confined, *held.gaps)"
    told = aa.run("A", [sys.executable, "-c", program], machine="sim:A:2", enforce=True, capture_output=True, text=True)
    assert told.stdout.startswith("True acme/1 (A-1) is open to the worker: "), told.stderr


def test_a_process_without_descriptors_is_refused_by_an_error_of_ours():
    code = """
import resource
from anyaccel.errors import EnforcementError
from anyaccel.launcher.sandbox import Sandbox

resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
try:
    Sandbox().apply()
except EnforcementError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "cannot be confined to its devices: [Errno 24] Too many open files" in done.stdout
    assert done.stderr == ""
