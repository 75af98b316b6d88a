"""The filters of requests: one that only this test has works everywhere, and each that there is."""

import ast
import json
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import anyaccel
import pytest
from anyaccel.cli.completion import _requests
from anyaccel.cli.parser import dispatch
from anyaccel.errors import RequestError
from anyaccel.model import Health, Request, Term, VendorReport, VendorState
from anyaccel.scheduler import Choice, NameRegistry, ReasonCode, Scheduler, facts, parse_request, shared_facts
from anyaccel.scheduler.filters import FILTERS, serves
from lanes import laned, lanes
from small_machines import gpus, machine

__all__ = ["lanes"]

GIB = 1 << 30
REFERENCE = Path(__file__).parents[2] / "docs/reference/requests.md"
SOURCE = Path(anyaccel.__file__).parent


def test_a_filter_is_not_known_before_it_is_in_the_table():
    with pytest.raises(RequestError, match=r"an option must be one of mem=SIZE, .*linked, mixed, else=cpu"):
        parse_request("GPU:1,lanes=016")


@pytest.mark.usefixtures("lanes")
class TestAFilterOfATest:
    def test_it_is_read_and_written(self):
        request = parse_request("GPU:2,LANES=016,mem=1G")
        assert request == Request(
            terms=(Term(names=("GPU",), units=20_000, filters=(("mem", "1GiB"), ("lanes", "16"))),)
        )
        assert str(request) == "GPU:2,mem=1GiB,lanes=16"
        assert parse_request(str(request)) == request
        assert parse_request(request) is request

    def test_a_wrong_value_is_refused(self):
        with pytest.raises(RequestError, match=r"request 'GPU,lanes=x': 'lanes' must be a number \(got 'x'\)"):
            parse_request("GPU,lanes=x")
        with pytest.raises(RequestError, match=r"an option must be one of mem=SIZE, .*lanes=COUNT"):
            parse_request("GPU,lane=8")

    def test_devices_are_placed_by_it(self):
        inventory = machine(laned(4, 16, None, 16, 8))
        scheduler = Scheduler(inventory)
        allocation = scheduler.allocate("GPU:2,lanes=16")
        assert [device.id for device in allocation.devices] == ["h100-1", "h100-3"]
        assert [serves(device, parse_request("GPU,lanes=8").terms[0], inventory) for device in inventory.devices] == [
            False, True, False, True, True,
        ]  # fmt: skip
        (grant,) = Choice(inventory, parse_request("GPU:1,lanes=16")).choose({})
        assert [share.device.id for share in grant.shares] == ["h100-1"]

    def test_where_none_passes_that_is_said_and_the_nearest_is_named(self):
        verdict = Scheduler(machine(laned(4, 8, None))).why("GPU:1,lanes=16")
        assert str(verdict) == (
            "GPU:1,lanes=16 can never fit: this machine has 3 GPU (3 H100); not lanes=16: acme/0 (4), acme/1 (8), "
            "acme/2 (unknown lanes).\nnearest that fits: GPU:1,lanes=8"
        )
        assert (verdict.reasons[1].code, verdict.reasons[1].filter) == (ReasonCode.FILTER, "lanes")
        assert json.loads(json.dumps(verdict.to_json()))["reasons"][1]["filter"] == "lanes"
        taken = Scheduler(machine(laned(4, 8)))
        taken.allocate("GPU:1,lanes=8")
        assert str(taken.why("GPU:1,lanes=8").nearest_now) == "GPU:1,lanes=4"

    def test_programs_that_choose_in_our_place_are_told(self):
        inventory = machine(laned(8, 8))
        told = {device.id: facts(device, inventory, typed=False) for device in inventory.devices}
        assert told["h100-0"] == {"lanes": "8"}

    def test_the_help_names_it(self, capsys):
        assert dispatch(["--help"]) == 0
        assert "lanes=COUNT" in capsys.readouterr().out


WRITTEN = {"driver": "driver=550+", "numa": "numa=0", "id": "id=acme-0", "/": "GPU/3"}
"""Filters as people write them."""


@pytest.fixture
def table():
    """The table of filters, which is as it was afterwards, also in its order."""
    before = dict(FILTERS)
    yield FILTERS
    FILTERS.clear()
    FILTERS.update(before)


@pytest.mark.parametrize("name", WRITTEN)
def test_nothing_is_left_of_a_filter_that_is_taken_out_of_the_table(name, table, monkeypatch, capsys):
    """So that it is gone everywhere it is one entry less, and nothing else has to change."""
    monkeypatch.setenv("COLUMNS", "1000")  # each filter in a line of its own
    entry, wanted = FILTERS[name], WRITTEN[name]
    request = f"GPU:1,{wanted}" if name.isalpha() else wanted
    devices = [replace(device, vendor="acme", numa_node=0) for device in gpus(4)]
    inventory = replace(machine(devices), vendors=driven(acme="550.1").vendors)

    def told():
        assert dispatch(["--help"]) == 0
        yield from (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
        yield from _requests("GPU:1,", Namespace())
        yield from shared_facts(inventory.devices, inventory)
        for device in inventory.devices:
            yield from facts(device, inventory)

    assert parse_request(f"{request},mixed").terms[0].filters
    before = set(told())
    del table[name]
    with pytest.raises(RequestError, match=r"an option must be one of|a name must be a letter"):
        parse_request(request)
    after = set(told())
    assert after < before
    assert not any(entry.form in line for line in after)
    verdict = Scheduler(inventory).why("GPU:5")
    assert [reason.code for reason in verdict.reasons] == [ReasonCode.NOT_ENOUGH]
    assert str(verdict.nearest) == "GPU:4"
    assert Scheduler(inventory).allocate("GPU:1,mem=1GiB").devices


def texts_of(path):
    """The texts in a module, but for those that tell about it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value


def test_what_a_filter_is_called_stands_in_the_module_of_the_table_alone():
    names = {name: re.compile(rf"(?<![\w.-]){name}=" if name.isalpha() else "NAME/INDEX") for name in WRITTEN}
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        looks_up = "scheduler.filters import" in source  # it could look up this one entry
        suspects = any(written.search(source) for written in names.values())
        if path == SOURCE / "scheduler/filters.py" or not (looks_up or suspects):
            continue  # to parse a module takes longer than to search its text
        texts = set(texts_of(path))
        assert [text for text in texts for written in names.values() if written.search(text)] == [], path
        assert not looks_up or texts.isdisjoint(names), path


@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_is_told_of(name, capsys):
    assert dispatch(["--help"]) == 0
    assert FILTERS[name].form in capsys.readouterr().out
    assert f"| `{FILTERS[name].form}` |" in REFERENCE.read_text(encoding="utf-8")
    assert name == FILTERS[name].name


def driven(**versions):
    """A machine with one device of each vendor, whose driver has a version; one for which it is empty is unknown."""
    devices = [device for vendor in versions for device in gpus(1, vendor.upper(), vendor=vendor)]
    reports = [
        VendorReport(vendor=vendor, state=VendorState.OK, driver_version=text) for vendor, text in versions.items()
    ]
    return replace(machine(devices), vendors=tuple(reports))


@pytest.mark.parametrize(
    ("wanted", "passing"),
    [
        ("550+", "bc"),
        ("550.54+", "bc"),
        ("550.54.15+", "c"),
        ("550.054.00014.0+", "bc"),
        ("99+", "abc"),
        ("550", "b"),
        ("550.54", "b"),
        ("550.5", ""),
        ("535-550", "ab"),
        ("535.200-560", "bc"),
        ("535.183.01", "a"),
        ("535.183.1", "a"),
        ("0-9999", "abcd"),
    ],
)
def test_drivers_are_compared_by_number(wanted, passing):
    inventory = driven(a="535.183.01", b="550.54.14", c="560.0-rc1", d="6.8.0", e="", f="unknown")
    (term,) = parse_request(f"GPU,driver={wanted}").terms
    found = "".join(device.vendor for device in inventory.devices if serves(device, term, inventory))
    assert found == passing


def test_a_driver_that_is_too_old_or_unknown_is_said():
    verdict = Scheduler(driven(a="535.183.01", b="")).why("GPU:1,driver=550+")
    assert str(verdict) == (
        "GPU:1,driver=550+ can never fit: this machine has 2 GPU (1 A, 1 B); not driver=550+: a/0 (535.183.01), b/0 "
        "(unknown driver).\nnearest that fits: GPU:1,driver=535.183.1+"
    )


@pytest.mark.parametrize("text", ["", "abc", "550.", "+", "550++", "550-", "9" * 10, "550.54.14-535", ">=550"])
def test_what_is_no_version(text):
    with pytest.raises(RequestError, match="'driver' must be a "):
        parse_request(f"GPU,driver={text}")


def test_devices_near_a_numa_node():
    scheduler = Scheduler(machine(gpus(4, numa=2), gpus(1, "A100")))
    assert [device.id for device in scheduler.allocate("GPU:2,numa=01").devices] == ["h100-2", "h100-3"]
    verdict = scheduler.why("GPU:2,numa=3")
    assert verdict.reasons[1].message == ("not numa=3: acme/0-1 (0), acme/2-3 (1), acme/0 (unknown numa)")
    assert (str(verdict.nearest), str(verdict.nearest_now)) == ("GPU:2,numa=1", "GPU:2,numa=0")
    with pytest.raises(RequestError, match="'numa' must be the number of a NUMA node"):
        parse_request("GPU,numa=-1")


UUIDS = tuple(
    replace(device, id=each)
    for device, each in zip(gpus(3), ("GPU-8932f937-d72c", "GPU-89abcdef-1234", "GPU-89"), strict=True)
)


@pytest.mark.parametrize("text", ["GPU-8932f937-d72c", "GPU-8932", "GPU-893"])
def test_a_device_by_its_id_or_the_beginning_of_it(text):
    request = parse_request(f"GPU:1,id={text}")
    (device,) = Scheduler(machine(UUIDS)).allocate(request).devices
    assert device.id == "GPU-8932f937-d72c"
    assert parse_request(str(request)) == request


def test_a_whole_id_that_is_the_beginning_of_another_is_meant():
    (device,) = Scheduler(machine(UUIDS)).allocate("GPU:0.5,id=GPU-89").devices
    assert device.id == "GPU-89"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "id=GPU-8",
            "id=GPU-8 is the beginning of several ids: GPU-8932f937-d72c, GPU-89abcdef-1234, GPU-89",
        ),
        ("id=GPU-8932f937-d72d", "no id begins with GPU-8932f937-d72d; close is GPU-8932f937-d72c"),
        ("id=acme/1", "no id begins with acme/1; a device is asked for by name as acme/1 alone"),
        ("id=0000:01:00.0", "no id begins with 0000:01:00.0; there is GPU-8932f937-d72c, GPU-89abcdef-1234, GPU-89"),
    ],
)
def test_an_id_that_means_no_device(text, said):
    verdict = Scheduler(machine(UUIDS)).why(f"GPU:1,{text}")
    assert [reason.message for reason in verdict.reasons[1:]] == [said]
    assert not verdict.ever_fits


def test_an_id_is_one_device():
    (_, reason) = Scheduler(machine(UUIDS)).why("GPU:2,id=GPU-89a").reasons
    assert reason.message == "id=GPU-89a is one device"


@pytest.mark.parametrize(
    ("text", "written", "given_"),
    [
        ("acme/1", "acme/1:1", "h100-1"),
        ("ACME/01-02", "ACME/1-2:2", "h100-1 h100-2"),
        ("H100/0-3:1", "H100/0-3:1", "h100-0"),
        ("acme/3:0.5", "acme/3:0.5", "h100-3"),
        ("acme/2-5,mem=1G", "acme/2-5:4,mem=1GiB", "h100-2 h100-3 a100-4 a100-5"),
        ("acme/2-5:2", "acme/2-5:2", "h100-2 h100-3"),
        ("GPU/0 GPU/0-1:1", "GPU/0:1 GPU/0-1:1", "h100-0 h100-1"),
    ],
)
def test_the_very_devices(text, written, given_):
    more = [replace(device, index=index, id=f"a100-{index}") for index, device in enumerate(gpus(2, "A100"), 4)]
    request = parse_request(text)
    assert str(request) == written
    assert parse_request(written) == request
    devices = Scheduler(machine(gpus(4), more)).allocate(request).devices
    assert [device.id for device in devices] == given_.split()


@pytest.mark.parametrize(
    ("text", "message", "nearest"),
    [
        ("acme/9", "there is no acme/9, there is acme/0-1, acme/3", "acme/3:1"),
        ("acme/0-3", "there is no acme/2, there is acme/0-1, acme/3", "acme/0-3:3"),
        ("acme/2-4", "there is no acme/2, acme/4, there is acme/0-1, acme/3", "acme/2-4:1"),
        ("acme/0-1:3", "acme/0-1 is 2 of them", "acme/0-1:2"),
        ("acme/2:0.5", "there is no acme/2, there is acme/0-1, acme/3", "acme/3:0.5"),
    ],
)
def test_an_index_that_is_not_there(text, message, nearest):
    first, second, _, last = gpus(4)
    verdict = Scheduler(machine((first, second, last))).why(text)
    assert [reason.message for reason in verdict.reasons] == ["this machine has 3 acme (3 H100)", message]
    assert str(verdict.nearest) == nearest


def test_an_index_of_a_name_that_no_device_has():
    verdict = Scheduler(machine(gpus(2)), known=NameRegistry(["other"])).why("other/3")
    assert verdict.message == "other/3:1 can never fit: this machine has no other (it has 2 H100)."


def test_a_very_device_that_is_taken_or_broken_is_waited_for_or_told():
    scheduler = Scheduler(machine(gpus(3)))
    scheduler.allocate("acme/1", note="mine")
    verdict = scheduler.why("acme/1")
    assert verdict.ever_fits
    assert "0 of 1 acme free; held by" in verdict.message
    assert str(verdict.nearest_now) == "acme/2:1"
    broken = [replace(device, health=Health.UNHEALTHY) for device in gpus(2)]
    reasons = Scheduler(machine(broken[:1], gpus(2)[1:])).why("acme/0").reasons
    assert [reason.code for reason in reasons] == [ReasonCode.NOT_ENOUGH, ReasonCode.UNHEALTHY]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("acme/", "what stands behind '/' must be an index or a row of them, 3 or 0-3"),
        ("acme/x", "what stands behind '/' must be an index"),
        ("acme/1/2", "what stands behind '/' must be an index"),
        ("acme/3-1", "a row of devices must go from less to more"),
        ("acme|other/1", "devices must be named behind one name"),
        ("acme/1|acme/2", "what stands behind '/' must be an index"),
        ("/3", "a name must be a letter"),
    ],
)
def test_what_names_no_device(text, fault):
    with pytest.raises(RequestError, match=f"request {text!r}: {fault}".replace("|", r"\|")):
        parse_request(text)
