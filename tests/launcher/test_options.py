"""The options that the functions have in common: one list of names, and one message for a name that is not in it."""

import asyncio
from functools import partial

import anyaccel as aa
import pytest
from anyaccel.errors import UnknownOptionError

MACHINE = "sim:A1:2"


@pytest.fixture
def of_a_pool():
    """The pool of which a function is another with other options."""
    with aa.Pool(shared=False) as pool:
        yield pool.options


FUNCTIONS = {
    "run": partial(aa.run, "A1", ["true"]),
    "acquire": partial(aa.acquire, "A1"),
    "acquire_async": lambda **options: asyncio.run(aa.acquire_async("A1", **options)),
    "use": partial(aa.use, "A1"),
    "prepare": partial(aa.prepare, "A1"),
    "Pool": partial(aa.Pool, "A1"),
}


@pytest.mark.parametrize("function", [*FUNCTIONS, "Pool.options"])
def test_a_mistyped_option_is_refused_with_the_nearest_name(function, acme, of_a_pool):
    call = FUNCTIONS.get(function, of_a_pool)
    typed, meant = ("timeuot", "timeout") if function == "Pool.options" else ("memroy", "memory")
    for kind in (UnknownOptionError, aa.UsageError, TypeError):
        with pytest.raises(kind) as caught:
            call(**{typed: 1})
        assert str(caught.value) == f"{function}() has no option {typed!r}"
        assert caught.value.hint == f"did you mean {meant!r}?"
    assert aa.leases(aa.detect(MACHINE)) == ()


def test_an_option_that_is_like_none_gets_the_list(acme, of_a_pool):
    with pytest.raises(UnknownOptionError) as caught:
        of_a_pool(zzz=1)
    assert caught.value.hint == "its options are needs, timeout, max_calls, retries, max_concurrency, ahead"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_value_that_makes_no_sense_is_refused_by_each_function_alike(function, acme):
    for name, values in {"mask": "'id' or 'index'", "enforce": "True, False or 'try'"}.items():
        with pytest.raises(aa.UsageError) as caught:
            FUNCTIONS[function](**{name: "much"})
        assert str(caught.value) == f"{name} must be {values} (got 'much')"
    with pytest.raises(aa.UsageError, match="memory must be a number with a unit"):
        FUNCTIONS[function](memory="much")


def test_what_is_for_a_process_that_starts_is_refused_by_use(acme):
    for name, value in {"memory": "1GiB", "enforce": True, "environ": {}}.items():
        with pytest.raises(aa.UsageError, match=f"^{name} applies to a process that is about to start"):
            aa.use("A1", machine=MACHINE, **{name: value})


def test_run_takes_the_options_of_subprocess_and_those_of_acquire(acme):
    program = "import os; print(os.environ['ACME_VISIBLE'], os.getcwd())"
    done = aa.run(
        "A1", ["python3", "-c", program], machine=MACHINE, mask="index", avoid_busy=True, cwd="/", check=True,
        capture_output=True, encoding="utf-8",
    )  # fmt: skip
    assert done.stdout == "0 /\n"
