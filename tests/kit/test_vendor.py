"""A vendor made of attributes alone: its cards, holders and findings."""

from __future__ import annotations

import json
import time
from itertools import combinations
from typing import Any

import pytest
from anyaccel.hookspecs import HOOKS
from anyaccel.kit import (
    Card,
    Catalog,
    Fault,
    FaultError,
    Holders,
    Mask,
    Tool,
    Vendor,
    board_links,
    condition,
    in_container,
    inventory,
    kernel_log,
    number,
    numbered,
    physical_function,
    text,
    total,
    try_query,
)
from anyaccel.kit.files import scan
from anyaccel.plugin import (
    Device,
    DeviceProcess,
    EnvContext,
    Fractional,
    Health,
    ProbeContext,
    Severity,
    Stats,
    Term,
)
from anyaccel.probe.recording import Recorder
from anyaccel.vendors.discovery import Source
from anyaccel.vendors.tasks import VendorPlugin
from anyaccel_testing import context
from waiting import PATIENCE

PRODUCTS = """
[[products]]
key = "ONE"
tags = ["Acme-One"]
model = "Acme One"
memory = "16GiB"
pci = [0x1000]
attributes = { family = "ONE" }
[ignored]
0x0001 = "Acme Sound"
[states]
ready = ""
hot = "let it cool down"
"""


@pytest.fixture
def vendor(tmp_path):
    (tmp_path / "products.toml").write_text(PRODUCTS)

    class Acme(Vendor):
        key, resource, kind, brand, driver = "acme", "APU", "apu", "Acme", "acme"
        pci_vendors, pci_classes = (0xACE1,), (0x1200,)
        catalog = Catalog(str(tmp_path / "__init__.py"))
        entry_attribute = "family"
        mask = Mask("ACME_VISIBLE", nothing="none")
        exclusive = "its driver admits one process"
        counts = (1, 2, 4)
        number_name, number_remedy = "slot", "update the driver"
        state_file = "state"
        tool = Tool("acme-tool", package="acme-utils")

        def read_card(self, card: Card) -> None:
            card.number = number(card.ctx, f"{card.folders[0]}/slot")
            card.nodes = (f"/dev/acme{card.number}", f"/dev/acme_ctl{card.number}")

        def measure(self, ctx, devices):
            rows = self.tool.rows(ctx, ("id", "power"))
            if rows is None:
                return None
            return {d.id: {"power_watts": rows[d.id].number("power")} for d in devices if d.id in rows}

    return Acme()


def pci(address: str, device: str = "0x1000", driver: str | None = "acme", **files: Any) -> dict[str, Any]:
    """A PCI function and its device node as a recording has them."""
    folder = f"/sys/bus/pci/devices/{address}"
    values = {"vendor": "0xace1", "device": device, "class": "0x120000", "state": "Ready", "slot": "0", **files}
    paths: dict[str, Any] = {
        f"{folder}/{name}": value if isinstance(value, dict) else {"text": f"{value}\n"}
        for name, value in values.items()
        if value is not None
    }
    if driver:
        paths[f"{folder}/driver"] = {"link": f"../../../bus/pci/drivers/{driver}"}
    slot = values["slot"]
    return paths | {f"/dev/acme{slot}": {"char": [240, 0], "access": "rw"}}


def faults(detected) -> dict[str, tuple[str, str]]:
    return {d.id[-7:]: (d.health_reason, d.health_remedy) for d in detected.devices if d.health is Health.UNHEALTHY}


def test_a_vendor_that_is_not_here_is_absent(vendor, machine):
    assert vendor.anyaccel_detect(machine()) is None
    assert vendor.anyaccel_diagnose(machine()) == ()


def test_a_vendor_without_a_mask_says_so_and_sets_nothing(vendor):
    class Open(type(vendor)):
        key, mask, cleared, variables = "open", None, ("OTHER_VISIBLE",), ("OTHER_VISIBLE",)

    plugin = VendorPlugin(Source(vendor="open", target="acme"), Open())
    device = Device(id="open-0", index=0, model="Acme One")
    assert (plugin.info.maskable, plugin.info.env_vars) == (False, ("OTHER_VISIBLE",))
    for devices in ((), (device,)):
        edits = plugin.env(devices, EnvContext(devices=(device,)))
        assert (edits.set, edits.unset) == ({}, {"OTHER_VISIBLE"})
    assert plugin.visible({"OPEN_VISIBLE": "0"}, [device]) == (None, [])
    assert VendorPlugin(Source(vendor="acme", target="acme"), vendor).info.maskable


def test_a_driver_without_a_device_is_found_and_warned_about(vendor, machine):
    ctx = machine({"/sys/module/acme/version": {"text": "1.2\n"}})

    assert vendor.anyaccel_detect(ctx).driver_version == "1.2"
    (finding,) = vendor.anyaccel_diagnose(ctx)
    assert (finding.severity, finding.remedy) == (
        Severity.WARN,
        "check 'lspci -d ace1:' and the seating of the boards",
    )


def test_a_driver_may_be_one_of_several_modules(vendor, machine):
    type(vendor).modules = ("acme_old", "acme_new")
    found = vendor.anyaccel_detect(machine({"/sys/module/acme_new/version": {"text": "2.0\n"}}))

    assert found.driver_version == "2.0"
    assert vendor.anyaccel_detect(machine({"/sys/module/acme/version": {"text": "2.0\n"}})) is None


def test_a_device_has_what_files_and_catalog_say(vendor, machine):
    ctx = machine(pci("0000:01:00.0", numa_node="1", slot="3"))

    (device,) = vendor.anyaccel_detect(ctx).devices

    assert device == Device(
        id="acme-0000:01:00.0",
        index=3,
        model="Acme One",
        memory_bytes=16 << 30,
        pci_bus_id="0000:01:00.0",
        numa_node=1,
        nodes=("/dev/acme3",),
        health=Health.HEALTHY,
        attributes={"family": "ONE"},
    )
    assert vendor.anyaccel_tags(device) == ("Acme-One",)


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"driver": None}, ("no driver is bound to it", "install the acme driver and run 'modprobe acme'")),
        (
            {"driver": "vfio-pci"},
            ("it is bound to the driver 'vfio-pci', which keeps it for another use", "bind it to acme"),
        ),
        ({"state": "Hot"}, ("the driver reports 'Hot'", "let it cool down")),
        (
            {"state": "odd"},
            ("the driver reports 'odd'", "this is no state that the driver's documentation knows: look in 'dmesg'"),
        ),
        (
            {"state": {"errno": "EIO"}},
            ("its sysfs files cannot be read (Input/output error)", "look for acme in 'dmesg'"),
        ),
    ],
)
def test_a_fault_costs_its_own_device_alone(vendor, machine, files, fault):
    ctx = machine(pci("0000:01:00.0", slot="0") | pci("0000:02:00.0", slot="1", **files))

    detected = vendor.anyaccel_detect(ctx)

    assert faults(detected) == {"02:00.0": fault}
    assert len(detected.devices) == 2


@pytest.mark.parametrize(
    ("bound", "fault"),
    [
        ("acme_pci", None),
        (None, ("no driver is bound to it", "install the Acme driver")),
        (
            "vfio-pci",
            ("it is bound to the driver 'vfio-pci', which keeps it for another use", "bind it to the Acme driver"),
        ),
    ],
)
def test_without_a_published_driver_name_any_bound_driver_counts(vendor, machine, bound, fault):
    vendor.driver = ""
    detected = vendor.anyaccel_detect(machine(pci("0000:01:00.0", driver=bound)))

    assert faults(detected) == ({"01:00.0": fault} if fault else {})
    assert detected.driver_version == ""
    assert vendor.anyaccel_detect(machine({"/sys/module/acme": {"dir": True}})) is None


def test_a_node_that_is_missing_or_closed_is_a_fault_with_its_remedy(vendor, machine):
    paths = pci("0000:01:00.0", slot="0") | pci("0000:02:00.0", slot="1")
    paths["/dev/acme0"]["access"] = "r"
    del paths["/dev/acme1"]

    assert faults(vendor.anyaccel_detect(machine(paths))) == {
        "01:00.0": ("you may not open /dev/acme0", "ask the administrator for read and write permission on it"),
        "02:00.0": ("its device node /dev/acme1 is missing", "pass it to this container"),
    }


def test_devices_that_no_mask_can_name_are_listed_with_numbers_that_no_other_has(vendor, machine):
    paths = pci("0000:01:00.0", slot="0") | pci("0000:02:00.0", slot="0") | pci("0000:03:00.0", slot="9")

    detected = vendor.anyaccel_detect(machine(paths))

    assert [device.index for device in detected.devices] == [9, 10, 11]
    reason = "its slot 0 is that of 2 devices, so no process can be confined to it"
    assert faults(detected) == dict.fromkeys(("01:00.0", "02:00.0"), (reason, "update the driver"))
    assert detected.partial
    nameless = detected.devices[1]
    assert vendor.anyaccel_visible({"ACME_VISIBLE": "10"}, detected.devices) == []
    assert reason in vendor.validate(Term(names=("APU",)), [nameless])
    with pytest.raises(FaultError, match="its slot 0 is that of 2 devices"):
        vendor.anyaccel_env([nameless], EnvContext(devices=detected.devices))


def test_where_no_number_is_known_and_no_counts_are_devices_are_numbered_from_0(vendor, machine):
    vendor.counts = ()

    detected = vendor.anyaccel_detect(machine(pci("0000:01:00.0", slot=None) | pci("0000:02:00.0", slot=None)))

    assert [device.index for device in detected.devices] == [0, 1]
    assert {reason for reason, _ in faults(detected).values()} == {
        "its slot is unknown, so no process can be confined to it"
    }


def test_a_tool_that_cannot_be_understood_costs_only_what_it_knows(vendor, machine):
    def complete(ctx, cards):
        for card in cards:
            card.attributes["serial"] = "A1"
            yield "one was asked"
            raise FaultError("acme-tool must answer a count", "run it by hand")

    vendor.complete = complete

    detected = vendor.anyaccel_detect(machine(pci("0000:01:00.0", slot="0") | pci("0000:02:00.0", slot="1")))

    assert detected.notes == ("one was asked", "acme-tool must answer a count; run it by hand")
    assert [device.attributes.get("serial") for device in detected.devices] == ["A1", None]


def test_a_vendor_may_have_several_pci_ids_and_share_them_with_other_things(vendor, machine):
    vendor.pci_vendors = (0xACE1, 0xACE2)
    paths = pci("0000:03:00.0", slot="1") | pci("0000:02:00.0", slot="0") | pci("0000:04:00.0", device="0x7777")
    paths["/sys/bus/pci/devices/0000:02:00.0/vendor"] = {"text": "0xace2\n"}
    paths |= {f"/sys/bus/pci/devices/0000:01:00.0/{name}": {"text": "0x1200\n"} for name in ("vendor", "device")}
    paths["/sys/bus/pci/devices/0000:01:00.0/class"] = {"text": "0x120000\n"}

    found = [function.address for function in vendor.functions(machine(paths))]
    assert found == ["0000:02:00.0", "0000:03:00.0", "0000:04:00.0"]

    vendor.pci_known = True
    assert [function.address for function in vendor.functions(machine(paths))] == found[:2]


def test_functions_that_are_no_devices_are_noted(vendor, machine):
    detected = vendor.anyaccel_detect(machine(pci("0000:01:00.0", device="0x0001")))

    assert (detected.devices, detected.notes) == ((), ("Acme Sound at 0000:01:00.0 is no APU and left out",))


def test_a_card_that_no_catalog_knows_is_named_by_the_machine_or_by_its_id(vendor, machine):
    paths = pci("0000:01:00.0", device="0x1234")
    known = machine(paths, queries={"pci.ids/ace1:1234": {"value": "Acme Next"}})

    assert [d.model for d in vendor.anyaccel_detect(known).devices] == ["Acme Next"]
    (device,) = vendor.anyaccel_detect(machine(paths)).devices
    assert (device.model, device.memory_bytes, vendor.anyaccel_tags(device)) == ("Acme-1234", None, ("Acme-1234",))


def test_a_mask_is_written_and_read(vendor):
    devices = [Device(id=f"acme-{n}", index=n, model="Acme One") for n in range(4)]

    edits = vendor.anyaccel_env(devices[2:], EnvContext(devices=tuple(devices)))

    assert (edits.set, edits.unset) == ({"ACME_VISIBLE": "2,3"}, frozenset())
    assert vendor.anyaccel_visible(edits.set, devices) == ["acme-2", "acme-3"]
    assert vendor.anyaccel_visible({}, devices) is None
    assert vendor.anyaccel_info().env_vars == ("ACME_VISIBLE",)


def test_variables_that_are_alike_are_written_and_those_that_are_cleared_go(vendor):
    vendor.alike, vendor.variables, vendor.cleared = ("ACME_OLD",), ("OTHER",), ("OTHER",)

    edits = vendor.anyaccel_env([], EnvContext(devices=()))

    assert (edits.set, edits.unset) == ({"ACME_VISIBLE": "none", "ACME_OLD": "none"}, frozenset({"OTHER"}))
    assert vendor.anyaccel_info().env_vars == ("ACME_VISIBLE", "ACME_OLD", "OTHER")


def test_variables_of_other_vendors_are_told(vendor):
    class Borrower(type(vendor)):
        variables, borrowed, cleared = ("ELSE",), ("ACME_VISIBLE",), ("ELSE",)

    info = Borrower().anyaccel_info()

    assert (info.env_vars, info.borrowed, info.cleared) == (("ACME_VISIBLE", "ELSE"), ("ACME_VISIBLE",), ("ELSE",))


def test_the_drm_nodes_of_a_card_begin_with_the_render_node(machine):
    folder = "/sys/bus/pci/devices/0000:01:00.0/drm"
    names = ("card1", "controlD65", "renderD129", "version")
    paths = pci("0000:01:00.0") | {f"{folder}/{name}": {"dir": True} for name in names}
    ctx = machine(paths)
    (function,) = ctx.pci()

    assert Card(ctx, "acme-0", function).drm_nodes() == ("/dev/dri/renderD129", "/dev/dri/card1")
    assert Card(ctx, "acme-1").drm_nodes() == ()


@pytest.mark.parametrize(
    ("units", "count", "reason"),
    [
        (10_000, 1, None),
        (30_000, 3, "one job can use 1, 2 or 4 APUs of a machine (got 3)"),
        (5_000, 1, "one APU cannot be divided or shared: its driver admits one process; ask for a whole number"),
    ],
)
def test_what_the_hardware_cannot_serve_is_refused_with_the_rule(vendor, units, count, reason):
    devices = [Device(id=f"acme-{n}", index=n, model="Acme One") for n in range(count)]

    said = vendor.validate(Term(names=("APU",), units=units), devices)

    assert said is None if reason is None else said.startswith(reason)
    assert vendor.anyaccel_fractional(devices[0]) is Fractional.NO


def test_a_vendor_whose_numbers_say_it_all_has_no_rule_to_ask(vendor):
    class Ruled(type(vendor)):
        def validate(self, request, devices):
            return super().validate(request, devices) or "the moon is full"

    class Named(type(vendor)):
        def maskable(self, device):
            return True

    class Further(Ruled):
        pass

    def loaded(plugin):
        return VendorPlugin(Source(vendor=plugin.key, target="acme"), plugin)

    kinds = (type(vendor), Ruled, Named, Further)
    assert [loaded(kind()).implements("anyaccel_validate") for kind in kinds] == [False, True, True, True]
    devices = [Device(id=f"acme-{n}", index=n, model="Acme One") for n in range(3)]
    term = Term(names=("APU",), units=30_000)
    assert loaded(vendor).info.counts == (1, 2, 4)
    assert {loaded(kind()).validate(term, devices) for kind in kinds} == {
        "one job can use 1, 2 or 4 APUs of a machine (got 3); ask for one of these numbers"
    }
    assert loaded(Further()).validate(term, devices[:2]) == "the moon is full"
    assert loaded(vendor).validate(term, devices[:2]) is None


def command(text: str, returncode: int = 0) -> dict[str, Any]:
    return {"argv": ["acme-tool"], "returncode": returncode, "stdout": text, "stderr": ""}


def test_statistics_join_tool_files_and_holders(vendor, machine):
    paths = pci("0000:01:00.0", slot="0") | pci("0000:02:00.0", slot="1")
    devices = vendor.anyaccel_detect(machine(paths)).devices
    gone = Device(id="acme-0000:03:00.0", index=2, model="Acme One")
    later = pci("0000:01:00.0", slot="0") | pci("0000:02:00.0", slot="1", state="hot")
    holders = {"value": {"holders": {"/dev/acme0": [7]}, "complete": True}}
    ctx = machine(later, commands=[command("acme-0000:01:00.0, 84 W\n")], queries={"proc/holders": holders})

    stats = vendor.anyaccel_stats([*devices, gone], ctx)

    first, second, third = stats.values()
    assert (first.power_watts, first.processes, first.health) == (84.0, (DeviceProcess(pid=7),), Health.HEALTHY)
    assert (second.power_watts, second.processes) == (None, ())
    assert (second.health_reason, second.health_remedy) == ("the driver reports 'hot'", "let it cool down")
    assert third.health_reason == "it is gone from the PCI bus"


@pytest.mark.parametrize(
    ("commands", "severity", "reason"),
    [
        ([], Severity.WARN, "acme-tool is not on the PATH"),
        ([command("", 1)], Severity.FAIL, "acme-tool failed with exit status 1"),
        ([command("acme-0000:09:00.0, 1")], Severity.FAIL, "acme-tool does not show acme-0000:01:00.0, of 1 devices"),
    ],
)
def test_what_keeps_the_tool_from_telling_is_found(vendor, machine, commands, severity, reason):
    (finding,) = vendor.anyaccel_diagnose(machine(pci("0000:01:00.0"), commands=commands))

    assert (finding.severity, finding.reason.startswith(reason)) == (severity, True)
    assert finding.remedy


def test_nothing_is_found_on_a_sound_machine(vendor, machine):
    ctx = machine(pci("0000:01:00.0"), commands=[command("acme-0000:01:00.0, 84")])

    assert vendor.anyaccel_diagnose(ctx) == ()


def test_a_container_gets_each_node_once(vendor):
    devices = [Device(id=f"acme-{n}", index=n, model="x", nodes=("/dev/acme", f"/dev/acme{n}")) for n in range(2)]

    assert vendor.anyaccel_container(devices).nodes == ("/dev/acme", "/dev/acme0", "/dev/acme1")


def test_a_card_keeps_its_first_fault_and_leaves_unknown_facts_out(machine):
    card = Card(machine(), "acme-x")
    card.attributes |= {"slot": 3, "serial": None}
    assert (card.health, card.address, card.read("state"), card.glob("*")) == (Health.UNKNOWN, None, None, [])

    card.blame("it is gone", "look for it")
    card.blame("it is hot", "cool it", partial=True)

    card.slots = 4
    device = card.device()
    assert device.slots == 4
    assert (device.health_reason, device.health_remedy, card.partial) == ("it is gone", "look for it", True)
    assert device.attributes == {"slot": 3}


def test_what_cannot_be_read_is_unknown(machine):
    ctx = machine({"/a": {"text": " 0x10\n"}, "/b": {"errno": "EACCES"}, "/c": {"text": "ten"}})

    assert [text(ctx, path) for path in ("/a", "/b", "/none")] == ["0x10", "", ""]
    assert [number(ctx, path) for path in ("/a", "/b", "/c", "/none")] == [16, None, None, None]


def test_numbers_in_files_are_added_up_where_all_are_known(machine):
    ctx = machine({"/a": {"text": "0x10\n"}, "/b": {"text": "4"}, "/c": {"text": "ten"}})

    assert [total(ctx, paths) for paths in (["/a", "/b"], ["/a", "/c"], ["/a", "/none"], [])] == [20, None, None, None]


def test_numbered_paths_are_listed_in_the_order_of_their_numbers(machine):
    ctx = machine({f"/dev/acme{end}": {"char": [1, 1]} for end in ("10", "2", "2_control", "_3")})

    assert list(numbered(ctx, "/dev/acme").items()) == [(2, "/dev/acme2"), (10, "/dev/acme10")]


def test_a_question_that_fails_has_no_answer(machine):
    ctx = machine(queries={"acme/load": {"value": [1]}, "acme/heat": {"error": {"kind": "OSError", "message": "x"}}})

    assert [try_query(ctx, f"acme/{name}", list) for name in ("load", "heat", "never recorded")] == [[1], None, None]


def test_an_inventory_says_when_facts_of_a_card_are_missing(machine):
    card = Card(machine(), "acme-x")
    card.check_node("/dev/acme0", missing="reboot", partial=True)
    found = inventory([card], "1.2", ["look"])

    assert (found.driver_version, found.notes, found.partial) == ("1.2", ("look",), True)
    assert found.devices[0].health_remedy == "pass it to this container, or reboot"
    assert not inventory([], "").partial


def test_a_container_is_told_by_its_files_and_variables(machine):
    assert not in_container(machine())
    assert in_container(machine({"/.dockerenv": {"text": ""}}))
    assert in_container(machine(environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"}))


def test_the_vendor_says_what_to_do_about_a_node(machine):
    def remedy(access, path, **words):
        card = Card(machine({"/dev/x": {"char": [1, 1], "access": access}}), "acme-0")
        card.check_node(path, **words)
        return card.device().health_remedy

    assert remedy("w", "/dev/x", closed="join the group acme") == "join the group acme"
    assert remedy("w", "/dev/y", missing="reboot") == "pass it to this container, or reboot"
    assert remedy("rw", "/dev/x") == ""


def test_of_the_kernels_log_only_the_lines_that_count_are_kept(program, tmp_path):
    (tmp_path / "dmesg").write_text("#!/bin/sh\necho 'host7 login'; echo 'acme 1: hot'; echo 'acme 2: cold'\n")
    (tmp_path / "dmesg").chmod(0o755)
    recorder = Recorder(program("")._facts)

    assert kernel_log(ProbeContext(recorder, time.monotonic() + 2 * PATIENCE), r"acme \d: hot") == "acme 1: hot\n"
    recording = recorder.recording()
    assert "host7" not in json.dumps(recording)
    assert kernel_log(context(recording), r"acme \d: hot") == "acme 1: hot\n"


def test_the_kernels_log_is_empty_where_it_was_not_recorded(machine):
    assert kernel_log(machine(), "acme") == ""


@pytest.mark.parametrize("script", ["exit 1", "exec sleep 60", None])
def test_a_kernels_log_that_does_not_answer_is_empty(program, tmp_path, script):
    ctx = program("", seconds=1.0)
    if script:
        (tmp_path / "dmesg").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "dmesg").chmod(0o755)
        assert kernel_log(ctx, "x") == ""
    else:
        ctx.environ["PATH"] = str(tmp_path)
        assert kernel_log(ctx, "x") == ""


def test_a_virtual_function_names_its_card(machine):
    ctx = machine({"/sys/bus/pci/devices/0000:01:00.1/physfn": {"link": "../0000:01:00.0"}})

    assert physical_function(ctx, "0000:01:00.1") == "0000:01:00.0"
    assert physical_function(ctx, "0000:01:00.0") is None


@pytest.mark.parametrize(
    ("fault", "sound", "health"),
    [(None, True, Health.HEALTHY), (None, False, Health.UNKNOWN), (Fault("hot", "cool it"), True, Health.UNHEALTHY)],
)
def test_a_condition_fills_the_fields_of_statistics(fault, sound, health):
    seen = Stats(power_watts=1.0, **condition(fault, sound=sound))

    assert (seen.health, seen.health_reason, seen.health_remedy) == (health, *(fault or ("", "")))


def proc(root, namespace="4026531836", **processes):
    (root / "self/ns").mkdir(parents=True)
    (root / "self/ns/pid").symlink_to(f"pid:[{namespace}]")
    for name, target in processes.items():
        (root / name[1:] / "fd").mkdir(parents=True)
        (root / name[1:] / "fd/5").symlink_to(target)
    return str(root)


def test_a_scan_finds_who_has_a_node_open(tmp_path):
    where = proc(tmp_path, p7="/dev/acme12", p31="/dev/acme1", p100="/dev/acme12", p8="/dev/null")

    answer = scan(frozenset({"/dev/acme12", "/dev/acme0"}), where)

    assert answer == {"holders": {"/dev/acme12": [7, 100]}, "complete": True}


def test_a_scan_inside_a_container_is_not_complete(tmp_path):
    assert scan(frozenset(), proc(tmp_path, namespace="4026532999"))["complete"] is False


def test_a_scan_of_this_machine_finds_this_process():
    with open("/dev/full", "wb"):
        found = scan(frozenset({"/dev/full"}))

    assert len(found["holders"]["/dev/full"]) >= 1


def test_a_device_has_no_holder_only_after_a_complete_scan(machine):
    def holders(**answer):
        return Holders(machine(queries={"proc/holders": {"value": answer}}), ["/dev/a"])

    assert holders(holders={}, complete=True).find(["/dev/a"]) == ()
    assert holders(holders={}, complete=False).find(["/dev/a"]) is None
    assert holders(holders={"/dev/a": [3, 4]}, complete=False).find(["/dev/a"]) == (
        DeviceProcess(pid=3),
        DeviceProcess(pid=4),
    )
    assert holders(holders={}, complete=True).find([]) is None
    assert Holders(machine(), ["/dev/a"]).find(["/dev/a"]) is None


def test_the_best_linked_groups_of_a_board_are_pairs_and_fours(machine):
    cards = {number: Card(machine(), str(number)) for number in range(8)}
    board_links(cards)
    ranks = {one: {int(other): rank for other, rank in card.links.items()} for one, card in cards.items()}

    def best(size: int) -> set[tuple[int, ...]]:
        groups = list(combinations(range(8), size))
        strength = [sum(ranks[a][b] for a, b in combinations(group, 2)) for group in groups]
        return {group for group, total in zip(groups, strength, strict=True) if total == max(strength)}

    assert best(2) == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert best(4) == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert all(ranks[a][b] == ranks[b][a] > 0 for a, b in combinations(range(8), 2))


@pytest.mark.parametrize(("held", "nodes"), [("first", ["/dev/a0"]), ("every", ["/dev/a0", "/dev/a1"]), ("none", [])])
def test_who_holds_a_device_is_told_by_the_nodes_that_holders_open(vendor, machine, held, nodes):
    type(vendor).held = held
    device = Device(id="acme-0", index=0, model="Acme One", nodes=("/dev/a0", "/dev/a1"))
    holders = {"/dev/a0": [7], "/dev/a1": [8]}
    ctx = machine(queries={"proc/holders": {"value": {"holders": holders, "complete": True}}})

    found = vendor.anyaccel_stats([device], ctx)["acme-0"].processes

    expected = tuple(DeviceProcess(pid=pid) for node in nodes for pid in holders[node])
    assert found == (expected or None)


def test_a_container_gets_control_nodes_and_the_paths_that_are_there(vendor, machine):
    type(vendor).control_nodes = ("/dev/acme_all",)
    type(vendor).host_paths = (("toolkit", "/opt/acme"), ("settings", "/etc/acme.conf"))
    (device,) = vendor.anyaccel_detect(machine(pci("0000:01:00.0") | {"/opt/acme": {"dir": True}})).devices

    edits = vendor.anyaccel_container([device])

    assert device.attributes["toolkit"] == "/opt/acme"
    assert "settings" not in device.attributes
    assert edits.nodes == ("/dev/acme_all", "/dev/acme0")
    assert [(mount.source, mount.target, mount.read_only) for mount in edits.mounts] == [
        ("/opt/acme", "/opt/acme", True)
    ]
    assert vendor.anyaccel_container([]).nodes == ()


def test_virtual_functions_are_left_to_whom_the_host_gives_them(vendor, machine):
    part = {"/sys/bus/pci/devices/0000:01:00.1/physfn": {"link": "../0000:01:00.0"}}
    ctx = machine(pci("0000:01:00.0") | pci("0000:01:00.1", slot="1") | part)
    assert len(vendor.anyaccel_detect(ctx).devices) == 2

    type(vendor).virtual_functions = False

    assert [device.pci_bus_id for device in vendor.anyaccel_detect(ctx).devices] == ["0000:01:00.0"]


@pytest.mark.parametrize(
    ("count", "printed", "reasons"),
    [
        (1, None, [""]),
        (2, "0000:01:00.0 0\n0000:02:00.0 1", ["", ""]),
        (2, "0000:01:00.0 0", ["", "acme-tool does not show it"]),
    ],
)
def test_a_tool_numbers_several_devices_and_is_not_asked_for_one(vendor, machine, count, printed, reasons):
    def complete(self, ctx, cards):
        if self.is_complete(cards):
            return
        for card, row in self.match_rows(cards, self.tool.rows(ctx, ("pci", "number"), separator=" ")):
            card.number = row.count("number")
        yield "the tool was asked"

    type(vendor).complete = complete
    type(vendor).read_card = lambda _, card: setattr(card, "nodes", ("/dev/acme0",))
    paths = {key: value for n in range(count) for key, value in pci(f"0000:0{n + 1}:00.0").items()}
    commands = [{"argv": ["acme-tool"], "returncode": 0, "stdout": printed}] if printed else []

    found = vendor.anyaccel_detect(machine(paths, commands=commands))

    assert found.notes == (("the tool was asked",) if printed else ())
    assert [device.health_reason for device in found.devices] == reasons


def test_what_a_tool_measured_is_told_by_device(vendor, machine):
    ctx = machine(commands=[{"argv": ["acme-tool"], "returncode": 0, "stdout": "0000:01:00.0, 40, N/A\n"}])
    devices = [Device(id=f"acme-{n}", index=n, model="Acme One", pci_bus_id=f"0000:0{n}:00.0") for n in (1, 2)]
    rows = vendor.tool.rows(ctx, ("pci", "busy", "celsius"))

    found = vendor.measures_by_device(rows, devices, "", "busy", "celsius")

    assert {name: (each["utilization"], each["temperature_celsius"]) for name, each in found.items()} == {
        "acme-1": (0.4, None)
    }
    assert vendor.measures_by_device(None, devices, "busy") is None


def test_cards_of_a_board_are_linked_to_each_other(vendor, machine):
    type(vendor).board = lambda _, card: card.read("board")
    ctx = machine(
        pci("0000:01:00.0", slot="0", board="a")
        | pci("0000:02:00.0", slot="1")
        | pci("0000:03:00.0", slot="2", board="a")
    )

    links = [dict(device.links) for device in vendor.anyaccel_detect(ctx).devices]

    assert links == [{"acme-0000:03:00.0": 1}, {}, {"acme-0000:01:00.0": 1}]


def test_a_hook_that_the_kit_does_not_have_is_that_of_the_plugins_that_have_it(monkeypatch):
    monkeypatch.setattr("anyaccel.kit.vendor.HOOKS", (*HOOKS, "anyaccel_firmware"))

    class Without(Vendor):
        key = "acme"

    class With(Vendor):
        key = "acme"

        def firmware(self, devices, ctx):
            return {}

    assert Without.anyaccel_firmware is None
    assert With().anyaccel_firmware((), None) == {}
