"""Detection: every vendor at once, in separate processes."""

import contextlib
import re
import subprocess
import sys

import anyaccel as aa
import psutil
import pytest
from anyaccel.model import Health, ProblemKind, VendorState

HEAD = """
from anyaccel.plugin import *
@hookimpl
def anyaccel_info(): return PluginInfo(vendor="bad", resource="BPU", kind="bpu", env_vars=("BAD_VISIBLE",))
@hookimpl
def anyaccel_fractional(device): return Fractional.NO
@hookimpl
def anyaccel_tags(device): return ("BAD-1",)
@hookimpl
def anyaccel_env(devices, ctx): return EnvEdits(set={"BAD_VISIBLE": ",".join(d.id for d in devices)})
@hookimpl
def anyaccel_detect(ctx):
"""

FAULTS = {
    "hangs": ("import time; time.sleep(60)", ProblemKind.TIMEOUT, "it did not answer within {} s."),
    "exits at once": ("import os; os._exit(7)", ProblemKind.DIED,
                      "its process ended with exit status 7 before it answered."),
    "exits politely": ("raise SystemExit(3)", ProblemKind.RAISED,
                       "it raised SystemExit: 3 (plug_third_party_bad.py, line 13)"),
    "crashes": ("import ctypes; ctypes.string_at(0)", ProblemKind.DIED,
                "its process was killed by SIGSEGV before it answered."),
    "raises": ("raise OSError('libbad.so.2: cannot open shared object file')", ProblemKind.RAISED,
               "it raised OSError: libbad.so.2: cannot open shared object file (plug_third_party_bad.py, line 13)"),
    "returns junk": ("return [1]", ProblemKind.CONTRACT,
                     "it must return Detected(devices=tuple(devices)) or None (got [1] that is a list)."),
    "returns wrong fields": ("return Detected(devices=(Device(id='a b', index=True, model=3),))", ProblemKind.CONTRACT,
                             ("Detected.devices[0].index must be int (got True that is a bool); "
                              "Detected.devices[0].model must be str (got 3 that is a int).")),
    "repeats an id": ("return Detected(devices=tuple(Device(id='x', index=i, model='m') for i in (0, 1)))",
                      ProblemKind.CONTRACT, "Device.id must be unique (got 'x' more than once)."),
    "repeats an index": ("return Detected(devices=tuple(Device(id=i, index=0, model='m') for i in 'ab'))",
                         ProblemKind.CONTRACT, "Device.index must be unique (got 0 more than once)."),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_vendor_that_fails_costs_only_itself(fault, install, acme, record):
    body, kind, reason = FAULTS[fault]
    install("bad", HEAD + "    " + body, distribution="third-party-bad", version="0.3")
    machine = record({}, {})
    for seconds in (2, 30) if fault == "hangs" else (60,):  # so that the other one has answered by then
        inventory = aa.detect(machine, timeout=seconds)
        if inventory.report("acme").state is VendorState.OK:
            break
    assert [device.id for device in inventory.devices] == ["acme-s0", "acme-s1"]
    bad = inventory.report("bad")
    assert bad.state is VendorState.FAILED
    assert bad.problem.kind is kind
    assert re.sub(r" \(it was at \S+:\d+ in \w+\)", "", bad.problem.reason) == reason.format(seconds)
    assert (bad.problem.distribution, bad.problem.version) == ("third-party-bad", "0.3")
    assert bad.problem.hook == "anyaccel_detect"
    assert "ANYACCEL_DISABLE=bad" in bad.problem.next_step
    assert inventory.report("acme").state is VendorState.OK


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os; os._exit(1)", "its process ended with exit status 1 before it answered."),
        ("import ctypes; ctypes.string_at(0)", "its process was killed by SIGSEGV before it answered."),
        (
            "import no_such_module_at_all",
            (
                "importing 'plug_anyaccel_bad' raised ModuleNotFoundError: No module named 'no_such_module_at_all'"
                " (plug_anyaccel_bad.py, line 1)"
            ),
        ),
        (
            "raise SystemExit('usage: tool')",
            "importing 'plug_anyaccel_bad' raised SystemExit: usage: tool (plug_anyaccel_bad.py, line 1)",
        ),
        ("def (", "importing 'plug_anyaccel_bad' raised SyntaxError: invalid syntax (plug_anyaccel_bad.py, line 1)"),
    ],
)
def test_a_plugin_that_cannot_be_imported_costs_only_itself(source, reason, install, acme, record):
    install("bad", source)
    inventory = aa.detect(record({}), timeout=60)
    said = inventory.report("bad").problem.reason
    assert re.sub(r" \(it was at \S+:\d+ in \w+\)", "", said) == reason
    assert len(inventory.devices) == 1


def test_all_vendors_are_asked_at_once(install, acme, record, tmp_path):
    """Each vendor answers once all have been asked, so a sequence would never end."""
    for number in range(3):
        name = f"slow{number}"
        body = f"""
    import glob, time
    open({str(tmp_path)!r} + "/asked-{number}", "w").close()
    while len(glob.glob({str(tmp_path)!r} + "/asked-*")) < 3:
        time.sleep(0.01)
"""
        install(name, HEAD.replace('"bad"', f'"{name}"') + body)
    inventory = aa.detect(record({}), timeout=60)
    assert [report.state for report in inventory.vendors] == [VendorState.OK, *[VendorState.ABSENT] * 3]


def test_output_of_a_plugin_stays_out_of_ours(install, acme, record, capfd):
    install("bad", HEAD + "    import os; print('noise'); os.system('echo more'); return Detected()")
    inventory = aa.detect(record({}))
    assert inventory.report("bad").state is VendorState.OK
    assert capfd.readouterr() == ("", "")


def test_nothing_of_a_vendor_is_loaded_into_this_process(acme, record):
    import sys

    aa.detect(record({}))
    assert not [name for name in sys.modules if name.startswith("plug_")]


def test_no_process_outlives_a_hang(install, acme, record, tmp_path):
    pid_file = tmp_path / "pid"
    install("bad", HEAD + f"    import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    for seconds in (1, 5, 50):  # so that it has begun by then
        aa.detect(record({}, name=f"after-{seconds}"), timeout=seconds)
        if pid_file.exists() and pid_file.read_text():
            break
    pid = int(pid_file.read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=30)


def test_two_plugins_for_one_vendor_keep_each_other_out(install, acme, record):
    install("acme", acme.read_text(), distribution="other-acme")
    inventory = aa.detect(record({}))
    assert inventory.devices == ()
    assert inventory.report("acme").problem.reason == (
        "anyaccel-acme and other-acme both claim the vendor 'acme', so neither is used."
    )


def test_a_hang_says_where_it_is(install, acme, record, tmp_path):
    begun = tmp_path / "begun"
    module = install("bad", HEAD + f"    import time\n    open({str(begun)!r}, 'w')\n    time.sleep(60)")
    line = module.read_text().splitlines().index("    time.sleep(60)") + 1
    machine = record({})
    for seconds in (2, 30):  # so that it has come there by then
        bad = aa.detect(machine, timeout=seconds).report("bad")
        if begun.exists():
            break
    assert bad.problem.reason == f"it did not answer within {seconds} s (it was at {module}:{line} in anyaccel_detect)."


def test_an_answer_that_is_too_large_says_so(install, acme, record):
    install("bad", HEAD + "    return Detected(devices=(), notes=('x' * 20_000_000,))")
    inventory = aa.detect(record({}))
    assert [device.vendor for device in inventory.devices] == ["acme"]
    reason = inventory.report("bad").problem.reason
    assert reason == "its answer has more than 8.4 MB."


def test_devices_with_equal_ids_of_two_vendors_are_listed_apart_and_not_given(install, acme, record):
    install(
        "twin",
        HEAD.replace("bad", "twin")
        + "    return Detected(devices=(Device(id='acme-s0', index=0, model='m', links={'b': 1}),))",
    )
    inventory = aa.detect(record({}, {}))
    assert [device.id for device in inventory.devices] == ["acme/acme-s0", "acme/acme-s1", "twin/acme-s0"]
    assert [report.problem for report in inventory.vendors] == [None, None]
    assert inventory.devices[2].links == {"twin/b": 1}
    assert [device.usable for device in inventory.devices] == [False, True, False]
    made = aa.prepare("acme:1", inventory=inventory).environment
    assert made.values["ACME_VISIBLE"] == "acme-s1"
    with pytest.raises(aa.NeverFitsError, match="the plug-ins acme and twin both list id acme-s0"):
        aa.acquire("twin:1", inventory=inventory, wait=0)


def test_an_unhealthy_device_is_listed_with_its_reason(acme, record):
    inventory = aa.detect(record({}, {"health": "unhealthy", "reason": "fell off the bus", "remedy": "reboot"}))
    broken = inventory.devices[1]
    assert (broken.health, broken.usable) == (Health.UNHEALTHY, False)
    assert (broken.health_reason, broken.health_remedy) == ("fell off the bus", "reboot")


def test_a_mask_decides_what_is_ours_and_in_which_order(acme, record, monkeypatch):
    monkeypatch.setenv("ACME_VISIBLE", "3,1")
    inventory = aa.detect(record({}, {}, {}, {}))
    assert [(device.index, device.visible) for device in inventory.devices] == [
        (3, True),
        (1, True),
        (0, False),
        (2, False),
    ]


def test_a_mask_that_makes_no_sense_hides_everything(acme, record, monkeypatch):
    monkeypatch.setenv("ACME_VISIBLE", "nonsense")
    inventory = aa.detect(record({}))
    assert not inventory.devices[0].visible
    assert inventory.report("acme").notes == (
        (
            "The environment hides every device of acme: it raised ValueError: "
            "ACME_VISIBLE must be a comma list of ids or indexes (got 'nonsense')"
        ),
    )


def test_simulated_devices_are_the_same_each_time_and_carry_the_plugins_own_facts(acme):
    first, second = aa.detect("sim:acme-one:4,A1"), aa.detect("sim:Acme-One:4,Acme-One")
    assert first.devices == second.devices
    assert [device.index for device in first.devices] == [0, 1, 2, 3, 4]
    device = first.devices[0]
    assert (device.tags, device.fractional.value, device.memory_bytes) == (
        ("Acme-One", "A1", "ACME"),
        "shared",
        16 << 30,
    )
    assert set(device.links) == {other.id for other in first.devices[1:4]}


def test_an_unknown_product_offers_close_ones(acme):
    with pytest.raises(
        aa.MachineError, match=r"no installed plug-in knows the product 'Acme-Onee' .*; did you mean Acme-One"
    ):
        aa.detect("sim:Acme-Onee:2")


@pytest.mark.parametrize(
    "text", ["sim:", "sim:A1:0", "sim:A1:-1", "sim:A1:1e3", "sim:A1:99999999", "sim:,A1", "sim:A1:²"]
)
def test_a_simulation_that_cannot_be_understood_is_refused(text):
    with pytest.raises(aa.MachineError, match="a simulated machine is"):
        aa.detect(text)


def test_a_directory_that_is_no_recording_is_refused(tmp_path):
    with pytest.raises(aa.MachineError, match=r"there is no machine .*anyaccel record DIR"):
        aa.detect(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read: Expecting property name"),
        ("[]", r'must say "schema": "anyaccel.recording/1" \(got None\)'),
        ('{"schema": "anyaccel.recording/9"}', r"\(got 'anyaccel.recording/9'\)"),
        ('{"schema": "anyaccel.recording/1", "paths": []}', r"recording.paths must be an object \(got \[\] that is"),
    ],
)
def test_a_damaged_recording_is_refused(content, message, tmp_path):
    (tmp_path / "machine.json").write_text(content)
    with pytest.raises(aa.MachineError, match=message):
        aa.detect(str(tmp_path))


def test_a_simulated_machine_needs_no_module_about_real_ones(acme):
    code = (
        "import sys, anyaccel; anyaccel.detect('sim:A1:2'); print([name for name in sys.modules if name in sys.argv])"
    )
    about = ["anyaccel.inventory.contested", "anyaccel.inventory.memory", "anyaccel.probe.context"]
    done = subprocess.run([sys.executable, "-c", code, *about], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
