"""What is wrong with a machine: one line and one way out each, worst first; the exit status says whether it is."""

from __future__ import annotations

import grp
import json
import os
import stat
from pathlib import Path

import pytest
from anyaccel.inventory.diagnose import _nodes, diagnose
from anyaccel.model import Device, Severity
from anyaccel.probe.machine import Machine

DIAGNOSE = """

from anyaccel.plugin import Finding, Severity

@hookimpl
def anyaccel_diagnose(ctx):
    return [
        Finding(severity=Severity.OK, reason="The bus is quiet."),
        Finding(
            severity=Severity.WARN,
            reason=f"ACME_ORDER={ctx.environ['ACME_ORDER']} does nothing.",
            remedy="unset ACME_ORDER",
        ),
    ] if "ACME_ORDER" in ctx.environ else []
"""

LEASES = "ok    leases are kept in "  # test_leases.py is about these
DIED = "its process ended with exit status 9 before it answered"
WAY = (
    "Other vendors are unaffected. Run 'anyaccel plugins bad' for the details, or set ANYACCEL_DISABLE=bad to leave it"
    " out."
)


@pytest.fixture
def source():
    return (Path(__file__).parents[1] / "vendors/acme.py").read_text()


def doctor(anyaccel, *arguments, **options):
    done = anyaccel("doctor", *arguments, **options)
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, [line for line in done.stdout.splitlines() if not line.startswith(LEASES)]


def found(*arguments, **options):
    return [
        (finding.severity.value, finding.reason, finding.remedy) for _, finding in diagnose(*arguments, **options)[1]
    ]


def test_a_machine_that_is_well(acme, anyaccel, record):
    machine = record({}, {})
    assert doctor(anyaccel, "--machine", machine) == (0, ["ok    acme plug-in 1.2.3, driver 7.1, 2 devices"])
    assert doctor(anyaccel, "--machine", machine, "--quiet") == (0, [])
    assert doctor(anyaccel) == (0, ["ok    acme plug-in 1.2.3, no hardware of this vendor is on the machine"])
    assert doctor(anyaccel, "--machine", "sim:A1:1") == (0, ["ok    acme plug-in 1.2.3, 1 device"])


def test_what_is_worst_comes_first_and_has_a_way_out(install, source, anyaccel, record):
    install("acme", source + DIAGNOSE)
    install("bad", "import os; os._exit(9)", distribution="third-party-bad", version="0.3")
    machine = record({"health": "unhealthy", "reason": "it fell off the bus", "remedy": "reboot the machine"}, {})
    status, lines = doctor(anyaccel, "--machine", machine, env={"ACME_ORDER": "x"})
    assert (status, lines) == (1, [  # ACME_ORDER is this process's, not the recorded machine's
        "fail  acme/0 (acme-s0) cannot be used: it fell off the bus  ->  reboot the machine",
        f"fail  third-party-bad 0.3: anyaccel_detect: {DIED}  ->  {WAY}",
        "ok    acme plug-in 1.2.3, driver 7.1, 2 devices",
    ])  # fmt: skip


def test_json(install, source, anyaccel, record):
    install("acme", source + DIAGNOSE)
    machine = record({}, environ={"ACME_ORDER": "up"})
    done = anyaccel("doctor", "--json", "--machine", machine)
    answer = json.loads(done.stdout)
    assert (done.returncode, done.stderr, answer["schema"], answer["well"]) == (1, "", "anyaccel.doctor/1", False)
    *findings, leases = answer["findings"]
    assert (leases["vendor"], leases["severity"]) == (None, "ok")
    assert findings == [
        {"vendor": "acme", "severity": "warn", "message": "ACME_ORDER=up does nothing.", "fix": "unset ACME_ORDER"},
        {"vendor": "acme", "severity": "ok", "message": "The bus is quiet.", "fix": None},
        {"vendor": "acme", "severity": "ok", "message": "acme plug-in 1.2.3, driver 7.1, 1 device", "fix": None},
    ]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ValueError('no tool')", "anyaccel_diagnose: it raised ValueError: no tool"),
        ("return 'all is well'", "anyaccel_diagnose: it must return a list or tuple of Findings"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "anyaccel_diagnose: its process was killed by SIGSEGV",
        ),
    ],
)
def test_a_diagnosis_that_fails_is_itself_a_finding(body, reason, install, source, record):
    install("acme", f"{source}\n\n@hookimpl\ndef anyaccel_diagnose(ctx):\n    {body}\n")
    (severity, message, fix), well = found(record({}))
    assert (severity, message.startswith(f"anyaccel-acme 1.2.3: {reason}")) == ("fail", True), message
    assert "ANYACCEL_DISABLE=acme" in fix
    assert well == ("ok", "acme plug-in 1.2.3, driver 7.1, 1 device", "")


def test_two_plugins_for_one_vendor(install, source, anyaccel):
    install("acme", source)
    install("acme", source, distribution="rival-acme")
    status, lines = doctor(anyaccel)
    assert status == 1
    assert lines[0].split("  ->  ") == [
        "fail  plug-in acme: anyaccel-acme and rival-acme both claim the vendor 'acme', so neither is used",
        "Uninstall one, or set ANYACCEL_PLUGINS=acme=MODULE to choose.",
    ]


def test_no_plugin_at_all(anyaccel):
    status, lines = doctor(anyaccel, env={"ANYACCEL_PLUGINS": "none"})
    assert status == 1
    assert [line.split("  ->  ") for line in lines] == [
        [
            "warn  no plug-in is installed, so nothing was probed",
            "install one, for example with 'pip install anyaccel[all]'",
        ]
    ]


def test_a_mask_that_makes_no_sense_or_hides_everything(acme, record):
    machine = record({}, {})
    severity, message, fix = found(machine, environ={**os.environ, "ACME_VISIBLE": "nonsense"})[0]
    assert severity == "warn"
    assert message == (
        "The environment hides every device of acme: it raised ValueError: ACME_VISIBLE must be a comma list of ids or"
        " indexes (got 'nonsense')"
    )
    assert fix == "unset ACME_VISIBLE"
    hiding = {**os.environ, "ACME_VISIBLE": ""}
    assert found(machine, environ=hiding) == [
        ("warn", "the environment hides every device of acme", "unset ACME_VISIBLE"),
        ("ok", "acme plug-in 1.2.3, driver 7.1, 2 devices, 2 of them hidden", ""),
    ]
    # a worker is meant to see only what it was given
    assert [each[0] for each in found(machine, environ={**hiding, "ANYACCEL_DEVICES": ""})] == ["ok"]


def test_device_nodes_that_this_user_may_not_open(acme, record):
    nodes = {
        f"/dev/acme{index}": {"char": [195, index], "access": access} for index, access in enumerate(("", "r", "rw"))
    }
    machine = record({}, {}, {})
    path = Path(machine) / "machine.json"
    recording = json.loads(path.read_text())
    recording["paths"] |= nodes
    path.write_text(json.dumps(recording))
    assert found(machine)[0] == ("fail", "this user may not open /dev/acme0", "ask an administrator for access")
    assert len(found(machine)) == 2


HOST_NODES = """
from anyaccel.plugin import *

@hookimpl
def anyaccel_info():
    return PluginInfo(vendor="acme", resource="APU", kind="apu", env_vars=("ACME_VISIBLE",))

@hookimpl
def anyaccel_detect(ctx):
    return Detected(devices=tuple(
        Device(id=f"a{index}", index=index, model="A", memory_bytes=1 << 30, nodes=(node,))
        for index, node in enumerate(ctx.environ["ACME_NODES"].split(","))
    ))

@hookimpl
def anyaccel_fractional(device):
    return Fractional.NO

@hookimpl
def anyaccel_tags(device):
    return ("A",)

@hookimpl
def anyaccel_env(devices):
    return EnvEdits(set={"ACME_VISIBLE": ",".join(d.id for d in devices)})

@hookimpl
def anyaccel_stats(devices, ctx):
    held = (DeviceProcess(pid=7),)
    return {
        d.id: Stats(memory_used_bytes=1 << 29, processes=(held, (), None)[min(d.index, 2)]) for d in devices
    }
"""


def test_nodes_and_memory_of_this_host(install, tmp_path):
    install("acme", HOST_NODES)
    here = {**os.environ, "ACME_NODES": "/dev/null,/dev/zero,/dev/full"}
    assert found(environ=here) == [
        ("warn", "acme/1 has 0.5 GiB in use without a visible process",
         "end processes of other users or containers; if there are none, reset the device"),
        ("ok", "acme plug-in 1.2.3, 3 devices", ""),
    ]  # fmt: skip
    gone = {**here, "ACME_NODES": "/dev/null,/dev/no-such,/dev/nor-this"}
    missing = "device nodes of acme are missing: /dev/no-such, /dev/nor-this"
    assert ("fail", missing) in [each[:2] for each in found(environ=gone)]


@pytest.mark.parametrize("closed_directory", [False, True])
def test_the_group_that_opens_a_node_is_named(closed_directory, tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root can make a device node that another user may not open")
    node = tmp_path / "node"
    try:
        os.mknod(node, 0o060 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("this container may not make device nodes")
    group = grp.getgrall()[1]
    os.chown(node, 0, group.gr_gid)
    os.chmod(node, 0o060)
    os.chmod(tmp_path, 0o700 if closed_directory else 0o755)
    for directory in tmp_path.parents:
        if directory.stat().st_uid == 0 and directory.name.startswith(("pytest-", "popen-")):
            os.chmod(directory, 0o755)  # it belongs to this run
    device = Device(id="a0", index=0, model="A", vendor="acme", nodes=(str(node),))
    output, child_end = os.pipe()
    child = os.fork()
    if child == 0:  # as another user, who must not return into pytest
        answer = "it did not get so far"
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            answer = [(finding.reason, finding.remedy) for finding in _nodes(Machine(), [device])]
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            answer = repr(error)
        finally:
            os.write(child_end, json.dumps(answer).encode())
            os._exit(0)
    os.waitpid(child, 0)
    fix = f"sudo usermod -aG {group.gr_name} $USER  (then log in again)"
    assert json.loads(os.read(output, 1 << 16)) == [
        [f"this user may not open {node}", "ask an administrator for access" if closed_directory else fix]
    ]
    os.close(output)
    os.close(child_end)
    assert list(_nodes(Machine(), [device])) == []  # root may


def test_a_machine_that_does_not_exist_is_an_error_not_a_finding(acme, anyaccel):
    done = anyaccel("doctor", "--machine", "/no/such")
    assert (done.returncode, done.stdout) == (2, "")


def test_severities_are_all_ordered(acme, record):
    _, findings = diagnose(record({"health": "unhealthy", "reason": "lost"}))
    assert [finding.severity for _, finding in findings] == [Severity.FAIL, Severity.OK]
