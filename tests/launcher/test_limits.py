"""Workers are held to memory, of the host and of devices, by a cgroup of their own."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import anyaccel as aa
import cloudpickle
import pytest
from anyaccel.errors import CommandNotFoundError, EnforcementError, UsageError
from anyaccel.launcher.start import start_marked
from anyaccel.linux import cgroup
from waiting import until

GIB = 1 << 30
ONE, TWO = "0000:03:00.0", "0000:83:00.0"
PLUGIN = (Path(__file__).parent.parent / "vendors" / "pci.py").read_text()
SHOW = (
    "import anyaccel, json, os; held = anyaccel.current();"
    "print(json.dumps([os.getpid(), held.host_memory_bytes, [share.memory_by for share in held.shares],"
    " [share.enforced_by for share in held.shares]]))"
)
USER = os.geteuid()
HOME = f"/user.slice/user-{USER}.slice/user@{USER}.service"


@pytest.fixture(autouse=True)
def functions_travel_by_value(request):
    cloudpickle.register_pickle_by_value(request.module)  # test modules cannot be imported by workers
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


class Tree:
    """Directories and files as cgroup v2 has them, which keep what is written and enforce nothing."""

    def __init__(self, path):
        self.path = path

    def group(self, name, controllers="", given="", procs="", **files):
        folder = self.path / name.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        written = {"cgroup.controllers": controllers, "cgroup.subtree_control": given, "cgroup.procs": procs}
        if name != "/":
            written["cgroup.type"] = "domain"
        for file, text in {**written, **{key.replace("_", ".", 1): text for key, text in files.items()}}.items():
            (folder / file).write_text(f"{text}\n")
        return folder

    def own(self, name):
        self.path.joinpath("own").write_text(f"4:memory:/elsewhere\n0::{name}\n")

    def made(self):
        """The groups that were made, each with what was written into its files."""
        return {
            folder: {file.name: file.read_text().strip() for file in folder.iterdir()}
            for folder in self.path.rglob("anyaccel-*")
        }


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree in which this process is in a group that its user may leave for one beside it."""
    found = Tree(tmp_path / "cgroup")
    found.group("/", "memory dmem")
    found.group("/ours", "memory dmem", "memory")
    found.group(
        "/ours/shell", "memory", procs="1", memory_max="max", cpu_max="max 100000", dmem_max=f"acme/{ONE}/vram max"
    )
    found.own("/ours/shell")
    monkeypatch.setattr(cgroup, "ROOT", str(found.path))
    monkeypatch.setattr(cgroup, "OWN", str(found.path / "own"))
    return found


@pytest.fixture
def pci(install):
    install("pci", PLUGIN)


def run(request, **options):
    return json.loads(aa.run(request, [sys.executable, "-c", SHOW], capture_output=True, check=True, **options).stdout)


def test_a_command_with_a_share_is_in_a_group_that_limits_its_memory(tree, pci):
    pid, host, by, phrase = run("pci/0:0.25")
    ((folder, files),) = tree.made().items()
    assert files == {"dmem.max": f"acme/{ONE}/vram {4 * GIB}", "cgroup.procs": str(pid)}
    assert folder.parent == tree.path / "ours"
    assert (tree.path / "ours/cgroup.subtree_control").read_text() == "+dmem"
    assert host is None
    assert by == ["cgroup dmem"]
    assert phrase == ["memory: cgroup dmem, compute: by agreement"]


def test_shares_of_two_devices_are_two_limits_and_a_whole_device_is_none(tree, pci):
    _, _, by, _ = run(["pci/0:0.5", "pci/1:0.5"])
    ((_, files),) = tree.made().items()
    assert files["dmem.max"].splitlines() == [f"acme/{ONE}/vram {8 * GIB}", f"acme/{TWO}/vram {8 * GIB}"]
    assert by == ["cgroup dmem"] * 2
    run("pci/0")
    assert len(tree.made()) == 1


@pytest.mark.parametrize("lacks", ["controller", "region", "groups", "permission"])
def test_a_share_stays_by_agreement_where_the_kernel_cannot_hold_it(tree, pci, monkeypatch, lacks):
    if lacks == "controller":
        tree.group("/", "memory", "memory")
        tree.group("/ours", "memory", "memory")
    elif lacks == "region":
        monkeypatch.setenv("NO_REGION", "a")
    elif lacks == "groups":
        (tree.path / "cgroup.controllers").unlink()
    else:
        for group in ("", "ours"):
            (tree.path / group / "cgroup.procs").unlink()
    assert run("pci/0:0.5")[1:3] == [None, ["by agreement"]]
    assert tree.made() == {}


def test_why_it_stays_by_agreement_is_known(tree, pci):
    (tree.path / "cgroup.controllers").unlink()
    with aa.launcher.hold.take("pci/0:0.5", lambda _: (), grouped=True) as hold:
        assert hold.launch.environment.unlimited == f"there is no cgroup v2 at {tree.path}"
    with aa.acquire("pci/0:0.5") as hold:
        assert hold.allocation.shares[0].memory_by == "by agreement", "this process is put nowhere"


def test_a_share_of_another_machine_is_not_limited_here(tree, acme):
    aa.run("acme/0:0.5", ["true"], machine="sim:A1:2")
    assert tree.made() == {}


def worker():
    held = aa.current()
    return os.getpid(), held.host_memory_bytes, [share.memory_by for share in held.shares]


def test_a_worker_of_a_pool_is_in_a_group(tree, pci):
    with aa.Pool("pci/0:0.5", memory="1GiB") as pool:
        future = pool.submit(worker)
        pid, host, by = future.result(60)
    ((_, files),) = tree.made().items()
    assert files == {
        "memory.max": str(GIB),
        "memory.swap.max": "0",
        "dmem.max": f"acme/{ONE}/vram {8 * GIB}",
        "cgroup.procs": str(pid),
    }
    assert (host, by) == (GIB, ["cgroup dmem"])
    assert future.allocation.shares[0].memory_by == "cgroup dmem"


def test_no_group_is_left_by_a_worker_that_cannot_start(tree, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    with aa.Pool(memory=GIB) as pool:
        gone.rmdir()
        with pytest.raises(aa.WorkerStartError, match="the working directory has gone"):
            pool.submit(worker).result(60)
        monkeypatch.chdir(tmp_path)
    assert tree.made() == {}


def test_a_worker_without_devices_is_held_to_memory(tree):
    with aa.Pool(memory=GIB) as pool:
        assert pool.submit(worker).result(60)[1:] == (GIB, [])
    assert [files["memory.max"] for files in tree.made().values()] == [str(GIB)]


def test_what_a_hold_starts_is_in_one_group(tree, acme):
    with aa.acquire("acme/0", machine="sim:A1:2", memory=GIB) as hold:
        for _ in range(2):
            assert hold.popen(["true"]).wait() == 0
    ((_, files),) = tree.made().items()
    assert files["memory.max"] == str(GIB)


CLI = """
import sys
from anyaccel.cli import main
from anyaccel.launcher import start
from anyaccel.linux import cgroup

# The kernel adds what is written to a group's list; of two ranks at once, one would empty this file under the other.
start._BECOME = start._BECOME.replace("cgroup.procs','w'", "cgroup.procs','a'").replace("write(own)", "write(own+' ')")
cgroup.ROOT, cgroup.OWN = sys.argv[1:3]
del sys.argv[1:3]
sys.exit(main())
"""


def anyaccel(tree, *arguments, **options):
    command = [sys.executable, "-c", CLI, cgroup.ROOT, cgroup.OWN, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.needs("jobs")
def test_the_command_line_holds_commands_to_memory(tree, acme, tmp_path):
    done = anyaccel(tree, "run", "acme/0", "--machine", "sim:A1:2", "--memory", "2G", "--", sys.executable, "-c", SHOW)
    assert done.returncode == 0, done.stderr
    pid, host, *_ = json.loads(done.stdout)
    ((folder, files),) = tree.made().items()
    assert (files["memory.max"], files["cgroup.procs"], host) == (str(2 * GIB), str(pid), 2 * GIB)
    assert f"anyaccel-{pid}-" in folder.name, "the command is the process that made it"
    done = anyaccel(
        tree, "run", "acme:2", "--machine", "sim:A1:2", "--memory", "3G", "--ranks", "--", sys.executable, "-c", SHOW
    )
    assert done.returncode == 0, done.stderr
    assert sum(files["memory.max"] == str(3 * GIB) for files in tree.made().values()) == 1, "all ranks are in one"
    done = anyaccel(
        tree, "sweep", "acme", "--machine", "sim:A1:2", "--memory", "4G", "--each", "n=1,2", "--", "echo", "{n}",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert any(files["memory.max"] == str(4 * GIB) for files in tree.made().values())


def test_a_command_that_is_not_there_is_told_as_ever(tree, acme):
    done = anyaccel(tree, "run", "acme/0", "--machine", "sim:A1:2", "--memory", "2G", "--", "no-such-program")
    assert (done.returncode, "'no-such-program' was not found" in done.stderr) == (127, True)
    with pytest.raises(CommandNotFoundError):
        aa.run("acme/0", ["no-such-program"], machine="sim:A1:2", memory=GIB)


def test_a_reason_is_shown_on_wish(tree, pci):
    tree.group("/", "memory", "memory")
    tree.group("/ours", "memory", "memory")
    quiet = anyaccel(tree, "run", "pci/0:0.5", "--", "true")
    told = anyaccel(tree, "run", "pci/0:0.5", "--verbose", "--", "true")
    assert (quiet.returncode, told.returncode) == (0, 0), told.stderr
    assert "cgroup" not in quiet.stderr
    assert "no cgroup limits its device memory: no cgroup that this user may write" in told.stderr


def refused(**options):
    found = refused_on("acme/0", machine="sim:A1:2", **options)
    assert aa.leases(aa.detect("sim:A1:2")) == (), "nothing stays held"
    return found


def refused_on(request, memory=GIB, **options):
    with pytest.raises(EnforcementError) as caught:
        aa.run(request, ["true"], memory=memory, **options)
    return str(caught.value), caught.value.hint


def test_memory_is_never_by_agreement(tree, acme):
    tree.group("/", "cpu", "cpu")
    tree.group("/ours", "cpu", "cpu")
    message, hint = refused(memory=GIB)
    assert "from /ours/shell upwards, has the controller memory" in message
    assert "Delegate=memory" in hint
    with pytest.raises(EnforcementError):
        aa.Pool(memory=GIB)
    (tree.path / "cgroup.controllers").unlink()
    message, hint = refused(memory=GIB)
    assert f"no cgroup v2 at {tree.path}" in message
    assert "unified_cgroup_hierarchy" in hint


@pytest.mark.parametrize(
    ("file", "text"), [("memory_max", "4096"), ("cpu_max", "50000 100000"), ("dmem_max", f"acme/{ONE}/vram 4096")]
)
def test_no_process_is_taken_out_of_a_group_that_limits_something(tree, acme, file, text):
    tree.group("/ours/shell", "memory", procs="1", **{file: text})
    message, _ = refused(memory=GIB)
    assert f"/ours/shell/{file.replace('_', '.')} limits this process already" in message


def test_a_group_with_processes_gives_no_controllers(tree, acme):
    tree.group("/ours", "memory dmem", "", procs="7")
    run_in = lambda: aa.run("acme/0", ["true"], machine="sim:A1:2", memory=GIB)  # noqa: E731
    run_in()
    ((folder, _),) = tree.made().items()
    assert folder.parent == tree.path, "the next one above is the root, which may"


@pytest.mark.parametrize("memory", ["much", "1", 1024, True, -5, "0G", 1.5])
def test_an_amount_that_makes_no_sense_is_refused(tree, acme, memory):
    for call in (
        lambda: aa.run("acme/0", ["true"], machine="sim:A1:2", memory=memory),
        lambda: aa.Pool(memory=memory),
    ):
        with pytest.raises(UsageError, match="memory must be"):
            call()
    assert tree.made() == {}


def test_a_process_that_runs_already_takes_no_memory(tree, acme):
    with pytest.raises(UsageError, match="about to start"):
        aa.use("acme/0", machine="sim:A1:2", memory=GIB)


STAND_IN = """#!/bin/sh
printf '%s\\n' "$@" > "$ASKED"
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


@pytest.fixture
def session(tree, tmp_path, monkeypatch):
    """This process is in a session that belongs to root, and its user has a systemd; ``systemd-run`` is a stand-in."""
    slices = f"/user.slice/user-{USER}.slice"
    for group in ("/user.slice", slices, f"{slices}/session-3.scope"):
        (tree.group(group, "memory", "memory", procs="1") / "cgroup.procs").unlink()
    for group in ("/", "/ours"):
        (tree.path / group.strip("/") / "cgroup.procs").unlink()
    tree.group(HOME, "memory", "memory")
    tree.own(f"{slices}/session-3.scope")
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "systemd-run").write_text(STAND_IN)
    (programs / "systemd-run").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "bus").touch()
    return tmp_path / "asked"


def test_a_session_of_root_reaches_the_users_own_groups_by_systemd(tree, acme, session):
    done = aa.run("acme/0", [sys.executable, "-c", SHOW], machine="sim:A1:2", memory=GIB, capture_output=True)
    pid, host, *_ = json.loads(done.stdout)
    asked = session.read_text().split("\n")
    assert asked[:5] == ["--user", "--scope", "--quiet", "--collect", "--"]
    ((folder, files),) = tree.made().items()
    assert str(folder).startswith(f"{tree.path}{HOME}/anyaccel-")
    assert (files["cgroup.procs"], files["memory.max"], host) == (str(pid), str(GIB), GIB)


def test_the_command_line_goes_by_systemd_too(tree, acme, session):
    done = anyaccel(tree, "run", "acme/0", "--machine", "sim:A1:2", "--memory", "1G", "--", sys.executable, "-c", SHOW)
    assert done.returncode == 0, done.stderr
    assert session.exists()
    assert json.loads(done.stdout)[1] == GIB


def test_a_pool_in_such_a_session_says_what_to_do(tree, session):
    with pytest.raises(EnforcementError) as caught:
        aa.Pool(memory=GIB)
    assert "user may move nothing" in str(caught.value)
    assert caught.value.hint == "start your program with 'systemd-run --user --scope --quiet --collect -- PROGRAM'"


def test_a_limit_of_the_session_is_not_left_by_systemd(tree, acme, session):
    (tree.path / f"user.slice/user-{USER}.slice/session-3.scope/memory.high").write_text("4096\n")
    message, _ = refused(memory=GIB)
    assert "session-3.scope/memory.high limits this process already" in message
    assert not session.exists()


def test_a_limit_of_all_that_the_user_runs_stays_in_force_and_is_no_obstacle(tree, acme, session):
    (tree.path / f"user.slice/user-{USER}.slice/memory.max").write_text(f"{4 * GIB}\n")
    aa.run("acme/0", ["true"], machine="sim:A1:2", memory=GIB)
    ((folder, _),) = tree.made().items()
    assert str(folder).startswith(f"{tree.path}{HOME}/anyaccel-")


def test_a_share_stays_by_agreement_where_no_systemd_answers(tree, pci, session, tmp_path):
    tree.group(HOME, "memory dmem", "memory dmem")
    assert run("pci/0:0.5")[2] == ["cgroup dmem"]
    (tmp_path / "bus").unlink()
    assert run("pci/0:0.5")[2] == ["by agreement"]
    message, hint = refused_on("pci/0")
    assert "user may move nothing" in message
    assert hint.startswith("start your program with 'systemd-run")


def test_a_program_that_cannot_be_put_there_is_not_started(tree, acme, monkeypatch):
    made = cgroup.make

    def make(lines, through):
        place = made(lines, through)
        os.mkdir(f"{place.path}/cgroup.procs")
        return place

    monkeypatch.setattr(cgroup, "make", make)
    done = aa.run("acme/0", ["echo", "ran"], machine="sim:A1:2", memory=GIB, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (126, "")
    assert "it cannot enter the cgroup" in done.stderr
    with aa.Pool(memory=GIB) as pool, pytest.raises(OSError, match=r"cgroup\.procs"):
        pool.submit(worker).result(60)


def test_doctor_names_what_root_would_have_to_do(tree, pci, session):
    (tree.path / "dmem.capacity").write_text(f"acme/{ONE}/vram {16 * GIB}\n")
    done = anyaccel(tree, "doctor", "--quiet")
    (line,) = (line for line in done.stdout.splitlines() if "memory" in line)
    slices = f"/user.slice/user-{USER}.slice"
    files = " ".join(f"{tree.path}{group}/cgroup.subtree_control" for group in ("", "/user.slice", slices))
    assert line.startswith("warn  the kernel can limit the memory of shares of pci/0, but not for this user")
    assert line.endswith(f"->  once per boot: echo +dmem | sudo tee {files}")
    tree.group(HOME, "memory dmem", "memory")
    assert "memory of shares" not in anyaccel(tree, "doctor").stdout
    assert (tree.path / HOME.strip("/") / "cgroup.subtree_control").read_text() == "memory\n", "it only looks"
    tree.group(HOME, "memory", "memory")
    (tree.path / "dmem.capacity").write_text(f"other/{ONE}/memory {16 * GIB}\n")
    assert "memory of shares" not in anyaccel(tree, "doctor").stdout, "its plug-in lets no user write there"


# The kernel's own groups.


def mounted():
    """Where cgroup v2 is mounted with a controller whose limits affect no process; None where it is not."""
    with contextlib.suppress(OSError), open("/proc/mounts", encoding="utf-8") as file:
        for line in file:
            _, path, kind, *_ = line.split()
            if kind == "cgroup2" and os.access(f"{path}/cgroup.procs", os.W_OK):
                with open(f"{path}/cgroup.controllers", encoding="utf-8") as controllers:
                    if "hugetlb" in controllers.read().split():
                        return path
    return None


@pytest.fixture
def kernel(monkeypatch):
    path = mounted()
    if path is None:
        pytest.skip("no cgroup v2 with the controller hugetlb is mounted that this user may write")
    monkeypatch.setattr(cgroup, "ROOT", path)
    try:
        cgroup.find_place({"hugetlb"}, None)
    except cgroup.UnavailableError as error:
        pytest.skip(f"no group can be made here: {error}")
    control = f"{path}/cgroup.subtree_control"
    with open(control, encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # tests of other processes would lose the controller at our end
        given = file.read().split()
        yield path
        if "hugetlb" not in given:
            with contextlib.suppress(OSError), open(control, "w", encoding="ascii") as own:
                own.write("-hugetlb")


def test_a_real_group_is_made_entered_and_removed(kernel):
    path = cgroup.make({"hugetlb.2MB.max": str(6 << 20)}, None).path
    with open(f"{path}/hugetlb.2MB.max", encoding="ascii") as file:
        assert file.read() == f"{6 << 20}\n"
    command = "cat /proc/self/cgroup; exec sleep 60"
    group = cgroup.WorkerGroup(path)
    with start_marked(["sh", "-c", command], (), group, stdout=subprocess.PIPE, text=True) as process:
        lines = iter(process.stdout.readline, "")
        assert next(line for line in lines if line.startswith("0::")) == f"0::{path.removeprefix(kernel)}\n"
        assert cgroup.remove(path) is None
        assert os.path.isdir(path), "the kernel keeps a group in which something runs"
        process.kill()
        process.wait()
    until(lambda: cgroup.remove(path) or not os.path.exists(path), "the end of the group")


def test_a_limit_that_the_real_kernel_refuses_leaves_no_group(kernel):
    with pytest.raises(OSError, match="Invalid argument"):
        cgroup.make({"hugetlb.2MB.max": "much"}, None)
    assert not [name for name in os.listdir(kernel) if name.startswith(f"anyaccel-{os.getpid()}-")]


def test_what_a_killed_launcher_left_is_removed_by_the_next(kernel):
    program = (
        "import sys; from anyaccel.linux import cgroup; cgroup.ROOT = sys.argv[1];"
        "print(cgroup.make({'hugetlb.2MB.max': str(2 << 20)}, None).path)"
    )
    left = subprocess.check_output([sys.executable, "-c", program, kernel], text=True).strip()
    assert os.path.isdir(left)
    path = cgroup.make({"hugetlb.2MB.max": str(2 << 20)}, None).path
    try:
        assert not os.path.exists(left)
        assert os.path.isdir(path)
    finally:
        cgroup.remove(path)


REAL_CLI = """
import sys
from anyaccel.cli import main
from anyaccel.linux import cgroup
cgroup.ROOT = sys.argv.pop(1)
make, find_place = cgroup.make, cgroup.find_place
cgroup.find_place = lambda _, through: find_place({"hugetlb"}, through)
cgroup.make = lambda lines, through: make({"hugetlb.2MB.max": str(2 << 20)}, through)
sys.exit(main())
"""


@pytest.mark.parametrize("detached", [False, pytest.param(True, marks=pytest.mark.needs("jobs"))])
def test_the_command_line_leaves_no_real_group_behind(kernel, acme, tmp_path, detached):
    """The controller of memory itself is not here: another one stands for it."""
    show = ["sh", "-c", f"cat /proc/self/cgroup > {tmp_path}/shown.new; mv {tmp_path}/shown.new {tmp_path}/shown"]
    options = ["--machine", "sim:A1:2", "--memory", "1G", *(["--detach"] if detached else [])]
    command = [sys.executable, "-c", REAL_CLI, kernel, "run", "acme/0", *options, "--", *show]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    until((tmp_path / "shown").exists, "the command")
    own = next(line[3:] for line in (tmp_path / "shown").read_text().splitlines() if line.startswith("0::"))
    assert "/anyaccel-" in own
    until(lambda: not os.path.exists(f"{kernel}{own}"), "the end of the group")
