"""Answers of confined workers are data: what one sends makes plain values in its caller, and runs nothing there."""

import datetime as dt
import decimal
import fractions
import os
import pathlib
import pickle
import struct
import sys
import tracemalloc
import uuid

import anyaccel as aa
import msgpack
import numpy as np
import pytest
from anyaccel.pool import messages, plain
from anyaccel.pool.messages import MessageKind
from anyaccel.pool.plain import TYPES, NotPlainError, dumps, loads
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from lengths import length
from raw_messages import head, say

ITEMS = [1, 2]
PLAIN = [
    None, True, -5, 1 << 3000, 1.5, 2j, "ä\ud800", "x" * 70_000, b"a" * 300, b"b" * 70_000, bytearray(b"q"),
    [], [1, [2, [3]]], (), (1, (2,)), {}, {1: 2, "a": [1]}, {(1, 2): 3}, set(), {1, 2}, frozenset({(1, 2)}),
    range(3, 9, 2), slice(1, None, 2), dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC), dt.date(2026, 1, 2),
    dt.time(1, 2, tzinfo=dt.timezone(dt.timedelta(hours=1), "X")), dt.timedelta(1, 2, 3), dt.UTC,
    decimal.Decimal("1.50"), fractions.Fraction(-3, 7), uuid.UUID(int=5), pathlib.PurePath("c"), pathlib.Path("/a/b"),
    pathlib.PureWindowsPath("c:/x"), [1.0] * 5000, [(i, str(i)) for i in range(2000)], [ITEMS, ITEMS],
]  # fmt: skip
ARRAYS = [
    np.arange(10), np.arange(20)[::2], np.asfortranarray(np.ones((3, 4))), np.float32(2), np.zeros((0, 3)),
    np.array(["a", "bc"]), np.array([b"x"]), np.array(["2020-01-01"], "M8[ns]"), np.timedelta64(3, "s"),
    np.zeros(3, [("a", "i4"), ("b", "f8", (2,))]), np.zeros(3, [("a", "i4")])[0], np.arange(3, dtype=">i4"),
    np.arange(100_000), np.array(5), np.bool_(True), np.str_("abc"), np.str_(), np.ones(50_000)[::2],
    np.array([1 + 2j]), np.zeros(2, []), np.zeros(2, [(("A", "a"), "i4")]),
]  # fmt: skip


PLAIN_TYPES = {type(value) for value in [*PLAIN, *ARRAYS]}


def short(value):
    return repr(value)[:40]


def read(value):
    sent = dumps(value)
    return loads(sent.data, sent.buffers)


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


@pytest.mark.parametrize(
    "value", [[dt.datetime(2026, 1, 2, tzinfo=dt.UTC)] * 500, [dt.datetime.now(dt.UTC) for _ in range(500)],
              list(np.arange(500)), list(np.zeros(500, [("a", "i4"), ("b", "M8[s]")]))],
    ids=["one time", "times", "scalars", "records"],
)  # fmt: skip
def test_a_list_of_values_that_have_a_timezone_or_a_dtype_in_common_may_have_any_length(monkeypatch, value):
    monkeypatch.setattr(plain, "MOST_REPEATED", 100)
    assert read(value) == value
    with pytest.raises(NotPlainError, match="the same values again and again"):
        read(WIDE)


@pytest.mark.parametrize("dtype", ["f8", ">i2", [("a", "i4")], "M8[us]"])
def test_types_of_arrays_come_as_they_were(dtype):
    assert read({"dtype": np.dtype(dtype)}) == {"dtype": np.dtype(dtype)}


ERRORS = [
    ValueError("x", 1), KeyError("a"), FileNotFoundError(2, "no", "f"), UnicodeDecodeError("utf-8", b"x", 0, 1, "r"),
    ExceptionGroup("m", [ValueError(1)]), aa.UsageError("u", hint="h"), aa.BrokenWorkerError("t", exit_status=3),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=short)
@pytest.mark.parametrize("form", [messages, plain])
def test_exceptions_of_python_and_ours_come_as_they_were(error, form):
    error.__notes__ = ["seen"]
    found = form.loads(form.loads(messages.dumps_error(error, "its traceback", form).data)[0])
    assert (type(found), str(found), found.__notes__) == (type(error), str(error), ["seen"])
    assert [getattr(found, name, None) for name in ("hint", "exit_status")] == [
        getattr(error, name, None) for name in ("hint", "exit_status")
    ]


class Own:
    """A class of this module."""


class Proxy:
    """A class whose instances run code for each attribute, as proxies do."""

    def __getattr__(self, name):
        raise ValueError(f"no connection for {name}")


class Number(int):
    """A class derived from a plain one."""


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
        (Own(), "it holds .*test_plain.Own"),
        (Own, "it holds .*test_plain.Own"),
        (Proxy(), "it holds .*test_plain.Proxy"),
        (type("Decimal", (), {"__module__": "decimal"})(), r"it holds decimal\.Decimal"),
        (Number(3), "it holds .*test_plain.Number"),
        (memoryview(b"x"), "it holds builtins.memoryview"),
        (msgpack.ExtType(5, b"x"), "it holds msgpack.*ExtType"),
        (len, "it holds builtins.len"),
        (os.stat("/"), "it holds os.stat_result"),
        (int, "it holds builtins.int"),
        (KeyboardInterrupt(), "it holds builtins.KeyboardInterrupt"),
        (np.array([object()]), "an array of other things than numbers"),
        (np.ndarray, "it holds numpy.ndarray"),
        (np.ma.array([1]), "it holds numpy.*MaskedArray"),
        (OWN_LIST, "or holds itself"),
        (DEEP, "nested more than 200 levels"),
        pytest.param(WIDE, "the same values again and again", marks=pytest.mark.full),  # here with a lower limit, above
    ],
    ids=[
        "instance",
        "class",
        "proxy",
        "namesake",
        "derived",
        "memory",
        "extension",
        "function",
        "result",
        "type",
        "exit",
        "objects",
        "kind",
        "masked",
        "itself",
        "deep",
        "wide",
    ],
)
def test_whatever_else_is_refused_by_name(value, why):
    with pytest.raises(NotPlainError, match=why):
        read(value)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
def test_an_array_of_another_packages_numbers_is_refused(name):
    """The text of such a type is that of a plain one, or one that numpy itself refuses to read."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes: pip install ml_dtypes")
    with pytest.raises(NotPlainError, match="it holds an array of other things than numbers"):
        read(np.zeros(3, getattr(ml_dtypes, name)))


def integer(value):
    return {"int": [value.to_bytes(value.bit_length() // 8 + 1, "little")]}


MODULUS = 2**61 - 1
"""Of Python's hashes of numbers."""


def keys_of_one_hash():
    return [integer(number * MODULUS) for number in range(8, 10_000)]


LARGE = {"int": [b"\x7f" * 1_000_000]}
LARGE_KEY = integer(10**500_000 // MODULUS * MODULUS)
DECIMAL_KEY = {"decimal.Decimal": [str(MODULUS)]}
F8 = {"numpy.dtype": ["<f8"]}
NUMPY_NUMBER = {"numpy.generic": [{"numpy.dtype": ["<i8"]}, struct.pack("<q", 1 << 31)]}

ATTACKS = {
    "a function": {"os.system": ["touch /"]},
    "a class of ours": {"anyaccel.pool.plain.PlainType": [1, 2]},
    "a class of Python": {"object": []},
    "an exit": {"SystemExit": [{"tuple": []}, {"dict": []}]},
    "parts that are none": {"tuple": 7},
    "a map of nothing": {},
    "a map of two": {"tuple": [], "set": []},
    "an extension": msgpack.ExtType(5, b"x"),
    "an extension of nothing": msgpack.ExtType(5, b""),
    "a time stamp": msgpack.Timestamp(5),
    "zeros that fill the memory": {"bytearray": [1 << 31]},
    "zeros of an array that fill the memory": {"numpy.ndarray": [F8, [1 << 28], "C", True, 1 << 31]},
    "zeros of an array that a number of numpy counts": {"numpy.ndarray": [F8, [1 << 28], "C", True, NUMPY_NUMBER]},
    "zeros of a scalar that fill the memory": {"numpy.generic": [F8, 1 << 31]},
    "endless arguments": {"ValueError": [{"range": [0, 1 << 26, 1]}, {"dict": []}]},
    "endless bytes of a number": {"int": [{"range": [0, 1 << 26, 1]}]},
    "an endless shape": {"numpy.ndarray": [F8, {"range": [1, 1 << 26, 1]}, "C", True, bytes(8)]},
    "an endless shape of a type": {"numpy.dtype": [F8, {"range": [1, 1 << 26, 1]}]},
    "endless names": {"numpy.dtype": [{"range": [1, 1 << 26, 1]}, [], 8]},
    "a shape of very many dimensions": {"numpy.ndarray": [F8, [1 << 60] * 100_000, "C", True, bytes(8)]},
    "a long power of ten as the number of a UUID": {"uuid.UUID": [{"decimal.Decimal": ["1e999999999"]}, None]},
    "a date of bytes": {"datetime.datetime": [b"\x07\xea\x01\xff\xff\xff\xff\xff\xff\xff", None, 0]},
    "a time of bytes": {"datetime.time": [b"\xff\xff\xff\xff\xff\xff", None, 0]},
    "a number with a long power of ten": {"fractions.Fraction": ["1e999999999"]},
    "a range of large numbers": {"range": [0, LARGE, LARGE]},
    "a fraction of large numbers": {"fractions.Fraction": [LARGE, 7]},
    "an integer of a decimal": {"decimal.Decimal": [LARGE]},
    "keys of one hash": lambda: {"set": keys_of_one_hash()},
    "keys of a dict of one hash": lambda: {"dict": [each for key in keys_of_one_hash() for each in (key, 0)]},
    "keys that take long to compare": {"set": [LARGE_KEY, DECIMAL_KEY]},
    "tuples that take long to compare": {"frozenset": [{"tuple": [LARGE_KEY]}, {"tuple": [DECIMAL_KEY]}]},
    "a list as a key": {"dict": [[], 1]},
    "a key without a value": {"dict": [1]},
    "a day that there is not": {"datetime.date": [2026, 2, 30]},
    "an hour that there is not": {"datetime.datetime": [2026, 1, 2, 99, 0, 0, 0, None, 0]},
    "attributes that are none": {"ValueError": [{"tuple": []}, []]},
    "an exception of ours without a text": {"anyaccel.errors.UsageError": [{"tuple": []}, {"dict": []}]},
    "a type of objects": {"numpy.dtype": ["|O"]},
    "a type of objects among fields": {"numpy.dtype": ["i4,O"]},
    "a type that is a text": {"numpy.ndarray": ["O", [1], "C", True, bytes(8)]},
    "a type of no seconds": {"numpy.dtype": ["<M8[0s]"]},
    "fields outside of a type": {"numpy.dtype": [["a"], [[F8, 9, None]], 1]},
    "fields before a type": {"numpy.dtype": [["a"], [[F8, -8, None]], 8]},
    "fields of a type that is a text": {"numpy.dtype": [["a"], [["O", 0, None]], 8]},
    "an array that is larger than its memory": {"numpy.ndarray": [F8, [9], "C", True, bytes(8)]},
    "an array that is smaller than its memory": {"numpy.ndarray": [F8, [1], "C", True, bytes(16)]},
    "an array of negative size": {"numpy.ndarray": [F8, [-1, -1], "C", True, bytes(8)]},
    "an array of too many items": {"numpy.ndarray": [{"numpy.dtype": ["|V0"]}, [1 << 40, 1 << 40], "C", True, b""]},
    "an array of an order that there is not": {"numpy.ndarray": [F8, [1], "X", True, bytes(8)]},
    "a buffer that is not there": {"numpy.ndarray": [F8, [1], "C", True, 0]},
    "a scalar of two": {"numpy.generic": [F8, bytes(16)]},
}  # fmt: skip
DAMAGED = {
    "nothing": b"",
    "a pickle": b"\x80\x05cos\nsystem\n(S'touch /'\ntR.",
    "a name that is a number": b"\x81\x07\x90",
    "a name that is a list": b"\x81\x90\x90",
    "a byte that means nothing": b"\xc1",
    "a text that is none": b"\xa1\xff",
    "two values": b"\x01\x02",
    "no end": b"\x93\x01\x02",
    "a list without an end": b"\xdd\xff\xff\xff\xff",
    "lists without an end": (b"\xdd" + struct.pack(">I", 1 << 16)) * 1000 + bytes(1 << 16),
    "bytes without an end": b"\xc6\xff\xff\xff\xff",
    "a text without an end": b"\xdb\xff\xff\xff\xff",
    "a map without an end": b"\xdf\xff\xff\xff\xff",
    "lists that break the stack": b"\x91" * 1_000_000 + b"\x01",
    "tuples that break the stack": b"\x81\xa5tuple\x91" * 1_000_000 + b"\x01",
}


@pytest.mark.parametrize("name", [*ATTACKS, *DAMAGED])
def test_an_attack_is_refused_and_takes_little_memory(name):
    """A list begins with room for what it says it will hold, as far as the package allows, at each of 1024 levels."""
    form = ATTACKS.get(name)
    data = DAMAGED[name] if name in DAMAGED else msgpack.packb(form() if callable(form) else form)
    tracemalloc.start()
    try:
        with pytest.raises(NotPlainError):
            loads(data)
        assert tracemalloc.get_traced_memory()[1] < (100 << 20) + 100 * len(data)
    finally:
        tracemalloc.stop()


def test_keys_of_one_hash_are_well_as_long_as_they_are_few():
    steps = {(x, y, z) for x in range(-3, 3) for y in range(-3, 3) for z in range(-3, 3)}
    for value in (steps, {-1: 1, -2: 2, 10**400: 3}, {decimal.Decimal(-1), decimal.Decimal(-2)}):
        assert read(value) == value


def test_a_reason_of_a_worker_fits_on_a_line():
    with pytest.raises(NotPlainError) as caught:
        loads(msgpack.packb({"refused": ["\x1b[2J\n" * 1000]}))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_an_exception_gets_no_attribute_that_its_class_has():
    names = ["own", "args", "__cause__", "with_traceback", "no name"]
    state = {"dict": [each for name in names for each in (name, 1)]}
    found = loads(msgpack.packb({"ValueError": [{"tuple": ["x"]}, state]}))
    assert (type(found), found.args, found.__cause__, vars(found)) == (ValueError, ("x",), None, {"own": 1})


def test_large_arrays_keep_the_memory_that_they_came_in():
    sent = dumps({"a": np.zeros(50_000), "b": np.asfortranarray(np.ones((300, 300)))})
    assert len(sent.data) < 500
    memory = [bytearray(buffer) for buffer in sent.buffers]
    found = loads(sent.data, list(map(memoryview, memory)))
    memory[0][:8] = struct.pack("=d", 7.0)
    assert found["a"][0] == 7
    assert found["b"].flags.f_contiguous


@pytest.mark.parametrize("size", [3, 50_000])
def test_an_array_that_is_only_read_stays_so(size):
    array = np.arange(size)
    array.flags.writeable = False
    assert not read(array).flags.writeable


# Anything at all

KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
    | st.text(st.characters()) | st.binary() | st.fractions() | st.decimals(allow_nan=False) | st.uuids()
    | st.dates() | st.times() | st.datetimes() | st.timedeltas() | st.text("ab/.").map(pathlib.PurePosixPath)
    | st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)).map(dt.timezone),
    lambda keys: st.lists(keys, max_size=4).map(tuple) | st.frozensets(keys, max_size=4),
    max_leaves=8,
)  # fmt: skip
LEAVES = (
    KEYS | st.binary().map(bytearray) | st.builds(slice, KEYS) | st.builds(range, st.integers(), st.integers())
    | npst.arrays(npst.scalar_dtypes() | npst.array_dtypes(), npst.array_shapes(min_dims=0, min_side=0))
    | st.builds(ValueError, KEYS) | st.builds(aa.UsageError, st.text(), hint=st.text())
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda values: st.lists(values, max_size=4) | st.lists(values, max_size=4).map(tuple)
    | st.dictionaries(KEYS, values, max_size=4) | st.sets(KEYS, max_size=4),
    max_leaves=8,
)  # fmt: skip
FORMS = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
    | st.sampled_from(["<f8", "|S3", "<M8[s]", "C", "F"]),
    lambda forms: st.lists(forms, max_size=7) | st.dictionaries(st.sampled_from(list(TYPES)), forms, max_size=1)
    | st.dictionaries(st.sampled_from(list(TYPES)), st.lists(forms, max_size=9), min_size=1, max_size=1),
    max_leaves=20,
)  # fmt: skip


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, Exception):
        return same(one.args, other.args) and same(vars(one), vars(other))
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return one == other


def assert_plain(value):
    """Whatever is in a value, and in that."""
    assert type(value) in PLAIN_TYPES or isinstance(value, (Exception, np.generic, np.dtype))
    assert not isinstance(value, (np.ndarray, np.generic, np.dtype)) or not getattr(value, "dtype", value).hasobject
    if isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            assert_plain(item)
    elif isinstance(value, dict):
        assert_plain([*value, *value.values()])
    elif isinstance(value, Exception):
        assert f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.") in TYPES
        assert_plain([value.args, vars(value)])


def assert_refused_or_plain(data):
    modules = set(sys.modules)
    try:
        found = loads(data)
    except NotPlainError:
        found = None
    assert_plain(found)
    assert set(sys.modules) == modules


@given(VALUES)
@settings(deadline=None)
def test_any_plain_value_comes_as_it_was(value):
    assert same(value, read(value))


@given(FORMS)
@settings(deadline=None, max_examples=length(50, 500))
def test_whatever_a_type_is_said_to_be_made_of_is_refused_or_plain(form):
    assert_refused_or_plain(msgpack.packb(form))


@given(VALUES, st.data())
@settings(deadline=None)
def test_any_damage_is_refused_or_plain(value, data):
    whole = bytearray(dumps([value, {"a": 1}]).data)
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    assert_refused_or_plain(bytes(whole))


@given(st.binary())
def test_any_bytes_are_refused_or_plain(data):
    assert_refused_or_plain(data)


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
def plain_pool(request, pool):
    """A pool that reads plain answers."""
    from anyaccel.launcher.sandbox import find_obstacle

    if request.param == "by choice":
        return pool("A1:1", results="plain")
    if find_obstacle():
        pytest.skip(f"workers cannot be confined here: {find_obstacle()}")
    return pool("A1:1", enforce=True)


WAY_OUT = r"return numbers, texts, lists, dicts or arrays, or make the pool with results='pickle'"


def test_what_a_worker_returns_runs_nothing_in_its_caller(plain_pool):
    with pytest.raises(
        aa.RemoteError, match=rf"the result of Attack must be .* it holds .*test_plain.Attack; {WAY_OUT}"
    ):
        plain_pool.submit(Attack).result()
    with pytest.raises(aa.RemoteError, match="AttackError: a text") as caught:
        plain_pool.submit(fail, AttackError, "a text").result()
    assert "or make the pool with results='pickle'" in caught.value.hint
    with pytest.raises(aa.RemoteError, match=r"it holds .*Attack"):
        list(plain_pool.map(lambda _: Attack(), [1]))
    assert "attacked" not in sys.modules


@pytest.mark.parametrize("kind", [MessageKind.RESULT, MessageKind.ERROR])
def test_what_a_worker_says_in_its_place_is_data_too(plain_pool, kind):
    """Of which it writes the bytes itself."""
    attack = pickle.dumps(Attack())

    def lie(number):
        return say(head(kind, 0, number) + attack)

    from anyaccel.pool import call

    plain_pool.submit(pow, 1, 1).result()
    number = next(call._numbers) + 1
    with pytest.raises(aa.RemoteError, match="it is damaged"):
        plain_pool.submit(lie, number).result()
    assert "attacked" not in sys.modules


def test_an_actor_answers_with_plain_values_too(plain_pool):
    class Maker:
        def make(self, kind, *arguments):
            return kind(*arguments)

    actor = plain_pool.actor(Maker)
    with pytest.raises(aa.RemoteError, match=r"it holds .*Attack"):
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


def test_plain_answers_and_errors_arrive(plain_pool):
    assert plain_pool.submit(lambda: {"loss": 0.5, "steps": [1, 2]}).result() == {"loss": 0.5, "steps": [1, 2]}
    large = plain_pool.submit(np.arange, 200_000).result()
    assert (large == np.arange(200_000)).all()
    with pytest.raises(FileNotFoundError) as caught:
        plain_pool.submit(open, "/no/such").result()
    assert caught.value.filename == "/no/such"
    with pytest.raises(KeyError, match="k") as caught:
        plain_pool.submit(fail, KeyError, "k").result()
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
