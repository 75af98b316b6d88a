"""Oddities of vendors, each said by an attribute or a method of the kit, and checked through the hooks."""

from __future__ import annotations

import pytest
from anyaccel.kit import Card, Catalog, Ids, Mask, Sets, Tool, Vendor, number
from anyaccel.plugin import EnvContext, Health, Term, replace

PRODUCTS = """
pci_names = '''
2000 01 Acme Two Mobile
2000 -  Acme Two
'''

[[products]]
tags = ["Acme-One"]
model = "Acme One"
pci = [0x1000]

[[products]]
tags = ["Acme-One-XT"]
model = "Acme One XT"
pci = [0x1000]
revisions = [0xc8, 0x00]
"""
APU = Term(names=("APU",))


@pytest.fixture
def base(tmp_path):
    (tmp_path / "products.toml").write_text(PRODUCTS)

    class Acme(Vendor):
        key, resource, kind, brand, driver = "acme", "APU", "apu", "Acme", "acme"
        pci_vendors = (0xACE1,)
        catalog = Catalog(str(tmp_path / "__init__.py"))
        mask = Mask("ACME_VISIBLE")
        exclusive = "its driver admits one process"
        registered = False

    return Acme


def pci(slot, device="0x1000", **files):
    folder = f"/sys/bus/pci/devices/0000:0{slot}:00.0"
    values = {"vendor": "0xace1", "device": device, "class": "0x120000", **files}
    paths = {f"{folder}/{name}": {"text": f"{value}\n"} for name, value in values.items()}
    return paths | {f"{folder}/driver": {"link": "../../../bus/pci/drivers/acme"}}


@pytest.mark.parametrize(
    ("device", "revision", "model"),
    [
        ("0x1000", "0xc8", "Acme One XT"),
        ("0x1000", "0x00", "Acme One XT"),
        ("0x1000", "0x01", "Acme One"),
        ("0x2000", "0x01", "Acme Two Mobile"),
        ("0x2000", "0x02", "Acme Two"),
    ],
)
def test_the_revision_tells_products_and_names_of_one_id_apart(base, machine, device, revision, model):
    (found,) = base().anyaccel_detect(machine(pci(1, device, revision=revision))).devices

    assert (found.model, base().anyaccel_tags(found)[0]) == (model, model.replace(" ", "-"))


def test_a_revision_is_read_only_where_a_product_asks_for_it(base, machine):
    (found,) = (
        base()
        .anyaccel_detect(machine(pci(1, "0x3000") | {"/sys/bus/pci/devices/0000:01:00.0/revision": {"errno": "EIO"}}))
        .devices
    )

    assert (found.model, found.health) == ("Acme-3000", Health.UNKNOWN)


def test_a_mask_may_name_sets_of_devices(base, machine):
    class Quads(base):
        mask = Mask("ACME_VISIBLE", Sets("pair"))

        def read_card(self, card: Card) -> None:
            card.attributes["pair"] = card.read("pair")

    plugin = Quads()
    paths = {}
    for slot, name in enumerate(("pair0", "pair1", "pair0", "pair1", "pair2")):
        paths |= pci(slot, pair=name)
    devices = plugin.anyaccel_detect(machine(paths)).devices
    pair = [devices[0], devices[2]]

    edits = plugin.anyaccel_env(pair, EnvContext(devices=devices))
    assert edits.set == {"ACME_VISIBLE": "pair0"}
    assert plugin.anyaccel_visible(edits.set, devices) == [device.id for device in pair]
    assert plugin.anyaccel_env(devices, EnvContext(devices=devices)).set == {"ACME_VISIBLE": "pair0,pair1,pair2"}
    assert plugin.anyaccel_visible({"ACME_VISIBLE": "pair2,pair9"}, devices) == [devices[4].id]
    assert plugin.anyaccel_validate(APU, pair) is None
    assert plugin.anyaccel_validate(APU, devices[4:]) is None
    # A list of sets says nothing about the order within a set, so the devices come in the order of their indexes.
    assert plugin.anyaccel_visible({"ACME_VISIBLE": "pair1,pair0"}, devices) == [device.id for device in devices[:4]]
    # Simulated devices have no set: each is a set of its own.
    simulated = [replace(device, attributes={}) for device in devices]
    edits = plugin.anyaccel_env(simulated[1:3], EnvContext(devices=simulated))
    assert edits.set == {"ACME_VISIBLE": "1,2"}
    assert plugin.anyaccel_visible(edits.set, simulated) == [device.id for device in simulated[1:3]]
    assert plugin.anyaccel_validate(APU, simulated[1:3]) is None
    reason = plugin.anyaccel_validate(APU, devices[:2])
    assert reason.endswith("is one of 2 devices that the mask names as pair0; ask for all 2 of them")


def test_a_device_of_no_whole_set_cannot_be_given(base, machine):
    class Quads(base):
        mask = Mask("ACME_VISIBLE", Sets("pair"))

        def read_card(self, card: Card) -> None:
            card.attributes["pair"] = card.read("pair")
            if card.read("dead"):
                card.blame("it is dead", "replace it")

    plugin = Quads()
    whole, beside, alone = {"pair": "pair0"}, {"pair": "pair1"}, {}
    paths = {}
    for slot, files in enumerate((whole, whole, beside, {**beside, "dead": "1"}, alone, alone)):
        paths |= pci(slot, **files)
    devices = plugin.anyaccel_detect(machine(paths)).devices

    assert [device.health is Health.UNHEALTHY for device in devices] == [False, False, True, True, True, True]
    mate, dead, unknown, _ = devices[2:]
    assert mate.health_reason == f"the mask names it together with {dead.id}, which cannot be used"
    assert mate.health_remedy == f"repair {dead.id}"
    assert (dead.health_reason, dead.health_remedy) == ("it is dead", "replace it")
    assert unknown.health_reason == "its pair is unknown, so the mask cannot name it"
    assert [device.attributes.get("set_size") for device in devices] == [2, 2, 2, 2, None, None]
    assert plugin.anyaccel_validate(APU, [unknown]).startswith(f"{unknown.id} cannot be given to a process: its pair")
    # The files of the mate alone show no fault.
    assert plugin.anyaccel_stats(devices, machine(paths))[mate.id].health is Health.UNHEALTHY


def test_numbers_may_restart_in_each_partition(base, machine):
    class Parts(base):
        number_name, number_remedy, numbers_restart = "core number", "update the driver", True
        mask = Mask("ACME_VISIBLE", Ids(lambda device: f"{device.parent}:{device.attributes.get('number')}"))

        def read_card(self, card: Card) -> None:
            card.parent, card.number = card.read("chip"), number(card.ctx, f"{card.folders[0]}/core")

    plugin = Parts()
    paths = {}
    for slot, (chip, core) in enumerate((("b", "0"), ("a", "1"), ("a", "0"), ("b", "1"), ("c", "0"), ("c", "0"))):
        paths |= pci(slot, chip=chip, core=core)
    devices = plugin.anyaccel_detect(machine(paths)).devices

    names = [(device.index, device.parent, device.attributes.get("number")) for device in devices]
    assert names == [(0, "a", 0), (1, "a", 1), (2, "b", 0), (3, "b", 1), (4, "c", None), (5, "c", None)]
    assert [device.health is Health.UNHEALTHY for device in devices] == [False] * 4 + [True] * 2
    edits = plugin.anyaccel_env(devices[1:3], EnvContext(devices=devices))
    assert edits.set == {"ACME_VISIBLE": "a:1,b:0"}
    assert plugin.anyaccel_visible(edits.set, devices) == [device.id for device in devices[1:3]]


def test_a_device_may_have_no_memory_of_its_own(base, machine):
    class Integrated(base):
        def read_card(self, card: Card) -> None:
            card.use_host_memory()

    plugin = Integrated()
    ctx = machine(pci(1) | {"/proc/meminfo": {"text": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n"}})
    (device,) = plugin.anyaccel_detect(ctx).devices

    assert (device.memory_bytes, device.attributes["unified_memory"]) == (1000 << 10, True)
    assert plugin.anyaccel_stats([device], ctx)[device.id].memory_used_bytes == 600 << 10
    (blind,) = plugin.anyaccel_detect(machine(pci(1))).devices
    assert blind.memory_bytes is None


def test_power_that_devices_share_is_told_once(base, machine):
    class Boards(base):
        def measure(self, ctx, devices):
            return {device.id: {"power_watts": 75.0, "utilization": 0.5} for device in devices}

        def power_group(self, device):
            return device.attributes.get("board")

        def read_card(self, card: Card) -> None:
            card.attributes["board"] = card.read("board")

    plugin = Boards()
    ctx = machine(pci(1, board="A") | pci(2, board="A") | pci(3, board="B") | pci(4) | pci(5))
    devices = plugin.anyaccel_detect(ctx).devices

    stats = plugin.anyaccel_stats(tuple(reversed(devices)), ctx)
    assert [stats[device.id].power_watts for device in devices] == [75.0, None, 75.0, 75.0, 75.0]
    assert {each.utilization for each in stats.values()} == {0.5}


def test_a_tool_may_answer_in_a_file(program, tmp_path):
    tool = Tool("acme-tool")
    ctx = program(
        "echo noise; echo more >&2\nfor a; do case $a in --to=*) o=${a#--to=};; /*) o=$a;; esac; done\n"
        f"echo $o > {tmp_path}/path; printf 'id,load\\n0, 41\\n' > $o"
    )

    for arguments in (("-o", "{file}"), ("-v", "--to={file}", "a b")):
        assert tool.ask(ctx, *arguments) == "id,load\n0, 41\n"
    assert {key: row.number("load") for key, row in tool.rows(ctx, ("id", "load"), "-o", "{file}").items()} == {"0": 41}
    left = (tmp_path / "path").read_text().strip()
    assert left.startswith("/")
    assert not (tmp_path / left).exists(), "the file is removed"


def test_a_tool_that_answers_in_a_file_may_be_missing_or_fail(program, machine, tmp_path):
    assert Tool("acme-other").ask(program("exit 0"), "-o", "{file}") is None
    with pytest.raises(ValueError, match=r"acme-tool failed with exit status 3 \(no driver\)"):
        Tool("acme-tool").ask(program("echo no driver >&2; exit 3"), "-o", "{file}")
