"""File names: reversible, safe, and harmless whatever they say."""

import os

import pytest
from anyaccel.ledger import entries
from anyaccel.model import DIVIDED, Extent
from hypothesis import given
from hypothesis import strategies as st

PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=128)


@given(PRINTABLE, st.sampled_from([Extent(), Extent(1), Extent(5000, 0xF0), Extent(9999, (1 << 32) - 1), DIVIDED]))
def test_every_printable_id_can_be_written_and_read(own, extent):
    device = entries.device_name("", own)
    text = entries.encode(device)
    assert entries.decode(text) == device
    assert "/" not in text
    assert "." not in text
    name = entries.lease_name(device, extent, entries.new_nonce(), (4_194_304, 10**15))
    assert len(name) <= 255
    lease = entries.parse_lease(name)
    assert (lease.device, lease.extent, lease.understood) == (device, extent, True)


VENDORS = st.from_regex(r"[a-z][a-z0-9_]{0,31}", fullmatch=True)


TIMES = st.integers(0, (1 << 40) - 1)


@given(VENDORS, PRINTABLE, st.sampled_from(["", "89abcdef|0123456789ab|"]), TIMES)
def test_every_device_of_every_vendor_has_a_name_that_a_file_can_have(vendor, device, scope, time):
    named = entries.device_name(vendor, device, scope)
    assert entries.device_name(vendor, f"{vendor}/{device}", scope) == named
    owner, period = (4_194_304, 10**15), entries.Period(time, time)
    name = entries.lease_name(named, Extent(9999, (1 << 32) - 1), entries.new_nonce(), owner, (1, 2, 3), period)
    assert len(name) <= 255
    lease = entries.parse_lease(name)
    assert (lease.device, lease.understood) == (named, True)


@given(st.none() | TIMES, st.none() | TIMES)
def test_a_lease_says_when_it_ends_and_when_it_passed_others(until, passed):
    """Whatever digits the two times have."""
    wanted = entries.Period(until, None if until is None else passed)
    name = entries.lease_name("a", Extent(), entries.new_nonce(), period=wanted)
    assert entries.parse_lease(name).period == wanted


def test_long_ids_of_one_vendor_have_different_names():
    one, other = (entries.device_name("acme", "x" * 150 + last, "89abcdef|") for last in "ab")
    assert one != other


def test_of_what_another_version_wrote_the_device_is_read_and_all_of_it_counts():
    name = entries.lease_name("acme/GPU-0", Extent(2500), entries.new_nonce())
    assert name.startswith("v2.acme%2FGPU-0.2500.")
    newer = entries.parse_lease(name.replace("v2.", "v9.", 1))
    assert (newer.device, newer.extent, newer.understood) == ("acme/GPU-0", Extent(), False)
    older = entries.parse_lease("v2.GPU-0.acme.2500.1.1.0000000000000000.e1b2.0123456789abcdef0123")
    assert (older.device, older.extent, older.understood) == ("acme/GPU-0", Extent(), False)


SHORT = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=50)


@given(SHORT, SHORT)
def test_two_ids_are_never_written_alike(one, other):
    assert (entries.encode(one) == entries.encode(other)) == (one == other)


@pytest.mark.parametrize("device", ["", "x" * 151, "/" * 51, "a\nb", "a\0b", "é", "a\x7f"])
def test_other_ids_are_refused(device):
    with pytest.raises(ValueError, match="must be 1 to 150 printable ASCII characters"):
        entries.encode(device)


@given(st.text(max_size=255) | st.from_regex(r"[vt]\d{1,2}\.[^/]{0,100}", fullmatch=True))
def test_no_name_raises(name):
    for parse in (entries.parse_lease, entries.parse_ticket, entries.parse_hidden):
        parse(name)


def test_a_lease_says_who_took_it():
    lease = entries.parse_lease(entries.lease_name("0000:01:00.0", Extent(2500), entries.new_nonce()))
    assert (lease.device, lease.extent, lease.pid) == ("0000:01:00.0", Extent(2500), os.getpid())
    assert lease.boot == entries.boot()
    assert lease.understood


def test_a_lease_says_what_its_processes_carry():
    mark = (5, 7)
    lease = entries.parse_lease(entries.lease_name("a", Extent(2500, 0b1100), entries.new_nonce(), (0, 0), mark))
    assert (lease.extent, lease.mark, lease.pid, lease.understood) == (Extent(2500, 0b1100), mark, 0, True)


@pytest.mark.parametrize(
    "name",
    [
        "v2.a.5000.1.1.0000000000000000.0123456789abcdef012",
        "v2.a.5000.1.1.0000000000000000.0123456789abcdef0123.more",
        "v2.a.5000.1.1.0123456789abcdef0123",
        "v2.a.5000.1.1.7ffffffffffffffe.0123456789abcdef0123",
        "v2.a.5000.1.1.0000000000000001.0123456789abcdef0123",
        "v2.a.5000.1.1.ffffffffffffffff.0123456789abcdef0123",
        "v2.a.0-1.1.1.0000000000000000.0123456789abcdef0123",
        "v2.a.10001.1.1.0000000000000000.0123456789abcdef0123",
        "v2.a.5000-.1.1.0000000000000000.0123456789abcdef0123",
        "v2.a.5000-0.1.1.0000000000000000.0123456789abcdef0123",
        "v2.a.5000-100000000.1.1.0000000000000000.0123456789abcdef0123",
        "v3.a.5000.1.1.0000000000000000.0123456789abcdef0123",
        "v1.a",
    ],
)
def test_what_is_not_understood_means_the_whole_device(name):
    lease = entries.parse_lease(name)
    assert (lease.device, lease.extent, lease.understood) == ("a", Extent(), False)


@pytest.mark.parametrize("name", ["v1", "v1.", "v1..1.1.1.x", "v.a.b", "v1.%zz.1", "v1.%41.1", "v1.=YQ.1", "v1.=!.1"])
def test_what_names_no_device_is_no_lease(name):
    assert entries.parse_lease(name) is None


@given(st.lists(st.tuples(st.integers(-1_000_000, 1_000_000), st.integers(1, 10**12)), max_size=20))
def test_the_order_of_names_is_the_order_of_service(tickets):
    written = {
        entries.ticket_name(priority, number, "0" * 20, frozenset("a")): (-priority, number)
        for priority, number in tickets
    }
    assert [written[name] for name in sorted(written)] == sorted(written.values())


@pytest.mark.parametrize("count", [0, 1, 8, 20, 21, 1024])
def test_a_ticket_says_what_is_wanted_where_there_is_room(count):
    wanted = frozenset(f"GPU-{number}" for number in range(count))
    name = entries.ticket_name(0, 10**15, entries.new_nonce(), wanted)
    assert len(name) <= 255
    ticket = entries.parse_ticket(name)
    assert ticket.wanted == (entries.hashes(wanted) if count <= 20 else None)
