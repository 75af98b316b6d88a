"""Placement: which devices a request gets."""

from dataclasses import replace

import pytest
from anyaccel.errors import UnknownNameError
from anyaccel.model import UNITS_PER_DEVICE, Extent, Fractional, Health, Request, Term
from anyaccel.scheduler import Choice, parse_request
from anyaccel.scheduler.placement import choose_slots
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import length
from small_machines import GIB, chip_rule, chips, gpus, legal, machine, possible

WHOLE = UNITS_PER_DEVICE


def plan(inventory, request, *, taken=(), validate=None):
    """The devices that a request gets, term by term."""
    found = Choice(inventory, request, validate).choose({device: Extent(units) for device, units in taken})
    return found and tuple(tuple(share.device for share in grant.shares) for grant in found)


def placed(inventory, request, taken=(), validate=None):
    """The ids that a request gets, term by term."""
    found = plan(inventory, parse_request(request), taken=taken, validate=validate)
    return found and [[device.id for device in devices] for devices in found]


def test_a_share_goes_to_the_fullest_device_that_has_room():
    taken = [("h100-1", 3_000), ("h100-2", 6_000), ("h100-3", 8_000)]
    assert placed(machine(gpus(4)), "GPU:0.2", taken) == [["h100-3"]]
    assert placed(machine(gpus(4)), "GPU:0.4", taken) == [["h100-2"]]
    assert placed(machine(gpus(4)), "GPU:0.7", taken) == [["h100-1"]]
    assert placed(machine(gpus(4)), "GPU:0.8", taken) == [["h100-0"]]


def test_a_whole_device_is_never_one_that_is_shared():
    assert placed(machine(gpus(2)), "GPU:1", [("h100-0", 1)]) == [["h100-1"]]
    assert placed(machine(gpus(1)), "GPU:1", [("h100-0", 1)]) is None


def test_whole_devices_come_in_the_order_in_which_they_are_handed_out():
    inventory = machine(gpus(4, links={(1, 3): 9}))
    assert placed(inventory, "GPU:2") == [["h100-1", "h100-3"]]


def test_several_devices_are_of_one_type_unless_mixed():
    inventory = machine(gpus(1), gpus(2, "A100"))
    assert placed(inventory, "GPU:2") == [["a100-0", "a100-1"]]
    assert placed(inventory, "GPU:3") is None
    assert placed(inventory, "GPU:3,mixed") == [["h100-0", "a100-0", "a100-1"]]
    assert placed(inventory, "H100|A100:3,mixed") == [["h100-0", "a100-0", "a100-1"]]
    assert placed(inventory, "GPU:2,mixed") == [["a100-0", "a100-1"]]


def test_of_several_types_the_better_linked_one_is_taken():
    assert placed(machine(gpus(2), gpus(2, "A100", links=5)), "GPU:2") == [["a100-0", "a100-1"]]


def test_alternatives_are_tried_in_order():
    inventory = machine(gpus(1), gpus(2, "A100"))
    assert placed(inventory, "A100|H100:1") == [["a100-0"]]
    assert placed(inventory, "H100|A100:1") == [["h100-0"]]
    assert placed(inventory, "H100|A100:2") == [["a100-0", "a100-1"]]
    assert placed(inventory, "H100|A100:1", [("h100-0", WHOLE)]) == [["a100-0"]]


def test_linked_devices_are_linked_pair_by_pair_in_either_direction():
    inventory = machine(gpus(4, links={(0, 1): 1, (1, 2): 1, (0, 2): 1, (2, 3): 1}))
    assert placed(inventory, "GPU:3,linked") == [["h100-0", "h100-1", "h100-2"]]
    assert placed(inventory, "GPU:3,linked", [("h100-0", WHOLE)]) is None
    assert placed(inventory, "GPU:1,linked", [("h100-0", WHOLE)]) is not None


def test_memory_counts_per_device_and_per_share():
    inventory = machine(gpus(1, "SMALL", memory_bytes=16 * GIB), gpus(1), gpus(1, "DARK", memory_bytes=None))
    assert placed(inventory, "GPU:1,mem=40GiB") == [["h100-0"]]
    assert placed(inventory, "GPU:0.5,mem=40GiB") == [["h100-0"]]
    assert placed(inventory, "GPU:0.4999,mem=40GiB") is None
    assert placed(inventory, "DARK:1,mem=1B") is None


def test_only_usable_devices_are_placed():
    first, second, third = gpus(3)
    inventory = machine([replace(first, visible=False), replace(second, health=Health.UNHEALTHY), third])
    assert placed(inventory, "GPU:1") == [["h100-2"]]
    assert placed(inventory, "GPU:0.5") == [["h100-2"]]
    assert placed(inventory, "GPU:2") is None


def test_shares_are_only_of_devices_that_can_be_shared():
    assert placed(machine(chips(2)), "TPU:0.5") is None
    slices = gpus(2, "SLICE", fractional=Fractional.PARTITIONED)
    assert placed(machine(chips(1), slices), "tensor|acme:0.5") == [["slice-0"]]


def test_terms_are_placed_together_or_not_at_all():
    inventory = machine(gpus(1, "A100"), gpus(1))
    assert placed(inventory, "GPU:1 H100:1") == [["a100-0"], ["h100-0"]]
    assert placed(inventory, "GPU:1 A100:1") == [["h100-0"], ["a100-0"]]
    assert placed(inventory, "GPU:1 GPU:1 GPU:0.1") is None
    assert placed(inventory, "GPU:0.5 GPU:0.5 A100:1") == [["h100-0"], ["h100-0"], ["a100-0"]]


def test_a_term_gives_back_what_another_one_needs():
    overlapping = machine(gpus(1, "A"), gpus(1, "B"), gpus(1, "C"))
    assert placed(overlapping, "A|B:1 A|C:1 B|C:1") == [["a-0"], ["c-0"], ["b-0"]]
    linked = machine(gpus(4, links={(0, 1): 1, (1, 2): 3, (2, 3): 1}))
    assert placed(linked, "GPU:2,linked GPU:2,linked") == [["h100-0", "h100-1"], ["h100-2", "h100-3"]]


def test_a_vendors_rule_picks_among_sets():
    inventory = machine(chips(8))
    taken = [("chip-v5-1", WHOLE)]
    assert placed(inventory, "TPU:2", taken, chip_rule) == [["chip-v5-2", "chip-v5-3"]]
    assert placed(inventory, "TPU:4", taken, chip_rule) == [[f"chip-v5-{index}" for index in range(4, 8)]]
    assert placed(inventory, "TPU:3", (), chip_rule) is None
    assert placed(inventory, "TPU:8", taken, chip_rule) is None
    gaps = [(f"chip-v5-{index}", WHOLE) for index in (0, 2, 4)]
    assert placed(inventory, "TPU:2 TPU:1", gaps, chip_rule) == [["chip-v5-6", "chip-v5-7"], ["chip-v5-1"]]


def test_a_vendors_rule_is_asked_about_its_own_devices_only():
    asked = []

    def rule(term, devices):
        asked.append((str(term), [device.id for device in devices]))

    inventory = machine(gpus(1), chips(2))
    assert placed(inventory, "GPU|TPU:3,mixed", (), rule)
    assert asked == [("GPU|TPU:3,mixed", ["h100-0"]), ("GPU|TPU:3,mixed", ["chip-v5-0", "chip-v5-1"])]


def test_a_rule_that_raises_refuses():
    def rule(term, devices):
        raise RuntimeError("boom")

    assert placed(machine(gpus(1)), "GPU", (), rule) is None


def test_a_name_is_an_error_if_no_name_of_the_term_is_known():
    assert placed(machine(gpus(1)), "H10O|H100:1")
    with pytest.raises(UnknownNameError, match="H10O"):
        placed(machine(gpus(1)), "H10O|A10O:1")


def test_shares_of_one_request_fill_devices_exactly():
    shares = " ".join(["GPU:0.5", "GPU:0.4", "GPU:0.6", "GPU:0.5"] * 4)
    assert placed(machine(gpus(8)), shares)
    assert placed(machine(gpus(8)), shares + " GPU:0.0001") is None


def test_a_search_that_explodes_ends():
    links = {(index, index + 1): 1 for index in range(1, 23)}
    assert placed(machine(gpus(24, links=links)), " ".join(["GPU:2,linked"] * 12)) is None
    assert placed(machine(gpus(40)), "GPU:20", validate=lambda term, devices: "never") is None


term_texts = st.builds(
    Term,
    names=st.lists(st.sampled_from(["GPU", "TPU", "acme", "H100", "A100"]), min_size=1, max_size=2, unique=True).map(
        tuple
    ),
    units=st.sampled_from([1_800, 5_000, 10_000, 10_000, 20_000, 20_000, 30_000]),
    filters=st.sampled_from([(), (), (("mem", "20GiB"),), (("mem", "60GiB"),)]),
    linked=st.booleans(),
    mixed=st.booleans(),
)
pairs = st.dictionaries(st.sampled_from([(0, 1), (0, 2), (1, 2)]), st.integers(0, 2))
machines = st.builds(
    lambda links, more, count: machine(gpus(3, links=links), gpus(more, "A100", memory_bytes=40 * GIB), chips(count)),
    pairs,
    st.integers(0, 2),
    st.integers(1, 3),
)


@settings(max_examples=length(50, 300), deadline=None)
@given(machines, st.lists(term_texts, min_size=1, max_size=3), st.data())
def test_a_request_is_placed_exactly_where_trying_everything_finds_a_place(inventory, terms, data):
    request = Request(terms=tuple(terms))
    taken = {device.id: data.draw(st.sampled_from([0, 0, 3_000, 5_000, WHOLE])) for device in inventory.devices}
    free = {device_id: WHOLE - units for device_id, units in taken.items()}
    arguments = {"taken": [(key, units) for key, units in taken.items() if units], "validate": chip_rule}
    known = type(inventory)(
        machine="m", devices=(*inventory.devices, replace(gpus(1, "A100")[0], id="x", visible=False))
    )
    found = plan(known, request, **arguments)
    assert (found is not None) == possible(inventory.devices, free, request, chip_rule)
    assert found == plan(known, request, **arguments)
    for term, chosen in zip(request.terms, found or (), strict=False):
        assert legal(term, chosen, chip_rule)
        assert len({device.id for device in chosen}) == term.count
        for device in chosen:
            free[device.id] -= min(term.units, WHOLE)
    assert all(units >= 0 for units in free.values())


@given(
    free=st.integers(1, (1 << 24) - 1), total=st.sampled_from([2, 4, 5, 8, 10, 16, 20, 25]), share=st.floats(0.01, 1)
)
def test_slots_are_free_ones_and_so_many(free, total, share):
    free &= (1 << total) - 1
    count = max(1, round(free.bit_count() * share))
    if free.bit_count() >= count:
        chosen = choose_slots(free, count, total)
        assert (chosen & ~free, chosen.bit_count()) == (0, count)


@pytest.mark.parametrize(
    ("free", "count", "chosen"),
    [
        (0b11111111, 4, 0b00001111),
        (0b11111110, 1, 0b00000010),
        (0b11111110, 2, 0b00001100),
        (0b11110011, 2, 0b00000011),
        (0b11110110, 4, 0b11110000),
        (0b11111111, 3, 0b00000111),
        (0b11111000, 3, 0b01110000),
        (0b00111110, 4, 0b00011110),
        (0b10101010, 3, 0b00101010),
    ],
)
def test_slots_leave_aligned_blocks_together(free, count, chosen):
    assert choose_slots(free, count, 8) == chosen
