"""Which devices are connected best."""

from itertools import combinations

from anyaccel.model import Device
from anyaccel.model.device import bits
from anyaccel.scheduler.topology import Topology
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import length
from small_machines import gpus

PAIRS_OF_TWO = {(0, 3): 4, (1, 2): 4}


def test_links_come_before_numa_nodes():
    topology = Topology(gpus(4, links=PAIRS_OF_TWO, numa=2))
    assert topology.best_set(0b1111, 2) == 0b1001


def test_numa_nodes_come_before_pci_neighbors():
    buses = ["0000:01:00.0", "0000:81:00.0", "0000:02:00.0", "0000:82:00.0"]
    devices = [
        Device(id=str(index), index=index, model="m", pci_bus_id=bus, numa_node=numa)
        for index, (bus, numa) in enumerate(zip(buses, (0, 0, 1, 1), strict=True))
    ]
    assert Topology(devices).best_set(0b1111, 2) == 0b0011
    unknown = [Device(id=device.id, index=device.index, model="m", pci_bus_id=device.pci_bus_id) for device in devices]
    assert Topology(unknown).best_set(0b1111, 2) == 0b0101


def test_the_rest_stays_connected_where_sets_are_equally_good():
    topology = Topology(gpus(4, links={(1, 2): 1}))
    assert topology.best_set(0b1111, 1) == 0b0001
    assert topology.best_set(0b1110, 1) == 0b1000
    pair_and_three = Topology(gpus(5, links={(0, 1): 1, (0, 2): 1, (1, 2): 1, (3, 4): 1}))
    assert pair_and_three.best_set(0b11111, 2) == 0b11000


def test_without_any_difference_the_first_ones_are_taken():
    assert Topology(gpus(8, links=5)).best_set(0b11111110, 3) == 0b1110
    assert Topology(gpus(8)).best_set(0b11111110, 3) == 0b1110


def test_a_malformed_pci_address_is_no_connection():
    devices = [Device(id=str(index), index=index, model="m", pci_bus_id="nonsense") for index in range(3)]
    assert Topology(devices).best_set(0b111, 2) == 0b011


@settings(max_examples=length(25, 60), deadline=None)
@given(
    st.dictionaries(st.sampled_from(list(combinations(range(8), 2))), st.integers(1, 3)),
    st.integers(1, 255),
    st.integers(1, 6),
    st.booleans(),
)
def test_the_best_set_is_exact_on_small_machines(links, free, count, linked):
    topology = Topology(gpus(8, links=links, numa=4))
    masks = [sum(1 << position for position in chosen) for chosen in combinations(bits(free), count)]
    fit = [mask for mask in masks if not linked or topology.all_linked(mask)]
    best = topology.best_set(free, count, linked=linked)
    assert bool(best) == bool(fit)
    if best:
        assert best in fit
        assert topology.value(best, free) == max(topology.value(mask, free) for mask in fit)
        assert set(topology.sets(free, count, linked=linked)) == set(fit)


def test_islands_of_a_large_machine_are_found():
    links = {pair: 9 for first in range(0, 64, 8) for pair in combinations(range(first, first + 8), 2)}
    topology = Topology(gpus(64, links=links, numa=32))
    everything = (1 << 64) - 1
    assert topology.best_set(everything, 8) == 0xFF
    assert topology.best_set(everything & ~0xF0F, 4) == 0xF0  # a half island rather than a whole one
    assert topology.best_set(everything, 8, linked=True) == 0xFF
    assert topology.best_set(everything, 9, linked=True) == 0
    assert topology.best_set(everything, 16).bit_count() == 16
    assert all(island in (0, 0xFF) for island in topology.best_set(everything, 16).to_bytes(8, "little"))


def test_links_that_form_no_islands_are_searched_within_bounds():
    ring = {(index, index + 1): 1 for index in range(99)} | {(0, 99): 1}
    topology = Topology(gpus(100, links=ring))
    everything = (1 << 100) - 1
    chosen = list(bits(topology.best_set(everything, 4)))
    assert len(chosen) == 4
    assert topology.value(sum(1 << position for position in chosen), everything)[0] > 0
    assert topology.best_set(everything, 2, linked=True).bit_count() == 2
    assert topology.best_set(everything, 3, linked=True) == 0


def test_very_many_strengths_of_links_are_merged_in_order():
    links = {(0, index): index for index in range(1, 40)}
    topology = Topology(gpus(40, links=links))
    assert topology.linked[0] == (1 << 40) - 2
    assert max(bits(topology.best_set((1 << 40) - 1, 2))) in range(36, 40)


def test_a_whole_island_is_found_behind_many_broken_ones():
    islands = 200
    links = {pair: 9 for first in range(0, 8 * islands, 8) for pair in combinations(range(first, first + 8), 2)}
    topology = Topology(gpus(8 * islands, links=links))
    free = sum(0b01111111 << first for first in range(0, 8 * islands, 8)) | 0xFF << 8 * (islands - 1)
    assert topology.best_set(free, 8, linked=True) == 0xFF << 8 * (islands - 1)
    assert topology.best_set(free, 8) == 0xFF << 8 * (islands - 1)
    single = free & ~(0b01111110 << 8 * 150)
    assert topology.best_set(single, 1) == 1 << 8 * 150, "the one whose island is broken most"
