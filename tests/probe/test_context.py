"""The gate through which a plug-in sees a machine: the same answers from a host, another root and a recording."""

import errno
import json
import os
import time

import pytest
from anyaccel.errors import CommandTimeoutError, QueryError
from anyaccel.probe.context import DeviceNode, ProbeContext
from anyaccel.probe.host import HostFacts
from anyaccel.probe.paths import natural
from anyaccel.probe.recording import RecordedFacts, Recorder, merge
from waiting import PATIENCE, until


@pytest.fixture
def root(tmp_path):
    """Make a tree like sysfs, with two PCI functions behind a bridge."""
    for address, vendor, numa in (("0000:0a:00.0", "0x1234", "1"), ("0000:0b:00.0", "0x9999", "-1")):
        real = tmp_path / f"sys/devices/pci0000:00/0000:00:01.0/{address}"
        real.mkdir(parents=True)
        for name, text in {"vendor": vendor, "device": "0x00ab", "class": "0x030200", "numa_node": numa}.items():
            (real / name).write_text(text + "\n")
        (real / "driver").symlink_to("../../../../bus/pci/drivers/acme")
        (real / "iommu_group").symlink_to("../../../../kernel/iommu_groups/7")
        link = tmp_path / f"sys/bus/pci/devices/{address}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../../devices/pci0000:00/0000:00:01.0/{address}")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/junk").write_bytes(b"\xff\xfe text")
    return str(tmp_path)


def contexts(root):
    """Return a context of the machine below a root, and a function for the replay of its facts."""
    recorder = Recorder(HostFacts({"A": "1"}, root))
    live = ProbeContext(recorder, time.monotonic() + PATIENCE)
    return live, lambda: ProbeContext(
        RecordedFacts(json.loads(json.dumps(recorder.recording()))), time.monotonic() + PATIENCE
    )


def test_pci_functions_are_found_by_vendor_and_class(root):
    live, replay = contexts(root)
    for context in (lambda: live, replay):
        ctx = context()
        (found,) = ctx.pci(vendor=0x1234, classes=(0x0300, 0x0302))
        assert (found.address, found.device, found.class_code) == ("0000:0a:00.0", 0xAB, 0x0302)
        assert (found.driver, found.iommu_group, found.numa_node) == ("acme", "7", 1)
        assert found.bridges == ("0000:00:01.0",)
        assert ctx.pci(vendor=0x1234, classes=(0x0106,)) == []
        assert [each.numa_node for each in ctx.pci()] == [1, None]


@pytest.mark.parametrize("domain", ["10000", "3f8cfdd"])
def test_domains_have_more_than_four_digits_behind_some_controllers(root, domain):
    real = f"{root}/sys/devices/pci0000:00/0000:00:0e.0/pci{domain}:e0/{domain}:e0:06.0/{domain}:e1:00.0"
    os.makedirs(real)
    for name, text in {"vendor": "0x1234", "device": "0x00ab", "class": "0x030200"}.items():
        with open(f"{real}/{name}", "w") as file:
            file.write(text)
    os.symlink(real.replace(f"{root}/sys", "../../.."), f"{root}/sys/bus/pci/devices/{domain}:e1:00.0")
    live, replay = contexts(root)
    for context in (lambda: live, replay):
        first, last = context().pci(vendor=0x1234)
        assert (first.address, last.address) == ("0000:0a:00.0", f"{domain}:e1:00.0")
        assert last.bridges == ("0000:00:0e.0", f"{domain}:e0:06.0")


def test_a_replay_gives_the_same_answers_as_the_machine(root):
    live, replay = contexts(root)

    def ask(ctx):
        return (
            ctx.read("/proc/junk"),
            ctx.read("/no/such"),
            ctx.read("/proc"),
            ctx.read_int("/proc/junk"),
            ctx.glob("/sys/bus/pci/devices/*"),
            ctx.glob("/sys/bus/pci/devices/0000:0[a-a]*/vendor"),
            ctx.glob("/sys/bus/pci/devices/0000:0[!a]*/vendor"),
            ctx.readlink("/sys/bus/pci/devices/0000:0a:00.0"),
            ctx.readlink("/proc/junk"),
            ctx.exists("/proc"),
            ctx.exists("/nowhere"),
            ctx.is_dir("/sys/bus"),
            ctx.node("/proc/junk"),
            ctx.environ.get("A"),
            ctx.environ.get("B"),
        )

    first = ask(live)
    assert first[0] == "\ufffd\ufffd text"
    assert ask(replay()) == first


def test_a_function_without_a_device_id_is_no_silent_zero(root):
    with open(f"{root}/sys/bus/pci/devices/0000:0a:00.0/device", "w") as file:
        file.write("junk")
    ctx = ProbeContext(HostFacts({}, root), time.monotonic() + PATIENCE)
    with pytest.raises(ValueError, match=r"0000:0a:00.0/device must hold a PCI id such as 0x1234 \(got 'junk'\)"):
        ctx.pci(vendor=0x1234)


def test_a_call_of_a_hook_reads_the_bus_once(root):
    ctx, later = (ProbeContext(HostFacts({}, root), time.monotonic() + PATIENCE) for _ in range(2))
    found = ctx.pci(vendor=0x1234)
    os.unlink(f"{root}/sys/bus/pci/devices/0000:0a:00.0")
    assert ctx.pci(vendor=0x1234) == found
    ctx.pci(vendor=0x1234).clear()
    assert ctx.pci(vendor=0x1234) == found
    assert later.pci(vendor=0x1234) == []


def test_a_pattern_finds_what_the_one_of_a_shell_finds(root):
    for name in ("x10", "x2", ".x1", "[x3]"):
        os.mkdir(f"{root}/{name}")
    os.symlink("/nowhere", f"{root}/x2/dangling")
    ctx = ProbeContext(HostFacts({}, root), time.monotonic() + PATIENCE)
    assert [ctx.glob(pattern) for pattern in ("/x*", "/?x*", "/.x[0-9]", "/[[]x*", "/x[!1]*/dangling")] == [
        ["/x2", "/x10"], ["/[x3]"], ["/.x1"], ["/[x3]"], ["/x2/dangling"],
    ]  # fmt: skip
    assert [ctx.glob(pattern) for pattern in ("/x*/none", "/none/*", "/proc/junk/*", "/x3")] == [[]] * 4
    assert ctx.glob("/x2/dangling") == ["/x2/dangling"]


def test_a_recording_holds_only_what_was_asked(root):
    recorder = Recorder(HostFacts({"ASKED": "1", "SECRET": "2"}, root))
    ctx = ProbeContext(recorder, time.monotonic() + PATIENCE)
    ctx.read("/proc/junk")
    assert ctx.environ.get("ASKED") == "1"
    recording = recorder.recording()
    assert recording["environ"] == {"ASKED": "1"}
    assert list(recording["paths"]) == ["/proc/junk"]


def test_a_device_node_is_known_by_its_numbers():
    recorder = Recorder(HostFacts({}))
    ctx = ProbeContext(recorder, time.monotonic() + PATIENCE)
    assert ctx.node("/dev/null") == DeviceNode(path="/dev/null", major=1, minor=3, group=os.stat("/dev/null").st_gid)
    assert ctx.node("/etc/passwd") is None
    assert RecordedFacts(recorder.recording()).node("/dev/null") == ctx.node("/dev/null")


def test_a_file_that_may_not_be_read_is_not_absent(root):
    recorded = RecordedFacts({"paths": {"/proc/secret": {"errno": "EACCES"}}})
    with pytest.raises(PermissionError) as caught:
        recorded.read("/proc/secret")
    assert (caught.value.errno, caught.value.filename) == (errno.EACCES, "/proc/secret")


def test_paths_lead_through_recorded_links():
    recorded = RecordedFacts(
        {
            "paths": {
                "/sys/class/acme/a0": {"link": "../../devices/x/a0"},
                "/sys/devices/x/a0/serial": {"text": "7"},
                "/sys/devices/x/a0/driver": {"link": "../../bus/acme"},
                "/loop": {"link": "/loop"},
            }
        }
    )
    assert recorded.read("/sys/class/acme/a0/serial") == "7"
    assert recorded.is_dir("/sys/class/acme/a0")
    assert recorded.exists("/sys/class/acme/a0/serial")
    assert recorded.readlink("/sys/class/acme/a0/driver") == "../../bus/acme"
    with pytest.raises(OSError, match="Too many levels"):
        recorded.read("/loop")


def test_numbers_in_paths_are_sorted_as_numbers():
    assert sorted(["/dev/x10", "/dev/x2", "/dev/x"], key=natural) == ["/dev/x", "/dev/x2", "/dev/x10"]


def test_a_command_runs_without_a_shell_and_without_input(tmp_path):
    tool = tmp_path / "tool"
    tool.write_text('#!/bin/sh\ncat\necho "$1"; echo err >&2; exit 3\n')
    tool.chmod(0o755)
    recorder = Recorder(HostFacts({"PATH": f"{tmp_path}:{os.environ['PATH']}"}))
    ctx = ProbeContext(recorder, time.monotonic() + PATIENCE)
    result = ctx.run(["tool", "$HOME; x"])
    assert (result.returncode, result.stdout, result.stderr) == (3, "$HOME; x\n", "err\n")
    assert ctx.run(["no-such-tool"]) is None
    replay = RecordedFacts(recorder.recording())
    assert replay.run(["tool", "$HOME; x"], 1) == result
    assert replay.run(["tool", "other"], 1) is None


def has_ended(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path):
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\nsleep 60 & echo $! > $1; wait\n")
    tool.chmod(0o755)
    recorder = Recorder(HostFacts(os.environ))
    ctx = ProbeContext(recorder, time.monotonic() + 100)
    for seconds in (0.5, 5, 50):  # so that it has a child by then
        with pytest.raises(CommandTimeoutError, match=rf"did not end within {seconds:.1f} s and was killed"):
            ctx.run([str(tool), str(tmp_path / "pid")], timeout=seconds)
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip():
            break
    child = int((tmp_path / "pid").read_text())
    until(lambda: has_ended(child), "the end of its child")
    with pytest.raises(CommandTimeoutError):
        RecordedFacts(recorder.recording()).run([str(tool), str(tmp_path / "pid")], 1)


class LibraryError(Exception):
    """An error with a number, as in vendor libraries."""

    def __init__(self, value):
        super().__init__(f"code {value}")
        self.value = value


def test_a_query_is_asked_once_and_replayed_without_a_call():
    recorder = Recorder(HostFacts({}))
    ctx = ProbeContext(recorder, time.monotonic() + PATIENCE)
    assert ctx.query("lib/count", lambda: {"count": 2}) == {"count": 2}

    def fails():
        raise LibraryError(18)

    with pytest.raises(QueryError) as live:
        ctx.query("lib/broken", fails)
    replay = ProbeContext(RecordedFacts(recorder.recording()), time.monotonic() + PATIENCE)
    assert replay.query("lib/count", lambda: pytest.fail("called")) == {"count": 2}
    with pytest.raises(QueryError) as replayed:
        replay.query("lib/broken", lambda: pytest.fail("called"))
    for caught in (live, replayed):
        assert (caught.value.kind, caught.value.value, str(caught.value)) == ("LibraryError", 18, "code 18")
    with pytest.raises(QueryError, match="the recording has no answer"):
        replay.query("lib/other", lambda: 1)


def test_libraries_and_commands_answer_for_this_machine_only(tmp_path):
    ctx = ProbeContext(HostFacts(os.environ, str(tmp_path)), time.monotonic() + PATIENCE)
    assert ctx.run(["true"]) is None
    with pytest.raises(QueryError, match="cannot be asked about"):
        ctx.query("lib/x", lambda: 1)


def test_recordings_of_several_plugins_become_one():
    first = {
        "environ": {"A": "1"},
        "paths": {"/x": {}},
        "commands": [{"argv": ["t"]}] * 2,
        "queries": {"q": {"value": 1}},
    }
    second = {"environ": {"B": "2"}, "paths": {"/x": {"text": "t"}}, "commands": [{"argv": ["t"]}], "queries": {}}
    assert merge([first, second]) == {
        "schema": "anyaccel.recording/1",
        "environ": {"A": "1", "B": "2"},
        "paths": {"/x": {"text": "t"}},
        "commands": [{"argv": ["t"]}],
        "queries": {"q": {"value": 1}},
    }
