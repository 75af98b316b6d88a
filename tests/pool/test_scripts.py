"""Functions of a script, which travel by value, see the globals that a worker of ``ProcessPoolExecutor`` would show."""

import sys

import pytest


@pytest.fixture
def answers(script):
    """Run a script whose ``pool(**options)`` makes pools; returns the lines that it prints."""

    def answers(body, first=""):
        head = first + "import os\nimport anyaccel as aa\ndef pool(**options):\n"
        head += "    return aa.Pool(machine='sim:A1:2', max_calls=0, max_workers=1, **options)\n"
        out, err = script(head + body).communicate(timeout=60)
        assert not err, err
        return out.splitlines()

    return answers


def test_calls_see_what_the_initializer_has_set(answers):
    assert answers("""
MODEL = None
SEEN = []
FACTOR = 2
class MessageKind:
    def value(self):
        return NAME
def helper(m):
    global NAME
    NAME = m + "!"
def load(m):
    global MODEL
    MODEL = MessageKind()
    SEEN.append(m)
    helper(m)
def see(x=None):
    return isinstance(MODEL, MessageKind), MODEL.value(), SEEN, x and x(), FACTOR
class Actor:
    def see(self):
        return see()
with pool(initializer=load, initargs=("big",)) as p:
    print(*p.submit(see).result())
    FACTOR = 3
    print(*p.submit(see, lambda: NAME).result())
    print(*list(p.map(see, [None, None, None], chunksize=2))[2])
    print(p.submit(lambda: NAME).result(), p.submit(eval, "1").result())
    print(*p.actor(Actor).see().result())
    print(MODEL, SEEN)
with pool(initializer=load, initargs=("small",)).options(max_calls=1) as p:
    print(*p.submit(see).result())
""") == [
        "True big! ['big'] None 2",
        "True big! ['big'] big! 3",
        "True big! ['big'] None 3",
        "big! 1",
        "True big! ['big'] None 3",
        "None []",
        "True small! ['small'] None 3",
    ]


def test_calls_share_what_the_initializer_has_set(answers):
    assert answers("""
def begin():
    global COUNT
    COUNT = 0
def add():
    global COUNT
    COUNT += 1
    return COUNT
def get():
    return COUNT
with pool(initializer=begin) as p:
    print(p.submit(add).result(), p.submit(add).result(), p.submit(get).result(), p.submit(lambda: COUNT).result())
""") == ["1 2 2 2"]


def test_an_initializer_that_is_no_plain_function(answers):
    assert answers("""
from functools import partial
def load(name, *, more):
    global MODEL
    MODEL = name + more
class Loader:
    def __call__(self):
        load("a", more="c")
    def load(self):
        load("a", more="d")
def see():
    return MODEL
for each in partial(load, "a", more="b"), Loader(), Loader().load, lambda: load("a", more="e"):
    with pool(initializer=each) as p:
        print(p.submit(see).result())
""") == ["ab", "ac", "ad", "ae"]


TABLE = """
import os
class Table:
    def __init__(self, value):
        self.value = value
    def __setstate__(self, state):
        self.__dict__ = state
        os.environ["LOADS"] = str(int(os.environ.get("LOADS", 0)) + 1)
"""


def test_functions_and_their_globals_travel_once_for_each_batch(answers, tmp_path):
    (tmp_path / "table.py").write_text(TABLE)
    assert answers("""
from table import Table
TABLE = Table(5)
def look(x):
    return TABLE.value + x, os.environ["LOADS"]
with pool() as p:
    print(list(p.map(look, [2] * 4, chunksize=2)))
    TABLE.value = 6
    print(p.submit(look, 1).result())
""") == ["[(7, '1'), (7, '1'), (7, '2'), (7, '2')]", "(7, '3')"]


def test_what_has_changed_is_sent_again(answers):
    assert answers("""
from functools import partial, wraps
FACTOR = 1
LIST = [1]
def helper():
    return FACTOR
def f(x=0):
    return helper() + x, even(3), sum(LIST)
def even(n):
    return n == 0 or odd(n - 1)
def odd(n):
    return n != 0 and even(n - 1)
def outer(*values):
    total = 0
    def inner(n):
        nonlocal total
        total += sum(values)
        return total if n < 1 else inner(n - 1)
    return inner
def logged(function):
    @wraps(function)
    def wrapper(*args):
        return "called", function(*args)
    return wrapper
@logged
def decorated(x):
    return x * FACTOR
def size():
    return len(BIG)
def read(key):
    return globals().get(key)
def local():
    return os.path.basename(__file__), __name__
with pool() as p:
    call = lambda *args: p.submit(*args).result()
    print(call(f), call(f, 1))
    FACTOR = 2
    print(call(f), call(f))
    def helper():
        return FACTOR * 10
    print(call(f), call(f))
    LIST.append(5)
    print(call(f), call(f))
    f.__defaults__ = (7,)
    print(call(f))
    del helper
    try:
        call(f)
    except NameError as error:
        print(error)
    helper = lambda: 0
    print(call(f), call(f))
    f.__code__ = (lambda x=0: x).__code__
    print(call(f))
    print(call(outer(1, 2), 1), call(outer(1, 2), 1), call(outer(3), 0))
    print([call(lambda: n) for n in range(600)] == list(range(600)))
    print(call(decorated, 3), call(partial(decorated, 4)), call(decorated, 3))
    for BIG in bytes(1000), bytes(3 << 20), bytearray(3 << 20), [0] * 10:
        print(call(size), call(size))
    print(call(local))
""") == [
        "(1, False, 1) (2, False, 1)",
        "(2, False, 1) (2, False, 1)",
        "(20, False, 1) (20, False, 1)",
        "(20, False, 6) (20, False, 6)",
        "(27, False, 6)",
        "name 'helper' is not defined",
        "(7, False, 6) (7, False, 6)",
        "7",
        "6 6 3",
        "True",
        "('called', 6) ('called', 8) ('called', 6)",
        "1000 1000",
        "3145728 3145728",
        "3145728 3145728",
        "10 10",
        "('program.py', '__main__')",
    ]


def test_classes_of_the_script_are_those_of_the_call(answers):
    assert answers("""
N = 0
class MessageKind:
    more = 0
    def value(self):
        return N + MessageKind.more
def f():
    return MessageKind().value()
with pool() as p:
    for N in 0, 5, 0, 5:
        print(p.submit(f).result(), p.submit(f).result(), p.submit(MessageKind().value).result())
    MessageKind.more = 7
    print(p.submit(f).result())
""") == ["0 0 0", "5 5 5", "0 0 0", "5 5 5", "12"]


def test_calls_that_are_taken_back_bring_their_function_along(answers):
    assert answers("""
import time
def quick(x):
    return x
def slow(x):
    time.sleep(0.2)
    return x
def die(x):
    os._exit(1)
with aa.Pool(machine="sim:A1:2", max_calls=0, max_workers=2, retries=0) as p:
    for each in quick, slow, quick:
        list(p.map(quick, range(50)))
        first = [p.submit(each if x % 20 == 7 else quick, x) for x in range(200)]
        print([future.result() for future in first] == list(range(200)))
    ends = p.submit(die, 1)
    rest = [p.submit(quick, x) for x in range(100)]
    print([future.result() for future in rest] == list(range(100)), type(ends.exception()).__name__)
with aa.Pool(machine="sim:A1:2", max_calls=0, max_workers=1, retries=1) as p:
    def once(path):
        if not os.path.exists(path):
            open(path, "w").close()
            os._exit(1)
        return "twice"
    print(p.submit(once, __file__ + ".done").result())
""") == ["True", "True", "True", "True BrokenWorkerError", "twice"]


def test_what_cloudpickle_loses_of_a_script_comes_through(answers):
    """Slots of classes, caches of functions and, in Python 3.11, cached properties."""
    assert answers("""
import functools
from dataclasses import dataclass
from typing import NamedTuple
@dataclass(slots=True)
class Point:
    x: int
@dataclass(slots=True)
class Named(Point):
    name: str = "n"
class Hidden:
    __slots__ = ("__x",)
    def __init__(self, x):
        self.__x = x
    def x(self):
        return self.__x
class Pair(NamedTuple):
    x: int
class Model:
    @functools.cached_property
    def weights(self):
        return [1, 2]
    @functools.lru_cache(maxsize=3)
    def score(self, x):
        return x * 2
@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
def add(x):
    return fibonacci(10) + x
def closed(k):
    @functools.cache
    def times(x):
        return k * x
    return times
with pool() as p:
    for kind in (Point, Named, Pair):
        made = p.submit(kind, 3).result()
        back = p.submit(lambda it: it, kind(4)).result()
        print(made.x, isinstance(made, kind), back == kind(4), hasattr(made, "__dict__"))
    print(p.submit(Hidden, 5).result().x(), p.submit(Hidden(6).x).result())
    print(p.submit(lambda: Model().weights).result(), p.submit(Model().score, 4).result())
    print(p.submit(fibonacci, 10).result(), *p.map(add, [1, 2]), p.submit(closed(3), 4).result())
    print(p.submit(lambda: fibonacci).result().cache_parameters(), Model.score.cache_parameters()["maxsize"])
""") == [
        *["3 True True False"] * 3,
        "5 6",
        "[1, 2] 8",
        "55 56 57 12",
        "{'maxsize': None, 'typed': False} 3",
    ]


def test_annotations_of_a_script_may_name_what_only_type_checkers_import(answers):
    """From Python 3.14 on they are evaluated when they are read; before, they must be text for that."""
    first = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
    body = """
import functools
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from torch import Tensor
def double(x: Tensor, *, by: int = 2) -> Tensor:
    "Doubles."
    return by * x
double.note = "kept"
def add(k):
    def added(x: Tensor) -> Tensor:
        return x + k
    return added
class Layer:
    weight: Tensor
    def __init__(self, weight: Tensor):
        self.weight = weight
    def apply(self, x: Tensor) -> Tensor:
        return self.weight * x
    async def later(self, x: Tensor) -> Tensor:
        return self.apply(x)
def generate(count: Tensor):
    yield from range(count)
def describe(function):
    return function.__doc__, function.__name__, function.note, function.__annotations__, function(1)
with pool() as p:
    print(p.submit(double, 3).result(), p.submit(add(4), 3).result(), *p.map(double, [1, 2]), *p.stream(generate, 2))
    print(p.submit(Layer(2).apply, 3).result(), p.submit(Layer(2).later, 4).result())
    print(p.submit(functools.partial(double, by=5), 3).result(), p.submit(lambda x: Layer(x), 6).result().weight)
    print(p.submit(describe, double).result())
    print(p.submit(lambda: Layer.__annotations__).result())
    print(p.actor(Layer, 7).apply(2).result())
"""
    assert answers(body, first) == [
        "6 7 2 4 0 1",
        "6 8",
        "15 6",
        "('Doubles.', 'double', 'kept', {'x': 'Tensor', 'by': 'int', 'return': 'Tensor'}, 2)",
        "{'weight': 'Tensor'}",
        "14",
    ]


def test_a_class_of_a_script_keeps_its_annotations(answers):
    """Which cloudpickle loses from Python 3.14 on."""
    assert answers("""
import enum
class Setting:
    rate: float
    name: str = "adam"
class Kind(enum.Enum):
    value: int
    A = 1
with pool() as p:
    print(p.submit(lambda: (Setting.__annotations__, Kind.__annotations__)).result())
""") == ["({'rate': <class 'float'>, 'name': <class 'str'>}, {'value': <class 'int'>})"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs Python 3.12, for the statement 'type'")
def test_an_alias_of_a_script_is_sent(answers):
    assert answers("""
import typing
type Json = dict[str, Json] | list[Json] | int
type Pair[T] = tuple[T, T]
if typing.TYPE_CHECKING:
    from torch import Tensor
type Unknown = list[Tensor]
def twice(x: Json) -> Pair[int]:
    return x, x
class Box:
    content: Json
    def keep(self, x: Json, y: Unknown = ()) -> Json:
        return x
def names_itself(alias):
    return alias.__value__.__args__[0].__args__[1] is alias, alias.__name__, alias.__module__
with pool() as p:
    print(p.submit(twice, 3).result(), p.submit(Box().keep, 4).result())
    print(p.submit(names_itself, Json).result(), p.submit(lambda: Pair[int].__value__).result())
    print(p.submit(lambda: Json).result().__value__.__args__[2], typing.get_type_hints(Box)["content"] is Json)
""") == ["(3, 3) 4", "(True, 'Json', '__main__') tuple[T, T]", "<class 'int'> True"]
