"""Answers of confined workers are data: what one sends makes plain values in its caller, and runs nothing there."""

import copyreg
import datetime as dt
import decimal
import fractions
import os
import pathlib
import sys
import time
import uuid

import anyaccel as aa
import numpy as np
import pytest
from anyaccel.pool.payload import dumps, dumps_error, loads
from anyaccel.pool.plain import Refused, read_plain

ITEMS = [1, 2]
PLAIN = [
    None, True, -5, 1 << 3000, 1.5, 2j, "ä\ud800", "x" * 70_000, b"a" * 300, b"b" * 70_000, bytearray(b"q"),
    [], [1, [2, [3]]], (), (1, (2,)), {}, {1: 2, "a": [1]}, {(1, 2): 3}, set(), {1, 2}, frozenset({(1, 2)}),
    range(3, 9, 2), slice(1, None, 2), dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC), dt.date(2026, 1, 2),
    dt.time(1, 2, tzinfo=dt.timezone(dt.timedelta(hours=1), "X")), dt.timedelta(1, 2, 3), decimal.Decimal("1.50"),
    fractions.Fraction(-3, 7), uuid.UUID(int=5), pathlib.PurePath("c"), pathlib.Path("/a/b"),
    pathlib.PureWindowsPath("c:/x"), [1.0] * 5000, [(i, str(i)) for i in range(2000)], [ITEMS, ITEMS],
]  # fmt: skip
ARRAYS = [
    np.arange(10), np.arange(20)[::2], np.asfortranarray(np.ones((3, 4))), np.float32(2), np.zeros((0, 3)),
    np.array(["a", "bc"]), np.array([b"x"]), np.array(["2020-01-01"], "M8[ns]"), np.timedelta64(3, "s"),
    np.zeros(3, [("a", "i4"), ("b", "f8", (2,))]), np.zeros(3, [("a", "i4")])[0], np.arange(3, dtype=">i4"),
    np.arange(100_000), np.array(5), np.bool_(True), np.str_("abc"), np.ones(50_000)[::2], np.array([1 + 2j]),
]  # fmt: skip


PLAIN_TYPES = {type(value) for value in [*PLAIN, *ARRAYS]}


def short(value):
    return repr(value)[:40]


def read(value):
    sent = dumps(value)
    return read_plain(sent.data, sent.buffers)


@pytest.mark.parametrize("value", PLAIN, ids=short)
def test_plain_values_come_as_they_were(value):
    found = read(value)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("value", ARRAYS, ids=short)
def test_arrays_come_as_they_were(value):
    found = read([value])[0]
    assert (type(found), found.dtype, found.shape) == (type(value), value.dtype, value.shape)
    assert np.all(found == value)
    assert not isinstance(found, np.ndarray) or found.flags.writeable


@pytest.mark.parametrize("dtype", ["f8", ">i2", [("a", "i4")], "M8[us]"])
def test_types_of_arrays_come_as_they_were(dtype):
    assert read({"dtype": np.dtype(dtype)}) == {"dtype": np.dtype(dtype)}


ERRORS = [
    ValueError("x", 1), KeyError("a"), FileNotFoundError(2, "no", "f"), UnicodeDecodeError("utf-8", b"x", 0, 1, "r"),
    ExceptionGroup("m", [ValueError(1)]), aa.UsageError("u", hint="h"), aa.BrokenWorkerError("t", exit_status=3),
]  # fmt: skip


@pytest.fixture(autouse=True)
def plain_exceptions(monkeypatch):
    """Other tests import libraries that register a way of their own to pickle exceptions."""
    for kind in [kind for kind in copyreg.dispatch_table if issubclass(kind, BaseException)]:
        monkeypatch.delitem(copyreg.dispatch_table, kind)


@pytest.mark.parametrize("error", ERRORS, ids=short)
@pytest.mark.parametrize("registered", [False, True])
def test_exceptions_of_python_and_ours_come_as_they_were(error, registered, monkeypatch):
    if registered:
        monkeypatch.setitem(copyreg.dispatch_table, type(error), lambda _: (Own, ()))
    error.__notes__ = ["seen"]
    found = read_plain(loads(dumps_error(error, "its traceback").data)[0])
    assert (type(found), str(found), found.__notes__) == (type(error), str(error), ["seen"])
    assert [getattr(found, name, None) for name in ("hint", "exit_status")] == [
        getattr(error, name, None) for name in ("hint", "exit_status")
    ]


class Own:
    """A class of this module."""


OWN_LIST = []
OWN_LIST.append(OWN_LIST)
DEEP = ()
WIDE = ()
for _ in range(300):
    DEEP = (DEEP,)
for _ in range(60):
    WIDE = [WIDE, WIDE]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Own(), "it holds a class or function of a script|it holds .*test_plain.Own"),
        (len, "it holds builtins.len"),
        (os.stat("/"), "it holds os.stat_result"),
        (int, "it holds builtins.int"),
        (KeyboardInterrupt(), "it holds builtins.KeyboardInterrupt"),
        (np.array([object()]), "an array of other things than numbers"),
        (np.ndarray, "it holds numpy.ndarray itself"),
        (OWN_LIST, "it holds itself"),
        (DEEP, "nested more than 200 levels"),
        (WIDE, "the same values again and again"),
    ],
    ids=["class", "function", "result", "type", "exit", "objects", "kind", "itself", "deep", "wide"],
)
def test_whatever_else_is_refused_by_name(value, why):
    with pytest.raises(Refused, match=why):
        read(value)


def attack(*instructions):
    return b"\x80\x05" + b"".join(instructions) + b"."


def text(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name(module, attribute):
    return text(module) + text(attribute) + b"\x93"


ATTACKS = {
    "a function": attack(name("os", "system"), text("touch /"), b"\x85R"),
    "a function, by the old instruction": attack(b"cos\nsystem\n", text("touch /"), b"\x85R"),
    "an instance, by the old instruction": attack(b"(ios\nsystem\n"),
    "the registry of copyreg": attack(b"\x82\x01"),
    "a persistent id": attack(b"Pid\n"),
    "a place in the memo that fills the memory": attack(b"Nr\xff\xff\xff\xff"),
    "a length that fills the memory": attack(b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f"),
    "a negative length": attack(b"\x8b\xff\xff\xff\xff"),
    "attributes of a class": attack(name("uuid", "UUID"), b"N}", text("hex"), b"N\x86\x86b"),
    "attributes of a list": attack(b"]}", text("x"), b"Nsb"),
    "a number with a long power of ten": attack(name("fractions", "Fraction"), text("1e999999999"), b"\x85R"),
    "a key that takes for ever to hash": attack(b"})", *(b"\x94h" + bytes([i]) + b"\x86" for i in range(60)), b"Ns"),
    "a key that breaks the stack": attack(b"})" + b"\x85" * 1_000_000 + b"Ns"),
    "a list that grows once it is in another one": attack(b"]\x94]\x94h\x00ah\x00h\x01a0"),
    "a type of arrays with fields outside of its size": attack(
        name("numpy", "dtype"), text("V1"), b"\x85R", dumps((3, "|", None, ("a",), {"a": (np.dtype("f8"), 9)}, 1, 1, 0))
        .data[13:-1], b"b",
    ),
    "an array that is larger than its memory": attack(
        name("numpy._core.numeric", "_frombuffer"), b"(C\x08" + bytes(8), dumps(np.dtype("f8")).data[11:-1],
        b"J\xff\xff\xff\x00\x85", text("C"), b"tR",
    ),
    "a class that is not called": attack(name("uuid", "UUID")),
    "an object that is not finished": attack(name("uuid", "UUID"), b")\x81"),
    "a damaged stack": attack(b"(K\x01"),
    "two values": attack(b"K\x01K\x02"),
    "no end": b"\x80\x05N",
    "nothing": b"",
    "a buffer that is not there": attack(b"\x97"),
}  # fmt: skip


@pytest.mark.parametrize("data", ATTACKS.values(), ids=ATTACKS)
def test_an_attack_is_refused_at_once(data):
    before = time.monotonic()
    with pytest.raises(Refused):
        read_plain(data)
    assert time.monotonic() - before < 30


def test_any_damage_is_refused_or_makes_plain_values():
    whole = dumps({"a": [1, 2.5, (3, b"x")], "b": {4, 5}, "c": np.arange(3), "d": uuid.UUID(int=3)}).data
    for place in range(len(whole)):
        for change in (1, 0x80, 0xFF):
            damaged = whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :]
            try:
                found = read_plain(damaged)
            except Refused:
                continue
            assert type(found) in {
                dict,
                int,
                float,
                bytes,
                str,
                list,
                tuple,
                set,
                type(None),
                bool,
                np.ndarray,
                uuid.UUID,
            }


# In pools


RUN = "import sys; sys.modules['attacked'] = sys"


class Attack:
    """Its pickle runs code wherever it is unpickled."""

    def __reduce__(self):
        return exec, (RUN,)


class AttackError(Exception):
    def __reduce__(self):
        return exec, (RUN,)


def fail(error, *arguments):
    raise error(*arguments)


@pytest.fixture(params=["by choice", "by enforcing"])
def plain(request, pool):
    """A pool that reads plain answers."""
    from anyaccel.launcher.sandbox import available

    if request.param == "by choice":
        return pool("A1:1", results="plain")
    if available():
        pytest.skip(f"workers cannot be confined here: {available()}")
    return pool("A1:1", enforce=True)


WAY_OUT = r"return numbers, texts, lists, dicts or arrays, or make the pool with results='pickle'"


def test_what_a_worker_returns_runs_nothing_in_its_caller(plain):
    with pytest.raises(aa.RemoteError, match=rf"the result of Attack must be .* it holds builtins.exec; {WAY_OUT}"):
        plain.submit(Attack).result()
    with pytest.raises(aa.RemoteError, match="AttackError: a text"):
        plain.submit(fail, AttackError, "a text").result()
    with pytest.raises(aa.RemoteError, match=r"it holds builtins\.exec"):
        list(plain.map(lambda _: Attack(), [1]))
    assert "attacked" not in sys.modules


def test_an_actor_answers_with_plain_values_too(plain):
    class Maker:
        def make(self, kind, *arguments):
            return kind(*arguments)

    actor = plain.actor(Maker)
    with pytest.raises(aa.RemoteError, match=r"it holds builtins\.exec"):
        actor.make(Attack).result()
    assert actor.make(pow, 2, 5).result() == 32
    assert "attacked" not in sys.modules


def test_without_it_what_a_worker_returns_runs(pool):
    """Else the tests above would show nothing."""
    try:
        pool().submit(Attack).result()
        assert "attacked" in sys.modules
    finally:
        sys.modules.pop("attacked", None)


def test_plain_answers_and_errors_arrive(plain):
    assert plain.submit(lambda: {"loss": 0.5, "steps": [1, 2]}).result() == {"loss": 0.5, "steps": [1, 2]}
    large = plain.submit(np.arange, 200_000).result()
    assert (large == np.arange(200_000)).all()
    with pytest.raises(FileNotFoundError) as caught:
        plain.submit(open, "/no/such").result()
    assert caught.value.filename == "/no/such"
    with pytest.raises(KeyError, match="k") as caught:
        plain.submit(fail, KeyError, "k").result()
    assert "raise error(*arguments)" in str(caught.value.__cause__)


def test_an_initializer_that_fails_says_so(pool):
    broken = pool(results="plain", initializer=fail, initargs=(AttackError, "/no/such/directory"))
    with pytest.raises(aa.BrokenPoolError, match="AttackError"):
        broken.submit(pow, 2, 2).result()


def test_who_wants_it_unpickles_what_confined_workers_send(pool):
    assert pool(enforce="try", results="pickle").submit(decimal.Context).result().prec == decimal.Context().prec
    assert pool().submit(decimal.Context).result().prec == decimal.Context().prec, "as does every other pool"
    with pytest.raises(aa.UsageError, match="results must be 'plain', 'pickle' or None"):
        pool(results="json")


def test_an_array_is_no_reason_to_import_numpy(script):
    caller = script(
        """
        import sys, anyaccel as aa
        with aa.Pool(results="plain") as pool:
            def array():
                import numpy
                return numpy.arange(3)
            error = pool.submit(array).exception()
        print("numpy" in sys.modules, "numpy has not been imported here" in str(error))
        """
    )
    assert caller.communicate() == ("False True\n", "")
