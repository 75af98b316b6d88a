"""The order of those who wait."""

from anyaccel.scheduler.queue import Queue


def queue(*items):
    """A queue of (name, priority, mask), in the order of arrival."""
    made = Queue()
    for number, (name, priority, mask) in enumerate(items):
        made.add(name, priority=priority, number=number, mask=mask)
    return made


def served(made, changed, *able):
    """Who is placed when those in ``able`` could be."""
    placed = []
    made.serve(changed, lambda name: name in able and not placed.append(name))
    return placed


def test_priority_comes_before_arrival():
    made = queue(("late", 0, 1), ("early", 0, 1), ("first", 5, 1), ("last", -1, 1))
    assert list(made) == ["first", "late", "early", "last"]
    assert served(made, 1, *made) == ["first", "late", "early", "last"]
    assert list(made) == []


def test_nobody_passes_a_rival():
    made = queue(("a", 0, 0b01), ("ab", 0, 0b11), ("b", 0, 0b10))
    assert served(made, 0b11, "ab", "b") == []
    assert served(made, 0b11, "a") == ["a"]
    assert served(made, 0b11, "b") == []
    assert served(made, 0b11, "ab", "b") == ["ab", "b"]


def test_who_wants_other_devices_may_pass():
    assert served(queue(("a", 0, 0b01), ("b", 0, 0b10)), 0b11, "b") == ["b"]


def test_who_is_unconcerned_is_not_looked_at_unless_somebody_in_front_left():
    assert served(queue(("a", 0, 0b01), ("b", 0, 0b10)), 0b01, "a", "b") == ["a"]
    assert served(queue(("ab", 0, 0b11), ("b", 0, 0b10)), 0b01, "ab", "b") == ["ab", "b"]


def test_only_those_in_front_block_a_newcomer():
    made = queue(("a", 1, 0b01), ("b", 0, 0b10))
    assert made.blocked(priority=0, mask=0b01)
    assert made.blocked(priority=1, mask=0b11)
    assert not made.blocked(priority=2, mask=0b11)
    assert not made.blocked(priority=1, mask=0b10)
    assert not made.blocked(priority=0, mask=0b100)


def test_those_ahead_are_named_in_order():
    made = queue(("a", 0, 0b01), ("b", 0, 0b10), ("c", 3, 0b11))
    assert list(made.ahead(priority=0, number=1, mask=0b10)) == ["c"]
    assert list(made.ahead(priority=0, number=9, mask=0b11)) == ["c", "a", "b"]


def test_who_leaves_is_gone_once():
    made = queue(("a", 0, 1), ("b", 0, 1))
    assert made.remove(priority=0, number=0, mask=1)
    assert not made.remove(priority=0, number=0, mask=1)
    assert not made.remove(priority=0, number=7, mask=4)
    assert list(made) == ["b"]
